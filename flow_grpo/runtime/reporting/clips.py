"""Videos and tables of a run: layout side by side, captions and file names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from flow_grpo.records import Condition, ScoredBatch
from flow_grpo.runtime.reporting.tracker import Tracker
from flow_grpo.runtime.video_file import levels

SHOWN_ROWS = 240  # pixels: smaller videos are enlarged to about this height


@dataclasses.dataclass(frozen=True)
class Clip:
    """One video for the log.

    Attributes:
        video: (3, T, rows, columns) uint8: source | generated | target, enlarged.
        name: file name without suffix: condition and rewards.
        caption: the same as a sentence.
    """

    video: Tensor
    name: str
    caption: str


def make_clip(condition: Condition, generated: Tensor, rewards: Mapping[str, float]) -> Clip:
    """Return the clip of one sample, whose generated video is (3, T, h, w)."""
    values = " ".join(f"{name} {value:.3f}" for name, value in rewards.items())
    short = " ".join(f"{name.rpartition('/')[2]} {value:.3f}" for name, value in rewards.items())
    path = f"{condition.source_camera} to {condition.target_camera}"
    if condition.preset:
        path += f" ({condition.preset})"
    return Clip(
        video=side_by_side(condition, generated.nan_to_num(0.0, 1.0, 0.0)),  # a broken sample is shown as well
        name=re.sub(r"[/:\\]", "-", f"{condition.scene}_{condition.target_camera}_{short.replace(' ', '_')}"),
        caption=f"{condition.scene}, {path}: {values} (source | generated | target)",
    )


def training_clips(batch: ScoredBatch, count: int) -> list[Clip]:
    """Return clips of the first `count` samples of a batch that still has their videos."""
    return [
        make_clip(
            batch.conditions[row],
            batch.videos[row],
            {name: float(result.values[row]) for name, result in batch.rewards.items() if result.valid[row]},
        )
        for row in range(min(count, len(batch.videos)))
    ]


def side_by_side(condition: Condition, generated: Tensor) -> Tensor:
    """Return source | generated | target (3, T, rows, columns) uint8, enlarged by an integer factor when small."""
    parts = [part for part in (condition.source_video, generated, condition.target_video) if part is not None]
    video = torch.cat([levels(part) for part in parts], dim=-1)
    factor = max(1, round(SHOWN_ROWS / video.shape[-2]))
    return video.repeat_interleave(factor, dim=-2).repeat_interleave(factor, dim=-1)


def log_clips(tracker: Tracker, folder: Path, group: str, clips: Sequence[Clip], step: int) -> None:
    """Write clips to `folder` as mp4 files `<group>_<step>_<name>.mp4` and show them in the trackers."""
    for number, clip in enumerate(clips):
        path = folder / f"{group}_{step:06d}_{clip.name}.mp4"
        tracker.log_video(f"{group}/video_{number}", path, clip.video, clip.caption, step)


def log_rows(tracker: Tracker, name: str, rows: Sequence[Mapping[str, object]], step: int) -> None:
    """Show rows with named columns as one table in the trackers; cells that a row lacks are empty."""
    if rows:
        columns = list(dict.fromkeys(column for row in rows for column in row))
        tracker.log_table(name, columns, [[row.get(column, "") for column in columns] for row in rows], step)
