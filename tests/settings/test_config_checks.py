"""What cannot work is refused in one line: field, value, bound and way out."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from flow_grpo.maths import advantages, sde
from flow_grpo.settings.checks import BOUNDS, CHOICES, value_of
from flow_grpo.settings.loading import ConfigError, check_world, load_config
from flow_grpo.settings.schema import Config

ROOT = Path(__file__).resolve().parents[2]
TOY = f"{ROOT}/tests/toy_recipe.py:toy"
FULL = f"{ROOT}/config/grpo.py:my_recam_8npu"

BAD = [
    ("seed=-1", ["config.seed: got -1", "[0, inf)"]),
    ("max_minutes=-1", ["config.max_minutes: got -1.0", "[0, inf)"]),
    ("max_minutes=nan", ["config.max_minutes: got nan", "[0, inf)"]),
    ("device=gpu", ["config.device: got 'gpu'", "'auto', 'npu', 'cuda', 'cpu'"]),
    ("trackers=wandb,tensorbord", ["config.trackers: got 'tensorbord'", "did you mean 'tensorboard'?"]),
    ("trackers=wandb,wandb", ["config.trackers: got ('wandb', 'wandb')", "once"]),
    ("run_name=../elsewhere", ["config.run_name: got '../elsewhere'", "--config.output_root"]),
    ("run_name=..", ["config.run_name: got '..'"]),
    (f"run_name={'a' * 101}", ["config.run_name: got 'aaa", "at most 100"]),
    ("data.train_split=../x", ["config.data.train_split: got '../x'", "must lie below data.root"]),
    ("data.eval_split=/val", ["config.data.eval_split: got '/val'", "must lie below data.root"]),
    ("data.eval_split=train/part", ["config.data.eval_split: got 'train/part'", "must differ from data.train_split"]),
    ("data.eval_split=./train", ["config.data.eval_split: got 'train'", "must differ from data.train_split"]),
    ("reward.remote=a/b=http://h:1", ["config.reward.remote: got 'a/b'", "files are named so"]),
    ("model.lora_targets=a{99999999999999999999}", ["config.model.lora_targets", "regular expression"]),
    (f"data.height={'9' * 400}", ["config.data.height: got 999", "a whole number of at most 18 digits"]),
    ("sample.num_steps=1001", ["config.sample.num_steps: got 1001", "[2, 1000]"]),
    ("run_name=a/b", ["config.run_name: got 'a/b'"]),
    ("run_name=a\\b", ["config.run_name"]),
    ("run_name=/tmp", ["config.run_name: got '/tmp'"]),
    ("output_root=", ["config.output_root: got ''", "must not be empty"]),
    ("data.root=", ["config.data.root: got ''"]),
    ("model.path=", ["config.model.path: got ''"]),
    ("data.eval_split=train", ["config.data.eval_split: got 'train'", "data.train_split"]),
    ("data.num_frames=8", ["config.data.num_frames: got 8", "4n+1", "=9"]),
    ("data.num_frames=1", ["config.data.num_frames: got 1", "[5, inf)"]),
    ("data.height=30", ["config.data.height: got 30", "multiple of 8", "--config.data.height=32"]),
    ("data.width=833", ["config.data.width: got 833", "--config.data.width=832"]),
    ("data.reference=first", ["config.data.reference: got 'first'", "'source', 'target'"]),
    ("model.dtype=fp16", ["config.model.dtype: got 'fp16'", "'fp32', 'bf16'"]),
    ("model.trained=loar", ["config.model.trained: got 'loar'", "did you mean 'lora'?"]),
    ("model.trained=lora model.lora_targets=", ["config.model.lora_targets: got ''", "model.trained"]),
    ("model.lora_targets=blocks(", ["config.model.lora_targets: got 'blocks('", "no regular expression"]),
    ("model.lora_rank=0", ["config.model.lora_rank: got 0", "[1, inf)"]),
    ("sample.k=1", ["config.sample.k: got 1", "[2, inf)"]),
    ("sample.num_image_per_prompt=3", ["config.sample.num_image_per_prompt: got 3", "sample.k=8"]),
    ("sample.train_batch_size=0", ["config.sample.train_batch_size: got 0"]),
    ("sample.num_steps=1", ["config.sample.num_steps: got 1", "[2, 1000]"]),
    ("sample.shift=0", ["config.sample.shift: got 0.0", "(0, inf)"]),
    ("sample.shift=inf", ["config.sample.shift: got inf", "(0, inf)"]),
    ("sample.sde=ode", ["config.sample.sde: got 'ode'", "'flow', 'constant', 'linear', 'cps'"]),
    ("sample.noise_level=0", ["config.sample.noise_level: got 0.0", "(0, inf)"]),
    ("sample.sde=cps sample.noise_level=1.2", ["config.sample.noise_level: got 1.2", "at most 1", "'cps'"]),
    ("sample.noise_level=3", ["config.sample.noise_level: got 3.0", "at step 0", "drop that step"]),
    ("sample.max_step_std=0", ["config.sample.max_step_std: got 0.0"]),
    ("sample.sde_steps=", ["config.sample.sde_steps: got ()", "at least one step"]),
    ("sample.sde_steps=2,1", ["config.sample.sde_steps: got (2, 1)", "rising order"]),
    ("sample.sde_steps=1,1", ["config.sample.sde_steps: got (1, 1)", "each once"]),
    ("sample.sde_steps=-1,0", ["config.sample.sde_steps: got (-1, 0)", "0..6"]),
    ("sample.sde_steps=5,6,7", ["config.sample.sde_steps: got (5, 6, 7)", "0..6", "sample.num_steps=8"]),
    ("sample.num_steps=4", ["config.sample.sde_steps: got (0, 1, 2, 3)", "0..2", "sample.num_steps=4"]),
    ("sample.sde_window=5", ["config.sample.sde_window: got 5", "at most the 4 step(s)", "0 takes all"]),
    ("sample.guidance_scale=0.5", ["config.sample.guidance_scale: got 0.5", "[1, inf)"]),
    ("sample.layout=random", ["config.sample.layout: got 'random'", "'spread', 'shuffled', 'contiguous'"]),
    ("reward.weights.targetview=1", ["config.reward.weights: got 'targetview'", "did you mean 'target_view'?"]),
    ("reward.weights=", ["config.reward.weights: got ''", "names with weights"]),
    ("reward.weights.remote:hpsv3=1", ["'remote:hpsv3'", "--config.reward.remote.hpsv3=http://127.0.0.1:8000"]),
    ("reward.remote.clip=http://h reward.weights.remote:clop=1", ["'remote:clop'", "reward.remote.clop"]),
    ("reward.remote.hpsv3=localhost:8000", ["config.reward.remote: got", "http://HOST:PORT"]),
    ("reward.remote=hpsv3=http://me:pw@host:80", ["config.reward.remote: got", "without a password"]),
    ("reward.remote_timeout=0", ["config.reward.remote_timeout: got 0.0"]),
    ("dynamic_sampling.metric=remote:clip", ["config.dynamic_sampling.metric: got 'remote:clip'"]),
    ("reward.adv_norm=std", ["config.reward.adv_norm: got 'std'", "'batch_centered'"]),
    ("reward.adv_eps=0", ["config.reward.adv_eps: got 0.0", "(0, inf)"]),
    ("reward.adv_ddof=2", ["config.reward.adv_ddof: got 2", "[0, 1]"]),
    ("train.learning_rate=0", ["config.train.learning_rate: got 0.0"]),
    ("train.adam_beta2=1", ["config.train.adam_beta2: got 1.0", "[0, 1)"]),
    ("train.clip_range=1", ["config.train.clip_range: got 1.0", "(0, 1)"]),
    ("train.kl_coef=-0.01", ["config.train.kl_coef: got -0.01", "[0, inf)"]),
    ("train.ema_decay=1", ["config.train.ema_decay: got 1.0", "[0, 1)"]),
    ("train.step_weight=gain", ["config.train.step_weight: got 'gain'", "'none', 'inverse_gain'"]),
    ("train.updates_per_epoch=3", ["config.train.updates_per_epoch: got 3", "must divide the 64 samples", "16 x"]),
    ("train.batch_size=65", ["config.train.batch_size: got 65", "at most 64", "--config.train.batch_size=64"]),
    ("train.updates_per_epoch=8", ["config.train.batch_size: got 16", "at most 8"]),
    ("train.old_log_prob=detach train.updates_per_epoch=2", ["config.train.old_log_prob: got 'detach'", "=auto"]),
    ("model.compile=true model.dtype=bf16", ["config.train.old_log_prob: got 'auto'", "must be 'detach'", "=detach"]),
    ("train.sharding=fsdp2 data.buckets=5x24x32,5x16x16", ["config.data.buckets: got", "one video size", "=ddp"]),
    (
        "train.sharding=fsdp2 dynamic_sampling.enabled=true dynamic_sampling.policy=rebalance",
        ["config.dynamic_sampling.policy: got 'rebalance'", "policy=pad"],
    ),
    ("train.guard=true train.step_weight=inverse_gain", ["config.train.guard: got True", "'inverse_gain'"]),
    ("eval.gold=camera", ["config.eval.gold: got 'camera'", "'room_pose'"]),
    ("eval.num_conditions=3", ["config.eval.videos: got 4", "eval.num_conditions=3"]),
    ("distributed.silent_s=5400", ["config.distributed.control_s: got 3600", "1.5 x", "control_s=8100"]),
    ("train.sharding=zero3", ["config.train.sharding: got 'zero3'", "did you mean 'zero2'?"]),
    ("train.sharding=zero2 data.buckets=5x32x32,5x32x64", ["config.data.buckets: got", "'zero2'", "sharding=ddp"]),
    (
        "train.sharding=zero2 dynamic_sampling.enabled=true dynamic_sampling.policy=rebalance",
        ["config.dynamic_sampling.policy: got 'rebalance'", "'zero2'", "policy=pad"],
    ),
    ("checkpoint.every=0", ["config.checkpoint.every: got 0", "[1, inf)"]),
]


@pytest.mark.parametrize(("settings", "parts"), BAD, ids=[settings for settings, _ in BAD])
def test_a_setting_that_cannot_work_is_refused_in_one_line(settings: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^config\.[^\n]+[;?][^\n]*$") as caught:
        load_config(TOY, [f"--config.{setting}" for setting in settings.split(" ")])
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "num_epochs=0",
        "run_name=seed-1_v2.0",
        "data.num_frames=5",
        "sample.sde_steps=6 sample.sde_window=1",
        "sample.sde_window=4",
        "sample.sde=cps sample.noise_level=1",
        "sample.noise_level=3 sample.max_step_std=0.45",
        "reward.adv_ddof=1",
        "reward.remote.hpsv3=http://127.0.0.1:8000 reward.weights.remote:hpsv3=1",
        "reward.remote=a=http://h:1,b=https://h/b reward.weights=remote:b=1 dynamic_sampling.metric=remote:b",
        "reward.remote.unused=http://127.0.0.1:8000",
        "train.updates_per_epoch=4",
        "train.batch_size=64",
        "train.batch_size=3",
        "train.old_log_prob=detach",
        "model.compile=true model.dtype=bf16 train.old_log_prob=detach",
        "model.compile=true model.dtype=fp32",
        "train.sharding=fsdp2 dynamic_sampling.policy=rebalance",
        "train.guard=true",
        "eval.videos=0 eval.num_conditions=1",
    ],
)
def test_a_setting_at_the_edge_of_what_works_is_taken(settings: str) -> None:
    assert load_config(TOY, [f"--config.{setting}" for setting in settings.split(" ")])


def world(world_size: int, *overrides: str) -> None:
    check_world(load_config(FULL, overrides), world_size)


@pytest.mark.parametrize("world_size", [2, 4, 6, 8, 16])
def test_whole_groups_on_all_ranks_together_are_taken(world_size: int) -> None:
    world(world_size)


@pytest.mark.parametrize(
    ("world_size", "batch_size", "multiple", "way_out"),
    [(1, 2, 4, 4), (3, 2, 4, 4), (1, 6, 4, 8), (2, 3, 2, 4), (5, 5, 4, 8)],
)
def test_a_batch_that_holds_no_whole_groups_is_refused_with_one_that_does(
    world_size: int, batch_size: int, multiple: int, way_out: int
) -> None:
    size = f"--config.sample.train_batch_size={batch_size}"
    with pytest.raises(ConfigError, match=r"^config\.sample\.train_batch_size[^\n]+$") as caught:
        world(world_size, size)
    text = str(caught.value)
    assert f"got {batch_size}" in text and "sample.k=4" in text and f"a multiple of {multiple} on" in text
    assert text.endswith(f"--config.sample.train_batch_size={way_out}")
    world(world_size, f"--config.sample.train_batch_size={way_out}")


def test_contiguous_groups_must_be_dealt_evenly_to_the_ranks() -> None:
    world(8, "--config.sample.layout=contiguous")
    with pytest.raises(ConfigError, match=r"^config\.sample\.layout: got 'contiguous'.* 12 groups .* 8 ranks"):
        world(8, "--config.sample.layout=contiguous", "--config.sample.num_batches_per_epoch=3")


def knobs(cls: Any = Config, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(cls).items():
        path = f"{prefix}{name}"
        found |= knobs(hint, f"{path}.") if dataclasses.is_dataclass(hint) else {path: hint}
    return found


def test_every_number_has_a_bound() -> None:
    numbers = {path for path, hint in knobs().items() if hint in (int, float, float | None)}
    assert numbers - {"sample.num_image_per_prompt"} == set(BOUNDS)  # that one must equal sample.k


def test_every_bound_and_choice_belongs_to_a_knob() -> None:
    config = load_config(TOY)
    for path in [*BOUNDS, *CHOICES]:
        value_of(config, path)


def test_choices_are_those_the_maths_knows() -> None:
    assert CHOICES["reward.adv_norm"] == advantages.ADV_NORMS
    assert {"ode", *CHOICES["sample.sde"]} == set(sde.KINDS)
