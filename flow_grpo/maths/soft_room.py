"""An analytically anti-aliased renderer of a room, with derivatives by the camera pose, edges included.

`room.render` samples colours, so the image is not differentiable where walls meet. Here a pixel near an edge blends the
two walls by the fraction it sees of each. The image is then smooth in the camera pose and its Jacobian has a closed
form: what fitting a camera by Gauss-Newton needs.

Letters: N rooms, M cameras per room, P pixels.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from flow_grpo.maths.room import Room, paint, paint_slopes


@dataclasses.dataclass(frozen=True)
class Raster:
    """The pixels to render and the intrinsics.

    Attributes:
        pixels: (P, 3) homogeneous pixel centres (x, y, 1), from the outer corner of the first pixel.
        unproject: (N, 3, 3) inverse intrinsics.
        softness: standard deviation of the edge blur in pixels; 1 / sqrt(12) matches a square pixel.
    """

    pixels: Tensor
    unproject: Tensor
    softness: float


def _pick(planes: Tensor, axis: Tensor) -> Tensor:
    """Select one of three planes (3, N, M, P) per pixel, by axis (N, M, P)."""
    return planes.gather(0, axis[None])[0]


@dataclasses.dataclass(frozen=True)
class _Walls:
    """For each pixel the visible (near) wall and the wall beyond the nearest edge (far); (N, M, P) unless stated.

    Attributes:
        direction: (3, N, M, P) rays in world axes, of unit depth.
        near, far: axes of the walls' normals, 0..2.
        share: fraction of the pixel that the near wall covers.
        edge_near, edge_far: derivative of `share` by `direction` along the axes `near` and `far`.
        depth_near, depth_far: in metres.
    """

    direction: Tensor
    near: Tensor
    far: Tensor
    share: Tensor
    edge_near: Tensor
    edge_far: Tensor
    depth_near: Tensor
    depth_far: Tensor


def _look(room: Room, poses: Tensor, raster: Raster) -> _Walls:
    """Return the walls that every pixel shows.

    A wall's inverse depth is linear in pixel coordinates, the visible wall has the largest, and two walls meet where
    they are equal: their difference over its gradient is the distance to the edge in pixels.
    """
    steps = poses[..., :3, :3] @ raster.unproject[:, None]  # (N, M, 3, 3) world direction per pixel
    direction = torch.einsum("nmij,pj->inmp", steps, raster.pixels)
    half = room.half_size.T[..., None, None]  # (3, N, 1, 1)
    origin = poses[..., :3, 3].movedim(-1, 0)[..., None]  # (3, N, M, 1)
    ahead = torch.where(direction < 0, -half, half) - origin
    inverse_depth = direction / ahead
    nearest, near = inverse_depth.max(dim=0)
    second, far = inverse_depth.scatter(0, near[None], -1.0).max(dim=0)
    ahead_near, ahead_far = _pick(ahead, near), _pick(ahead, far)
    slope_x, slope_y = (steps[..., axis].movedim(-1, 0)[..., None].expand(-1, *near.shape) for axis in (0, 1))
    across_x = _pick(slope_x, near) / ahead_near - _pick(slope_x, far) / ahead_far
    across_y = _pick(slope_y, near) / ahead_near - _pick(slope_y, far) / ahead_far
    softness = raster.softness * torch.hypot(across_x, across_y).clamp_min(1e-6)
    distance = (nearest - second) / softness
    density = torch.exp(-0.5 * distance.square()) / (math.sqrt(2 * math.pi) * softness)
    depths = 1 / nearest, 1 / second.clamp_min(0.02)
    share = torch.special.ndtr(distance)
    return _Walls(direction, near, far, share, density / ahead_near, density / ahead_far, *depths)


def _surface(poses: Tensor, walls: _Walls, axis: Tensor, depth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return face, u and v, as in `Hits`, where the rays meet the walls normal to `axis` at `depth`."""
    hit = poses[..., :3, 3].movedim(-1, 0)[..., None] + depth * walls.direction
    face = 2 * axis + (_pick(walls.direction, axis) > 0).long()
    return face, torch.where(axis == 0, hit[1], hit[0]), torch.where(axis == 2, hit[1], hit[2])


def draw(room: Room, poses: Tensor, raster: Raster) -> Tensor:
    """Return the colours (3, N, M, P) in [0, 1] that cameras see.

    Args:
        room: N rooms from `stack_rooms`.
        poses: (N, M, 4, 4) absolute OpenCV camera-to-world matrices in metres, inside the box.
        raster: pixels and intrinsics.
    """
    walls = _look(room, poses, raster)
    near = paint(room, *_surface(poses, walls, walls.near, walls.depth_near)).movedim(-1, 0)
    far = paint(room, *_surface(poses, walls, walls.far, walls.depth_far)).movedim(-1, 0)
    return far + walls.share * (near - far)


def draw_slopes(room: Room, poses: Tensor, raster: Raster) -> Tensor:
    """Return (7, 3, N, M, P): colours, then derivatives by rotation (3, per radian) and translation (3, per metre).

    Rotations are rotation vectors in world axes, applied after the camera's own rotation; translations are in world
    axes. The derivative of the far wall's texture is neglected: it contributes to edge pixels only.
    """
    walls = _look(room, poses, raster)
    near, along_u, along_v = paint_slopes(room, *_surface(poses, walls, walls.near, walls.depth_near))
    far = paint(room, *_surface(poses, walls, walls.far, walls.depth_far)).movedim(-1, 0)
    near = near.movedim(-1, 0)
    along_u, along_v = walls.share * along_u.movedim(-1, 0), walls.share * along_v.movedim(-1, 0)
    axis, (x, y, z) = walls.near, walls.direction
    # Moving along the wall's normal shifts the hit point by the slant of the ray.
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
