"""Poses of a camera go from each program's files into each other's; what breaks a convention is refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from flow_grpo.data.pose_files import label_of, read_poses
from flow_grpo.data.trajectories import camera_path, read_source_path
from flow_grpo.maths.poses import preset_path
from tests.data.cases import refusal
from tools import convert_poses

PATH = preset_path("arc_left", 9).double()
FORMS = ["path.json", "scene/cameras/camera_extrinsics.json", "path.txt", "vipe/pose/path.npz", "megasam.npz", "colmap"]
LENS = ["--focal-px", "840", "--size", "832", "480"]


@pytest.fixture
def given(tmp_path):
    (tmp_path / "given.json").write_text(json.dumps({"poses": PATH.tolist()}))
    return tmp_path / "given.json"


def convert(given, out, *words):
    assert convert_poses.main([str(given), str(out), *words]) == 0
    return out


@pytest.mark.parametrize("second", FORMS)
@pytest.mark.parametrize("first", FORMS)
def test_every_form_goes_into_every_other(given, tmp_path, first, second):
    there = convert(given, tmp_path / "a" / first, *LENS)
    focal = () if read_poses(there).focal_px and read_poses(there).width else LENS
    back = convert(there, tmp_path / "b" / second, *(focal or LENS[2:]))
    found = read_poses(back)
    assert torch.allclose(found.poses, PATH, atol=1e-6)
    assert found.focal_px in (None, 840) and found.width in (None, 832)
    assert found.metres == (second not in ("path.txt", "megasam.npz", "colmap"))
    assert torch.allclose(read_source_path(back, 5), PATH[:5], atol=1e-6)


def test_colmap_is_world_to_camera_by_name_whatever_the_order_of_its_lines(given, tmp_path):
    """Written from COLMAP's documentation, not by our own writer: x_camera = R x_world + t."""
    turned = PATH[3, :3, :3].T
    quaternion = torch.tensor([turned.trace() + 1]).sqrt() / 2
    sides = torch.stack([turned[2, 1] - turned[1, 2], turned[0, 2] - turned[2, 0], turned[1, 0] - turned[0, 1]])
    words = [*quaternion.tolist(), *(sides / (4 * quaternion)).tolist(), *(-turned @ PATH[3, :3, 3]).tolist()]
    still = "1 0 0 0 0 0 0"
    lines = ["# a comment", f"7 {' '.join(map(str, words))} 1 f2.png", "10.5 3 -1", f"9 {still} 1 f1.png", "", ""]
    (tmp_path / "images.txt").write_text("\n".join(lines))
    (tmp_path / "cameras.txt").write_text("# lens\n1 SIMPLE_RADIAL 832 480 840 416 240 0.001\n")
    found = read_poses(tmp_path)
    assert torch.allclose(found.poses, PATH[[0, 3]], atol=1e-9) and found.focal_px == 840


def test_one_camera_of_a_scene_is_named_behind_its_file(given, tmp_path):
    file = convert(given, tmp_path / "scene" / "cameras" / "camera_extrinsics.json")
    frames = json.loads(file.read_text())
    for number in frames:
        frames[number]["cam02"] = frames["frame0"]["cam01"]
    file.write_text(json.dumps(frames))
    assert torch.allclose(camera_path(f"{file}:cam01", 9), PATH, atol=1e-6) and label_of(f"{file}:cam01") == "cam01"
    assert torch.allclose(read_poses(f"{file}:cam02").poses, torch.eye(4).double().expand(9, 4, 4), atol=1e-6)
    assert f"has cam01, cam02: name one as {file}:cam01" in refusal(lambda: read_poses(file))


def test_an_unknown_unit_is_said_where_metres_are_commanded(given, tmp_path):
    with pytest.warns(UserWarning, match="its unit is not known, taken as metres"):
        camera_path(str(convert(given, tmp_path / "path.txt")), 9)
    scaled = convert(given, tmp_path / "half.json", "--unit", "0.5")
    assert torch.allclose(read_poses(scaled).poses[:, :3, 3], PATH[:, :3, 3] / 2)


def vipe(folder, poses, frames):
    (folder / "pose").mkdir()
    np.savez(folder / "pose" / "a.npz", data=poses, inds=frames)
    return folder / "pose" / "a.npz"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda at: vipe(at, PATH, [0, 1, 2, 4, 5, 6, 7, 8, 9]), "has no pose of frame 3"),
        (lambda at: vipe(at, PATH[:, :3], range(9)), "must be (..., 4, 4)"),
        (lambda at: vipe(at, PATH * torch.tensor([1.0, -1, 1, 1]), range(9)), "mirror image"),
        (lambda at: at / "none.npz", "cannot be read"),
        (lambda at: text(at / "a.txt", "0 0 0 0 0 0 0 2\n1 0 0 0 0 0 0 1"), "quaternions have lengths [2.0, 1.0]"),
        (lambda at: text(at / "a.txt", "1 0 0 0 0 0 0 1\n0 0 0 0 0 0 0 1"), "the times do not grow"),
        (lambda at: text(at / "a.txt", "a cat"), "must hold lines of eight numbers"),
        (lambda at: colmap(at, "1 OPENCV 832 480 840 840 416 240 -0.3 0.1 0 0"), "undistort the video first"),
        (lambda at: colmap(at, "1 PINHOLE 832 480 840 700 416 240"), "pixels must be square"),
        (lambda at: colmap(at, "2 PINHOLE 832 480 840 840 416 240"), "must have one camera of all images"),
    ],
)
def test_what_breaks_a_convention_is_refused_by_name(tmp_path, make, reason):
    place = make(tmp_path)
    got = refusal(lambda: read_source_path(place, 2))
    assert reason in got and str(place) in got


def text(file: Path, content: str) -> Path:
    file.write_text(content)
    return file


def colmap(folder, lens):
    text(folder / "images.txt", "1 1 0 0 0 0 0 0 1 f1.png\n\n2 1 0 0 0 0 0 0 1 f2.png\n")
    text(folder / "cameras.txt", lens)
    return folder


@pytest.mark.parametrize(
    ("out", "words", "reason"),
    [
        ("given.json", [], "exists; choose another"),
        ("colmap", [], "needs --focal-px and --size"),
        ("camera_extrinsics.json", [], "must lie in a folder cameras"),
    ],
)
def test_what_cannot_be_written_is_one_line(given, tmp_path, capsys, out, words, reason):
    assert convert_poses.main([str(given), str(tmp_path / out), *words]) == 2
    assert reason in capsys.readouterr().err
