"""The walk in shapes: those of a real epoch where one can be run, those of the requirements at full size."""

from __future__ import annotations

import dataclasses
import resource

import pytest
import torch

import train_grpo
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.preflight import dry_run
from flow_grpo.preflight.fake_policy import outline, without_memory
from flow_grpo.settings.loading import load_config

CPU = torch.device("cpu")


def walked(recipe: str, devices: int, *changes: str) -> tuple[dict[tuple[str, str], tuple[int, ...]], object]:
    config = load_config(f"config/grpo.py:{recipe}", changes)
    data = config.data
    sigmas = flow_sigmas(config.sample.num_steps, config.sample.shift).tolist()
    with without_memory():
        seen = dry_run.walk(outline(config), config, (data.num_frames, data.height, data.width), sigmas, devices)
    return {(shape.phase, shape.name): shape.shape for shape in seen}, config


def test_the_real_recipe_has_the_shapes_of_the_requirements():
    """sampling.md 001-9, 001-10, 001-11, 001-14; T is the number of trained steps, K (decisions.md 11)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found, _ = walked("my_recam_8npu", 8)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**20
    latents = (16, 21, 60, 104)
    assert found["epoch", "latents"] == found["epoch", "next_latents"] == (4, 2, *latents)
    assert found["epoch", "log_probs"] == found["epoch", "timesteps"] == (4, 2)
    assert found["epoch", "target_cameras"] == (4, 21, 12)
    assert found["epoch", "source_latents"] == (4, *latents)
    assert found["epoch", "prompt_embeds"] == (4, 512, 4096)
    assert found["gather", "rewards"] == (32,)
    assert found["gather", "rewards.avg over steps"] == (32, 2)
    assert found["decode", "videos"] == (2, 3, 81, 480, 832)
    assert found["data", "source_video"] == (3, 81, 480, 832)
    assert found["micro-batch", "log_prob"] == (2,)
    assert grown < 1.0, f"{grown:.2f} GiB were allocated"  # a real transformer alone takes 3


def test_the_walk_has_the_shapes_of_a_real_rollout():
    found, config = walked("tiny_recam", 2, "--config.sample.guidance_scale=2.0")
    policy = RecamPolicy.from_config(config.model, config.sample, CPU)
    size = (config.data.num_frames, config.data.height, config.data.width)
    video = torch.rand(3, *size)
    conditions = [dataclasses.replace(dry_run._condition(size, row, "a room"), source_video=video) for row in range(16)]
    encoded = policy.encode(conditions)
    for name, tensor in encoded.tensors().items():
        assert found["encode", name] == tuple(tensor.shape), name
    assert found["rollout", "final_latents"] == (16, *policy.latent_shape(conditions))
    assert found["decode", "videos"] == tuple(policy.decode(encoded.source_latents).shape)


def test_videos_that_do_not_fit_the_model_are_refused_before_there_is_one(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    words = ["--config", "config/grpo.py:my_recam_8npu", "--config.dry_run=True", "--config.data.height=472"]
    assert train_grpo.main(words) == 2
    assert "must be multiples of 16x16" in capsys.readouterr().err


def test_the_command_prints_shapes_and_plan_once(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = ["--config", "config/grpo.py:tiny_recam", "--config.dry_run"]
    assert train_grpo.main(words) == 0
    said = capsys.readouterr().out
    assert "[64, 2, 32, 5, 3, 4]" in said and "samples_per_epoch               128" in said
    assert said.splitlines()[-1].startswith("fits: ")
    monkeypatch.setenv("RANK", "1")
    assert train_grpo.main(words) == 0
    assert not capsys.readouterr().out


@pytest.mark.parametrize("trained", ["lora", "attention", "full"])
def test_every_trained_tensor_has_a_part_in_the_loss(trained):
    walked("tiny_recam", 2, f"--config.model.trained={trained}", "--config.model.dtype=bf16")
