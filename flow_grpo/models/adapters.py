"""Choose the trained parameters of a transformer, save and restore them, disable adapters, average weights (EMA).

A parameter is trained if it requires a gradient. The network stays in eval mode without dropout, so that rollout and
update compute the same numbers.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn

from flow_grpo.models.networks.transformers import camera_modules
from flow_grpo.runtime.ranks.sharding import local, unwrap
from flow_grpo.settings.schema import ModelConfig


class AdapterError(ValueError):
    """A pattern or name in `model.lora_*` matches no module, so nothing would be trained."""


def apply_training_mode(transformer: WanTransformer3DModel, model: ModelConfig) -> None:
    """Freeze all parameters except those that `model.trained` names, and convert these to fp32.

    "lora" adds low-rank adapters to `lora_targets` and trains `lora_full_modules` in full; "camera" trains what embeds
    the camera in every block (ReCam: `cam_encoder`); "attention" self-attention and all camera modules of every block,
    the recipe of ReCamMaster's and ReDirector's authors; "full" everything. Adapters start the same on every rank.

    Raises:
        AdapterError: a pattern or module name matches nothing.
        ValueError: mode "camera", and the network has no camera modules.
    """
    transformer.requires_grad_(False)
    if model.trained == "lora":
        _add_lora(transformer, model)
    else:
        names = trained_names(transformer, model.trained)
        for name, parameter in transformer.named_parameters():
            parameter.requires_grad_(name in names)
    for parameter in trained_parameters(transformer).values():
        # Half-precision weights would round the optimizer's steps away; autocast still computes in half precision.
        parameter.data = parameter.data.float()
    transformer.eval()


def trained_names(transformer: nn.Module, trained: str) -> set[str]:
    """Return the names of the parameters that a mode other than "lora" trains; ValueError as above."""
    encoders = getattr(transformer, "camera_encoders", ())
    parts = {"camera": {*encoders}, "attention": {"attn1", *camera_modules(transformer)}}
    names = {name for name, _ in transformer.named_parameters()}
    if trained == "full":
        return names
    if not parts[trained]:
        raise ValueError(
            f"model.trained is {trained!r}, but this model reads no camera; pass --config.model.trained=lora"
        )
    return {name for name in names if name.startswith("blocks.") and not parts[trained].isdisjoint(name.split("."))}


def _add_lora(transformer: WanTransformer3DModel, model: ModelConfig) -> None:
    linear = [name for name, module in transformer.named_modules() if isinstance(module, nn.Linear)]
    matched = [name for name in linear if re.fullmatch(model.lora_targets, name)]
    if not matched:
        raise AdapterError(
            f"model.lora_targets {model.lora_targets!r} matches no module in full; names look like {linear[-9:-1]}"
        )
    for wanted in model.lora_full_modules:
        if not any(name.split(".")[-1] == wanted for name in linear):
            last_parts = sorted({name.split(".")[-1] for name in linear})
            raise AdapterError(f"model.lora_full_modules names {wanted!r}, which is none of {last_parts}")
    config = LoraConfig(
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        target_modules=model.lora_targets,
        modules_to_save=list(model.lora_full_modules) or None,
        lora_dropout=0.0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        transformer.add_adapter(config)


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return name -> parameter for those that require a gradient, in the network's order."""
    return {name: parameter for name, parameter in unwrap(module).named_parameters() if parameter.requires_grad}


@torch.no_grad()
def load_trained_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Restore a copy of `trained_parameters`; ValueError if names or shapes differ, with nothing changed."""
    parameters = trained_parameters(module)
    missing, unexpected = sorted(parameters.keys() - state.keys()), sorted(state.keys() - parameters.keys())
    reshaped = [n for n in parameters.keys() & state.keys() if parameters[n].shape != state[n].shape]
    if missing or unexpected or reshaped:
        raise ValueError(
            f"checkpoint of another training mode or model: {len(missing)} trained tensors are missing {missing[:2]}, "
            f"{len(unexpected)} are not trained here {unexpected[:2]}, {len(reshaped)} have another shape "
            f"{sorted(reshaped)[:2]}; resume with the model settings the checkpoint was made with"
        )
    for name, parameter in parameters.items():
        parameter.copy_(state[name])


def adapted_modules(module: nn.Module) -> list[str]:
    """Return the names of the modules that low-rank adapters are attached to."""
    return [name for name, part in unwrap(module).named_modules() if isinstance(part, BaseTunerLayer)]


def has_lora(module: nn.Module) -> bool:
    """Return whether low-rank adapters are attached."""
    return bool(adapted_modules(module))


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Context manager that disables adapters and gives modules trained in full their original weights.

    diffusers' own `disable_adapters` would keep the trained weights of modules trained in full.
    """
    switches = [part for part in module.modules() if isinstance(part, (BaseTunerLayer, ModulesToSaveWrapper))]
    for switch in switches:
        switch.enable_adapters(False)
    try:
        yield
    finally:
        for switch in switches:
            switch.enable_adapters(True)


def merge_adapters(module: nn.Module) -> None:
    """Merge low-rank adapters into their weights, in fp32, and unwrap modules trained in full."""
    for name, part in list(module.named_modules()):
        if isinstance(part, BaseTunerLayer):
            module.get_submodule(name).float()
            part.merge()
            module.set_submodule(name, part.get_base_layer())
        elif isinstance(part, ModulesToSaveWrapper):
            module.set_submodule(name, part.modules_to_save[part.active_adapters[0]])


@contextlib.contextmanager
def swap_parameters(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """Context manager that swaps parameters and values; of sharded parameters, each rank's shard.

    In place, because FSDP gathers from the memory that the parameters had when they were sharded.
    """
    pairs = [(local(parameter), local(value)) for parameter, value in zip(parameters, values, strict=True)]
    _swap(pairs)
    try:
        yield
    finally:
        _swap(pairs)


def _swap(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for one, other in pairs:
        saved = one.clone()
        one.copy_(other)
        other.copy_(saved)


class Ema:
    """Exponential moving average of trained parameters: average = decay * average + (1 - decay) * parameter.

    The decay, in (0, 1), is constant from the first update on; the average starts at the parameters' initial values.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        # By default diffusers ramps the decay up and overwrites the average in the first step.
        self._model = EMAModel(self._parameters, decay=decay, min_decay=decay, update_after_step=-1, foreach=True)

    def update(self) -> None:
        """Update the average after an optimizer step."""
        self._model.step(self._parameters)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Context manager that gives the parameters their averaged values inside."""
        with swap_parameters(self._parameters, self._model.shadow_params):
            yield

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the averages by position; sharded ones stay sharded."""
        return {str(index): value.detach().clone() for index, value in enumerate(self._model.shadow_params)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned; ValueError if the number of tensors or a shape differs."""
        shadows = {str(index): shadow for index, shadow in enumerate(self._model.shadow_params)}
        if {n: value.shape for n, value in state.items()} != {n: shadow.shape for n, shadow in shadows.items()}:
            raise ValueError(
                f"EMA state holds {len(state)} tensors for {len(shadows)} averaged parameters, or their shapes differ; "
                "resume with the model settings the checkpoint was made with"
            )
        for name, shadow in shadows.items():
            shadow.copy_(state[name])
