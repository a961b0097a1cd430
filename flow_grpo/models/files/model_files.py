"""Files of a model folder in diffusers layout: validate a component without loading its weights, and read weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flow_grpo.runtime.json_files import read_json_object, regular_file

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"  # diffusers' name for unsharded weights
WAY_OUT = "download it again"

# Dtypes that a checkpoint may hold, with their names in safetensors.
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def check_component(folder: Path) -> dict[str, Any]:
    """Check a component's JSON files and the headers of its weights, and return its config.json.

    Components are loaded lazily, so damaged files must be found here and not hours into a run: ValueError if
    config.json is missing, a JSON file is damaged, or as `stored_shapes`.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder / 'config.json'} is missing; give a model folder in diffusers layout")
    check_json(folder)
    stored_shapes(folder)
    return read_json_object(folder / "config.json", WAY_OUT)


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a component's safetensors files by its name, from their headers alone.

    Raises:
        ValueError: no weights, a missing or truncated file, or a tensor that is not bf16, fp16 or fp32: quantised
            weights without their scales would be taken for the weights themselves.
    """
    weights = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index*.json"):
        weights |= {folder / name for name in read_index(index).values()}
    if not weights:
        raise ValueError(f"no weights in {folder}: expected .safetensors files; download the folder again")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(weights):
        try:
            # Opening checks that the header accounts for every byte of the file.
            with safe_open(regular_file(file), framework="pt") as opened:
                parts = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is missing or damaged: {error}; {WAY_OUT}") from None
        wrong = [f"{n}: {kind}" for n, part in parts.items() if (kind := part.get_dtype()) not in DTYPES.values()]
        if wrong:
            raise ValueError(f"{file} must hold BF16, F16 or F32 only, got {summarize(wrong)}; give such weights")
        shapes |= {name: tuple(part.get_shape()) for name, part in parts.items()}
    return shapes


def check_json(folder: Path) -> None:
    """Raise ValueError for the first JSON file in the folder that does not hold an object."""
    for file in sorted(folder.glob("*.json")):
        read_json_object(file, WAY_OUT)


def read_statistics(
    file: Path, found: Mapping[str, Any], names: tuple[str, str], channels: int
) -> tuple[list[float], list[float]]:
    """Return a finite mean and a positive standard deviation for every channel from a JSON file; else ValueError."""
    for name, least in zip(names, (-math.inf, 0.0), strict=True):
        numbers: Any = found.get(name)
        right = isinstance(numbers, list | tuple) and len(numbers) == channels
        if not right or not all(type(one) in (int, float) and least < one < math.inf for one in numbers):
            bound = f"must be {channels} finite numbers above {least:g}"
            raise ValueError(f"{file}: {name} is {numbers!r:.100}, {bound}; {WAY_OUT}")
    return list(found[names[0]]), list(found[names[1]])


def read_index(index: Path) -> dict[str, str]:
    """Return tensor name -> shard file name from an .index.json; ValueError for a shard outside its folder."""
    shards = read_json_object(index, WAY_OUT).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(shard, str) for shard in shards.values()):
        raise ValueError(f"{index} is no index of shards, must hold a weight_map of file names; {WAY_OUT}")
    for shard in shards.values():
        if Path(shard).name != shard:
            raise ValueError(f"{index} names the shard {shard!r}, must be a file in the same folder; {WAY_OUT}")
    return shards


def weights_path(folder: Path) -> Path:
    """Return a component's weights, or their index if they are sharded; ValueError if there are none."""
    for file in (folder / f"{WEIGHTS_FILE}.index.json", folder / WEIGHTS_FILE):
        if file.is_file():
            return file
    raise ValueError(
        f"no weights in {folder}: expected {WEIGHTS_FILE} or {WEIGHTS_FILE}.index.json; download the folder again"
    )


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the CPU tensors of a checkpoint, memory-mapped.

    Args:
        path: .ckpt, .pt, .pth or .bin of `torch.save` (loaded with `weights_only`), .safetensors, or .index.json of
            sharded safetensors.

    Raises:
        ValueError: another kind of file, a damaged one, or one that holds anything but a flat dict of bf16, fp16 or
            fp32 tensors.
        OSError: the file cannot be opened.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"no checkpoint at {file}: give a .ckpt, .pt, .safetensors or .safetensors.index.json")
    if file.name.endswith(".index.json"):
        state = _read_shards(file)
    elif file.suffix == ".safetensors":
        state = read_tensors(file)[0]
    elif file.suffix in (".ckpt", ".pt", ".pth", ".bin"):
        state = _read_torch(file)
    else:
        raise ValueError(f"{file} ends in {file.suffix!r}: give a .ckpt, .pt, .safetensors or .safetensors.index.json")
    kinds = {name: getattr(value, "dtype", type(value).__name__) for name, value in state.items()}
    wrong = [f"{name}: {kind}" for name, kind in kinds.items() if kind not in DTYPES]
    if wrong:
        raise ValueError(
            f"{file} must hold bf16, fp16 or fp32 tensors only, got {summarize(wrong)}: give the transformer's state "
            "dict alone"
        )
    return state


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file; ValueError if it is missing or damaged."""
    try:
        with safe_open(regular_file(file), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            header = dict(opened.metadata() or {})
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{file} is missing or damaged: {error}; save, copy or download it again") from None
    check_finite(tensors, file)
    return tensors, header


def check_finite(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise ValueError where weights of a file are NaN or infinite: so would be all that is computed with them."""
    known = {name: own for name, own in tensors.items() if own.dtype in DTYPES and own.numel() and not own.is_meta}
    if wrong := [name for name, own in known.items() if not torch.stack(own.aminmax()).isfinite().all()]:
        raise ValueError(f"{file} holds NaN or infinity in {summarize(wrong)}; save, copy or download it again")


def _read_torch(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - torch raises a different type for each kind of damage
        reason = str(error).partition("\n")[0].partition(" This file can still")[0]
        raise ValueError(
            f"{file} cannot be read as a state dict: {reason} ({type(error).__name__}); download it again, or save it "
            "again with torch.save(state_dict)"
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{file} holds a {type(state).__name__}, expected a flat dict of tensors by name")
    return dict(state)


def _read_shards(index: Path) -> dict[str, Tensor]:
    shards = read_index(index)
    state: dict[str, Tensor] = {}
    for shard in sorted(set(shards.values())):
        tensors = read_tensors(index.parent / shard)[0]
        differing = sorted(tensors.keys() ^ {name for name, file in shards.items() if file == shard})
        if differing:
            raise ValueError(f"{index} and its shard {shard} disagree on {summarize(differing)}; download both again")
        state |= tensors
    return state


def summarize(names: Sequence[str]) -> str:
    """Return the number of names and the first three, for a message."""
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"{len(names)} ({shown})" if names else "none"
