"""Save and load the trained weights; adapters on Wan's own modules also load in plain diffusers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.models.modeling_utils import ModelMixin
from huggingface_hub import split_torch_state_dict_into_shards
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file
from torch import Tensor, nn

from flow_grpo.models.adapters import has_lora, trained_parameters
from flow_grpo.models.files.lora_files import CAMERA_COUNT, CAMERA_FILE, LORA_FILE, PREFIX, lora_file, read_lora
from flow_grpo.models.files.model_files import WAY_OUT, WEIGHTS_FILE, read_tensors, summarize
from flow_grpo.models.networks.transformers import (
    BOUNDARY,
    TransformerType,
    camera_modules,
    is_camera_weight,
    load_transformer,
)
from flow_grpo.models.policy import Policy
from flow_grpo.models.wan_policy import Networks, WanPolicy
from flow_grpo.records import Guidance
from flow_grpo.runtime.atomic_file import replace_folder, temporary_path
from flow_grpo.runtime.device import DTYPES
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import is_sharded, unwrap, whole
from flow_grpo.settings.schema import ModelConfig

FILE_SIZE = "2GB"  # largest file of a transformer whose parameters are sharded
CARD = "README.md"
# Filled in with the transformer's class `kind` in `module`, its camera modules and its variant.
LORA_CARD = f"""---
library_name: diffusers
tags: [video-to-video, camera-control, lora]
---
An adapter trained with GRPO on a camera-controlled video-to-video model ({{kind}} on Wan2.1).

- `{LORA_FILE}`: adapters on modules that base Wan has. Plain diffusers loads them, **without camera control**:
  `pipeline.load_lora_weights(folder)`
- `{CAMERA_FILE}`: the trained camera modules ({{modules}}), which only this project's model has:

      from flow_grpo.models.files.adapter_files import load_adapter
      from {{module}} import {{kind}}
      transformer = load_adapter({{kind}}.from_pretrained("MODEL/transformer"), "THIS FOLDER")

or `python tools/generate.py --run RUN --adapter FOLDER --source VIDEO --camera arc_left`, which films as the run did.
With `--model MODEL` in place of `--run RUN` size, steps, shift, guidance and negative prompt are ReCamMaster's: pass
those of the run.
"""
TRANSFORMER_CARD = """---
library_name: diffusers
tags: [video-to-video, camera-control]
---
A whole transformer, trained with GRPO: {kind} on Wan2.1, with camera modules ({modules}) that plain
diffusers' Wan does not have. Its weights are the variant `{variant}`, so that `WanTransformer3DModel.from_pretrained`
refuses the folder instead of loading it without camera control. Load it with this project's class:

    from {module} import {kind}
    transformer = {kind}.from_pretrained("THIS FOLDER")

or `python tools/generate.py --run RUN --adapter FOLDER --source VIDEO --camera arc_left`, which films as the run did.
With `--model MODEL` in place of `--run RUN` size, steps, shift, guidance and negative prompt are ReCamMaster's: pass
those of the run.
"""
PLAIN_CARD = f"""---
library_name: diffusers
---
A {{kind}} trained with GRPO. Plain diffusers loads adapters (`{LORA_FILE}`) with
`pipeline.load_lora_weights(folder)` and a whole transformer with `{{kind}}.from_pretrained(folder)`.
"""
OWN_CARD = f"""The weights of a {{kind}} trained with GRPO, its state dict in `{WEIGHTS_FILE}`:

    network.load_state_dict(safetensors.torch.load_file("{WEIGHTS_FILE}"))
"""
BOUNDARY_CARD = """
Below noise level {boundary:g} the weights before training must answer, as in training and by this project's tools
(`model.boundary_ratio`); plain diffusers cannot hold that rule for an adapter, which answers there at every level.
"""


def _card(network: Any, boundary: float) -> str:
    kind = _class_of(network)
    modules = ", ".join(camera_modules(network))
    if not isinstance(network, ModelMixin):
        card = OWN_CARD
    else:
        card = PLAIN_CARD if not modules else LORA_CARD if has_lora(network) else TRANSFORMER_CARD
    card += BOUNDARY_CARD if boundary else ""
    named = {"kind": kind.__name__, "module": kind.__module__, "modules": modules}
    return card.format(boundary=boundary, variant=getattr(network, "variant", None), **named)


def _class_of(network: Any) -> type:
    """Return the network's class; FSDP replaces it by a class of another name that inherits from it."""
    return next(kind for kind in type(network).__mro__ if not kind.__name__.startswith("FSDP"))


def save_adapter(policy: Policy, folder: str | Path, world: World | None = None) -> None:
    """Write the trained weights in diffusers format: the LoRA files, or without LoRA the whole transformer; and a card.

    Of a network that is not diffusers' the state dict is written.

    `LORA_FILE` loads into diffusers' Wan pipelines with `load_lora_weights(folder)`; weights of the camera modules,
    which their model lacks, are in `CAMERA_FILE`. A transformer's weights are a variant, which plain diffusers does
    not load by mistake. If parameters are sharded, at most the adapters or one file of `FILE_SIZE` are gathered at a
    time.

    Args:
        policy: whose module is saved, and its `boundary_ratio`.
        folder: appears whole or not at all; one of that name is replaced with all it holds.
        world: collective call, rank 0 writes; None writes from this process without a collective.

    Raises:
        RuntimeError: on every rank, if rank 0 cannot write.
    """
    assert world is not None or not is_sharded(policy.module), "parameters are sharded: every rank must save"
    world, partial = world or World(), Path(folder)
    network: Any = unwrap(policy.module)
    boundary: float = getattr(policy, "boundary_ratio", 0.0)
    lora, own = has_lora(network), not isinstance(network, ModelMixin)  # own: of a policy of the user's own
    if boundary and not (lora or own):
        network.register_to_config(**{BOUNDARY: boundary})
    in_files = is_sharded(network) and not (lora or own)
    with contextlib.ExitStack() as stack:
        with world.sync_errors("saving the adapter (folder)"):
            if world.is_main:
                partial = stack.enter_context(temporary_path(Path(folder)))
                partial.mkdir()
        state: dict[str, Tensor] = {}
        if in_files:
            _write_in_files(network, partial, world)
        elif lora or own:
            state = _gathered(trained_parameters(network) if lora else network.state_dict(), world)
        with world.sync_errors("saving the adapter"):
            if world.is_main:
                if lora:
                    _write_lora(network, state, partial, boundary)
                elif own:
                    save_file(state, partial / WEIGHTS_FILE)
                elif not in_files:
                    network.save_pretrained(str(partial), variant=getattr(network, "variant", None))
                (partial / CARD).write_text(_card(network, boundary), encoding="utf-8")
                replace_folder(partial, Path(folder))


def _gathered(parts: Mapping[str, Tensor], world: World) -> dict[str, Tensor]:
    # Whole tensors on the CPU of rank 0, nothing on other ranks; a collective call.
    gathered = {}
    for name, part in parts.items():
        tensor = whole(part)
        if world.is_main:
            gathered[name] = tensor.cpu()
    return gathered


def _write_lora(network: Any, trained: dict[str, Tensor], folder: Path, boundary: float) -> None:
    # Like diffusers' `save_lora_adapter`, but camera modules go to a separate file.
    tensors = get_peft_model_state_dict(network, state_dict=trained, adapter_name="default")
    settings = {
        PREFIX + name: sorted(value) if isinstance(value, set) else value
        for name, value in network.peft_config["default"].to_dict().items()
    }
    camera = {name for name in tensors if is_camera_weight(network, name)}
    header = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(settings, indent=2, sort_keys=True)}
    header |= {CAMERA_COUNT: str(len(camera))} | ({BOUNDARY: str(boundary)} if boundary else {})
    files = ({CAMERA_FILE: ("", camera)} if camera else {}) | {LORA_FILE: (PREFIX, tensors.keys() - camera)}
    for file, (prefix, names) in files.items():
        save_file({prefix + name: tensors[name].contiguous() for name in sorted(names)}, folder / file, header)


def _write_in_files(network: Any, folder: Path, world: World) -> None:
    # A sharded transformer, like diffusers' `save_pretrained`, gathered one file at a time.
    state = network.state_dict()
    meta = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in state.items()}
    stem = WEIGHTS_FILE.removesuffix(".safetensors")
    variant = f".{network.variant}" if hasattr(network, "variant") else ""
    plan = split_torch_state_dict_into_shards(
        meta, filename_pattern=f"{stem}{variant}{{suffix}}.safetensors", max_shard_size=FILE_SIZE
    )
    for file, names in plan.filename_to_tensors.items():
        gathered = _gathered({name: state[name] for name in names}, world)
        with world.sync_errors(f"saving {file}"):
            if world.is_main:
                save_file(gathered, folder / file, {"format": "pt"})
    with world.sync_errors("saving the transformer"):
        if world.is_main:
            config = json.loads(network.to_json_string()) | {"_class_name": _class_of(network).__name__}
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
            if plan.is_sharded:
                index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
                (folder / f"{WEIGHTS_FILE}.index{variant}.json").write_text(json.dumps(index, indent=2, sort_keys=True))


def load_adapter(
    transformer: TransformerType, folder: str | Path, dtype: torch.dtype = torch.float32
) -> TransformerType:
    """Load what `save_adapter` wrote: add adapters to the transformer in place, or return another transformer.

    Another transformer is loaded in `dtype`. LoRA of others loads too, from a folder or a file, see `read_lora`.

    Raises:
        ValueError: the folder holds neither, a file is missing or damaged, or an adapter does not fit this transformer.
    """
    if not lora_file(Path(folder)).is_file():
        other = load_transformer(type(transformer), folder, dtype)
        ours, theirs = ({n: t.shape for n, t in one.state_dict().items()} for one in (transformer, other))
        if differ := [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]:
            raise ValueError(
                f"adapter of another model: {folder} holds a transformer that differs from this one in the size of "
                f"{summarize(sorted(differ))}; use the model it was trained from"
            )
        return other
    stored, settings = read_lora(Path(folder))
    fitting = [name for name, tensor in stored.items() if _fits(transformer, name, tensor)]
    if len(fitting) == len(stored):
        # peft only warns where modules that the settings name get no adapter.
        given, config = {name.partition(".lora_")[0] for name in stored}, LoraConfig(**settings)
        names = [n for n, _ in transformer.named_modules() if n not in given] if config.target_modules else []
        if lacking := [name for name in names if check_target_module_exists(config, name)]:
            text = f"the tensors of {summarize(lacking)}, which its settings name"
            raise ValueError(f"adapter {folder} lacks {text}; save or copy it again")
        transformer.load_lora_adapter(dict(stored), prefix=None, metadata=settings or None)
        fitting = [n for n, _ in transformer.named_parameters() if ".lora_" in n or ".modules_to_save." in n]
    if len(fitting) != len(stored):
        raise ValueError(
            f"adapter of another model: {folder} holds {len(stored)} tensors, this transformer has places for "
            f"{len(fitting)}; use the transformer it was trained on"
        )
    return transformer.eval()


def boundary_of(folder: str | Path) -> float:
    """Return the `boundary_ratio` of what `save_adapter` wrote; ValueError if a file is missing or damaged."""
    file = lora_file(Path(folder))
    found = read_tensors(file)[1] if file.is_file() else read_json_object(file.with_name("config.json"), WAY_OUT)
    return float(found.get(BOUNDARY, 0.0))


def adapted_policy(
    networks: Networks, folder: Path | None, settings: ModelConfig, guidance: Guidance, device: torch.device
) -> WanPolicy:
    """Return the policy of `networks`, those before training, with what `save_adapter` wrote; without for None.

    Below the noise level `model.boundary_ratio`, at 0 the adapter's, they answer as they are.
    """
    if folder is None:
        return WanPolicy(networks, settings, guidance, device)
    start = networks.transformer
    trained = dataclasses.replace(networks, transformer=load_adapter(start, folder, DTYPES[settings.dtype]))
    policy = WanPolicy(trained, settings, guidance, device)
    policy.boundary_ratio = settings.boundary_ratio or boundary_of(folder)
    if policy.boundary_ratio:
        policy.keep_reference(start=start)
    return policy


def _fits(transformer: nn.Module, name: str, tensor: Tensor) -> bool:
    # A low-rank factor must fit its base weight, any other tensor its parameter.
    module, _, leaf = re.sub(r"\.lora_[AB](?=\.(weight|bias)$)", "", name).rpartition(".")
    try:
        shape = getattr(transformer.get_submodule(module), leaf).shape
    except AttributeError:
        return False
    if name.endswith(".lora_A.weight"):
        return bool(tensor.shape[1:] == shape[1:])
    return bool(tensor.shape[0] == shape[0] if name.endswith(".lora_B.weight") else tensor.shape == shape)
