"""Renders a room from known cameras, with fine texture for feature matching (the room of maths/room.py is too smooth).

The room is 8 m square and 4.5 m high, with five free-standing panels so that no picture is a single plane. Poses are
OpenCV camera-to-world in metres, relative to a camera 4.5 m in front of the far wall.
"""

import functools
from collections.abc import Sequence

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flow_grpo.maths.poses import pose, preset_path, rotation_matrix
from flow_grpo.records import Condition

TEXELS = 100  # per metre
SMALL, LARGE = (240, 416), (480, 832)
# Corner and two edges of each rectangle: x right, y down, z forward, metres from the reference camera.
WALLS = [
    ((-4.0, -2.25, 4.5), (8.0, 0, 0), (0, 4.5, 0)),
    ((-4.0, -2.25, -3.5), (8.0, 0, 0), (0, 4.5, 0)),
    ((-4.0, -2.25, -3.5), (0, 0, 8.0), (0, 4.5, 0)),
    ((4.0, -2.25, -3.5), (0, 0, 8.0), (0, 4.5, 0)),
    ((-4.0, 2.25, -3.5), (8.0, 0, 0), (0, 0, 8.0)),
    ((-4.0, -2.25, -3.5), (8.0, 0, 0), (0, 0, 8.0)),
    ((-1.6, 0.2, 3.4), (0.8, 0, 0.2), (0, 2.0, 0)),
    ((0.9, -0.9, 3.8), (0.9, 0, -0.3), (0, 1.2, 0)),
    ((-0.4, -1.9, 3.0), (0.7, 0, 0.3), (0, 1.0, 0)),
    ((2.2, -0.3, 3.2), (0.2, 0, 0.9), (0, 1.4, 0)),
    ((-3.0, -1.2, 3.0), (0.9, 0, 0.4), (0, 1.5, 0)),
]
WALKER = 6  # index of the panel that can move


def intrinsics(size: tuple[int, int]) -> Tensor:
    """Return fx, fy, cx, cy in pixels for MultiCamVideo's sensor with a 24 mm lens: f = 840.4 at 832 columns."""
    height, width = size
    focal = 24 / 23.76 * width
    return torch.tensor([focal, focal, width / 2, height / 2])


@functools.cache
def _textures(seed: int) -> list[NDArray[np.float32]]:
    draw = np.random.default_rng(seed)
    made = []
    for _, right, down in WALLS:
        shape = (round(np.linalg.norm(down) * TEXELS), round(np.linalg.norm(right) * TEXELS))
        layers = [cv2.GaussianBlur(draw.normal(size=shape).astype(np.float32), (0, 0), s) * s for s in (1.2, 3, 7, 16)]
        made.append(np.clip(128 + 75 * sum(layers), 5, 250).astype(np.float32))
    return made


@functools.cache
def _paints(seed: int) -> NDArray[np.float32]:
    """Return a random tint per wall: (walls, 3) factors on its grey texture, with a mean of 1 over channels."""
    factors = np.random.default_rng(seed + 2).uniform(0.6, 1.4, (len(WALLS), 3))
    paints: NDArray[np.float32] = (factors / factors.mean(1, keepdims=True)).astype(np.float32)
    return paints


def shoot(
    poses: Tensor,
    size: tuple[int, int],
    *,
    seed: int = 0,
    noise: float = 3.0,
    walk: float = 0.0,
    take: int = 1,
    painted: bool = False,
) -> Tensor:
    """Return a video (3, T, h, w), fp32 in [0, 1], seen from poses (T, 4, 4).

    Args:
        poses: relative to the reference camera.
        size: rows and columns.
        seed: of textures and noise.
        noise: standard deviation of the sensor noise in grey levels.
        walk: metres that one panel moves to the right from the first to the last frame.
        take: varies the noise.
        painted: coloured walls instead of grey ones.
    """
    draw = np.random.default_rng(seed + take)
    paints = _paints(seed) if painted else np.ones((len(WALLS), 1), np.float32)
    frames = []
    for number, camera in enumerate(poses.numpy()):
        moved = walk * number / max(len(poses) - 1, 1)
        frame, wall, _ = _frame(camera, size, _textures(seed), moved)
        colours = np.moveaxis(paints[wall], -1, 0) * frame
        frames.append(np.clip(colours + noise * draw.normal(size=colours.shape), 0, 255))
    video = torch.from_numpy(np.stack(frames, 1).round().astype(np.float32)) / 255
    return video.expand(3, -1, -1, -1).contiguous()


def depths(poses: Tensor, size: tuple[int, int]) -> NDArray[np.float64]:
    """Return (T, h, w) how far away, in metres along the optical axis, is what cameras at poses (T, 4, 4) see."""
    return np.stack([_frame(camera, size, _textures(0), 0.0)[2] for camera in poses.numpy()]).astype(np.float64)


def _frame(
    camera: NDArray, size: tuple[int, int], textures: Sequence[NDArray], moved: float
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Return (h, w) each: the grey level, the index and the distance (z) of the wall that is seen."""
    fx, fy, cx, cy = intrinsics(size).tolist()
    to_ray = np.array([[1 / fx, 0, (0.5 - cx) / fx], [0, 1 / fy, (0.5 - cy) / fy], [0, 0, 1]])
    x, y = np.arange(size[1]), np.arange(size[0])[:, None]
    frame, near, met = np.zeros(size, np.float32), np.zeros(size, np.float32), np.zeros(size, np.int64)
    for wall, ((left, top, depth), right, down) in enumerate(WALLS):
        # Solve centre + z * ray = corner + u * right + v * down in the plane's own basis: u, v and 1 / z are ratios of
        # linear functions of the pixel.
        inside = np.linalg.inv(np.stack([right, down, -np.cross(right, down)], 1).astype(np.float64))
        start = inside @ (camera[:3, 3] - (left + moved * (wall == WALKER), top, depth))
        steps = inside @ camera[:3, :3] @ to_ray
        ratios = [*(np.outer(start[:2], steps[2]) - start[2] * steps[:2]), -steps[2] / start[2], steps[2]]
        u, v, nearness, below = ((a * x + (b * y + c)).astype(np.float32) for a, b, c in ratios)
        u, v = u / below, v / below
        hit = (nearness > near) & (u >= 0) & (u <= 1) & (v >= 0) & (v <= 1)
        if not hit.any():
            continue
        rows, columns = textures[wall].shape
        places = np.stack([columns * ratios[0] - 0.5 * steps[2], rows * ratios[1] - 0.5 * steps[2], steps[2]])
        how = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        seen = cv2.warpPerspective(textures[wall], places, size[::-1], flags=how, borderMode=cv2.BORDER_REFLECT)
        frame, near, met = np.where(hit, seen, frame), np.where(hit, nearness, near), np.where(hit, wall, met)
    return frame, met, 1 / near


def standing(frames: int) -> Tensor:
    """Return the poses (T, 4, 4) of a camera that stands still."""
    return torch.eye(4, dtype=torch.float64).repeat(frames, 1, 1)


def source_path(frames: int) -> Tensor:
    """Return the source's poses (T, 4, 4), which move in all six degrees of freedom, by 0.9 m and 8 degrees."""
    progress = torch.arange(frames, dtype=torch.float64)[:, None] / max(frames - 1, 1)
    turn = torch.tensor([2.0, -8.0, 1.0], dtype=torch.float64).deg2rad()
    return pose(rotation_matrix(progress * turn), progress * torch.tensor([0.8, -0.3, 0.3], dtype=torch.float64))


def slowed(preset: str, frames: int, speed: float) -> Tensor:
    """Return a preset's path (T, 4, 4) at a fraction of its speed."""
    return preset_path(preset, frames, translation_scale=speed, rotation_scale=speed)


@functools.cache
def film(preset: str, size: tuple[int, int] = SMALL, frames: int = 5, speed: float = 1.0) -> Tensor:
    """Render the room along a preset, with `speed` scaling the motion; "source" is the source camera. (3, T, h, w)."""
    path = source_path(frames) if preset == "source" else slowed(preset, frames, speed)
    return shoot(path, size, seed=0)


def grey(video: Tensor) -> NDArray[np.uint8]:
    """Return the uint8 frames (T, h, w) of a video (3, T, h, w) in [0, 1] whose three channels are equal."""
    return (255 * video[0]).round().numpy().astype(np.uint8)


def spoiled(video: Tensor, *, sigma: float = 0.0, quality: int | None = None, sprite: bool = False) -> Tensor:
    """Return a grey video blurred, with a moving object of 0.4 of its width and half its height, compressed as JPEG.

    Args:
        video: (3, T, h, w).
        sigma: of the blur in pixels at width 832.
        quality: of the JPEG; None: uncompressed.
        sprite: add the object.
    """
    frames, height, width = video.shape[1:]
    rows, columns = height // 2, round(0.4 * width)
    look = cv2.GaussianBlur(np.random.default_rng(9).normal(128, 300, (rows, columns)), (0, 0), 2.5 * width / 832)
    made = []
    for number, picture in enumerate(grey(video).astype(np.float64)):
        if sprite:
            left = round(number / max(frames - 1, 1) * (width - columns))
            top = round(height / 4 + height / 8 * np.sin(number))
            picture[top : top + rows, left : left + columns] = look
        soft = cv2.GaussianBlur(picture, (0, 0), sigma * width / 832) if sigma else picture
        levels = np.clip(soft, 0, 255).round().astype(np.uint8)
        if quality is not None:
            code = cv2.imencode(".jpg", levels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
            levels = cv2.imdecode(code, cv2.IMREAD_GRAYSCALE)
        made.append(levels.astype(np.float32) / 255)
    return torch.from_numpy(np.stack(made)).expand(3, frames, height, width).contiguous()


def condition(preset: str, source: Tensor, poses: Tensor, target: Tensor | None = None, **changes: object) -> Condition:
    """Return the condition of a preset for a source video (3, T, h, w) with poses (T, 4, 4)."""
    values: dict[str, object] = {
        "index": 0,
        "gid": 0,
        "slot": 0,
        "prompt": "a room",
        "source_video": source,
        "source_poses": poses,
        "target_poses": preset_path(preset, source.shape[1]),
        "scene": "val/f24_aperture5/scene1",
        "source_camera": "cam01",
        "target_camera": preset,
        "intrinsics": intrinsics((source.shape[2], source.shape[3])),
        "target_video": target,
        "preset": preset,
    }
    return Condition(**(values | changes))
