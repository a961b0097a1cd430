"""What a transformer costs at a given size, counted without allocating it.

The network is built of fake tensors and run, so the counts follow the code that will run, gradient checkpointing and
autocast included; only attention's operations are added by formula, since the counter does not know every kernel.
Blocks are alike: one and two of them are counted, which gives the counts of any number.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
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
        block_bytes: the most that the backward of one block holds beside that: its activations where gradient
            checkpointing recomputes them, and the gradients on their way through it.
        forward_bytes: the most that a forward on B rows without gradients holds.
    """

    tokens: int
    parameters: int
    trained: int
    forward_flops: int
    kept_bytes: int
    block_bytes: int
    forward_bytes: int


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
    # No block's transient tensors outlive it: of these, one block stands for all.
    return Footprint(**(total | {name: one[name] for name in ("block_bytes", "forward_bytes")}))


def count_network(
    config: Mapping[str, Any],
    latent_shape: tuple[int, int, int, int],
    model: ModelConfig,
    rows: int,
    dtype: torch.dtype,
) -> dict[str, int]:
    """Return the counts of `Footprint`."""
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
        counter = FlopCounterMode(display=False)

        def forward() -> None:
            with counter, torch.no_grad(), _autocast(dtype):
                network(*inputs)

        def forward_and_backward() -> None:
            with _autocast(dtype):
                output = network(*inputs)[0]
            output.sum().backward()

        without_gradients = peak_bytes(forward)
        kept = _kept_bytes(network, inputs, dtype, checkpointing=model.gradient_checkpointing)
        most = peak_bytes(forward_and_backward)
    attention = 4 * rows * layers * dim * tokens * (tokens + model.max_prompt_tokens)
    learned = sum(p.numel() for p in network.parameters() if p.requires_grad)
    narrow = len(adapted) * rows * tokens * model.lora_rank * dtype.itemsize
    for linear in adapted:
        learned += model.lora_rank * (linear.in_features + linear.out_features) - linear.weight.numel()
    beside = max(0, most - kept) + (narrow // layers if model.gradient_checkpointing else 0)
    kept += 0 if model.gradient_checkpointing else narrow
    return {
        "tokens": tokens,
        "parameters": sum(p.numel() for p in network.parameters()),
        "trained": learned,
        "forward_flops": counter.get_total_flops() - _counted_attention(counter) + attention,
        "kept_bytes": kept,
        "block_bytes": beside,
        "forward_bytes": without_gradients,
    }


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes that the tensors made during a call hold at once; call it inside a `FakeTensorMode`.

    What a kernel holds while it runs, and what an allocator wastes, is not in it.
    """
    alive = _Alive()
    with alive:
        call()
    return alive.most


class _Alive(TorchDispatchMode):
    """Follows every storage that is made inside from its making to its end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most, self._now = 0, 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._meet(tensor.untyped_storage())
        return result

    def _meet(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self._now += self._sizes[key]
            self.most = max(self.most, self._now)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


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
