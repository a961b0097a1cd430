"""Policies by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flow_grpo.models import registry
from flow_grpo.models.fake_policy import FakePolicy
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
    with pytest.raises(ConfigError, match=r"model\.kind: got 'sora', must be one of recam or FILE.py:NAME; "):
        registry.build_policy(load_config(TINY, ["--config.model.kind=sora"]), CPU)


def test_a_policy_may_be_a_class_of_the_user_s_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    methods = "".join(f"    {name} = None\n" for name in (*registry.METHODS, "module"))
    start = "    def __init__(self, *given):\n        self.given = given\n"
    text = f"class MyPolicy:\n{methods}{start}"
    Path("my_models.py").write_text(text)
    config = load_config(TINY, ["--config.model.kind=my_models.py:MyPolicy"])
    assert registry.build_policy(config, CPU).given == (config.model, config.sample, CPU)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class MyPolicy:\n    def __init__(self, model):\n        pass\n", r"must take \(model, sample, device\)"),
        ("def MyPolicy(model, sample, device):\n    return 3\n", "int has no camera_parameters, decode, encode"),
        ("", "must name a function or class of my_models.py"),
    ],
)
def test_an_own_policy_that_is_none_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    Path("my_models.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        registry.build_policy(load_config(TINY, ["--config.model.kind=my_models.py:MyPolicy"]), CPU)


def test_a_plan_of_another_network_is_refused():
    with pytest.raises(ConfigError, match=r"must be recam for a dry run or a plan"):
        FakePolicy(load_config(TINY, ["--config.model.kind=my_models.py:MyPolicy"]))
