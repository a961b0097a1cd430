"""What a transformer costs at a given size, counted without allocating it.

The network is built of fake tensors and run, so the counts follow the code that will run, gradient checkpointing and
autocast included; only attention's operations are added by formula, since the counter does not know every kernel.
Blocks are alike: one and two of them are counted, which gives the counts of any number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.models.adapters import trained_names
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel
from flow_grpo.settings.schema import ModelConfig

# transformer/config.json of Wan-AI/Wan2.1-T2V-1.3B-Diffusers, for plans made before the weights are there.
WAN_1_3B: Mapping[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "freq_dim": 256,
    "ffn_dim": 8960,
    "num_layers": 30,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 1024,
}


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Costs of one call on B rows.

    Attributes:
        tokens: S, of target and source together, for one row.
        parameters: of the whole transformer.
        trained: parameters that learn.
        forward_flops: of a forward on B rows, a multiplication and an addition counted apart.
        kept_bytes: what autograd keeps of a training forward on B rows until its backward.
        block_bytes: what it keeps of one block while that is recomputed under gradient checkpointing, else 0.
    """

    tokens: int
    parameters: int
    trained: int
    forward_flops: int
    kept_bytes: int
    block_bytes: int


def footprint(
    config: Mapping[str, Any],
    latent_shape: tuple[int, int, int, int],
    model: ModelConfig,
    *,
    rows: int,
    dtype: torch.dtype,
) -> Footprint:
    """Return the costs of a ReCam transformer.

    Low-rank adapters are counted as if their base weights learned, which keeps the same inputs, plus their own narrow
    activations and weights; fake networks take no adapters.

    Args:
        config: the transformer's configuration, such as `WAN_1_3B`.
        latent_shape: (C, F, H, W) of the target.
        model: what is trained, whether blocks are recomputed, and the prompt's length.
        rows: B.
        dtype: of frozen weights and autocast.

    Raises:
        ValueError: an unknown training mode.
    """
    one, two = (count_network({**config, "num_layers": n}, latent_shape, model, rows, dtype) for n in (1, 2))
    total = {name: first + (config["num_layers"] - 1) * (two[name] - first) for name, first in one.items()}
    del total["whole_bytes"]
    return Footprint(
        block_bytes=two["whole_bytes"] - one["whole_bytes"] if model.gradient_checkpointing else 0,
        **total,
    )


def count_network(
    config: Mapping[str, Any],
    latent_shape: tuple[int, int, int, int],
    model: ModelConfig,
    rows: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Return the counts of `Footprint`, and as `whole_bytes` what is kept without gradient checkpointing."""
    channels, frames, height, width = latent_shape
    heads, layers = config["num_attention_heads"], config["num_layers"]
    dim, patch = heads * config["attention_head_dim"], config["patch_size"]
    tokens = 2 * frames // patch[0] * (height // patch[1]) * (width // patch[2])
    with FakeTensorMode():
        network, adapted = fake_transformer(config, dtype, model)
        inputs = (
            torch.empty(rows, channels, 2 * frames, height, width),
            torch.empty(rows),
            torch.empty(rows, model.max_prompt_tokens, config["text_dim"]),
            torch.empty(rows, frames, 12),
        )
        with FlopCounterMode(display=False) as counter, torch.no_grad(), _autocast(dtype):
            network(*inputs)
        kept = _kept_bytes(network, inputs, dtype, checkpointing=model.gradient_checkpointing)
        whole = _kept_bytes(network, inputs, dtype, checkpointing=False)
    attention = 4 * rows * layers * dim * tokens * (tokens + model.max_prompt_tokens)
    learned = sum(p.numel() for p in network.parameters() if p.requires_grad)
    narrow = len(adapted) * rows * tokens * model.lora_rank * dtype.itemsize
    for linear in adapted:
        learned += model.lora_rank * (linear.in_features + linear.out_features) - linear.weight.numel()
    kept += 0 if model.gradient_checkpointing else narrow
    return {
        "tokens": tokens,
        "parameters": sum(p.numel() for p in network.parameters()),
        "trained": learned,
        "forward_flops": counter.get_total_flops() - _counted_attention(counter) + attention,
        "kept_bytes": kept,
        "whole_bytes": whole + narrow,
    }


def kept_bytes_of(network: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype) -> int:
    """Return the bytes that autograd keeps of one forward, weights left out: what `footprint` predicts, counted."""
    return _kept_bytes(network, inputs, dtype, checkpointing=None)


def fake_transformer(
    config: Mapping[str, Any], dtype: torch.dtype, model: ModelConfig
) -> tuple[ReCamTransformer3DModel, list[nn.Linear]]:
    """Return a network with its training mode's gradient flags, and the maps that adapters would stand beside.

    Call it inside a `FakeTensorMode`. Adapters themselves are left out: fake networks take none.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # fake parameters cannot be cast afterwards
    try:
        network = ReCamTransformer3DModel(**{n: value for n, value in config.items() if not n.startswith("_")})
    finally:
        torch.set_default_dtype(before)
    adapted, names = {}, set()
    if model.trained == "lora":
        linear = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
        adapted = {name: part for name, part in linear.items() if re.fullmatch(model.lora_targets, name)}
        whole = [name for name in linear if name.rpartition(".")[2] in model.lora_full_modules]
        names = {f"{name}.weight" for name in (*adapted, *whole)} | {f"{name}.bias" for name in whole}
    else:
        names = trained_names(network, model.trained)
    for name, parameter in list(network.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        # Trained weights are fp32, and autocast keeps half-precision copies of them for the backward.
        made = nn.Parameter(parameter.detach().float(), True) if name in names else parameter.requires_grad_(False)
        network.get_submodule(owner)._parameters[leaf] = made
    network.eval()
    return network, [network.get_submodule(name) for name in adapted]


def _kept_bytes(
    network: nn.Module, inputs: tuple[Tensor, ...], dtype: torch.dtype, *, checkpointing: bool | None
) -> int:
    if checkpointing is not None:
        switch = network.enable_gradient_checkpointing if checkpointing else network.disable_gradient_checkpointing
        switch()  # type: ignore[operator]
    weights = {parameter.untyped_storage()._cdata for parameter in network.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # else a freed storage's identity could come again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), _autocast(dtype):
        output = network(*inputs)[0]
    del output
    return sum(kept.values())


@contextmanager
def _autocast(dtype: torch.dtype) -> Iterator[None]:
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        yield


def _counted_attention(counter: FlopCounterMode) -> int:
    found = counter.get_flop_counts().get("Global", {})
    return sum(count for operation, count in found.items() if "attention" in str(operation))
