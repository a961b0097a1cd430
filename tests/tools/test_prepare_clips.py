import json

import numpy as np
import pytest
import torch

from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.maths.poses import preset_path
from flow_grpo.runtime.video_file import write_video
from tests.data.cases import clip
from tests.refusals import refusal
from tests.textured_room import slowed
from tools import check_sources, prepare_clips

FRAMES = 5
CAMERAS = ["pan_right", "arc_left:0.5"]


@pytest.fixture
def clips(tmp_path):
    folder = tmp_path / "clips"
    folder.mkdir()
    for number, name in enumerate(("beach", "street", "tower", "yard")):
        write_video(folder / f"{name}.mp4", clip(number), lossless=True)
    return folder


def words(clips, *more):
    return [str(clips), "--out", str(clips.parent / "data"), "--frames", str(FRAMES), "--camera", *CAMERAS, *more]


def prepare(clips, *more):
    return prepare_clips.main(words(clips, *more))


def items(clips, split="train"):
    data = MultiCamDataset(clips.parent / "data", split, (FRAMES, 16, 24), prompt="a clip")
    return [data.condition(index) for index in range(len(data))]


def test_every_clip_is_filmed_along_every_path_and_a_share_is_held_out(clips, capsys):
    assert prepare(clips, "--focal-px", "20", "--depth", "4", "--val", "0.25") == 0
    assert "4 clips along 2 camera paths, 1 of them held out" in capsys.readouterr().out
    trained, held_out = items(clips), items(clips, "val")
    assert len(trained) == 6 and len(held_out) == 2
    assert len({condition.source_camera for condition in trained + held_out}) == 4
    paths = [preset_path("pan_right", FRAMES), slowed("arc_left", FRAMES, 0.5)]
    for condition, preset, path in zip(trained, CAMERAS * 3, paths * 3, strict=True):
        assert condition.preset == preset and condition.source_poses is None and condition.target_video is None
        assert torch.allclose(condition.target_poses, path.double(), atol=1e-6)
        assert condition.intrinsics.tolist() == pytest.approx([20, 20, 12, 8], abs=1e-3)
        assert condition.source_depth.maps.tolist() == [[[4.0]]]


def test_a_focal_length_in_pixels_is_not_taken_for_clips_of_several_widths(clips, capsys):
    write_video(clips / "wide.mp4", clip(9, width=48), lossless=True)
    message = refusal(capsys, prepare_clips.main, words(clips, "--focal-px", "20"))
    assert "is in pixels of one width, the clips have 24 (" in message and "48 (wide.mp4)" in message
    checked = [str(clips), "--config", "config/grpo.py:my_recam_1gpu_footage", "--focal-px", "20"]
    assert refusal(capsys, check_sources.main, checked) == message
    assert prepare(clips) == 0


def test_what_stands_beside_a_clip_is_used(clips):
    path = preset_path("pan_left", FRAMES).double()
    (clips / "street.json").write_text(json.dumps({"poses": path.tolist()}))
    np.savez(clips / "street.depth.npz", depth=np.full((1, 16, 24), 3.0))
    assert prepare(clips, "--val", "0") == 0
    by_name = {condition.source_camera: condition for condition in items(clips)}
    assert torch.allclose(by_name["street"].source_poses, path, atol=1e-6)
    assert (by_name["street"].source_depth.maps == 3).all() and by_name["yard"].source_depth is None
    assert by_name["yard"].intrinsics is None


def test_poses_of_other_programs_bring_their_focal_length_and_ask_for_their_unit(clips, capsys):
    path = preset_path("arc_left", FRAMES).double()
    np.savez(clips / "yard.npz", cam_c2w=path, intrinsic=np.diag([40.0, 40, 1]), images=np.zeros((0, 32, 48, 3)))
    assert prepare(clips) == 2 and "yard.npz does not know the metre: pass --unit" in capsys.readouterr().err
    (clips / "yard.txt").write_text("")
    assert prepare(clips, "--unit", "2") == 2 and "remove one of them" in capsys.readouterr().err
    (clips / "yard.txt").unlink()
    assert prepare(clips, "--unit", "2", "--val", "0") == 0
    assert "focal length unknown, so no reward can measure the cameras of beach.mp4, street" in capsys.readouterr().out
    by_name = {condition.source_camera: condition for condition in items(clips)}
    assert torch.allclose(by_name["yard"].source_poses[:, :3, 3], 2 * path[:, :3, 3], atol=1e-6)
    assert by_name["yard"].intrinsics.tolist() == pytest.approx([20, 20, 12, 8], abs=1e-3)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--frames", "9"], "has 5 frames, needs 9; remove it or lower --frames"),
        (["--val", "1"], "--val is 1, must be a share from 0 to below 1"),
        (["--camera", "roll"], "'roll', must be among"),
        (["--depth", "0"], "--depth is 0, must be above 0"),
    ],
)
def test_what_cannot_work_is_refused_and_nothing_is_left(clips, capsys, words, text):
    assert prepare(clips, *words) == 2
    assert text in capsys.readouterr().err and not (clips.parent / "data").exists()


def test_a_file_beside_a_clip_that_cannot_be_read_leaves_nothing(clips, capsys):
    (clips / "yard.json").write_text("{")
    assert prepare(clips) == 2
    assert "yard.json" in capsys.readouterr().err and [*clips.parent.iterdir()] == [clips]
