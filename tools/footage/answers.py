"""What a recipe's rewards can measure on a clip, tried on a perfect retake: the right frames, written and read once."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import io
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.data.splits import multicam_data
from flow_grpo.data.video_io import read_video, video_size
from flow_grpo.maths.poses import PRESETS, preset_path
from flow_grpo.records import Condition
from flow_grpo.rewards.base import RewardSet, build_reward_set
from flow_grpo.rewards.camera.find_source import AnySource
from flow_grpo.rewards.camera.fixed_source import FEWEST_FEATURES, FixedSource
from flow_grpo.rewards.camera.pose import LEAST_LOCATED, PathReward, shared_measurer
from flow_grpo.rewards.frames import frame_numbers
from flow_grpo.runtime.video_file import write_video
from flow_grpo.settings.schema import Config
from tools.footage.layout import lay_out

UNITS = {"_deg": "°", "_m": " m", "_px": " px"}  # endings of the measurements that have one
THUMBNAIL = (320, 320)
LEAST_KEPT = 0.6  # share of a clip's picture, below which the crop is worth a word
# What a cause says -> what helps; the first that is found.
HELP = {
    "no known focal length": "give its focal length: --focal-px, or a pose file beside it that holds one",
    "no texture": "exclude it: its pictures show too little texture",
    "its camera moves|of 0.2 degrees": "put poses beside it (docs/camera_paths.md), or mend its lens; else exclude it",
    "nothing tells the size": "give a depth (NAME.depth.npz beside it, or --depth METRES), or use pose_dir instead",
    "no direction": "nothing: it has a value on commands that move the camera",
    "true view|target video": "nothing but a second camera: give this reward no weight on such clips",
    "frames, needs|too short": "set --config.data.num_frames to what it has, 4n+1, or leave it out",
    "no result after|died": "run the check again, with fewer --workers",
}


@dataclasses.dataclass(frozen=True)
class Score:
    """One reward of a perfect retake."""

    value: float | None  # the floor on this clip; None without a value
    measured: str  # the same in degrees, metres or pixels, where the reward has such a measure
    cause: str  # why there is no value, or ""
    cpu_seconds: float  # of a sample; what all rewards share counts for the first, what a source needs once for none


@dataclasses.dataclass(frozen=True)
class Answer:
    """What can be measured on one clip."""

    clip: str
    picture: str  # what the file holds, or ""
    camera: str  # what locates cameras on it
    scores: dict[str, Score]  # by reward; empty where the clip cannot be used at all
    presets: tuple[str, ...]  # along which cameras can be measured
    cause: str  # why the clip cannot be used at all, or ""
    advice: tuple[str, ...]
    thumbnail: str  # JPEG of its middle frame as the model sees it, in base64; "" for none


def examine(config: Config, item: Path | int, options: argparse.Namespace) -> Answer:
    """Return the answer for a video file, or for an item of the training split.

    Args:
        config: the recipe; of a file `data.root` is not read.
        item: the file, laid out with `options`, or the number of the item.
        options: focal_px, unit and depth, as of tools/prepare_clips.py.
    """
    name = item.stem if isinstance(item, Path) else str(item)
    with tempfile.TemporaryDirectory() as folder:
        try:
            data, number = config.data, item
            if isinstance(item, Path):
                known = {"out": Path(folder, "data"), "camera": [*PRESETS], "frames": data.num_frames, "val": 0.0}
                lay_out([item], argparse.Namespace(**vars(options) | known))
                data, number = dataclasses.replace(data, root=str(known["out"]), train_split="train"), 0
            listed = multicam_data(data, data.train_split)
            name = name if isinstance(item, Path) else "{} {}".format(*listed.name_of(item))
            condition, file = listed.condition(number), listed.source_file(number)
        except ValueError as error:
            return Answer(name, "", "", {}, (), str(error), advice([str(error)]), "")
        rewards = build_reward_set(
            config.reward.weights,
            data_root=data.root,
            servers=config.reward.remote,
            timeout_s=config.reward.remote_timeout,
        )
        return answer(name, condition, rewards, file)


def answer(name: str, condition: Condition, rewards: RewardSet, file: Path) -> Answer:
    """Return what rewards make of a perfect retake of a condition, whose source is a video file."""
    shared_measurer().pool.workers = 0  # here, where the seconds are counted
    rewards.prepare([condition])
    asked = (
        condition
        if condition.target_video is not None
        else dataclasses.replace(condition, target_poses=own_path(condition))
    )
    marks: list[float] = []
    rewards.on_call = lambda _: marks.append(time.process_time())  # before and after each
    results = rewards(retake(condition)[None], [asked])
    scores = {}
    for place, (reward, result) in enumerate(results.items()):
        value = float(result.values[0]) if result.valid[0] else None
        units = [(unit, result.info[key]) for key in result.info for end, unit in UNITS.items() if key.endswith(end)]
        measured = f"{float(units[0][1][0]):.2g}{units[0][0]}" if units and value is not None else ""
        cause = result.causes[0].replace(f"{condition.scene} ", "").replace(f"{condition.source_camera} ", "")
        scores[reward] = Score(value, measured, cause, marks[2 * place + 1] - marks[2 * place])
    camera, presets = "", ()
    if any(isinstance(reward, PathReward) for reward in rewards.rewards):
        source = shared_measurer().sources([condition])[0].value
        camera = "" if source is None else camera_of(source, condition)
        presets = () if source is None else measurable(source, condition)
    frames, rows, columns = video_size(file)
    kept = min((ratio := rows * condition.size[2] / columns / condition.size[1]), 1 / ratio)
    help_ = advice(score.cause for score in scores.values())
    if kept < LEAST_KEPT:
        help_ += (f"the crop leaves {kept:.0%} of its picture: add its shape to data.buckets",)
    picture = f"{frames} frames of {rows}x{columns}, {condition.fps:g} fps"
    return Answer(name, picture, camera, scores, presets, "", help_, thumbnail(condition))


def own_path(condition: Condition) -> Tensor:
    """Return the path (T, 4, 4) of the source's camera: as known, else as it is found, a still one where it is not."""
    if condition.source_poses is not None:
        return condition.source_poses
    path = torch.eye(4, dtype=torch.float64).repeat(condition.size[0], 1, 1)
    (found,) = shared_measurer()(condition.need_source()[None], [dataclasses.replace(condition, target_poses=path)])
    if found.value is not None:
        rows = list(found.value.frames)
        path[rows] = found.value.seen.where(found.value.seen.isfinite(), path[rows])
    return path


def retake(condition: Condition) -> Tensor:
    """Return the true view, or the source where there is none, (3, T, h, w) in [0, 1] after writing and reading."""
    video = condition.need_source() if condition.target_video is None else condition.target_video
    frames, rows, columns = condition.size
    with tempfile.TemporaryDirectory() as folder:
        write_video(file := Path(folder, "retake.mp4"), video, condition.fps)
        return read_video(file, frames)[..., :rows, :columns].float() / 255


def camera_of(source: AnySource, condition: Condition) -> str:
    """Return in words what locates cameras on a source."""
    moves = "its poses" if condition.source_poses is not None else "structure from motion"
    return f"{'stays in place' if isinstance(source, FixedSource) else moves}{', in metres' * source.metric}"


def measurable(source: AnySource, condition: Condition) -> tuple[str, ...]:
    """Return the presets that keep `FEWEST_FEATURES` of the source's points in view, in half of the scored frames.

    Points without a scale are only turned, as if they were far away.
    """
    frames = frame_numbers(condition.size[0])
    start = torch.eye(4, dtype=torch.float64) if condition.source_poses is None else condition.source_poses[0]
    paths = {name: (start @ preset_path(name, condition.size[0]))[frames].numpy() for name in PRESETS}

    def in_view(row: int, pose: np.ndarray) -> int:
        if isinstance(source, FixedSource):
            own, points = source.rows[row], source.points
            xyz = points.rays[own] * points.depths[own, None] + points.centre * source.metric
        else:
            serving = [view.lasting | (view.frame == frames[row]) for view in source.views]
            xyz = np.concatenate([view.xyz[kept] for view, kept in zip(source.views, serving, strict=True)])
        seen = (xyz - pose[:3, 3] * source.metric) @ pose[:3, :3] @ source.camera.T
        place = seen[:, :2] / seen[:, 2:] + 0.5
        return int(((seen[:, 2] > 0) & (place > 0).all(1) & (place < condition.size[:0:-1]).all(1)).sum())

    shown = {name: np.array([in_view(*each) for each in enumerate(path)]) for name, path in paths.items()}
    return tuple(name for name, counts in shown.items() if (counts >= FEWEST_FEATURES).mean() >= LEAST_LOCATED)


def advice(causes: Iterable[str]) -> tuple[str, ...]:
    """Return what would help against causes, each sentence once; a cause that no row of `HELP` knows says it itself."""
    found = [next((text for part, text in HELP.items() if re.search(part, cause)), cause) for cause in causes if cause]
    return tuple(dict.fromkeys(found))


def thumbnail(condition: Condition) -> str:
    """Return the middle frame of the source as a small JPEG in base64."""
    video = condition.need_source()
    levels = (255 * video[:, video.shape[1] // 2]).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(levels)
    picture.thumbnail(THUMBNAIL)
    picture.save(buffer := io.BytesIO(), "JPEG", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()
