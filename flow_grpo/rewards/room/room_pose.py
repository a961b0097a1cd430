"""The tiny world's reference estimator: the camera of every frame, by comparing it with renderings of a known room.

Analysis by synthesis: the pose of a frame is the one whose rendering matches it best. Every frame is compared with a
grid of guesses, the same for every command; the best ones are refined coarse to fine (`room_fit.py`), and a frame also
starts from the poses of its neighbours, so one good start is enough for the whole video.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange, repeat
from torch import Tensor

from flow_grpo.maths.pose_fit import best
from flow_grpo.maths.poses import pose, rot_err, rotation_matrix, trans_err
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.results import scored_rows
from flow_grpo.rewards.room import room_fit
from flow_grpo.rewards.room.room_fit import RoomPoses, Viewpoints

SIZES = ((12, 3), (24, 3), (48, 3))  # of coarse, middle and fine pictures: columns, at most, rays per pixel and axis
STARTS = 4  # initial poses of a frame that are refined
GUESS_YAW = (-30.0, -20.0, -10.0, 0.0, 10.0, 20.0, 30.0)  # degrees; more than any preset of the tiny world turns
GUESS_PITCH = (-14.0, -7.0, 0.0, 7.0, 14.0)
GUESS_MOVES = (  # metres right, down, forward: up to the longest preset path of the tiny world
    (0.0, 0.0, 0.0),
    (1.2, 0.0, 0.3),
    (0.6, 0.0, 0.15),
    (-0.6, 0.0, 0.15),
    (-1.2, 0.0, 0.3),
    (0.0, 0.0, 1.2),
    (0.0, 0.0, 0.6),
    (0.0, 0.0, -0.6),
    (0.0, 0.0, -1.2),
    (0.0, 0.6, 0.0),
    (0.0, -0.6, 0.0),
)
ROT_CAP_DEG, TRANS_CAP_M = 45.0, 2.0


def initial_poses() -> Tensor:
    """Return the initial poses (H, 4, 4) of every frame, relative to the reference: every turn with every move."""
    turns = torch.tensor([(pitch, yaw, 0.0) for pitch in GUESS_PITCH for yaw in GUESS_YAW]).deg2rad()
    moves = torch.tensor(GUESS_MOVES)
    return pose(
        repeat(rotation_matrix(turns), "turn r c -> (turn move) r c", move=len(moves)),
        repeat(moves, "move i -> (turn move) i", turn=len(turns)),
    )


@torch.no_grad()
def estimate_poses(videos: Tensor, viewpoints: Viewpoints) -> RoomPoses:
    """Return the camera pose of every frame, found from its own colours.

    A frame that shows another place still gets a pose, with a large residual. Of each of the videos (B, 3, T, h, w),
    in [0, 1], a viewpoint has the room and the reference camera.
    """
    batch, frames = videos.shape[0], videos.shape[2]
    assert len(viewpoints) == batch, "a viewpoint for every video"
    images = rearrange(videos, "b c t h w -> (b t) c h w").float()
    by_frame = viewpoints.frames(range(frames), frames)
    coarse, middle, fine = (room_fit.make_view(by_frame, images, *size) for size in SIZES)
    fit = room_fit.refine(coarse, room_fit.guess(coarse, initial_poses(), STARTS), 3)
    poses = best(fit.poses, fit.cost, 2)
    own = rearrange(poses[:, 0], "(b t) r c -> b t r c", t=frames)
    before, after = torch.cat([own[:, :1], own[:, :-1]], dim=1), torch.cat([own[:, 1:], own[:, -1:]], dim=1)
    neighbours = rearrange(torch.stack([before, after], dim=2), "b t side r c -> (b t) side r c")
    poses = torch.cat([poses, neighbours], dim=1)
    drawn = room_fit.draw(middle, poses)[0].flatten(-2)
    cost = (drawn - drawn.mean(-1, keepdim=True) - middle.colours).square().mean(dim=(0, -1))  # (N, M), look not fitted
    fit = room_fit.refine(middle, best(poses, cost, 2), 2)
    return room_fit.read_off(fine, room_fit.refine(fine, best(fit.poses, fit.cost, 1), 3), viewpoints)


def closeness(commanded: Tensor, found: Tensor, lost: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return how close cameras come to their commands (B,), and the errors that this is made of.

    value = -mean_i min(d_i, 2 m) / 1 m - mean_i min(theta_i, 45 deg) / 45 deg over frames i, with d_i the distance of
    camera centres and theta_i the rotation error; a lost frame scores both caps. With it `rot_err_deg` and
    `trans_err_m`, uncapped means over all frames, and `located`, the share of frames that are not lost. Poses are
    (B, T, 4, 4), those of lost frames (B, T) included.
    """
    turns, moves = rot_err(commanded, found), trans_err(commanded, found)
    degrees = turns.rad2deg().clamp(max=ROT_CAP_DEG).masked_fill(lost, ROT_CAP_DEG)
    metres = moves.clamp(max=TRANS_CAP_M).masked_fill(lost, TRANS_CAP_M)
    return -(metres + degrees / ROT_CAP_DEG).mean(-1).float(), {
        "rot_err_deg": turns.mean(-1).rad2deg().float(),
        "trans_err_m": moves.mean(-1).float(),
        "located": 1 - lost.float().mean(-1),
    }


class RoomPose:
    """Closeness of the camera to its command: an optional reward, and the tiny world's reference metric.

    The value is `closeness`. A frame is lost if no pose explains half its variance, so that an empty picture never
    beats a wrong camera. `info`: what comes with the value, two measures of the picture wherever the camera is:
    `residual`, the colour error that no pose, blur and contrast explain, and `found_path_psnr_db` of the video to the
    room as filmed on the path that was found, blur and contrast included; and `camera_travel`, the mean distance of the
    cameras found from the reference in metres, since a picture is the worse the farther its camera went.
    """

    name = "room_pose"
    needs = ("target_poses",)
    floor = 0.02  # about 1.5 cm and 0.2 degrees: half of what a codec's blur moves the estimate
    measures: tuple[str, ...] = (
        "rot_err_deg",
        "trans_err_m",
        "residual",
        "found_path_psnr_db",
        "located",
        "camera_travel",
    )

    def __init__(self, data_root: str | Path) -> None:
        self.data_root = Path(data_root)

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid without room, reference pose or intrinsics."""
        _, viewpoints, causes = room_fit.find_viewpoints(self.data_root, conditions)

        def score(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            assert viewpoints is not None, "called with rows that have one"
            found = estimate_poses(videos[rows], viewpoints)
            commanded = torch.stack([conditions[row].need_poses() for row in rows])
            value, info = closeness(commanded, found.poses, found.lost)
            picture = {"residual": found.residual.mean(-1), "found_path_psnr_db": found.psnr.mean(-1)}
            return value, info | picture | {"camera_travel": found.poses[..., :3, 3].norm(dim=-1).mean(-1).float()}

        return scored_rows(causes, self.measures, score)

    def locate(self, videos: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """Return the poses (B, T, 4, 4) found in (B, 3, T, h, w) videos, like the commands; NaN for lost frames."""
        rows, viewpoints, _ = room_fit.find_viewpoints(self.data_root, conditions)
        poses = torch.full((len(videos), videos.shape[2], 4, 4), torch.nan, dtype=torch.float64)
        if viewpoints is not None:
            poses[rows] = self.follow(videos[rows], viewpoints)
        return poses

    def follow(self, videos: Tensor, viewpoints: Viewpoints) -> Tensor:
        """Return the poses (B, T, 4, 4) found in videos of rooms that are known; NaN for lost frames."""
        found = estimate_poses(videos, viewpoints)
        return found.poses.masked_fill(found.lost[..., None, None], torch.nan)
