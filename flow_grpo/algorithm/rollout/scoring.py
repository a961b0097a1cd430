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
from typing import Any

import torch
from torch import Tensor

from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import InputError, World

logger = logging.getLogger(__name__)


@torch.no_grad()
def decode(policy: Policy, conditions: Sequence[Condition], latents: Tensor) -> Tensor:
    """Return the videos (B, 3, T, h, w) CPU fp32 in [0, 1] of final latents (B, C, F, H, W).

    A batch that the device has no memory for is decoded in halves.

    Raises:
        RuntimeError: there is no memory for a single video.
        InputError: the videos have another size than their conditions ask for.
    """
    videos = _decode_in_halves(policy, latents)
    wanted = (len(conditions), 3, *conditions[0].size)
    if tuple(videos.shape) != wanted:
        raise InputError(
            f"decoded videos have shape {tuple(videos.shape)}, the conditions ask for {wanted}: data.num_frames, "
            "data.height and data.width must fit the model's codec"
        )
    return videos


def _decode_in_halves(policy: Policy, latents: Tensor) -> Tensor:
    try:
        return policy.decode(latents).float().cpu()
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
    return torch.cat([_decode_in_halves(policy, half) for half in latents.chunk(2)])


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

    def __post_init__(self) -> None:
        self._batches: list[tuple[tuple[Condition, ...], Tensor]] = []
        self._jobs: list[Future[tuple[dict[str, RewardResult], float]]] = []
        self._thread = ThreadPoolExecutor(1, "scoring", torch.set_num_threads, (torch.get_num_threads(),))
        # (b, 3, T, h, w) CPU fp32 videos of this rank's rows of the first batch, which are its first ones on rank 0,
        # once they are decoded; for the log.
        self.first_videos = torch.empty(0)

    def add(self, conditions: tuple[Condition, ...], latents: Tensor) -> None:
        """Queue final latents (B, C, F, H, W).

        An error is raised by `rewards`, not here: the next rollout may be a collective call, in which the other ranks
        would wait for this one.
        """
        self._batches.append((conditions, latents))
        if self.overlap:
            self._start()

    def rewards(self) -> list[dict[str, RewardResult]]:
        """Return reward name -> result of every batch, of this rank's rows; empty where it has none.

        Raises what the first failed batch raised.
        """
        done, begun = [], time.perf_counter()
        for number in range(len(self._batches)):
            if number == len(self._jobs):
                self._start()
            with self.clock.phase("score"):
                done.append(self._jobs[number].result())
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

    def _start(self) -> None:
        """Submit the next batch for measuring; an accelerator decodes it first, in the sampling thread."""
        number = len(self._jobs)
        conditions, latents = self._batches[number]
        rows = self.world.dealt_rows(number, len(conditions))
        conditions, latents = conditions[rows], latents[rows]
        if not conditions:
            self._jobs.append(self._thread.submit(lambda: ({}, 0.0)))
            return
        decoded: Callable[[], Tensor] = functools.partial(decode, self.policy, conditions, latents)
        if latents.device.type != "cpu":
            with self.clock.phase("score"):
                decoded = _called(decoded)
        self._jobs.append(self._thread.submit(self._measure, number, conditions, decoded))

    def _measure(
        self, number: int, conditions: Sequence[Condition], decoded: Callable[[], Tensor]
    ) -> tuple[dict[str, RewardResult], float]:
        """Return the results of rows of a batch and the seconds they took; `decoded` returns their videos."""
        begun = time.perf_counter()
        videos = decoded()
        if number == 0:
            self.first_videos = videos
        with torch.no_grad():  # a thread starts with gradients enabled
            results = self.reward_set(videos, conditions)
        return results, time.perf_counter() - begun


def _called(function: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Call a function now, and return one that gives its result or raises its error."""
    future: Future[Tensor] = Future()
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
    of_ranks = [json.loads(text) for text in world.sample.gather_text(json.dumps(own, default=_as_json))]
    return [merge_results([_from_json(part) for part in parts if part]) for parts in zip(*of_ranks, strict=True)]


def merge_results(parts: Sequence[dict[str, RewardResult]]) -> dict[str, RewardResult]:
    """Join the same rewards' results of consecutive rows."""
    return {name: _concatenate([part[name] for part in parts]) for name in parts[0]}


def _concatenate(results: Sequence[RewardResult]) -> RewardResult:
    return RewardResult(
        values=torch.cat([result.values for result in results]),
        valid=torch.cat([result.valid for result in results]),
        causes=tuple(cause for result in results for cause in result.causes),
        info={name: torch.cat([result.info[name] for result in results]) for name in results[0].info},
        faulty=torch.cat([result.faults for result in results]),
    )


def _as_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "values": value.tolist()}
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _from_json(results: dict[str, Any]) -> dict[str, RewardResult]:
    def tensor(saved: dict[str, Any] | None) -> Any:
        return None if saved is None else torch.tensor(saved["values"], dtype=getattr(torch, saved["dtype"]))

    return {
        name: RewardResult(
            values=tensor(saved["values"]),
            valid=tensor(saved["valid"]),
            causes=tuple(saved["causes"]),
            info={key: tensor(extra) for key, extra in saved["info"].items()},
            faulty=tensor(saved["faulty"]),
        )
        for name, saved in results.items()
    }
