"""A reward that another process computes, requested over HTTP.

Learned reward models pin their own versions of torch and transformers, so each runs in a process of its own, such as
`tools/reward_server.py`. Every failure ends as samples without a value and with a cause, never as a score. A request is
bounded in time: (retries + 1) x `timeout_s` plus the delays between. Nothing here is a collective call, so one rank may
fail without the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.remote import protocol
from flow_grpo.rewards.remote.http_client import Client, ServiceError

logger = logging.getLogger(__name__)

HEALTH_S = 10.0  # timeout of /health, which a server answers while it scores
MARGIN = 2**20  # bytes of a request that are no pixels: boundaries and the poses of its samples


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Timeouts and retries of a server.

    Attributes:
        timeout_s: seconds of one attempt from connecting to the reply's last byte; set it to twice the slowest.
        delays_s: seconds before each further attempt.
        failures: failed calls in a row that open the circuit breaker.
        cool_down_s: seconds without calls while it is open.
    """

    timeout_s: float = 120.0
    delays_s: tuple[float, ...] = (0.5, 2.0)
    failures: int = 3
    cool_down_s: float = 60.0


class CircuitBreaker:
    """Stops calls after several failures in a row, so that a dead server does not cost every batch its timeouts."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._open_until = -math.inf

    def rest_s(self) -> float:
        """Return seconds until the next call may be made, 0 if now."""
        return max(0.0, self._open_until - time.monotonic())

    def record(self, *, failed: bool) -> bool:
        """Record the outcome of a call; return True if it opens the breaker."""
        # The count survives the cool-down: a failure of the first call afterwards starts the next one.
        self._failures = self._failures + 1 if failed else 0
        if self._failures < self._policy.failures:
            return False
        self._open_until = time.monotonic() + self._policy.cool_down_s
        return True


class RemoteReward:
    """One score of a server: its value, valid where the server says so and the number is finite.

    Args:
        name: of the score on the server; the reward is called "remote:<name>".
        url: http://HOST:PORT, with or without a path prefix before /score and /health.
        policy: timeouts and retries.
    """

    floor = 0.0  # the server's unit is unknown: only `reward.flat_eps` decides
    measures: tuple[str, ...] = ()

    def __init__(self, name: str, url: str, policy: RetryPolicy = RetryPolicy()) -> None:
        self.name = f"remote:{name}"
        self.policy = policy
        self.identity: tuple[str, str] | None = None  # model and version, from the first reply on
        self._score = name
        self._client = Client(url, policy.delays_s)
        self._breaker = CircuitBreaker(policy)
        self._health: protocol.Health | None = None
        self._seconds: list[float] = []  # of the requests since the last `stats`, retries included
        self._failures = 0

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score CPU fp32 videos (B, 3, T, h, w) in [0, 1], sent as 8 bits; a server's failure never raises."""
        inside = ((videos >= 0) & (videos <= 1)).flatten(1).all(1).tolist()  # also false for NaN
        values = torch.full((len(conditions),), torch.nan)
        causes = ["" if fine else "video holds values outside [0, 1], not sent" for fine in inside]
        left = [row for row, fine in enumerate(inside) if fine]
        faulty = torch.tensor(inside)  # rows to send count as failed until there is a reply
        if left and (rest := self._breaker.rest_s()):
            for row in left:
                causes[row] = f"{self.name} not asked: it failed {self.policy.failures} calls, next in {rest:.0f} s"
        elif left:
            try:
                self._score_all(videos, conditions, left, values, causes, faulty)
                self._breaker.record(failed=False)
            except ServiceError as error:
                # After one failed request the rest of the batch is not sent, so that a call stays bounded in time.
                self._health = None  # the next reply may come from another server
                logger.warning("%s %s: %d samples have no value", self.name, error, len(left))
                if self._breaker.record(failed=True):
                    logger.warning("%s gets no calls for %g s", self.name, self.policy.cool_down_s)
                for row in left:
                    causes[row] = f"{self.name} {error}"
        valid = torch.tensor([not cause for cause in causes])
        return RewardResult(values, valid, tuple(causes), faulty=faulty)

    def try_server(self) -> None:
        """Ask the server who it is, before a run depends on it.

        Raises:
            ValueError: it does not answer, or gives no such score.
        """
        try:
            self._check_health()
        except ServiceError as error:
            raise ValueError(
                f"{self.name} {error}; start its server (tools/reward_server.py) or mend reward.remote.{self._score}"
            ) from None

    def stats(self) -> dict[str, float]:
        """Return requests, failures and the 50 % and 95 % quantiles of their seconds since the last call."""
        seconds, failures = sorted(self._seconds), self._failures
        self._seconds, self._failures = [], 0
        stats = {"calls": float(len(seconds)), "failures": float(failures)}
        for name, share in (("p50_s", 0.5), ("p95_s", 0.95)):
            stats[name] = seconds[math.ceil(share * len(seconds)) - 1] if seconds else math.nan
        return stats

    def _score_all(
        self,
        videos: Tensor,
        conditions: Sequence[Condition],
        left: list[int],
        values: Tensor,
        causes: list[str],
        faulty: Tensor,
    ) -> None:
        """Fill `values`, `causes` and `faulty` request by request, removing finished rows from `left`."""
        health = self._check_health()
        size = max(_bytes(videos[row], conditions[row], health) for row in left)
        share = max(1, (health.max_bytes - MARGIN) // size)
        while left:
            rows = left[:share]
            message = self._message(videos[rows], [conditions[row] for row in rows], health)
            with self._timed():
                said = self._client.ask("/score", self.policy.timeout_s, message)
                with _protocol_errors():
                    reply = protocol.read_reply(said, self._score, len(rows))
                self._check_identity(reply.identity)
            values[rows], faulty[rows] = reply.values, reply.faulty
            for row, cause in zip(rows, reply.causes, strict=True):
                causes[row] = cause
            del left[: len(rows)]

    def _message(self, videos: Tensor, conditions: Sequence[Condition], health: protocol.Health) -> protocol.Message:
        """Return the request for videos (b, 3, T, h, w), with the sources and targets that the server needs."""
        arrays = {"videos": protocol.to_pixels(videos)}
        for kind in health.needs:
            for row, video in enumerate(_companion(condition, kind) for condition in conditions):
                if video is not None:
                    arrays[f"{kind}.{row}"] = protocol.to_pixels(video)
        samples = [protocol.describe(condition) for condition in conditions]
        meta = {"protocol": protocol.PROTOCOL, "reward": self._score, "fps": protocol.FPS, "samples": samples}
        try:
            return protocol.encode(meta, arrays)
        except ValueError as error:
            raise ServiceError(f"not asked: JSON cannot hold a condition: {error}") from None

    def _check_health(self) -> protocol.Health:
        """Return the server's description, requested at first use and after failures; check its identity."""
        if self._health is None:
            said = self._client.ask("/health", min(HEALTH_S, self.policy.timeout_s))
            with _protocol_errors():
                health = protocol.read_health(said, self._score)
            self._check_identity(health.identity)
            self._health = health
        return self._health

    def _check_identity(self, identity: tuple[str, str]) -> None:
        """Refuse scores of another model than the first: they are not comparable within a run."""
        if self.identity is None:
            self.identity = identity
            logger.info("%s is %s, version %s", self.name, *identity)
        if identity != self.identity:
            now, first = (" ".join(pair) for pair in (identity, self.identity))
            raise ServiceError(f"is now {now}, the run began with {first}; host that again")

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        except ServiceError:
            self._failures += 1
            raise
        finally:
            self._seconds.append(time.monotonic() - begin)


def _companion(condition: Condition, kind: str) -> Tensor | None:
    return {"source": condition.source_video, "target": condition.target_video}.get(kind)


def _bytes(video: Tensor, condition: Condition, health: protocol.Health) -> int:
    """Return how many bytes of pixels a sample sends."""
    sent = [video, *(_companion(condition, kind) for kind in health.needs)]
    return sum(tensor.numel() for tensor in sent if tensor is not None)


@contextlib.contextmanager
def _protocol_errors() -> Iterator[None]:
    """Turn a reply that breaks the protocol into a ServiceError."""
    try:
        yield
    except ValueError as error:
        raise ServiceError(f"cannot be believed: {error}") from None
