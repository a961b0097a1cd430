"""Renderer of the tiny world: a textured room, with things in it, seen by a camera.

A room is an axis-aligned box whose six inner faces have smooth analytic textures (a base colour plus cosine waves).
Smaller boxes stand in it, each with a texture of its own: furniture, pictures on the walls, a thing that moves. A lamp
shades what is turned away from it. World axes are MultiCamVideo's, in metres: x forward, y right, z up (left-handed).
Cameras are OpenCV camera-to-world (x right, y down, z forward), hence det(R) = -1 for absolute poses.

Letters: B rooms, F frames (cameras) per room, P rays, N boxes of a room.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

FACES = 6  # x-, x+, y-, y+, z-, z+
SUPERSAMPLE = 3  # rays per pixel and axis
RAYS_AT_ONCE = 250_000  # of all videos together: more do not fit the cache; larger calls are rendered in bands of rows


@dataclasses.dataclass(frozen=True)
class Room:
    """A box with things in it, and their textures; a batch of rooms has a leading dimension B.

    Attributes:
        half_size: (3,) half extents of the room in metres; it is centred at the world origin.
        boxes: (N, 3, 3) of each thing the centre at the first frame, the half extents (0: it is not there), and the
            way it moves until the last frame, in metres.
        lamp: (4,) where the lamp hangs, in metres, and its share of the light, 0 to 1.
        base: (6 + N, 3) mean logit of each surface's colour: the six faces, then the boxes.
        amplitude: (6 + N, waves, 3) colour amplitude of each wave, in logits.
        frequency: (6 + N, waves, 2) spatial frequency along a face's two axes, in cycles per metre.
        phase: (6 + N, waves) phase in radians.
    """

    half_size: Tensor
    boxes: Tensor
    lamp: Tensor
    base: Tensor
    amplitude: Tensor
    frequency: Tensor
    phase: Tensor

    def to_dict(self) -> dict[str, list[float]]:
        """Return plain nested lists, ready for JSON."""
        return {field.name: getattr(self, field.name).tolist() for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: dict[str, list[float]]) -> Room:
        """Rebuild a room from `to_dict`'s output; KeyError when a field is missing."""
        names = [field.name for field in dataclasses.fields(cls)]
        room = cls(**{name: torch.tensor(values[name], dtype=torch.float32) for name in names})
        return dataclasses.replace(room, boxes=room.boxes.reshape(-1, 3, 3))

    def take(self, rows: Tensor) -> Room:
        """Return the rooms of rows (n,) int64 of a batch."""
        return Room(**{field.name: getattr(self, field.name)[rows] for field in dataclasses.fields(self)})

    def at(self, time: Tensor) -> Room:
        """Return a batch's rooms as they are at times (B,), 0 at the first frame of a video and 1 at the last."""
        centre, half, way = self.boxes.unbind(-2)
        boxes = torch.stack([centre + time[:, None, None] * way, half, torch.zeros_like(way)], dim=-2)
        return dataclasses.replace(self, boxes=boxes)


def stack_rooms(rooms: list[Room]) -> Room:
    """Stack B rooms of as many boxes along a new leading dimension."""
    return Room(
        **{field.name: torch.stack([getattr(room, field.name) for room in rooms]) for field in dataclasses.fields(Room)}
    )


def frame_times(frames: int) -> Tensor:
    """Return the times (frames,) of a video's frames, from 0 to 1."""
    return torch.arange(frames) / max(frames - 1, 1)


def pixel_rays(intrinsics: Tensor, height: int, width: int, supersample: int = 1) -> Tensor:
    """Return (..., height*s * width*s, 3) camera-space rays of unit depth for fx, fy, cx, cy in pixels, (..., 4).

    s is `supersample`. The origin is the outer corner of the first pixel, so pixel centres are at +0.5.
    """
    step = 1.0 / supersample
    fx, fy, cx, cy = intrinsics[..., None, None].unbind(-3)
    y = (torch.arange(height * supersample, dtype=intrinsics.dtype) + 0.5) * step
    x = (torch.arange(width * supersample, dtype=intrinsics.dtype) + 0.5) * step
    rays = torch.broadcast_tensors((x - cx) / fx, (y[:, None] - cy) / fy, torch.ones_like(fx))
    return torch.stack(rays, dim=-1).flatten(-3, -2)


@dataclasses.dataclass(frozen=True)
class Hits:
    """What rays meet first.

    Attributes:
        surface: (B, F, P) index of a face, 0..5, or of a box, 6 and up.
        depth: (B, F, P) metres along the camera's forward axis.
        point: (3, B, F, P) where, in world axes.
        direction: (3, B, F, P) the rays in world axes.
    """

    surface: Tensor
    depth: Tensor
    point: Tensor
    direction: Tensor


def trace(room: Room, poses: Tensor, rays: Tensor) -> Hits:
    """Return what rays (P, 3) of cameras (B, F, 4, 4) meet; arguments as for `render`."""
    direction = torch.einsum("bfij,bpj->ibfp", poses[..., :3, :3], rays.expand(len(poses), -1, -1))
    origin = poses[..., :3, 3].movedim(-1, 0)[..., None]  # (3, B, F, 1)
    inverse = 1 / torch.where(direction.abs() < 1e-9, torch.full_like(direction, 1e-9), direction)
    half = room.half_size.T[..., None, None]
    depth, axis = ((torch.copysign(half, inverse) - origin) * inverse).min(dim=0)  # to the wall ahead on each axis
    surface = 2 * axis + (inverse.gather(0, axis[None])[0] > 0).long()
    steepness = inverse.abs()
    for number, box in enumerate(room.boxes.unbind(1)):
        if not box[:, 1].any():
            continue
        centre, reach, _ = box.permute(1, 2, 0)[..., None, None]  # (3, B, 1, 1) each
        middle, reach = (centre - origin) * inverse, reach * steepness
        near, far = middle - reach, middle + reach
        enters = torch.maximum(torch.maximum(near[0], near[1]), near[2])
        leaves = torch.minimum(torch.minimum(far[0], far[1]), far[2])
        seen = (enters < torch.minimum(leaves, depth)) & (enters > 0)
        depth = torch.where(seen, enters, depth)
        surface = torch.where(seen, FACES + number, surface)
    return Hits(surface, depth, origin + depth * direction, direction)


def render(room: Room, poses: Tensor, rays: Tensor) -> tuple[Tensor, Tensor]:
    """Return the colours (3, B, F, P) in [0, 1] that cameras see, differentiable in `poses`, and depths (B, F, P).

    Args:
        room: B rooms from `stack_rooms`, their things where they are at the first frame.
        poses: (B, F, 4, 4) absolute OpenCV camera-to-world matrices in metres, inside the room.
        rays: (P, 3) or (B, P, 3) camera-space rays from `pixel_rays`.
    """
    hits = trace(room, poses, rays)
    # One lookup for all parameters, with rays last, so that later operations run over contiguous memory.
    waves, count = room.phase.shape[-1], room.base.shape[1]
    parts = [room.base, room.frequency.mT, room.phase, room.amplitude]
    if count > FACES:  # of each surface the box that it is a side of
        walls = room.half_size[:, None].expand(-1, FACES, -1)
        parts.append(torch.cat([torch.zeros_like(walls), room.boxes[:, :, 0]], dim=1))
        parts.append(torch.cat([walls, room.boxes[:, :, 1].clamp_min(1e-6)], dim=1))
    table = torch.cat([part.flatten(0, 1).flatten(1) for part in parts], -1).T.contiguous()
    number = hits.surface + count * torch.arange(len(hits.surface))[:, None, None]
    planes = table.index_select(1, number.flatten()).unflatten(1, number.shape)
    base, along_u, along_v, phase, amplitude, *box = planes.split([3, *3 * [waves], 3 * waves, *(len(parts) - 4) * [3]])
    if box:
        local = hits.point - box[0]  # a thing's texture moves with it
        x, y, z = (local / box[1]).abs()
        axis = torch.where(x >= torch.maximum(y, z), 0, torch.where(y >= z, 1, 2))  # of the largest; argmax is slow
    else:
        local, axis = hits.point, hits.surface // 2
    # The two coordinates along a face: (y, z), (x, z), (x, y) for one across x, y, z.
    u, v = torch.where(axis == 0, local[1], local[0]), torch.where(axis == 2, local[1], local[2])
    turn = 2 * math.pi * (along_u * u + along_v * v) + phase
    wave = sum(size * height for size, height in zip(amplitude.split(3), turn.cos(), strict=True))
    colours = (base + wave).sigmoid()
    return colours * _shade(room, hits, axis), hits.depth


def _shade(room: Room, hits: Hits, axis: Tensor) -> Tensor:
    """Return the light (B, F, P) on surfaces: less, down to 1 - the lamp's share, the more they turn from the lamp."""
    place, share = room.lamp.T[:3, :, None, None], room.lamp[:, 3, None, None]
    towards = place - hits.point
    # A surface's normal points against the ray that meets it.
    normal_part = -(hits.direction.sign() * towards).gather(0, axis[None])[0]
    cosine = normal_part / towards.square().sum(0).sqrt().clamp_min(1e-6)
    return 1 - share * (1 - cosine.clamp_min(0))


def render_video(
    room: Room, poses: Tensor, intrinsics: Tensor, height: int, width: int, supersample: int = SUPERSAMPLE
) -> Tensor:
    """Return videos (B, 3, F, height, width) in [0, 1], box-filtered over `supersample`^2 rays per pixel.

    Args:
        room: B rooms from `stack_rooms`; their things move from the first frame to the last.
        poses: (B, F, 4, 4) absolute OpenCV camera-to-world matrices in metres.
        intrinsics: (4,) fx, fy, cx, cy in pixels.
        height: rows of the video in pixels.
        width: columns of the video in pixels.
        supersample: rays per pixel and axis.
    """
    rays = pixel_rays(intrinsics, height, width, supersample).unflatten(0, (height, -1))
    batch, frames = poses.shape[:2]
    by_frame = room.take(torch.arange(batch).repeat_interleave(frames)).at(frame_times(frames).repeat(batch))
    rows = max(1, RAYS_AT_ONCE // (batch * frames * rays.shape[1]))
    bands = []
    for band in rays.split(rows):
        colours, _ = render(by_frame, poses.flatten(0, 1)[:, None], band.flatten(0, 1))
        colours = colours.reshape(3, batch, frames, len(band), supersample, width, supersample)
        bands.append(colours.mean(dim=(4, 6)))
    return torch.cat(bands, dim=3).transpose(0, 1).contiguous()
