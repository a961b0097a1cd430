"""Held-out evaluation: fixed conditions, fixed noise, deterministic sampling.

Conditions and noise depend neither on the run's seed nor on the world size, so results of different runs and epochs can
be compared sample by sample.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.rollout.scoring import decode
from flow_grpo.algorithm.rollout.shared_encodings import share_encodings
from flow_grpo.data.dynamic_batch import DynamicBatchSampler
from flow_grpo.data.splits import Split
from flow_grpo.judging.table import Table, common_rows
from flow_grpo.maths.keys import generator, key
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, Guidance, RewardResult
from flow_grpo.reporting.clips import Clip, make_clip
from flow_grpo.rewards.base import Reward, RewardSet
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.own_code import is_own
from flow_grpo.settings.sampling import ODE, Sampling
from flow_grpo.settings.schema import Config

FEW = 2**24  # trained weights of which a copy is kept only to show the start in videos, 64 MiB
POSE_ERRORS = ("rot_err_deg", "trans_err_m")  # of the gold estimator, shown below its videos


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation, identical on every rank but for the clips."""

    table: Table  # a row per condition
    clips: list[Clip]  # of the first videos that rank 0 scores; empty elsewhere

    @property
    def metrics(self) -> dict[str, float]:
        """`eval/` name -> mean of the conditions with a value, and their share as `<name>_valid` where below 1."""
        return {f"eval/{name}": value for name, value in (self.table.means() | self.table.shares()).items()}

    @property
    def presets(self) -> list[dict[str, Any]]:
        """Per camera preset a row: "preset", "count" and the means."""
        parts = self.table.split(self.table.presets)
        return [{"preset": preset, "count": len(part.scenes)} | part.means() for preset, part in parts.items()]


@dataclasses.dataclass
class Evaluator:
    """Measures a policy on held-out conditions: row r of every table is the condition `indices[r]` of the data set."""

    policy: Policy
    dataset: Split
    rewards: RewardSet  # measured on every sample
    gold: Reward | None  # an estimator that no reward uses; its metrics have no prefix
    config: Config  # of which `eval` says how to measure
    world: World
    sampling: Sampling | None = None  # how to denoise; by default deterministically, in `eval.num_steps`

    def __post_init__(self) -> None:
        self.indices = held_out_indices(self.dataset, self.config.eval.num_conditions)

    @property
    def scenes(self) -> int:
        """How many scenes the conditions are of."""
        return len({self.dataset.scene_of(index) for index in self.indices})

    @property
    def names(self) -> list[str]:
        """The names of everything that scores, the gold estimator's included."""
        return [*self.rewards.weights, *([] if self.gold is None else [self.gold.name])]

    def floors(self, measured: Mapping[str, float]) -> dict[str, float]:
        """Return `eval/` name -> its floor: those `measured` by `floor`, and the rewards' own."""
        own = {f"eval/{name}": floor for name, floor in self.rewards.floors.items()}
        return own | {name.replace("eval_floor/", "eval/"): value for name, value in measured.items()}

    @property
    def measured_on(self) -> dict[str, str | float]:
        """What a result depends on besides the weights, by knob; only results with equal ones may be compared."""
        config, guidance = self.config, eval_guidance(self.config)
        # Which of them, where there are more.
        some = len(self.indices) < len(self.dataset)
        chosen = f", conditions {key('conditions', *sorted(self.indices))}" if some else ""
        return {
            "eval.split": config.eval.split,
            "eval.num_conditions": config.eval.num_conditions,
            "eval.num_steps": config.eval.num_steps,
            "sample.shift": config.sample.shift,
            "eval.guidance_scale": guidance.scale,
            "eval.negative_prompt": guidance.negative_prompt if guidance.scale > 1 else "",
            "eval.gold": config.eval.gold,
            "data.num_frames, height, width": f"{config.data.num_frames}x{config.data.height}x{config.data.width}",
            "data.buckets": ",".join(config.data.buckets),
            "data.reference": config.data.reference,
            "data.eval_split": f"scenes {self.dataset.fingerprint()}{chosen}",  # or prompts
        }

    def run(self, weights: AbstractContextManager[Any] | None = None) -> Evaluation:
        """Sample and measure every held-out condition (collective call).

        `weights` is a context entered while sampling, for example to use averaged weights.
        """
        parts: list[tuple[list[int], Table]] = []
        clips: list[Clip] = []
        with weights or contextlib.nullcontext():
            for rows, dealt in self._batches():
                conditions, latents = self._sample(rows)
                with self.world.sync_errors("evaluation"):
                    if conditions[dealt]:
                        videos = decode(self.policy, conditions[dealt], latents[dealt])
                        table = self._measure(videos, conditions[dealt])
                        parts.append((rows[dealt], table))
                        shown = self.config.eval.videos - len(clips) if self.world.is_main else 0
                        clips += self._clips(videos[:shown], conditions[dealt][:shown], table)
        return Evaluation(self._gather(parts), clips)

    def floor(self) -> dict[str, float]:
        """Return `eval_floor/` name -> what the gold estimator finds on perfect videos (collective call).

        Those are the codec's reconstructions of the true target videos: the estimator's own error, with the codec's.
        Empty without a gold estimator or true videos.
        """
        if self.gold is None:
            return {}
        parts: list[tuple[list[int], Table]] = []
        for rows, dealt in self._batches():
            with self.world.sync_errors("measuring the floor"):
                loaded = {row: self.dataset.condition(self.indices[row]) for row in rows[dealt]}
                perfect = {row: one for row, one in loaded.items() if one.target_video is not None}
                conditions = list(perfect.values())
                if conditions:
                    videos = decode(self.policy, conditions, self.policy.encode_targets(conditions))
                    columns = _columns(self.gold.name, self.gold(videos, conditions))
                    parts.append((list(perfect), _table(conditions, columns)))
        table = self._gather(parts)
        return {f"eval_floor/{name}": value for name, value in (table.means() | table.shares()).items()}

    def clips(
        self, rows: Sequence[int], before: Table, after: Table, weights: AbstractContextManager[Any] | None = None
    ) -> list[Clip]:
        """Sample some conditions once more, one by one, and return their clips on rank 0 (collective call).

        Beside each is what the starting policy makes of it, where the policy can still be that. `rows` are those of
        `after`, an evaluation with the same weights; captions compare it to `before`, that before training.
        """
        if not rows:
            return []
        then, now = common_rows(before, after)
        row_before, config = dict(zip(now, then, strict=True)), self.config
        with weights or contextlib.nullcontext():
            made = [self._sample([row]) for row in rows]
        base = None
        if keeps_start(config, self.policy):
            with self.policy.reference():
                base = [self._sample([row])[1] for row in rows]
        found: list[Clip] = []
        with self.world.sync_errors("evaluation"):
            for place, row in enumerate(rows if self.world.is_main else ()):
                conditions, latents = made[place]
                started = None if base is None else decode(self.policy, conditions, base[place])[0]
                videos = decode(self.policy, conditions, latents)
                (clip,) = self._clips(videos, conditions, after.take([row]), started)
                known = before.scores(row_before[row]) if row in row_before else {}
                found.append(dataclasses.replace(clip, before=known))
        return found

    def _batches(self) -> list[tuple[list[int], slice]]:
        """Return this rank's batches of rows, of one video size each, with which of them this rank scores.

        Batches are equally many on every rank; a row that fills the last ones up is in several. Of ranks that share
        samples each scores a part.
        """
        sizes = [self.dataset.size_of(index) for index in self.indices]
        costs, ranks = [math.prod(size) for size in sizes], self.world.data
        most = min(self.config.eval.batch_size, math.ceil(len(costs) / ranks.size))
        batches = DynamicBatchSampler(
            self.indices,
            most * max(costs),
            shuffle=False,
            num_replicas=ranks.size,
            rank=ranks.rank,
            cost=costs.__getitem__,
            structure=sizes.__getitem__,
        )
        return [(rows, self.world.dealt_rows(number, len(rows))) for number, rows in enumerate(batches)]

    def _sample(self, rows: Sequence[int]) -> tuple[list[Condition], Tensor]:
        loading = (self.dataset.condition(self.indices[row], gid=self.indices[row]) for row in rows)
        sigmas = flow_sigmas(self.config.eval.num_steps, self.config.sample.shift)
        sampling = self.sampling or Sampling(sigmas, ODE, seed=key("eval", "noise"))
        return sample(self.policy, loading, sampling, self.world, "evaluation", eval_guidance(self.config))

    def _measure(self, videos: Tensor, conditions: Sequence[Condition]) -> Table:
        columns: dict[str, Tensor] = {}
        for name, result in self.rewards(videos, conditions).items():
            columns |= _columns(name, result, prefix=f"{name}_")
        if self.gold is not None:
            columns |= _columns(self.gold.name, self.gold(videos, conditions))
        return _table(conditions, columns)

    def _clips(
        self, videos: Tensor, conditions: Sequence[Condition], table: Table, base: Tensor | None = None
    ) -> list[Clip]:
        """Return the clips of B videos (B, 3, T, h, w) with what was measured on them: the first B rows of `table`."""
        locate = getattr(self.gold, "locate", None)  # where an estimator saw the cameras
        located = locate(videos, conditions) if locate and len(videos) else None
        clips = []
        for row, condition in enumerate(conditions):
            scores = table.scores(row)
            rewards = {name: scores[name] for name in self.rewards.weights}
            errors = {name: scores[name] for name in POSE_ERRORS if name in scores}
            estimated = None if located is None else located[row]
            clips.append(make_clip(condition, videos[row], rewards, base=base, errors=errors, estimated=estimated))
        return clips

    def _gather(self, parts: Sequence[tuple[Sequence[int], Table]]) -> Table:
        """Return the table of which every rank has some rows, by their numbers (collective call)."""
        own = [pair for numbers, table in parts for pair in zip(numbers, table.rows(), strict=True)]
        rows = dict(pair for text in self.world.all.gather_text(json.dumps(own)) for pair in json.loads(text))
        return Table.of_rows([rows[number] for number in sorted(rows)])


def keeps_start(config: Config, policy: Policy) -> bool:
    """Whether a policy can be its start: training asks that, or it is one of ours and LoRA or small."""
    small = config.model.trained == "lora" or sum(weight.numel() for weight in policy.trained_parameters()) <= FEW
    return config.asks_reference or (small and not is_own(config.model.kind))


def sample(
    policy: Policy,
    loading: Iterable[Condition],
    sampling: Sampling,
    world: World,
    phase: str,
    guidance: Guidance | None = None,
) -> tuple[list[Condition], Tensor]:
    """Return conditions, which are loaded as `loading` is iterated, and their final latents (collective call).

    Errors of a rank are raised on all before the rollout, which is a collective call under FSDP2.
    """
    with world.sync_errors(phase):
        conditions = list(loading)
    share_encodings(policy, conditions, world, phase)
    with world.sync_errors(phase):
        conditioning = policy.encode(conditions, guidance)
    with world.sync_errors(phase):
        windows = sampling.windows(condition.gid for condition in conditions)
        return conditions, rollout(policy, conditions, conditioning, windows, sampling).final_latents


def held_out_indices(dataset: Split, count: int) -> list[int]:
    """Return the indices of the `count` conditions of a data set to measure, the same in every run.

    They are of as many scenes as there are, each as often as any other: conditions of one scene tell less.
    """
    total = len(dataset)
    if count > total:
        raise ValueError(
            f"eval.num_conditions={count} must be within 1..{total}, the held-out conditions there are: lower it or "
            "add scenes to data.eval_split; of scenes set aside raise data.report_scenes, with eval.split='tune' "
            "data.tune_scenes"
        )
    order: list[int] = torch.randperm(total, generator=generator("eval", "conditions", total)).tolist()
    of_scene: dict[str, list[int]] = {}
    for index in order:
        of_scene.setdefault(dataset.scene_of(index), []).append(index)
    rounds = itertools.zip_longest(*of_scene.values())
    return [index for one in rounds for index in one if index is not None][:count]


def training_guidance(config: Config) -> Guidance:
    """Return the guidance of the training rollouts."""
    return Guidance(config.sample.guidance_scale, config.sample.negative_prompt)


def eval_guidance(config: Config) -> Guidance:
    """Return the guidance of the held-out evaluation: its own where the recipe gives one, else that of training."""
    training, own = training_guidance(config), config.eval
    return Guidance(
        training.scale if own.guidance_scale is None else own.guidance_scale,
        training.negative_prompt if own.negative_prompt is None else own.negative_prompt,
    )


def _table(conditions: Sequence[Condition], columns: dict[str, Tensor]) -> Table:
    scenes, cameras = (tuple(getattr(one, name) for one in conditions) for name in ("scene", "target_camera"))
    return Table(scenes, cameras, tuple(one.preset or "" for one in conditions), columns)


def _columns(name: str, result: RewardResult, prefix: str = "") -> dict[str, Tensor]:
    """Return a reward and its measurements, whose names get the prefix, as (B,) columns, NaN where not valid."""
    columns = {name: result.values} | {prefix + extra: values for extra, values in result.info.items()}
    return {
        column: values.cpu().double().masked_fill(~result.valid.cpu(), torch.nan) for column, values in columns.items()
    }
