"""The scoring behind a reward server: decodes requests to conditions, scores them, encodes the results as replies."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import Reward
from flow_grpo.rewards.remote import protocol
from flow_grpo.runtime.lru import LruCache

NEEDS: Mapping[str, tuple[str, ...]] = {  # companion videos of the rewards that do not look at both
    "target_view": ("target",),
    "target_psnr": ("target",),
    "view_disp": ("target",),
    "room_pose": (),
    "room_rot": (),
    "room_trans": (),
    "sharpness": (),
}
REPLIES_KEPT = 64  # for a client that timed out and asks again, or asks for another score of the same model


class Judge(Protocol):
    """A model that a server hosts.

    Attributes:
        model: name of the model.
        version: checksum of its weights, or of its code if it has none.
        scores: names of the scores that it gives every video.
        needs: companion videos it looks at: any of "source", "target".
    """

    model: str
    version: str
    scores: tuple[str, ...]
    needs: tuple[str, ...]

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> Mapping[str, RewardResult]:
        """Return score name -> result of B rows for fp32 videos (B, 3, T, h, w) in [0, 1]."""
        ...


def code_version() -> str:
    """Return a checksum of the code of all rewards: a reward's value depends on more files than its own."""
    digest, folder = hashlib.sha256(), Path(rewards.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class LocalJudge:
    """A reward of this project as a hosted model."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self.model = reward.name
        self.version = code_version()
        self.scores: tuple[str, ...] = (reward.name.rpartition(":")[2],)  # NAME of an own one's FILE.py:NAME
        self.needs = NEEDS.get(reward.name, ("source", "target"))

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> dict[str, RewardResult]:
        """Score videos (B, 3, T, h, w)."""
        return {self.scores[0]: self._reward(videos, conditions)}


class RefusedError(Exception):
    """A request that gets no scores: HTTP status and one line."""

    def __init__(self, status: int, cause: object, retry_after_s: int = 0) -> None:
        super().__init__(protocol.one_line(cause))
        self.status = status
        self.retry_after_s = retry_after_s


@dataclasses.dataclass(frozen=True)
class Batch:
    """A decoded request: videos (B, 3, T, h, w), their conditions, and a hash of the request's content."""

    videos: Tensor
    conditions: Sequence[Condition]
    key: str


class ScoringService:
    """Decodes requests, scores them and caches the latest replies; only `read` may run concurrently."""

    def __init__(self, judge: Judge, max_bytes: int) -> None:
        self.judge = judge
        self.max_bytes = max_bytes
        self._replies: LruCache[str, dict[str, Any]] = LruCache(REPLIES_KEPT)

    def health(self) -> dict[str, Any]:
        """Return the server's description, for GET /health."""
        judge = self.judge
        about = {"protocol": protocol.PROTOCOL, "model": judge.model, "version": judge.version}
        return about | {"rewards": judge.scores, "needs": judge.needs, "max_bytes": self.max_bytes}

    def read(self, content_type: str, body: bytearray) -> Batch:
        """Return the content of a request.

        Raises:
            RefusedError: the request breaks the protocol.
        """
        try:
            meta, arrays = protocol.decode(content_type, body)
            if meta.get("reward") not in self.judge.scores:
                known = ", ".join(self.judge.scores)
                raise ValueError(f"reward is {protocol.one_line(meta.get('reward'))!r}, hosted here: {known}")
            return Batch(*_unpack(meta, arrays), _digest(meta, arrays))
        except ValueError as error:
            raise RefusedError(400, error) from None

    def score(self, batch: Batch) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            RefusedError: the model fails.
        """
        if batch.key in self._replies:
            return self._replies[batch.key]
        reply = self._score(batch)
        if not any(reply["faulty"]):  # what failed may succeed when it is asked for again
            self._replies[batch.key] = reply
        return reply

    @torch.no_grad()
    def _score(self, batch: Batch) -> dict[str, Any]:
        judge, count = self.judge, len(batch.conditions)
        try:
            results = judge(batch.videos, batch.conditions)
            shapes = {tuple(part.shape) for r in results.values() for part in (r.values, r.valid, r.faults)}
            shapes |= {(len(r.causes),) for r in results.values()}
            if set(results) != set(judge.scores) or shapes != {(count,)}:
                raise ValueError(f"{judge.model} gave {sorted(results)} of shapes {sorted(shapes)}")
        except Exception as error:
            raise RefusedError(500, f"{type(error).__name__}: {error}") from error
        return _reply(results, count) | {"model": judge.model, "version": judge.version}


def _reply(results: Mapping[str, RewardResult], count: int) -> dict[str, Any]:
    """Return scores, "valid", "causes" and "faulty" of `count` videos; a video that lacks one score has none."""
    causes, faulty, lost = [""] * count, torch.zeros(count, dtype=torch.bool), torch.zeros(count, dtype=torch.bool)
    for name, result in results.items():
        finite = result.values.isfinite()
        faulty |= result.faults | (result.valid & ~finite)
        missing = ~(result.valid & finite)
        for row in missing.nonzero().flatten().tolist():
            causes[row] = causes[row] or result.causes[row] or f"{name} is {float(result.values[row])}"
        lost |= missing
    scores = {
        name: [None if gone else value for value, gone in zip(result.values.tolist(), lost.tolist(), strict=True)]
        for name, result in results.items()
    }
    return {"scores": scores, "valid": (~lost).tolist(), "causes": causes, "faulty": faulty.tolist()}


def _unpack(meta: Mapping[str, Any], arrays: Mapping[str, protocol.Pixels]) -> tuple[Tensor, list[Condition]]:
    """Return fp32 videos (B, 3, T, h, w) in [0, 1] and conditions; ValueError if parts are missing or left over."""
    samples, pixels = meta.get("samples"), arrays.get("videos")
    if pixels is None or pixels.ndim != 5 or pixels.shape[-1] != 3:
        raise ValueError("part 'videos' is missing or not of shape (B, T, h, w, 3)")
    if not isinstance(samples, list) or len(samples) != len(pixels):
        raise ValueError(f"meta must list as many samples as there are videos, {len(pixels)}")
    companions = {name: pixels for name, pixels in arrays.items() if name != "videos"}
    conditions = []
    for row, sample in enumerate(samples):
        source, target = (companions.pop(f"{kind}.{row}", None) for kind in ("source", "target"))
        frames, height, width = pixels.shape[1:4]
        conditions.append(protocol.rebuild(sample, _video(source), _video(target), (frames, height, width)))
    if companions:
        raise ValueError(f"parts {protocol.one_line(sorted(companions))} belong to no sample")
    return protocol.from_pixels(pixels), conditions


def _video(pixels: protocol.Pixels | None) -> Tensor | None:
    if pixels is None:
        return None
    if pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise ValueError(f"a source or target has shape {pixels.shape}, must be (T, h, w, 3)")
    return protocol.from_pixels(pixels)


def _digest(meta: Mapping[str, Any], arrays: Mapping[str, protocol.Pixels]) -> str:
    """Return a hash of a request's content, the same for every score of a model."""
    digest = hashlib.sha256(json.dumps({**meta, "reward": ""}, sort_keys=True).encode())
    for name, pixels in sorted(arrays.items()):
        digest.update(f"{name} {pixels.shape}".encode())
        digest.update(pixels.data.cast("B"))
    return digest.hexdigest()
