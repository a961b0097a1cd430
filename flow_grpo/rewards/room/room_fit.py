"""Fitting cameras to frames of a known room: what the estimator `room_pose` and the rewards of `room_path` share.

A pose is refined by Levenberg-Marquardt on the colours of a frame. Two things make that exact on small, soft pictures:

* walls meet in anti-aliased edges (the distance to the edge says which share of a pixel each wall covers), so the
  strongest lines of the picture have a gradient instead of jumping between pixels;
* blur and contrast of the frame are fitted with the pose, and mean colours are removed: otherwise a codec's blur of one
  pixel, or a tenth more brightness, moves the pose by a degree and ten centimetres.

Nothing here knows the command: an estimate that began there would find it more often than it is true.

Letters: N frames, M candidate poses of a frame, P pixels, V viewpoints, H guesses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange, repeat
from torch import Tensor

from flow_grpo.maths.pictures import blur_matrix, choose, shrink
from flow_grpo.maths.poses import pose, relative, rotation_matrix
from flow_grpo.maths.room import Room, render, stack_rooms
from flow_grpo.maths.soft_room import Raster, draw_slopes
from flow_grpo.records import Condition

ROOM_FILE = "room.json"  # in a scene folder: the room that it was filmed in
BLUR = 1.5  # pixels: sigma of the blurred rendering that is mixed in
LOOK = (-0.6, 1.5)  # range of the blurred rendering's weight, and of the contrast less 1
MARGIN = 0.1  # metres between the camera and the walls
LARGEST_TURN, LARGEST_MOVE = 0.3, 0.8  # radians and metres of one step
LOST = 0.5  # unexplained share of a frame's variance: under 0.1 after a codec, above 1 for another place
SMALLEST_CONTRAST = 0.03  # standard deviation of colours below which a frame shows nothing


@functools.lru_cache(maxsize=512)
def load_room(path: Path) -> Room:
    """Read a scene's `room.json`.

    Raises:
        OSError: no such file.
        ValueError: the file is not the JSON form of a room.
    """
    try:
        return Room.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not the JSON form of a room: {error!r}") from error


@dataclasses.dataclass(frozen=True)
class Viewpoints:
    """The rooms of V videos or frames, and the cameras that poses are relative to."""

    rooms: Room  # V rooms from `stack_rooms`
    references: Tensor  # (V, 4, 4) float64 absolute camera-to-world of the reference cameras, in metres
    unproject: Tensor  # (V, 3, 3) inverse camera matrices

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Tensor) -> Viewpoints:
        """Return the viewpoints of rows (n,) int64."""
        rooms = Room(**{field.name: getattr(self.rooms, field.name)[rows] for field in dataclasses.fields(Room)})
        return Viewpoints(rooms, self.references[rows], self.unproject[rows])

    def table(self) -> Tensor:
        """Return (V, numbers) float64: everything that makes a viewpoint, one a row."""
        parts = [getattr(self.rooms, field.name) for field in dataclasses.fields(Room)]
        return torch.cat([part.flatten(1).double() for part in (*parts, self.references, self.unproject)], dim=1)

    def distinct(self) -> list[Tensor]:
        """Return the row numbers of each distinct viewpoint."""
        rows: dict[bytes, list[int]] = {}
        for row, content in enumerate(self.table().numpy()):
            rows.setdefault(content.tobytes(), []).append(row)
        return [torch.tensor(each) for each in rows.values()]


def make_viewpoints(rooms: Room, references: Tensor, intrinsics: Tensor) -> Viewpoints:
    """Return V viewpoints of V rooms, reference poses (V, 4, 4) and (4,) or (V, 4) fx, fy, cx, cy in pixels.

    Raises:
        ValueError: the numbers of rooms and reference poses differ.
    """
    count = rooms.base.shape[0]
    if references.shape != (count, 4, 4):
        raise ValueError(f"{count} rooms need as many reference poses (4, 4), got {tuple(references.shape)}")
    fx, fy, cx, cy = intrinsics.float().expand(count, 4).unbind(-1)
    zero, one = torch.zeros_like(fx), torch.ones_like(fx)
    rows = [(1 / fx, zero, -cx / fx), (zero, 1 / fy, -cy / fy), (zero, zero, one)]
    return Viewpoints(rooms, references.double(), torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2))


def find_viewpoints(data_root: Path, conditions: Sequence[Condition]) -> tuple[list[int], Viewpoints | None, list[str]]:
    """Return the rows of conditions whose room is known, these rows' viewpoints, and B causes, "" for these rows.

    Without any such row there are no viewpoints.
    """
    found: dict[int, tuple[Room, Tensor, Tensor]] = {}
    causes = [""] * len(conditions)
    for row, condition in enumerate(conditions):
        if condition.reference_pose is None or condition.intrinsics is None:
            causes[row] = f"{condition.scene} has no reference pose or no intrinsics"
            continue
        try:
            room = load_room(data_root / condition.scene / ROOM_FILE)
            found[row] = room, condition.reference_pose, condition.intrinsics
        except (OSError, ValueError) as error:
            causes[row] = f"no room to compare with: {error}"
    if not found:
        return [], None, causes
    rooms, references, intrinsics = zip(*found.values(), strict=True)
    viewpoints = make_viewpoints(stack_rooms(list(rooms)), torch.stack(references), torch.stack(intrinsics))
    return list(found), viewpoints, causes


@dataclasses.dataclass(frozen=True)
class View:
    """N frames at one resolution, as planes of P pixels."""

    viewpoints: Viewpoints  # N of them
    raster: Raster  # pixel positions, in pixels of the full video
    colours: Tensor  # (3, N, 1, P) the frames, each less its mean colour
    size: tuple[int, int]  # rows and columns
    blur: tuple[Tensor, Tensor]  # matrices (rows, rows), (columns, columns) that blur an image

    @property
    def limit(self) -> Tensor:
        """(N, 1, 3): how far from the middle of the room a camera may be, in metres."""
        return self.viewpoints.rooms.half_size[:, None] - MARGIN


def make_view(viewpoints: Viewpoints, frames: Tensor, columns: int) -> View:
    """Shrink frames (N, 3, h, w) to at most `columns` columns and prepare them to be compared with renderings."""
    height, width = frames.shape[-2:]
    small = shrink(frames, columns)
    size = small.shape[-2], small.shape[-1]
    block = width / size[1]
    y = (torch.arange(size[0]) + 0.5) * (height / size[0])
    x = (torch.arange(size[1]) + 0.5) * (width / size[1])
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    pixels = torch.stack([grid_x, grid_y, torch.ones_like(grid_x)], dim=-1).flatten(0, 1)
    colours = rearrange(small, "n c y x -> c n 1 (y x)").contiguous()
    colours = colours - colours.mean(-1, keepdim=True)
    blur = blur_matrix(size[0], BLUR / block), blur_matrix(size[1], BLUR / block)
    return View(viewpoints, Raster(pixels, viewpoints.unproject, block / math.sqrt(12)), colours, size, blur)


@dataclasses.dataclass(frozen=True)
class Fit:
    """M candidate poses for each of N frames."""

    poses: Tensor  # (N, M, 4, 4) absolute
    look: Tensor  # (N, M, 2) weight of the blurred rendering, and contrast less 1
    cost: Tensor  # (N, M) mean square colour error
    normal: Tensor  # (N, M, 8, 8) J^T J
    gradient: Tensor  # (N, M, 8) J^T r


def _linearise(view: View, poses: Tensor, look: Tensor) -> Fit:
    """Compare frames with renderings; return cost, J^T J and J^T r of a Gauss-Newton step."""
    drawn = draw_slopes(view.viewpoints.rooms, poses, view.raster)  # (7, 3, N, M, P)
    softer = ((view.blur[0] @ drawn.unflatten(-1, view.size)) @ view.blur[1].T).flatten(-2) - drawn
    blur, contrast = look[..., None].unbind(-2)
    drawn = drawn + blur * softer
    drawn = drawn - drawn.mean(-1, keepdim=True)
    error = rearrange((1 + contrast) * drawn[0] - view.colours, "c n m p -> n m (c p)")
    softer = softer[:1] - softer[:1].mean(-1, keepdim=True)
    jacobian = torch.cat([(1 + contrast) * drawn[1:], softer, drawn[:1]])
    jacobian = rearrange(jacobian, "k c n m p -> n m k (c p)").contiguous()
    normal = jacobian @ jacobian.mT
    gradient = (jacobian @ error[..., None])[..., 0]
    return Fit(poses, look, error.square().mean(-1), normal, gradient)


def refine(view: View, poses: Tensor, steps: int) -> Fit:
    """Improve M poses (N, M, 4, 4) of each frame by Levenberg-Marquardt, rejecting steps that make one worse."""
    fit = _linearise(view, poses, torch.zeros(*poses.shape[:2], 2))
    damping = torch.full_like(fit.cost, 1e-3)
    for _ in range(steps):
        diagonal = fit.normal.diagonal(dim1=-2, dim2=-1)
        ridge = damping[..., None] * diagonal + 1e-6
        step = -torch.linalg.solve(fit.normal + torch.diag_embed(ridge), fit.gradient[..., None])[..., 0]
        turn, move, look = step.split([3, 3, 2], dim=-1)
        turn = turn * (LARGEST_TURN / turn.norm(dim=-1, keepdim=True).clamp_min(LARGEST_TURN))
        move = move * (LARGEST_MOVE / move.norm(dim=-1, keepdim=True).clamp_min(LARGEST_MOVE))
        centres = (fit.poses[..., :3, 3] + move).clamp(-view.limit, view.limit)
        moved = pose(rotation_matrix(turn) @ fit.poses[..., :3, :3], centres)
        trial = _linearise(view, moved, (fit.look + look).clamp(*LOOK))
        better = trial.cost < fit.cost
        fit = choose(better, trial, fit)
        damping = torch.where(better, 0.1 * damping, 10 * damping)
    return fit


def best(poses: Tensor, cost: Tensor, count: int) -> Tensor:
    """Return the `count` poses of each frame with the lowest cost (N, M), best first."""
    index = cost.topk(count, dim=1, largest=False).indices
    return poses.gather(1, repeat(index, "n m -> n m r c", r=4, c=4))


def guess(view: View, guesses: Tensor, count: int) -> Tensor:
    """Return the `count` best of H poses (H, 4, 4) relative to the reference, absolute, for each frame, best first.

    Frames of one viewpoint (those of a video, and of the copies of a condition) share the renderings.
    """
    colours = rearrange(view.colours, "c n 1 p -> n (p c)")
    chosen = torch.empty(len(colours), count, 4, 4)
    for rows in view.viewpoints.distinct():
        here = view.viewpoints.take(rows[:1])
        poses = here.references[:, None].float() @ guesses
        limit = here.rooms.half_size - MARGIN
        poses[..., :3, 3] = poses[..., :3, 3].clamp(-limit, limit)
        cameras = poses.clone()
        cameras[..., :3, :3] = poses[..., :3, :3] @ here.unproject[:, None]
        drawn = render(here.rooms, cameras, view.raster.pixels)[0]
        drawn = (drawn - drawn.mean(dim=1, keepdim=True)).flatten(1)  # (H, P * 3)
        product, power = colours[rows] @ drawn.T, drawn.square().sum(1)
        contrast = (product / power).clamp(1 + LOOK[0], 1 + LOOK[1])
        cost = contrast * (contrast * power - 2 * product)
        chosen[rows] = best(poses.expand(len(rows), -1, -1, -1), cost, count)
    return chosen


@dataclasses.dataclass(frozen=True)
class RoomPoses:
    """Where B videos of T frames were taken from."""

    poses: Tensor  # (B, T, 4, 4) float64 OpenCV camera-to-world in metres, relative to the reference camera
    residual: Tensor  # (B, T) rms colour error in [0, 1] of the best pose, after fitting blur, contrast and mean colour
    lost: Tensor  # (B, T) bool, no pose explains half the variance of the frame, at the resolution of the fit


def read_off(view: View, fit: Fit, viewpoints: Viewpoints) -> RoomPoses:
    """Return the first pose of each of N frames as those of B videos, filmed at B viewpoints."""
    poses, cost = (rearrange(part[:, 0], "(b t) ... -> b t ...", b=len(viewpoints)) for part in (fit.poses, fit.cost))
    found = poses.double()
    left, _, right = torch.linalg.svd(found[..., :3, :3])  # float32 steps leave a rotation orthogonal to 1e-6 only
    found[..., :3, :3] = left @ right
    # Not the variance of the full frame: shrinking averages noise away, and a fit of what remains would look good.
    variance = view.colours.square().mean(dim=(0, 2, 3)).reshape(cost.shape).clamp_min(SMALLEST_CONTRAST**2)
    return RoomPoses(relative(viewpoints.references, found), cost.sqrt(), ~(cost <= LOST * variance))  # NaN is lost
