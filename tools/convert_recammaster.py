r"""Convert ReCamMaster's published checkpoint to a model folder in diffusers layout, or such a folder back.

    python tools/convert_recammaster.py --recammaster step20000.ckpt --wan Wan2.1-T2V-1.3B-Diffusers --out models/recam
    python tools/convert_recammaster.py --back models/recam --out recam.safetensors

Then --config.model.path=models/recam starts a run from it. --wan gives the sizes; codec, text encoder, tokenizer and
scheduler are copied from there (--link: symlinked). For a folder of the original Wan files, which have another layout,
only transformer/ is written. The checkpoint may be .ckpt, .pt, .safetensors or the .index.json of sharded safetensors.

--dtype keep keeps every tensor's dtype; bf16 leaves the weights that Wan computes in fp32 in fp32. Tensors are cast one
at a time, so memory stays near the size of the checkpoint. Output is written under a temporary name and renamed at the
end, so --out is complete or absent.
"""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import add_conversion_options, command, make_parser

PARSER = make_parser(__doc__)
add = PARSER.add_argument
add("--recammaster", type=Path, metavar="FILE", help="checkpoint with the original names")
add("--wan", type=Path, metavar="FOLDER", help="Wan2.1-T2V-1.3B, in diffusers layout or the original files")
add_conversion_options(PARSER)
add("--init-camera", action="store_true", help="accept base Wan: add camera modules without effect")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

from flow_grpo.models.files import convert, model_files
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import is_camera_weight
from flow_grpo.runtime.json_files import read_json_object
from tools.conversion import model_folder

COMPONENTS = ("vae", "text_encoder", "tokenizer", "scheduler")
is_recam_weight = functools.partial(is_camera_weight, ReCamTransformer3DModel)


@command
def main(words: Sequence[str] | None = None) -> int:
    return model_folder.convert_checkpoint(PARSER.parse_args(words), ("recammaster", "wan"), forward, back)


def forward(args: argparse.Namespace) -> list[str]:
    config, diffusers_layout = read_wan(args.wan)
    model = convert.empty_model(config)
    checkpoint = model_files.read_checkpoint(args.recammaster)
    renaming = convert.plan_renaming(checkpoint, convert.text_to_video_layout(checkpoint))
    if (renaming.layout is convert.RECAM) == args.init_camera:
        has, way_out = ("has its", "leave out --init-camera") if args.init_camera else ("has no", "give --init-camera")
        raise ValueError(f"{args.recammaster} {has} camera tensors: {way_out}, or another checkpoint")
    state = renaming.apply(checkpoint)
    if args.init_camera:
        convert.add_neutral_camera(state, model)
    convert.check_shapes(state, model)
    parts, index = COMPONENTS if diffusers_layout else (), model_folder.INDEX | {"_class_name": "WanPipeline"}
    lines = model_folder.write_folder(args, model, state, parts, index, "camera", is_recam_weight)
    lines += [f"dropped the prefix {renaming.prefix!r}"] if renaming.prefix else []
    lines += ["added camera modules without effect: zero cam_encoder, identity projector"] if args.init_camera else []
    if not diffusers_layout:
        lines.append(
            f"only transformer/ was written: {args.wan} holds the original Wan files; add {', '.join(COMPONENTS)} of "
            f"Wan-AI/Wan2.1-T2V-1.3B-Diffusers to {args.out}"
        )
    return lines


def back(args: argparse.Namespace) -> list[str]:
    """Write the file with the original names and return the lines to print; ValueError as in `forward`."""
    folder, config, checkpoint = model_folder.read_transformer(args.back, ReCamTransformer3DModel)
    renaming = convert.plan_renaming(checkpoint, convert.text_to_video_layout(checkpoint), back=True)
    if renaming.layout is convert.WAN:
        raise ValueError(
            f"{folder} holds weights of base Wan without camera tensors, but config.json of "
            f"{ReCamTransformer3DModel.__name__}: {model_folder.OWN_FOLDER}"
        )
    convert.check_shapes(checkpoint, convert.empty_model(convert.recam_config(config)))
    return model_folder.write_published(args, renaming.apply(checkpoint), "camera", is_recam_weight)


def read_wan(folder: Path) -> tuple[dict[str, Any], bool]:
    """Return the ReCam transformer's configuration for the Wan in `folder`, and whether that has diffusers layout."""
    if (file := folder / "transformer" / "config.json").is_file():
        model_folder.check_components(folder, COMPONENTS)
        return convert.recam_config(read_json_object(file, model_folder.WAY_OUT)), True
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"--wan {folder} has neither transformer/config.json nor config.json: give Wan2.1-T2V-1.3B-Diffusers, or "
            "the folder of the original files"
        )
    found = read_json_object(folder / "config.json", model_folder.WAY_OUT)
    if found.get("_class_name") != "WanModel":
        raise ValueError(f"--wan {folder} holds a {found.get('_class_name')} alone: give the whole folder, its parent")
    return convert.recam_config(found), False


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises, so that the temporary folder is deleted
    sys.exit(main())
