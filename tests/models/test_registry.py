"""Policies by name."""

import dataclasses
from pathlib import Path

import pytest
import torch

from flow_grpo.models import registry
from flow_grpo.models.fake_policy import FakePolicy
from flow_grpo.settings.loading import ConfigError, load_config

ROOT = Path(__file__).resolve().parents[2]
TINY = f"{ROOT}/config/grpo.py:tiny_recam"
CPU = torch.device("cpu")


def test_the_policy_is_of_the_model_that_model_kind_names(monkeypatch):
    toy = dataclasses.replace(registry.VIDEO_MODELS["recam"], origin="a toy")
    monkeypatch.setitem(registry.VIDEO_MODELS, "toy", toy)
    assert registry.build_policy(load_config(TINY, ["--config.model.kind=toy"]), CPU).model is toy


def test_a_model_of_the_user_s_own_is_served_like_those_here(tmp_path, monkeypatch):
    config = load_config(TINY, ["--config.model.kind=mine.py:MINE", f"--config.model.path={ROOT}/assets/tiny_recam"])
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from flow_grpo.models.recam import RECAM\nMINE = RECAM\n")
    assert registry.build_policy(config, CPU).model is registry.VIDEO_MODELS["recam"]
    assert FakePolicy(config).model.network is registry.VIDEO_MODELS["recam"].network


def test_an_unknown_policy_is_refused_with_those_there_are():
    said = r"model\.kind: got 'sora', must be one of recam, redirector, wan_t2v or FILE.py:NAME; "
    with pytest.raises(ConfigError, match=said):
        registry.build_policy(load_config(TINY, ["--config.model.kind=sora"]), CPU)


def test_a_policy_may_be_a_class_of_the_user_s_own_which_no_plan_can_be_made_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    others = [name for name in (*registry.METHODS, "module") if not name.endswith("_parameters")]
    methods = "".join(f"    {name} = None\n" for name in others)
    start = "    def __init__(self, *given):\n        self.given, self.own = given, [nn.Parameter(torch.ones(1))]\n"
    start += "    def trained_parameters(self):\n        return self.own\n"
    start += "    def camera_parameters(self):\n        return self.own\n"
    text = f"import torch\nfrom torch import nn\nclass MyPolicy:\n{methods}{start}"
    Path("my_models.py").write_text(text)
    config = load_config(TINY, ["--config.model.kind=my_models.py:MyPolicy", "--config.model.boundary_ratio=0"])
    assert registry.build_policy(config, CPU).given == (config.model, config.sample, CPU)
    split = load_config(TINY, ["--config.model.kind=my_models.py:MyPolicy", "--config.model.boundary_ratio=0.1"])
    with pytest.raises(ConfigError, match=r"boundary_ratio: got 0\.1, must be 0 for MyPolicy, .* without"):
        registry.build_policy(split, CPU)
    sparse = dataclasses.replace(config, sample=dataclasses.replace(config.sample, ode_calls="sparse"))
    with pytest.raises(ConfigError, match=r"ode_calls: got 'sparse', must be 'exact' for MyPolicy, .* without approx"):
        registry.build_policy(sparse, CPU)
    small = dataclasses.replace(config, model=dataclasses.replace(config.model, reward_decoder="taew.safetensors"))
    with pytest.raises(ConfigError, match=r"reward_decoder: got 'taew.safetensors', must be '' for MyPolicy"):
        registry.build_policy(small, CPU)
    with pytest.raises(ConfigError, match=r"makes a policy of its own, .* sampled from is only a VideoModel"):
        FakePolicy(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("class MyPolicy:\n    def __init__(self, model):\n        pass\n", r"must take \(model, sample, device\)"),
        ("def MyPolicy(model, sample, device):\n    return 3\n", "int has no camera_parameters, decode, encode"),
        ("", "must name a function or class or VideoModel of my_models.py"),
    ],
)
def test_an_own_policy_that_is_none_is_refused(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    Path("my_models.py").write_text(text)
    with pytest.raises(ConfigError, match=message):
        registry.build_policy(load_config(TINY, ["--config.model.kind=my_models.py:MyPolicy"]), CPU)
