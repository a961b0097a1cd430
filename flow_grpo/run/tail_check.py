"""Does a short or sparse tail still rank the copies of a group as all steps, computed exactly? Asked now and then.

A round's first batch holds whole groups. Its copies are finished a second time, by all steps, from the latents that
they had after their stochastic steps, and scored again: the two videos of a copy differ by the tail alone.
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
from flow_grpo.maths.certificate import FEW_GROUPS, LEAST_CORRELATION, Certificate, certify
from flow_grpo.maths.keys import key
from flow_grpo.records import ScoredBatch
from flow_grpo.settings.checks import trained_rewards
from flow_grpo.settings.schema import Config

if TYPE_CHECKING:
    from flow_grpo.run.trainer import Trainer

SHARE = 0.008  # of the forwards so far, before it is asked again: below 1 % of a long run's
KEPT = 48  # groups, the last ones: the weights change


@dataclasses.dataclass
class TailRecord:
    """What a run knows of its short tail; part of its checkpoints."""

    fingerprint: str = ""  # of what it depends on besides the trained weights
    forwards: float = 0.0  # that asking has taken, over all ranks
    values: dict[str, Tensor] = dataclasses.field(default_factory=dict)  # reward -> (groups, 2, k) fp64

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Keep what `finish_by_all_steps` has found."""
        for name, new in values.items():
            self.values[name] = torch.cat([self.values.get(name, new[:0]), new])[-KEPT:]

    def certificates(self, trainer: Trainer) -> dict[str, Certificate]:
        """Return how far the tail agrees with all steps, by trained reward; what training finds flat is left out."""
        names, floors, flat = trained_rewards(trainer.config), trainer.collector.rewards.floors, trainer.reward.flat_eps
        return {
            name: certify(own[:, 0], own[:, 1], max(floors[name], flat))
            for name, own in self.values.items()
            if name in names
        }


def can_ask(trainer: Trainer) -> bool:
    """Return whether there is a short tail after recorded steps, and batches hold whole groups."""
    collector, sample = trainer.collector, trainer.config.sample
    whole = sample.layout != "contiguous" or sample.train_batch_size % sample.k == 0
    return collector.approximates and collector.sampling.record and whole


def in_knobs(config: Config) -> str:
    """Return the knobs that make the tail cheaper."""
    parts = [f"sample.tail_steps={config.sample.tail_steps}"]
    if config.sample.ode_calls != "exact":
        parts.append(f"sample.ode_calls={config.sample.ode_calls}")
    if config.model.reward_decoder:
        parts.append("model.reward_decoder")
    return " with ".join(parts)


def begin(trainer: Trainer) -> None:
    """Forget what was found with other settings; give up a tail that was found to rank copies otherwise."""
    config, rewards = trainer.config, sorted(trainer.collector.rewards.floors)
    size = config.data.num_frames, config.data.height, config.data.width
    found_with = str(key("tail", str(trainer.collector.sampling), str(config.sample), *size, *rewards))
    if trainer.state.tail.fingerprint != found_with:
        trainer.state.tail = TailRecord(found_with)
    _give_up_if_failing(trainer, trainer.state.tail.certificates(trainer))


def ask_if_due(trainer: Trainer, batch: ScoredBatch) -> None:
    """Ask with the first record of a round, until a few groups were seen and then now and then; obey the answer."""
    record, world = trainer.state.tail, trainer.world
    seen = max(map(len, record.values.values()), default=0)
    if not can_ask(trainer) or (seen >= FEW_GROUPS and record.forwards > SHARE * trainer.state.forward_equivalents):
        return
    begun, _ = trainer.forwards.since_mark()
    with trainer.clock.phase("tail_check"):
        record.add(finish_by_all_steps(trainer.collector, batch, trainer.device))
    (spent,) = world.data.all_gather_scalars({"own": trainer.forwards.since_mark()[0] - begun}).values()
    record.forwards += float(spent.sum())
    found = record.certificates(trainer)
    trainer.progress.say(f"correlation of the short tail with all steps inside groups: {in_words(found)}")
    metrics = {f"tail/{name}": own.correlation for name, own in found.items()}
    metrics |= {f"tail/{name}_low": own.low for name, own in found.items()}
    trainer.metrics["system/tail_forward_equivalents"] = float(spent.sum())
    trainer.metrics |= {name: value for name, value in metrics.items() if math.isfinite(value)}
    _give_up_if_failing(trainer, found)


def _give_up_if_failing(trainer: Trainer, found: Mapping[str, Certificate]) -> None:
    failing = {name: own for name, own in found.items() if own.falls_short}
    if failing:
        trainer.collector.be_exact()
        trainer.progress.say(
            f"{in_knobs(trainer.config)} ranks copies otherwise than all steps, or a reward is not repeatable: "
            f"correlation {in_words(failing)}, below {LEAST_CORRELATION}. The run goes on with all steps, computed "
            "and decoded exactly, for more work. To have a tail again, resume with a longer one: "
            "tools/measure_signal.py --tails"
        )


def in_words(found: Mapping[str, Certificate]) -> str:
    """Return the correlations inside groups with their 5 and 95 % bounds."""
    parts = []
    for name, own in found.items():
        bounds = f"{own.low:.2f} to {own.high:.2f}, " if own.groups > 1 else ""
        figures = f"{own.correlation:.2f} ({bounds}groups: {own.groups})"
        parts.append(f"{name} {figures if own.groups else 'tells no copies apart'}")
    return ", ".join(parts)


@torch.no_grad()
def finish_by_all_steps(collector: Collector, batch: ScoredBatch, device: torch.device) -> dict[str, Tensor]:
    """Return reward -> (groups, 2, k) values of a round's first batch: as it was finished, and by all steps.

    NaN where a reward has no value, or where the tail is all steps, computed exactly (collective call). `batch` is
    the first of the round's records.
    """
    policy, world, sample, sampling = collector.policy, collector.world, collector.config.sample, collector.sampling
    rows = slice(0, sample.train_batch_size)
    conditions, own = batch.conditions[rows], batch.samples.rows(rows)
    with world.sync_errors("finishing by all steps"):
        own = own.to(device)
        recorded = own.trajectory
        starts = recorded.steps[:, -1] + 1
        latents = tail(policy, recorded.states[:, -1], own.conditioning, starts, sampling.exact)
        dealt = world.dealt_rows(0, len(conditions))
        mine = conditions[dealt]
        scored = collector.rewards(decode(policy, mine, latents[dealt]), mine) if mine else {}
    (again,) = share_results([scored], world)
    order = (world.data.all_gather(own.keys) @ torch.tensor([sample.k, 1, 0])).argsort()
    cheaper = torch.full(starts.shape, sampling.sparse or collector.small_decoder)
    if sampling.tails is not None:
        cheaper |= sampling.tails.shape[1] < len(sampling.sigmas) - starts
    found = {}
    for name, second in again.items():
        pair = torch.stack([batch.rewards[name].known[rows], second.known], dim=1)
        pair[~cheaper] = torch.nan
        found[name] = world.data.all_gather(pair)[order].unflatten(0, (-1, sample.k)).mT
    return found
