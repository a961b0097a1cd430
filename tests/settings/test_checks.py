"""Knobs that cannot work together are refused in one line with the way out; those at the edge are taken."""

import re
from pathlib import Path

import pytest

from flow_grpo.settings.checks import check_world, largest_weights
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.schema import Config

ROOT = Path(__file__).resolve().parents[2]
NOISE, FORWARD, SHARE = "sample.same_initial_noise=true", "train.objective=forward", "sample.share_prefix=true"
REBALANCE = "dynamic_sampling.enabled=true dynamic_sampling.policy=rebalance"


def load(settings: str) -> Config:
    return load_config(f"{ROOT}/tests/toy_recipe.py:toy", [f"--config.{each}" for each in settings.split()])


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load("data.eval_split=train model.vae_tiles=recammaster sample.num_image_per_prompt=3")
    knobs = ("data.eval_split", "model.vae_tiles", "sample.num_image_per_prompt")
    assert all(f"config.{knob}: got" in str(caught.value) for knob in knobs)
    with pytest.raises(ConfigError, match=r"sample.k: got 0, .*; AND config.train.learning_rate: got -1.0, must"):
        load("sample.k=0 train.learning_rate=-1")


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ("data.eval_split=train", ["data.eval_split: got 'train'", "must lie apart from data.train_split='train'"]),
        ("data.eval_split=train/part", ["data.eval_split: got 'train/part'", "must lie apart"]),
        ("data.eval_split=./train", ["data.eval_split: got './train'", "must lie apart"]),
        ("data.train_split=val/part", ["data.eval_split: got 'val'", "must lie apart"]),
        ("data.prompts=a.txt", ["data.eval_prompts: got ''", "must name a file of held-out prompts"]),
        (
            "data.prompts=a.txt data.eval_prompts=b.txt data.buckets=5x32x32",
            ["data.buckets: got", "must be empty"],
        ),
        ("model.vae_tiles=recammaster", ["model.vae_tiles: got 'recammaster'", "--config.model.vae_tiling=true"]),
        ("model.trained=lora model.lora_targets=", ["model.lora_targets: got ''", "model.trained=camera"]),
        ("sample.num_image_per_prompt=3", ["sample.num_image_per_prompt: got 3", "sample.k=8"]),
        ("sample.sde_steps=-1,0", ["sample.sde_steps: got (-1, 0)", "0..6"]),
        ("sample.sde_steps=5,6,7", ["sample.sde_steps: got (5, 6, 7)", "0..6", "sample.num_steps=8"]),
        ("sample.num_steps=4", ["sample.sde_steps: got (0, 1, 2, 3)", "0..2"]),
        ("model.boundary_ratio=0.84", ["sample.sde_steps: got (0, 1, 2, 3)", "end at step 2", "boundary_ratio=0.84"]),
        (f"{FORWARD} train.trust_coef=0 model.boundary_ratio=0.91", ["forward_range: got 0.3", "at most 0.2288"]),
        ("sample.sde_window=5", ["sample.sde_window: got 5", "must divide 4", "sde_window=1"]),
        ("sample.sde_steps=0,1,3,4 sample.sde_window=0", ["sample.sde_window: got 0", "gap", "sde_window=1"]),
        ("sample.share_prefix=true", ["sample.share_prefix: got True", "same_initial_noise=true"]),
        ("sample.sde=ode", ["sample.sde: got 'ode'", "objective=forward"]),
        (f"{FORWARD} sample.sde=ode {SHARE}", ["share_prefix: got True", "needs stochastic steps", "=false"]),
        ("train.objective=forward sample.sde=ode sample.same_initial_noise=true", ["same_initial_noise: got True"]),
        ("train.objective=forward train.ema_decay=0", ["train.trust_coef: got 0.1", "ema_decay=0.9"]),
        ("train.objective=forward train.guard=true train.trust_coef=0", ["train.guard: got True", "guard=false"]),
        (f"{FORWARD} train.step_weight=inverse_gain train.trust_coef=0", ["train.step_weight: got", "weight=none"]),
        (f"{FORWARD} train.old_log_prob=rollout train.trust_coef=0", ["old_log_prob: got 'rollout'", "=auto"]),
        ("sample.sde=cps sample.noise_level=1.2", ["sample.noise_level: got 1.2", "at most 1", "'cps'"]),
        ("sample.noise_level=3", ["sample.noise_level: got 3.0", "at step 0", "drop that step"]),
        ("train.updates_per_epoch=3", ["train.updates_per_epoch: got 3", "must divide the 64 samples", "=1"]),
        ("train.copies=10", ["train.copies: got 10", "sample.k=8", "train.copies=0"]),
        (f"train.copies=4 {REBALANCE}", ["dynamic_sampling.policy: got 'rebalance'", "policy=pad"]),
        (f"{NOISE} {SHARE} train.updates_per_epoch=3", ["train.updates_per_epoch: got 3", "must divide the 8 groups"]),
        ("train.old_log_prob=detach train.updates_per_epoch=2", ["train.old_log_prob: got 'detach'", "=auto"]),
        ("model.compile=true model.dtype=bf16", ["train.old_log_prob: got 'auto'", "must be 'detach'", "=detach"]),
        ("train.guard=true train.step_weight=inverse_gain", ["train.guard: got True", "step_weight=none"]),
        ("train.sharding=fsdp2 data.buckets=5x24x32,5x16x16", ["data.buckets: got", "one video size", "=ddp"]),
        (f"train.sharding=fsdp2 {REBALANCE}", ["dynamic_sampling.policy: got 'rebalance'", "policy=pad"]),
        ("eval.split=tune", ["eval.split: got 'tune'", "data.tune_scenes is 0", "data.tune_scenes=16"]),
        ("distributed.silent_s=5400", ["distributed.control_s: got 3600", "1.5 x", "control_s=8100"]),
        ("train.objective=forward sample.ode_calls=sparse", ["ode_calls: got 'sparse'", "clean samples", "=exact"]),
        ("sample.ode_calls=sparse train.context_parallel=2", ["ode_calls: got 'sparse'", "context_parallel=1"]),
        ("reward.weights=target_view=0", ["reward.weights: got {'target_view': 0.0}", "nothing to learn"]),
        ("reward.weights=", ["reward.weights: got {}", "nothing to learn"]),
        ("reward.weights=smooth=1", ["weights.smooth: got 1.0", "stands still", "--config.reward.weights.pose_rot"]),
        ("reward.weights=smooth=1,source_match=1,pose_rot=0", ["reward.weights.smooth: got 1.0", "stands still"]),
        ("reward.weights=smooth=0,source_match=1 reward.schedules.smooth=5:0,999:1", ["smooth: got", "epoch 199"]),
        ("reward.weights=smooth=1,pose_rot=1 reward.schedules.pose_rot=4:1,5:0", ["smooth: got 1.0", "in epoch 5"]),
        ("reward.schedules.target_veiw=0:1", ["reward.schedules: got 'target_veiw'", "did you mean 'target_view'?"]),
        ("reward.schedules.motion_mag=0:1", ["measured rewards source_match, target_view", "weights.motion_mag=0"]),
        (
            "reward.schedules=target_view=0:1,5:0,source_match=5:0,9:1",
            ["reward.schedules: got", "epoch 5 ({'source_match': 0.0, 'target_view': 0.0})", "overlap"],
        ),
        ("reward.weights.source_match=0 reward.schedules.target_view=7:0,9:1", ["reward.schedules: got", "in epoch 0"]),
        ("reward.gates.target_view=pose_rot:0", ["gates.target_view: got 'pose_rot'", "measured", "pose_rot=0 to"]),
        ("reward.gates.pose_rot=source_match:0.5", ["reward.gates: got 'pose_rot'", "weights.pose_rot=0 to meas"]),
        (
            "reward.gates.target_view=motion_mag:0 reward.weights.motion_mag=0 reward.flat_eps=0",
            ["reward.flat_eps: got 0.0", "must be above 0 with reward.gates"],
        ),
        ("reward.gates.target_view=target_view:0", ["reward.gates.target_view: got 'target_view'", "another reward"]),
        ("reward.weights.room_pose=1", ["eval.gold: got 'room_pose'", "no reward uses", "weights.room_pose=0"]),
        (
            "reward.weights.room_pose=0 reward.schedules.room_pose=3:0,9:1",
            ["eval.gold: got 'room_pose'", "by reward.schedules.room_pose", "schedules.room_pose=0:0"],
        ),
        (
            "reward.weights.room_pose=0 reward.gates.target_view=room_pose:-1",
            ["eval.gold: got 'room_pose'", "reward.gates.target_view", "no reward uses"],
        ),
        ("dynamic_sampling.metric=motion_mag", ["dynamic_sampling.metric: got 'motion_mag'", "motion_mag=0 to meas"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_that_cannot_work_together_are_refused_in_one_line(settings: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"^config\.[^\n]+;[^\n]+$") as caught:
        load(settings)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        "num_epochs=0",
        "sample.sde_steps=6 sample.sde_window=1",
        "sample.sde_window=4",
        "model.boundary_ratio=0.8333",
        f"{FORWARD} train.ema_decay=0.5 model.boundary_ratio=0.91 train.forward_range=0.2288",
        "train.objective=forward train.ema_decay=0.5",
        "train.objective=forward train.trust_coef=0 sample.sde=ode sample.sde_steps=1,3",
        "sample.sde_steps=1,3,5 sample.sde_window=1",
        f"{NOISE} {SHARE}",
        f"{NOISE} {SHARE} train.sharding=fsdp2",
        "sample.sde=cps sample.noise_level=1",
        "sample.noise_level=3 sample.max_step_std=0.45",
        "train.updates_per_epoch=4 train.guard=true",
        "train.batch_size=65",
        "train.copies=8",
        "train.batch_size=3",
        "train.old_log_prob=detach",
        "model.compile=true model.dtype=bf16 train.old_log_prob=detach",
        "model.compile=true model.dtype=fp32",
        "train.sharding=fsdp2 dynamic_sampling.policy=rebalance",
        "train.guard=true",
        "eval.videos=0 eval.num_conditions=1",
        "eval.split=tune data.tune_scenes=1 checkpoint.best=eval/target_view",
        "distributed.silent_s=2400",
        "distributed.silent_s=5400 distributed.dead_s=0",
        "reward.weights.room_pose=0",
        "reward.weights.room_pose=1 eval.gold=",
        "reward.weights.room_pose=1 reward.schedules.room_pose=0:0,9:0",
        "reward.weights=target_view=0 reward.schedules.target_view=0:1",
        "reward.weights=smooth=0,source_match=1",
        "reward.weights=smooth=0.3,pose_rot=1",
        "reward.weights=smooth=1,remote:judge=1 reward.remote.judge=http://127.0.0.1:8000",
        "reward.schedules=target_view=0:1,5:0,source_match=4:0,9:1",
        "reward.weights.source_match=0 reward.schedules.target_view=0:1,300:0 num_epochs=300",
        "reward.gates=target_view=source_match:0,source_match=target_view:-1",
        "reward.weights.remote:judge=0 reward.remote.judge=http://h reward.gates.target_view=remote:judge:2",
        "reward.remote=a=http://h:1,b=https://h/b reward.weights=remote:b=1 dynamic_sampling.metric=remote:b",
        "reward.weights.motion_mag=0 dynamic_sampling.metric=motion_mag",
    ],
)
def test_settings_at_the_edge_of_what_works_are_taken(settings: str) -> None:
    assert load(settings)


MOVES = "train.updates_per_epoch=4"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (MOVES, r"=4 without train\.guard: .*pass --config\.train\.guard=true$"),
        (f"{MOVES} train.step_weight=inverse_gain", r"--config\.train\.guard=true --config\.train\.step_weight=none$"),
        ("dynamic_sampling.enabled=true reward.flat_eps=1e-6", "reward.flat_eps=1e-06 is below reward.adv_eps=0.0001"),
        ("checkpoint.best=eval/target_view data.tune_scenes=1", "best='eval/target_view' .* on the reported"),
    ],
)
def test_settings_that_may_disappoint_are_warned_of(settings: str, said: str) -> None:
    with pytest.warns(UserWarning, match=said):
        load(settings)


@pytest.mark.parametrize(
    ("settings", "weight"),
    [
        ("reward.weights.target_view=0", 0.0),
        ("reward.weights.target_view=0 reward.schedules.target_view=0:0,50:0.5", 0.5),
        ("reward.schedules.target_view=0:0,50:0.5,100:0", 0.5),
        ("reward.schedules.target_view=0:0", 0.0),
        ("num_epochs=11 reward.schedules.target_view=0:0,20:1", 0.5),
        ("num_epochs=11 reward.schedules.target_view=15:0,20:1", 0.0),
        ("num_epochs=0 reward.schedules.target_view=0:0.2,20:1", 0.2),
    ],
)
def test_the_largest_weight_of_a_reward_is_that_of_the_epochs_of_its_run(settings: str, weight: float) -> None:
    assert largest_weights(load(settings)) == {"source_match": 0.1, "target_view": pytest.approx(weight)}


def world(world_size: int, *overrides: str) -> None:
    check_world(load_config(f"{ROOT}/config/grpo.py:my_recam_8npu", overrides), world_size)


@pytest.mark.parametrize("world_size", [2, 4, 6, 8, 16])
def test_whole_groups_on_all_ranks_together_are_taken(world_size: int) -> None:
    world(world_size)


@pytest.mark.parametrize(
    ("world_size", "batch_size", "multiple", "way_out"),
    [(1, 2, 4, 4), (3, 2, 4, 4), (1, 6, 4, 8), (2, 3, 2, 4), (5, 5, 4, 8), (7, 2, 4, 4)],
)
def test_a_batch_that_holds_no_whole_groups_is_refused_with_one_that_does(world_size, batch_size, multiple, way_out):
    with pytest.raises(ConfigError, match=r"^config\.sample\.train_batch_size[^\n]+$") as caught:
        world(world_size, f"--config.sample.train_batch_size={batch_size}")
    text = str(caught.value)
    assert f"got {batch_size}" in text and "sample.k=4" in text and f"a multiple of {multiple} on" in text
    assert text.endswith(f"--config.sample.train_batch_size={way_out}")
    world(world_size, f"--config.sample.train_batch_size={way_out}")
    starts = re.search(r"start (?:(\d+) or )?(\d+) rank\(s\)", text).groups()
    for ranks in filter(None, starts):
        world(int(ranks), f"--config.sample.train_batch_size={batch_size}")
    assert world_size != 7 or starts == ("6", "8")


def test_contiguous_groups_must_be_dealt_evenly_to_the_ranks() -> None:
    world(8, "--config.sample.layout=contiguous")
    with pytest.raises(ConfigError, match=r"^config\.sample\.layout: got 'contiguous'.* 12 groups .* 8 ranks"):
        world(8, "--config.sample.layout=contiguous", "--config.sample.num_batches_per_epoch=3")
