r"""Convert ReDirector's published checkpoint to a model folder in diffusers layout, or such a folder back.

    python tools/convert_redirector.py --step step20000.safetensors --base Wan2.1-Fun-V1.1-1.3B-Control-Camera \
        --wan Wan2.1-I2V-14B-480P-Diffusers --out models/redirector
    python tools/convert_redirector.py --back models/redirector --out redirector.safetensors

--base is PAI's folder with config.json and diffusion_pytorch_model.safetensors, on top of which --step replaces every
self-attention. Codec, text encoder, tokenizer, scheduler and image encoder are copied from --wan (--link: symlinked);
its transformer is not needed. --back writes every tensor under its published name, of the base and of the step.

--dtype keep keeps every tensor's dtype; bf16 leaves the weights that Wan computes in fp32 in fp32. Output is written
under a temporary name and renamed at the end, so --out is complete or absent.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import add_conversion_options, command, make_parser

PARSER = make_parser(__doc__)
add = PARSER.add_argument
add("--step", type=Path, metavar="FILE", help="ReDirector's checkpoint, stepN.safetensors")
add("--base", type=Path, metavar="FOLDER", help="Wan2.1-Fun-V1.1-1.3B-Control-Camera, original files")
add("--wan", type=Path, metavar="FOLDER", help="Wan2.1-I2V-14B-480P-Diffusers, for all but the transformer")
add_conversion_options(PARSER)
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

from flow_grpo.models.files import convert, model_files
from flow_grpo.models.networks.redirector_transformer import ReDirectorTransformer3DModel, is_phase_weight
from flow_grpo.runtime.json_files import read_json_object
from tools.conversion import model_folder

COMPONENTS = ("vae", "text_encoder", "tokenizer", "scheduler", "image_encoder", "image_processor")
IMAGE_INDEX = {
    "_class_name": "WanImageToVideoPipeline",
    "image_encoder": ["transformers", "CLIPVisionModel"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
}


@command
def main(words: Sequence[str] | None = None) -> int:
    return model_folder.convert_checkpoint(PARSER.parse_args(words), ("step", "base", "wan"), forward, back)


def forward(args: argparse.Namespace) -> list[str]:
    model_folder.check_components(args.wan, COMPONENTS)
    found = read_json_object(args.base / "config.json", model_folder.WAY_OUT)
    base = model_files.read_checkpoint(model_files.weights_path(args.base))
    state, below, above = convert.with_step(base, model_files.read_checkpoint(args.step))
    model = convert.empty_model(convert.redirector_config(found, state), ReDirectorTransformer3DModel)
    convert.check_shapes(state, model)
    index = model_folder.INDEX | IMAGE_INDEX
    lines = model_folder.write_folder(args, model, state, COMPONENTS, index, "phase", is_phase_weight)
    replaced = len(below.names.keys() & above.names.keys())
    return [
        *lines,
        f"{len(base)} tensors of the base, {len(above.names)} of the step, {replaced} of which replace the base's",
        *(f"dropped the prefix {one.prefix!r} of {one.layout.title}" for one in (below, above) if one.prefix),
    ]


def back(args: argparse.Namespace) -> list[str]:
    """Write the file with the published names and return the lines to print; ValueError as in `forward`."""
    _, config, checkpoint = model_folder.read_transformer(args.back, ReDirectorTransformer3DModel)
    renaming = convert.plan_renaming(checkpoint, convert.REDIRECTOR, back=True)
    fields = convert.model_fields(config, ReDirectorTransformer3DModel, model_folder.OWN_FOLDER)
    convert.check_shapes(checkpoint, convert.empty_model(fields, ReDirectorTransformer3DModel))
    return model_folder.write_published(args, renaming.apply(checkpoint), "phase", lambda name: ".rope_phase_" in name)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises, so that the temporary folder is deleted
    sys.exit(main())
