"""Conversion between the tensor names of Wan's own code and of diffusers, with the checks that a checkpoint fits.

Conversion only renames tensors. N is the number of blocks. Published checkpoints:

- ReCamMaster: `step20000.ckpt` of KwaiVGI/ReCamMaster is `torch.save(dit.state_dict())`, the names of Wan 2.1 T2V's own
  code and two camera modules per block.
- ReDirector: PAI/Wan2.1-Fun-V1.1-1.3B-Control-Camera, the names of Wan 2.1 I2V's own code and those of the control
  adapter; on top of it `stepN.safetensors` of byeongjun-park/ReDirector with every tensor of self-attention, among them
  two phase modules per block.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flow_grpo.models.files.model_files import summarize
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.redirector_transformer import PHASE_MODULES
from flow_grpo.models.networks.transformers import is_camera_weight, stays_fp32
from flow_grpo.models.networks.wan_blocks import VideoToVideoWan

LINEAR, NORM, WHOLE = ("weight", "bias"), ("weight",), ("",)

# Rows: module in the original checkpoint, module in diffusers, names of its tensors.
OUTER = (
    ("patch_embedding", "patch_embedding", LINEAR),
    ("text_embedding.0", "condition_embedder.text_embedder.linear_1", LINEAR),
    ("text_embedding.2", "condition_embedder.text_embedder.linear_2", LINEAR),
    ("time_embedding.0", "condition_embedder.time_embedder.linear_1", LINEAR),
    ("time_embedding.2", "condition_embedder.time_embedder.linear_2", LINEAR),
    ("time_projection.1", "condition_embedder.time_proj", LINEAR),
    ("head.head", "proj_out", LINEAR),
    ("head.modulation", "scale_shift_table", WHOLE),
)
SELF_ATTENTION = (
    *((f"self_attn.{part}", f"attn1.to_{part}", LINEAR) for part in "qkv"),
    ("self_attn.o", "attn1.to_out.0", LINEAR),
    *((f"self_attn.norm_{part}", f"attn1.norm_{part}", NORM) for part in "qk"),
)
BLOCK = (
    *SELF_ATTENTION,
    *((f"cross_attn.{part}", f"attn2.to_{part}", LINEAR) for part in "qkv"),
    ("cross_attn.o", "attn2.to_out.0", LINEAR),
    *((f"cross_attn.norm_{part}", f"attn2.norm_{part}", NORM) for part in "qk"),
    # The original numbers norms in order of construction, diffusers in order of use; norms 1 and 2 have no weights.
    ("norm3", "norm2", LINEAR),
    ("ffn.0", "ffn.net.0.proj", LINEAR),
    ("ffn.2", "ffn.net.2", LINEAR),
    ("modulation", "scale_shift_table", WHOLE),
)
CAMERA = tuple((name, name, LINEAR) for name in ReCamTransformer3DModel.camera_modules)
FUN_OUTER = (
    ("img_emb.proj.0", "condition_embedder.image_embedder.norm1", LINEAR),
    ("img_emb.proj.1", "condition_embedder.image_embedder.ff.net.0.proj", LINEAR),
    ("img_emb.proj.3", "condition_embedder.image_embedder.ff.net.2", LINEAR),
    ("img_emb.proj.4", "condition_embedder.image_embedder.norm2", LINEAR),
    ("control_adapter.conv", "control_adapter.conv", LINEAR),
    ("control_adapter.residual_blocks.0.conv1", "control_adapter.conv1", LINEAR),
    ("control_adapter.residual_blocks.0.conv2", "control_adapter.conv2", LINEAR),
)
IMAGE_BLOCK = (
    ("cross_attn.k_img", "attn2.add_k_proj", LINEAR),
    ("cross_attn.v_img", "attn2.add_v_proj", LINEAR),
    ("cross_attn.norm_k_img", "attn2.norm_added_k", NORM),
)
PHASES = tuple((f"self_attn.rope_{name}.1", f"attn1.{name}", NORM) for name in PHASE_MODULES)

# Prefixes that trainers and wrappers add to every name; no name of Wan starts with one.
PREFIXES = ("module.", "model.", "diffusion_model.", "pipe.", "dit.", "transformer.", "_orig_mod.")

# A tensor and an axis that show each size of the configuration.
SIZES = (
    ("width (num_attention_heads * attention_head_dim)", "patch_embedding.weight", 0),
    ("in_channels", "patch_embedding.weight", 1),
    ("ffn_dim", "blocks.0.ffn.net.0.proj.weight", 0),
    ("text_dim", "condition_embedder.text_embedder.linear_1.weight", 1),
    ("freq_dim", "condition_embedder.time_embedder.linear_1.weight", 1),
    ("camera_dim", "blocks.0.cam_encoder.weight", 1),
    ("image_dim", "condition_embedder.image_embedder.norm1.weight", 0),
)


Rows = tuple[tuple[str, str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class Layout:
    """The tensors of a published checkpoint."""

    title: str  # its name in messages
    outer: Rows  # rows of the modules outside of the blocks
    block: Rows  # rows of one block
    advice: str = "give the whole transformer, nothing else"  # what to give instead of another checkpoint

    def names(self, depth: int) -> dict[str, str]:
        """Return original name -> diffusers name of all tensors of a network of so many blocks."""
        rows = list(self.outer)
        for block in range(depth):
            rows += [(f"blocks.{block}.{old}", f"blocks.{block}.{new}", leaves) for old, new, leaves in self.block]
        return {
            f"{old}.{leaf}".rstrip("."): f"{new}.{leaf}".rstrip(".") for old, new, leaves in rows for leaf in leaves
        }


WAN = Layout("base Wan 2.1 T2V", OUTER, BLOCK)  # 15 + 27 N tensors
RECAM = Layout("ReCamMaster 2.1 T2V", OUTER, (*BLOCK, *CAMERA))  # 15 + 31 N
FUN_CAMERA = Layout("Wan2.1-Fun-Control-Camera", (*OUTER, *FUN_OUTER), (*BLOCK, *IMAGE_BLOCK))  # 29 + 32 N
REDIRECTOR = Layout("ReDirector's whole transformer", FUN_CAMERA.outer, (*FUN_CAMERA.block, *PHASES))  # 29 + 34 N
REDIRECTOR_STEP = Layout(  # 12 N
    "ReDirector's stepN.safetensors", (), (*SELF_ATTENTION, *PHASES), "give the tensors of self-attention, nothing else"
)


@dataclass(frozen=True)
class Renaming:
    """How to convert one checkpoint to the other layout."""

    names: Mapping[str, str]  # new name -> name in the checkpoint, a bijection
    prefix: str  # common prefix of the checkpoint's names that is dropped, "" for none
    layout: Layout  # which checkpoint it is
    depth: int  # its number of blocks

    def apply(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint's tensors, not copied, under their new names."""
        return {new: state[old] for new, old in self.names.items()}


def text_to_video_layout(found: Iterable[str]) -> Layout:
    """Return ReCamMaster's layout if there are names of camera modules, in either layout, else base Wan's."""
    return RECAM if any(is_camera_weight(ReCamTransformer3DModel, name) for name in found) else WAN


def plan_renaming(found: Iterable[str], layout: Layout, *, back: bool = False) -> Renaming:
    """Match every name of a checkpoint with one of the model.

    Args:
        found: names in the original layout, or in diffusers' if `back`; all may start with the same of `PREFIXES`,
            one or several.
        layout: what it must be.
        back: convert from diffusers' layout to the original one.

    Raises:
        ValueError: there are missing or unexpected names; shows how many and the first of each.
    """
    given = list(found)
    shared = os.path.commonprefix(given)  # noqa: RUF071 - character by character is intended
    prefix = (re.match(f"({'|'.join(map(re.escape, PREFIXES))})*", shared) or [""])[0]
    bare = {name.removeprefix(prefix) for name in given}
    blocks = [int(match[1]) for name in bare if (match := re.match(r"blocks\.(\d{1,9})\.", name))]
    # A block number above the number of tensors is an unexpected name; it must not size the table.
    depth = max((number for number in blocks if number < len(given)), default=0) + 1
    table = layout.names(depth)
    if back:
        table = {new: old for old, new in table.items()}
    missing, unexpected = [name for name in table if name not in bare], sorted(bare - table.keys())
    if missing or unexpected:
        kind, other = ("diffusers", "the original") if back else ("the original", "diffusers")
        raise ValueError(
            f"checkpoint is not {layout.title} in {kind} layout: of {len(table)} tensors for {depth} blocks it lacks "
            f"{summarize(missing)}, and has unexpected {summarize(unexpected)}, after dropping the prefix {prefix!r}; "
            f"{layout.advice}, and in {kind} rather than {other} layout"
        )
    return Renaming({new: prefix + old for old, new in table.items()}, prefix, layout, depth)


def recam_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a Wan config.json, original or diffusers', as ReCam's arguments; ValueError if it is of another model."""
    kind = found.get("_class_name")
    if kind == "WanModel":
        return _from_original(found)
    if kind not in ("WanTransformer3DModel", ReCamTransformer3DModel.__name__):
        raise ValueError(f"configuration of {kind}, expected WanTransformer3DModel: give Wan2.1-T2V-1.3B-Diffusers")
    return {"camera_dim": 12} | model_fields(found, ReCamTransformer3DModel, "give Wan2.1-T2V-1.3B-Diffusers")


def model_fields(found: Mapping[str, Any], kind: type[VideoToVideoWan], advice: str) -> dict[str, Any]:
    """Return a config.json's arguments of the model's class; ValueError with the advice if it has others."""
    fields = {name: value for name, value in found.items() if not name.startswith("_")}
    unknown = sorted(fields.keys() - inspect.signature(kind).parameters.keys())
    if unknown:
        raise ValueError(f"configuration has unknown {summarize(unknown)}: {advice}")
    return fields


def _from_original(found: Mapping[str, Any]) -> dict[str, Any]:
    # The original lacks text width and patch size, which are the same in all of Wan 2.1.
    wanted = ("dim", "num_heads", "in_dim", "out_dim", "freq_dim", "ffn_dim", "num_layers", "eps")
    absent = [name for name in wanted if name not in found]
    if found.get("model_type") != "t2v" or absent:
        raise ValueError(
            f"original Wan configuration has model_type {found.get('model_type')!r}, expected 't2v', and lacks "
            f"{summarize(absent)}: give the folder of Wan2.1-T2V-1.3B"
        )
    if found["num_heads"] < 1 or found["dim"] % found["num_heads"]:
        raise ValueError(
            f"dim is {found['dim']}, expected a multiple of num_heads {found['num_heads']}: damaged config"
        )
    return {
        "num_attention_heads": found["num_heads"],
        "attention_head_dim": found["dim"] // found["num_heads"],
        "in_channels": found["in_dim"],
        "out_channels": found["out_dim"],
        "camera_dim": 12,
    } | {name: found[name] for name in ("freq_dim", "ffn_dim", "num_layers", "eps")}


def with_step(base: Mapping[str, Tensor], step: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Renaming, Renaming]:
    """Return ReDirector's whole transformer under diffusers names, and how base and step were renamed.

    The base is Wan2.1-Fun-Control-Camera; `stepN.safetensors` replaces self-attention and brings the phases. ValueError
    if one of them is another checkpoint, or they differ in depth.
    """
    below, above = plan_renaming(base, FUN_CAMERA), plan_renaming(step, REDIRECTOR_STEP)
    if below.depth != above.depth:
        raise ValueError(
            f"the step has self-attention of {above.depth} blocks, the base {below.depth} blocks: give whole files of "
            "one model"
        )
    return below.apply(base) | above.apply(step), below, above


def redirector_config(found: Mapping[str, Any], state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of `ReDirectorTransformer3DModel` for a Wan2.1-Fun-Control-Camera.

    Args:
        found: its original config.json, which tells the number of heads and eps; what else it says must be so.
        state: its tensors under their diffusers names, which tell the sizes.

    Raises:
        ValueError: the number of heads is missing or does not divide the width, or another size differs.
    """
    advice = "give the folder of Wan2.1-Fun-V1.1-1.3B-Control-Camera"
    heads, width = found.get("num_heads"), state["patch_embedding.bias"].numel()
    if type(heads) is not int or heads < 1 or width % heads:
        raise ValueError(f"config.json has num_heads {heads!r}, expected a divisor of the width {width}: {advice}")
    # A tensor without that axis is refused by `check_shapes`.
    sizes = {name: (*state[tensor].shape[axis:], 1)[0] for name, tensor, axis in SIZES[1:] if tensor in state}
    expected = sizes | {"in_dim": sizes["in_channels"], "in_dim_control_adapter": 24}
    for name, value in (expected | {"downscale_factor_control_adapter": 8}).items():
        if found.get(name, value) != value:
            raise ValueError(f"config.json has {name} {found[name]!r}, the tensors {value}: {advice}")
    return sizes | {
        "num_attention_heads": heads,
        "attention_head_dim": width // heads,
        "out_channels": state["proj_out.bias"].numel() // 4,  # patches of 1x2x2 in all of Wan 2.1
        "num_layers": len({name.split(".")[1] for name in state if name.startswith("blocks.")}),
        "eps": found.get("eps", 1e-6),
    }


def empty_model(config: Mapping[str, Any], kind: type[VideoToVideoWan] = ReCamTransformer3DModel) -> VideoToVideoWan:
    """Return the model on the meta device, without memory for its weights."""
    with torch.device("meta"):
        model: VideoToVideoWan = kind(**config)
    return model


def add_neutral_camera(state: dict[str, Tensor], model: VideoToVideoWan) -> None:
    """Add camera modules without effect to base Wan's tensors, in place: zero `cam_encoder`, identity `projector`.

    They have the dtype of the attention's output projection; all blocks share the same memory.
    """
    dtype = state["blocks.0.attn1.to_out.0.weight"].dtype
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    identity = torch.eye(*shapes["blocks.0.projector.weight"], dtype=dtype)
    zero = torch.zeros((), dtype=dtype)
    for name in shapes.keys() - state.keys():
        state[name] = identity if name.endswith("projector.weight") else zero.expand(shapes[name])


def check_shapes(state: Mapping[str, Tensor], model: VideoToVideoWan) -> None:
    """Raise ValueError unless depth, names and shapes of a state dict in diffusers names are those of the model.

    The number of heads shows in no tensor, only its product with the head width does.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    advice = "give the Wan folder the checkpoint was trained from"
    depth = len({name.split(".")[1] for name in found if name.startswith("blocks.")})
    if depth != model.config["num_layers"]:
        raise ValueError(f"checkpoint has {depth} blocks, the configuration {model.config['num_layers']}: {advice}")
    if found.keys() != expected.keys():
        differing = sorted(found.keys() ^ expected.keys())
        raise ValueError(f"checkpoint and configuration disagree on {summarize(differing)}: {advice}")
    for what, name, axis in (row for row in SIZES if row[1] in expected):
        got, bound = found[name][axis : axis + 1], expected[name][axis : axis + 1]
        if got != bound:
            raise ValueError(f"checkpoint has {what} {[*got]}, the configuration {[*bound]}, by {name}: {advice}")
    wrong = [f"{name} {found[name]} instead of {expected[name]}" for name in expected if found[name] != expected[name]]
    if wrong:
        raise ValueError(f"checkpoint has tensors of another shape: {summarize(wrong)}; {advice}")


def target_dtypes(
    state: Mapping[str, Tensor], dtype: torch.dtype | None, *, keep_fp32: bool = True
) -> dict[str, torch.dtype]:
    """Return the dtype to store each tensor in: its own if `dtype` is None, else `dtype`.

    With `keep_fp32`, the weights that diffusers keeps in fp32 (`stays_fp32`) are stored in fp32.
    """
    if dtype is None:
        return {name: value.dtype for name, value in state.items()}
    return {name: torch.float32 if keep_fp32 and stays_fp32(name) else dtype for name in state}
