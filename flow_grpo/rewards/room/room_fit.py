"""Fitting cameras to frames of a known room: what the estimator `room_pose` and the rewards of `room_path` share.

A pose is refined by Levenberg-Marquardt on the colours of a frame: the room is rendered with its depth, and a camera's
motion shifts each pixel along the picture's gradient by what the depth says (direct image alignment, as in LSD-SLAM,
ECCV 2014). Blur and contrast of the frame are fitted with the pose, and mean colours are removed: otherwise a codec's
blur of one pixel, or a tenth more brightness, moves the pose by a degree and ten centimetres.

Nothing here knows the command: an estimate that began there would find it more often than it is true.

Letters: N frames, M candidate poses of a frame, P pixels, V viewpoints, H guesses.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from einops import rearrange, reduce, repeat
from torch import Tensor

from flow_grpo.maths import pose_fit
from flow_grpo.maths.pictures import blur_matrix, shrink
from flow_grpo.maths.pose_fit import Fit, best
from flow_grpo.maths.poses import orthogonal, relative
from flow_grpo.maths.room import SUPERSAMPLE, Room, frame_times, pixel_rays, render, stack_rooms
from flow_grpo.records import Condition, Rows

ROOM_FILE = "room.json"  # in a scene folder: the room that it was filmed in
BLUR = 1.5  # pixels: sigma of the blurred rendering that is mixed in
LOOK = (-0.6, 1.5)  # range of the blurred rendering's weight, and of the contrast less 1
MARGIN = 0.1  # metres between the camera and the walls
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
    intrinsics: Tensor  # (V, 4) fx, fy, cx, cy in pixels

    def __len__(self) -> int:
        return len(self.references)

    def take(self, rows: Tensor) -> Viewpoints:
        """Return the viewpoints of rows (n,) int64."""
        return Viewpoints(self.rooms.take(rows), self.references[rows], self.intrinsics[rows])

    def frames(self, numbers: Sequence[int], frames: int) -> Viewpoints:
        """Return a viewpoint for each of these frames of videos of so many, video-major; rooms as they are then."""
        each = self.take(torch.arange(len(self)).repeat_interleave(len(numbers)))
        times = frame_times(frames)[list(numbers)].repeat(len(self))
        return dataclasses.replace(each, rooms=each.rooms.at(times))

    def table(self) -> Tensor:
        """Return (V, numbers) float64: everything that makes a viewpoint, one a row."""
        parts = [getattr(self.rooms, field.name) for field in dataclasses.fields(Room)]
        return torch.cat([part.flatten(1).double() for part in (*parts, self.references, self.intrinsics)], dim=1)

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
    return Viewpoints(rooms, references.double(), intrinsics.float().expand(count, 4))


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

    viewpoints: Viewpoints  # N of them, the intrinsics those of the shrunk frames
    colours: Tensor  # (3, N, 1, P) the frames, each less its mean colour
    means: Tensor  # (3, N, 1, 1) which is this
    size: tuple[int, int]  # rows and columns
    supersample: int  # rays per shrunk pixel and axis of what they are compared with
    blur: tuple[Tensor, Tensor]  # matrices (rows, rows), (columns, columns) that blur an image

    @property
    def limit(self) -> Tensor:
        """(N, 1, 3): how far from the middle of the room a camera may be, in metres."""
        return self.viewpoints.rooms.half_size[:, None] - MARGIN


def make_view(viewpoints: Viewpoints, frames: Tensor, columns: int, supersample: int) -> View:
    """Shrink frames (N, 3, h, w) to at most `columns` columns and prepare them to be compared with renderings."""
    small = shrink(frames, columns)
    size = small.shape[-2], small.shape[-1]
    rows, block = frames.shape[-2] / size[0], frames.shape[-1] / size[1]
    shrunk = dataclasses.replace(
        viewpoints, intrinsics=viewpoints.intrinsics / torch.tensor([block, rows, block, rows])
    )
    colours = rearrange(small, "n c y x -> c n 1 (y x)").contiguous()
    means = colours.mean(-1, keepdim=True)
    blur = blur_matrix(size[0], BLUR / block), blur_matrix(size[1], BLUR / block)
    return View(shrunk, colours - means, means, size, supersample, blur)


def draw(view: View, poses: Tensor, supersample: int = 0) -> tuple[Tensor, Tensor]:
    """Render M poses (N, M, 4, 4) of each frame; return colours (3, N, M, rows, columns) and mean inverse depths.

    With `supersample` the rays lie on a square grid, as in the films; without it they are a fit's.
    """
    count = supersample or view.supersample
    square = pixel_rays(view.viewpoints.intrinsics, *view.size, count)
    colours, depth = render(view.viewpoints.rooms, poses, square if supersample else _apart(square, view))
    pixels = "(y i x j) -> ... y x"
    sizes = {"y": view.size[0], "i": count, "j": count}
    return reduce(colours, f"... {pixels}", "mean", **sizes), reduce(1 / depth, f"... {pixels}", "mean", **sizes)


def _apart(rays: Tensor, view: View) -> Tensor:
    """Return a pixel's rays (N, y i x j, 3) moved so that no two of them share a row or a column.

    Walls and furniture stand upright: on a square grid all rays of a column cross such an edge at once, and the cost
    has steps on which a fit ends.
    """
    count, (rows, columns) = view.supersample, view.size
    step = ((torch.arange(count) + 0.5) / count - 0.5) / count  # pixels
    across = repeat(step, "i -> (y i x j)", y=rows, x=columns, j=count)
    down = repeat(step, "j -> (y i x j)", y=rows, i=count, x=columns)
    moved = torch.stack([across, down], dim=-1) / view.viewpoints.intrinsics[:, None, :2]
    return torch.cat([rays[..., :2] + moved, rays[..., 2:]], dim=-1)


def _linearise(view: View, poses: Tensor, look: Tensor) -> Fit:
    """Compare frames with renderings; return cost, J^T J and J^T r of a Gauss-Newton step.

    The look (N, M, 2) is the weight of the blurred rendering, and contrast less 1.
    """
    drawn, nearness = draw(view, poses)
    softer = view.blur[0] @ drawn @ view.blur[1].T - drawn
    blur, contrast = look[..., None].unbind(-2)
    drawn = drawn + blur[..., None] * softer
    slope_y, slope_x = (slope.flatten(-2) for slope in torch.gradient(drawn, dim=(-2, -1)))
    drawn, softer, nearness = drawn.flatten(-2), softer.flatten(-2), nearness.flatten(-2)
    error = (1 + contrast) * (drawn - drawn.mean(-1, keepdim=True)) - view.colours
    # A point at (x, y, 1) / nearness moves by -(translation + rotation x point) in the camera's axes.
    x, y, _ = pixel_rays(view.viewpoints.intrinsics, *view.size)[:, None].unbind(-1)  # (N, 1, P)
    focal_x, focal_y = view.viewpoints.intrinsics[:, :2, None, None].unbind(1)
    zero, one = torch.zeros_like(nearness), torch.ones_like(nearness)
    shift_x = torch.stack([x * y * one, -(1 + x * x) * one, y * one, -nearness, zero, x * nearness])
    shift_y = torch.stack([(1 + y * y) * one, -x * y * one, -x * one, zero, -nearness, y * nearness])
    moved = -slope_x * (focal_x * shift_x)[:, None] - slope_y * (focal_y * shift_y)[:, None]
    jacobian = torch.cat([(1 + contrast) * moved, softer[None], drawn[None]])
    jacobian = rearrange(jacobian - jacobian.mean(-1, keepdim=True), "k c n m p -> n m k (c p)").contiguous()
    gradient = jacobian @ rearrange(error, "c n m p -> n m (c p) 1")
    return Fit(poses, look, error.square().mean(dim=(0, -1)), jacobian @ jacobian.mT, gradient[..., 0])


def refine(view: View, poses: Tensor, steps: int) -> Fit:
    """Improve M poses (N, M, 4, 4) of each frame by Levenberg-Marquardt, rejecting steps that make one worse."""

    def confine(centres: Tensor, look: Tensor) -> tuple[Tensor, Tensor]:
        return centres.clamp(-view.limit, view.limit), look.clamp(*LOOK)

    return pose_fit.refine(functools.partial(_linearise, view), confine, poses, steps)


def guess(view: View, guesses: Tensor, count: int) -> Tensor:
    """Return the `count` best of H poses (H, 4, 4) relative to the reference, absolute, for each frame, best first.

    Frames of one viewpoint (those of a video, and of the copies of a condition) share the renderings.
    """
    chosen = torch.empty(view.colours.shape[1], count, 4, 4)
    for rows in view.viewpoints.distinct():
        here = dataclasses.replace(view, viewpoints=view.viewpoints.take(rows[:1]))
        poses = here.viewpoints.references[:, None].float() @ guesses
        poses[..., :3, 3] = poses[..., :3, 3].clamp(-here.limit, here.limit)
        drawn = draw(here, poses, 1)[0].flatten(-2)
        drawn = rearrange(drawn - drawn.mean(-1, keepdim=True), "c 1 h p -> h (c p)")
        colours = rearrange(view.colours[:, rows], "c n 1 p -> n (c p)")
        product, power = colours @ drawn.T, drawn.square().sum(1)
        contrast = (product / power).clamp(1 + LOOK[0], 1 + LOOK[1])
        cost = contrast * (contrast * power - 2 * product)
        chosen[rows] = best(poses.expand(len(rows), -1, -1, -1), cost, count)
    return chosen


@dataclasses.dataclass(frozen=True)
class RoomPoses(Rows):
    """Where B videos of T frames were taken from."""

    poses: Tensor  # (B, T, 4, 4) float64 OpenCV camera-to-world in metres, relative to the reference camera
    residual: Tensor  # (B, T) rms colour error in [0, 1] of the best pose, after fitting blur, contrast and mean colour
    psnr: Tensor  # (B, T) dB, of the frame to the room as seen from the best pose, nothing else fitted
    lost: Tensor  # (B, T) bool, no pose explains half the variance of the frame, at the resolution of the fit


def read_off(view: View, fit: Fit, viewpoints: Viewpoints) -> RoomPoses:
    """Return the first pose of each of N frames as those of B videos, filmed at B viewpoints."""
    poses, cost = fit.poses[:, :1], fit.cost[:, 0]
    error = draw(view, poses, SUPERSAMPLE)[0].flatten(-2) - view.means - view.colours
    psnr = -10 * error.square().mean(dim=(0, 2, 3)).clamp_min(1e-10).log10()
    # Not the variance of the full frame: shrinking averages noise away, and a fit of what remains would look good.
    variance = view.colours.square().mean(dim=(0, 2, 3))
    lost = ~((cost <= LOST * variance) & (variance >= SMALLEST_CONTRAST**2))  # NaN is lost
    found = (orthogonal(poses[:, 0]), cost.sqrt(), psnr, lost)
    parts = (rearrange(part, "(b t) ... -> b t ...", b=len(viewpoints)) for part in found)
    where, *others = parts
    return RoomPoses(relative(viewpoints.references, where), *others)
