r"""Write a model folder with random weights, to try whole runs without the published ones.

    python tools/random_model.py --out models/random                       # the size of Wan2.1-T2V-1.3B
    python tools/random_model.py --out models/small --heads 2 --head-dim 16 --layers 2 --ffn 64 --text-dim 32 \
        --codec small                                                       # runs on a CPU
    python tools/random_model.py --out models/t2v --kind wan_t2v           # plain text-to-video
    python tools/random_model.py --out models/random --kind redirector      # ReDirector instead of ReCamMaster

Speed, memory of transformer and codec, ranks and files are those of a real run, but samples are noise. Velocities are
of order one and depend on cameras, prompt and source video; the tokenizer works on bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import DTYPES, command, make_parser

# Both have 16 channels and compress 4x in time, 8x in space; diffusers' defaults are Wan 2.1's own configuration.
CODECS: dict[str, dict[str, Any]] = {"wan": {}, "small": {"base_dim": 4, "num_res_blocks": 1}}
IMAGE_HEADS = 4  # of the image encoder's attention


def _published(name: str) -> Any:
    return dataclasses.field(default_factory=lambda: WAN_1_3B[name])


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the networks, the command line's options."""

    kind: str = "recam"  # `model.kind` of the recipe
    heads: int = _published("num_attention_heads")  # of the transformer
    head_dim: int = _published("attention_head_dim")  # their width; the model width is heads * head_dim
    layers: int = _published("num_layers")
    ffn: int = _published("ffn_dim")  # hidden width of the feed-forward layers
    text_dim: int = _published("text_dim")  # width of the prompt embeddings
    image_dim: int = 1280  # width of the image features, if the kind takes any
    dtype: str = "bf16"  # or fp32, of transformer and text encoder; codec and image encoder are fp32
    codec: str = "wan"  # a name in `CODECS`
    seed: int = 0  # of all weights

    def check(self) -> None:
        """Raise a ValueError with option, value and bound if no network has these sizes."""
        for name in ("heads", "layers", "ffn", "text_dim"):
            if getattr(self, name) < 1:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: got {getattr(self, name)}, must be at least 1")
        if self.head_dim < 6 or self.head_dim % 2:
            raise ValueError(
                f"--head-dim: got {self.head_dim}, must be even and at least 6, because rotary embeddings of time, "
                "height and width each rotate pairs of it; for example --head-dim 16"
            )
        if self.image_dim < 1 or self.image_dim % IMAGE_HEADS:
            raise ValueError(f"--image-dim: got {self.image_dim}, must be a multiple of {IMAGE_HEADS}")


PARSER = make_parser(__doc__)
PARSER.add_argument("--out", type=Path, required=True, help="folder to write; must not exist, or be empty")
kinds = PARSER.add_argument("--kind", default=argparse.SUPPRESS, help="video model, as model.kind of a recipe")
choices = {"dtype": DTYPES, "codec": sorted(CODECS)}
for field in dataclasses.fields(Sizes)[1:]:
    option, kind = f"--{field.name.replace('_', '-')}", int if field.type == "int" else str
    PARSER.add_argument(option, type=kind, default=argparse.SUPPRESS, choices=choices.get(field.name))
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel
from transformers.utils import logging as transformers_logging

from flow_grpo.data.tiny_world import WorldSpec, render_views, make_scene
from flow_grpo.maths.keys import generator
from flow_grpo.models.registry import VIDEO_MODELS, video_model
from flow_grpo.models.networks.transformers import is_camera_weight, stays_fp32
from flow_grpo.models.video_model import WAN_1_3B
from flow_grpo.runtime.atomic_file import atomic_path
from flow_grpo.runtime import device

kinds.choices = sorted(VIDEO_MODELS)  # not before they are imported
RECORD = "random_model.json"
SPECIAL = ("<pad>", "</s>", "<unk>")
BIAS_STD = 0.3  # of the camera modules
GATE_STD = 0.3  # of scale_shift_table, which contains the gates of the residual branches
PIXEL_STD = 0.5  # of decoded videos, which are clamped to [-1, 1]
CLIPS = WorldSpec(seed=13, scenes={}, height=32, width=32)  # for measuring the codec's output statistics


@command
def main(words: Sequence[str] | None = None) -> int:
    given = vars(PARSER.parse_args(words))
    out: Path = given.pop("out")
    sizes = Sizes(**given)
    sizes.check()
    print(f"writing {out}", flush=True)
    record = write_model(out, sizes)
    parts = ", ".join(f"{name} {part['parameters']:,}" for name, part in record["parts"].items())
    size = sum(part["bytes"] for part in record["parts"].values())
    print(f"random weights in {out}: {parts} parameters, {size:,} bytes")
    return 0


def write_model(out: Path, sizes: Sizes) -> dict[str, Any]:
    """Write the components and their record under a temporary name, rename it to `out`, and return the record."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out: {out} already exists and is not an empty folder; choose another or delete it")
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with atomic_path(out) as partial:
        parts: dict[str, dict[str, int]] = {}
        for name, part in build_parts(sizes).items():
            part.save_pretrained(str(partial / name))
            if isinstance(part, nn.Module):
                stored = sum(file.stat().st_size for file in (partial / name).iterdir())
                parts[name] = {"parameters": sum(p.numel() for p in part.parameters()), "bytes": stored}
        record = {
            "weights": "random: this model was never trained and can only show how a run behaves",
            "tool": "tools/random_model.py",
            "torch": torch.__version__,
            "settings": dataclasses.asdict(sizes),
            "parts": parts,
            "note": "the text encoder is small whatever --text-dim says; Wan's own takes another 11 GiB",
        }
        (partial / RECORD).write_text(json.dumps(record, indent=1))
    return record


def build_parts(sizes: Sizes) -> dict[str, Any]:
    """Return the components by folder name: a pure function of the sizes that keeps the global random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(sizes.seed)
        tokenizer = build_tokenizer()
        parts: dict[str, Any] = {
            "transformer": build_transformer(sizes),
            "vae": build_codec(sizes.codec),
            "text_encoder": build_text_encoder(sizes, len(tokenizer)),
            "tokenizer": tokenizer,
        }
        if parts["transformer"].config["image_dim"]:
            parts |= {"image_encoder": build_image_encoder(sizes.image_dim), "image_processor": ImageStatistics()}
        return parts


def build_transformer(sizes: Sizes) -> WanTransformer3DModel:
    """Return the model's transformer at another size, with larger gates and camera weights.

    The default initialization gives velocities of order one at any size, but wide blocks add little to the residual
    stream, and the camera nothing.
    """
    shape = {
        "num_attention_heads": sizes.heads,
        "attention_head_dim": sizes.head_dim,
        "num_layers": sizes.layers,
        "ffn_dim": sizes.ffn,
        "text_dim": sizes.text_dim,
    }
    model = video_model(sizes.kind)
    if "image_dim" in model.published:
        shape["image_dim"] = sizes.image_dim
    transformer = model.network(**{**model.published, **shape})
    for name, parameter in transformer.named_parameters():
        if is_camera_weight(transformer, name) and not parameter.any():  # which would leave the camera without effect
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5 if parameter.ndim > 1 else BIAS_STD)
    for block in transformer.blocks:
        nn.init.normal_(block.scale_shift_table, std=GATE_STD)
    for name, parameter in transformer.named_parameters():
        if not stays_fp32(name):
            parameter.data = parameter.data.to(device.DTYPES[sizes.dtype])
    return transformer.eval()


@torch.no_grad()
def build_codec(name: str) -> AutoencoderKLWan:
    """Return a codec whose normalised latents have mean 0 and standard deviation 1, and whose videos fill [-1, 1].

    A freshly initialized codec matches neither `latents_mean` nor `latents_std`, and decodes to nearly grey videos that
    rewards cannot tell apart. The last convolution of each half is rescaled on a few clips to correct both.
    """
    codec: AutoencoderKLWan = AutoencoderKLWan(**CODECS[name]).eval()
    mean, std = torch.tensor(codec.config["latents_mean"]), torch.tensor(codec.config["latents_std"])
    clips = render_views(CLIPS, [make_scene(CLIPS, "codec", number) for number in range(2)], [3]) * 2 - 1
    encoded = _rescale(codec.quant_conv, lambda: codec.encode(clips), mean, std)

    channels = (1, -1, 1, 1, 1)
    draw = torch.randn(encoded.shape, generator=generator("random-codec", name))
    latents = draw * std.view(channels) + mean.view(channels)
    _rescale(codec.decoder.conv_out, lambda: codec.decode(latents), torch.zeros(3), torch.full((3,), PIXEL_STD))
    return codec


def _rescale(convolution: nn.Conv3d, call: Callable[[], object], mean: Tensor, std: Tensor) -> Tensor:
    """Rescale a convolution so that its first C output channels get a mean and standard deviation (C,).

    Returns these outputs (B, C, ...) as they were in `call`, before the change.
    """
    seen: list[Tensor] = []  # one entry per chunk of frames, before clamping
    hook = convolution.register_forward_hook(lambda _module, _inputs, output: seen.append(output.detach()))
    call()
    hook.remove()
    count = len(mean)
    outputs = torch.cat(seen, dim=2)[:, :count]
    flat = outputs.transpose(0, 1).flatten(1)
    factor = std / flat.std(dim=1)
    convolution.weight[:count] *= factor.view(-1, 1, 1, 1, 1)
    assert convolution.bias is not None
    convolution.bias[:count] = (convolution.bias[:count] - flat.mean(dim=1)) * factor + mean
    return outputs


def build_text_encoder(sizes: Sizes, vocabulary: int) -> UMT5EncoderModel:
    """Return two UMT5 layers with outputs of width `text_dim` and narrow inner layers."""
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=sizes.text_dim,
        d_kv=max(1, min(64, sizes.text_dim // 4)),
        d_ff=min(1024, 2 * sizes.text_dim),
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=SPECIAL.index("<pad>"),
        eos_token_id=SPECIAL.index("</s>"),
    )
    encoder = UMT5EncoderModel(config)
    for parameter in encoder.parameters():
        parameter.data = parameter.data.to(device.DTYPES[sizes.dtype])
    return encoder.eval()  # type: ignore[no-any-return, no-untyped-call]


def build_image_encoder(width: int) -> CLIPVisionModel:
    """Return two CLIP layers on pictures of 16x16 patches, which give 257 features of that width, as Wan's do."""
    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=IMAGE_HEADS,
        image_size=224,
        patch_size=14,
        hidden_act="gelu",
    )
    return CLIPVisionModel(config).eval()


class ImageStatistics:
    """The statistics of CLIP's training pictures, in the file of an image processor."""

    def save_pretrained(self, folder: str) -> None:
        Path(folder).mkdir()
        found = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
        Path(folder, "preprocessor_config.json").write_text(json.dumps(found))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer that ends every prompt with </s>; prompts in any language stay distinct."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate((*SPECIAL, *alphabet))}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    pad, end, unknown = SPECIAL
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, pad_token=pad, eos_token=end, unk_token=unknown
    )


if __name__ == "__main__":
    sys.exit(main())
