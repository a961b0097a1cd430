"""A reward that another process measures, asked over HTTP.

Learned judges pin their own versions of torch and transformers, so each lives in a process of its own, such as
`tools/reward_server.py`. Whatever goes wrong on the way ends as samples without a value and with a cause, never as a
score, and never hangs: one request takes at most (retries + 1) x (5 s to connect + `timeout_s`) and the delays between.
There is no collective in here, so ranks may fail apart from each other.
"""

from __future__ import annotations

import bisect
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
from flow_grpo.rewards.remote.http_client import Caller, ServiceError

logger = logging.getLogger(__name__)

HEALTH_S = 10.0  # a server answers this while it scores
MARGIN = 2**20  # bytes of a request that are no pixels: boundaries and the poses of its samples


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long a reward is waited for.

    Attributes:
        timeout_s: seconds of one attempt from connection to the reply's last byte; twice the slowest measured.
        delays_s: seconds before each further attempt.
        failures: failed calls in a row after which the server is left alone.
        cool_down_s: seconds it is left alone.
    """

    timeout_s: float = 120.0
    delays_s: tuple[float, ...] = (0.5, 2.0)
    failures: int = 3
    cool_down_s: float = 60.0


class Latency:
    """Histogram of seconds: buckets a quarter wider each, so a percentile is known to 25 %, in constant memory."""

    EDGES = tuple(0.001 * 1.25**step for step in range(72))  # 1 ms to 2 h

    def __init__(self) -> None:
        self.counts = [0] * (len(self.EDGES) + 1)
        self.failed = 0
        self.longest = 0.0

    @property
    def count(self) -> int:
        """Return how many were recorded."""
        return sum(self.counts)

    def record(self, seconds: float, *, failed: bool = False) -> None:
        """Count one request, with its repetitions."""
        self.counts[bisect.bisect_left(self.EDGES, seconds)] += 1
        self.failed += failed
        self.longest = max(self.longest, seconds)

    def percentile(self, share: float) -> float:
        """Return seconds within which `share` of the requests ended; NaN without any."""
        seen, wanted = 0, max(1, math.ceil(share * self.count))
        for edge, count in zip((*self.EDGES, math.inf), self.counts, strict=True):
            seen += count
            if seen >= wanted:
                return min(edge, self.longest)
        return math.nan

    def metrics(self) -> dict[str, float]:
        """Return numbers for the tracker."""
        shares = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99}
        found = {name: self.percentile(share) for name, share in shares.items()}
        return found | {"max_s": self.longest, "requests": float(self.count), "failed": float(self.failed)}

    def __str__(self) -> str:
        m = self.metrics()
        times = ", ".join(f"{name[:-2]} {m[name]:.3g} s" for name in ("p50_s", "p90_s", "p99_s", "max_s"))
        return f"{self.count} requests, {self.failed} failed, {times}" if self.count else "no requests"


class Breaker:
    """Leaves a server alone after several failed calls in a row: a dead one must not cost every batch its wait."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._failures = 0
        self._open_until = -math.inf

    def rest_s(self) -> float:
        """Return seconds for which no call is made; at 0 one call may try."""
        return max(0.0, self._open_until - time.monotonic())

    def note(self, *, failed: bool) -> bool:
        """Take note of a call's end; True when the server is left alone from now on."""
        # The count is kept while it rests: the first call afterwards decides alone.
        self._failures = self._failures + 1 if failed else 0
        if self._failures < self._patience.failures:
            return False
        self._open_until = time.monotonic() + self._patience.cool_down_s
        return True


class RemoteReward:
    """One score of a server: value as the server says, valid where it says so and the number is finite.

    Args:
        name: of the score at the server; the reward is called "remote:<name>".
        url: http://HOST:PORT, perhaps with a path before /score and /health.
        patience: timeouts and repetitions.
    """

    floor = 0.0  # in a unit unknown here: `reward.flat_eps` counts
    measures: tuple[str, ...] = ()

    def __init__(self, name: str, url: str, patience: Patience = Patience()) -> None:
        self.name = f"remote:{name}"
        self.latency = Latency()  # of the whole run
        self._recent = Latency()
        self._score = name
        self._caller = Caller(url, patience.delays_s)
        self.patience = patience
        self._breaker = Breaker(patience)
        self._health: protocol.Health | None = None
        self.identity: tuple[str, str] | None = None  # model and version, once known

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score CPU fp32 videos (B, 3, T, h, w) in [0, 1], which travel as 8 bits; a server's failure never raises."""
        inside = ((videos >= 0) & (videos <= 1)).flatten(1).all(1).tolist()  # also false for NaN
        values = torch.full((len(conditions),), torch.nan)
        causes = ["" if fine else "video holds values outside [0, 1], not sent" for fine in inside]
        left = [row for row, fine in enumerate(inside) if fine]
        faulty = torch.tensor(inside)  # what is to be sent, until the server has said what became of it
        if left and (rest := self._breaker.rest_s()):
            for row in left:
                causes[row] = f"{self.name} not asked: it failed {self.patience.failures} calls, next in {rest:.0f} s"
            left = []
        elif left:
            try:
                self._score_all(videos, conditions, left, values, causes, faulty)
                self._breaker.note(failed=False)
            except ServiceError as error:
                # Once one request of a call has failed, the rest of the call is not sent: its time stays bounded.
                self._note_failure(error, left)
                for row in left:
                    causes[row] = f"{self.name} {error}"
        valid = torch.tensor([not cause for cause in causes])
        return RewardResult(values, valid, tuple(causes), faulty=faulty)

    def stats(self) -> dict[str, float]:
        """Return requests and failures since the last call, and within which seconds 50 % and 95 % of them ended."""
        recent, self._recent = self._recent, Latency()
        counts = {"calls": float(recent.count), "failures": float(recent.failed)}
        return counts | {"p50_s": recent.percentile(0.5), "p95_s": recent.percentile(0.95)}

    def _note_failure(self, error: ServiceError, rows: Sequence[int]) -> None:
        self._health = None  # what comes back may be another server
        logger.warning("%s %s: %d samples have no value", self.name, error, len(rows))
        if self._breaker.note(failed=True):
            rest, so_far = self.patience.cool_down_s, self.latency
            logger.warning("%s is left alone for %g s (%s)", self.name, rest, so_far)

    def _score_all(
        self,
        videos: Tensor,
        conditions: Sequence[Condition],
        left: list[int],
        values: Tensor,
        causes: list[str],
        faulty: Tensor,
    ) -> None:
        """Fill in `values`, `causes`, `faulty` request by request, taking the rows that are done from `left`."""
        health = self._greet()
        size = max(_bytes(videos[row], conditions[row], health) for row in left)
        share = max(1, (health.max_bytes - MARGIN) // size)
        while left:
            rows = left[:share]
            request = self._request(videos[rows], [conditions[row] for row in rows], health)
            with self._timed():
                body = self._caller.ask("/score", self.patience.timeout_s, request)
                with _believing():
                    reply = protocol.read_reply(body, self._score, len(rows))
                self._recognise(reply.identity)
            values[rows], faulty[rows] = reply.values, reply.faulty
            for row, cause in zip(rows, reply.causes, strict=True):
                causes[row] = cause
            del left[: len(rows)]

    def _request(self, videos: Tensor, conditions: Sequence[Condition], health: protocol.Health) -> protocol.Message:
        """Return the request for videos (b, 3, T, h, w); sources and targets go along where the server needs them."""
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
            raise ServiceError(f"not asked: a condition holds what JSON does not know: {error}") from None

    def _greet(self) -> protocol.Health:
        """Return what the server says of itself, asked once until something fails."""
        if self._health is None:
            body = self._caller.ask("/health", min(HEALTH_S, self.patience.timeout_s))
            with _believing():
                health = protocol.read_health(body, self._score)
            self._recognise(health.identity)
            self._health = health
        return self._health

    def _recognise(self, identity: tuple[str, str]) -> None:
        """Refuse scores of another model than the first: groups of one run would be judged by two measures."""
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
            self._record(time.monotonic() - begin, failed=True)
            raise
        self._record(time.monotonic() - begin, failed=False)

    def _record(self, seconds: float, *, failed: bool) -> None:
        self.latency.record(seconds, failed=failed)
        self._recent.record(seconds, failed=failed)


def _companion(condition: Condition, kind: str) -> Tensor | None:
    return {"source": condition.source_video, "target": condition.target_video}.get(kind)


def _bytes(video: Tensor, condition: Condition, health: protocol.Health) -> int:
    """Return about how many bytes a sample takes on the way."""
    sent = [video, *(_companion(condition, kind) for kind in health.needs)]
    return sum(tensor.numel() for tensor in sent if tensor is not None)


@contextlib.contextmanager
def _believing() -> Iterator[None]:
    """End the call when what came back is not of the agreed form."""
    try:
        yield
    except ValueError as error:
        raise ServiceError(f"cannot be believed: {error}") from None
