"""Plücker rays of camera paths, packed by latent frame: the camera input of ReDirector (arXiv 2511.19827).

A camera is a row of 16 numbers: the row-major 3x4 [R|t] of its OpenCV camera-to-world pose (metres), then fx, fy, cx,
cy in pixels. Rays are computed where they are needed: those of one latent frame of 480x832 take 38 MB, the two paths of
81 frames 1.6 GB, and the cameras themselves 10 kB.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flow_grpo.maths.poses import relative

CAMERA_NUMBERS = 16
RAY_CHANNELS = 6


def camera_pair(target: Tensor, source: Tensor, intrinsics: Tensor) -> Tensor:
    """Return the cameras (2, T, 16) fp32 of target and source path, both relative to the source's first frame.

    Args:
        target: (T, 4, 4) camera-to-world poses in any common frame, metres.
        source: likewise.
        intrinsics: (4,) fx, fy, cx, cy in pixels of the video, for all frames of both paths.

    Raises:
        ValueError: the paths differ in length, or a matrix is not a pose (`check_poses`), or the intrinsics are not
            four numbers with positive focal lengths.
    """
    if len(target) != len(source):
        raise ValueError(f"target path has {len(target)} poses and source path {len(source)}, must be as many")
    if intrinsics.shape != (4,) or not (intrinsics.isfinite().all() and (intrinsics[:2] > 0).all()):
        raise ValueError(f"intrinsics are {intrinsics.tolist()}, must be fx, fy, cx, cy in pixels, fx and fy positive")
    poses = torch.stack([relative(source[0], path) for path in (target, source)])
    rows = poses[..., :3, :].flatten(-2).float()
    return torch.cat([rows, intrinsics.to(rows).expand(*rows.shape[:-1], 4)], dim=-1)


def by_latent_frame(cameras: Tensor, stride: int = 4) -> Tensor:
    """Return the cameras (..., F, stride, 16) of each latent frame: the first video frame counts `stride` times.

    Args:
        cameras: (..., T, 16), T = stride (F - 1) + 1.
        stride: video frames per latent frame.

    Raises:
        ValueError: T is of another form.
    """
    frames = cameras.shape[-2]
    if (frames - 1) % stride:
        raise ValueError(f"camera path has {frames} frames, must be {stride}n+1, as many as the codec takes")
    first = cameras[..., :1, :].expand(*cameras.shape[:-2], stride - 1, cameras.shape[-1])
    groups: Tensor = torch.cat([first, cameras], dim=-2).unflatten(-2, (-1, stride))
    return groups


def plucker_rays(cameras: Tensor, height: int, width: int) -> Tensor:
    """Return the rays (..., 6, height, width) through the pixels' centres, in the cameras' dtype.

    Channels are o x d and d, with o the camera's centre in metres and d the unit direction, both in world coordinates.

    Args:
        cameras: (..., 16).
        height: rows of the video in pixels, h.
        width: columns, w.
    """
    pose, (fx, fy, cx, cy) = cameras[..., :12].unflatten(-1, (3, 4)), cameras[..., 12:, None].unbind(-2)
    x = (torch.arange(width, device=cameras.device) + 0.5 - cx) / fx  # (..., w)
    y = (torch.arange(height, device=cameras.device) + 0.5 - cy) / fy  # (..., h)
    x, y = x[..., None, :].expand(*y.shape, width), y[..., None].expand(*y.shape, width)
    seen = torch.stack([x, y, torch.ones_like(x)], dim=-3)
    seen = seen / torch.linalg.vector_norm(seen, dim=-3, keepdim=True)
    # Products and sums, not a matrix product: autocast would compute that in half precision.
    direction = (pose[..., :3, None, None] * seen[..., None, :, :, :]).sum(-3)
    centre = pose[..., 3, None, None].expand_as(direction)
    return torch.cat([torch.linalg.cross(centre, direction, dim=-3), direction], dim=-3)


def packed_rays(cameras: Tensor, height: int, width: int) -> Tensor:
    """Return the rays (..., 6 k, height, width) of the k video frames of one latent frame; channel c k + frame.

    Args:
        cameras: (..., k, 16), see `by_latent_frame`.
        height: rows of the video in pixels.
        width: columns.
    """
    packed: Tensor = plucker_rays(cameras, height, width).transpose(-4, -3).flatten(-4, -3)
    return packed
