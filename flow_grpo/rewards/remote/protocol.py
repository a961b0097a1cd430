"""What trainer and reward servers say to each other: multipart requests of JSON and `.npy` parts, JSON replies.

docs/remote_rewards.md is the protocol in words. Both sides distrust what arrives: nothing is ever unpickled, nothing is
allocated because a header asks for it, and whatever is not exactly as agreed is a `ValueError` of one line.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import numpy as np
import torch
from einops import rearrange
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import Tensor

from flow_grpo.records import Condition

PROTOCOL = 1
FPS = 15.0  # frames per second of MultiCamVideo, for judges of motion
MAX_HEAD = 10_000  # bytes of a part's header or of an array's: no honest one comes near
MAX_TEXT = 300  # characters of a cause that come from the other side

Pixels: TypeAlias = NDArray[np.uint8]

TEXTS = ("prompt", "scene", "source_camera", "target_camera")
IDS = ("index", "gid", "slot")
# Poses are float64 here and there; JSON keeps every digit of them.
TENSORS: Mapping[str, torch.dtype] = {
    "target_poses": torch.float64,
    "source_poses": torch.float64,
    "reference_pose": torch.float64,
    "intrinsics": torch.float32,
}


@dataclasses.dataclass(frozen=True)
class Message:
    """An encoded request.

    Attributes:
        content_type: header that names the boundary.
        chunks: flat bytes to be sent one after the other; pixels are not copied.
    """

    content_type: str
    chunks: tuple[bytes | memoryview, ...]

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)


@dataclasses.dataclass(frozen=True)
class Reply:
    """What a server says of B videos.

    Attributes:
        values: (B,) fp32, NaN where not valid.
        causes: B texts, "" where valid.
        faulty: (B,) bool, not valid because measuring failed, see `RewardResult`.
        identity: the model and its version.
    """

    values: Tensor
    causes: tuple[str, ...]
    faulty: Tensor
    identity: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Health:
    """What a server says of itself.

    Attributes:
        identity: model and version, such as a checksum of its weights.
        rewards: names that it scores.
        needs: which videos beside the samples it wants to see: of "source" and "target".
        max_bytes: of a request.
    """

    identity: tuple[str, str]
    rewards: tuple[str, ...]
    needs: tuple[str, ...]
    max_bytes: int


def one_line(text: object) -> str:
    """Return a text from elsewhere as one short line without control characters: it ends in logs and on consoles."""
    words = " ".join(str(text).split())
    return "".join(letter for letter in words if letter.isprintable())[:MAX_TEXT]


def to_pixels(video: Tensor) -> Pixels:
    """Return uint8 (..., T, h, w, 3) of a video (..., 3, T, h, w) in [0, 1]; a file's colours come out exact."""
    levels = rearrange(video.detach(), "... c t h w -> ... t h w c").mul(255).round()
    pixels: Pixels = levels.to(torch.uint8).contiguous().numpy()
    return pixels


def from_pixels(pixels: Pixels) -> Tensor:
    """Return fp32 (..., 3, T, h, w) in [0, 1], laid out in memory like a video that was read here."""
    return rearrange(torch.from_numpy(pixels), "... t h w c -> ... c t h w").contiguous().float() / 255


# --- requests


def encode(meta: Mapping[str, Any], arrays: Mapping[str, Pixels]) -> Message:
    """Return a request of one JSON part "meta" and one `.npy` part per array, whose pixels it shares.

    Raises:
        ValueError: numbers in `meta` that JSON does not know, such as NaN.
    """
    boundary = uuid.uuid4().hex
    chunks = [_head(boundary, "meta", "application/json"), json.dumps(meta, allow_nan=False).encode()]
    for name, array in arrays.items():
        pixels = np.ascontiguousarray(array, dtype=np.uint8)
        header = io.BytesIO()
        npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(pixels))
        chunks += [_head(boundary, name, "application/x-npy"), header.getvalue(), pixels.data.cast("B")]
    chunks.append(f"\r\n--{boundary}--\r\n".encode())
    chunks[0] = chunks[0][2:]  # a request does not begin with an empty line
    return Message(f"multipart/form-data; boundary={boundary}", tuple(chunks))


def _head(boundary: str, name: str, kind: str) -> bytes | memoryview:
    disposition = f'Content-Disposition: form-data; name="{name}"'
    return f"\r\n--{boundary}\r\n{disposition}\r\nContent-Type: {kind}\r\n\r\n".encode()


def decode(content_type: str, body: bytearray) -> tuple[dict[str, Any], dict[str, Pixels]]:
    """Return the meta part and the arrays of a request; the arrays lie in `body`.

    Raises:
        ValueError: anything but what `encode` writes.
    """
    match = re.fullmatch(r'multipart/form-data; *boundary="?([\w.-]{1,70})"?', content_type, re.ASCII)
    if match is None:
        raise ValueError(f"content type is {one_line(content_type)!r}, must be multipart/form-data with its boundary")
    meta: dict[str, Any] | None = None
    arrays: dict[str, Pixels] = {}
    for name, part in _parts(match[1].encode(), body):
        if name in arrays or (name == "meta" and meta is not None):
            raise ValueError(f"part {one_line(name)!r} comes twice")
        if name == "meta":
            meta = read_object(part, "part 'meta'")
        else:
            arrays[name] = read_npy(part, one_line(name))
    if meta is None:
        raise ValueError("part 'meta' is missing")
    if meta.get("protocol") != PROTOCOL:
        raise ValueError(f"protocol is {one_line(meta.get('protocol'))}, this server speaks {PROTOCOL}")
    return meta, arrays


def _parts(boundary: bytes, body: bytearray) -> Iterator[tuple[str, memoryview]]:
    """Yield name and content of every part, without copies."""
    mark, view = b"--" + boundary, memoryview(body)
    place = len(mark) if body.startswith(mark) else len(body)
    while body[place : place + 2] == b"\r\n":
        head = body.find(b"\r\n\r\n", place, place + MAX_HEAD)
        end = body.find(b"\r\n" + mark, head + 4) if head >= 0 else -1
        name = re.search(rb'content-disposition: *form-data; *name="([^"\r\n]+)"', body[place:head], re.IGNORECASE)
        if end < 0 or name is None:
            raise ValueError(f"multipart body is damaged at byte {place}")
        yield name[1].decode(errors="replace"), view[head + 4 : end]
        place = end + 2 + len(mark)
    if body[place : place + 2] != b"--":
        raise ValueError(f"multipart body of {len(body)} bytes has no end or does not begin with its boundary")


def read_object(content: bytes | memoryview, what: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ValueError: not JSON, or no object.
    """
    try:
        found = json.loads(bytes(content))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{what} is a JSON {type(found).__name__}, must be an object")
    return found


def read_npy(content: memoryview, what: str) -> Pixels:
    """Return an array that shares memory with a `.npy` file of uint8 in C order; arrays of objects are refused unread.

    Raises:
        ValueError: anything else.
    """
    head = io.BytesIO(content[:MAX_HEAD])
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(head)]
        shape, fortran, dtype = read(head)
    except (ValueError, KeyError, TypeError, SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(f"part {what!r} is no .npy file: {one_line(error)}") from None
    if dtype != np.uint8 or fortran:
        order = "Fortran" if fortran else "C"
        raise ValueError(f"part {what!r} holds {dtype} in {order} order, must be uint8 in C order")
    pixels = content[head.tell() :]
    if min(shape, default=0) < 1 or math.prod(shape) != len(pixels):
        raise ValueError(f"part {what!r} has shape {shape}, but {len(pixels)} bytes")
    return np.frombuffer(pixels, dtype=np.uint8).reshape(shape)


# --- conditions


def describe(condition: Condition) -> dict[str, Any]:
    """Return all of a condition but its videos, in JSON's own types."""
    found = {name: getattr(condition, name) for name in (*IDS, *TEXTS, "preset")}
    tensors = {name: getattr(condition, name) for name in TENSORS}
    return found | {name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()}


def rebuild(sample: object, source: Tensor | None, target: Tensor | None, size: tuple[int, int, int]) -> Condition:
    """Return the condition that `describe` described.

    Args:
        sample: what `describe` returned.
        source: (3, T, h, w), or None when it was not sent; the condition then holds a video without frames, which no
            reward can take for a video.
        target: (3, T, h, w) or None.
        size: frames, rows and columns of the sample.

    Raises:
        ValueError: missing or unfit fields.
    """
    if not isinstance(sample, dict):
        raise ValueError(f"a sample is a JSON {type(sample).__name__}, must be an object")
    kinds: dict[str, type] = {**dict.fromkeys(IDS, int), **dict.fromkeys(TEXTS, str)}
    for name, kind in kinds.items():
        if type(sample.get(name)) is not kind:
            raise ValueError(f"samples' {name} is {one_line(sample.get(name))!r}, must be of type {kind.__name__}")
    scene = PurePosixPath(sample["scene"])
    if scene.is_absolute() or ".." in scene.parts:  # rewards read files of their data folder by it
        raise ValueError(f"samples' scene is {one_line(scene)!r}, must lie below the dataset folder")
    frames, height, width = size
    shapes = {"target_poses": (frames, 4, 4), "source_poses": (frames, 4, 4), "reference_pose": (4, 4)}
    fields: dict[str, Any] = {name: sample[name] for name in kinds}
    fields |= {name: _tensor(sample.get(name), name, shapes.get(name, (4,))) for name in TENSORS}
    if fields["target_poses"] is None:
        raise ValueError("samples' target_poses are missing")
    preset = sample.get("preset")
    return Condition(
        **fields,
        preset=None if preset is None else str(preset),
        source_video=torch.empty(3, 0, height, width) if source is None else source,
        target_video=target,
    )


def _tensor(value: object, name: str, shape: tuple[int, ...]) -> Tensor | None:
    if value is None:
        return None
    try:
        tensor = torch.tensor(value, dtype=TENSORS[name])
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"samples' {name} are no numbers: {one_line(error)}") from None
    if tuple(tensor.shape) != shape:
        raise ValueError(f"samples' {name} have shape {tuple(tensor.shape)}, must be {shape}")
    return tensor


# --- replies


def read_health(body: bytes, name: str) -> Health:
    """Return what a server says of itself.

    Raises:
        ValueError: another protocol, a server that does not score `name`, or an answer of another form.
    """
    said = read_object(body, "health")
    if said.get("protocol") != PROTOCOL:
        raise ValueError(f"server speaks protocol {one_line(said.get('protocol'))}, must be {PROTOCOL}")
    lists = {key: said.get(key) for key in ("rewards", "needs")}
    if not all(isinstance(v, list) and all(isinstance(n, str) for n in v) for v in lists.values()):
        raise ValueError("health must list the texts 'rewards' and 'needs'")
    if type(said.get("max_bytes")) is not int:
        raise ValueError("health must hold the whole number 'max_bytes'")
    if name not in said["rewards"]:
        raise ValueError(f"server scores {one_line(', '.join(said['rewards']))}, not {name}")
    return Health(_identity(said), tuple(said["rewards"]), tuple(said["needs"]), said["max_bytes"])


def _identity(said: Mapping[str, Any]) -> tuple[str, str]:
    model, version = said.get("model"), said.get("version")
    if not isinstance(model, str) or not isinstance(version, str):
        raise ValueError("server names no 'model' and 'version' as texts")
    return one_line(model), one_line(version)


def read_reply(body: bytes, name: str, count: int) -> Reply:
    """Return the score called `name` of `count` videos; a number that is not finite takes its own row along only.

    Raises:
        ValueError: not of the agreed form, so that nothing in it can be believed.
    """
    said = read_object(body, "reply")
    scores, valid = said.get("scores"), _list(said.get("valid"), "valid", count)
    if not isinstance(scores, dict) or name not in scores:
        raise ValueError(f"reply holds no score {name!r}")
    found = _list(scores[name], f"scores.{name}", count)
    # A server that does not say so may have failed: what is not valid then counts as a fault.
    failed = _list(said.get("faulty", [not fine for fine in valid]), "faulty", count)
    for key, rows in (("valid", valid), ("faulty", failed)):
        if not all(type(row) is bool for row in rows):
            raise ValueError(f"reply's {key} must hold true and false only")
    if any(fine and fault for fine, fault in zip(valid, failed, strict=True)):
        raise ValueError("reply calls a sample both valid and faulty")
    if not all(row is None or type(row) in (int, float) for row in found):
        raise ValueError(f"reply's scores.{name} must hold numbers and null only")
    told = _list(said.get("causes", [""] * count), "causes", count)
    values = torch.tensor([_number(row) if fine else math.nan for row, fine in zip(found, valid, strict=True)])
    finite = values.isfinite()
    causes = [
        (one_line(cause) or "server calls it not valid") if not fine else "" if number else f"value is {one_line(row)}"
        for cause, fine, number, row in zip(told, valid, finite.tolist(), found, strict=True)
    ]
    faulty = torch.tensor(failed) | (torch.tensor(valid) & ~finite)
    return Reply(values.masked_fill(~finite, math.nan), tuple(causes), faulty, _identity(said))


def _list(value: object, what: str, count: int) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) != count:
        got = f"{len(value)} entries" if isinstance(value, list) else type(value).__name__
        raise ValueError(f"reply's {what} is {got}, must be a list of {count}")
    return value


def _number(value: float | None) -> float:
    try:
        return math.nan if value is None else float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return math.inf
