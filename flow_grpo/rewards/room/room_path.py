"""The tiny world's rewards: `room_rot` and `room_trans`, minus the camera's error, and `room_content`, the picture.

A picture's displacement cannot tell a turn from a shift, a comparison with the known room can. The estimator is not
`room_pose`, so that a policy cannot learn that one's mistakes: it starts from random guesses instead of a grid, follows
the path from its known beginning, and looks at every other frame only.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor
from torch.quasirandom import SobolEngine

from flow_grpo.maths.pose_fit import best
from flow_grpo.maths.poses import pose, rot_err, rotation_matrix, trans_err
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.results import scored_rows
from flow_grpo.rewards.room import room_fit
from flow_grpo.rewards.room.room_fit import RoomPoses, Viewpoints
from flow_grpo.runtime.lru import LruCache

SIZES = ((12, 3), (24, 3), (48, 3))  # of coarse, fine and finest pictures: columns, at most, rays per pixel and axis
GUESSES = 1024
REACH = (20.0, 45.0, 2.3, 1.2, 2.4)  # of the guesses: degrees of pitch and yaw, metres right, down, forward
STARTS = 6  # guesses of a frame that are refined
STEPS = (3, 4, 2)  # Levenberg-Marquardt steps at each size
MOST_LOCATED = 4  # frames of a video
_BATCHES: LruCache[bytes, RoomPoses] = LruCache(2)  # what was measured last, by the content of a batch


@functools.cache
def guesses() -> Tensor:
    """Return the initial poses (H, 4, 4) of every frame, relative to the reference: one Sobol sequence for all."""
    numbers = 2 * SobolEngine(len(REACH), scramble=True, seed=0).draw(GUESSES) - 1
    pitch, yaw, *move = (numbers * torch.tensor(REACH)).unbind(1)
    turns = torch.stack([pitch, yaw, torch.zeros_like(yaw)], dim=1).deg2rad()
    return pose(rotation_matrix(turns), torch.stack(move, dim=1))


def scored_frames(frames: int) -> list[int]:
    """Return which of T frames are located: every other one, four at most, the first only if it is alone."""
    located = min((frames - 1) // 2, MOST_LOCATED) or 1
    return [round((number + 1) * (frames - 1) / located) for number in range(located)]


@torch.no_grad()
def estimate_path(videos: Tensor, viewpoints: Viewpoints) -> RoomPoses:
    """Return where the scored frames of videos (B, 3, T, h, w), in [0, 1], were filmed from, by B viewpoints."""
    frames = videos.shape[2]
    numbers = scored_frames(frames)
    images = rearrange(videos[:, :, numbers], "b c t h w -> (b t) c h w").float()
    by_frame = viewpoints.frames(numbers, frames)
    coarse, finest = (room_fit.make_view(by_frame, images, *size) for size in (SIZES[0], SIZES[2]))
    fit = room_fit.refine(coarse, room_fit.guess(coarse, guesses(), STARTS), STEPS[0])
    guessed = rearrange(best(fit.poses, fit.cost, 1), "(b t) 1 r c -> t b 1 r c", t=len(numbers))
    # Thin things make narrow valleys, which guesses may miss: a frame also starts from where the one before it ended.
    found = [viewpoints.references[:, None].float()] * 2
    for number, own in zip(numbers, guessed, strict=True):
        fine = room_fit.make_view(viewpoints.frames([number], frames), videos[:, :, number].float(), *SIZES[1])
        ahead = found[-1] @ torch.linalg.inv(found[-2]) @ found[-1]
        fit = room_fit.refine(fine, torch.cat([own, found[-1], ahead], dim=1), STEPS[1])
        found.append(best(fit.poses, fit.cost, 1))
    poses = rearrange(found[2:], "t b 1 r c -> (b t) 1 r c")
    return room_fit.read_off(finest, room_fit.refine(finest, poses, STEPS[2]), viewpoints)


def find_paths(data_root: Path, videos: Tensor, conditions: Sequence[Condition]) -> tuple[RoomPoses | None, list[str]]:
    """Return where videos were filmed from, those of B that are located, and B causes, "" for these.

    A batch is measured once for all rewards, whatever the commands. The scenes in `data_root` hold `room.json`.
    """
    rows, viewpoints, causes = room_fit.find_viewpoints(data_root, conditions)
    if viewpoints is None:
        return None, causes
    chosen, numbers = videos[rows], scored_frames(videos.shape[2])
    content = hashlib.blake2b(repr(tuple(chosen.shape)).encode(), digest_size=16)
    for part in (chosen[:, :, numbers], viewpoints.table()):
        content.update(part.numpy().tobytes())
    found = _BATCHES.get_or_make(content.digest(), functools.partial(estimate_path, chosen, viewpoints))
    for row, lost in zip(rows, found.lost.sum(1).tolist(), strict=True):
        if lost:
            causes[row] = f"{lost} of {len(numbers)} frames cannot be located: no view of the room is like them"
    return found.rows(~found.lost.any(1)), causes


class RoomPathReward:
    """Base of the three rewards: the mean over the `scored_frames`.

    A video with a frame that cannot be located, for no view of the room explains half its variance, is not valid.
    `info`: `residual`, the rms colour error in [0, 1] that the best poses leave.
    """

    needs = ("target_poses",)
    measures = ("residual",)

    def __init__(self, data_root: str | Path) -> None:
        self.data_root = Path(data_root)

    def of_frames(self, commanded: Tensor, found: RoomPoses) -> Tensor:
        """Return what each frame is worth, (B, F), with commanded poses (B, F, 4, 4), in the unit of the reward."""
        raise NotImplementedError

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score (B, 3, T, h, w) videos in [0, 1]; not valid without room, reference pose, intrinsics or a location."""
        found, causes = find_paths(self.data_root, videos, conditions)
        numbers = scored_frames(videos.shape[2])

        def score(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
            assert found is not None, "called with the rows that are located"
            commanded = torch.stack([conditions[row].need_poses()[numbers] for row in rows])
            return self.of_frames(commanded, found).mean(-1).float(), {"residual": found.residual.mean(-1)}

        return scored_rows(causes, self.measures, score)


class RoomRot(RoomPathReward):
    """value = minus the mean angle in degrees between commanded and found camera axes."""

    name = "room_rot"
    floor = 0.25  # below 0.27, the standard deviation of the value over codec reconstructions of 160 exact videos

    def of_frames(self, commanded: Tensor, found: RoomPoses) -> Tensor:
        """Return minus the rotation errors (B, F) in degrees."""
        return -rot_err(commanded, found.poses).rad2deg()


class RoomTrans(RoomPathReward):
    """value = minus the mean distance in metres between commanded and found camera centres."""

    name = "room_trans"
    floor = 0.015  # likewise below 0.016

    def of_frames(self, commanded: Tensor, found: RoomPoses) -> Tensor:
        """Return minus the distances (B, F) in metres."""
        return -trans_err(commanded, found.poses)


class RoomContent(RoomPathReward):
    """value = mean PSNR in dB to the room as seen from where the video was filmed, wherever that is.

    The content is judged by its agreement with the room, without a true view of the command.
    """

    name = "room_content"
    floor = 0.3  # 7 % of the error's power

    def of_frames(self, commanded: Tensor, found: RoomPoses) -> Tensor:  # noqa: ARG002 - the command has no part in it
        """Return the PSNR (B, F) in dB."""
        return found.psnr
