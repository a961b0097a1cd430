"""Policies by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flow_grpo.models import registry
from flow_grpo.settings.loading import ConfigError, load_config

TINY = f"{Path(__file__).resolve().parents[2]}/config/grpo.py:tiny_recam"
CPU = torch.device("cpu")


def test_the_policy_is_the_one_that_model_kind_names(monkeypatch):
    made = []
    monkeypatch.setitem(registry.POLICIES, "toy", lambda model, sample, device: made.append((model, sample, device)))
    config = load_config(TINY, ["--config.model.kind=toy"])
    registry.build_policy(config, CPU)
    assert made == [(config.model, config.sample, CPU)]


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"model\.kind: got 'sora', must be one of recam; "):
        registry.build_policy(load_config(TINY, ["--config.model.kind=sora"]), CPU)
