"""Sample until enough groups carry a signal: fresh rounds, drawn and judged by all ranks in lock-step.

A group whose rewards are all alike teaches nothing. The pool of an epoch is its first round and up to
`max_resample_times` more. Every decision about it is a pure function of gathered facts (`group_choice.py`), so no
pattern of rewards can make two ranks disagree, and only samples that change rank travel (`sample_pool.py`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.compare import Chosen, Gathered
from flow_grpo.algorithm.groups.sample_pool import SamplePool
from flow_grpo.algorithm.groups.selection import Decision, Group, Placement, Rules, decide, groups_of, place
from flow_grpo.algorithm.rollout.collector import Collected
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.settings.schema import DynamicSamplingConfig, RewardConfig

WINDOW = 20  # epochs that the fallback rate looks back on
TOO_OFTEN = 0.2  # of them

Draw = Callable[[int], tuple[Collected, Gathered]]


@dataclasses.dataclass
class DynamicSampling:
    """Chooses what an epoch trains on, on one rank; every rank must make the same calls.

    Attributes:
        config: the knobs of `dynamic_sampling`.
        reward: weights, gates and normalisation of the epoch in progress, which say which groups are flat.
        floors: reward name -> range below which a group is flat in it.
        k: group size.
        local: samples of a rank and round.
        seed: of the run.
        ranks: who takes part.
        history: of the last epochs, 1 where the pool fell short; part of a checkpoint.
        say: prints a line of this rank.
    """

    config: DynamicSamplingConfig
    reward: RewardConfig
    floors: Mapping[str, float]
    k: int
    local: int
    seed: int
    ranks: Ranks
    history: list[int]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.target = self.local * self.ranks.world_size
        self.rules = Rules(self.target, self.k, self.config.max_resample_times, self.config.policy, self.seed)

    def choose(self, collected: Collected, gathered: Gathered, draw: Draw) -> tuple[Chosen, dict[str, float]]:
        """Return what the epoch trains on, and `dyn/` metrics.

        Args:
            collected: this rank's samples of the epoch's first round.
            gathered: all ranks' facts of that round.
            draw: samples, gathers and checks another round; its argument is the number of the resample, from 1.

        Raises:
            ShortageError: on every rank, when the pool stays short under the policy "raise".
        """
        begun = time.perf_counter()
        pool = SamplePool(self.local, self.ranks)
        with self.ranks.sync_errors("choosing"):
            groups = [self.groups(gathered, 0)]
            pool.add(collected, gathered, range(self.target))
        decision, resamples = self._fill(pool, groups, draw)
        moves = {"dyn/moved_samples": 0.0, "dyn/moved_bytes": 0.0}
        chosen = compare.everything(collected.batches, gathered, self.ranks)
        if decision.action == "original":
            self._say_fallback(decision, groups[0], resamples)
        else:
            placement = self._place([row for group in decision.groups for row in group.rows])
            self._say_use(decision, placement, resamples)
            if placement != self._place(range(self.target)):  # other samples than just those of the first round
                chosen, moved_bytes = pool.take(placement)
                moves = {"dyn/moved_samples": float(len(placement.moves)), "dyn/moved_bytes": float(moved_bytes)}
        metrics = self._metrics(decision, groups[0], resamples) | moves | {"dyn/time": time.perf_counter() - begun}
        return chosen, metrics | self._mean_reward("before", gathered) | self._mean_reward("after", chosen.gathered)

    def groups(self, gathered: Gathered, number: int) -> tuple[Group, ...]:
        """Return the groups of round `number`, judged by the weighted rewards or by `dynamic_sampling.metric`."""
        judged = compare.advantages(gathered, self.reward, k=self.k, floors=self.floors)
        flat, incomplete = judged.flat, judged.incomplete
        if self.config.metric:
            named = compare.advantages(gathered, self.reward, k=self.k, floors=self.floors, metric=self.config.metric)
            flat, incomplete = named.flat, incomplete | named.incomplete
        return groups_of(
            gathered.gids, gathered.slots, flat=flat, incomplete=incomplete, first_row=number * self.target
        )

    def _fill(self, pool: SamplePool, groups: list[tuple[Group, ...]], draw: Draw) -> tuple[Decision, int]:
        """Draw rounds until there is nothing more to draw for; return the last decision and the number of resamples."""
        decision = decide(groups, self.rules)
        self._main(f"Initial batch: collected {self._progress(decision)} valid samples globally")
        while decision.action == "more":
            number = len(groups)
            self._main(
                f"Resample #{number}/{self.config.max_resample_times}: global_collected={self._progress(decision)}, "
                f"need {self.target - decision.valid} more"
            )
            self._every("SYNC", f"Fetching new batch for resample #{number}")
            collected, gathered = draw(number)
            with self.ranks.sync_errors("choosing"):
                groups.append(self.groups(gathered, number))
                # Only the first round can be asked for its flat and incomplete groups; of the others they are not kept.
                valid = {row for group in groups[-1] if group.kind == "valid" for row in group.rows}
                pool.add(collected, gathered, valid)
            del collected, gathered  # with all its videos, before the next round is drawn
            decision = decide(groups, self.rules)
            self._every("SYNC", f"After resample #{number}, global_pool={self._progress(decision)}")
        return decision, len(groups) - 1

    def _place(self, rows: Sequence[int]) -> Placement:
        return place(rows, per_round=self.target, world_size=self.ranks.world_size)

    def _metrics(self, decision: Decision, first: Sequence[Group], resamples: int) -> dict[str, float]:
        short = max(0, self.target - decision.valid)
        often = self._too_often()
        self.history.append(int(short > 0))
        del self.history[:-WINDOW]
        if self._too_often() and not often:
            self._main(
                f"⚠️ The pool fell short in {sum(self.history)} of the last {WINDOW} epochs. Look at "
                f"reward/*_group_range_p50 (a group counts when it ranges over more than {self._floors()}), "
                "reward/*_valid (do samples fail?) and the data (conditions all easy or all hopeless?); or raise "
                "sample.k, sample.noise_level or dynamic_sampling.max_resample_times"
            )
        kinds = [group.kind for group in first]
        used, padded = len(decision.groups) * self.k - decision.padded, decision.padded
        if decision.action == "original":
            used = kinds.count("valid") * self.k
            padded = self.target - used
        return {
            "dyn/flat_groups": float(kinds.count("flat")),
            "dyn/incomplete_groups": float(kinds.count("incomplete")),
            "dyn/valid_groups_ratio_initial": kinds.count("valid") / len(kinds),
            "dyn/resample_rounds": float(resamples),
            "dyn/pool_samples": float(decision.valid),
            "dyn/shortage": float(short),
            "dyn/fallback": float(short > 0),
            "dyn/fallback_rate": sum(self.history) / len(self.history),
            "dyn/discarded_valid": float(decision.valid - used),
            "dyn/padded_samples": float(padded),
        }

    def _mean_reward(self, name: str, gathered: Gathered) -> dict[str, float]:
        total, valid = compare.weighted_sum(gathered, self.reward.weights)
        return {f"dyn/reward_mean_{name}": float(total[valid].mean())} if valid.any() else {}

    def _floors(self) -> str:
        """Return the floors in force, in words."""
        names = [self.config.metric] if self.config.metric else [n for n, w in self.reward.weights.items() if w]
        return ", ".join(f"{max(self.floors[name], self.reward.flat_eps):g} in {name}" for name in names)

    def _too_often(self) -> bool:
        return len(self.history) == WINDOW and sum(self.history) > TOO_OFTEN * WINDOW

    def _say_fallback(self, decision: Decision, original: Sequence[Group], resamples: int) -> None:
        self._main(
            f"Insufficient valid samples: {self._progress(decision)} after {resamples} resample(s). "
            "Falling back to original batch."
        )
        self._say_shortage(decision)
        invalid = sum(group.kind != "valid" for group in original)
        self._main(f"Fallback: Using original batch with {invalid} invalid groups")

    def _say_use(self, decision: Decision, placement: Placement, resamples: int) -> None:
        if decision.valid < self.target:
            self._say_shortage(decision)
        counts = [len(rows) for rows in placement.rows]
        start, end = sum(counts[: self.ranks.rank]), sum(counts[: self.ranks.rank + 1])
        self._every("FINAL", f"Slicing global pool [{start}:{end}], got {end - start} samples")
        held = f"{counts[0]} valid samples ({counts[0] / self.k:g} groups) from global pool"
        if decision.padded:
            held = f"{counts[0]} samples, {decision.padded} of all {sum(counts)} by policy {self.config.policy},"
        self._main(f"Rank 0: ✅ Using {held} after {resamples} resample(s)")

    def _say_shortage(self, decision: Decision) -> None:
        self._main(f"⚠️ Shortage: {self.target - decision.valid}/{self.target} samples missing")

    def _progress(self, decision: Decision) -> str:
        return f"{min(decision.valid, self.target)}/{self.target}"

    def _main(self, text: str) -> None:
        if self.ranks.is_main:
            self.say(f"[DynSample] {text}")

    def _every(self, what: str, text: str) -> None:
        self.say(f"[DynSample-{what}] Rank {self.ranks.rank}: {text}")
