"""Parameters, operations and activation memory of a transformer call, counted without allocating anything.

The real network code runs on fake tensors, so the counts include gradient checkpointing and autocast. All blocks but
the first and the last are identical: networks of one and two blocks are counted and extrapolated to any number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from flow_grpo.models.fake_policy import FakeAdapter, fake_transformer
from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.networks.sparse_walk import SparseWalk
from flow_grpo.models.video_model import VideoModel
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.device import DTYPES
from flow_grpo.settings.schema import ModelConfig

Latents: TypeAlias = tuple[int, int, int, int]  # (C, F, H, W) of one video


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Costs of one call on B rows; a multiply-add counts as two operations."""

    tokens: int  # of one row, target and source together
    parameters: int  # of the whole transformer, adapters aside
    trained: int  # trainable ones
    forward_flops: int
    attention_flops: int  # of these, in attention proper: scores and weighted sums
    # Of a forward and its backward: frozen weights, and what nothing trained precedes, have no gradient.
    train_flops: int
    recomputed_flops: int  # that the backward computes once more
    kept_bytes: int  # activations kept for the backward of a training forward
    block_bytes: int  # transient in the backward of one block: recomputed activations, and gradients of activations
    forward_bytes: int  # peak of a forward without gradients


def footprint(
    video_model: VideoModel, config: Mapping[str, Any], latent_shape: Latents, model: ModelConfig, *, rows: int
) -> Footprint:
    """Return the costs of a transformer with a configuration such as `WAN_1_3B`, for (C, F, H, W) of the target.

    `model` has training mode, checkpointing (of which "auto" counts as "blocks"), prompt length, and the dtype of
    frozen weights and autocast.
    """
    one, two = (count_network(video_model, {**config, "num_layers": n}, latent_shape, model, rows) for n in (1, 2))
    total = {name: first + (config["num_layers"] - 1) * (two[name] - first) for name, first in one.items()}
    # Transient tensors do not outlive their block: one stands for all, the first of two, as the last may do less.
    return Footprint(**(total | {name: two[name] for name in ("block_bytes", "forward_bytes")}))


@dataclasses.dataclass(frozen=True)
class SparseFootprint:
    """Costs of calls that are approximate (`models/networks/sparse_walk.py`), on B rows."""

    renewing_flops: int  # of a call that computes the source
    keeping_flops: int  # of one that does not
    kept_bytes: int  # the source's tokens before every block

    def walk(self, calls: int) -> int:
        """Return the operations of so many consecutive calls: the first, the last and every second one renews."""
        renewing = calls // 2 + 1 if calls else 0
        return renewing * self.renewing_flops + (calls - renewing) * self.keeping_flops


def sparse_footprint(
    video_model: VideoModel, config: Mapping[str, Any], latent_shape: Latents, model: ModelConfig, *, rows: int
) -> SparseFootprint:
    """Return the costs of approximate calls; the arguments are those of `footprint`."""
    counts = []
    for layers in (1, 2):
        with _fake_call(video_model, {**config, "num_layers": layers}, latent_shape, model, rows) as (network, call):
            walk, flops = SparseWalk(3, at_once=sys.maxsize), []  # the operations are the same
            with walk.on(network):
                for _ in range(2):
                    walk.begin_call(rows)
                    flops.append(operations(torch.no_grad()(call)))
        counts.append((*flops, sum(tokens.nbytes for tokens in walk.before.values())))
    one, two = counts
    total = [first + (config["num_layers"] - 1) * (second - first) for first, second in zip(one, two, strict=True)]
    return SparseFootprint(*total)


@contextlib.contextmanager
def _fake_call(
    video_model: VideoModel, config: Mapping[str, Any], latent_shape: Latents, model: ModelConfig, rows: int
) -> Iterator[tuple[Any, Callable[[], Tensor]]]:
    """Context manager in which the network is fake; it gives the network and a call of it."""
    dtype = DTYPES[model.dtype]
    with FakeTensorMode():
        network = fake_transformer(video_model, config, model)
        latents, timesteps = torch.empty(rows, *latent_shape), torch.empty(rows)
        prompts = torch.empty(rows, model.max_prompt_tokens, config["text_dim"])
        shapes = video_model.input_shapes(rows, latent_shape, config)
        inputs = {name: torch.empty(shape) for name, shape in shapes.items()}

        def call() -> Tensor:
            with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                return video_model.call(network, latents, timesteps, prompts, inputs)

        yield network, call


def count_network(
    video_model: VideoModel, config: Mapping[str, Any], latent_shape: Latents, model: ModelConfig, rows: int
) -> dict[str, int]:
    """Return the fields of `Footprint` by name, counted on the whole network."""
    recomputes, keeps_attention = model.checkpointing != "none", model.checkpointing == "keep_attention"
    with _fake_call(video_model, config, latent_shape, model, rows) as (network, call):
        forward = torch.no_grad()(call)

        def forward_and_backward() -> None:
            call().sum().backward()

        with AttentionCount() as attention:
            forward_bytes = peak_bytes(forward, network)
        forward_flops, train_flops = operations(forward), operations(forward_and_backward)
        set_checkpointing(network, "blocks" if recomputes else "none")
        recomputed = operations(forward_and_backward) - train_flops if recomputes else 0
        kept = saved_bytes(network, call)
        update_bytes = peak_bytes(forward_and_backward, network)
    adapters = [part for part in network.modules() if isinstance(part, FakeAdapter)]
    low_rank = sum(part.down.weight.numel() + part.up.weight.numel() for part in adapters)
    return {
        "tokens": video_model.tokens(latent_shape, config["patch_size"]),
        "parameters": sum(p.numel() for p in network.parameters()) - low_rank,
        "trained": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "forward_flops": forward_flops,
        "attention_flops": attention.flops,
        "train_flops": train_flops,
        "recomputed_flops": recomputed - (attention.flops if keeps_attention else 0),
        "kept_bytes": kept + (attention.bytes if keeps_attention else 0),
        "block_bytes": max(0, update_bytes - kept),
        "forward_bytes": forward_bytes,
    }


def operations(call: Callable[[], object]) -> int:
    """Return the operations of a call's matrix products, as torch counts them with attention by its definition.

    So attention's backward counts twice its forward, and what a fused kernel computes once more does not count.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


def peak_bytes(call: Callable[[], object], network: nn.Module | None = None) -> int:
    """Return the most bytes that tensors created during a call hold at once; call it inside a `FakeTensorMode`.

    Views of the network's weights, where one is given, kernel workspaces and allocator fragmentation are not counted.
    """
    alive = _LiveStorages(network)
    with alive:
        call()
    return alive.peak


class _LiveStorages(TorchDispatchMode):
    """Counts the bytes of every storage created inside, from its creation to its release, a network's weights aside."""

    def __init__(self, network: nn.Module | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak, self._now = 0, 0
        self._sizes: dict[int, int] = {}
        self._weights = set() if network is None else _storages(network)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._sizes and key not in self._weights:
                    self._sizes[key] = storage.nbytes()
                    self._now += self._sizes[key]
                    self.peak = max(self.peak, self._now)
                    weakref.finalize(storage, self._release, key)
        return result

    def _release(self, key: int) -> None:
        self._now -= self._sizes.pop(key)


class AttentionCount(TorchDispatchMode):
    """Counts what attention operators do inside: the `flops` of scores and weighted sums, the `bytes` they return."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops, self.bytes, self._operators = 0, 0, device_api.attention_operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self._operators:
            query, key = args[:2]  # (B, heads, tokens, head width)
            self.flops += 4 * query.numel() * key.shape[-2]
            self.bytes += sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        return result


def saved_bytes(network: nn.Module, call: Callable[[], Tensor]) -> int:
    """Return the bytes of all tensors, the network's parameters aside, that autograd saves in a call."""
    weights = _storages(network)
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # a freed storage's address could be reused

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            sizes[storage._cdata] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = call()
    del output
    return sum(sizes.values())


def _storages(network: nn.Module) -> set[int]:
    return {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
