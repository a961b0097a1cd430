"""Camera files: what is refused, and with which place."""

from __future__ import annotations

import json

import pytest

from flow_grpo.data.camera_files import read_cameras
from tests.data.test_multicam import FRAMES, IDENTITY, MIRRORED, SCALED, TRANSPOSED, extrinsics, matrix_text, refusal


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (matrix_text([[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]], (1, 2, 3)), "singular"),
        (matrix_text([[0, 0, 0, 0]] * 3, (1, 2, 3)), "singular"),
        (matrix_text(SCALED, (1, 2, 3)), "off orthonormal by 3"),
        (matrix_text(MIRRORED, (1, 2, 3)), "mirror image"),
        (TRANSPOSED, "is the matrix transposed?"),
        (matrix_text(IDENTITY, (1, 2, float("nan"))), "not finite"),
        ("[1 0 0 0] [0 1 0 0] [0 0 1 0]", "four rows of four numbers"),
        ("[1 0 0 0] [0 1 0 0] [0 0 1 0] [1 2 3]", "four rows of four numbers"),
        ("[1 0 0 0] [0 1 0 0] [0 0 1 0] [1 2 three 1]", "four rows of four numbers"),
        ("[1 0 0 0] [0 1 0 0] and [0 0 1 0] [1 2 3 1]", "four rows of four numbers"),
        ([[1, 0, 0, 0]], "four rows of four numbers"),
    ],
)
def test_a_matrix_that_is_no_pose_is_refused_with_its_place(tmp_path, entry, reason):
    content = extrinsics()
    content["frame3"]["cam02"] = entry  # type: ignore[assignment]
    file = tmp_path / "camera_extrinsics.json"
    file.write_text(json.dumps(content))
    assert read_cameras(file, ("cam01", "cam10"), FRAMES).shape == (2, FRAMES, 4, 4)
    assert read_cameras(file, ("cam02",), 3).shape == (1, 3, 4, 4)
    text = refusal(lambda: read_cameras(file, ("cam01", "cam02"), FRAMES))
    assert reason in text and f"{file}, frame3, cam02" in text


def test_a_missing_frame_or_camera_is_refused_with_its_place(tmp_path):
    file = tmp_path / "camera_extrinsics.json"
    content = extrinsics()
    del content["frame3"]
    file.write_text(json.dumps(content))
    assert "has no frame3, needs frame0..frame4 for cam02" in refusal(lambda: read_cameras(file, ("cam02",), FRAMES))
    content = extrinsics()
    del content["frame3"]["cam02"]
    file.write_text(json.dumps(content))
    text = refusal(lambda: read_cameras(file, ("cam02",), FRAMES))
    assert f"{file} has no cam02 in frame3, it has ['cam01', 'cam10']" in text


@pytest.mark.parametrize("content", ['{"frame0": ', "[1, 2]", ""])
def test_a_camera_file_that_is_no_json_object_is_refused(tmp_path, content):
    file = tmp_path / "camera_extrinsics.json"
    file.write_text(content)
    assert str(file) in refusal(lambda: read_cameras(file, ("cam01",), FRAMES))


def test_a_camera_file_that_is_no_text_is_refused(tmp_path):
    file = tmp_path / "camera_extrinsics.json"
    file.write_bytes(b"\xff\xfe\x00")
    assert f"{file} cannot be read" in refusal(lambda: read_cameras(file, ("cam01",), FRAMES))
    assert f"{tmp_path} cannot be read" in refusal(lambda: read_cameras(tmp_path, ("cam01",), FRAMES))
