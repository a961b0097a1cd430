"""Where two calls of one network part: the first of its layers whose output differs, and by how much."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

LOOKED_AT = 4096  # elements kept of an output, spread over all of it: a real network's outputs would not fit in memory

Layers = dict[str, tuple[tuple[int, ...], Tensor]]
"""Per layer in the order of completion, the shape of its output and some of its elements; its inputs come first."""


@contextlib.contextmanager
def recording(network: nn.Module) -> Iterator[list[Layers]]:
    """Inside, every call of the network adds what its layers put out to the list that is yielded."""
    calls: list[Layers] = []
    handles = [network.register_forward_pre_hook(_inputs(calls))]
    handles += [layer.register_forward_hook(_output(calls, name)) for name, layer in network.named_modules()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def first_difference(one: Layers, other: Layers) -> str:
    """Return the first layer in which two calls differ and by how much, in words.

    Args:
        one: layers of a call of the rollout.
        other: those of its replay.
    """
    for name, (shape, values) in one.items():
        if name not in other:
            return f"{name} ran in the rollout only"
        shape_there, values_there = other[name]
        if shape != shape_there:
            return f"{name} gave {shape} in the rollout and {shape_there} in the update"
        if not torch.equal(values, values_there):
            gap = float((values - values_there).abs().max())
            return f"{name} differs first, by {gap:.2g} in values up to {float(values.abs().max()):.2g}"
    return "no layer differs: the step's Gaussian or its score does"


def _inputs(calls: list[Layers]) -> Any:
    def hook(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        calls.append({f"input {number}": _kept(tensor) for number, tensor in enumerate(tensors)})

    return hook


def _output(calls: list[Layers], name: str) -> Any:
    def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, tuple) and output else output
        if isinstance(first, Tensor):
            calls[-1][f"layer {name}" if name else "the network"] = _kept(first)

    return hook


def _kept(tensor: Tensor) -> tuple[tuple[int, ...], Tensor]:
    flat = tensor.detach().flatten()
    return tuple(tensor.shape), flat[:: max(1, flat.numel() // LOOKED_AT)].float().cpu()
