"""Users' camera paths and videos: what they mean, what is refused, and the conditions made of them."""

import json
import math

import pytest
import torch

from flow_grpo.data.trajectories import (
    UserVideos,
    camera_path,
    find_videos,
    fit_path,
    motion,
    outside_training,
    read_source_path,
)
from flow_grpo.data.video_io import fit_video
from flow_grpo.maths.benchmarks import preset_at_own_speed
from flow_grpo.maths.poses import PRESETS, pose, preset_path, rot_err, rotation_matrix
from flow_grpo.runtime.video_file import write_video
from tests.data.cases import clip, refusal

EYE = torch.eye(4, dtype=torch.float64)


def at(translation=(0, 0, 0), degrees=(0, 0, 0)) -> torch.Tensor:
    rotation = rotation_matrix(torch.tensor(degrees, dtype=torch.float64).deg2rad())
    return pose(rotation, torch.tensor(translation, dtype=torch.float64))


def line(*poses: torch.Tensor) -> torch.Tensor:
    return torch.stack(poses)


def write(path, content) -> str:
    path.write_text(json.dumps(content))
    return str(path)


# --- presets


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_of_full_size_is_the_preset_and_inside_the_training_range(name):
    assert torch.equal(camera_path(name, 81), preset_path(name, 81))  # a warning would be an error here


def test_a_magnitude_scales_translation_and_rotation():
    assert torch.allclose(motion("arc_left:0.5", 5)[-1], at((-0.994, 0, 0.2665), (0, 14.91, 0)), atol=1e-12)
    assert torch.allclose(motion("arc_left:0.5", 5), motion("arc_left", 9)[:5], atol=1e-12)
    assert torch.equal(motion("pan_right:0", 3), EYE.expand(3, 4, 4))
    assert torch.equal(motion(" pan_right : 1 ", 5), motion("pan_right", 5))
    assert torch.equal(motion("zoom_in", 1), EYE[None])


def test_a_preset_per_frame_moves_at_the_speed_of_81_frames_as_the_code_of_redirector():
    assert torch.allclose(motion("pan_left:per_frame", 41), motion("pan_left:0.5", 41), atol=1e-9)
    assert torch.allclose(motion("zoom_in : per_frame", 161), motion("zoom_in:2", 161), atol=1e-9)
    assert torch.equal(motion("arc_left:per_frame", 49), preset_at_own_speed("arc_left", 49))  # bends a little
    got = refusal(lambda: motion("pan_left+arc_left:per_frame", 5))
    assert "magnitude 'per_frame', must be a number" in got and "per_frame alone" in got


def test_combined_motions_add_their_translations_and_rotation_vectors_in_any_order():
    path = motion("zoom_in:0.5+arc_left+tilt_up:2", 5)
    assert torch.allclose(path[-1], at((-1.988, 0, 0.994 + 0.533), (19.88, 29.82, 0)), atol=1e-12)
    assert torch.allclose(path, motion("tilt_up:2+zoom_in:0.5+arc_left", 5), atol=1e-12)
    steps = rot_err(path[:-1], path[1:]).rad2deg()
    assert torch.allclose(steps, steps[:1].expand(4), atol=1e-9)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pan", "names 'pan', must be among pan_right"),
        ("", "names ''"),
        ("pan_left+", "names ''"),
        ("pan_left+-tilt_up", "names '-tilt_up'"),
        ("poses.csv", "a file of poses"),
        ("pan_left:-1", "magnitude '-1', must be a number within 0..100; the other direction is the opposite preset"),
        ("arc_left:1e308", "magnitude '1e308', must be a number within 0..100"),
        ("pan_left:", "magnitude ''"),
        ("pan_left:nan", "magnitude 'nan'"),
        ("pan_left:half", "magnitude 'half'"),
        ("pan_left:1:2", "magnitude '1:2'"),
    ],
)
def test_a_motion_that_is_none_is_refused(text, reason):
    got = refusal(lambda: camera_path(text, 5))
    assert reason in got and repr(text) in got


# --- files


def test_a_path_turns_at_constant_speed_and_moves_on_straight_lines_between_its_poses():
    path = fit_path(line(EYE, at((1, -2, 3), (20, 60, -30))), 5)
    for number in range(5):
        part = number / 4
        assert torch.allclose(path[number, :3, 3], part * torch.tensor([1.0, -2, 3], dtype=torch.float64), atol=1e-12)
        assert torch.allclose(path[number], at((part, -2 * part, 3 * part), (20 * part, 60 * part, -30 * part)))
    assert torch.linalg.det(path[:, :3, :3]).allclose(torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("degrees", [0.0, 1e-7, 90.0, 169.9])
def test_small_and_large_turns_are_halved_exactly(degrees):
    path = fit_path(line(EYE, at(degrees=(0, degrees, 0))), 3)
    assert torch.allclose(path[1], at(degrees=(0, degrees / 2, 0)), atol=1e-12)


def test_a_path_is_resampled_to_the_whole_video():
    given = line(EYE, at((1, 0, 0), (0, 40, 0)), at((0, 0, 2), (10, 0, 5)))
    assert torch.allclose(fit_path(given, 3), given, atol=1e-12)
    given = preset_path("arc_right", 17)
    assert torch.allclose(fit_path(given, 5), given[::4], atol=1e-12)
    assert torch.allclose(fit_path(given, 1), EYE[None])


def test_a_path_with_fps_is_resampled_at_the_rate_of_the_video():
    given = preset_path("pan_left", 25)  # at 30 fps, 0.8 s; five frames at 15 fps take 4/15 s
    assert torch.allclose(fit_path(given, 5, fps=30, video_fps=15), given[:9:2], atol=1e-12)
    assert torch.allclose(fit_path(given[:9], 5, fps=30, video_fps=15)[-1], given[8], atol=1e-12)
    got = refusal(lambda: fit_path(given[:8], 5, fps=30, video_fps=15))
    assert "lasts 0.233 s, 5 frames at 15 fps need 0.267 s" in got and "leave out fps" in got


def test_a_path_from_another_pose_is_made_relative_when_asked_to():
    start = at((3, 1, -2), (0, 90, 0))
    given = preset_path("arc_left", 5)
    assert torch.allclose(fit_path(start @ given, 5, from_first=True), given, atol=1e-12)
    assert '"relative": true' in refusal(lambda: fit_path(start @ given, 5))


def test_printed_digits_are_replaced_by_exact_rotations_and_an_exact_start():
    given = (preset_path("arc_left", 5) * 1e4).round() / 1e4
    given[0, 0, 3] = 5e-4
    path = fit_path(given, 9)
    assert torch.allclose(path[0], EYE, atol=1e-12)
    rotation = path[:, :3, :3]
    assert torch.allclose(rotation.mT @ rotation, torch.eye(3, dtype=torch.float64).expand(9, 3, 3), atol=1e-12)
    assert torch.allclose(path[::2], given, atol=1e-3)


def broken(row: int, column: int, value: float) -> torch.Tensor:
    path = preset_path("arc_left", 3)
    path[1, row, column] = value
    return path


@pytest.mark.parametrize(
    ("poses", "reason"),
    [
        (EYE, "has shape (4, 4), must be (N, 4, 4) with N at least 2"),
        (EYE[None], "has shape (1, 4, 4)"),
        (torch.zeros(3, 3, 4), "must be (..., 4, 4)"),
        (broken(0, 3, math.nan), "not finite"),
        (broken(3, 0, 1.0), "is the matrix transposed?"),
        (broken(0, 0, 2.0), "off orthonormal by"),
        (line(EYE, torch.diag(torch.tensor([1.0, -1, 1, 1])).double()), "pose 1 is a mirror image (determinant -1)"),
        (line(at((0.01, 0, 0)), EYE), "the first pose is off the identity by 0.01, must be at most 0.001"),
        (line(EYE, EYE, at(degrees=(0, 175, 0))), "poses 1 and 2 are turned by 175.0 degrees, must be at most 170"),
    ],
)
def test_what_is_no_path_is_refused(poses, reason):
    assert reason in refusal(lambda: fit_path(poses, 5))


def test_a_file_holds_poses_or_an_object_with_them(tmp_path):
    given = preset_path("arc_left", 9)
    start = at((3, 1, -2), (0, 90, 0))
    bare = write(tmp_path / "bare.json", given.tolist())
    assert torch.allclose(camera_path(bare, 5), given[::2], atol=1e-12)
    timed = write(tmp_path / "timed.JSON", {"poses": (start @ given).tolist(), "fps": 15, "relative": True})
    assert torch.allclose(camera_path(timed, 3, 15.0), given[:3], atol=1e-12)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"pose": []}, "has ['pose'], must have poses"),
        ({"poses": [], "unit": "cm"}, "has ['poses', 'unit']"),
        ("orbit", "no list of 4x4 matrices"),
        ({"poses": [[[1, 0], [0]]]}, "no list of 4x4 matrices"),
        ({"poses": []}, "has shape (0,)"),
        ({"poses": [[[10**400] * 4] * 4] * 2}, "no list of 4x4 matrices"),
        ({"poses": [EYE.tolist()] * 2, "fps": 0}, "fps is 0, must be a number above 0"),
        ({"poses": [EYE.tolist()] * 2, "fps": True}, "fps is True"),
        ({"poses": [EYE.tolist()] * 2, "fps": math.nan}, "fps is nan"),
        ({"poses": [EYE.tolist()] * 2, "relative": 1}, "relative is 1, must be true or false"),
        ([at((1, 0, 0)).tolist()] * 2, "off the identity by 1"),
    ],
)
def test_a_file_that_holds_no_path_is_refused_by_name(tmp_path, content, reason):
    file = write(tmp_path / "orbit.json", content)
    got = refusal(lambda: camera_path(file, 5))
    assert reason in got and file in got


def test_pose_i_of_a_source_s_own_camera_is_that_of_its_frame_i(tmp_path):
    poses = line(*(at((0.01 * number, 0, 0)) for number in range(90)))
    file = tmp_path / "path.json"
    file.write_text(json.dumps(poses.tolist()))
    assert torch.allclose(read_source_path(file, 45), poses[:45])
    file.write_text(json.dumps({"poses": poses[10:].tolist(), "relative": True}))
    assert torch.allclose(read_source_path(file, 45), poses[:45])
    with pytest.raises(ValueError, match=r"path.json: got shape \(80, 4, 4\), must be \(N, 4, 4\), N at least 81"):
        read_source_path(file, 81)
    file.write_text(json.dumps({"poses": poses.tolist(), "fps": 30}))
    with pytest.raises(ValueError, match="fps is 30, must be left out"):
        read_source_path(file, 45)


def test_an_unreadable_file_is_refused_by_name(tmp_path):
    (tmp_path / "orbit.json").write_text("[[1, 0")
    for name in ("orbit.json", "missing.json"):
        got = refusal(lambda name=name: camera_path(tmp_path / name, 5))
        assert f"file {tmp_path / name}" in got and got.endswith("write the trajectory again")


# --- the range of the training set


@pytest.mark.parametrize(
    ("inside", "outside", "said"),
    [
        ("pan_right:2.26", "pan_right:2.3", "pan of 45.7 degrees, in MultiCamVideo up to 45"),
        ("tilt_up:3", "tilt_up:3.1", "tilt of 30.8 degrees, in MultiCamVideo up to 30"),
        ("tilt_down:0.5", "tilt_down:0.45", "0.000 m and 4.47 degrees in all"),
        ("pan_left:0.26", "pan_left:0.2", "in MultiCamVideo from 1 m or 5 degrees on"),
        ("zoom_in:2.4", "zoom_in:2.5", "4.97 m from the start, in MultiCamVideo up to 4.87"),
        ("zoom_in:0.5", "zoom_in:0.4", "0.795 m and 0.00 degrees in all"),
        ("zoom_in+pan_left:3.7", "zoom_in+pan_left:3.9", "arc of 77.5 degrees, in MultiCamVideo up to 75"),
        ("zoom_in:0.5+pan_left:3", "zoom_in:0.4+pan_left:3", "pan of 59.6 degrees"),
        ("pan_left:0", "pan_left:0.01", "or static"),
        ("pan_left+tilt_up", "pan_left:2+tilt_up:3", "roll of"),
    ],
)
def test_a_path_outside_the_training_range_is_said_to_be(inside, outside, said):
    assert outside_training(motion(inside, 81)) == []
    assert len(outside_training(motion(outside, 81))) == 1 and said in outside_training(motion(outside, 81))[0]
    with pytest.warns(UserWarning, match="outside the training range") as caught:
        camera_path(outside, 81)
    assert len(caught) == 1 and said in str(caught[0].message) and outside in str(caught[0].message)


def test_every_pose_of_a_path_is_checked():
    there_and_back = fit_path(line(EYE, at((6, 0, 0)), EYE), 5)
    assert outside_training(there_and_back) == ["6.00 m from the start, in MultiCamVideo up to 4.87"]


# --- users' videos


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "mine"
    for number, name in enumerate(("walk.mp4", "dog.mp4")):
        write_video(folder / name, clip(number, 7, 20, 30), lossless=True)
    (folder / "notes.txt").touch()
    (folder / ".hidden.mp4").touch()
    write(folder / "arc.json", preset_path("arc_right", 5).tolist())
    return folder


def open_folder(folder, **changes) -> UserVideos:
    values = {
        "videos": find_videos(folder),
        "trajectories": ["pan_left", folder / "arc.json"],
        "size": (5, 16, 16),
        "prompts": ["a", "b"],
    }
    return UserVideos(**{**values, **changes})


def test_every_video_goes_along_every_trajectory(folder):
    dataset = open_folder(folder)
    conditions = [dataset.condition(index) for index in range(len(dataset))]
    assert len(open_folder(folder, trajectories=["pan_left"])) == 2
    dog, walk = ((folder / name).as_posix() for name in ("dog.mp4", "walk.mp4"))
    assert [(c.index, c.scene, c.target_camera, c.preset, c.prompt) for c in conditions] == [
        (0, dog, "pan_left", "pan_left", "a"),
        (1, dog, "arc", None, "a"),
        (2, walk, "pan_left", "pan_left", "b"),
        (3, walk, "arc", None, "b"),
    ]
    for condition in conditions:
        number = int("dog" in condition.scene)
        assert torch.equal(condition.source_video * 255, fit_video(clip(number, 7, 20, 30)[:, :5], 16, 16).float())
        assert condition.source_video.dtype == torch.float32
        assert condition.size == dataset.size_of(condition.index) == (5, 16, 16)
        path = preset_path("arc_right" if condition.preset is None else "pan_left", 5)
        assert torch.allclose(condition.target_poses, path, atol=1e-12)
        for name in ("source_poses", "reference_pose", "intrinsics", "target_video"):
            assert getattr(condition, name) is None, name
    for index in (-1, 4):
        with pytest.raises(IndexError, match=rf"index is {index}, must be within 0\.\.3"):
            dataset.condition(index)


def test_a_video_keeps_its_rate_and_a_timed_path_follows_it(folder):
    write_video(folder / "dog.mp4", clip(1, 7, 20, 30), fps=30, lossless=True)
    timed = write(folder / "timed.json", {"poses": preset_path("arc_right", 9).tolist(), "fps": 30})
    dog, walk = map(open_folder(folder, trajectories=[timed]).condition, range(2))
    assert (dog.fps, walk.fps) == (30, 15)
    assert torch.allclose(dog.target_poses, preset_path("arc_right", 9)[:5], atol=1e-12)
    assert torch.allclose(walk.target_poses, preset_path("arc_right", 9)[::2], atol=1e-12)


def test_an_item_depends_on_its_index_alone(folder):
    first, second = open_folder(folder), open_folder(folder)
    for _ in range(2):
        one, two = first.condition(3), second.condition(3)
        assert torch.equal(one.source_video, two.source_video) and torch.equal(one.target_poses, two.target_poses)
        two.source_video.zero_()
        two.target_poses.zero_()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"trajectories": []}, "trajectories are []"),
        ({"trajectories": ["pan_left", " pan_left"]}, "none twice"),
        ({"trajectories": ["spin"]}, "names 'spin'"),
        ({"videos": []}, "videos are []"),
        ({"videos": ["a.mp4", "a.mp4"]}, "none twice"),
    ],
)
def test_bad_arguments_are_refused(folder, changes, reason):
    assert reason in refusal(lambda: open_folder(folder, **changes))


def test_unusable_videos_are_refused(folder, tmp_path):
    assert "is too short, got 7 of 9" in refusal(lambda: open_folder(folder, size=(9, 16, 16)).condition(0))
    assert "cat.mp4" in refusal(lambda: open_folder(folder, videos=[folder / "cat.mp4"]).condition(0))
    for empty in (tmp_path, tmp_path / "missing"):
        assert f"{empty} is no folder with videos" in refusal(lambda empty=empty: find_videos(empty))


def test_a_path_is_warned_of_once_per_dataset_and_not_per_item(folder):
    with pytest.warns(UserWarning, match="outside the training range"):
        dataset = open_folder(folder, trajectories=["pan_left:3"])
    dataset.condition(0)  # a warning would be an error
