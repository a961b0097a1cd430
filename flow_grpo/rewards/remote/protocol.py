"""The protocol between trainer and reward servers: safetensors files whose metadata is one JSON text.

docs/remote_rewards.md describes it. `read_health`, `read_request` and `read_reply` open what the other side sent. They
raise whatever a damaged one makes them raise, so each side calls them in one place, which makes a line of it by `why`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import torch
from einops import rearrange
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.frames import frame_numbers

PROTOCOL = 3
TOKEN = "FLOW_GRPO_REWARD_TOKEN"  # read at every use and stored nowhere: what an object holds ends up in logs
STARS = "***"
MAX_TEXT = 300  # longest text kept from the other side, in characters
MOST = 8192  # frames, rows or columns that a server may ask for

IDS = ("index", "gid", "slot")
FIELDS = (*IDS, "prompt", "scene", "source_camera", "target_camera", "preset", "fps")
READ = ("source", "target", "prompt", "camera")  # what a score can be made of beside the video
TENSORS = ("target_poses", "source_poses", "reference_pose", "intrinsics")


@dataclasses.dataclass(frozen=True)
class Health:
    """Description of a server; a request holds what it wants of every sample, see `as_wanted`."""

    needs: tuple[str, ...]  # any of `READ`; of these the videos "source" and "target" are sent only where needed
    max_bytes: int  # size limit of a request
    frames: int | None = None  # most frames of a video
    size: tuple[int, int] | None = None  # rows and columns
    fps: float | None = None  # frames per second
    groups: bool = False  # the copies of a group come in one request


@dataclasses.dataclass(frozen=True)
class Request:
    """A decoded request."""

    rewards: tuple[str, ...]  # names of the scores asked for
    videos: Tensor  # (B, 3, T, h, w) fp32 in [0, 1]
    conditions: tuple[Condition, ...]  # B conditions, with the companion videos that were sent
    key: str  # hash of the content, the same for every score of a model


def token() -> str:
    """Return the token in the environment, or ""."""
    return os.environ.get(TOKEN, "").strip()


def one_line(text: object) -> str:
    """Return a text from the other side as one short printable line, with the token starred."""
    line = "".join(letter for letter in " ".join(str(text).split()) if letter.isprintable())
    return line.replace(token() or STARS, STARS)[:MAX_TEXT]


def why(error: Exception) -> str:
    """Return in one line what is wrong with what the other side sent."""
    return one_line(error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")


def to_pixels(video: Tensor) -> Tensor:
    """Return uint8 (..., T, h, w, 3) of a video (..., 3, T, h, w) in [0, 1]; exact for colours of 8 bits."""
    levels = rearrange(video.detach(), "... c t h w -> ... t h w c").mul(255).round()
    return levels.to(torch.uint8).contiguous()


def from_pixels(pixels: Tensor) -> Tensor:
    """Return a contiguous fp32 video (..., 3, T, h, w) in [0, 1]."""
    if pixels.dtype != torch.uint8:
        raise ValueError(f"pixels are {pixels.dtype}, must be uint8")
    return rearrange(pixels, "... t h w c -> ... c t h w", c=3).contiguous().float() / 255


def encode(meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> bytes:
    """Return a file of contiguous tensors that share no memory, with `meta` and the version as its metadata."""
    content: bytes = save(dict(tensors), {"json": json.dumps({"protocol": PROTOCOL, **meta})})
    return content


def decode(body: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return metadata and tensors of a file; ValueError for another version."""
    if body.startswith(b"--"):  # multipart; of safetensors these bytes would be an impossible length
        _check_version(1)
    tensors = load(body)
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    meta: dict[str, Any] = json.loads(header["__metadata__"]["json"])
    _check_version(meta.get("protocol"))
    return meta, tensors


def _check_version(found: object) -> None:
    if found != PROTOCOL:
        raise ValueError(f"the other side speaks protocol {found}, this one {PROTOCOL}: update the older")


def read_health(content: bytes, name: str) -> tuple[tuple[str, str], Health]:
    """Return identity and description of a server from its /health; ValueError if it gives no score `name`."""
    sent = json.loads(content)
    _check_version(sent.get("protocol"))
    if name not in sent["rewards"]:
        raise ValueError(f"server scores {', '.join(sent['rewards'])}, not {name}")
    needs = tuple(kind for kind in READ if kind in set(sent["needs"]))
    frames, size, fps = (sent.get(field) for field in ("frames", "size", "fps"))
    counts = [1 if frames is None else frames, *((1, 1) if size is None else size)]
    if not (len(counts) == 3 and all(type(count) is int and 0 < count <= MOST for count in counts)):
        text = f"must be a number and a pair of rows and columns within 1..{MOST}, or null"
        raise ValueError(f"server asks for frames {frames!r} of size {size!r}, {text}")
    if fps is not None and not 0 < fps < math.inf:
        raise ValueError(f"server asks for fps {fps!r}, must be above 0, or null")
    groups = bool(sent.get("groups"))
    return _identity(sent), Health(needs, int(sent["max_bytes"]), frames, size and (size[0], size[1]), fps, groups)


def _identity(sent: Mapping[str, Any]) -> tuple[str, str]:
    return one_line(sent["model"]), one_line(sent["version"])


# --- requests


def companions(condition: Condition, needs: Sequence[str]) -> dict[str, Tensor]:
    """Return the "source" and "target" videos of a condition that a server needs and that there are."""
    videos = {kind: getattr(condition, f"{kind}_video", None) for kind in needs}
    return {kind: video for kind, video in videos.items() if video is not None}


def as_wanted(videos: Tensor, conditions: Sequence[Condition], health: Health) -> tuple[Tensor, list[Condition]]:
    """Return videos (B, 3, T, h, w) and their conditions with the frames and of the size that a server asks for.

    Frames are spread evenly from the first to the last: at most `frames`, and as many as play at about `fps` (of the
    sample with the most). Poses are those of the frames; a condition's `fps` is the rate at which these play. Pictures
    are resized as by PIL (bilinear, antialiased), intrinsics in pixels with them.
    """
    if (health.frames, health.size, health.fps) == (None, None, None):
        return videos, list(conditions)
    total, height, width = videos.shape[2:]
    count = min(total, health.frames or total)
    if health.fps is not None:
        rates = (health.fps / condition.fps for condition in conditions)
        count = min(count, max(2, 1 + round((total - 1) * max(rates))))
    rows = frame_numbers(total, count)
    down, across = (1.0, 1.0) if health.size is None else (health.size[0] / height, health.size[1] / width)

    def fitted(video: Tensor) -> Tensor:
        frames = video[:, rows].transpose(0, 1)
        if health.size is not None:
            frames = functional.interpolate(frames, health.size, mode="bilinear", antialias=True)
        return frames.transpose(0, 1)

    sent = []
    for condition in conditions:
        changes: dict[str, Any] = {
            f"{kind}_video": fitted(v) for kind, v in companions(condition, health.needs).items()
        }
        for field in ("target_poses", "source_poses"):
            path = getattr(condition, field)
            changes[field] = None if path is None else path[rows]
        if condition.intrinsics is not None:
            changes["intrinsics"] = condition.intrinsics * torch.tensor([across, down, across, down])
        rate = condition.fps * (count - 1) / (total - 1) if count > 1 else condition.fps
        sent.append(dataclasses.replace(condition, fps=rate, **changes))
    return torch.stack([fitted(video) for video in videos]), sent


def encode_request(name: str, videos: Tensor, conditions: Sequence[Condition], needs: Sequence[str]) -> bytes:
    """Return the request for a score of videos (B, 3, T, h, w), with the companions that the server needs."""
    tensors = {"videos": to_pixels(videos)}
    for row, condition in enumerate(conditions):
        tensors |= {f"{kind}.{row}": to_pixels(video) for kind, video in companions(condition, needs).items()}
        for field in TENSORS:
            if (tensor := getattr(condition, field)) is not None:  # the copies of a group share theirs
                tensors[f"{field}.{row}"] = tensor.clone(memory_format=torch.contiguous_format)
    samples = [{field: getattr(condition, field) for field in FIELDS} for condition in conditions]
    return encode({"rewards": [name], "samples": samples}, tensors)


def read_request(body: bytes) -> Request:
    """Return the content of a request."""
    meta, tensors = decode(body)
    key = hashlib.sha256(encode({**meta, "rewards": []}, tensors)).hexdigest()
    videos, samples = from_pixels(tensors.pop("videos")), meta["samples"]
    if videos.ndim != 5 or len(videos) != len(samples):
        raise ValueError(f"videos have shape {tuple(videos.shape)}, must be 5-dimensional and {len(samples)} samples")
    conditions = []
    for row, sample in enumerate(samples):
        sent = {field: tensors.pop(f"{field}.{row}", None) for field in ("source", "target", *TENSORS)}
        conditions.append(_condition(sample, sent, videos[row]))
    if tensors:
        raise ValueError(f"tensors {', '.join(tensors)} belong to no sample")
    return Request(tuple(meta["rewards"]), videos, tuple(conditions), key)


def _condition(sample: Mapping[str, Any], sent: dict[str, Tensor | None], video: Tensor) -> Condition:
    scene = PurePosixPath(sample["scene"])
    if scene.is_absolute() or ".." in scene.parts:  # rewards open files below their data folder by it
        raise ValueError(f"samples' scene is {str(scene)!r}, must lie below the dataset folder")
    if not 0 < sample["fps"] < math.inf:
        raise ValueError(f"samples' fps is {sample['fps']!r:.60}, must be above 0")
    frames, height, width = video.shape[1:]
    path = (frames, 4, 4)
    shapes = {"target_poses": path, "source_poses": path, "reference_pose": (4, 4), "intrinsics": (4,)}
    fields: dict[str, Any] = {field: sample[field] for field in FIELDS}
    for field, tensor in sent.items():
        if field in ("source", "target"):
            fields[f"{field}_video"] = None if tensor is None else from_pixels(tensor)
        elif tensor is None or tensor.shape == shapes[field]:
            fields[field] = tensor
        else:
            raise ValueError(f"samples' {field} have shape {tuple(tensor.shape)}, must be {shapes[field]}")
    return Condition(**fields, wanted_size=(frames, height, width) if sent["source"] is None else None)


# --- replies


def _rows(conditions: Sequence[Condition]) -> list[list[int]]:
    return [[getattr(condition, name) for name in IDS] for condition in conditions]


def encode_reply(
    identity: tuple[str, str],
    conditions: Sequence[Condition],
    scores: Mapping[str, Tensor],
    causes: Sequence[str],
    faulty: Tensor,
) -> bytes:
    """Return the reply with the (B,) values of every score by its name; the rest is as in `RewardResult`."""
    meta = {"model": identity[0], "version": identity[1], "samples": _rows(conditions)}
    meta |= {"causes": list(causes), "faulty": faulty.tolist()}
    return encode(meta, {f"scores.{name}": values.float().clone() for name, values in scores.items()})


def read_reply(body: bytes, name: str, conditions: Sequence[Condition]) -> tuple[tuple[str, str], RewardResult]:
    """Return the server's identity and the score `name` of the samples asked for; ValueError for those of others."""
    meta, tensors = decode(body)
    if meta["samples"] != _rows(conditions):
        raise ValueError(f"reply is to other samples than were sent: {meta['samples']}")
    values, causes = tensors[f"scores.{name}"].float(), meta["causes"]
    faulty = torch.tensor(meta["faulty"], dtype=torch.bool)
    if not (values.shape == faulty.shape == (len(causes),) == (len(conditions),)):
        raise ValueError(
            f"reply has scores of shape {tuple(values.shape)}, faulty {tuple(faulty.shape)} and {len(causes)} causes, "
            f"must be {len(conditions)} of each"
        )
    causes = [(one_line(cause) or "server calls it not valid") if cause else "" for cause in causes]
    valid = torch.tensor([not cause for cause in causes])
    if (valid & faulty).any():
        raise ValueError("reply calls a sample both valid and faulty")
    return _identity(meta), RewardResult(values, valid, tuple(causes), faulty=faulty)
