"""Dynamic sampling (DAPO, arXiv 2503.14476): sample until enough groups carry a signal.

A group whose rewards are all equal has zero advantage and no gradient. The pool of an epoch is its first round and up
to `max_resample_times` more. All ranks go in lock-step: every decision about the pool is a pure function of gathered
rewards (`selection.py`), so no pattern of rewards can make two ranks disagree. Only samples that change rank are sent
(`sample_pool.py`).
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.compare import Chosen, Gathered
from flow_grpo.algorithm.groups.metrics import group_metrics, weighted_sum
from flow_grpo.algorithm.groups.sample_pool import SamplePool
from flow_grpo.algorithm.groups.selection import Decision, Placement, SampleGroup, decide, groups_of, place
from flow_grpo.records import ScoredBatch
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import DynamicSamplingConfig, RewardConfig

WINDOW = 20  # epochs over which the fallback rate is taken
NAMED = 8  # groups without signal of a round that the log names
TOO_OFTEN = 0.2  # fallback rate above which the log warns

_log = logging.getLogger(__name__)

SampleRound = Callable[[int], tuple[Sequence[ScoredBatch], Gathered]]


@dataclasses.dataclass(frozen=True)
class DynamicSampling:
    """Chooses what an epoch trains on, on one rank; every rank must make the same calls."""

    config: DynamicSamplingConfig
    floors: Mapping[str, float]  # reward name -> range below which a group is flat in it
    k: int
    local: int  # samples of a rank and round
    seed: int
    world: World
    say: Callable[[str], None]  # prints a line of this rank

    @property
    def target(self) -> int:
        """Samples of a round, over all ranks."""
        return self.local * self.world.data.size

    def decide(self, groups: Sequence[Sequence[SampleGroup]]) -> Decision:
        """Return what to do after rounds with these groups."""
        return decide(groups, self.config, target=self.target, k=self.k, seed=self.seed)

    def choose(
        self,
        batches: Sequence[ScoredBatch],
        gathered: Gathered,
        sample_round: SampleRound,
        *,
        reward: RewardConfig,
        shortages: list[int],
    ) -> tuple[Chosen, dict[str, float]]:
        """Return what the epoch trains on, and `dyn/` metrics.

        Args:
            batches: this rank's samples of the epoch's first round.
            gathered: all ranks' rewards of that round.
            sample_round: samples, gathers and checks another round; its argument is the number of the resample, from 1.
            reward: weights, gates and normalisation of the epoch in progress, which decide which groups are flat.
            shortages: one number for each of the last epochs, 1 where the pool fell short; updated in place.

        Raises:
            ShortageError: on every rank, when the pool stays short under the policy "raise".
        """
        begun = time.perf_counter()
        with self.world.sync_errors("choosing"):
            chosen = compare.everything(batches, gathered, self.world)
            groups = [self.groups(chosen, 0, reward)]
            pool = SamplePool(self.world)
            pool.add(chosen, {row for group in groups[0] for row in group.rows})
        self._main(f"Initial batch: collected {self._progress(self.decide(groups))} valid samples globally")
        if why := self._why(gathered, groups[0], reward):
            self._main(why)
        decision = self._fill(pool, groups, sample_round, reward)
        moves = {"dyn/moved_samples": 0.0, "dyn/moved_bytes": 0.0}
        if decision.action == "original":
            self._say_fallback(decision, groups)
        else:
            rows, first = ([row for group in some for row in group.rows] for some in (decision.groups, groups[0]))
            placement = place(rows, pool.rank_of, self.world.data.size)
            self._say_use(decision, placement, len(groups) - 1)
            if sorted(rows) != sorted(first):  # not simply the first round
                chosen, moved_bytes = pool.take(placement)
                moved = len(placement.moves) * self.k // len(decision.groups[0].rows)
                moves = {"dyn/moved_samples": float(moved), "dyn/moved_bytes": float(moved_bytes)}
        self._remember(decision, reward, shortages)
        metrics = self._metrics(decision, groups) | moves
        metrics |= {"dyn/fallback_rate": sum(shortages) / len(shortages), "dyn/time": time.perf_counter() - begun}
        metrics |= _mean_reward("before", gathered, reward) | _mean_reward("after", chosen.gathered, reward)
        return chosen, metrics

    def groups(self, whole: Chosen, number: int, reward: RewardConfig) -> tuple[SampleGroup, ...]:
        """Return the groups of a whole round by their signal in the weighted rewards or `dynamic_sampling.metric`."""
        gathered, order = whole.gathered, [*chain(*whole.placement)]
        judged = compare.advantages(gathered, reward, k=self.k, floors=self.floors)
        flat, incomplete = judged.flat, judged.incomplete
        if self.config.metric:
            named = compare.advantages(gathered, reward, k=self.k, floors=self.floors, metric=self.config.metric)
            flat, incomplete = named.flat, incomplete | named.incomplete
        pool_row = {row: number * len(order) + position for position, row in enumerate(order)}
        return groups_of(gathered.gids, gathered.slots, flat=flat, incomplete=incomplete, pool_row=pool_row)

    def _floors(self, reward: RewardConfig) -> dict[str, float]:
        """Return the rewards that groups are judged by, with the range that makes one count."""
        names = [self.config.metric] if self.config.metric else [n for n, w in reward.weights.items() if w]
        return {name: max(self.floors.get(name, 0.0), reward.flat_eps) for name in names}

    def _why(self, gathered: Gathered, groups: Sequence[SampleGroup], reward: RewardConfig) -> str:
        """Return why groups carry no signal, in words; "" where all do."""
        after, said = compare.gated(gathered, reward, self.floors), []
        bad = [group for group in groups if group.kind != "valid"]
        for name, floor in self._floors(reward).items() if bad else ():
            found, valid = gathered.rewards[name], gathered.valid[name]
            found, valid = (after[name].values, after[name].valid) if name in after else (found, valid)
            own = {group: found[(gathered.gids == group.gid) & valid] for group in bad}
            ranges = [float(v.max() - v.min()) for group, v in own.items() if len(v) and group.kind == "flat"]
            lacking = sum(self.k - len(v) for v in own.values())
            said.append(f"{name} ranges over {max(ranges, default=0.0):.3g} at most, more than {floor:.3g} counts")
            said += [f"{lacking} copies have no value"] if lacking else []
        flat = sum(group.kind == "flat" for group in bad)
        counted = f"Why: {flat} of {len(groups)} groups flat, {len(bad) - flat} incomplete: "
        dropped = ", ".join(f"{group.gid}" for group in bad[:NAMED]) + ", ..." * (len(bad) > NAMED)
        return f"{counted}{', '.join(said)}; groups {dropped}" if bad else ""

    def _fill(
        self, pool: SamplePool, groups: list[tuple[SampleGroup, ...]], sample_round: SampleRound, reward: RewardConfig
    ) -> Decision:
        """Sample rounds until the pool is full or no more are allowed; `groups` grows by a row per round."""
        decision = self.decide(groups)
        while decision.action == "more":
            number = len(groups)
            self._main(
                f"Resample #{number}/{self.config.max_resample_times}: global_collected={self._progress(decision)}, "
                f"need {self.target - decision.valid} more"
            )
            self._every("SYNC", f"Fetching new batch for resample #{number}")
            batches, gathered = sample_round(number)
            with self.world.sync_errors("choosing"):
                whole = compare.everything(batches, gathered, self.world)
                groups.append(self.groups(whole, number, reward))
                # Only the first round's flat and incomplete groups may be needed later.
                valid = {row for group in groups[-1] if group.kind == "valid" for row in group.rows}
                pool.add(whole, valid)
            del batches, gathered, whole  # frees the round's videos before the next one is sampled
            decision = self.decide(groups)
            self._every("SYNC", f"After resample #{number}, global_pool={self._progress(decision)}")
        return decision

    def _remember(self, decision: Decision, reward: RewardConfig, shortages: list[int]) -> None:
        """Record whether the pool fell short, and warn once when shortages become too frequent."""
        warned = _too_often(shortages)
        shortages.append(int(decision.valid < self.target))
        del shortages[:-WINDOW]
        if _too_often(shortages) and not warned:
            floors = ", ".join(f"{floor:g} in {name}" for name, floor in self._floors(reward).items())
            self._warn(
                f"⚠️ The pool fell short in {sum(shortages)} of the last {WINDOW} epochs. Look at "
                f"reward/*_group_range_p50 (a group counts when it ranges over more than {floors}), "
                "reward/*_valid (do samples fail?) and the data (conditions all easy or all hopeless?); or raise "
                "sample.k, sample.noise_level or dynamic_sampling.max_resample_times"
            )

    def _metrics(self, decision: Decision, groups: Sequence[Sequence[SampleGroup]]) -> dict[str, float]:
        """Return the `dyn/` metrics of an epoch whose rounds had these groups."""
        kinds = [group.kind for group in groups[0]]
        short = max(0, self.target - decision.valid)
        used, padded = len(decision.groups) * self.k - decision.padded, decision.padded
        if decision.action == "original":
            used = kinds.count("valid") * self.k
            padded = self.target - used
        return group_metrics(len(kinds), kinds.count("flat"), kinds.count("incomplete")) | {
            "dyn/resample_rounds": float(len(groups) - 1),
            "dyn/pool_samples": float(decision.valid),
            "dyn/shortage": float(short),
            "dyn/fallback": float(short > 0),
            "dyn/discarded_valid": float(decision.valid - used),
            "dyn/padded_samples": float(padded),
        }

    def _say_fallback(self, decision: Decision, groups: Sequence[Sequence[SampleGroup]]) -> None:
        self._main(
            f"Insufficient valid samples: {self._progress(decision)} after {len(groups) - 1} resample(s). "
            "Falling back to original batch."
        )
        self._say_shortage(decision)
        invalid = sum(group.kind != "valid" for group in groups[0])
        self._main(f"Fallback: Using original batch with {invalid} invalid groups")

    def _say_use(self, decision: Decision, placement: Placement, resamples: int) -> None:
        if decision.valid < self.target:
            self._say_shortage(decision)
        copies = self.k // len(decision.groups[0].rows)  # in a row
        counts = [copies * len(rows) for rows in placement.rows]
        start, end = sum(counts[: self.world.data.rank]), sum(counts[: self.world.data.rank + 1])
        self._every("FINAL", f"Slicing global pool [{start}:{end}], got {end - start} samples")
        held = f"{counts[0]} valid samples ({counts[0] / self.k:g} groups) from global pool"
        if decision.padded:
            held = f"{counts[0]} samples, {decision.padded} of all {sum(counts)} by policy {self.config.policy},"
        self._main(f"Rank 0: ✅ Using {held} after {resamples} resample(s)")

    def _say_shortage(self, decision: Decision) -> None:
        self._warn(f"⚠️ Shortage: {self.target - decision.valid}/{self.target} samples missing")

    def _progress(self, decision: Decision) -> str:
        return f"{min(decision.valid, self.target)}/{self.target}"

    def _main(self, text: str) -> None:
        if self.world.is_main:
            self.say(f"[DynSample] {text}")

    def _warn(self, text: str) -> None:
        if self.world.is_main:
            _log.warning("[DynSample] %s", text)

    def _every(self, what: str, text: str) -> None:
        self.say(f"[DynSample-{what}] Rank {self.world.data.rank}: {text}")


def _mean_reward(name: str, gathered: Gathered, reward: RewardConfig) -> dict[str, float]:
    total, valid = weighted_sum(gathered, reward.weights)
    return {f"dyn/reward_mean_{name}": float(total[valid].mean())} if valid.any() else {}


def _too_often(shortages: Sequence[int]) -> bool:
    return len(shortages) == WINDOW and sum(shortages) > TOO_OFTEN * WINDOW
