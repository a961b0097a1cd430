"""The judge that follows points: against cameras that are known, and against the command's influence."""

import dataclasses
import json

import pytest
import torch
from torch import Tensor

from flow_grpo.data.rooms import LABELLED, UNLABELLED
from flow_grpo.data.tiny_world import FURNISHED, make_scene, render_views
from flow_grpo.maths.pictures import blur
from flow_grpo.maths.poses import pose, relative, rot_err, rotation_matrix, trans_err
from flow_grpo.records import Condition
from flow_grpo.rewards.room.room_tracks import RoomTracks

KINDS = (*LABELLED, *UNLABELLED)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> tuple[Tensor, list[Condition], RoomTracks]:
    """Return films (B, 3, T, h, w) of furnished rooms, a moving thing in half of them, their conditions and a judge."""
    root, films, conditions = tmp_path_factory.mktemp("rooms"), [], []
    for number, kind in enumerate(KINDS):
        scene = make_scene(FURNISHED, "judged", number, ("still", kind))
        films.append(render_views(FURNISHED, [scene], [1])[0])
        folder = f"val/f17_aperture10/scene{number + 1}"
        (root / folder).mkdir(parents=True)
        (root / folder / "room.json").write_text(json.dumps(scene.room.to_dict()))
        start = scene.poses[1, 0]
        known = {"reference_pose": start, "intrinsics": FURNISHED.intrinsics()}
        path = relative(start, scene.poses[1])
        conditions.append(Condition(number, number, 0, "a room", None, path, folder, "", kind, **known))
    return torch.stack(films), conditions, RoomTracks(root)


def asked_for(conditions: list[Condition], paths: Tensor) -> list[Condition]:
    return [dataclasses.replace(c, target_poses=path) for c, path in zip(conditions, paths, strict=True)]


def straying(path: Tensor, move: Tensor, turn: Tensor) -> Tensor:
    """Return a path (T, 4, 4) that moves and turns (radians) by so much more until its last frame."""
    progress = torch.linspace(0, 1, len(path), dtype=path.dtype)[:, None]
    return pose(path[:, :3, :3] @ rotation_matrix(progress * turn), path[:, :3, 3] + progress * move)


def test_cameras_are_followed_to_centimetres_whatever_the_command(world):
    films, conditions, judge = world
    found = judge.locate(films, asked_for(conditions, torch.eye(4).double().expand(len(films), 9, 4, 4)))
    true = torch.stack([c.need_poses() for c in conditions])
    assert not found.isnan().any()
    metres, degrees = trans_err(true, found).mean(-1), rot_err(true, found).rad2deg().mean(-1)
    assert metres.mean() < 0.03 and metres.max() < 0.12
    assert degrees.mean() < 0.4 and degrees.max() < 1.5
    blurred = judge.locate(blur(films, 0.8), conditions)
    assert trans_err(true, blurred).mean() < 0.06 and rot_err(true, blurred).rad2deg().mean() < 0.8


def test_errors_found_are_the_true_errors_of_cameras_that_stray(world):
    """Commands that lie 0 to 0.5 m and 0 to 10 degrees beside what was filmed: correlation at least 0.95."""
    films, conditions, judge = world
    draw = torch.Generator().manual_seed(0)
    share = torch.linspace(0, 1, len(films), dtype=torch.float64)[torch.randperm(len(films), generator=draw)]
    way = torch.nn.functional.normalize(torch.randn(2, len(films), 3, generator=draw, dtype=torch.float64), dim=-1)
    paths = [
        straying(c.need_poses(), s * m, (10 * s * t).deg2rad())
        for c, s, m, t in zip(conditions, share, *way, strict=True)
    ]
    true = torch.stack([c.need_poses() for c in conditions])
    result = judge(films, asked_for(conditions, torch.stack(paths)))
    assert result.valid.all() and (result.info["located"] == 1).all()
    for name, wanted in (
        ("trans_err_m", trans_err(torch.stack(paths), true).mean(-1)),
        ("rot_err_deg", rot_err(torch.stack(paths), true).rad2deg().mean(-1)),
    ):
        both = torch.stack([result.info[name].double(), wanted])
        assert torch.corrcoef(both)[0, 1] > 0.95
        assert (both[0] - both[1]).abs().mean() < 0.1 * wanted.max()


def test_a_picture_without_points_is_lost_and_scores_the_caps(world):
    films, conditions, judge = world
    result = judge(torch.full_like(films[:2], 0.5), conditions[:2])
    assert result.info["located"].tolist() == pytest.approx([1 / 9] * 2)
    assert result.values.tolist() == pytest.approx([-3 * 8 / 9] * 2)
    frozen = films[:1, :, :1].expand(-1, -1, 9, -1, -1)
    assert float(judge(frozen, conditions[:1]).info["rot_err_deg"]) == pytest.approx(
        float(rot_err(conditions[0].need_poses(), torch.eye(4)).rad2deg().mean()), rel=0.05
    )


def test_without_a_room_there_is_a_cause(world, tmp_path):
    films, conditions, _ = world
    result = RoomTracks(tmp_path)(films[:1], conditions[:1])
    assert not result.valid.any() and "no room to compare with" in result.causes[0]
