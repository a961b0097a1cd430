"""Sources without poses: turns are judged as exactly as ever, metres only where a true view tells the unit."""

import dataclasses

import pytest
import torch

from flow_grpo.records import Condition
from flow_grpo.rewards.camera import structure_from_motion
from flow_grpo.rewards.camera.pose import PoseMeasurer, PoseRot, PoseTrans
from flow_grpo.rewards.camera.smooth import Smooth
from tests.textured_room import condition, film, source_path

SIZE, FRAMES = (160, 288), 5
MEASURER = PoseMeasurer()  # one for the file: all conditions have one source


def asked(preset: str, **changes: object) -> Condition:
    return condition(preset, film("source", SIZE, FRAMES), source_path(FRAMES), source_poses=None, **changes)


def test_turns_are_judged_and_metres_are_not():
    videos = torch.stack([film("arc_right", SIZE, FRAMES, speed=speed) for speed in (1, 0.8)])
    conditions = [dataclasses.replace(asked("arc_right"), target_video=None)] * 2
    turned = PoseRot(MEASURER)(videos, conditions)
    assert turned.valid.all() and turned.info["rot_deg"][0] < 0.1
    assert turned.info["rot_deg"][1] == pytest.approx(0.2 * 30 / 2, abs=0.1)  # the path turns by 30 degrees
    for reward in (PoseTrans, Smooth):
        result = reward(MEASURER)(videos, conditions)
        assert not result.valid.any() and not result.faults.any()  # masked, and no failure
        assert "nothing tells the size" in result.causes[0]


def test_a_true_view_that_moves_tells_the_metre():
    right, slow = (film("arc_right", SIZE, FRAMES, speed=speed) for speed in (1, 0.5))
    result = PoseTrans(MEASURER)(torch.stack([right, slow]), [asked("arc_right", target_video=right)] * 2)
    assert result.valid.all() and result.info["trans_m"][0] < 0.01
    posed = condition("arc_right", film("source", SIZE, FRAMES), source_path(FRAMES))
    known = PoseTrans(PoseMeasurer())(slow[None], [posed])
    assert result.info["trans_m"][1] == pytest.approx(float(known.info["trans_m"]), abs=0.01)


def test_a_source_that_only_turns_tells_turns_and_no_metres(monkeypatch):
    monkeypatch.setattr(structure_from_motion, "pycolmap", None)  # not needed
    turning = dataclasses.replace(asked("arc_right"), source_video=film("pan_left", SIZE, FRAMES))
    videos = film("arc_right", SIZE, FRAMES)[None]
    measurer = PoseMeasurer()
    assert PoseRot(measurer)(videos, [turning]).info["rot_deg"] < 0.5
    assert "nothing tells the size" in PoseTrans(measurer)(videos, [turning]).causes[0]


def test_a_source_that_shows_nothing_says_what_was_tried():
    blank = dataclasses.replace(asked("arc_right"), source_video=torch.full((3, FRAMES, *SIZE), 0.5))
    result = PoseRot(PoseMeasurer())(film("arc_right", SIZE, FRAMES)[None], [blank])
    assert not result.valid.any() and not result.faults.any()
    assert "came without poses" in result.causes[0] and "0 features" in result.causes[0]
