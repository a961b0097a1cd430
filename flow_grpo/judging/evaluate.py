"""Held-out evaluation: fixed conditions, fixed noise, deterministic sampling.

Conditions and noise depend neither on the run's seed nor on the world size, so results of different runs and epochs can
be compared sample by sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.rollout.scoring import decode
from flow_grpo.algorithm.rollout.shared_encodings import share_encodings
from flow_grpo.data.dynamic_batch import DynamicBatchSampler
from flow_grpo.judging.changes import ConditionRow, earlier_values, rows_by_camera
from flow_grpo.maths.keys import generator, key
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Guidance, RewardResult
from flow_grpo.reporting.clips import Clip, make_clip
from flow_grpo.rewards.base import Reward, RewardSet
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import ODE, Sampling

POSE_ERRORS = ("rot_err_deg", "trans_err_m")  # of a gold estimator: said below its videos


class ConditionSource(Protocol):
    """A data set whose items are a function of their index."""

    def __len__(self) -> int:
        """Return how many conditions there are."""
        ...

    def condition(self, index: int, gid: int = 0, slot: int = 0) -> Condition:
        """Return one of them."""
        ...

    def size_of(self, index: int) -> tuple[int, int, int]:
        """Return the (frames, rows, columns) of its videos."""
        ...


@runtime_checkable
class Locator(Protocol):
    """An estimator that can say where it saw the cameras, not only how far from the command."""

    def locate(self, videos: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """Return (B, T, 4, 4) camera-to-world like the commands of (B, 3, T, h, w) videos, NaN for lost frames."""
        ...


@dataclasses.dataclass(frozen=True)
class EvalSettings:
    """How to evaluate.

    Attributes:
        sigmas: (S+1,) fp32 CPU noise levels.
        num_conditions: how many held-out conditions, over all ranks.
        batch_size: samples per rank and call at the largest video size; smaller videos fill a call up to that cost.
        videos: how many videos to return.
        guidance: None for that of training.
        has_reference: the policy can be what it was before training (`Policy.reference`).
        measured_on: what a result depends on besides the weights, by knob: conditions, steps, guidance, estimator (the
            noise is always the same). Only results with equal ones may be compared.
    """

    sigmas: Tensor
    num_conditions: int
    batch_size: int
    videos: int
    guidance: Guidance | None = None
    has_reference: bool = False
    measured_on: Mapping[str, str | float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        metrics: `eval/` name -> mean over the conditions that have a value, and their share as `<name>_valid` where it
            is below 1.
        by_camera: `eval_by_camera/` kind of camera / name -> the same per kind of camera.
        rows: one per condition, in a fixed order.
        presets: one row per camera preset: "preset", "count" and the same means.
        clips: the first videos that rank 0 scores; empty elsewhere.
    """

    metrics: dict[str, float]
    by_camera: dict[str, float]
    rows: list[ConditionRow]
    presets: list[dict[str, Any]]
    clips: list[Clip]


class Evaluator:
    """Measures a policy on held-out conditions.

    Args:
        policy: sampled deterministically.
        dataset: held-out conditions.
        rewards: measured on every sample.
        gold: an estimator that no reward uses, or None; its metrics have no prefix.
        settings: see `EvalSettings`.
        world: who shares the work.

    Raises:
        ValueError: more conditions than the dataset holds.
    """

    def __init__(
        self,
        policy: Policy,
        dataset: ConditionSource,
        rewards: RewardSet,
        gold: Reward | None,
        settings: EvalSettings,
        world: World,
    ) -> None:
        self.indices = held_out_indices(len(dataset), settings.num_conditions)
        self.policy = policy
        self.dataset = dataset
        self.rewards = rewards
        self.gold = gold
        self.settings = settings
        self.world = world

    @property
    def names(self) -> list[str]:
        """The names of everything that scores, the gold estimator's included."""
        return [*self.rewards.weights, *([] if self.gold is None else [self.gold.name])]

    def run(self, weights: AbstractContextManager[Any] | None = None) -> Evaluation:
        """Sample and measure every held-out condition (collective call).

        Args:
            weights: context entered while sampling, for example to use averaged weights.

        Raises:
            RuntimeError: on every rank, if any failed.
        """
        rows: dict[int, ConditionRow] = {}
        clips: list[Clip] = []
        with weights or contextlib.nullcontext():
            for number, positions in enumerate(self._own_batches()):
                self._measure(number, positions, rows, clips)
        return self._summary(rows, clips)

    def floor(self) -> dict[str, float]:
        """Return `eval_floor/` name -> what the gold estimator finds on perfect videos (collective call).

        Those are the codec's reconstructions of the true target videos: the estimator's own error, with the codec's.
        Empty without a gold estimator or true videos.

        Raises:
            RuntimeError: on every rank, if any failed.
        """
        if self.gold is None:
            return {}
        rows: dict[int, ConditionRow] = {}
        for number, positions in enumerate(self._own_batches()):
            own = positions[self.world.dealt_rows(number, len(positions))]
            with self.world.sync_errors("measuring the floor"):
                found = {position: self.dataset.condition(self.indices[position]) for position in own}
                found = {position: one for position, one in found.items() if one.target_video is not None}
                conditions = list(found.values())
                if conditions:
                    videos = decode(self.policy, conditions, self.policy.encode_targets(conditions))
                    columns = _columns(self.gold.name, self.gold(videos, conditions), prefix="")
                    rows |= _rows(list(found), conditions, columns)
        values = [row["values"] for row in self._gather(rows)]
        return {f"eval_floor/{name}": value for name, value in (_means(values) | _validity(values)).items()}

    def _own_batches(self) -> list[list[int]]:
        """Return this rank's batches of positions in `indices`, one video size each, equally many on every rank."""
        sizes = [self.dataset.size_of(index) for index in self.indices]
        costs = [math.prod(size) for size in sizes]
        rows = min(self.settings.batch_size, math.ceil(len(costs) / self.world.data.size))
        return list(
            DynamicBatchSampler(
                self.indices,
                rows * max(costs),
                shuffle=False,
                num_replicas=self.world.data.size,
                rank=self.world.data.rank,
                cost=costs.__getitem__,
                structure=sizes.__getitem__,
            )
        )

    def clips(
        self,
        positions: Sequence[int],
        rows: Sequence[ConditionRow],
        before: Sequence[ConditionRow],
        weights: AbstractContextManager[Any] | None = None,
    ) -> list[Clip]:
        """Sample some conditions once more, one by one, and return their clips on rank 0 (collective call).

        Beside each is what the starting policy makes of it, where the policy can still be that.

        Args:
            positions: places in `rows`.
            rows: rows of an evaluation with the same weights, for the captions.
            before: rows of the evaluation before training, likewise.
            weights: context entered while sampling.

        Raises:
            RuntimeError: on every rank, if any failed.
        """
        if not positions:
            return []
        earlier = earlier_values(before, rows)
        with weights or contextlib.nullcontext():
            made = [self._sample([position]) for position in positions]
        started = [self._as_it_started(position) for position in positions]
        found: list[Clip] = []
        with self.world.sync_errors("evaluation"):
            for position, (conditions, latents), base in zip(positions, made, started, strict=True):
                if self.world.is_main:
                    video = decode(self.policy, conditions, latents)
                    started_as = None if base is None else decode(self.policy, conditions, base)[0]
                    values, located = rows[position]["values"], self._located(video, conditions)
                    clip = self._clip(conditions[0], video[0], values, located, started_as)
                    found.append(dataclasses.replace(clip, before=earlier[position] or {}))
        return found

    def _as_it_started(self, position: int) -> Tensor | None:
        """Return latents from the starting policy, None where there is no copy of it (collective call)."""
        if not self.settings.has_reference:
            return None
        with self.policy.reference():
            return self._sample([position])[1]

    def _measure(self, number: int, positions: Sequence[int], rows: dict[int, ConditionRow], clips: list[Clip]) -> None:
        """Sample one batch and score it, without the rows that are left to another rank with the same samples."""
        conditions, latents = self._sample(positions)
        with self.world.sync_errors("evaluation"):
            own = self.world.dealt_rows(number, len(positions))
            if conditions[own]:
                self._score(positions[own], conditions[own], latents[own], rows, clips)

    def _sample(self, positions: Sequence[int]) -> tuple[list[Condition], Tensor]:
        """Return conditions and latents; errors are synchronised around the rollout, a collective call under FSDP2."""
        with self.world.sync_errors("evaluation"):
            indices = [self.indices[position] for position in positions]
            conditions = [self.dataset.condition(index, gid=index) for index in indices]
        share_encodings(self.policy, conditions, self.world.all, lambda: self.world.sync_errors("evaluation"))
        with self.world.sync_errors("evaluation"):
            conditioning = self.policy.encode(conditions, self.settings.guidance)
        with self.world.sync_errors("evaluation"):
            deterministic = Sampling(self.settings.sigmas, ODE, seed=key("eval", "noise"))
            samples = rollout(self.policy, conditions, conditioning, [()] * len(conditions), deterministic)
        return conditions, samples.final_latents

    def _score(
        self,
        positions: Sequence[int],
        conditions: Sequence[Condition],
        latents: Tensor,
        rows: dict[int, ConditionRow],
        clips: list[Clip],
    ) -> None:
        videos = decode(self.policy, conditions, latents)
        rewards = self.rewards(videos, conditions)
        columns: dict[str, Tensor] = {}
        for name, result in rewards.items():
            columns |= _columns(name, result, prefix=f"{name}_")
        if self.gold is not None:
            columns |= _columns(self.gold.name, self.gold(videos, conditions), prefix="")
        made = _rows(positions, conditions, columns)
        rows |= made
        if self.world.is_main:
            shown = positions[: self.settings.videos - len(clips)]
            located = self._located(videos[: len(shown)], conditions[: len(shown)])
            for row, position in enumerate(shown):
                clips.append(self._clip(conditions[row], videos[row], made[position]["values"], located[row : row + 1]))

    def _clip(
        self,
        condition: Condition,
        video: Tensor,
        values: Mapping[str, float],
        located: Tensor,
        base: Tensor | None = None,
    ) -> Clip:
        """Return the clip of a video (3, T, h, w) with what was measured on it; `located` is (1, T, 4, 4) or empty."""
        rewards = {name: values[name] for name in self.rewards.weights}
        errors = {name: values[name] for name in POSE_ERRORS if name in values}
        estimated = located[0] if len(located) else None
        return make_clip(condition, video, rewards, base=base, errors=errors, estimated=estimated)

    def _located(self, videos: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """Return (B, T, 4, 4) where the gold estimator saw the cameras of B videos; empty where it cannot say."""
        if not isinstance(self.gold, Locator) or not len(videos):
            return torch.empty(0)
        return self.gold.locate(videos, conditions)

    def _summary(self, rows: dict[int, ConditionRow], clips: list[Clip]) -> Evaluation:
        """Gather all ranks' rows and average; identical on every rank."""
        ordered = self._gather(rows)
        values = [row["values"] for row in ordered]
        metrics = _means(values) | _validity(values)
        by_preset: dict[str, list[dict[str, float]]] = {}
        for row in ordered:
            by_preset.setdefault(row["preset"], []).append(row["values"])
        presets: list[dict[str, Any]] = [
            {"preset": preset, "count": len(own)} | _means(own) for preset, own in sorted(by_preset.items()) if preset
        ]
        by_camera = means_by_camera(ordered)
        return Evaluation(
            {f"eval/{name}": value for name, value in metrics.items()}, by_camera, ordered, presets, clips
        )

    def _gather(self, rows: dict[int, ConditionRow]) -> list[ConditionRow]:
        """Return the rows of all ranks, by position in `indices`."""
        texts = self.world.all.gather_text(json.dumps(list(rows.items())))
        by_position: dict[int, ConditionRow] = dict(item for text in texts for item in json.loads(text))
        return [by_position[position] for position in sorted(by_position)]


def _rows(
    positions: Sequence[int], conditions: Sequence[Condition], columns: dict[str, Tensor]
) -> dict[int, ConditionRow]:
    """Return position -> row of B conditions; columns are (B,)."""
    return {
        position: {
            "scene": condition.scene,
            "camera": condition.target_camera,
            "preset": condition.preset or "",
            "values": {name: float(column[row]) for name, column in columns.items()},
        }
        for row, (position, condition) in enumerate(zip(positions, conditions, strict=True))
    }


def means_by_camera(rows: Sequence[ConditionRow]) -> dict[str, float]:
    """Return `eval_by_camera/<camera>/<name>` -> mean or share for every kind of camera, rare kinds pooled."""
    metrics: dict[str, float] = {}
    for kind, its_rows in rows_by_camera(rows).items():
        own = [row["values"] for row in its_rows]
        metrics |= {f"eval_by_camera/{kind}/{name}": value for name, value in (_means(own) | _validity(own)).items()}
    return metrics


def held_out_indices(total: int, count: int) -> list[int]:
    """Return the indices of the `count` of `total` conditions to measure, the same in every run.

    Raises:
        ValueError: more than there are, or none.
    """
    if not 1 <= count <= total:
        raise ValueError(
            f"eval.num_conditions={count} must be within 1..{total}, the held-out conditions there are: lower it or "
            "add scenes to data.eval_split, with eval.split='tune' raise data.tune_scenes"
        )
    order: list[int] = torch.randperm(total, generator=generator("eval", "conditions", total)).tolist()
    return order[:count]


def _columns(name: str, result: RewardResult, prefix: str) -> dict[str, Tensor]:
    """Return a reward and its measurements as (B,) columns, NaN where not valid.

    Args:
        name: name of the reward's own column.
        result: B values and measurements.
        prefix: prefix of the measurements' columns.
    """
    columns = {name: result.values} | {prefix + extra: values for extra, values in result.info.items()}
    return {
        column: values.cpu().double().masked_fill(~result.valid.cpu(), torch.nan) for column, values in columns.items()
    }


def _means(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of every column over the rows that have a value; a column without any is left out."""
    finite = {name: [row[name] for row in rows if math.isfinite(row[name])] for name in (rows[0] if rows else ())}
    return {name: math.fsum(values) / len(values) for name, values in finite.items() if values}


def _validity(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the share of rows that have a value, for every column where some have none."""
    names = rows[0] if rows else ()
    shares = {name: sum(math.isfinite(row[name]) for row in rows) / len(rows) for name in names}
    return {f"{name}_valid": share for name, share in shares.items() if share < 1}
