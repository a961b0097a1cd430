"""Videos that a reward might wrongly prefer, rendered in the textured room: each one cheats in a different way."""

import dataclasses

import cv2
import numpy as np
import torch
from torch import Tensor

from flow_grpo.maths.pictures import blur
from flow_grpo.maths.poses import preset_path
from flow_grpo.records import Condition
from tests.textured_room import condition, shoot, source_path

COMMANDS = ("arc_right", "pan_right", "zoom_in")
EXACT, HARMLESS = "exact", "exact, as JPEG 70"
SPEEDS = (0.98, 0.5, 1.5)
TREMBLE = 0.0075  # amplitude as a share of the whole motion: a quarter of a degree and 1.5 cm on an arc
JITTER = 0.15  # likewise: three of twenty steps
SOFT = 5.0  # blur in pixels at width 832
GRID = 6 / 255  # brightness of the lines


@dataclasses.dataclass(frozen=True)
class Stage:
    """A command and its videos."""

    condition: Condition  # the command, with source video, source poses and true view
    videos: dict[str, Tensor]  # (3, T, h, w) in [0, 1]: the exact video, the same as JPEG, then the tricks


def stage(command: str, size: tuple[int, int], frames: int) -> Stage:
    """Render source, true view and all videos of a command, each with its own sensor noise."""
    steady = torch.linspace(0, 1, frames, dtype=torch.float64)
    to_and_fro = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(frames)[:frames]
    late = steady > 2 / 3
    source = shoot(source_path(frames), size, painted=True)
    target = shoot(along(command, steady), size, painted=True, take=2)
    exact = shoot(along(command, steady), size, painted=True, take=3)
    filmed = {f"{speed:g} of the speed": speed * steady for speed in SPEEDS}
    filmed["tremble"] = steady + TREMBLE * to_and_fro
    filmed["last third jitters"] = steady + JITTER * to_and_fro * late
    videos = {EXACT: exact, HARMLESS: pressed(exact, 70)}
    videos |= {"static first frame": exact[:, :1].expand_as(exact), "copied source": source, "reversed": exact.flip(1)}
    videos |= {name: shoot(along(command, where), size, painted=True, take=3) for name, where in filmed.items()}
    videos |= {"mirrored": exact.flip(-1), "noise": noise(exact), "blurred": blur(exact, SOFT * size[1] / 832)}
    videos |= {"over-exposed": (1.6 * exact + 40 / 255).clamp(0, 1), "garish colours": garish(exact)}
    videos |= {"grid": gridded(exact), "flicker": flickering(exact)}
    return Stage(condition(command, source, source_path(frames), target), videos)


def along(command: str, places: Tensor) -> Tensor:
    """Return the poses (T, 4, 4) of a preset at places (T,) along its path, from 0 at the start to 1 at the end."""
    ends = [preset_path(command, 2, translation_scale=place, rotation_scale=place)[1] for place in places.tolist()]
    return torch.stack(ends)


def pressed(video: Tensor, quality: int) -> Tensor:
    """Return the video with every frame compressed as JPEG, as storage and transmission do."""
    frames = []
    for picture in (255 * video).round().byte().permute(1, 2, 3, 0).numpy():
        code = cv2.imencode(".jpg", np.ascontiguousarray(picture), [cv2.IMWRITE_JPEG_QUALITY, quality])[1]
        frames.append(torch.from_numpy(cv2.imdecode(code, cv2.IMREAD_COLOR)).permute(2, 0, 1))
    return torch.stack(frames, dim=1).float() / 255


def noise(video: Tensor) -> Tensor:
    """Return uniform noise in [0, 1) of the video's shape, the same in every call."""
    return torch.rand(video.shape, generator=torch.Generator().manual_seed(0))


def garish(video: Tensor) -> Tensor:
    """Return the video with twice the colour saturation."""
    grey = video.mean(0, keepdim=True)
    return (grey + 2 * (video - grey)).clamp(0, 1)


def gridded(video: Tensor) -> Tensor:
    """Return the video with a brighter line every 16 pixels in both directions."""
    made = video.clone()
    made[..., ::16, :] += GRID
    made[..., ::16] += GRID
    return made.clamp(0, 1)


def flickering(video: Tensor) -> Tensor:
    """Return the video with every second frame 10 % brighter."""
    gain = torch.ones(video.shape[1])
    gain[1::2] = 1.1
    return (video * gain[:, None, None]).clamp(0, 1)
