"""The pose rewards: formulas by hand, order and cheats on filmed rooms, failures."""

import dataclasses
import os

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.poses import PRESETS, preset_path, trans_err
from flow_grpo.records import Condition, Depth
from flow_grpo.rewards.base import RewardSet
from flow_grpo.rewards.camera import pose as camera_pose
from flow_grpo.rewards.camera.smooth import Smooth
from flow_grpo.rewards.camera.view_disp import ViewDisp
from flow_grpo.rewards.process_pool import CallPool
from tests import textured_room as room
from tests.maths.test_path_errors import lost, path
from tests.some import some

FRAMES = 3  # the fewest that leave one to check the anchors with
TURNS = [name for name, preset in PRESETS.items() if any(preset.rotation)]
MOVES = [name for name, preset in PRESETS.items() if any(preset.translation)]
BOTH = (camera_pose.PoseRot, camera_pose.PoseTrans)
MEASURER = camera_pose.PoseMeasurer()  # one for the file: all conditions have one source


def shot(preset: str, speed: float = 1.0) -> Tensor:
    return room.film(preset, frames=FRAMES, speed=speed)


def asked(preset: str, **changes: object) -> Condition:
    return room.condition(preset, shot("source"), room.source_path(FRAMES), **changes)


def values(preset: str, videos: list[Tensor], measurer: camera_pose.PoseMeasurer = MEASURER) -> tuple[Tensor, Tensor]:
    conditions = [asked(preset)] * len(videos)
    results = [reward(measurer)(torch.stack(videos), conditions) for reward in BOTH]
    assert all(result.valid.all() and result.causes == ("",) * len(videos) for result in results)
    return results[0].values, results[1].values


def static(preset: str) -> Tensor:
    return shot(preset)[:, :1].expand(-1, FRAMES, -1, -1)


# --- formulas


def test_values_are_those_of_the_formulas_and_a_path_that_only_turns_is_measured_in_units_of_30_cm():
    commanded = path([0, 0, 0], [0, 0.5, 1.0])
    errors = camera_pose.compare(commanded, path([0, 9, 90], [0, 1.0, 1.0]), commanded, torch.ones(3, dtype=torch.bool))
    assert errors.reach == pytest.approx(1.0)
    # Weights 1/6, 2/6, 3/6; 9 of 45 degrees, then the cap; half a metre of 2 L = 2 m.
    assert camera_pose.rotation_value(errors) == pytest.approx(-(2 / 6 * 0.2 + 3 / 6))
    assert camera_pose.translation_value(errors) == pytest.approx(-(2 / 6 * 0.25))
    commanded = path([0, 10, 20], [0, 0, 0])
    errors = camera_pose.compare(commanded, path([0, 10, 20], [0, 0, 0.3]), commanded, torch.ones(3, dtype=torch.bool))
    assert errors.reach == pytest.approx(0.3)
    assert camera_pose.translation_value(errors) == pytest.approx(-0.25)


def test_a_lost_frame_takes_the_cap_and_in_a_video_that_is_mostly_lost_all_do():
    commanded = path([0, 0, 0], [0, 0.5, 1.0])
    errors = camera_pose.compare(commanded, lost(commanded, [1]), commanded, torch.ones(3, dtype=torch.bool))
    assert not errors.unregistered and errors.located == pytest.approx(2 / 3)
    assert camera_pose.rotation_value(errors) == pytest.approx(-1 / 3)
    assert camera_pose.translation_value(errors) == pytest.approx(-1 / 3)
    commanded = path([0, 0, 0, 0], [0, 0.3, 0.7, 1.0])
    every = torch.ones(4, dtype=torch.bool)
    half = camera_pose.compare(commanded, lost(commanded, [0, 1]), commanded, every)
    assert not half.unregistered and camera_pose.rotation_value(half) > -1
    most = camera_pose.compare(commanded, lost(commanded, [0, 1, 2]), commanded, every)
    assert most.unregistered
    assert camera_pose.rotation_value(most) == pytest.approx(-1) and camera_pose.translation_value(
        most
    ) == pytest.approx(-1)


def test_frames_that_cannot_be_judged_have_no_weight_and_do_not_count_as_lost():
    commanded = path([0, 0, 0, 0], [0, 0.3, 0.7, 1.0])
    visible = torch.tensor([True, True, False, False])
    errors = camera_pose.compare(commanded, lost(commanded, [2, 3]), commanded, visible)
    assert errors.located == 1 and not errors.unregistered
    assert camera_pose.rotation_value(errors) == pytest.approx(0, abs=1e-9)


# --- order and cheats on filmed rooms


@pytest.mark.parametrize("preset", some(["pan_right", "zoom_in", "arc_right"], "arc_right"))
def test_faster_is_better_up_to_the_command(preset):
    videos = [shot(preset), *(shot(preset, speed=speed) for speed in (0.95, 0.8, 0.5)), static(preset)]
    rotation, translation = values(preset, videos)
    if preset in TURNS:
        assert (rotation.diff() < -0.003).all(), rotation
        assert rotation[0] > -0.1 / 45
    if preset in MOVES:
        assert (translation.diff() < -0.005).all(), translation
        assert translation[0] > -0.01 / 2
    assert ((rotation + translation).diff() < -0.003).all()


@pytest.mark.parametrize("preset", PRESETS)
def test_a_static_path_is_worse_than_every_slowed_one(preset):
    commanded = preset_path(preset, 21)
    every = torch.ones(21, dtype=torch.bool)
    scores = []
    for speed in torch.linspace(0, 1, 21).tolist():
        errors = camera_pose.compare(commanded, room.slowed(preset, 21, speed), commanded, every)
        scores.append([camera_pose.rotation_value(errors), camera_pose.translation_value(errors)])
    gains = torch.tensor(scores, dtype=torch.float64).diff(dim=0)
    assert (gains[:, 0] > 1e-4).all() if preset in TURNS else gains[:, 0].abs().max() < 1e-9
    assert (gains[:, 1] > 1e-4).all() if preset in MOVES else gains[:, 1].abs().max() < 1e-9


def test_a_copy_of_the_source_errs_by_the_distance_of_the_paths_and_the_command_is_part_of_the_measurement():
    result = camera_pose.PoseTrans(MEASURER)(shot("source")[None], [asked("arc_right")])
    true = (room.source_path(FRAMES) - preset_path("arc_right", FRAMES))[:, :3, 3].norm(dim=-1).mean()
    assert float(result.info["trans_m"]) == pytest.approx(float(true), abs=0.005)
    video = shot("arc_right")[None]
    right, wrong = (camera_pose.PoseRot(MEASURER)(video, [asked(name)]).values for name in ("arc_right", "arc_left"))
    assert right > -0.01 and wrong < -0.3


@pytest.mark.parametrize("what", ["noise", "mirrored"])
def test_what_does_not_show_the_scene_is_unregistered_and_worst(what):
    video = shot("arc_right")
    shown = video.flip(-1) if what == "mirrored" else torch.rand(video.shape, generator=torch.Generator())
    for reward in (camera_pose.PoseRot(MEASURER), camera_pose.PoseTrans(MEASURER)):
        result = reward(shown[None], [asked("arc_right")])
        assert result.valid.all() and result.values == pytest.approx(-1)
        assert result.info["unregistered"] == 1 and result.info["valid_frames"] == 0
    assert camera_pose.PoseRot(MEASURER)(shown[None], [asked("arc_right")]).info["rot_deg"] == pytest.approx(45)


def test_poses_may_be_given_in_any_reference():
    """As with data.reference = "target": the origin is elsewhere, the errors are the same."""
    other = room.slowed("arc_left", 2, 0.3)[1]
    video = shot("arc_right", speed=0.8)[None]
    same = camera_pose.PoseTrans(MEASURER)(video, [asked("arc_right")])
    paths = {"source_poses": room.source_path(FRAMES), "target_poses": preset_path("arc_right", FRAMES)}
    moved = asked("arc_right", **{name: other @ given for name, given in paths.items()})
    again = camera_pose.PoseTrans(MEASURER)(video, [moved])
    assert torch.allclose(same.info["trans_m"], again.info["trans_m"], atol=1e-4)


def test_a_turning_source_is_scored_with_its_true_view():
    turning = room.condition("arc_right", shot("pan_right"), preset_path("pan_right", FRAMES), shot("arc_right"))
    slow = shot("arc_right", speed=0.5)
    result = camera_pose.PoseTrans(camera_pose.PoseMeasurer())(torch.stack([shot("arc_right"), slow]), [turning] * 2)
    assert result.valid.all()
    assert result.values[0] > -0.005 and result.values[1] < -0.1


@pytest.mark.parametrize("posed", [True, False])
def test_a_turning_source_without_a_true_view_is_scored_by_its_own_frames(posed):
    poses = preset_path("pan_right", FRAMES)
    alone = room.condition("arc_right", shot("pan_right"), poses, source_poses=poses if posed else None)
    videos = torch.stack([shot("arc_right"), shot("arc_right", speed=0.5), shot("arc_left"), static("arc_right")])
    measurer = camera_pose.PoseMeasurer()
    turn, away, where = (reward(measurer)(videos, [alone] * 4) for reward in (*BOTH, camera_pose.PoseDir))
    assert turn.info["rot_deg"].tolist() == pytest.approx([0, 7.5, 30, 15], abs=0.5)
    assert where.info["dir_deg"].tolist() == pytest.approx([0, 0, 90, 90], abs=5)  # arcs begin sideways
    assert not away.valid.any() and not away.faults.any() and "depth" in away.causes[0]
    known = dataclasses.replace(
        alone, source_depth=Depth(torch.from_numpy(room.depths(poses, room.SMALL)).float(), torch.arange(FRAMES))
    )
    metres = camera_pose.PoseTrans(camera_pose.PoseMeasurer())(videos, [known] * 4).info["trans_m"]
    wanted = [
        *(room.slowed("arc_right", FRAMES, speed) for speed in (1, 0.5)),
        preset_path("arc_left", FRAMES),
        room.standing(FRAMES),
    ]
    assert metres.tolist() == pytest.approx([float(trans_err(wanted[0], way).mean()) for way in wanted], abs=0.05)


def test_a_command_that_does_not_move_has_no_direction():
    result = camera_pose.PoseDir(MEASURER)(shot("pan_right")[None], [asked("pan_right")])
    assert not result.valid.any() and not result.faults.any() and "no direction" in result.causes[0]


# --- failures


def test_all_path_rewards_read_one_measurement(calls_made):
    measurer = camera_pose.PoseMeasurer()
    videos = torch.stack([shot("arc_right"), shot("zoom_in")])
    conditions = [asked("arc_right"), asked("arc_right", slot=1)]
    first = camera_pose.PoseRot(measurer)(videos, conditions)
    second = camera_pose.PoseTrans(measurer)(videos.clone(), conditions)
    features = ["find_features"] * (2 * FRAMES - 1)  # both videos begin with the same picture
    assert calls_made == ["find_source", *features, "locate_frames", "locate_frames"]
    third = Smooth(measurer)(videos, conditions)
    assert first.valid.all() and second.valid.all() and third.valid.all()
    assert Smooth().measurer is camera_pose.PoseRot().measurer
    camera_pose.PoseRot(measurer)(videos.flip(0), conditions)
    assert calls_made == ["find_source", *features, *["locate_frames"] * 4]


def test_anchors_and_true_views_can_be_found_before_there_is_a_video(calls_made):
    measurer = camera_pose.PoseMeasurer()
    both = [camera_pose.PoseRot(measurer), ViewDisp(measurer.features)]
    rewards, conditions = (
        RewardSet(both, {reward.name: 1.0 for reward in both}),
        [asked("arc_right", target_video=shot("arc_right"))],
    )
    rewards.prepare(conditions)
    assert sorted(set(calls_made)) == ["find_features", "find_source"]
    before, video = len(calls_made), shot("zoom_in")[None]
    found = rewards(video, conditions)
    # The true view begins with the same picture as every video.
    assert calls_made[before:] == [*["find_features"] * (FRAMES - 1), "locate_frames", "displacements"]
    fresh = camera_pose.PoseRot(camera_pose.PoseMeasurer())(video, conditions)
    assert torch.equal(found["pose_rot"].values, fresh.values)


def test_without_the_right_focal_length_there_is_no_value():
    conditions = [asked("arc_right"), asked("arc_right", intrinsics=None)]
    result = camera_pose.PoseRot(MEASURER)(torch.stack([shot("arc_right")] * 2), conditions)
    assert result.valid.tolist() == [True, False]
    assert "no known focal length" in result.causes[1] and result.values[1].isnan()
    assert not result.faulty.any()  # measuring did not fail, there is nothing to measure by
    factor = torch.tensor([1, 363.6 / 630.3, 1, 1])
    wrong = asked("arc_right", intrinsics=factor * room.intrinsics(room.SMALL))
    result = camera_pose.PoseRot(camera_pose.PoseMeasurer())(shot("arc_right")[None], [wrong])
    assert not result.valid.any() and "is unusable" in result.causes[0]
    assert result.values.isnan().all() and result.info["rot_deg"].isnan().all()
    assert not result.faulty.any()


def test_a_crash_masks_its_own_row_and_is_tried_again(monkeypatch):
    measurer, locate_frames = camera_pose.PoseMeasurer(), camera_pose.locate_frames
    videos = torch.stack([shot("arc_right"), shot("zoom_in")])
    conditions = [asked("arc_right")] * 2
    calls = iter((False, True))

    def sometimes(seen, *others):
        if next(calls):
            raise RuntimeError("the scorer is broken")
        return locate_frames(seen, *others)

    with monkeypatch.context() as patch:
        patch.setattr(camera_pose, "locate_frames", sometimes)
        result = camera_pose.PoseRot(measurer)(videos, conditions)
        assert result.valid.tolist() == [True, False]
        assert result.values[1].isnan() and "the scorer is broken" in result.causes[1]
        assert result.faulty.tolist() == [False, True]
    assert camera_pose.PoseRot(measurer)(videos, conditions).valid.all()


def _exit(*_):
    os._exit(1)


def test_a_process_that_dies_masks_its_rows(monkeypatch):
    measurer = camera_pose.PoseMeasurer(workers=2)  # a frame a call: the same bits
    video, conditions = shot("arc_right")[None], [asked("arc_right")]
    with monkeypatch.context() as patch:
        patch.setattr(camera_pose, "locate_frames", _exit)
        result = camera_pose.PoseRot(measurer)(video, conditions)
        assert not result.valid.any() and result.values.isnan().all()
        assert "died" in result.causes[0] and result.faulty.all()
    in_processes = camera_pose.PoseRot(measurer)(video, conditions)
    measurer.pool.close()
    assert torch.equal(in_processes.values, camera_pose.PoseRot(MEASURER)(video, conditions).values)


def test_anchors_that_take_their_time_leave_the_poses_theirs(monkeypatch):
    measurer, given = camera_pose.PoseMeasurer(), {}

    def run(function, arguments, *, seconds, what):
        given[what] = seconds
        return CallPool.run(measurer.pool, function, arguments, seconds=seconds, what=what)

    monkeypatch.setattr(measurer.pool, "run", run)
    assert camera_pose.PoseRot(measurer)(shot("arc_right")[None], [asked("arc_right")]).valid.all()
    assert given == dict.fromkeys(("true views", "anchors", "features", "camera poses"), camera_pose.MOST_SECONDS)


def test_anchors_are_cached_by_source_up_to_a_limit(monkeypatch, calls_made):
    monkeypatch.setattr(camera_pose, "SOURCES_KEPT", 1)
    measurer = camera_pose.PoseMeasurer()
    for scene in ("a", "a", "b", "a"):
        measurer.sources([asked("arc_right", scene=scene)])
    assert calls_made == ["find_source"] * 3


# --- the size of the real model


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["pan_right", "zoom_in", "translate_up", "arc_right"])
def test_order_at_full_size(preset):
    frames = 21
    asked_for = room.condition(preset, room.film("source", room.LARGE, frames), room.source_path(frames))
    right, slow = (room.film.__wrapped__(preset, room.LARGE, frames, speed) for speed in (1.0, 0.5))
    videos = [right, slow, right[:, :1].expand_as(right), room.spoiled(right, sigma=2.5, quality=70, sprite=True)]
    results = [reward(MEASURER)(torch.stack(videos), [asked_for] * 4) for reward in BOTH]
    rotation, translation = results[0].values, results[1].values
    print(f"\n| {preset} |", " | ".join(f"{r:.4f}, {t:.4f}" for r, t in zip(rotation, translation, strict=True)), "|")
    for value in [rotation] * (preset in TURNS) + [translation] * (preset in MOVES) + [rotation + translation]:
        assert value[0] > value[1] > value[2]
        assert value[3] > value[1]


def test_a_rank_without_a_core_of_its_own_measures_in_a_process_that_can_be_stopped(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert camera_pose.shared_measurer.__wrapped__().pool.workers == 1
