"""What was trained, in files that load here and, where it lies on Wan's own modules, in plain diffusers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from huggingface_hub import split_torch_state_dict_into_shards
from peft import get_peft_model_state_dict
from safetensors.torch import save_file
from torch import Tensor, nn

from flow_grpo.models.adapters import has_lora, trained_parameters
from flow_grpo.models.policy import Policy
from flow_grpo.models.recam_transformer import CAMERA_MODULES, ReCamTransformer3DModel, load_recam_transformer
from flow_grpo.models.weight_files import WEIGHTS_FILE, read_tensors
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.runtime.ranks.sharding import is_sharded, unwrap, whole

LORA_FILE = "pytorch_lora_weights.safetensors"  # low-rank factors of Wan's own modules
CAMERA_FILE = "camera_modules.safetensors"  # what was trained of the modules that only ReCam has
FILE_SIZE = "2GB"  # of a sharded transformer, the largest file
CAMERA_COUNT = "camera_tensors"  # in the header of both: how many tensors the second holds


def save_adapter(policy: Policy, folder: str | Path, ranks: Ranks | None = None) -> None:
    """Write what was trained in diffusers format: LoRA files, or without LoRA the whole transformer.

    The first LoRA file loads in plain diffusers: `load_lora_adapter(folder, prefix=None, weight_name=LORA_FILE)` of a
    Wan transformer. What lies on the camera modules, which that has not, stands in the second. Of a sharded transformer
    no rank gathers more than the adapters, or than one file of `FILE_SIZE`.

    Args:
        policy: whose module is saved.
        folder: made if it is missing.
        ranks: who takes part, rank 0 writes and every rank must call it; None writes from this process alone.

    Raises:
        RuntimeError: on every rank, when rank 0 cannot write.
    """
    assert ranks is not None or not is_sharded(policy.module), "every rank holds a part: all must be told to save"
    ranks, network, folder = ranks or Ranks(), unwrap(policy.module), Path(folder)
    with ranks.sync_errors("saving the adapter (folder)"):
        if ranks.is_main:
            folder.mkdir(parents=True, exist_ok=True)
    if has_lora(network):
        trained = _gathered(trained_parameters(network), ranks)
        with ranks.sync_errors("saving the adapter"):
            if ranks.is_main:
                _write_lora(network, trained, folder)
    elif is_sharded(network):
        _write_in_files(network, folder, ranks)
    else:
        with ranks.sync_errors("saving the transformer"):
            if ranks.is_main:
                network.save_pretrained(str(folder))  # type: ignore[operator]


def _gathered(parts: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Return whole tensors on the CPU of rank 0, which writes them; elsewhere none is kept."""
    gathered = {}
    for name, part in parts.items():
        tensor = whole(part)  # every rank takes part in putting it together
        if ranks.is_main:
            gathered[name] = tensor.cpu()
    return gathered


def _write_lora(network: Any, trained: dict[str, Tensor], folder: Path) -> None:
    """Write adapters as `save_lora_adapter` of diffusers does, but for the camera modules in a file of their own."""
    tensors = get_peft_model_state_dict(network, state_dict=trained, adapter_name="default")
    settings = {
        name: sorted(value) if isinstance(value, set) else value
        for name, value in network.peft_config["default"].to_dict().items()
    }
    camera = {name for name in tensors if set(name.split(".")) & set(CAMERA_MODULES)}
    header = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(settings, indent=2, sort_keys=True)}
    header |= {CAMERA_COUNT: str(len(camera))}
    for file, names in ((CAMERA_FILE, camera), (LORA_FILE, tensors.keys() - camera)):
        save_file({name: tensors[name].contiguous() for name in sorted(names)}, folder / file, header)


def _write_in_files(network: Any, folder: Path, ranks: Ranks) -> None:
    """Write a sharded transformer as `save_pretrained` of diffusers does, gathering one file after the other."""
    state = network.state_dict()
    outline = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    plan = split_torch_state_dict_into_shards(
        outline, filename_pattern=f"{stem}{{suffix}}.safetensors", max_shard_size=FILE_SIZE
    )
    for file, names in plan.filename_to_tensors.items():
        gathered = _gathered({name: state[name] for name in names}, ranks)
        with ranks.sync_errors(f"saving {file}"):
            if ranks.is_main:
                save_file(gathered, folder / file, {"format": "pt"})
    with ranks.sync_errors("saving the transformer"):
        if ranks.is_main:
            # Sharding has put the network into a class of another name.
            config = json.loads(network.to_json_string()) | {"_class_name": ReCamTransformer3DModel.__name__}
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
            if plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                (folder / f"{WEIGHTS_FILE}.index.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def load_adapter(
    transformer: ReCamTransformer3DModel, folder: str | Path, dtype: torch.dtype = torch.float32
) -> ReCamTransformer3DModel:
    """Return the transformer with what `save_adapter` wrote: adapters added in place, or a whole other transformer.

    A whole one is loaded in `dtype`. Adapters of one file, as they were written before camera modules had their own,
    load too.

    Raises:
        ValueError: the folder holds neither, a file is missing or torn, or a LoRA tensor found no place in this
            transformer.
    """
    file, camera_file = Path(folder) / LORA_FILE, Path(folder) / CAMERA_FILE
    if not file.is_file():
        return load_recam_transformer(folder, dtype)
    stored, header = read_tensors(file)
    if camera_file.is_file():
        stored |= read_tensors(camera_file)[0]
    elif (count := header.get(CAMERA_COUNT, "0")) != "0":
        raise ValueError(f"adapter {folder} lacks {CAMERA_FILE} with {count} tensors; copy the whole folder")
    placed = [name for name, tensor in stored.items() if _has_place(transformer, name, tensor)]
    if len(placed) == len(stored):
        metadata = json.loads(header[LORA_ADAPTER_METADATA_KEY]) if LORA_ADAPTER_METADATA_KEY in header else None
        # Without prefix=None diffusers loads nothing.
        transformer.load_lora_adapter(dict(stored), prefix=None, metadata=metadata)
        placed = [n for n, _ in transformer.named_parameters() if ".lora_" in n or ".modules_to_save." in n]
    if len(placed) != len(stored):
        raise ValueError(
            f"adapter of another model: {folder} holds {len(stored)} tensors, this transformer has places for "
            f"{len(placed)}; use the transformer it was trained on"
        )
    return transformer.eval()


def _has_place(transformer: nn.Module, name: str, tensor: Tensor) -> bool:
    """Tell whether a stored tensor fits: a low-rank factor to the weight it adapts, any other to its parameter."""
    module, _, leaf = re.sub(r"\.lora_[AB](?=\.weight$)", "", name).rpartition(".")
    try:
        shape = getattr(transformer.get_submodule(module), leaf).shape
    except AttributeError:
        return False
    if name.endswith(".lora_A.weight"):
        return bool(tensor.shape[1:] == shape[1:])
    return bool(tensor.shape[0] == shape[0] if name.endswith(".lora_B.weight") else tensor.shape == shape)
