r"""Convert ReCamMaster's published checkpoint to a model folder in diffusers layout, or such a folder back.

    python tools/convert_recammaster.py --recammaster step20000.ckpt --wan Wan2.1-T2V-1.3B-Diffusers --out models/recam
    python tools/convert_recammaster.py --back models/recam --out recam.safetensors

Then --config.model.path=models/recam starts a run from it. --wan gives the sizes; codec, text encoder, tokenizer and
scheduler are copied from there (--link: linked). With a folder of the original Wan files, whose parts have another
layout, only transformer/ is written. The checkpoint may be .ckpt, .pt, .safetensors or a sharded one's .index.json.

--dtype keep writes every tensor in the precision it has; bf16 leaves in fp32 what Wan computes in fp32. Weights are
only renamed, and cast one at a time: memory stays near the size of the checkpoint. Everything is written beside --out
under another name and renamed at the end, so --out is complete or absent.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch
from torch import Tensor

from flow_grpo.models import convert, weight_files
from flow_grpo.models.recam_transformer import CAMERA_MODULES, ReCamTransformer3DModel
from flow_grpo.runtime.checkpoints.state_files import to_disk

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp32": torch.float32}
PARTS = ("vae", "text_encoder", "tokenizer", "scheduler")
INDEX = {
    "_class_name": "WanPipeline",
    "scheduler": ["diffusers", "UniPCMultistepScheduler"],
    "text_encoder": ["transformers", "UMT5EncoderModel"],
    "tokenizer": ["transformers", "T5TokenizerFast"],
    "vae": ["diffusers", "AutoencoderKLWan"],
}


def main(words: Sequence[str] | None = None) -> int:
    """Convert, print what was written, and return the process's exit code: 0, or 2 with one line of reason."""
    args = options().parse_args(words)
    try:
        _check(args)
        lines = back(args) if args.back else forward(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    print(*lines, sep="\n")
    return 0


def options() -> argparse.ArgumentParser:
    """Return the options of this tool."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--recammaster", type=Path, metavar="FILE", help="checkpoint with the original names")
    add("--wan", type=Path, metavar="FOLDER", help="Wan2.1-T2V-1.3B, in diffusers layout or the original files")
    add("--back", type=Path, metavar="FOLDER", help="the other way: a model folder, or its transformer folder")
    add("--out", type=Path, required=True, help="folder to write; with --back a .safetensors file. Not yet there")
    add("--dtype", choices=DTYPES, default="keep", help="of the written weights (default: as they are)")
    add("--link", action="store_true", help="link codec, text encoder, tokenizer and scheduler instead of copying")
    add("--init-camera", action="store_true", help="accept base Wan: the camera modules start without effect")
    return parser


def _check(args: argparse.Namespace) -> None:
    if bool(args.back) == bool(args.recammaster or args.wan):
        raise ValueError("got neither or both of two ways: give --recammaster and --wan, or --back, and --out")
    if not args.back and not (args.recammaster and args.wan):
        raise ValueError("got one of --recammaster and --wan, expected both: the weights and the model they belong to")
    if args.back and (args.link or args.init_camera):
        raise ValueError("--link and --init-camera have no meaning with --back: leave them out")
    if args.back and args.out.suffix != ".safetensors":
        raise ValueError(f"--out is {args.out}, expected a name ending in .safetensors with --back")
    if os.path.lexists(args.out):
        raise ValueError(f"--out {args.out} already exists: remove it or give another name")
    if not args.out.absolute().parent.is_dir():
        raise ValueError(f"--out {args.out} lies in no folder: make {args.out.absolute().parent} first")


def forward(args: argparse.Namespace) -> list[str]:
    """Write the model folder and return the report's lines.

    Raises:
        ValueError: a checkpoint or folder that does not fit; nothing is written then.
    """
    config, diffusers_layout = read_wan(args.wan)
    model = convert.empty_model(config)
    checkpoint = weight_files.read_checkpoint(args.recammaster)
    renaming = convert.renaming(checkpoint)
    if renaming.camera == args.init_camera:
        has, way_out = ("has its", "leave out --init-camera") if args.init_camera else ("has no", "give --init-camera")
        raise ValueError(f"{args.recammaster} {has} camera tensors: {way_out}, or another checkpoint")
    state = {new: checkpoint[old] for new, old in renaming.found.items()}
    if args.init_camera:
        convert.add_neutral_camera(state, model)
    convert.check_shapes(state, model)
    dtypes = weight_files.target_dtypes(state, DTYPES[args.dtype])

    with staged(args.out) as partial:
        (partial / "transformer").mkdir(parents=True)
        model.save_config(partial / "transformer")
        write_safetensors(partial / "transformer" / weight_files.WEIGHTS_FILE, state, dtypes)
        if diffusers_layout:
            add_parts(args.wan, partial, link=args.link)
    lines = report(state, dtypes, args.out / "transformer" / weight_files.WEIGHTS_FILE)
    lines += [f"dropped the prefix {renaming.prefix!r}"] if renaming.prefix else []
    lines += ["camera modules were made: zero and identity"] if args.init_camera else []
    if not diffusers_layout:
        lines.append(
            f"only transformer/ was made: {args.wan} holds the original Wan files; put {', '.join(PARTS)} of "
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers beside it"
        )
    return lines


def back(args: argparse.Namespace) -> list[str]:
    """Write the file with the original names and return the report's lines; ValueError as in `forward`."""
    folder = args.back / "transformer" if (args.back / "transformer").is_dir() else args.back
    found = read_json(folder / "config.json")
    if found.get("_class_name") != ReCamTransformer3DModel.__name__:
        raise ValueError(
            f"{folder} holds {found.get('_class_name')}, expected {ReCamTransformer3DModel.__name__}: give a folder "
            "that this tool or a training run wrote"
        )
    state = weight_files.read_checkpoint(weight_files.weight_file(folder))
    convert.renaming(state, back=True)
    convert.check_shapes(state, convert.empty_model(convert.recam_config(found)))
    original = convert.to_original(state)
    # Upstream's module has one precision throughout.
    dtypes = weight_files.target_dtypes(original, DTYPES[args.dtype], keep_fp32=False)
    with staged(args.out) as partial:
        write_safetensors(partial, original, dtypes)
    return report(original, dtypes, args.out)


def read_wan(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the fields of the ReCam model on this Wan, and whether the folder is in diffusers layout and complete.

    Raises:
        ValueError: a folder of neither layout, of another model, or with parts missing.
    """
    if (folder / "transformer" / "config.json").is_file():
        absent = [part for part in PARTS if not (folder / part).is_dir()]
        if absent:
            raise ValueError(f"--wan {folder} has no {', '.join(absent)} folder: download it again")
        return convert.recam_config(read_json(folder / "transformer" / "config.json")), True
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--wan {folder} has neither transformer/config.json nor config.json: give Wan2.1-T2V-1.3B-Diffusers, or "
            "the folder of the original files"
        )
    found = read_json(folder / "config.json")
    if found.get("_class_name") != "WanModel":
        raise ValueError(f"--wan {folder} holds a {found.get('_class_name')} alone: give the whole folder, its parent")
    return convert.recam_config(found), False


def read_json(file: Path) -> dict[str, Any]:
    """Return a JSON object; ValueError when the file is missing or is none."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: give a folder in diffusers layout") from None
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}): download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds a {type(found).__name__}, expected an object: download it again")
    return found


def add_parts(wan: Path, folder: Path, *, link: bool) -> None:
    """Copy or link what is not the transformer, and write model_index.json with our transformer's class."""
    for part in PARTS:
        if link:
            (folder / part).symlink_to((wan / part).resolve(), target_is_directory=True)
        else:
            shutil.copytree(wan / part, folder / part)  # a hub folder's links to blobs become files
    file = wan / "model_index.json"
    index = read_json(file) if file.is_file() else INDEX
    ours = {"transformer": [ReCamTransformer3DModel.__module__, ReCamTransformer3DModel.__name__]}
    (folder / "model_index.json").write_text(json.dumps(index | ours, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def staged(out: Path) -> Iterator[Path]:
    """Yield a name beside `out` for a file or folder; it becomes `out` at the end, and is removed on any failure."""
    out = out.absolute()
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        yield partial
        os.rename(partial, out)
        to_disk(out.parent)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def write_safetensors(file: Path, state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
    """Write one file, casting tensor by tensor: the library's `save_file` would need a cast copy of the whole.

    The format is 8 bytes of header length, the header in JSON, and the raw little-endian values without gaps
    (github.com/huggingface/safetensors, "Format").

    Args:
        file: to write, not yet there.
        state: name -> tensor.
        dtypes: name -> dtype in the file.

    Raises:
        ValueError: a tensor with values that are not finite.
    """
    # Wide types first: every tensor then begins at a multiple of its own width.
    order = sorted(state, key=lambda name: (-dtypes[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + state[name].numel() * dtypes[name].itemsize
        shape, dtype = list(state[name].shape), weight_files.DTYPES[dtypes[name]]
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
    to_disk(file)


def report(state: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype], file: Path) -> list[str]:
    """Return what was written, in lines for a reader."""
    camera = [name for name in state if set(name.split(".")) & set(CAMERA_MODULES)]
    kinds = ", ".join(f"{count} {str(kind)[6:]}" for kind, count in sorted(Counter(dtypes.values()).items(), key=str))
    return [
        f"wrote {file}, {file.stat().st_size / 1e9:.3f} GB",
        f"{len(state)} tensors, {sum(value.numel() for value in state.values()):,} parameters: {kinds}",
        f"{len(camera)} camera tensors, {sum(state[name].numel() for name in camera):,} parameters",
    ]


def _terminated(*_: object) -> None:
    sys.exit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)  # killed politely, it still takes its half-written folder away
    sys.exit(main())
