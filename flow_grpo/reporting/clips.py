"""Videos and tables of a run: what a clip shows, its caption and its file name."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flow_grpo.maths.advantages import combine_rewards
from flow_grpo.records import Condition, ScoredBatch
from flow_grpo.runtime.video_file import levels

SOURCE, BASE, NOW, TRUE = "source", "base", "now", "true view"  # panels, from left to right
MOST_PROMPT = 160  # characters of a prompt in a caption


@dataclasses.dataclass(frozen=True)
class Clip:
    """One video for the log, before it is drawn."""

    panels: dict[str, Tensor]  # name -> (3, T, h, w) uint8, from left to right
    name: str  # file name without suffix: condition and rewards
    title: str  # the condition in words
    fps: float  # frames per second
    # name -> number: rewards, and pose errors where they are measured; without those that have no value
    scores: dict[str, float]
    of: dict[str, Any]  # what the index of videos says about the condition: condition, scene, camera, preset, prompt
    # the same scores before training, where they are known
    before: Mapping[str, float] = dataclasses.field(default_factory=dict)
    remark: str = ""  # what the scores are, where they are no rewards; it takes their place below the panels
    commanded: Tensor | None = None  # (T, 4, 4) camera-to-world in metres, or None
    estimated: Tensor | None = None  # (T, 4, 4) likewise, NaN for frames that could not be located, or None

    @property
    def caption(self) -> str:
        """The condition and its scores in one sentence."""
        values = " ".join(f"{name} {value:.3f}" for name, value in self.scores.items())
        return f"{self.title}: {values}" + (f" ({self.remark})" if self.remark else "")

    def lines(self, before: Mapping[str, float]) -> list[str]:
        """Return the caption as lines below the panels; `before` holds scores before training, if they are known."""
        texts = [
            f"{name} {before[name]:.3f} → {value:.3f}" if name in before else f"{name} {value:.3f}"
            for name, value in self.scores.items()
        ]
        texts += ["(before training → now)"] if self.scores.keys() & before.keys() else []
        return [self.title, self.remark or "   ".join(text.replace(" ", "\u00a0") for text in texts)]


def make_clip(
    condition: Condition,
    generated: Tensor,
    rewards: Mapping[str, float],
    *,
    base: Tensor | None = None,
    errors: Mapping[str, float] | None = None,
    estimated: Tensor | None = None,
) -> Clip:
    """Return the clip of one sample, whose video (3, T, h, w) was generated of the condition.

    Beside it is shown `base`, what the policy made of it before training. `errors` are pose errors, where measured.
    """
    short = " ".join(f"{name.rpartition('/')[2]} {value:.3f}" for name, value in rewards.items())
    shown = {SOURCE: condition.source_video, BASE: base, NOW: generated, TRUE: condition.target_video}
    return Clip(
        panels={name: _pixels(video) for name, video in shown.items() if video is not None},
        name=file_name(f"{condition.scene}_{condition.target_camera}_{short.replace(' ', '_')}"),
        title=_title(condition),
        fps=condition.fps,
        scores={name: value for name, value in {**rewards, **(errors or {})}.items() if math.isfinite(value)},
        of=_of(condition),
        commanded=condition.target_poses,
        estimated=estimated,
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


def group_clip(batch: ScoredBatch, weights: Mapping[str, float], k: int) -> Clip | None:
    """Return a clip of the copies of one group whose videos this rank holds, by falling advantage among these.

    It is the group of which there are most; None if there are no two copies of any, or no reward has a weight. `k` is
    the number of copies of a whole group.
    """
    rows: dict[int, list[int]] = {}
    for row, condition in enumerate(batch.conditions[: len(batch.videos)]):
        rows.setdefault(condition.gid, []).append(row)
    copies = max(rows.values(), key=len, default=[])
    if len(copies) < 2 or not any(weights.values()):
        return None
    compared = combine_rewards(
        {name: result.values[copies].cpu() for name, result in batch.rewards.items()},
        {name: result.valid[copies].cpu() for name, result in batch.rewards.items()},
        weights,
        torch.zeros(len(copies), dtype=torch.int64),
        k=len(copies),
        floors={},
    )
    order = compared.advantages.argsort(descending=True).tolist()
    condition = batch.conditions[copies[0]]
    names = [f"copy {place}" for place in range(1, len(copies) + 1)]
    held = f"all {k} copies" if len(copies) == k else f"{len(copies)} of {k} copies, those that rank 0 holds"
    return Clip(
        panels={name: _pixels(batch.videos[copies[row]]) for name, row in zip(names, order, strict=True)},
        name=file_name(f"{condition.scene}_{condition.target_camera}_{len(copies)}_copies"),
        title=_title(condition),
        fps=condition.fps,
        scores={name: float(compared.advantages[row]) for name, row in zip(names, order, strict=True)},
        of=_of(condition),
        remark=f"advantages within one group, the best first: {held}",
        commanded=condition.target_poses,
    )


def _pixels(video: Tensor) -> Tensor:
    return levels(video.nan_to_num(0.0, 1.0, 0.0))  # a diverged sample is shown as well


def file_name(text: str) -> str:
    """Return a text as the name of a file within its folder."""
    return re.sub(r"[/:\\]", "-", text)


def _title(condition: Condition) -> str:
    if not condition.target_camera:
        return condition.prompt[:MOST_PROMPT]
    path = f"{condition.source_camera} to {condition.target_camera}"
    return f"{condition.scene}, {path}" + (f" ({condition.preset})" if condition.preset else "")


def _of(condition: Condition) -> dict[str, Any]:
    return {
        "condition": condition.index,
        "scene": condition.scene,
        "camera": condition.target_camera,
        "preset": condition.preset or "",
        "prompt": "" if condition.target_camera else condition.prompt,
    }
