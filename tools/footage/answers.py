"""What a recipe's rewards can measure on a clip, tried on a perfect retake: the right frames, written and read once."""

from __future__ import annotations

import argparse
import base64
import dataclasses
import io
import re
import tempfile
import time
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
from flow_grpo.rewards.frames import frame_numbers, grey_frames
from flow_grpo.runtime.video_file import write_video
from flow_grpo.settings.schema import Config
from tools.footage.focal_length import focal_length
from tools.footage.layout import lay_out
from tools.run_report.words import NOTHING, number

UNITS = {"_deg": "°", "_m": " m", "_px": " px"}  # endings of the measurements that have one
# What a cause says -> what helps; the first that is found.
HELP = {
    "no known focal length": "give its focal length, which its pictures do not tell: --focal-px, or a pose file beside "
    "it that holds one",
    "no texture": "exclude it: its pictures show too little texture",
    "with the first frame and": "exclude it, or keep a part without cuts, blur and what passes before the camera",
    "its camera moves|of 0.2 degrees": "look at its focal length (--focal-px counts pixels of the file), then put "
    "poses beside it (docs/camera_paths.md); else exclude it",
    "nothing tells the size": "give a depth (NAME.depth.npz beside it, or --depth METRES), or use pose_dir instead",
    "no direction": "nothing: it has a value on commands that move the camera",
    "true view": "nothing but a second camera: give this reward no weight on such clips",
    "frames, needs|too short": "set --config.data.num_frames to what it has, 4n+1, or leave it out",
    "no result after|died": "run the check again, with fewer --workers",
}


@dataclasses.dataclass(frozen=True)
class Score:
    """What one reward makes of a perfect retake."""

    value: float | None  # the floor on this clip; None without a value
    text: str  # the same with its error in degrees, metres or pixels where the reward has one
    cause: str  # why there is no value, or ""
    cpu_seconds: float  # of a sample; what rewards share counts for the first, what a source needs once for none


@dataclasses.dataclass(frozen=True)
class Answer:
    """What can be measured on one clip."""

    clip: str
    cause: str = ""  # why it cannot be used at all, or ""
    picture: str = ""  # what the file holds
    camera: str = ""  # what locates cameras on it, "" for nothing
    focal_px: int | None = None  # in pixels of the file, as its camera's turn says; where it is known, None
    scores: dict[str, Score] = dataclasses.field(default_factory=dict)
    presets: tuple[str, ...] = ()  # along which cameras can be measured
    thumbnail: str = ""  # JPEG of its middle frame as the model sees it, in base64

    @property
    def lost(self) -> str:
        """The presets that cannot be measured, where others can."""
        return ", ".join(name for name in PRESETS if self.presets and name not in self.presets)

    def causes(self) -> dict[str, str]:
        """Return why values are missing -> the rewards it holds for."""
        found = {self.cause: ["all"]} if self.cause else {}
        for name, score in self.scores.items():
            if score.cause:
                found.setdefault(score.cause, []).append(name)
        return {cause: ", ".join(names) for cause, names in found.items()}

    def advice(self) -> list[str]:
        """Return what would help, each sentence once; a cause that no row of `HELP` knows says it itself."""
        told = f"--focal-px {self.focal_px} is what its camera's turn tells, if its lens keeps straight lines straight"
        texts = HELP | ({"no known focal length": told} if self.focal_px else {})
        known = [[text for part, text in texts.items() if re.search(part, cause)] or [cause] for cause in self.causes()]
        return list(dict.fromkeys(found[0] for found in known))


def examine(config: Config, item: Path | int, options: argparse.Namespace) -> Answer:
    """Return the answer for a video file, laid out with `options`, or for an item of the training split.

    `options` are focal_px, unit and depth, as of tools/prepare_clips.py.
    """
    data, number, name = config.data, item, item.stem if isinstance(item, Path) else str(item)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if isinstance(item, Path):
                known = {"out": Path(folder, "data"), "camera": [*PRESETS], "frames": data.num_frames, "val": 0.0}
                lay_out([item], argparse.Namespace(**vars(options) | known))
                data, number = dataclasses.replace(data, root=folder + "/data", train_split="train"), 0
            listed = multicam_data(data, data.train_split)
            name = name if isinstance(item, Path) else " ".join(listed.name_of(number))
            condition, (frames, *shape) = listed.condition(number), video_size(listed.source_file(number))
        except ValueError as error:
            return Answer(name, str(error))
        server = {"servers": config.reward.remote, "timeout_s": config.reward.remote_timeout}
        rewards = build_reward_set(config.reward.weights, data_root=data.root, **server)
        high, wide = (of / to for of, to in zip(shape, condition.size[1:], strict=True))
        kept = f"{min(high / wide, wide / high):.0%} of the picture kept"
        picture = f"{frames} frames of {shape[0]}x{shape[1]}, {condition.fps:g} fps, {kept}"
        answer = Answer(name, "", picture, thumbnail=_thumbnail(condition))
        if condition.intrinsics is None:
            seen = focal_length(grey_frames(condition.need_source(), range(condition.size[0])))
            answer = dataclasses.replace(answer, focal_px=seen and round(seen * min(wide, high)))
        return _measured(answer, condition, rewards)


def _measured(answer: Answer, condition: Condition, rewards: RewardSet) -> Answer:
    shared_measurer().pool.workers = 0  # here, where the seconds are counted
    rewards.prepare([condition])
    asked = condition
    if condition.target_video is None:
        asked = dataclasses.replace(condition, target_poses=own_path(condition))
    marks: list[float] = []
    rewards.on_call = lambda _: marks.append(time.process_time())  # before and after each
    scores = {}
    for place, (reward, result) in enumerate(rewards(retake(condition)[None], [asked]).items()):
        value = float(result.values[0]) if result.valid[0] else None
        known = [(key, end) for key in result.info for end in UNITS if key.endswith(end)]
        error = "".join(f" ({float(result.info[key][0]):.2g}{UNITS[end]})" for key, end in known[:1])
        cause = result.causes[0].replace(f"{condition.scene} ", "").replace(f"{condition.source_camera} ", "")
        text = NOTHING if value is None else number(value, 2) + error
        scores[reward] = Score(value, text, cause, marks[2 * place + 1] - marks[2 * place])
    answer, source = dataclasses.replace(answer, scores=scores), None
    if any(isinstance(reward, PathReward) for reward in rewards.rewards):
        source = shared_measurer().sources([condition])[0].value
    if source is None:
        return answer
    moving = "structure from motion" if condition.source_poses is None else "its poses"
    camera = ("stays in place" if isinstance(source, FixedSource) else moving) + ", in metres" * source.metric
    return dataclasses.replace(answer, camera=camera, presets=measurable(source, condition))


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


def _thumbnail(condition: Condition) -> str:
    video = condition.need_source()
    levels = (255 * video[:, video.shape[1] // 2]).round().byte().permute(1, 2, 0).numpy()
    picture = Image.fromarray(levels)
    picture.thumbnail((320, 320))
    picture.save(buffer := io.BytesIO(), "JPEG", quality=80)
    return base64.b64encode(buffer.getvalue()).decode()
