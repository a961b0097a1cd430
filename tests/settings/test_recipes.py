"""The recipes keep what they promise."""

import dataclasses
import re
from pathlib import Path

import pytest

from config import grpo
from config.base import get_config
from flow_grpo.rewards.base import build_reward_set
from flow_grpo.settings.checks import check_world
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config

ROOT = Path(__file__).resolve().parents[2]
RANKS = {"my_recam_1gpu": 1, "my_recam_1gpu_footage": 1, "my_recam_2node": 16, "my_recam_full": 8}
RANKS |= {"redirector_8npu": 8, "wan_t2v_8npu": 8}
RANKS |= {f"my_recam_8npu{kind}": 8 for kind in ("", "_tiny", "_dapo", "_dapo_tiny", "_fast", "_footage", "_small")}
RANKS |= {"room_recam": 2, "room_recam_footage": 2, "tiny_recam": 2, "tiny_recam_hacking": 2, "tiny_wan_t2v": 2}


def recipe(name: str) -> Config:
    return load_config(f"{ROOT}/config/grpo.py:{name}")


@pytest.mark.parametrize("name", RANKS)
def test_a_recipe_passes_every_check_on_its_own_number_of_ranks(name: str) -> None:
    check_world(recipe(name), RANKS[name])


def test_every_recipe_is_tested() -> None:
    found = {name for name, value in vars(grpo).items() if callable(value) and value.__module__ == grpo.__name__}
    assert found == set(RANKS)


def test_adapters_of_my_recam_8npu_are_those_of_self_attention() -> None:
    targets = recipe("my_recam_8npu").model.lora_targets
    assert re.fullmatch(targets, "blocks.29.attn1.to_out.0")
    assert not re.fullmatch(targets, "blocks.29.attn2.to_q")


@pytest.mark.parametrize(
    ("name", "batch", "conditions", "samples", "local"),
    [
        *((name, 16, 8, 32, 4) for name in RANKS if "8npu" in name and name != "my_recam_8npu_small"),
        ("my_recam_8npu_small", 32, 16, 128, 16),
        ("my_recam_1gpu", 4, 4, 16, 16),
        ("my_recam_2node", 32, 8, 64, 4),
    ],
)
def test_recipes_sample_what_their_comments_say(name, batch, conditions, samples, local) -> None:
    sample, ranks = recipe(name).sample, RANKS[name]
    assert sample.num_image_per_prompt == sample.k == (8 if name in ("my_recam_2node", "my_recam_8npu_small") else 4)
    assert ranks * sample.train_batch_size == batch
    assert ranks * sample.expanded_batch_size == samples
    assert samples // sample.k == conditions
    assert sample.expanded_batch_size == local


def test_the_fast_recipe_draws_noise_in_the_first_half_only() -> None:
    sample = recipe("my_recam_8npu_fast").sample
    assert max(sample.sde_steps) < sample.num_steps / 2


def test_the_dapo_recipes_differ_from_their_bases_in_dynamic_sampling_and_what_it_judges_by() -> None:
    full, base = recipe("my_recam_8npu_dapo"), recipe("my_recam_8npu")
    assert full.dynamic_sampling.enabled and not base.dynamic_sampling.enabled
    assert (full.dynamic_sampling.max_resample_times, full.dynamic_sampling.policy) == (3, "fallback_original")
    assert dataclasses.replace(full, dynamic_sampling=base.dynamic_sampling) == base
    tiny, small = recipe("my_recam_8npu_dapo_tiny"), recipe("my_recam_8npu_tiny")
    assert dataclasses.replace(tiny, dynamic_sampling=small.dynamic_sampling, reward=small.reward) == small
    assert tiny.dynamic_sampling == dataclasses.replace(full.dynamic_sampling, metric="target_view")
    assert full.dynamic_sampling.metric in full.reward.weights


def test_the_twin_takes_every_number_of_my_recam_8npu_but_sizes() -> None:
    twin, full = recipe("my_recam_8npu_tiny"), recipe("my_recam_8npu")
    assert (twin.sample, twin.train) == (full.sample, full.train)
    assert (twin.model.trained, twin.model.lora_full_modules) == (full.model.trained, full.model.lora_full_modules)
    assert twin.model.lora_alpha / twin.model.lora_rank == full.model.lora_alpha / full.model.lora_rank
    normalisation = ("adv_norm", "adv_eps", "adv_ddof", "flat_eps")
    assert all(getattr(twin.reward, name) == getattr(full.reward, name) for name in normalisation)


@pytest.mark.parametrize(
    ("name", "world", "gold"), [("tiny_recam", "tiny", "room_pose"), ("room_recam", "furnished", "room_tracks")]
)
def test_a_demo_is_for_2_cores_and_its_judge_is_no_reward(name: str, world: str, gold: str) -> None:
    config = recipe(name)
    assert config.model.path == f"assets/{name}" and config.data.tiny_world == world
    assert config.max_minutes > 10 and config.num_threads == 1
    assert config.eval.gold == gold and gold not in config.reward.weights


def test_the_demo_s_rewards_know_no_true_view() -> None:
    assert not {"target_psnr", "target_view", "view_disp"} & {*recipe("room_recam").reward.weights}


def test_the_footage_recipe_s_rewards_ask_for_no_poses_of_the_source_and_no_true_view() -> None:
    rewards = build_reward_set(recipe("my_recam_1gpu_footage").reward.weights, data_root=".").rewards
    asked = {field for reward in rewards for field in getattr(reward, "needs", ())}
    assert asked == {"source_video", "target_poses", "intrinsics"}


def test_recipes_do_not_share_state() -> None:
    first = grpo.tiny_recam()
    first.sample.k = 2
    first.reward.weights.motion_mag = 9.0
    assert grpo.tiny_recam().sample.k != 2
    assert "motion_mag" not in get_config().reward.weights
