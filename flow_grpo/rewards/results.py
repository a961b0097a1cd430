"""Results of rewards: a score for every row, or the cause of its absence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.process_pool import Outcome


def all_valid(conditions: Sequence[Condition], values: Tensor, info: Mapping[str, Tensor]) -> RewardResult:
    """Return values (B,) and `info` of (B,) each as the scores of B conditions, all valid."""
    count = len(conditions)
    return RewardResult(values, torch.ones(count, dtype=torch.bool), ("",) * count, dict(info))


def scored_rows(
    causes: Sequence[str],
    measures: Sequence[str],
    score: Callable[[list[int]], tuple[Tensor, Mapping[str, Tensor]]],
) -> RewardResult:
    """Return what `score` finds in the rows without a cause, not called without any; NaN and not valid elsewhere.

    `causes` are B texts, why a row cannot be scored, or ""; `score` returns values and `info`, by `measures`, of rows.
    """
    rows = [row for row, cause in enumerate(causes) if not cause]
    values = torch.full((len(causes),), torch.nan)
    info = {name: values.clone() for name in measures}
    if rows:
        values[rows], measured = score(rows)
        for name, measurement in measured.items():
            info[name][rows] = measurement
    return RewardResult(values, torch.tensor([not cause for cause in causes]), tuple(causes), info)


def from_outcomes(outcomes: Sequence[Outcome[tuple[float, ...]]], measures: Sequence[str]) -> RewardResult:
    """Return the result of B measurements, each of a value and then one number for every name in `measures`."""
    table = torch.full((len(outcomes), 1 + len(measures)), torch.nan)
    for row, outcome in enumerate(outcomes):
        if outcome.value is not None:
            table[row] = torch.tensor(outcome.value)
    values, *info = table.unbind(1)
    causes = tuple(outcome.fault for outcome in outcomes)
    valid = torch.tensor([not cause for cause in causes])
    faulty = torch.tensor([outcome.failed for outcome in outcomes])
    return RewardResult(values, valid, causes, dict(zip(measures, info, strict=True)), faulty)


def why_not_comparable(video: Tensor, condition: Condition) -> str:
    """Return why a video (3, T, h, w) cannot be compared with its ground-truth view, or ""."""
    if condition.target_video is None:
        return f"{condition.scene} has no true view along {condition.target_camera}"
    if condition.target_video.shape != video.shape:
        return f"target video has shape {tuple(condition.target_video.shape)}, the sample {tuple(video.shape)}"
    return ""
