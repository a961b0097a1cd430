"""The scoring behind a reward server: decodes requests to conditions, scores them, encodes the results as replies."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import SCENE_FILES, Reward, RewardSet
from flow_grpo.rewards.remote import protocol
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.lru import LruCache

CPU = torch.device("cpu")
NEEDS: Mapping[str, tuple[str, ...]] = {  # companion videos of the rewards that do not look at both
    "target_view": ("target",),
    "target_psnr": ("target",),
    "view_disp": ("target",),
} | dict.fromkeys((*SCENE_FILES, "sharpness"), ())
# What a server may ask for -> the field of a condition that holds it.
FIELDS = {"source": "source_video", "target": "target_video", "prompt": "prompt", "camera": "target_poses"}
REPLIES_KEPT = 64  # for a client that timed out and asks again, or asks for another score of the same model


class Scorer(Protocol):
    """A model that a server hosts."""

    model: str
    version: str  # checksum of its weights, or of its code if it has none
    scores: tuple[str, ...]  # names of those that it gives every video
    needs: tuple[str, ...]  # what it reads beside the video: any of `protocol.READ`
    device: torch.device  # whose memory it takes
    wants: Mapping[str, object]  # of `frames`, `size`, `fps` and `groups` of `protocol.Health`, those it asks for

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> Mapping[str, RewardResult]:
        """Return score name -> result of B rows for fp32 videos (B, 3, T, h, w) in [0, 1]."""
        ...


def checksum(path: Path, pattern: str = "*") -> str:
    """Return a hash of the content of a file, or of the names and contents of a folder's files."""
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(file for file in path.rglob(pattern) if file.is_file())
    for file in files:
        digest.update(f"{file.relative_to(path).as_posix()} {file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while piece := stream.read(2**24):
                digest.update(piece)
    return digest.hexdigest()[:16]


class LocalScorer:
    """A reward of this project as a hosted model."""

    device, wants = CPU, MappingProxyType[str, object]({})

    def __init__(self, reward: Reward) -> None:
        self._reward, self._set = reward, RewardSet([reward], {reward.name: 1.0})
        self.model = reward.name
        # The code of all rewards: a reward's value depends on more files than its own.
        self.version = checksum(Path(rewards.__file__).parent, "*.py")
        self.scores: tuple[str, ...] = (reward.name.rpartition(":")[2],)  # NAME of an own one's FILE.py:NAME
        fields = getattr(reward, "needs", None)
        declared = tuple(kind for kind, field in FIELDS.items() if field in (fields or ()))
        self.needs = declared
        if ":" not in reward.name or fields is None:  # an own one may say all that it reads
            self.needs = tuple(dict.fromkeys((*NEEDS.get(reward.name, ("source", "target")), *declared)))

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> dict[str, RewardResult]:
        return {self.scores[0]: self._set.call(self._reward, videos, conditions)}


class RefusedError(Exception):
    """A request that gets no scores: HTTP status and one line."""

    def __init__(self, status: int, cause: object) -> None:
        super().__init__(protocol.one_line(cause))
        self.status = status


class ScoringService:
    """Decodes requests, scores them and caches the latest replies; only `read` may run concurrently.

    `wants` overrides what the scorer asks for.
    """

    def __init__(self, scorer: Scorer, max_bytes: int, wants: Mapping[str, object] = MappingProxyType({})) -> None:
        self.scorer = scorer
        self.max_bytes = max_bytes
        self.wants = {**scorer.wants, **wants}
        self._replies: LruCache[str, bytes] = LruCache(REPLIES_KEPT)

    def health(self) -> dict[str, Any]:
        """Return what `GET /health` answers; `peak_gib` is the most memory since the start of process and device."""
        scorer = self.scorer
        about = {"protocol": protocol.PROTOCOL, "model": scorer.model, "version": scorer.version}
        about |= {"rewards": scorer.scores, "needs": scorer.needs, "max_bytes": self.max_bytes, **self.wants}
        return about | {"peak_gib": {d.type: device_api.memory(d).get("peak") for d in (CPU, scorer.device)}}

    def read(self, body: bytes) -> protocol.Request:
        """Return the content of a request; RefusedError if it breaks the protocol or asks for other scores."""
        try:
            request = protocol.read_request(body)
            if not set(request.rewards) <= set(self.scorer.scores):
                raise ValueError(
                    f"it asks for {', '.join(request.rewards)}, hosted here: {', '.join(self.scorer.scores)}"
                )
        except Exception as error:
            raise RefusedError(400, f"request cannot be read: {protocol.why(error)}") from error
        return request

    @torch.no_grad()
    def score(self, request: protocol.Request) -> bytes:
        """Return the reply to a request; RefusedError if the model fails."""
        if request.key in self._replies:
            return self._replies[request.key]
        scorer, count = self.scorer, len(request.conditions)
        try:
            results = scorer(request.videos, request.conditions)
            shapes = {tuple(part.shape) for r in results.values() for part in (r.values, r.valid, r.faults)}
            shapes |= {(len(r.causes),) for r in results.values()}
            if set(results) != set(scorer.scores) or shapes != {(count,)}:
                raise ValueError(f"{scorer.model} gave {sorted(results)} of shapes {sorted(shapes)}")
        except Exception as error:
            raise RefusedError(500, f"{type(error).__name__}: {error}") from error
        causes, faulty = _verdicts(results, count)
        scores = {name: result.values for name, result in results.items()}
        reply = protocol.encode_reply((scorer.model, scorer.version), request.conditions, scores, causes, faulty)
        if not faulty.any():  # what failed may succeed when it is asked for again
            self._replies[request.key] = reply
        return reply


def _verdicts(results: Mapping[str, RewardResult], count: int) -> tuple[list[str], Tensor]:
    """Return "causes" and "faulty" of `count` videos; a video that lacks one score has none."""
    causes, faulty = [""] * count, torch.zeros(count, dtype=torch.bool)
    for name, result in results.items():
        finite = result.values.isfinite()
        faulty |= result.faults | (result.valid & ~finite)
        for row in (~(result.valid & finite)).nonzero().flatten().tolist():
            causes[row] = causes[row] or result.causes[row] or f"{name} is {float(result.values[row])}"
    return causes, faulty
