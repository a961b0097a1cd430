"""The camera of every frame, found by comparing the frame with renderings of the room it should show.

This is the judge of the tiny world: the room is known, so the pose of a frame is the one whose rendering looks most
like it, whatever was commanded. Each frame is tried at many places, then refined by Levenberg-Marquardt on its colours.
Three things make it exact on small, soft pictures:

* walls meet in anti-aliased edges (the share of a pixel that each of two walls covers follows from the distance to
  their edge), so the strongest lines of the picture pull at the camera instead of jumping between pixels;
* blur and contrast of the frame are fitted along with the pose: left out, a codec's blur of one pixel alone moves the
  pose by a degree and ten centimetres;
* neighbouring frames lend each other their poses, so one lucky start saves the whole video.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as functional
from einops import rearrange, repeat
from torch import Tensor

from flow_grpo.maths.poses import pose, rotation_matrix
from flow_grpo.maths.room import Room, paint, paint_slopes, render

COARSE_COLUMNS, MIDDLE_COLUMNS, FINE_COLUMNS = 8, 16, 32
STARTS = 3  # hypotheses of a frame that are refined
BLUR = 1.5  # pixels: sigma of the blurred rendering that is mixed in
MARGIN = 0.1  # metres kept from the walls
LARGEST_TURN, LARGEST_MOVE = 0.3, 0.8  # radians, metres: of one step
COMMAND_SCALES = (0.3, 0.6, 1.0, 1.3)


@dataclasses.dataclass(frozen=True)
class RoomPoses:
    """Where B videos of T frames were taken from.

    Attributes:
        poses: (B, T, 4, 4) float64 OpenCV camera-to-world in metres, relative to the reference camera.
        residual: (B, T) root mean square colour error, in [0, 1], that the best pose leaves.
    """

    poses: Tensor
    residual: Tensor


@dataclasses.dataclass(frozen=True)
class _View:
    """N frames at one resolution, laid out as planes of P pixels.

    Attributes:
        room: N rooms.
        pixels: (P, 3) homogeneous pixel centres in pixels of the full video.
        unproject: (N, 3, 3) inverse intrinsics.
        colours: (3, N, 1, P) the frames.
        size: rows and columns.
        edge: sigma in full pixels of a pixel's own softness.
        blur: matrices (rows, rows), (columns, columns) that blur an image.
    """

    room: Room
    pixels: Tensor
    unproject: Tensor
    colours: Tensor
    size: tuple[int, int]
    edge: float
    blur: tuple[Tensor, Tensor]


def _view(room: Room, frames: Tensor, unproject: Tensor, columns: int) -> _View:
    """Shrink frames (N, 3, h, w) to at most `columns` columns."""
    height, width = frames.shape[-2:]
    block = math.ceil(width / columns)
    size = max(1, height // block), max(1, width // block)
    small = functional.adaptive_avg_pool2d(frames, size)
    y = (torch.arange(size[0]) + 0.5) * (height / size[0])
    x = (torch.arange(size[1]) + 0.5) * (width / size[1])
    grid_y, grid_x = torch.meshgrid(y, x, indexing="ij")
    pixels = torch.stack([grid_x, grid_y, torch.ones_like(grid_x)], dim=-1).flatten(0, 1)
    colours = rearrange(small, "n c y x -> c n 1 (y x)").contiguous()
    blur = _blur_matrix(size[0], BLUR / block), _blur_matrix(size[1], BLUR / block)
    return _View(room, pixels, unproject, colours, size, block / math.sqrt(12), blur)


def _blur_matrix(length: int, sigma: float) -> Tensor:
    """Return the (length, length) Gaussian blur that repeats the border."""
    reach = max(1, math.ceil(3 * sigma))
    offsets = torch.arange(-reach, reach + 1)
    kernel = torch.exp(-0.5 * (offsets / sigma).square())
    kernel = kernel / kernel.sum()
    matrix = torch.zeros(length, length)
    rows = torch.arange(length)
    for offset, weight in zip(offsets, kernel, strict=True):
        matrix.index_put_((rows, (rows + offset).clamp(0, length - 1)), weight, accumulate=True)
    return matrix


def _pick(planes: Tensor, axis: Tensor) -> Tensor:
    """Choose for each pixel one of three planes (3, N, M, P) by axis (N, M, P)."""
    return planes.gather(0, axis[None])[0]


@dataclasses.dataclass(frozen=True)
class _Walls:
    """The wall each pixel shows and the wall beyond the nearest edge; planes (N, M, P) unless stated.

    Attributes:
        direction: (3, N, M, P) rays in world axes, of unit depth.
        near, far: axes across the wall shown and across the other one.
        share: how much of the pixel the wall shown covers.
        edge_near, edge_far: change of `share` per change of `direction` along the axes `near` and `far`.
        depth_near, depth_far: metres.
    """

    direction: Tensor
    near: Tensor
    far: Tensor
    share: Tensor
    edge_near: Tensor
    edge_far: Tensor
    depth_near: Tensor
    depth_far: Tensor


def _look(view: _View, poses: Tensor) -> _Walls:
    """Trace poses (N, M, 4, 4).

    A wall's inverse depth is linear in the pixel's coordinates, the nearest wall has the largest one, and the edge
    between two walls is where theirs are equal: difference over gradient is the distance to the edge in pixels.
    """
    steps = poses[..., :3, :3] @ view.unproject[:, None]  # (N, M, 3, 3) world direction per pixel
    direction = torch.einsum("nmij,pj->inmp", steps, view.pixels)
    half = rearrange(view.room.half_size, "n i -> i n 1 1")
    origin = rearrange(poses[..., :3, 3], "n m i -> i n m 1")
    ahead = torch.where(direction < 0, -half, half) - origin
    inverse_depth = direction / ahead
    nearest, near = inverse_depth.max(dim=0)
    second, far = inverse_depth.scatter(0, near[None], -1.0).max(dim=0)
    ahead_near, ahead_far = _pick(ahead, near), _pick(ahead, far)
    slope_x, slope_y = rearrange(steps[..., :2], "n m i k -> k i n m 1").expand(-1, -1, -1, -1, near.shape[-1])
    across_x = _pick(slope_x, near) / ahead_near - _pick(slope_x, far) / ahead_far
    across_y = _pick(slope_y, near) / ahead_near - _pick(slope_y, far) / ahead_far
    softness = view.edge * torch.hypot(across_x, across_y).clamp_min(1e-6)
    distance = (nearest - second) / softness
    density = torch.exp(-0.5 * distance.square()) / (math.sqrt(2 * math.pi) * softness)
    depths = 1 / nearest, 1 / second.clamp_min(0.02)
    share = torch.special.ndtr(distance)
    return _Walls(direction, near, far, share, density / ahead_near, density / ahead_far, *depths)


def _surface(poses: Tensor, walls: _Walls, axis: Tensor, depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return face, u and v of the walls across `axis`, as `paint` wants them."""
    hit = rearrange(poses[..., :3, 3], "n m i -> i n m 1") + depth * walls.direction
    face = 2 * axis + (_pick(walls.direction, axis) > 0).long()
    return face, torch.where(axis == 0, hit[1], hit[0]), torch.where(axis == 2, hit[1], hit[2])


def _draw(view: _View, poses: Tensor) -> Tensor:
    """Return the colours (3, N, M, P) that cameras (N, M, 4, 4) see, edges anti-aliased."""
    walls = _look(view, poses)
    near = paint(view.room, *_surface(poses, walls, walls.near, walls.depth_near)).movedim(-1, 0)
    far = paint(view.room, *_surface(poses, walls, walls.far, walls.depth_far)).movedim(-1, 0)
    return far + walls.share * (near - far)


def _draw_slopes(view: _View, poses: Tensor) -> Tensor:
    """Return (7, 3, N, M, P): the colours, then their slopes by rotation vector and by move, in world axes.

    The texture beyond an edge is held still: it shows only in the fringe of a pixel.
    """
    walls = _look(view, poses)
    near, along_u, along_v = paint_slopes(view.room, *_surface(poses, walls, walls.near, walls.depth_near))
    far = paint(view.room, *_surface(poses, walls, walls.far, walls.depth_far)).movedim(-1, 0)
    near = near.movedim(-1, 0)
    along_u, along_v = walls.share * along_u.movedim(-1, 0), walls.share * along_v.movedim(-1, 0)
    axis, (x, y, z) = walls.near, walls.direction
    # Along the wall's normal a move shifts the picture as much as the ray is slanted.
    first, second = torch.where(axis == 0, y, x), torch.where(axis == 2, y, z)
    normal = -(along_u * first + along_v * second) / _pick(walls.direction, axis)
    move = torch.stack(
        [
            torch.where(axis == 0, normal, along_u),
            torch.where(axis == 1, normal, torch.where(axis == 0, along_u, along_v)),
            torch.where(axis == 2, normal, along_v),
        ]
    )
    turn = walls.depth_near * move
    contrast = near - far
    for sign, wall, slope, depth in (
        (1, walls.near, walls.edge_near, walls.depth_near),
        (-1, walls.far, walls.edge_far, walls.depth_far),
    ):
        push = sign * contrast * slope
        index = wall.expand(1, 3, -1, -1, -1)
        turn.scatter_add_(0, index, push[None])
        move.scatter_add_(0, index, (push / depth)[None])
    # A rotation w changes a direction d by w x d.
    turn = torch.stack([y * turn[2] - z * turn[1], z * turn[0] - x * turn[2], x * turn[1] - y * turn[0]])
    return torch.cat([(far + walls.share * contrast)[None], turn, move])


@dataclasses.dataclass(frozen=True)
class _Fit:
    """M guesses for each of N frames.

    Attributes:
        poses: (N, M, 4, 4) absolute.
        look: (N, M, 2) share of the blurred rendering, and contrast less 1.
        cost: (N, M) mean square colour error.
        normal: (N, M, 8, 8) J^T J.
        pull: (N, M, 8) J^T r.
    """

    poses: Tensor
    look: Tensor
    cost: Tensor
    normal: Tensor
    pull: Tensor

    def where(self, better: Tensor, other: _Fit) -> _Fit:
        """Take `self` where `better` (N, M), else `other`."""
        parts = {}
        for field in dataclasses.fields(_Fit):
            mine: Tensor = getattr(self, field.name)
            mask = better.reshape(*better.shape, *([1] * (mine.ndim - 2)))
            parts[field.name] = torch.where(mask, mine, getattr(other, field.name))
        return _Fit(**parts)


def _linearise(view: _View, poses: Tensor, look: Tensor) -> _Fit:
    """Compare frames with renderings and gather what a Gauss-Newton step needs."""
    drawn = _draw_slopes(view, poses)  # (7, 3, N, M, P)
    softer = ((view.blur[0] @ drawn.unflatten(-1, view.size)) @ view.blur[1].T).flatten(-2) - drawn
    blur, contrast = look[..., None].unbind(-2)
    drawn = drawn + blur * softer
    centred = drawn[0] - drawn[0].mean(dim=(0, -1), keepdim=True)
    error = rearrange(drawn[0] + contrast * centred - view.colours, "c n m p -> n m (c p)")
    jacobian = torch.cat([(1 + contrast) * drawn[1:], softer[:1], centred[None]])
    jacobian = rearrange(jacobian, "k c n m p -> n m k (c p)").contiguous()
    normal = jacobian @ jacobian.mT
    pull = (jacobian @ error[..., None])[..., 0]
    return _Fit(poses, look, error.square().mean(-1), normal, pull)


def _refine(view: _View, poses: Tensor, steps: int) -> _Fit:
    """Improve M guesses (N, M, 4, 4) of each frame by Levenberg-Marquardt; never makes one worse."""
    fit = _linearise(view, poses, torch.zeros(*poses.shape[:2], 2))
    damping = torch.full_like(fit.cost, 1e-3)
    limit = view.room.half_size[:, None] - MARGIN
    for _ in range(steps):
        diagonal = fit.normal.diagonal(dim1=-2, dim2=-1)
        ridge = damping[..., None] * diagonal + 1e-6
        step = -torch.linalg.solve(fit.normal + torch.diag_embed(ridge), fit.pull[..., None])[..., 0]
        turn, move, look = step.split([3, 3, 2], dim=-1)
        turn = turn * (LARGEST_TURN / turn.norm(dim=-1, keepdim=True).clamp_min(LARGEST_TURN))
        move = move * (LARGEST_MOVE / move.norm(dim=-1, keepdim=True).clamp_min(LARGEST_MOVE))
        centres = (fit.poses[..., :3, 3] + move).clamp(-limit, limit)
        moved = pose(rotation_matrix(turn) @ fit.poses[..., :3, :3], centres)
        trial = _linearise(view, moved, (fit.look + look).clamp(-0.6, 1.5))
        better = trial.cost < fit.cost
        fit = trial.where(better, fit)
        damping = torch.where(better, 0.1 * damping, 10 * damping)
    return fit


def _best(poses: Tensor, cost: Tensor, count: int) -> Tensor:
    """Keep the `count` guesses of each frame with the lowest cost, best first."""
    index = cost.topk(count, dim=1, largest=False).indices
    return poses.gather(1, repeat(index, "n m -> n m r c", r=4, c=4))


def _guesses(commanded: Tensor | None) -> Tensor:
    """Return relative poses to start from: (H, 4, 4), or (B, T, H, 4, 4) with those of a command."""
    sideways, forward, vertical = 1.2, 1.2, 0.8
    moves = [(0, 0, 0), (sideways, 0, 0.3), (-sideways, 0, 0.3), (0, 0, forward), (0, 0, -forward)]
    moves += [(0, vertical, 0), (0, -vertical, 0)]
    turns = [(pitch, yaw, 0) for pitch in (-12, 0, 12) for yaw in (-30, -15, 0, 15, 30)]
    pairs = [(turn, move) for turn in turns for move in moves]
    turn = torch.tensor([pair[0] for pair in pairs], dtype=torch.float32).deg2rad()
    spread = pose(rotation_matrix(turn), torch.tensor([pair[1] for pair in pairs], dtype=torch.float32))
    if commanded is None:
        return spread
    return spread


def estimate_poses(
    videos: Tensor, rooms: Room, reference_poses: Tensor, intrinsics: Tensor, commanded: Tensor | None = None
) -> RoomPoses:
    """Find the camera of every frame."""
    batch, _, frames, height, width = videos.shape
    count = batch * frames
    flat = rearrange(videos, "b c t h w -> (b t) c h w").float()
    room = Room(**{f.name: getattr(rooms, f.name).repeat_interleave(frames, 0) for f in dataclasses.fields(Room)})
    unproject = _unproject(intrinsics, batch).repeat_interleave(frames, 0)
    absolute = reference_poses.float().repeat_interleave(frames, 0)[:, None] @ _guesses(commanded)
    limit = room.half_size[:, None] - MARGIN
    absolute[..., :3, 3] = absolute[..., :3, 3].clamp(-limit, limit)
    coarse = _view(room, flat, unproject, COARSE_COLUMNS)
    t0 = time.process_time()
    poses = _best(absolute, _quick_cost(coarse, absolute), STARTS)
    t1 = time.process_time()
    fit = _refine(coarse, poses, CI)
    t2 = time.process_time()
    middle = _view(room, flat, unproject, MIDDLE_COLUMNS)
    poses = _best(fit.poses, fit.cost, 2)
    own = rearrange(poses[:, :1], "(b t) 1 r c -> b t r c", t=frames)
    left, right = torch.cat([own[:, :1], own[:, :-1]], dim=1), torch.cat([own[:, 1:], own[:, -1:]], dim=1)
    poses = torch.cat([poses, rearrange(torch.stack([left, right], 2), "b t k r c -> (b t) k r c")], 1)
    cost = (_draw(middle, poses) - middle.colours).square().mean(dim=(0, -1))
    fit = _refine(middle, _best(poses, cost, MS), MI)
    t3 = time.process_time()
    fine = _view(room, flat, unproject, FINE_COLUMNS)
    fit = _refine(fine, _best(fit.poses, fit.cost, 1), FI)
    t4 = time.process_time()
    TT[:] = [round((b - a) * 1e3 / batch, 2) for a, b in zip((t0, t1, t2, t3), (t1, t2, t3, t4))]
    found = rearrange(fit.poses, "(b t) 1 r c -> b t r c", t=frames).double()
    left_, _, right_ = torch.linalg.svd(found[..., :3, :3])
    found[..., :3, :3] = left_ @ right_
    return RoomPoses(
        torch.linalg.inv(reference_poses.double())[:, None] @ found, fit.cost[:, 0].sqrt().reshape(batch, frames)
    )
import time
TT=[]; CI=4; MI=3; FI=4; MS=2

def _quick_cost(view, poses):
    cameras = poses.clone()
    cameras[..., :3, :3] = poses[..., :3, :3] @ view.unproject[:, None]
    return (render(view.room, cameras, view.pixels).movedim(-1,0) - view.colours).square().mean(dim=(0, -1))

def _unproject(intrinsics: Tensor, batch: int) -> Tensor:
    """Return (batch, 3, 3) inverse camera matrices of (4,) or (batch, 4) fx, fy, cx, cy."""
    fx, fy, cx, cy = intrinsics.float().expand(batch, 4).unbind(-1)
    zero, one = torch.zeros_like(fx), torch.ones_like(fx)
    rows = [(1 / fx, zero, -cx / fx), (zero, 1 / fy, -cy / fy), (zero, zero, one)]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)
