"""The protocol between trainer and reward servers: multipart requests of JSON and `.npy` parts, JSON replies.

docs/remote_rewards.md describes it. Neither side trusts its input: nothing is unpickled, no header makes it allocate
memory, and every deviation from the protocol is a `ValueError` of one line.
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
FPS = 15.0  # frames per second of MultiCamVideo, for models that judge motion
MAX_HEAD = 10_000  # bytes of a part's header or of a `.npy` header
MAX_TEXT = 300  # longest text accepted from the peer, in characters; the rest is cut
PIECE = 2**20  # bytes sent at a time

Pixels: TypeAlias = NDArray[np.uint8]

TEXTS = ("prompt", "scene", "source_camera", "target_camera")
IDS = ("index", "gid", "slot")
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
        chunks: flat bytes to send in this order; they share memory with the pixels.
    """

    content_type: str
    chunks: tuple[bytes | memoryview, ...]

    def __len__(self) -> int:
        return sum(len(chunk) for chunk in self.chunks)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes in pieces small enough to be copied by an HTTP library."""
        for chunk in self.chunks:
            for start in range(0, len(chunk), PIECE):
                yield bytes(chunk[start : start + PIECE])


@dataclasses.dataclass(frozen=True)
class Reply:
    """Scores of B videos.

    Attributes:
        values: (B,) fp32, NaN where not valid.
        causes: B texts, "" where valid.
        faulty: (B,) bool, invalid because measuring failed, see `RewardResult`.
        identity: model and version.
    """

    values: Tensor
    causes: tuple[str, ...]
    faulty: Tensor
    identity: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Health:
    """Description of a server.

    Attributes:
        identity: model and version, such as a checksum of its weights.
        rewards: names of its scores.
        needs: videos to send with each sample: any of "source", "target".
        max_bytes: size limit of a request.
    """

    identity: tuple[str, str]
    rewards: tuple[str, ...]
    needs: tuple[str, ...]
    max_bytes: int


def one_line(text: object) -> str:
    """Return a text from the other side as one short line without control characters, for logs and consoles."""
    words = " ".join(str(text).split())
    return "".join(letter for letter in words if letter.isprintable())[:MAX_TEXT]


def to_pixels(video: Tensor) -> Pixels:
    """Return uint8 (..., T, h, w, 3) of a video (..., 3, T, h, w) in [0, 1]; exact for colours of 8 bits."""
    levels = rearrange(video.detach(), "... c t h w -> ... t h w c").mul(255).round()
    pixels: Pixels = levels.to(torch.uint8).contiguous().numpy()
    return pixels


def from_pixels(pixels: Pixels) -> Tensor:
    """Return a contiguous fp32 video (..., 3, T, h, w) in [0, 1]."""
    return rearrange(torch.from_numpy(pixels), "... t h w c -> ... c t h w").contiguous().float() / 255


# --- requests


def encode(meta: Mapping[str, Any], arrays: Mapping[str, Pixels]) -> Message:
    """Return a request of one JSON part "meta" and one `.npy` part per array, which shares the array's memory.

    Raises:
        ValueError: `meta` holds a NaN or an infinity, which JSON lacks.
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
    """Return the meta part and the arrays of a request; the arrays are views of `body`.

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
    """Yield name and content of every part; contents are views of `body`."""
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
    """Return the array of a `.npy` file as a view of its bytes.

    Raises:
        ValueError: anything but uint8 in C order; arrays of objects are refused without unpickling them.
    """
    head = io.BytesIO(content[:MAX_HEAD])
    try:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[npy.read_magic(head)]
        shape, fortran, dtype = read(head)
    except Exception as error:  # numpy's parser of hostile headers raises more than it documents
        raise ValueError(f"part {what!r} is no .npy file: {one_line(error)}") from error
    if dtype != np.uint8 or fortran:
        order = "Fortran" if fortran else "C"
        raise ValueError(f"part {what!r} holds {dtype} in {order} order, must be uint8 in C order")
    pixels = content[head.tell() :]
    if not all(type(size) is int and size > 0 for size in shape) or math.prod(shape) != len(pixels) or len(shape) > 8:
        raise ValueError(f"part {what!r} has shape {one_line(shape)}, but {len(pixels)} bytes")
    return np.frombuffer(pixels, dtype=np.uint8).reshape(shape)


# --- conditions


def describe(condition: Condition) -> dict[str, Any]:
    """Return every field of a condition except its videos, in JSON types; float64 poses keep every digit."""
    found = {name: getattr(condition, name) for name in (*IDS, *TEXTS, "preset")}
    tensors = {name: getattr(condition, name) for name in TENSORS}
    return found | {name: None if tensor is None else tensor.tolist() for name, tensor in tensors.items()}


def rebuild(sample: object, source: Tensor | None, target: Tensor | None, size: tuple[int, int, int]) -> Condition:
    """Return the condition that `describe` was given.

    Args:
        sample: output of `describe`, after JSON.
        source: (3, T, h, w), or None if it was not sent or does not exist: every reward that reads it fails.
        target: (3, T, h, w) or None.
        size: frames, rows and columns of the sample.

    Raises:
        ValueError: a field is missing or has another type, range or shape.
    """
    if not isinstance(sample, dict):
        raise ValueError(f"a sample is a JSON {type(sample).__name__}, must be an object")
    kinds: dict[str, type] = {**dict.fromkeys(IDS, int), **dict.fromkeys(TEXTS, str)}
    for name, kind in kinds.items():
        if type(sample.get(name)) is not kind:
            raise ValueError(f"samples' {name} is {one_line(sample.get(name))!r}, must be of type {kind.__name__}")
        if kind is int and abs(sample[name]) >= 2**63:
            raise ValueError(f"samples' {name} has {len(str(sample[name]))} digits, must fit into 64 bits")
    scene = PurePosixPath(sample["scene"])
    if scene.is_absolute() or ".." in scene.parts:  # rewards open files below their data folder by it
        raise ValueError(f"samples' scene is {one_line(scene)!r}, must lie below the dataset folder")
    frames = size[0]
    shapes = {"target_poses": (frames, 4, 4), "source_poses": (frames, 4, 4), "reference_pose": (4, 4)}
    fields: dict[str, Any] = {name: sample[name] for name in kinds}
    fields |= {name: _tensor(sample.get(name), name, shapes.get(name, (4,))) for name in TENSORS}
    preset = sample.get("preset")
    return Condition(
        **fields,
        preset=None if preset is None else str(preset),
        source_video=source,
        target_video=target,
        wanted_size=size if source is None else None,
    )


def _tensor(value: object, name: str, shape: tuple[int, ...]) -> Tensor | None:
    if value is None:
        return None
    try:
        tensor = torch.tensor(value, dtype=TENSORS[name])
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise ValueError(f"samples' {name} are no numbers: {one_line(error)}") from None
    if tuple(tensor.shape) != shape:
        raise ValueError(f"samples' {name} have shape {tuple(tensor.shape)}, must be {shape}")
    return tensor


# --- replies


def read_health(said: Mapping[str, Any], name: str) -> Health:
    """Return the description of a server from the JSON of its /health.

    Raises:
        ValueError: another protocol version, no score `name`, or missing or unfit fields.
    """
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


def read_reply(said: Mapping[str, Any], name: str, count: int) -> Reply:
    """Return the score `name` of `count` videos from the JSON of /score; a number that is not finite masks its row.

    Raises:
        ValueError: missing or unfit fields, so that no score of the reply can be trusted.
    """
    scores, valid = said.get("scores"), _list(said.get("valid"), "valid", count)
    if not isinstance(scores, dict) or name not in scores:
        raise ValueError(f"reply holds no score {name!r}")
    found = _list(scores[name], f"scores.{name}", count)
    # Without "faulty" every invalid row counts as a failure of the server.
    failed = _list(said.get("faulty", [not fine for fine in valid]), "faulty", count)
    for key, rows in (("valid", valid), ("faulty", failed)):
        if not all(type(row) is bool for row in rows):
            raise ValueError(f"reply's {key} must hold true and false only")
    if any(fine and fault for fine, fault in zip(valid, failed, strict=True)):
        raise ValueError("reply calls a sample both valid and faulty")
    if not all(row is None or type(row) in (int, float) for row in found):
        raise ValueError(f"reply's scores.{name} must hold numbers and null only")
    stated = _list(said.get("causes", [""] * count), "causes", count)
    values = torch.tensor([_number(row) if fine else math.nan for row, fine in zip(found, valid, strict=True)])
    finite = values.isfinite()
    causes = [
        (one_line(cause) or "server calls it not valid") if not fine else "" if number else f"value is {one_line(row)}"
        for cause, fine, number, row in zip(stated, valid, finite.tolist(), found, strict=True)
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
    except OverflowError:  # an integer beyond the range of floats
        return math.inf
