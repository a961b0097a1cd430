"""Does the short tail still rank the copies of a group as all steps of the schedule do? Asked a few times in a run.

The first batch of a round holds whole groups. Its copies are finished a second time, by all steps, from the latents
that they had after their stochastic steps, and scored again: the two videos of a copy differ by the tail alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flow_grpo.algorithm.rollout.collector import Collector
from flow_grpo.algorithm.rollout.denoise import tail
from flow_grpo.algorithm.rollout.scoring import decode, share_results
from flow_grpo.maths.certificate import LEAST_CORRELATION, Certificate, certify
from flow_grpo.maths.keys import key
from flow_grpo.records import ScoredBatch
from flow_grpo.settings.checks import trained_rewards

if TYPE_CHECKING:
    from flow_grpo.run.trainer import Trainer

SHARE = 0.008  # of the forwards so far, before it is asked again: with the first time, below 1 % of a run's
KEPT = 48  # groups, the last ones: the weights change


@dataclasses.dataclass
class TailRecord:
    """What a run knows of its short tail; part of its checkpoints."""

    on: str = ""  # fingerprint of what it depends on besides the trained weights
    forwards: float = 0.0  # that asking has taken, over all ranks
    values: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # reward -> (groups, 2, k) fp64

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Keep what `finish_by_all_steps` has found."""
        for name, new in values.items():
            self.values[name] = torch.cat([self.values.get(name, new[:0]), new])[-KEPT:]

    def certificates(self, trainer: Trainer) -> dict[str, Certificate]:
        """Return how far the tail agrees with all steps, by trained reward."""
        names, floors = trained_rewards(trainer.config), trainer.collector.rewards.floors
        return {name: certify(own[:, 0], own[:, 1], floors[name]) for name, own in self.values.items() if name in names}


def begin(trainer: Trainer) -> None:
    """Forget what was found with other settings; leave a tail that was found to rank copies otherwise."""
    on = str(key("tail", str(trainer.collector.sampling), *trainer.collector.rewards.floors))
    if trainer.state.tail.on != on:
        trainer.state.tail = TailRecord(on)
    _leave_if_short(trainer)


def ask_if_due(trainer: Trainer, batch: ScoredBatch) -> None:
    """Ask, in an epoch whose first record is `batch`, and go on with all steps if the tail ranks copies otherwise."""
    record, sampling, world = trainer.state.tail, trainer.collector.sampling, trainer.world
    if sampling.tails is None or not sampling.record:
        return
    if record.forwards > SHARE * trainer.state.forward_equivalents:
        return
    begun, _ = trainer.forwards.since_mark()
    with trainer.clock.epoch.phase("tail_check"):
        record.add(finish_by_all_steps(trainer.collector, batch, trainer.device))
    (spent,) = world.data.all_gather_scalars({"own": trainer.forwards.since_mark()[0] - begun}).values()
    record.forwards += float(spent.sum())
    found = record.certificates(trainer)
    trainer.progress.say(f"correlation of the short tail with all steps inside groups: {in_words(found)}")
    metrics = {f"tail/{name}": own.correlation for name, own in found.items()}
    metrics |= {f"tail/{name}_low": own.low for name, own in found.items()}
    trainer.metrics["system/tail_forward_equivalents"] = float(spent.sum())
    trainer.metrics |= {name: value for name, value in metrics.items() if math.isfinite(value)}
    _leave_if_short(trainer)


def _leave_if_short(trainer: Trainer) -> None:
    short = [name for name, own in trainer.state.tail.certificates(trainer).items() if own.falls_short]
    if short:
        trainer.collector.sampling = dataclasses.replace(trainer.collector.sampling, tails=None)
        trainer.progress.say(
            f"sample.tail_steps={trainer.config.sample.tail_steps} ranks copies otherwise than all steps by "
            f"{', '.join(short)} (correlation below {LEAST_CORRELATION}): the run goes on with all steps, for more "
            "forwards; a longer tail may do, see tools/measure_signal.py --tails"
        )


def in_words(found: Mapping[str, Certificate]) -> str:
    """Return the correlations inside groups with their 5 and 95 % bounds."""
    parts = []
    for name, own in found.items():
        bounds = f"{own.low:.2f} to {own.high:.2f}, " if own.groups > 1 else ""
        parts.append(f"{name} {own.correlation:.2f} ({bounds}groups: {own.groups})")
    return ", ".join(parts)


@torch.no_grad()
def finish_by_all_steps(collector: Collector, batch: ScoredBatch, device: torch.device) -> dict[str, Tensor]:
    """Return reward -> (groups, 2, k) values of a round's first batch: as it was finished, and by all steps.

    NaN where a reward has no value (collective call). `batch` is the first of the round's records.
    """
    policy, world, sample = collector.policy, collector.world, collector.config.sample
    rows, exact = slice(0, sample.train_batch_size), dataclasses.replace(collector.sampling, tails=None)
    conditions, own = batch.conditions[rows], batch.samples.rows(rows).to(device)
    with world.sync_errors("finishing by all steps"):
        recorded = own.trajectory
        latents = tail(policy, recorded.states[:, -1], own.conditioning, recorded.steps[:, -1] + 1, exact)
        dealt = world.dealt_rows(0, len(conditions))
        mine = conditions[dealt]
        scored = collector.rewards(decode(policy, mine, latents[dealt]), mine) if mine else {}
    (again,) = share_results([scored], world)
    order = (world.data.all_gather(own.keys) @ torch.tensor([sample.k, 1, 0])).argsort()
    found = {}
    for name in again:
        pair = [(one.values.cpu().double()[rows], one.valid.cpu()[rows]) for one in (batch.rewards[name], again[name])]
        values = torch.stack([values.masked_fill(~valid, torch.nan) for values, valid in pair], dim=1)
        found[name] = world.data.all_gather(values)[order].unflatten(0, (-1, sample.k)).mT
    return found
