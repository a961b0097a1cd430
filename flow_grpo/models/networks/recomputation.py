"""What the backward pass recomputes: nothing, whole blocks, or blocks without their attention."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flow_grpo.runtime import device as device_api

_log = logging.getLogger(__name__)


def set_checkpointing(transformer: WanTransformer3DModel, mode: str, compiler: str | None = None) -> None:
    """Choose what the backward pass recomputes of every block; gradients are the same bit for bit.

    `mode` is `model.checkpointing`; "auto", which the planner decides where it is asked, is "blocks" here. `compiler`
    is the backend of `torch.compile` where blocks are compiled: what they keep is then compiled with them.
    """
    if mode == "none":
        transformer.disable_gradient_checkpointing()
    elif mode == "keep_attention":
        transformer.enable_gradient_checkpointing(compiled_keeper(compiler) if compiler else KeepAttention())
    else:
        transformer.enable_gradient_checkpointing()


def compiled_keeper(compiler: str) -> Callable[..., Any]:
    """Return a function that calls a block, compiled together with what its backward keeps.

    Of a block that is compiled by itself `KeepAttention` would see one operator, and no attention.
    """
    operators = device_api.attention_operators()

    def policy(_: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:  # noqa: ARG001
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)

    def call(block: nn.Module, *arguments: Any) -> Any:
        return checkpoint(block.forward, *arguments, use_reentrant=False, context_fn=contexts)

    compiled: Callable[..., Any] = torch.compile(call, backend=compiler)
    return compiled


class KeepAttention:
    """Calls a block so that its backward recomputes all but what attention returned.

    With long videos attention is most of a block's operations, while its output is as small as any other activation
    (selective activation checkpointing of torch.utils.checkpoint).
    """

    def __init__(self) -> None:
        self._operators = device_api.attention_operators()
        self._known = False  # that something is kept, or has been said not to be

    def __call__(self, block: nn.Module, *arguments: Any) -> Any:
        """Return what the block returns."""
        contexts = functools.partial(create_selective_checkpoint_contexts, self._policy)
        result = checkpoint(block.__call__, *arguments, use_reentrant=False, context_fn=contexts)
        if not self._known:
            self._known = True
            _log.warning(
                "model.checkpointing=keep_attention finds none of its operators in a block and keeps nothing: "
                "attention runs in an operator that flow_grpo/runtime/device.py does not list, or in none of its own"
            )
        return result

    def _policy(self, _: Any, operator: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:  # noqa: ARG002
        if operator not in self._operators:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self._known = True
        return CheckpointPolicy.MUST_SAVE
