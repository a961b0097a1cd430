"""What the commands that convert checkpoints share: writing weights and model folders, and reporting them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_grpo.models.files import convert, model_files
from flow_grpo.runtime.atomic_file import atomic_path
from flow_grpo.runtime.checkpoints.state_files import fsync
from flow_grpo.runtime.device import DTYPES
from flow_grpo.runtime.json_files import read_json_object

WAY_OUT = "give a complete model folder, or download it again"
OWN_FOLDER = "give a folder that this tool or a training run wrote"
WEIGHTS = Path("transformer", model_files.WEIGHTS_FILE)
INDEX = {
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def convert_checkpoint(
    args: argparse.Namespace,
    needed: Sequence[str],
    forward: Callable[[argparse.Namespace], list[str]],
    back: Callable[[argparse.Namespace], list[str]],
) -> int:
    """Convert, report what was written, and return the exit code 0; ValueError or OSError for what is wrong.

    `forward` writes the model folder from the options `needed`, and with --back `back` the published layout; both
    return the lines to print.
    """
    given = [name for name in needed if getattr(args, name)]
    if given if args.back else given != [*needed]:
        got = ", ".join(f"--{name}" for name in (*given, *["back"] * bool(args.back))) or "neither"
        raise ValueError(f"got {got}: give --{', --'.join(needed)}, or --back alone, and --out")
    unused = [name for name in ("link", "init_camera") if args.back and getattr(args, name, False)]
    if unused:
        raise ValueError(f"--{unused[0].replace('_', '-')} does not apply to --back: leave it out")
    if args.back and args.out.suffix != ".safetensors":
        raise ValueError(f"--out is {args.out}, expected a name ending in .safetensors with --back")
    if os.path.lexists(args.out):
        raise ValueError(f"--out {args.out} already exists: remove it or give another name")
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {args.out} is in no existing folder: make {args.out.absolute().parent} first")
    print(f"writing {args.out}", flush=True)
    lines = back(args) if args.back else forward(args)
    print(*lines, sep="\n")
    return 0


def check_components(wan: Path, parts: Sequence[str]) -> None:
    if absent := [part for part in parts if not (wan / part).is_dir()]:
        raise ValueError(f"--wan {wan} has no {', '.join(absent)} folder: download it again")


def read_transformer(model: Path, kind: type) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Return folder, configuration and weights of the transformer in a model folder, or in a transformer's own."""
    folder = model / "transformer" if (model / "transformer").is_dir() else model
    config = read_json_object(folder / "config.json", WAY_OUT)
    if config.get("_class_name") != kind.__name__:
        raise ValueError(f"{folder} holds {config.get('_class_name')}, expected {kind.__name__}: {OWN_FOLDER}")
    return folder, config, model_files.read_checkpoint(model_files.weights_path(folder))


def write_folder(
    args: argparse.Namespace,
    model: Any,
    state: Mapping[str, Tensor],
    parts: Sequence[str],
    index: Mapping[str, Any],
    special: str,
    is_special: Callable[[str], bool],
) -> list[str]:
    """Write --out: the transformer, and beside it the `parts` of --wan, copied or linked; complete or absent.

    Of `model` configuration and class are taken. `index` is what model_index.json says if --wan has none. Returns the
    lines to print, see `_report`.
    """
    dtypes = convert.target_dtypes(state, DTYPES.get(args.dtype))
    with atomic_path(args.out) as partial:
        (partial / "transformer").mkdir(parents=True)
        model.save_config(partial / "transformer")
        write_safetensors(partial / WEIGHTS, state, dtypes)
        for part in parts:
            if args.link:
                (partial / part).symlink_to((args.wan / part).resolve(), target_is_directory=True)
            else:
                shutil.copytree(args.wan / part, partial / part)  # follows the links of a Hugging Face cache
        if parts:
            file = args.wan / "model_index.json"
            found = read_json_object(file, WAY_OUT) if file.is_file() else dict(sorted(index.items()))
            found["transformer"] = [type(model).__module__, type(model).__name__]
            (partial / "model_index.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    fsync(args.out.absolute().parent)
    return _report(state, dtypes, args.out / WEIGHTS, special, is_special)


def write_safetensors(file: Path, state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Write tensors to a new safetensors file, casting one at a time to `dtypes`.

    `save_file` of safetensors would hold a cast copy of the whole model. The format is 8 bytes of header length, the
    header in JSON, and the raw little-endian values without gaps (github.com/huggingface/safetensors, "Format").
    """
    # Wide dtypes first, so that every tensor is aligned to its element size.
    order = sorted(state, key=lambda name: (-dtypes[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + state[name].numel() * dtypes[name].itemsize
        shape, dtype = list(state[name].shape), model_files.DTYPES[dtypes[name]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            value = state[name].detach().to(dtypes[name]).contiguous()
            if not torch.isfinite(value).all():
                raise ValueError(f"{name} has values that are not finite: the checkpoint is damaged, download it again")
            stream.write(value.view(-1).view(torch.uint8).numpy().data)
    fsync(file)


def write_published(
    args: argparse.Namespace, state: Mapping[str, Tensor], special: str, is_special: Callable[[str], bool]
) -> list[str]:
    """Write tensors under their published names to the file --out; return the lines to print, see `_report`."""
    dtypes = convert.target_dtypes(state, DTYPES.get(args.dtype), keep_fp32=False)  # one dtype throughout, as published
    with atomic_path(args.out) as partial:
        write_safetensors(partial, state, dtypes)
    fsync(args.out.absolute().parent)
    return _report(state, dtypes, args.out, special, is_special)


def _report(
    state: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    file: Path,
    special: str,
    is_special: Callable[[str], bool],
) -> list[str]:
    """Return a summary of the written tensors, line by line; the `special` ones are counted apart."""
    names = [name for name in state if is_special(name)]
    kinds = ", ".join(f"{count} {str(kind)[6:]}" for kind, count in sorted(Counter(dtypes.values()).items(), key=str))
    return [
        f"wrote {file}, {file.stat().st_size / 1e9:.3f} GB",
        f"{len(state)} tensors, {sum(value.numel() for value in state.values()):,} parameters: {kinds}",
        f"{len(names)} {special} tensors, {sum(state[name].numel() for name in names):,} parameters",
    ]
