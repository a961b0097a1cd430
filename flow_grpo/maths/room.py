"""Renderer of the tiny world: a textured room seen by a camera.

A room is an axis-aligned box whose six inner faces have smooth analytic textures (a base colour plus cosine waves), so
an image is a closed-form, differentiable function of the camera, at any resolution. World axes are MultiCamVideo's, in
metres: x forward, y right, z up (left-handed). Cameras are OpenCV camera-to-world (x right, y down, z forward), hence
det(R) = -1 for absolute poses.

Letters: B rooms, F frames (cameras) per room, P rays.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

FACES = 6  # x-, x+, y-, y+, z-, z+
SUPERSAMPLE = 4  # rays per pixel and axis
RAYS_AT_ONCE = 4_000_000  # of all videos together, about a gigabyte; larger calls are rendered in bands of rows
HOUSE_SEED = 8  # seed of the five faces that all rooms share


@dataclasses.dataclass(frozen=True)
class Room:
    """A box and its textures; a batch of rooms has a leading dimension B.

    Attributes:
        half_size: (3,) half extents of the box in metres; the box is centred at the world origin.
        base: (6, 3) mean logit of each face's colour.
        amplitude: (6, waves, 3) colour amplitude of each wave, in logits.
        frequency: (6, waves, 2) spatial frequency along the face's two axes, in cycles per metre.
        phase: (6, waves) phase in radians.
    """

    half_size: Tensor
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
        return cls(**{name: torch.tensor(values[name], dtype=torch.float32) for name in names})


def random_room(
    generator: torch.Generator, *, half_size: tuple[float, float, float] = (3.0, 2.0, 1.25), waves: int = 3
) -> Room:
    """Draw a room: the far wall (x+) is random, the other five faces are the same in every room.

    A model can therefore learn what is outside the first view, and a comparison with the true view measures camera
    motion, not luck in guessing unseen walls. Wavelengths are 2.5 to 10 metres, at least half an image, so that a small
    codec and a small model can represent them.
    """
    house = _random_faces(torch.Generator().manual_seed(HOUSE_SEED), waves)
    wall = _random_faces(generator, waves)
    far = 1  # x+
    for name, values in house.items():
        values[far] = wall[name][far]
    return Room(half_size=torch.tensor(half_size), **house)


def _random_faces(generator: torch.Generator, waves: int) -> dict[str, Tensor]:
    low, high = 0.1, 0.4  # cycles per metre
    base = 0.8 * torch.randn(FACES, 3, generator=generator)
    amplitude = torch.randn(FACES, waves, 3, generator=generator)
    size = low + (high - low) * torch.rand(FACES, waves, 1, generator=generator)
    angle = 2 * math.pi * torch.rand(FACES, waves, 1, generator=generator)
    phase = 2 * math.pi * torch.rand(FACES, waves, generator=generator)
    frequency = size * torch.cat([angle.cos(), angle.sin()], dim=-1)
    return {"base": base, "amplitude": amplitude, "frequency": frequency, "phase": phase}


def stack_rooms(rooms: list[Room]) -> Room:
    """Stack B rooms along a new leading dimension."""
    return Room(
        **{field.name: torch.stack([getattr(room, field.name) for room in rooms]) for field in dataclasses.fields(Room)}
    )


def pixel_rays(intrinsics: Tensor, height: int, width: int, supersample: int = 1) -> Tensor:
    """Return (height*s * width*s, 3) camera-space rays of unit depth for `intrinsics` = (fx, fy, cx, cy) in pixels.

    s is `supersample`. The origin is the outer corner of the first pixel, so pixel centres are at +0.5.
    """
    step = 1.0 / supersample
    fx, fy, cx, cy = intrinsics.unbind(-1)
    y = (torch.arange(height * supersample, dtype=intrinsics.dtype) + 0.5) * step
    x = (torch.arange(width * supersample, dtype=intrinsics.dtype) + 0.5) * step
    grid_y, grid_x = torch.meshgrid((y - cy) / fy, (x - cx) / fx, indexing="ij")
    return torch.stack([grid_x, grid_y, torch.ones_like(grid_x)], dim=-1).reshape(-1, 3)


def render(room: Room, poses: Tensor, rays: Tensor) -> Tensor:
    """Return the colours (B, F, P, 3) in [0, 1] that cameras see; differentiable in `poses`.

    Args:
        room: B rooms from `stack_rooms`.
        poses: (B, F, 4, 4) absolute OpenCV camera-to-world matrices in metres, inside the box.
        rays: (P, 3) camera-space rays from `pixel_rays`.
    """
    hits = trace(room, poses, rays)
    return paint(room, hits.face, hits.u, hits.v)


@dataclasses.dataclass(frozen=True)
class Hits:
    """Intersections of rays with the walls.

    Attributes:
        face: (B, F, P) index of the face, 0..5.
        u: (B, F, P) metres along the face's first axis: y, x, x for a face across x, y, z.
        v: (B, F, P) metres along its second axis: z, z, y.
        direction: (B, F, P, 3) the rays in world axes.
        depth: (B, F, P) length of the ray in units of `direction`: metres along the camera's forward axis.
    """

    face: Tensor
    u: Tensor
    v: Tensor
    direction: Tensor
    depth: Tensor


def trace(room: Room, poses: Tensor, rays: Tensor) -> Hits:
    """Return the intersections of rays (P, 3) of cameras (B, F, 4, 4) with the walls; arguments as for `render`."""
    direction = torch.einsum("bfij,pj->bfpi", poses[..., :3, :3], rays)
    origin = poses[..., None, :3, 3]
    half = room.half_size[:, None, None, :]
    safe = torch.where(direction.abs() < 1e-9, torch.full_like(direction, 1e-9), direction)
    distance = (half * safe.sign() - origin) / safe  # (B, F, P, 3): to the wall ahead on each axis
    depth, axis = distance.min(dim=-1)
    hit = origin + depth[..., None] * direction
    positive = torch.gather(safe, -1, axis[..., None])[..., 0] > 0
    # The two coordinates along the face: (y, z), (x, z), (x, y) for a face across x, y, z.
    u = torch.where(axis == 0, hit[..., 1], hit[..., 0])
    v = torch.where(axis == 2, hit[..., 1], hit[..., 2])
    return Hits(2 * axis + positive.long(), u, v, safe, depth)


def paint(room: Room, face: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return the colours (B, F, P, 3) in [0, 1] at points of the walls, given as in `Hits`."""
    base, amplitude, _, _, turn = _texture(room, face, u, v)
    return (base + (amplitude * turn.cos()[:, None]).sum(0)).sigmoid().movedim(0, -1)


def paint_slopes(room: Room, face: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `paint`'s colours and their derivatives by u and v, per metre, each (B, F, P, 3)."""
    base, amplitude, along_u, along_v, turn = _texture(room, face, u, v)
    colours = (base + (amplitude * turn.cos()[:, None]).sum(0)).sigmoid()
    gain = -2 * math.pi * colours * (1 - colours)
    waves = amplitude * turn.sin()[:, None]
    slope_u, slope_v = gain * (waves * along_u[:, None]).sum(0), gain * (waves * along_v[:, None]).sum(0)
    return colours.movedim(0, -1), slope_u.movedim(0, -1), slope_v.movedim(0, -1)


def _texture(room: Room, face: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the parameters of the texture's cosine waves at each point of the walls.

    Returns:
        base colour (3, B, F, P), amplitudes (waves, 3, B, F, P), frequencies along u and along v in cycles per metre,
        and the cosines' arguments in radians, each (waves, B, F, P).
    """
    # One lookup for all parameters, with rays last, so that later operations run over contiguous memory.
    rows, waves = FACES * room.base.shape[0], room.phase.shape[-1]
    parts = (room.base, room.frequency.mT, room.phase, room.amplitude)
    table = torch.cat([part.reshape(rows, -1) for part in parts], -1).T.contiguous()
    number = face + FACES * torch.arange(face.shape[0])[:, None, None]
    planes = table.index_select(1, number.flatten()).unflatten(1, face.shape)
    base, along_u, along_v, phase, amplitude = planes.split([3, waves, waves, waves, 3 * waves])
    turn = 2 * math.pi * (along_u * u + along_v * v) + phase
    return base, amplitude.unflatten(0, (waves, 3)), along_u, along_v, turn


def render_video(
    room: Room, poses: Tensor, intrinsics: Tensor, height: int, width: int, supersample: int = SUPERSAMPLE
) -> Tensor:
    """Return videos (B, 3, F, height, width) in [0, 1], box-filtered over `supersample`^2 rays per pixel.

    Args:
        room: B rooms from `stack_rooms`.
        poses: (B, F, 4, 4) absolute OpenCV camera-to-world matrices in metres.
        intrinsics: (4,) fx, fy, cx, cy in pixels.
        height: rows of the video in pixels.
        width: columns of the video in pixels.
        supersample: rays per pixel and axis.
    """
    rays = pixel_rays(intrinsics, height, width, supersample).unflatten(0, (height, -1))
    batch, frames = poses.shape[:2]
    rows = max(1, RAYS_AT_ONCE // (batch * frames * rays.shape[1]))
    bands = []
    for band in rays.split(rows):
        colours = render(room, poses, band.flatten(0, 1))
        colours = colours.reshape(batch, frames, len(band), supersample, width, supersample, 3)
        bands.append(colours.mean(dim=(3, 5)))
    return torch.cat(bands, dim=2).permute(0, 4, 1, 2, 3).contiguous()
