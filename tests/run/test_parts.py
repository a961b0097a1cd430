"""The parts of a run are made as the recipe says."""

import dataclasses
import types
from pathlib import Path

import pytest
import torch

from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.data.splits import held_out_data, multicam_data, training_data, whole_splits
from flow_grpo.judging.evaluate import eval_guidance, training_guidance
from flow_grpo.records import Guidance
from flow_grpo.run import parts as build
from flow_grpo.runtime.ranks.process_group import Group, World
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.sampling import offloads_rollouts

TINY = "config/grpo.py:tiny_recam"


def settings(world: Path, *changes: str):
    return load_config(TINY, [f"--config.data.root={world}", "--config.data.tune_scenes=0", *changes])


def test_the_data_has_the_recipe_s_sizes_and_origin(world):
    plain = multicam_data(settings(world).data, "val")
    assert plain.size_of(0) == (5, 24, 32) and plain.reference == "source"
    other = settings(world, "--config.data.buckets=5x16x16", "--config.data.reference=target")
    changed = multicam_data(other.data, "val")
    assert changed.size_of(0) == (5, 16, 16) and changed.reference == "target"


def names(data) -> set[tuple[str, str]]:
    return {data.name_of(index) for index in range(len(data))}


def test_scenes_set_aside_for_tuning_are_never_trained_on_and_measured_only_when_asked_for(world):
    whole = names(training_data(settings(world).data))
    one = "--config.data.tune_scenes=1"
    report, tune = (settings(world, one, f"--config.eval.split={split}") for split in ("report", "tune"))
    assert names(training_data(report.data)) == names(training_data(tune.data)) < whole
    assert names(held_out_data(tune.data, tune.eval)) == whole - names(training_data(tune.data))
    assert names(held_out_data(report.data, report.eval)) == names(multicam_data(report.data, "val"))
    with pytest.raises(ValueError, match=r"data\.tune_scenes is 2 .* must be below the 2 training scenes"):
        training_data(settings(world, "--config.data.tune_scenes=2").data)
    aside = settings(world, "--config.data.report_scenes=1", "--config.data.eval_split=missing")
    assert names(held_out_data(aside.data, aside.eval)) == whole - names(training_data(aside.data))
    assert [len(data) for data in whole_splits(aside.data)] == [len(whole)]
    # A checkpoint of a run with other scenes set aside is of other data.
    trained = [training_data(settings(world, f"--config.data.tune_scenes={n}").data).fingerprint() for n in (0, 1)]
    assert trained[0] == multicam_data(settings(world).data, "train").fingerprint() != trained[1]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], Guidance(2.0, "dark")),
        (["--config.eval.guidance_scale=5"], Guidance(5.0, "dark")),
        (["--config.eval.negative_prompt="], Guidance(2.0, "")),
        (["--config.eval.guidance_scale=none", "--config.eval.negative_prompt=none"], Guidance(2.0, "dark")),
    ],
)
def test_evaluation_takes_training_s_guidance_unless_it_has_its_own(world, changes, expected):
    training = ["--config.sample.guidance_scale=2", "--config.sample.negative_prompt=dark"]
    config = settings(world, "--config.eval.num_conditions=8", *training, *changes)
    assert training_guidance(config) == Guidance(2.0, "dark")
    assert eval_guidance(config) == expected


@pytest.mark.parametrize(
    "change",
    [
        "eval.num_conditions=4",
        "eval.num_steps=3",
        "sample.shift=4",
        "eval.guidance_scale=5",
        "eval.gold=",
        "data.reference=target",
        "data.height=16",
    ],
)
def test_what_an_evaluation_depends_on_tells_different_ones_apart(world, change):
    def measured_on(*changes: str) -> dict:
        config = settings(world, "--config.eval.num_conditions=8", *changes)
        return build.build_evaluator(config, None, held_out_data(config.data, config.eval), World()).measured_on

    assert measured_on(f"--config.{change}") != measured_on() == measured_on()


def test_the_picture_is_judged_beside_the_true_view_or_the_source_whichever_there_is(world):
    config = settings(world, "--config.eval.num_conditions=4")
    held_out = held_out_data(config.data, config.eval)
    assert "target_view" in build.build_evaluator(config, None, held_out, World()).names
    read = held_out.condition
    held_out.condition = lambda *given: dataclasses.replace(read(*given), target_video=None)
    names = build.build_evaluator(config, None, held_out, World()).names
    assert "source_texture" in names and "target_view" not in names


def test_servers_and_their_timeouts_reach_the_rewards(world):
    address = "--config.reward.remote.judge=http://127.0.0.1:9"
    changes = "--config.reward.weights.remote:judge=1", "--config.reward.remote_timeout=7"
    config = settings(world, address, *changes)
    rewards = {reward.name: reward for reward in build.build_rewards(config, config.reward.weights, World()).rewards}
    assert rewards["remote:judge"].timeout_s == 7


def test_the_sampler_knows_ranks_and_recipe(world):
    config = settings(world, "--config.sample.k=4", "--config.seed=3")
    sampler = build.build_sampler(config, multicam_data(config.data, "train"), World.of(Group(1, 2)))
    state = sampler.state_dict()
    assert (state["k"], state["seed"]) == (4, 3)
    assert len(next(iter(sampler))) == config.sample.train_batch_size


def test_the_optimizer_has_the_recipe_s_numbers_with_a_learning_rate_for_weights_that_read_the_camera():
    weights = [torch.nn.Parameter(torch.ones(size)) for size in (1, 2, 3)]
    policy = types.SimpleNamespace(trained_parameters=lambda: weights, camera_parameters=lambda: weights[1:2])
    config = load_config(TINY, ["--config.train.learning_rate=0.25", "--config.train.weight_decay=0.5"])
    (group,) = build.build_optimizer(config, policy).param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.25, 0.5, (0.9, 0.999))
    config = load_config(TINY, ["--config.train.learning_rate=0.25", "--config.train.camera_learning_rate=0.5"])
    optimizer = build.build_optimizer(config, policy)
    assert [(group["lr"], [len(p) for p in group["params"]]) for group in optimizer.param_groups] == [
        (0.25, [1, 3]),
        (0.5, [2]),
    ]
    updater = Updater(policy, None, optimizer, config, World())
    assert updater.learning_rates() == {"train/learning_rate": 0.25, "train/camera_learning_rate": 0.5}
    policy.camera_parameters = list
    with pytest.raises(ValueError, match=r"train.camera_learning_rate: got 0.5, must be 0 where no trained weight"):
        build.build_optimizer(config, policy)


@pytest.mark.parametrize(
    ("changes", "offload"),
    [
        (("--config.train.copies=0",), False),
        (("--config.train.copies=0", "--config.sample.offload"), True),
        (("--config.train.copies=0", "--config.dynamic_sampling.enabled"), True),
        (("--config.train.copies=4",), False),  # of groups, which stay whole
        (("--config.train.copies=4", "--config.sample.share_prefix=false"), True),
    ],
)
def test_remembered_steps_leave_the_device_when_asked_or_needed(world, changes, offload):
    config = settings(world, *changes)
    assert offloads_rollouts(config) == offload


def test_step_weights_follow_guard_and_choice():
    state = types.SimpleNamespace(optimizer=None, ema=None)
    made = {
        name: build.build_updater(load_config(TINY, change), None, state, types.SimpleNamespace(update=None), World())
        for name, change in {
            "none": ["--config.train.step_weight=none"],
            "gain": ["--config.train.step_weight=inverse_gain"],
            "guard": ["--config.train.step_weight=none", "--config.train.guard=true"],
        }.items()
    }
    weights = {name: updater.objective.step_weight for name, updater in made.items()}
    assert weights["none"].unique().tolist() == [0.0, 1.0]
    assert not torch.equal(weights["gain"], weights["guard"])


def test_dynamic_sampling_is_there_when_asked_for(world):
    rewards = types.SimpleNamespace(floors={})
    progress = types.SimpleNamespace(say=print)
    assert build.build_dynamic_sampling(settings(world), rewards, progress, World()) is None
    config = settings(world, "--config.dynamic_sampling.enabled")
    assert build.build_dynamic_sampling(config, rewards, progress, World()) is not None


def test_a_gold_metric_of_rooms_that_are_not_there_is_refused_at_the_door(world, monkeypatch):
    config = settings(world, "--config.eval.num_conditions=8")
    held_out = multicam_data(config.data, "val")
    assert build.build_evaluator(config, None, held_out, World()).gold.name == "room_pose"
    monkeypatch.setattr(build, "SCENE_FILES", {"room_pose": "nothing.json"})
    with pytest.raises(ValueError, match=r"^eval\.gold is 'room_pose', which needs the tiny world: no held-out scene"):
        build.build_evaluator(config, None, held_out, World())
    without = settings(world, "--config.eval.num_conditions=8", "--config.eval.gold=")
    assert build.build_evaluator(without, None, held_out, World()).gold is None
