"""Tensor shapes of an epoch on fake tensors: those of the real policy, and those of the full-size recipe."""

import dataclasses
import resource

import pytest
import torch

import train_grpo
from flow_grpo.models.fake_policy import FakePolicy
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.preflight import dry_run
from flow_grpo.settings.loading import load_config
from tests.refusals import refusal
from tests.toy import condition


def shapes_of(recipe: str, devices: int, *changes: str) -> tuple[dict[tuple[str, str], tuple[int, ...]], object]:
    config = load_config(f"config/grpo.py:{recipe}", changes)
    size = (config.data.num_frames, config.data.height, config.data.width)
    return {name: tuple(found.shape) for name, found in dry_run.epoch_tensors(config, size, devices).items()}, config


def test_the_real_recipe_has_the_shapes_of_its_settings_and_allocates_nothing():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, _ = shapes_of("my_recam_8npu", 8)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    latents = (16, 21, 60, 104)
    assert found["epoch", "latents"] == found["epoch", "next_latents"] == (4, 1, *latents)
    assert found["epoch", "log_probs"] == found["epoch", "timesteps"] == (4, 1)
    assert found["epoch", "target_cameras"] == (4, 21, 12)
    assert found["epoch", "source_latents"] == (4, *latents)
    assert found["epoch", "prompt_embeds"] == (4, 512, 4096)
    assert found["gather", "rewards"] == (32,)
    assert found["gather", "rewards.avg over steps"] == (32, 1)
    assert found["decode", "videos"] == (2, 3, 81, 480, 832)
    assert found["data", "source_video"] == (3, 81, 480, 832)
    assert found["micro-batch", "log_probs"] == (1, 4)  # a group with a draw of each copy
    assert found["micro-batch", "states"] == (1, 5, *latents)
    assert grown < 1.0, f"{grown:.2f} GiB were allocated"  # a real transformer alone takes 3


def test_fake_shapes_are_those_of_the_real_policy():
    found, config = shapes_of("tiny_recam", 2, "--config.sample.guidance_scale=2.0")
    policy = WanPolicy.from_config(RECAM, config.model, config.sample, torch.device("cpu"))
    size = (config.data.num_frames, config.data.height, config.data.width)
    poses = torch.eye(4, dtype=torch.float64).repeat(size[0], 1, 1)
    given = dataclasses.replace(condition(0), source_video=torch.rand(3, *size), target_poses=poses)
    encoded = policy.encode([given] * 16)
    for name, tensor in encoded.tensors().items():
        assert found["encode", name] == tuple(tensor.shape), name
    assert found["rollout", "final_latents"] == (16, *policy.latent_shape([given]))
    assert found["decode", "videos"] == tuple(policy.decode(encoded.inputs["source_latents"]).shape)


@pytest.mark.parametrize(
    "changes",
    [
        "model.trained=lora model.dtype=bf16 train.kl_coef=0.1",
        "model.trained=full train.guard=true train.updates_per_epoch=2 train.step_weight=none",
        "model.trained=full sample.share_prefix=false",
        "model.trained=attention sample.sde_window=5",
    ],
)
def test_the_update_reaches_every_trained_tensor(changes):
    shapes_of("tiny_recam", 2, *(f"--config.{change}" for change in changes.split()))


def test_a_trained_tensor_without_gradient_ends_the_dry_run(monkeypatch):
    made = FakePolicy.__init__

    def with_an_unused_weight(self, config):
        made(self, config)
        with self.fake_mode:
            self.module.register_parameter("unused", torch.nn.Parameter(torch.empty(3)))

    monkeypatch.setattr(FakePolicy, "__init__", with_an_unused_weight)
    with pytest.raises(AssertionError, match=r"^1 of \d+ trained tensors"):
        shapes_of("tiny_recam", 2)


def test_videos_that_do_not_fit_the_model_are_refused_without_weights(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = ["--config", "config/grpo.py:my_recam_8npu", "--config.dry_run=True", "--config.data.height=472"]
    assert "must be multiples of 16x16" in refusal(capsys, train_grpo.main, words)


def test_rank_0_alone_prints_shapes_and_plan(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["--config", "config/grpo.py:tiny_recam", "--config.dry_run"]
    assert train_grpo.main(words) == 0
    said = capsys.readouterr().out
    assert "[64, 1, 32, 5, 3, 4]" in said and f"{'samples_per_epoch':30s} {128:>14}" in said
    assert "what saves memory, each alone" in said and "assumed:" in said
    assert said.splitlines()[-1].startswith("fits: ")
    monkeypatch.setenv("RANK", "1")
    assert train_grpo.main(words) == 0
    assert not capsys.readouterr().out
