"""The tiny world: rendered rooms with exact cameras, in MultiCamVideo layout."""

import dataclasses
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from flow_grpo.data import tiny_world
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.maths import room
from flow_grpo.maths.poses import PRESETS
from flow_grpo.maths.room import Room, render, render_video, stack_rooms

SPEC = tiny_world.WorldSpec(seed=5, scenes={"train": 2, "val": 1})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("world") / "tiny"
    tiny_world.write_tiny_world(folder, SPEC)
    return folder


def test_a_scene_is_a_function_of_seed_split_and_number() -> None:
    first, again = tiny_world.make_scene(SPEC, "train", 1), tiny_world.make_scene(SPEC, "train", 1)
    assert torch.equal(first.poses, again.poses)
    assert torch.equal(first.room.phase, again.room.phase)
    for other in (
        tiny_world.make_scene(SPEC, "val", 1),
        tiny_world.make_scene(SPEC, "train", 2),
        tiny_world.make_scene(dataclasses.replace(SPEC, seed=6), "train", 1),
    ):
        assert not torch.equal(first.poses, other.poses)
        assert not torch.equal(first.room.phase[1], other.room.phase[1])


def test_all_cameras_of_a_scene_start_together_and_stay_inside_the_room() -> None:
    for number in range(20):
        scene = tiny_world.make_scene(SPEC, "train", number)
        assert torch.equal(scene.poses[:, 0], scene.poses[:1, 0].expand(len(PRESETS), 4, 4))
        assert (scene.poses[..., :3, 3].abs() < scene.room.half_size.double() - 0.3).all()
        assert torch.allclose(torch.linalg.det(scene.poses[..., :3, :3]), torch.tensor(-1.0, dtype=torch.float64))


def test_the_magnitude_of_rotation_tells_nothing_about_that_of_translation() -> None:
    arc = list(PRESETS).index("arc_left")
    paths = torch.stack([tiny_world.make_scene(SPEC, "train", n).poses[arc] for n in range(200)])
    way = (paths[:, -1, :3, 3] - paths[:, 0, :3, 3]).norm(dim=-1)
    turn = torch.linalg.inv(paths[:, 0]) @ paths[:, -1]
    angle = torch.acos(((turn[:, 0, 0] + turn[:, 1, 1] + turn[:, 2, 2] - 1) / 2).clamp(-1, 1))
    assert abs(torch.corrcoef(torch.stack([way, angle]))[0, 1]) < 0.25
    assert way.min() > 0.7 and way.max() < 1.36


def test_what_is_written_is_read_back_as_it_was_filmed(root: Path) -> None:
    data = MultiCamDataset(root, "val", (5, 24, 32), prompt="a room")
    assert len(data) == len(PRESETS)
    scene = tiny_world.make_scene(SPEC, "val", 1)
    videos = tiny_world.render_views(SPEC, [scene], list(range(len(PRESETS))))
    for index in range(len(data)):
        condition = data.condition(index)
        target, source = int(condition.target_camera[3:]) - 1, int(condition.source_camera[3:]) - 1
        assert target != source
        assert condition.preset == [*PRESETS][target]
        assert (condition.target_video - videos[target]).abs().max() < 2.5 / 255
        assert (condition.source_video - videos[source]).abs().max() < 2.5 / 255
        world = condition.reference_pose @ condition.target_poses
        assert torch.allclose(world, scene.poses[target], atol=1e-6)
        assert torch.allclose(condition.intrinsics, SPEC.intrinsics())
        assert condition.prompt == tiny_world.caption(videos[target])
    seen = Room.from_dict(json.loads((root / condition.scene / "room.json").read_text()))
    rendered = render_video(stack_rooms([seen]), world[None].float(), condition.intrinsics, 24, 32)[0]
    assert (rendered - condition.target_video).abs().max() < 2.5 / 255


@pytest.mark.parametrize("rays", [1, 5 * 24 * 32 * 9])
def test_large_clips_are_rendered_in_slices_and_have_the_same_pixels(rays, root, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(room, "RAYS_AT_ONCE", rays)
    monkeypatch.setattr(room, "render", lambda *given: calls.append(given[1].shape[0]) or render(*given))
    tiny_world.write_tiny_world(tmp_path / "sliced", SPEC)
    assert calls == [5] * (3 * 10 * (24 if rays == 1 else 1))
    whole = {file.relative_to(root): file.read_bytes() for file in root.rglob("*.*")}
    assert whole == {
        file.relative_to(tmp_path / "sliced"): file.read_bytes() for file in tmp_path.rglob("sliced/**/*.*")
    }


def test_a_world_that_another_process_writes_meanwhile_is_used_and_another_kind_is_refused(tmp_path: Path) -> None:
    write_tiny_world, known = tiny_world.write_tiny_world, tiny_world.TINY_WORLDS["unit_test"]

    def slower(folder: Path, spec: tiny_world.WorldSpec) -> None:
        write_tiny_world(folder, known)  # the other process's
        write_tiny_world(folder, spec)

    with mock.patch.object(tiny_world, "write_tiny_world", slower):
        tiny_world.ensure_tiny_world(tmp_path / "world", "unit_test")
        assert [path.name for path in tmp_path.iterdir()] == ["world"]
        with (
            mock.patch.dict(tiny_world.TINY_WORLDS, {"other": dataclasses.replace(known, seed=9)}),
            pytest.raises(ValueError, match="is not the tiny world 'other'"),
        ):
            tiny_world.ensure_tiny_world(tmp_path / "second", "other")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        tiny_world.ensure_tiny_world(tmp_path / "file" / "world", "unit_test")


def test_ensure_writes_once_and_refuses_another_folder(tmp_path: Path) -> None:
    folder = tmp_path / "world"
    tiny_world.ensure_tiny_world(folder, "unit_test")
    stamp = (folder / "world.json").stat().st_mtime_ns
    tiny_world.ensure_tiny_world(folder, "unit_test")
    assert (folder / "world.json").stat().st_mtime_ns == stamp
    with pytest.raises(ValueError, match=r"is not the tiny world 'tiny'.*choose another .*--config.data.tiny_world=$"):
        tiny_world.ensure_tiny_world(folder, "tiny")
    with pytest.raises(ValueError, match=r"data.tiny_world: got 'huge', known are"):
        tiny_world.ensure_tiny_world(tmp_path / "other", "huge")


def test_a_furnished_world_has_sources_to_film_commands_to_follow_and_true_views_only_where_it_is_evaluated(tmp_path):
    splits = ("train", "val", "clips", "held_out_clips")
    spec = dataclasses.replace(tiny_world.FURNISHED, scenes=dict.fromkeys(splits, 2), height=16, width=24)
    tiny_world.write_tiny_world(tmp_path / "world", spec)
    for split, roles in ((split, tiny_world.ROLES[split]) for split in splits):
        data = MultiCamDataset(tmp_path / "world", split, (9, 16, 24), prompt="a room")
        assert sorted(data.cameras()) == sorted(roles.commands)
        for index in range(0, len(data), 5):
            condition = data.condition(index)
            scene = tiny_world.make_scene(spec, split, int(condition.scene[-1]))
            target, source = (int(name[3:]) - 1 for name in (condition.target_camera, condition.source_camera))
            assert source < scene.films <= target and condition.preset == scene.shots[target]
            known = {condition.reference_pose is None, condition.source_poses is None}
            assert known == {not roles.posed} and (condition.source_depth is not None) == roles.depths
            start = scene.poses[target, 0] if condition.reference_pose is None else condition.reference_pose
            assert torch.allclose(start @ condition.target_poses, scene.poses[target], atol=1e-6)
            assert condition.prompt == tiny_world.caption(tiny_world.render_views(spec, [scene], [source])[0])
            assert (condition.target_video is not None) == roles.views
            if roles.views:
                (truth,) = tiny_world.render_views(spec, [scene], [target])
                assert (condition.target_video - truth).abs().max() < 2.5 / 255


def test_no_camera_of_a_furnished_world_leaves_the_room_or_enters_a_thing() -> None:
    for number in range(40):
        scene = tiny_world.make_scene(tiny_world.FURNISHED, "val", number)
        places = scene.poses[..., :3, 3].float()
        assert (places.abs() < scene.room.half_size - 0.2).all()
        inside = (places[..., None, :] - scene.room.boxes[:, 0]).abs() < scene.room.boxes[:, 1]
        assert not inside.all(-1).any()
