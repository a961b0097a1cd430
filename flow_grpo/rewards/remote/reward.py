"""A reward that another process computes, requested over HTTP.

Learned reward models pin their own versions of torch and transformers, so each runs in a process of its own, such as
`tools/reward_server.py`. Every failure ends as samples without a value and with a cause, never as a score. Nothing here
is a collective call, so one rank may fail without the others.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.remote import protocol
from flow_grpo.rewards.remote.http_client import ServiceError, ask

logger = logging.getLogger(__name__)

T = TypeVar("T")

HEALTH_S = 10.0  # timeout of /health, which a server answers while it scores
MARGIN = 2**20  # bytes of a request that are no pixels: the header and the poses of its samples
FAILURES = 3  # failed calls in a row that open the circuit breaker
COOL_DOWN_S = 60.0  # without calls while it is open: a dead server does not cost every batch its timeouts


class RemoteReward:
    """One score of a server: its value, valid where the server says so and the number is finite.

    Args:
        name: name of the score on the server; the reward is called "remote:<name>".
        url: http://HOST:PORT, with or without a path prefix before /score and /health.
        timeout_s: of one attempt without a sign of the server; set it to twice the slowest request.
        delays_s: seconds before each further attempt.
    """

    floor = 0.0  # the server's unit is unknown: only `reward.flat_eps` decides
    measures: tuple[str, ...] = ()

    def __init__(self, name: str, url: str, timeout_s: float = 120.0, delays_s: tuple[float, ...] = (0.5, 2.0)) -> None:
        self.name = f"remote:{name}"
        self.timeout_s, self.delays_s = timeout_s, delays_s
        self.identity: tuple[str, str] | None = None  # model and version, from the first reply on
        self._score = name
        self._url = url.rstrip("/")
        self._failed_calls = 0  # in a row
        self._open_until = -math.inf  # end of the circuit breaker's cool-down
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
        if left and (rest := self._open_until - time.monotonic()) > 0:
            for row in left:
                causes[row] = f"{self.name} not asked: it failed {FAILURES} calls, next in {rest:.0f} s"
        elif left:
            try:
                for rows, result in self._results(videos, conditions, left):
                    values[rows], faulty[rows] = result.values, result.faults
                    for row, cause in zip(rows, result.causes, strict=True):
                        causes[row] = cause
                    left = [row for row in left if row not in rows]
                self._failed_calls = 0
            except ServiceError as error:
                # After one failed request the rest of the batch is not sent, so that a call stays bounded in time.
                self._health = None  # the next reply may come from another server
                logger.warning("%s %s: %d samples have no value", self.name, error, len(left))
                # The count survives the cool-down: a failure of the first call afterwards starts the next one.
                self._failed_calls += 1
                if self._failed_calls >= FAILURES:
                    self._open_until = time.monotonic() + COOL_DOWN_S
                    logger.warning("%s gets no calls for %g s", self.name, COOL_DOWN_S)
                for row in left:
                    causes[row] = f"{self.name} {error}"
        valid = torch.tensor([not cause for cause in causes])
        return RewardResult(values, valid, tuple(causes), faulty=faulty)

    def try_server(self, whole_groups: bool = True) -> None:
        """Ask the server who it is, before a run depends on it; `whole_groups`: each call has all copies of a group.

        Raises:
            ValueError: it does not answer, gives no such score, or compares copies that no call has together.
        """
        try:
            if self._check_health().groups and not whole_groups:
                raise ValueError(
                    f"{self.name} compares the copies of a group, which this run scores apart: pass "
                    "--config.sample.layout=contiguous, --config.train.context_parallel=1 and a "
                    "--config.sample.train_batch_size that is a multiple of sample.k"
                )
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

    def _results(
        self, videos: Tensor, conditions: Sequence[Condition], rows: list[int]
    ) -> Iterator[tuple[list[int], RewardResult]]:
        """Yield rows and their result, request by request: as many rows, or groups, as the server takes at once."""
        health = self._check_health()
        videos, given = protocol.as_wanted(videos[rows], [conditions[row] for row in rows], health)
        companions = [protocol.companions(condition, health.needs).values() for condition in given]
        most = videos[0].numel() + max(sum(video.numel() for video in sent) for sent in companions)  # bytes of a sample
        share = max(1, (health.max_bytes - MARGIN) // most)
        units: dict[int, list[int]] = {}  # places in `rows` that stay together
        for place, condition in enumerate(given):
            units.setdefault(condition.gid if health.groups else place, []).append(place)
        parts: list[list[int]] = [[]]
        for unit in units.values():
            if parts[-1] and len(parts[-1]) + len(unit) > share:
                parts.append([])
            parts[-1] += unit
        for part in parts:
            asked = [given[place] for place in part]
            body = protocol.encode_request(self._score, videos[part], asked, health.needs)
            read = functools.partial(protocol.read_reply, name=self._score, conditions=asked)
            begin = time.monotonic()
            try:
                result = self._ask("/score", self.timeout_s, read, body)
            except ServiceError:
                self._failures += 1
                raise
            finally:
                self._seconds.append(time.monotonic() - begin)
            yield [rows[place] for place in part], result

    def _check_health(self) -> protocol.Health:
        if self._health is None:
            read = functools.partial(protocol.read_health, name=self._score)
            self._health = self._ask("/health", min(HEALTH_S, self.timeout_s), read)
        return self._health

    def _ask(
        self, path: str, timeout_s: float, read: Callable[[bytes], tuple[tuple[str, str], T]], body: bytes | None = None
    ) -> T:
        content = ask(f"{self._url}{path}", timeout_s, body, self.delays_s)
        try:
            identity, answer = read(content)
        except Exception as error:
            raise ServiceError(f"cannot be believed: {protocol.why(error)}") from error
        # Scores of another model are not comparable within a run.
        if self.identity is None:
            self.identity = identity
            logger.info("%s is %s, version %s", self.name, *identity)
        if identity != self.identity:
            now, first = (" ".join(pair) for pair in (identity, self.identity))
            raise ServiceError(f"is now {now}, the run began with {first}; host that again")
        return answer
