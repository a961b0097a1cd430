"""ReCamMaster's tensor names and diffusers', one table for both directions; what must fit.

`step20000.ckpt` of KwaiVGI/ReCamMaster is `torch.save(dit.state_dict())`: the names of Wan 2.1 T2V's own code, and two
camera modules per block. Conversion renames tensors and changes nothing in them. N is the number of blocks.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flow_grpo.models.recam_transformer import CAMERA_MODULES, ReCamTransformer3DModel
from flow_grpo.models.weight_files import few

Value = TypeVar("Value")

LINEAR, NORM, WHOLE = ("weight", "bias"), ("weight",), ("",)

# Rows: name in the checkpoint, name in diffusers, the tensors below it.
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
BLOCK = (
    *((f"self_attn.{part}", f"attn1.to_{part}", LINEAR) for part in "qkv"),
    ("self_attn.o", "attn1.to_out.0", LINEAR),
    *((f"self_attn.norm_{part}", f"attn1.norm_{part}", NORM) for part in "qk"),
    *((f"cross_attn.{part}", f"attn2.to_{part}", LINEAR) for part in "qkv"),
    ("cross_attn.o", "attn2.to_out.0", LINEAR),
    *((f"cross_attn.norm_{part}", f"attn2.norm_{part}", NORM) for part in "qk"),
    # The checkpoint counts norms in order of construction, diffusers in order of use; the other two have no weights.
    ("norm3", "norm2", LINEAR),
    ("ffn.0", "ffn.net.0.proj", LINEAR),
    ("ffn.2", "ffn.net.2", LINEAR),
    ("modulation", "scale_shift_table", WHOLE),
)
CAMERA = tuple((name, name, LINEAR) for name in CAMERA_MODULES)

# What trainers and wrappers put before every name; none of Wan's own names begins so.
PREFIXES = ("module.", "model.", "diffusion_model.", "pipe.", "dit.", "transformer.", "_orig_mod.")

# Where each size of the configuration shows: (what, tensor, axis).
SIZES = (
    ("width (num_attention_heads * attention_head_dim)", "patch_embedding.weight", 0),
    ("in_channels", "patch_embedding.weight", 1),
    ("ffn_dim", "blocks.0.ffn.net.0.proj.weight", 0),
    ("text_dim", "condition_embedder.text_embedder.linear_1.weight", 1),
    ("freq_dim", "condition_embedder.time_embedder.linear_1.weight", 1),
    ("camera_dim", "blocks.0.cam_encoder.weight", 1),
)


@dataclass(frozen=True)
class Renaming:
    """How the names of one checkpoint become those of the other layout.

    Attributes:
        found: new name -> name in the checkpoint, every name of both exactly once.
        prefix: what stood before all of the checkpoint's names, "" for nothing; dropped.
        depth: N, the number of blocks.
        camera: whether the camera modules are there; without them it is base Wan.
    """

    found: Mapping[str, str]
    prefix: str
    depth: int
    camera: bool


def tensor_names(depth: int, *, camera: bool) -> dict[str, str]:
    """Return original name -> diffusers name of every tensor: 15 + 27 N, and 4 N of the camera."""
    rows: list[tuple[str, str, tuple[str, ...]]] = list(OUTER)
    for block in range(depth):
        rows += [(f"blocks.{block}.{old}", f"blocks.{block}.{new}", leaves) for old, new, leaves in BLOCK]
        rows += [(f"blocks.{block}.{old}", f"blocks.{block}.{new}", leaves) for old, new, leaves in CAMERA if camera]
    return {_join(old, leaf): _join(new, leaf) for old, new, leaves in rows for leaf in leaves}


def renaming(found: Iterable[str], *, back: bool = False) -> Renaming:
    """Account for every name of a checkpoint.

    Args:
        found: names of the original layout, or of diffusers' when `back`; a common prefix of `PREFIXES` may stand
            before all of them.
        back: from diffusers' layout to the original one.

    Raises:
        ValueError: names that are missing or unexpected, the first few of each and how many.
    """
    given = list(found)
    prefix = _common_prefix(given)
    bare = {name.removeprefix(prefix) for name in given}
    blocks = [int(match[1]) for name in bare if (match := re.match(r"blocks\.(\d{1,9})\.", name))]
    # A number beyond the number of tensors is no block but an unexpected name.
    depth = max((number for number in blocks if number < len(given)), default=0) + 1
    camera = any(part in CAMERA_MODULES for name in bare for part in name.split("."))
    table = tensor_names(depth, camera=camera)
    if back:
        table = {new: old for old, new in table.items()}
    missing, unexpected = [name for name in table if name not in bare], sorted(bare - table.keys())
    if missing or unexpected:
        kind = "ReCamMaster" if camera else "base Wan"
        layout, other = ("diffusers", "the original") if back else ("the original", "diffusers")
        raise ValueError(
            f"checkpoint is not {kind} 2.1 T2V in {layout} layout: of {len(table)} tensors for {depth} blocks it lacks "
            f"{few(missing)}, and has unexpected {few(unexpected)}, after dropping the prefix {prefix!r}; give the "
            f"whole transformer, nothing else, and in {layout} rather than {other} layout"
        )
    return Renaming({new: prefix + old for old, new in table.items()}, prefix, depth, camera)


def to_diffusers(state: Mapping[str, Value]) -> dict[str, Value]:
    """Return the checkpoint's values, the same objects, under diffusers' names; ValueError as in `renaming`."""
    return {new: state[old] for new, old in renaming(state).found.items()}


def to_original(state: Mapping[str, Value]) -> dict[str, Value]:
    """Return a diffusers state's values, the same objects, under ReCamMaster's names; ValueError as in `renaming`."""
    return {new: state[old] for new, old in renaming(state, back=True).found.items()}


def _join(stem: str, leaf: str) -> str:
    return f"{stem}.{leaf}" if leaf else stem


def _common_prefix(given: list[str]) -> str:
    prefix = ""
    while given:
        longer = [prefix + part for part in PREFIXES if all(name.startswith(prefix + part) for name in given)]
        if not longer:
            break
        prefix = longer[0]
    return prefix


def recam_config(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `ReCamTransformer3DModel` for a Wan transformer's config.json, original or diffusers'.

    Raises:
        ValueError: the configuration of another model, or of a Wan that ReCam does not extend.
    """
    kind = found.get("_class_name")
    if kind == "WanModel":
        return _from_original(found)
    if kind not in ("WanTransformer3DModel", ReCamTransformer3DModel.__name__):
        raise ValueError(f"configuration of {kind}, expected WanTransformer3DModel: give Wan2.1-T2V-1.3B-Diffusers")
    fields = {"camera_dim": 12} | {name: value for name, value in found.items() if not name.startswith("_")}
    unknown = sorted(fields.keys() - inspect.signature(ReCamTransformer3DModel).parameters.keys())
    if unknown:
        raise ValueError(f"configuration has unknown {few(unknown)}: give Wan2.1-T2V-1.3B-Diffusers")
    return fields


def _from_original(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the original config.json; text width and patch are not written there and the same in all of Wan 2.1."""
    wanted = ("dim", "num_heads", "in_dim", "out_dim", "freq_dim", "ffn_dim", "num_layers", "eps")
    absent = [name for name in wanted if name not in found]
    if found.get("model_type") != "t2v" or absent:
        raise ValueError(
            f"original Wan configuration has model_type {found.get('model_type')!r}, expected 't2v', and lacks "
            f"{few(absent)}: give the folder of Wan2.1-T2V-1.3B"
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


def empty_model(config: Mapping[str, Any]) -> ReCamTransformer3DModel:
    """Return the model of a configuration without memory for its weights."""
    with torch.device("meta"):
        model: ReCamTransformer3DModel = ReCamTransformer3DModel(**config)
    return model


def add_neutral_camera(state: dict[str, Tensor], model: ReCamTransformer3DModel) -> None:
    """Add to base Wan's tensors camera modules that change nothing: cam_encoder zero, projector the identity.

    All blocks share the memory of each. Every one has its model's shape, and the dtype of the output projection.
    """
    dtype = state["blocks.0.attn1.to_out.0.weight"].dtype
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    width = math.prod(shapes["blocks.0.projector.bias"])
    identity = torch.eye(width, dtype=dtype)
    zero = torch.zeros((), dtype=dtype)
    for name in shapes.keys() - state.keys():
        state[name] = identity if name.endswith("projector.weight") else zero.expand(shapes[name])


def check_shapes(state: Mapping[str, Tensor], model: ReCamTransformer3DModel) -> None:
    """Compare depth, sizes and then every tensor, diffusers names, with the model of the configuration.

    The number of heads does not show in any tensor: only its product with their width does.

    Raises:
        ValueError: what differs, most general first.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in state.items()}
    advice = "give the Wan folder the checkpoint was trained from"
    depth = len({name.split(".")[1] for name in found if name.startswith("blocks.")})
    if depth != model.config["num_layers"]:
        raise ValueError(f"checkpoint has {depth} blocks, the configuration {model.config['num_layers']}: {advice}")
    for what, name, axis in SIZES:
        got, bound = found[name][axis : axis + 1], expected[name][axis : axis + 1]
        if got != bound:
            raise ValueError(f"checkpoint has {what} {[*got]}, the configuration {[*bound]}, by {name}: {advice}")
    if found.keys() != expected.keys():
        odd = few(sorted(found.keys() ^ expected.keys()))
        raise ValueError(f"checkpoint and configuration disagree on {odd}: {advice}")
    wrong = [f"{name} {found[name]} instead of {expected[name]}" for name in expected if found[name] != expected[name]]
    if wrong:
        raise ValueError(f"checkpoint has tensors of another shape: {few(wrong)}; {advice}")
