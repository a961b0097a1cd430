"""The camera found in a frame, against cameras that are known."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from flow_grpo.data.rooms import bare_room
from flow_grpo.maths.pictures import blur
from flow_grpo.maths.poses import PRESETS, pose, preset_path, rot_err, rotation_matrix, trans_err
from flow_grpo.maths.room import render_video, stack_rooms
from flow_grpo.rewards.room import room_fit, room_pose
from flow_grpo.rewards.room.room_fit import RoomPoses, make_viewpoints
from flow_grpo.rewards.room.room_pose import RoomPose, estimate_poses
from tests.room_films import HEIGHT, INTRINSICS, WIDTH, Film, conditions, film, like_a_codec, reference_pose, viewpoints

FEW = ["pan_right", "zoom_in", "arc_left", "translate_up"]
SHORT = film(FEW, frames=3)


def locate(filmed: Film, videos: Tensor | None = None) -> RoomPoses:
    return estimate_poses(filmed.videos if videos is None else videos, viewpoints(filmed))


def errors(filmed: Film, found: RoomPoses) -> tuple[Tensor, Tensor]:
    """Return degrees and centimetres, each (B, T)."""
    return rot_err(filmed.true, found.poses).rad2deg(), 100 * trans_err(filmed.true, found.poses)


@pytest.mark.parametrize("speed", [0.3, 1.3])
def test_all_ten_presets_are_followed_without_knowing_the_command(speed):
    filmed = film(list(PRESETS), speed=speed, rooms=2)
    degrees, centimetres = errors(filmed, locate(filmed))
    assert degrees.mean() < 0.4 and degrees.max() < 2.5
    assert centimetres.mean() < 2.5 and centimetres.max() < 15


def test_a_large_motion_is_found_and_blur_noise_and_faded_colours_move_the_estimate_little():
    filmed = film(["pan_left", "zoom_in", "zoom_out"], speed=2.0)
    degrees, centimetres = errors(filmed, locate(filmed))
    assert filmed.true[2, -1, :3, 3].norm() > 1.9
    assert degrees.max() < 2 and centimetres.max() < 12
    filmed = film(FEW, rooms=2)
    degrees, centimetres = errors(filmed, locate(filmed, like_a_codec(filmed.videos, sigma=1.0, noise=0.02)))
    assert degrees.mean() < 1.0 and centimetres.mean() < 6
    for changed in (blur(SHORT.videos, 1.2), 0.25 + 0.5 * SHORT.videos):
        found = locate(SHORT, changed)
        degrees, centimetres = errors(SHORT, found)
        assert degrees.mean() < 0.8 and centimetres.mean() < 5
        assert found.residual.mean() < 0.012


def test_the_picture_on_its_own_path_tells_what_no_camera_explains():
    """Exact videos agree with the room along any path; noise, blur and faded colours do not."""

    def decibels(videos: Tensor) -> Tensor:
        return locate(SHORT, videos).psnr.mean(1)

    exact = decibels(SHORT.videos)
    assert exact.min() > 37
    noise = 0.02 * torch.randn(SHORT.videos.shape, generator=torch.Generator().manual_seed(0))
    for changed, most in ((SHORT.videos + noise, 34), (blur(SHORT.videos, 1.2), 26), (0.1 + 0.8 * SHORT.videos, 26)):
        assert (decibels(changed) < exact).all() and decibels(changed).mean() < most


def test_the_command_has_no_part_in_the_estimate(tmp_path):
    """Three commands for one video: the errors are those of one and the same path, found once."""
    chosen = conditions(SHORT, root=tmp_path)
    found = locate(SHORT).poses
    for command in (
        SHORT.true,
        preset_path("arc_right", 3).expand(4, 3, 4, 4),
        preset_path("tilt_up", 3).expand(4, 3, 4, 4),
    ):
        asked = [dataclasses.replace(each, target_poses=poses) for each, poses in zip(chosen, command, strict=True)]
        info = RoomPose(tmp_path)(SHORT.videos, asked).info
        assert torch.allclose(info["rot_err_deg"], rot_err(command, found).rad2deg().mean(1).float(), atol=1e-4)
        assert torch.allclose(info["trans_err_m"], trans_err(command, found).mean(1).float(), atol=1e-5)


def test_the_guesses_reach_every_preset_of_the_tiny_world():
    """No frame of the longest paths is further from a guess than its neighbours in the grid are from one another."""
    guesses = room_pose.initial_poses().double()
    for name in PRESETS:
        end = preset_path(name, 2, translation_scale=0.65, rotation_scale=1.0)[-1]
        degrees, metres = rot_err(end, guesses).rad2deg(), trans_err(end, guesses)
        assert (degrees / 10 + metres / 0.4).min() < 1, name


def test_single_frames_far_from_the_reference_are_found():
    far = [(dx, yaw, pitch) for dx in (-0.8, 0.8) for yaw in (-40, 0, 40) for pitch in (-12, 12)]
    turns = torch.tensor([(pitch, yaw, 0.0) for _, yaw, pitch in far], dtype=torch.float64).deg2rad()
    moves = torch.tensor([(dx, 0.0, 0.5) for dx, _, _ in far], dtype=torch.float64)
    true = pose(rotation_matrix(turns), moves)[:, None]
    rooms = stack_rooms([bare_room(torch.Generator().manual_seed(3))] * len(far))
    references = reference_pose().expand(len(far), 4, 4)
    videos = render_video(rooms, (references[:, None] @ true).float(), INTRINSICS, HEIGHT, WIDTH, 4)
    found = estimate_poses(like_a_codec(videos), make_viewpoints(rooms, references, INTRINSICS))
    assert rot_err(true, found.poses).rad2deg().max() < 3
    assert trans_err(true, found.poses).max() < 0.2


def test_a_frame_is_found_from_its_neighbours_when_its_own_guesses_fail(monkeypatch):
    """Two frames of one still picture; only the first is given a guess that leads anywhere."""
    still = film(["pan_left"], frames=1)
    videos = still.videos.expand(-1, -1, 2, -1, -1)
    away = pose(rotation_matrix(torch.tensor([0.0, math.radians(100), 0.0])), torch.zeros(3))
    starts = (still.references.float() @ torch.stack([torch.eye(4), away.float()]))[:, None].expand(2, 4, 4, 4)
    monkeypatch.setattr(room_fit, "guess", lambda view, guesses, count: starts)
    found = estimate_poses(videos, viewpoints(still))
    assert trans_err(still.true, found.poses).max() < 0.05


def test_poses_are_rigid_and_those_of_each_video_with_its_viewpoint_alone():
    found = locate(SHORT)
    assert found.poses.dtype == torch.float64
    rotation = found.poses[..., :3, :3]
    assert torch.allclose(rotation @ rotation.mT, torch.eye(3, dtype=torch.float64).expand_as(rotation), atol=1e-12)
    assert torch.allclose(torch.linalg.det(rotation), torch.ones(4, 3, dtype=torch.float64))
    assert found.residual.shape == (4, 3)
    part = estimate_poses(SHORT.videos[1:2], viewpoints(SHORT).take(torch.tensor([1])))
    assert torch.allclose(part.poses[0], found.poses[1], atol=2e-3)
    each = make_viewpoints(SHORT.rooms, SHORT.references, INTRINSICS.expand(4, 4))
    assert torch.equal(estimate_poses(SHORT.videos, each).poses, found.poses)
    with pytest.raises(AssertionError, match="a viewpoint for every video"):
        estimate_poses(SHORT.videos[:2], viewpoints(SHORT))


def test_the_reward_is_the_formula_of_its_errors_and_orders_speeds(tmp_path):
    chosen = conditions(SHORT, root=tmp_path)
    off = [dataclasses.replace(c, target_poses=preset_path("zoom_in", 3, translation_scale=-0.25)) for c in chosen]
    result = RoomPose(tmp_path)(SHORT.videos, off)
    assert result.valid.all()
    expected = -result.info["trans_err_m"] - result.info["rot_err_deg"] / 45
    assert torch.allclose(result.values, expected, atol=1e-5)
    # The film goes 0.99 m ahead, the command asks for 0.5 m back: 0, 0.75 and 1.49 m apart.
    assert result.info["trans_err_m"][1].item() == pytest.approx(0.746, abs=0.03)
    assert result.info["located"].tolist() == [1, 1, 1, 1]
    reward = RoomPose(tmp_path)
    values = [
        float(reward(like_a_codec(film(FEW, frames=3, speed=speed).videos, sigma=0.5), chosen).values.mean())
        for speed in (1.0, 0.85, 0.6, 0.2)
    ]
    assert values == sorted(values, reverse=True), values


def test_a_picture_of_nothing_gets_both_caps(tmp_path):
    chosen = conditions(SHORT, root=tmp_path)
    noise = torch.rand(SHORT.videos.shape, generator=torch.Generator().manual_seed(0))
    for nothing in (noise, torch.full_like(SHORT.videos, 0.5), SHORT.videos * torch.nan):
        result = RoomPose(tmp_path)(nothing, chosen)
        if nothing is noise:
            assert result.info["residual"].min() > 0.2
        assert result.values.tolist() == pytest.approx([-3] * 4)
        assert result.info["located"].tolist() == [0] * 4
        assert result.info["trans_err_m"].isfinite().all()


def test_what_cannot_be_compared_is_masked_alone_with_its_cause(tmp_path):
    chosen = conditions(SHORT, root=tmp_path)
    chosen[0] = dataclasses.replace(chosen[0], scene="val/nowhere")
    chosen[1] = dataclasses.replace(chosen[1], reference_pose=None)
    (tmp_path / chosen[2].scene / "room.json").write_text('{"base": [1]}')
    result = RoomPose(tmp_path)(SHORT.videos, chosen)
    assert result.valid.tolist() == [False, False, False, True]
    assert "nowhere" in result.causes[0] and "room.json" in result.causes[0]
    assert "no reference pose" in result.causes[1]
    assert "not the JSON form of a room" in result.causes[2]
    assert result.causes[3] == ""
    assert result.info["rot_err_deg"][:3].isnan().all() and result.info["rot_err_deg"][3] < 2
    result = RoomPose(tmp_path / "no rooms")(SHORT.videos, conditions(SHORT))
    assert not result.valid.any()
    assert set(result.info) == set(RoomPose.measures)
