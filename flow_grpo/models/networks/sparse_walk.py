"""Cheaper calls along the ODE: the source's tokens every second time, and sparse attention.

No log-probability comes from the steps before and behind a window, so they may be approximate as long as copies are
ranked alike, which a run asks now and then (`run/tail_check.py`). The source enters every call as it is, and what the
blocks make of it changes slowly with the noise level: in every second call its tokens before each block are those of
the call before, turned into keys and values at the present level, and only the target's are computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from flow_grpo.models.networks.sparse_attention import AT_ONCE, sparse_attention


class SparseWalk:
    """So many consecutive calls along the ODE.

    Args:
        calls: the last of them computes the source, and every second one before it.
        at_once: elements of keys that sparse attention copies together.

    Attributes:
        renewing: whether the present call computes the source.
        before: the source's tokens before every block, (B, s/2, D) each, since they were computed last.
        kept: of every attention the share that is kept, () each.
    """

    def __init__(self, calls: int, at_once: int = AT_ONCE) -> None:
        self.renewing, self.kept = True, list[Tensor]()
        self.before: dict[int, Tensor] = {}
        self._left, self._at_once = calls, at_once
        self._rows: int | None = None
        self._own: Tensor | None = None

    def begin_call(self, rows: int) -> None:
        """Begin a call on so many rows: without what was kept of as many, the source is computed."""
        self._left -= 1
        self.renewing = rows != self._rows or self._left % 2 == 0
        self._rows = rows
        if self.renewing:
            self.before.clear()

    @contextlib.contextmanager
    def on(self, network: Any, own: Tensor | None = None) -> Iterator[None]:
        """Context manager in which the network computes this call, or the rows `own` of it."""
        network.walk, self._own = self, own
        try:
            yield
        finally:
            network.walk = None

    def complete(self, number: int, tokens: Tensor, targets: int) -> Tensor:
        """Return what block `number` reads, (B, s, D), of all tokens, or of the target's where the source is kept."""
        if not self.renewing:
            return tokens if number == 0 else torch.cat([tokens, self._kept_of(number, len(tokens))], dim=1)
        source = tokens[:, targets:]
        if self._own is None:
            self.before[number] = source.clone()  # a view would keep the target's as well
        else:
            rows, copies = self._places(len(tokens))
            kept = self.before.setdefault(number, source.new_empty(copies, *source.shape[1:]))
            kept[rows] = source
        return tokens

    def _kept_of(self, number: int, rows: int) -> Tensor:
        return self.before[number] if self._own is None else self.before[number][self._places(rows)[0]]

    def _places(self, rows: int) -> tuple[Tensor, int]:
        # Guidance has all rows of a call twice.
        assert self._own is not None
        assert self._rows is not None
        copies = rows // len(self._own)
        return torch.cat([self._own + copy * self._rows for copy in range(copies)]), copies * self._rows

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention (B, Q, heads, head width) to keys and values (B, S, heads, head width)."""
        attended, kept = sparse_attention(query, key, value, self._at_once)
        self.kept.append(kept)
        return attended
