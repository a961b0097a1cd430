"""From final latents to videos to rewards, while the next batch is sampled or afterwards.

Scoring needs final latents and conditions only. Ranks that share samples deal these among themselves and exchange the
results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import InputError, World

logger = logging.getLogger(__name__)
Made = TypeVar("Made")
Scored: TypeAlias = tuple[dict[str, RewardResult], float]  # reward name -> result, and the seconds that all took


@torch.no_grad()
def decode(policy: Policy, conditions: Sequence[Condition], latents: Tensor) -> Tensor:
    """Return the videos (B, 3, T, h, w) CPU fp32 in [0, 1] of final latents (B, C, F, H, W).

    A batch that the device has no memory for is decoded in halves.

    Raises:
        RuntimeError: there is no memory for a single video.
        InputError: the videos have another size than their conditions ask for.
    """
    return start_decoding(policy, conditions, latents)()


@torch.no_grad()
def start_decoding(
    policy: Policy, conditions: Sequence[Condition], latents: Tensor, *, small: bool = False
) -> Callable[[], Tensor]:
    """Do what `decode` does, but wait for an accelerator only in the call of what is returned.

    With `small` the policy's decoder for rewards does it.
    """
    decoder = policy.decode_for_rewards if small else policy.decode  # type: ignore[attr-defined]
    parts = _decode_in_halves(decoder, latents)
    wanted = (len(conditions), 3, *conditions[0].size)

    def videos() -> Tensor:
        made = [part() for part in parts]
        whole = made[0] if len(made) == 1 else torch.cat(made)
        if tuple(whole.shape) != wanted:
            raise InputError(
                f"decoded videos have shape {tuple(whole.shape)}, the conditions ask for {wanted}: data.num_frames, "
                "data.height and data.width must fit the model's codec"
            )
        return whole

    return videos


def _decode_in_halves(decoder: Callable[[Tensor], Tensor], latents: Tensor) -> list[Callable[[], Tensor]]:
    try:
        return [device_api.to_host(decoder(latents).float())]
    except RuntimeError as error:
        if not device_api.is_out_of_memory(error):
            raise
        if len(latents) == 1:
            raise RuntimeError(
                f"out of memory in decoding one video of latents {tuple(latents.shape[1:])}: {error}; pass "
                "--config.model.vae_tiling=true, or --config.model.offload=true"
            ) from error
    # Outside the except block: until then the error's traceback holds the failed call's tensors.
    device_api.empty_cache(latents.device)
    logger.warning("no memory to decode %d videos at once: decoding them in halves", len(latents))
    return [part for half in latents.chunk(2) for part in _decode_in_halves(decoder, half)]


@dataclasses.dataclass
class ScoringQueue:
    """Decodes and measures the batches of one round, in their order.

    With `overlap` a thread measures a batch while the next one is sampled. The numbers are identical: batches are
    measured one at a time. Without it, all work is done in `rewards`. The CPU decodes in that thread, too, on a core of
    its own if one is free; an accelerator is busy with sampling, and both at once would take the memory of both.
    """

    policy: Policy  # decodes
    reward_set: RewardSet  # measures
    clock: Clock  # counts the seconds spent waiting as "score", and those hidden behind sampling
    world: World  # who takes part; rows that are dealt to another rank with the same samples are left to it
    overlap: bool  # measure while sampling continues
    small: bool = False  # by the policy's decoder for rewards

    def __post_init__(self) -> None:
        self._jobs: list[Callable[[], Future[Scored]]] = []  # of the batches, started by the first call
        self._thread = ThreadPoolExecutor(1, "scoring", torch.set_num_threads, (torch.get_num_threads(),))
        # (b, 3, T, h, w) CPU fp32 videos of this rank's rows of the first batch, which are its first ones on rank 0,
        # once they are decoded; for the log.
        self.first_videos = torch.empty(0)

    def prepare(self, batches: Sequence[Sequence[Condition]]) -> None:
        """Measure what depends on the round's conditions alone while its first batch is sampled, in overlap only."""
        if self.overlap:
            rows = [batch[self.world.dealt_rows(number, len(batch))] for number, batch in enumerate(batches)]
            self._thread.submit(self.reward_set.prepare, [one for batch in rows for one in batch])

    def add(self, conditions: tuple[Condition, ...], latents: Tensor) -> None:
        """Queue final latents (B, C, F, H, W).

        An error is raised by `rewards`, not here: the next rollout may be a collective call, in which the other ranks
        would wait for this one.
        """
        job = functools.cache(functools.partial(self._start, len(self._jobs), conditions, latents))
        self._jobs.append(job)
        if self.overlap:
            job()

    def rewards(self) -> list[dict[str, RewardResult]]:
        """Return reward name -> result of every batch, of this rank's rows; empty where it has none.

        Raises what the first failed batch raised.
        """
        done, begun = [], time.perf_counter()
        for job in self._jobs:
            started = job()
            with self.clock.phase("score"):
                done.append(started.result())
        if self.overlap:
            waited = time.perf_counter() - begun
            self.clock.hidden["score"] += max(0.0, sum(seconds for _, seconds in done) - waited)
        return [results for results, _ in done]

    @contextlib.contextmanager
    def open(self) -> Iterator[ScoringQueue]:
        """Accept batches inside the block; leaving it by an error cancels pending batches."""
        try:
            yield self
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, number: int, conditions: tuple[Condition, ...], latents: Tensor) -> Future[Scored]:
        """Submit a batch for measuring; an accelerator decodes it first, in the sampling thread."""
        rows = self.world.dealt_rows(number, len(conditions))
        conditions, latents = conditions[rows], latents[rows]
        if not conditions:
            return self._thread.submit(lambda: ({}, 0.0))
        decoding = functools.partial(start_decoding, self.policy, conditions, latents, small=self.small)
        if latents.device.type != "cpu":
            with self.clock.phase("score"):
                return self._thread.submit(self._measure, number, conditions, _called(decoding))
        return self._thread.submit(self._measure, number, conditions, decoding)

    def _measure(
        self, number: int, conditions: Sequence[Condition], decoding: Callable[[], Callable[[], Tensor]]
    ) -> Scored:
        """Return the results of rows of a batch and the seconds they took; `decoding` returns who waits for them."""
        begun = time.perf_counter()
        videos = decoding()()
        if number == 0:
            self.first_videos = videos
        with torch.no_grad():  # a thread starts with gradients enabled
            results = self.reward_set(videos, conditions)
        return results, time.perf_counter() - begun


def _called(function: Callable[[], Made]) -> Callable[[], Made]:
    """Call a function now, and return one that gives its result or raises its error."""
    future: Future[Made] = Future()
    try:
        future.set_result(function())
    except Exception as error:  # noqa: BLE001 - raised by `rewards`
        future.set_exception(error)
    return future.result


def share_results(own: Sequence[dict[str, RewardResult]], world: World) -> list[dict[str, RewardResult]]:
    """Exchange results between the ranks that share samples, and return those of all rows.

    Collective call. All of these ranks go on with the same numbers, bit for bit, even of a reward that is not
    deterministic.

    Args:
        own: reward name -> result of this rank's rows of every batch (`World.dealt_rows`), empty where it has none.
        world: who takes part.
    """
    if world.sample.size == 1:
        return list(own)
    texts = world.sample.gather_text(json.dumps(own, default=_as_json))
    of_ranks = [json.loads(text, object_hook=_from_json) for text in texts]
    return [merge_results([part for part in parts if part]) for parts in zip(*of_ranks, strict=True)]


def merge_results(parts: Sequence[dict[str, RewardResult]]) -> dict[str, RewardResult]:
    """Join the same rewards' results of consecutive rows."""
    merged = {}
    for reward in parts[0]:
        results = [part[reward] for part in parts]
        merged[reward] = RewardResult(
            values=torch.cat([result.values for result in results]),
            valid=torch.cat([result.valid for result in results]),
            causes=tuple(cause for result in results for cause in result.causes),
            info={name: torch.cat([result.info[name] for result in results]) for name in results[0].info},
            faulty=torch.cat([result.faults for result in results]),
        )
    return merged


def _as_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    return {"reward result": vars(value)}


def _from_json(entry: dict[str, Any]) -> Any:
    if entry.keys() == {"tensor", "values"}:
        return torch.tensor(entry["values"], dtype=getattr(torch, entry["tensor"]))
    if entry.keys() == {"reward result"}:
        return RewardResult(**entry["reward result"] | {"causes": tuple(entry["reward result"]["causes"])})
    return entry
