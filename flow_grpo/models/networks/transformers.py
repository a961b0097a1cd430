"""Load the transformer of a model folder, and tell its weights apart.

A transformer that adds camera modules to Wan names them in its class attribute `camera_modules`, and in `variant` the
diffusers variant under which it is exported.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn

from flow_grpo.models.files.model_files import check_component, check_finite

TransformerType = TypeVar("TransformerType", bound=WanTransformer3DModel)
# `model.boundary_ratio` in an export's metadata or config.json, of which diffusers takes other names for arguments.
BOUNDARY = "_boundary_ratio"


def camera_modules(network: nn.Module | type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the modules that read the camera and that plain Wan does not have."""
    names: tuple[str, ...] = getattr(network, "camera_modules", ())
    return names


def is_camera_weight(network: nn.Module | type[nn.Module], name: str) -> bool:
    """Return whether a weight of the network belongs to its camera modules."""
    return not set(camera_modules(network)).isdisjoint(name.split("."))


def stays_fp32(name: str) -> bool:
    """Return whether diffusers keeps a weight of Wan in fp32 when the model is loaded in half precision.

    As in diffusers, `_keep_in_fp32_modules` match whole dotted components of the name.
    """
    return not set(WanTransformer3DModel._keep_in_fp32_modules or ()).isdisjoint(name.split("."))


def load_transformer(
    network: type[TransformerType], folder: str | Path, dtype: torch.dtype = torch.float32
) -> TransformerType:
    """Load a transformer folder in diffusers layout in `dtype`, except the weights of `stays_fp32`.

    Raises:
        ValueError: a file is missing or damaged, the folder holds another model, or weights and configuration do not
            match. diffusers itself would load another Wan with a warning and leave tensors on the meta device.
    """
    found = check_component(Path(folder)).get("_class_name")
    if found != network.__name__:
        raise ValueError(
            f"checkpoint of another model: {folder} holds {found}, expected {network.__name__}; convert the model's "
            "checkpoint first, or set the kind that it is of (model.kind, --kind)"
        )
    model: TransformerType | None = None
    from_pretrained: Any = network.from_pretrained  # its type knows nothing of the loading info
    try:
        model, info = from_pretrained(str(folder), torch_dtype=dtype, use_safetensors=True, output_loading_info=True)
        wrong = sorted({*info["missing_keys"], *info["unexpected_keys"]})
        problem = f"{len(wrong)} missing or unexpected tensors such as {wrong[0]}" if wrong else ""
    except (ValueError, RuntimeError, TypeError, OSError) as error:
        problem = " ".join(str(error).partition(". If you want")[0].split())[:300]
    if model is None or problem:
        raise ValueError(f"{folder}: the weights are not those of config.json ({problem}); download it again")
    check_finite(dict(model.named_parameters()), Path(folder))
    model.eval()
    return model
