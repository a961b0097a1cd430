"""Read low-rank adapters, of this project and of others, and start a training from one."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.loaders.lora_pipeline import WanLoraLoaderMixin
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor

from flow_grpo.models.files.model_files import WAY_OUT, read_tensors

LORA_FILE = "pytorch_lora_weights.safetensors"  # diffusers' name; adapters on modules that base Wan has
CAMERA_FILE = "camera_modules.safetensors"  # trained weights of the modules that plain Wan does not have
CAMERA_COUNT = "camera_tensors"  # metadata key in both files: number of tensors in CAMERA_FILE
PREFIX = "transformer."  # of names and settings in LORA_FILE, as diffusers' pipelines write and read them
_WAN = ("diffusion_model.", "lora_unet_")  # names of Wan's own code: ComfyUI and Kijai, musubi and kohya
_log = logging.getLogger(__name__)


def lora_file(path: Path) -> Path:
    """Return the adapter's file, which `path` is or holds."""
    return path if path.suffix == ".safetensors" else path / LORA_FILE


def read_lora(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors of an adapter by peft's names, camera modules included, and its LoRA settings.

    `path` is a folder with `LORA_FILE` or a .safetensors file, with the names of peft, of diffusers' pipelines, or of
    Wan's own code, whose alpha is multiplied in. Settings are {} where others store none, for a scale of 1.

    Raises:
        ValueError: a file is missing or damaged, holds no tensor or names that are not understood, or a folder of
            this project lacks its scale.
    """
    file, camera_file = lora_file(path), path / CAMERA_FILE
    found, header = read_tensors(file)
    try:
        settings = json.loads(header.get(LORA_ADAPTER_METADATA_KEY, "{}"))
        settings = {name.removeprefix(PREFIX): value for name, value in settings.items()}
        LoraConfig(**settings)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"adapter {path}: its settings in {file.name} cannot be read ({error}); {WAY_OUT}") from None
    stored = _renamed(found, path)
    camera = read_tensors(camera_file)[0] if camera_file.is_file() else {}
    if (count := header.get(CAMERA_COUNT, str(len(camera)))) != str(len(camera)):
        raise ValueError(f"adapter {path} lacks {CAMERA_FILE} with {count!r:.40} tensors; copy the whole folder")
    stored |= camera
    if not stored:
        raise ValueError(f"adapter {path} holds no tensor, it would change nothing; save or copy it again")
    if "lora_alpha" not in settings:
        if CAMERA_COUNT in header:
            raise ValueError(
                f"adapter {path} lacks lora_alpha, which scales it, in {file.name}'s header; save it again"
            )
        if not any(name.endswith(".alpha") for name in found):
            _log.warning("adapter %s names no alpha: its scale is taken to be 1, as diffusers does", path)
    return stored, settings


def _renamed(stored: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    # DiffSynth writes peft's names with the adapter's, around those of Wan's own code.
    names = {re.sub(r"(\.lora_[AB])\.default\.", r"\1.", name): tensor for name, tensor in stored.items()}
    if not any(name.startswith(_WAN) for name in names) and any(re.search(r"\.(self|cross)_attn\.", n) for n in names):
        names = {_WAN[0] + re.sub(r"^(pipe\.)?dit\.", "", name): tensor for name, tensor in names.items()}
    if any(name.startswith(_WAN) for name in names):
        try:
            names = WanLoraLoaderMixin.lora_state_dict(names)
        except (ValueError, KeyError, AttributeError, IndexError) as error:
            text = f"adapter {path} has names such as {next(iter(stored))!r:.99}, which diffusers cannot read as Wan's"
            raise ValueError(f"{text} ({type(error).__name__}: {error}); save it with those of diffusers") from error
    return {name.removeprefix(PREFIX): tensor for name, tensor in names.items()}


def start_from(transformer: Any, path: Path) -> None:
    """Give the adapters of a transformer, which are to be trained, the weights of another training's.

    The effect is that of the file's own scale. ValueError as `read_lora`, or if it has adapters on other modules, of
    another rank, or scaled one by one.
    """
    stored, settings = read_lora(path)
    config = transformer.peft_config["default"]
    wanted = get_peft_model_state_dict(transformer, adapter_name="default")
    wrong = sorted(wanted.keys() ^ stored.keys()) or [n for n in wanted if wanted[n].shape != stored[n].shape]
    ranks = sorted({tensor.shape[0] for name, tensor in stored.items() if name.endswith(".lora_A.weight")})
    if wrong or settings.get("alpha_pattern"):
        text = f"has {len(stored)} tensors and rank {', '.join(map(str, ranks))}, to be trained are {len(wanted)}"
        text += f" of rank {config.r}" + (f"; {wrong[0]} differs" if wrong else ", and scales of single modules")
        raise ValueError(
            f"model.adapter {path} {text}; set model.lora_rank, lora_targets and lora_full_modules as it was trained"
        )
    rank = settings.get("r", config.r)
    scale = settings.get("lora_alpha", rank) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    scale *= config.r / config.lora_alpha
    stored = {name: scale * tensor if ".lora_B." in name else tensor for name, tensor in stored.items()}
    set_peft_model_state_dict(transformer, stored, adapter_name="default")
