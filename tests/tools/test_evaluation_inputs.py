"""Which video follows which path: both kinds of camera files, types, sources, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.poses import PRESETS, opencv_to_multicam, preset_path, relative
from flow_grpo.runtime.video_file import write_video
from tools.evaluation.inputs import EvaluationTask, find_tasks

FRAMES = 5
MIRROR = torch.diag(torch.tensor([1.0, -1.0, 1.0, 1.0], dtype=torch.float64))
LARGER = torch.diag(torch.tensor([1.1, 1.1, 1.1, 1.0], dtype=torch.float64))


def film(folder: Path, *names: str, frames: int = FRAMES) -> Path:
    for name in names:
        write_video(folder / name, torch.zeros(3, frames, 16, 16))
    return folder


def poses_file(folder: Path, content: object) -> Path:
    file = folder / "cameras.json"
    file.write_text(json.dumps(content))
    return file


def extrinsics_file(folder: Path, paths: dict[str, Tensor]) -> Path:
    """Write a MultiCamVideo camera file, whose world is left-handed."""
    texts: dict[str, dict[str, str]] = {f"frame{frame}": {} for frame in range(FRAMES)}
    for camera, path in paths.items():
        for frame, matrix in enumerate(opencv_to_multicam(MIRROR @ path).tolist()):
            texts[f"frame{frame}"][camera] = " ".join(f"[{' '.join(map(str, row))}]" for row in matrix)
    file = folder / "camera_extrinsics.json"
    file.write_text(json.dumps(texts))
    return file


def path(preset: str = "arc_left", frames: int = FRAMES) -> list:
    return preset_path(preset, frames).tolist()


def one(tmp_path: Path, entry: object, focal_px: float | None = 30.0) -> EvaluationTask:
    (task,) = find_tasks(film(tmp_path / "videos", "a.mp4"), poses_file(tmp_path, {"a.mp4": entry}), focal_px)
    return task


def test_a_path_is_found_by_relative_path_or_by_file_name(tmp_path):
    folder = film(tmp_path / "videos", "b.mp4", "sub/a.mp4", "sub/deep/c.mp4", ".hidden.mp4", ".trash/d.mp4")
    content = {"b.mp4": path(), "sub/a.mp4": path("tilt_up"), "c.mp4": path("zoom_in"), "spare.mp4": 0}
    tasks = find_tasks(folder, poses_file(tmp_path, content), 30.0)
    found = [(task.name, task.camera_type) for task in tasks]
    assert found == [("b.mp4", "arc_left"), ("sub/a.mp4", "tilt_up"), ("sub/deep/c.mp4", "zoom_in")]
    assert [task.source for task in tasks] == [task.name for task in tasks] and tasks[0].focal_px == 30.0


@pytest.mark.parametrize("preset", PRESETS)
def test_a_path_that_is_a_preset_has_its_name_wherever_it_starts(tmp_path, preset):
    moved = preset_path("arc_right", 2)[1] @ preset_path(preset, FRAMES)
    task = one(tmp_path, moved.tolist())
    assert task.camera_type == preset
    assert torch.allclose(task.commanded, preset_path(preset, FRAMES), atol=1e-9)


def test_a_path_that_is_no_preset_is_of_another_type_and_an_entry_may_say_more(tmp_path):
    assert one(tmp_path, preset_path("arc_left", FRAMES, rotation_scale=0.9).tolist()).camera_type == "other"
    more = {"camera_type": "orbit", "source": "dog", "focal_px": 55, "shares_estimator": True}
    task = one(tmp_path, {"poses": path(), **more}, focal_px=None)
    assert (task.camera_type, task.source, task.focal_px, task.shares_estimator) == ("orbit", "dog", 55.0, True)
    assert one(tmp_path, path()).shares_estimator is False


def test_folders_of_recammaster_tell_camera_and_source(tmp_path):
    paths = {"cam03": preset_path("tilt_up", FRAMES), "cam10": preset_path("arc_right", FRAMES)}
    cameras = extrinsics_file(tmp_path, paths)
    folder = film(tmp_path / "results", "cam_type10/video0.mp4", "cam_type3/video0.mp4", "cam_type3/video1.mp4")
    tasks = find_tasks(folder, cameras, 30.0)
    found = [(task.camera_type, task.source) for task in tasks]
    assert found == [("cam_type10", "video0"), ("cam_type3", "video0"), ("cam_type3", "video1")]
    # The world of the file is mirrored, poses relative to the first frame are not.
    for task, camera in zip(tasks, ("cam10", "cam03", "cam03"), strict=True):
        assert torch.allclose(task.commanded, paths[camera], atol=1e-6)
        assert torch.linalg.det(task.commanded[:, :3, :3]) == pytest.approx(1)
    (first, _) = find_tasks(folder / "cam_type3", cameras, 30.0)
    assert (first.name, first.camera_type) == ("video0.mp4", "cam_type3")


@pytest.mark.parametrize("name", ["cam01", "the left one"])
def test_cameras_of_a_scene_are_found_by_the_names_of_its_videos(tmp_path, name):
    start = preset_path("zoom_in", 2)[1]
    cameras = extrinsics_file(tmp_path, {name: start @ preset_path("pan_left", FRAMES)})
    (task,) = find_tasks(film(tmp_path / "videos", f"{name}.mp4"), cameras, 30.0)
    assert task.camera_type == name
    assert torch.allclose(task.commanded, relative(start, start @ preset_path("pan_left", FRAMES)), atol=1e-6)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (path(frames=4), "video a.mp4 has 5 frames and 4 matrices"),
        ((LARGER @ preset_path("arc_left", FRAMES)).tolist(), "off orthonormal by 0.21"),
        ((MIRROR @ preset_path("arc_left", FRAMES)).tolist(), "matrix 0 is a mirror image"),
        ([[1, 2], [3, 4]], "has shape (2, 2), must be (T, 4, 4)"),
        ([[[1, 2], [3]]], "no list of 4x4 matrices"),
        ({"camera_type": "x"}, "['camera_type'], must have poses"),
        ({"poses": path(), "fps": 3}, "['fps', 'poses'], must have poses and may have camera_type, focal_px"),
        ({"poses": path(), "source": 3}, "source is 3, must be a text"),
        ({"poses": path(), "camera_type": ""}, "camera_type is ''"),
        ({"poses": path(), "focal_px": -1}, "focal_px is -1"),
        ({"poses": path(), "focal_px": "840"}, "focal_px is '840'"),
        ({"poses": path(), "shares_estimator": 1}, "shares_estimator is 1"),
    ],
)
def test_an_unusable_entry_is_refused(tmp_path, entry, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011 the message is looked for below
        one(tmp_path, entry)
    assert message in str(refused.value)


def test_what_is_missing_is_named(tmp_path):
    folder = film(tmp_path / "videos", "a.mp4")
    with pytest.raises(ValueError, match=r"a.mp4, it has b.mp4; add them"):
        find_tasks(folder, poses_file(tmp_path, {"b.mp4": path()}), 30.0)
    with pytest.raises(ValueError, match="--focal-px is None"):
        find_tasks(folder, poses_file(tmp_path, {"a.mp4": path()}), None)
    (tmp_path / "cameras.json").write_text("{")
    with pytest.raises(ValueError, match=r"cameras.json is not JSON"):
        find_tasks(folder, tmp_path / "cameras.json", 30.0)
    (tmp_path / "empty").mkdir()
    for nothing, message in ((tmp_path / "empty", "holds no video"), (tmp_path / "nowhere", "is no folder")):
        with pytest.raises(ValueError, match=message):
            find_tasks(nothing, tmp_path / "cameras.json", 30.0)


def test_a_video_must_name_its_camera_of_a_multicam_file(tmp_path):
    cameras = extrinsics_file(tmp_path, {"cam01": preset_path("arc_left", FRAMES)})
    with pytest.raises(ValueError, match=r"dog.mp4: .* such as cam_type3"):
        find_tasks(film(tmp_path / "videos", "dog.mp4"), cameras, 30.0)
    with pytest.raises(ValueError, match="has no cam02 in frame0"):
        find_tasks(film(tmp_path / "results", "cam_type2/video0.mp4"), cameras, 30.0)
    with pytest.raises(ValueError, match="has 3 frames and 5 matrices"):
        find_tasks(film(tmp_path / "short", "cam_type1/video0.mp4", frames=3), cameras, 30.0)
