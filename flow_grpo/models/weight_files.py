"""Files of weights: reading them whole, and the precision each tensor is stored in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flow_grpo.models.part_files import listed_shards
from flow_grpo.models.recam_transformer import stays_fp32

WEIGHTS_FILE = "diffusion_pytorch_model.safetensors"  # of a whole transformer, as diffusers names it

# What can be stored, by the file format's names. Quantised and double weights have no place in either layout.
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """Return the tensors of a file on the CPU, mapped: memory is filled as they are read, and the system may drop it.

    Args:
        path: .ckpt, .pt, .pth or .bin of `torch.save` (nothing but tensors is unpickled), .safetensors, or the
            .index.json of a sharded one.

    Raises:
        ValueError: another kind of file, a damaged one, or one that holds anything but a flat table of bf16, fp16 or
            fp32 tensors.
        OSError: a file that cannot be opened.
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
            f"{file} holds {few(wrong)} beside weights in bf16, fp16 or fp32: give the transformer's state dict alone"
        )
    return state


def weight_file(folder: Path) -> Path:
    """Return the weights of a model folder, the index where they are sharded; ValueError when there are none."""
    for file in (folder / f"{WEIGHTS_FILE}.index.json", folder / WEIGHTS_FILE):
        if file.is_file():
            return file
    raise ValueError(
        f"no weights in {folder}: expected {WEIGHTS_FILE} or {WEIGHTS_FILE}.index.json; download the folder again"
    )


def _read_torch(file: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(file, weights_only=True, mmap=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # noqa: BLE001 - torch passes pickle's own errors on, and others by kind of damage
        reason = str(error).partition("\n")[0].partition(" This file can still")[0]
        raise ValueError(
            f"{file} cannot be read as a state dict: {reason} ({type(error).__name__}); download it again, or save it "
            "anew with torch.save(state_dict)"
        ) from None
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise ValueError(f"{file} holds a {type(state).__name__}, expected a flat table of tensors by name")
    return dict(state)


def read_tensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its header; ValueError when it is damaged."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}, dict(opened.metadata() or {})  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged: {error}; save, copy or download it again") from None


def _read_shards(index: Path) -> dict[str, Tensor]:
    shards = listed_shards(index)
    state: dict[str, Tensor] = {}
    for shard in sorted(set(shards.values())):
        if not (index.parent / shard).is_file():
            raise ValueError(f"{index} names the shard {shard}, which is not there; download it too")
        part = read_tensors(index.parent / shard)[0]
        named = {name for name, place in shards.items() if place == shard}
        if part.keys() != named:
            odd = few(sorted(part.keys() ^ named))
            raise ValueError(f"{index} and its shard {shard} disagree on {odd}; download both again")
        state |= part
    return state


def target_dtypes(
    state: Mapping[str, Tensor], dtype: torch.dtype | None, *, keep_fp32: bool = True
) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor in the file: `dtype`, or its own for None.

    With `keep_fp32`, what Wan computes in fp32 is stored so under another `dtype`: the modules that diffusers keeps in
    fp32 when it loads, see `stays_fp32`.
    """
    if dtype is None:
        return {name: value.dtype for name, value in state.items()}
    return {name: torch.float32 if keep_fp32 and stays_fp32(name) else dtype for name in state}


def few(given: list[str]) -> str:
    """Return how many names there are, and the first of them."""
    shown = ", ".join(given[:3]) + (", ..." if len(given) > 3 else "")
    return f"{len(given)} ({shown})" if given else "none"
