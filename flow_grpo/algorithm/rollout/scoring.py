"""Latents -> videos -> rewards; after the rollouts of a round, or beside them.

Scoring needs nothing but final latents and conditions and issues no collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from flow_grpo.algorithm.clock import Clock
from flow_grpo.models.policy import Policy
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime import device as device_door

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Scores:
    """What B final latents are worth.

    Attributes:
        rewards: reward name -> result of B rows.
        videos: (B, 3, T, h, w) CPU fp32 in [0, 1], for logging and metrics.
    """

    rewards: dict[str, RewardResult]
    videos: Tensor


@torch.no_grad()
def decode(policy: Policy, latents: Tensor, *, batch_size: int) -> Tensor:
    """Return videos (B, 3, T, h, w) CPU fp32 of latents (B, C, F, H, W), `batch_size` at a time.

    What the device has no memory for is decoded in halves.

    Raises:
        RuntimeError: it has none for a single video.
    """
    return torch.cat([_decode_in_parts(policy, part) for part in latents.split(batch_size)])


def _decode_in_parts(policy: Policy, latents: Tensor) -> Tensor:
    try:
        return policy.decode(latents).float().cpu()
    except RuntimeError as error:
        if not device_door.is_out_of_memory(error):
            raise
        if len(latents) == 1:
            raise RuntimeError(
                f"out of memory in decoding one video of latents {tuple(latents.shape[1:])}: {error}; pass "
                "--config.model.vae_tiling=true, or --config.model.offload=true"
            ) from error
    # Only here is what the failed call held let go of: the error's traceback refers to it.
    device_door.empty_cache(latents.device)
    logger.warning("no memory to decode %d videos at once: decoding them in halves", len(latents))
    return torch.cat([_decode_in_parts(policy, half) for half in latents.chunk(2)])


def score(
    policy: Policy, conditions: Sequence[Condition], latents: Tensor, rewards: RewardSet, *, batch_size: int
) -> Scores:
    """Decode B final latents (B, C, F, H, W) and measure every reward of the set.

    Raises:
        ValueError: the decoded videos have another size than the source videos.
    """
    videos = decode_fitting(policy, conditions, latents, batch_size=batch_size)
    return Scores(rewards=rewards(videos, conditions), videos=videos)


def decode_fitting(policy: Policy, conditions: Sequence[Condition], latents: Tensor, *, batch_size: int) -> Tensor:
    """Return the videos (B, 3, T, h, w) of B final latents (B, C, F, H, W), of their conditions' size.

    Raises:
        ValueError: they have another size.
    """
    videos = decode(policy, latents, batch_size=batch_size)
    wanted = (len(conditions), *conditions[0].source_video.shape)
    if tuple(videos.shape) != wanted:
        raise ValueError(
            f"decoded videos have shape {tuple(videos.shape)}, the conditions ask for {wanted}: data.num_frames, "
            "data.height and data.width must fit the model's codec"
        )
    return videos


class ScoringQueue:
    """The batches of one round on their way to their scores.

    `beside` measures a batch in a thread while the next one is sampled. It gives the same numbers: videos are decoded
    on the device by the thread that samples, and the batches are measured one after the other, in their order. Without
    it nothing happens before `scores` is asked for.

    Args:
        policy: decodes.
        rewards: measure.
        clock: takes the seconds that nobody could do anything else in as "score", and those hidden.
        beside: measure while sampling goes on.
    """

    def __init__(self, policy: Policy, rewards: RewardSet, clock: Clock, *, beside: bool) -> None:
        self._policy, self._rewards, self._clock, self._beside = policy, rewards, clock, beside
        self._batches: list[tuple[tuple[Condition, ...], Tensor]] = []
        self._jobs: list[Future[tuple[Scores, float]]] = []
        self._thread = ThreadPoolExecutor(1, "scoring", torch.set_num_threads, (torch.get_num_threads(),))

    def add(self, conditions: tuple[Condition, ...], latents: Tensor) -> None:
        """Take final latents (B, C, F, H, W); what goes wrong with them is told by `scores`.

        Not at once, since the rollouts after this one may be exchanges in which the other ranks would wait for us.
        """
        self._batches.append((conditions, latents))
        if self._beside:
            self._start()

    def scores(self) -> list[Scores]:
        """Return the scores of every batch, in order; raises what the first batch that failed raised."""
        done, begun = [], time.perf_counter()
        for number in range(len(self._batches)):
            if number == len(self._jobs):
                self._start()
            with self._clock.phase("score"):
                done.append(self._jobs[number].result())
        if self._beside:
            waited = time.perf_counter() - begun
            self._clock.hidden["score"] += max(0.0, sum(seconds for _, seconds in done) - waited)
        return [scores for scores, _ in done]

    @contextlib.contextmanager
    def open(self) -> Iterator[ScoringQueue]:
        """Inside, batches can be added; on the way out with an error nothing more is measured."""
        try:
            yield self
        finally:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Decode the next batch here and hand it on."""
        conditions, latents = self._batches[len(self._jobs)]
        try:
            with self._clock.phase("score"):
                videos = decode_fitting(self._policy, conditions, latents, batch_size=len(conditions))
        except Exception as error:  # noqa: BLE001 - raised by `scores`
            failed: Future[tuple[Scores, float]] = Future()
            failed.set_exception(error)
            self._jobs.append(failed)
        else:
            self._jobs.append(self._thread.submit(self._measure, videos, conditions))

    def _measure(self, videos: Tensor, conditions: Sequence[Condition]) -> tuple[Scores, float]:
        """Return scores, and the seconds they took."""
        begun = time.perf_counter()
        with torch.no_grad():  # a thread starts with gradients on
            rewards = self._rewards(videos, conditions)
        return Scores(rewards, videos), time.perf_counter() - begun
