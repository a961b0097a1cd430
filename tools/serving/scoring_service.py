"""What a reward server does between two HTTP messages: requests to conditions, a judge's results to replies."""

from __future__ import annotations

import collections
import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flow_grpo import rewards
from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.base import Reward
from flow_grpo.rewards.remote import protocol

NEEDS: Mapping[str, tuple[str, ...]] = {  # of rewards that look at less than both
    "target_view": ("target",),
    "target_psnr": ("target",),
    "view_disp": ("target",),
    "room_pose": (),
    "sharpness": (),
}
ADMITTED = 4  # requests whose bodies are in memory at a time: one is scored, the others are on their way
REMEMBERED = 64  # replies kept, for a client that gave up waiting and asks again, or asks for a judge's second score


class Judge(Protocol):
    """What a server hosts.

    Attributes:
        model: name of the model.
        version: checksum of its weights, or of its code where there are none.
        scores: names that it gives every video.
        needs: which videos beside the samples it looks at: of "source" and "target".
    """

    model: str
    version: str
    scores: tuple[str, ...]
    needs: tuple[str, ...]

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> Mapping[str, RewardResult]:
        """Return score name -> result of B rows for fp32 videos (B, 3, T, h, w) in [0, 1]."""
        ...


def code_version() -> str:
    """Return a checksum of all rewards' code: a reward's value depends on more files than its own."""
    digest = hashlib.sha256()
    for file in sorted(Path(rewards.__file__).parent.glob("*.py")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


class Local:
    """A reward of this project as a judge."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self.model = reward.name
        self.version = code_version()
        self.scores: tuple[str, ...] = (reward.name,)
        self.needs = NEEDS.get(reward.name, ("source", "target"))

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> dict[str, RewardResult]:
        """Score videos (B, 3, T, h, w)."""
        return {self._reward.name: self._reward(videos, conditions)}


class RefusedError(Exception):
    """A request that gets no scores: status and one line."""

    def __init__(self, status: int, cause: object, retry_after_s: int = 0) -> None:
        super().__init__(protocol.one_line(cause))
        self.status = status
        self.retry_after_s = retry_after_s


class Desk:
    """Takes requests one after the other to a judge and remembers its last answers."""

    def __init__(self, judge: Judge, max_bytes: int, timeout_s: float) -> None:
        self.judge = judge
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.admitted = threading.BoundedSemaphore(ADMITTED)
        self._scoring = threading.Lock()
        self._remembered: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()

    def health(self) -> dict[str, Any]:
        """Return what the server says of itself."""
        judge = self.judge
        about = {"protocol": protocol.PROTOCOL, "model": judge.model, "version": judge.version}
        return about | {"rewards": judge.scores, "needs": judge.needs, "max_bytes": self.max_bytes}

    def score(self, content_type: str, body: bytearray) -> dict[str, Any]:
        """Return the reply to a request.

        Raises:
            RefusedError: the request is not as agreed, the judge fails, or others are still before it.
        """
        try:
            meta, arrays = protocol.decode(content_type, body)
            if meta.get("reward") not in self.judge.scores:
                known = ", ".join(self.judge.scores)
                raise ValueError(f"reward is {protocol.one_line(meta.get('reward'))!r}, hosted here: {known}")
            videos, conditions = _unpack(meta, arrays)
        except ValueError as error:
            raise RefusedError(400, error) from None
        key = _digest(meta, arrays)
        if not self._scoring.acquire(timeout=self.timeout_s):
            raise RefusedError(503, f"busy for more than {self.timeout_s:g} s", retry_after_s=5)
        try:
            if key not in self._remembered:
                self._remembered[key] = self._judged(videos, conditions)
                while len(self._remembered) > REMEMBERED:
                    self._remembered.popitem(last=False)
            return self._remembered[key]
        finally:
            self._scoring.release()

    @torch.no_grad()
    def _judged(self, videos: Tensor, conditions: Sequence[Condition]) -> dict[str, Any]:
        try:
            results = self.judge(videos, conditions)
            shapes = {tuple(part.shape) for r in results.values() for part in (r.values, r.valid, r.faults)}
            shapes |= {(len(r.causes),) for r in results.values()}
            if set(results) != set(self.judge.scores) or shapes != {(len(conditions),)}:
                raise ValueError(f"{self.judge.model} gave {sorted(results)} of shapes {sorted(shapes)}")
        except Exception as error:
            # Whatever it is, it is the judge's failure and no score.
            raise RefusedError(500, f"{type(error).__name__}: {error}") from error
        about = {"model": self.judge.model, "version": self.judge.version}
        return _reply(results, len(conditions)) | about


def _reply(results: Mapping[str, RewardResult], count: int) -> dict[str, Any]:
    """Return scores, "valid", "causes" and "faulty" of `count` videos; without one of its scores a video has none."""
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
    """Return videos (B, 3, T, h, w) and their conditions."""
    samples, pixels = meta.get("samples"), arrays.get("videos")
    if pixels is None or pixels.ndim != 5 or pixels.shape[-1] != 3:
        raise ValueError("part 'videos' is missing or not of shape (B, T, h, w, 3)")
    if not isinstance(samples, list) or len(samples) != len(pixels):
        raise ValueError(f"meta must list as many samples as there are videos, {len(pixels)}")
    videos = protocol.from_pixels(pixels)
    companions = {name: pixels for name, pixels in arrays.items() if name != "videos"}
    conditions = []
    for row, sample in enumerate(samples):
        source, target = (companions.pop(f"{kind}.{row}", None) for kind in ("source", "target"))
        frames, height, width = pixels.shape[1:4]
        conditions.append(protocol.rebuild(sample, _video(source), _video(target), (frames, height, width)))
    if companions:
        raise ValueError(f"parts {protocol.one_line(sorted(companions))} belong to no sample")
    return videos, conditions


def _video(pixels: protocol.Pixels | None) -> Tensor | None:
    if pixels is None:
        return None
    if pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise ValueError(f"a source or target has shape {pixels.shape}, must be (T, h, w, 3)")
    return protocol.from_pixels(pixels)


def _digest(meta: Mapping[str, Any], arrays: Mapping[str, protocol.Pixels]) -> str:
    """Return a name for the content of a request, whichever of a judge's scores it asks for."""
    digest = hashlib.sha256(json.dumps({**meta, "reward": ""}, sort_keys=True).encode())
    for name, pixels in sorted(arrays.items()):
        digest.update(f"{name} {pixels.shape}".encode())
        digest.update(pixels.data.cast("B"))
    return digest.hexdigest()
