"""Nested state on disk: what goes in comes out, of the same types, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flow_grpo.runtime.checkpoints import state_files


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b or a != a)


def test_every_kind_of_value_comes_back_as_it_was(tmp_path: Path) -> None:
    whole = torch.arange(12, dtype=torch.float64).view(3, 4)
    tree = {
        "numbers": [1, True, 0.1, 1e300, float("nan"), float("-inf"), None, "text", 2**62],
        "containers": {0: (), 7: ([], {}), "dict": {"tensor": "a", "dict": 3}, "tuple": ((1, 2), [(3,)])},
        "tensors": [whole, whole.T, whole[0], torch.tensor(3), torch.empty(0, 2), torch.tensor([True, False])],
    }
    state_files.write(tmp_path / "state", state_files.copied(tree))
    assert same(state_files.read(tmp_path / "state"), tree)
    half = {"x": torch.randn(3).bfloat16()}
    state_files.write(tmp_path / "half", state_files.copied(half))
    assert torch.equal(state_files.read(tmp_path / "half")["x"], half["x"])


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        ({"a": {"b": np.float32(1)}}, "a/b cannot be saved: float32 is no tensor"),
        ({"a": [0, {1, 2}]}, "a/1 cannot be saved: set is no tensor"),
        ({"a": {(1, 2): 3}}, "a cannot be saved: its keys must be str or int"),
        ({"a": {1: torch.ones(1), "1": torch.ones(1)}}, "a/1 cannot be saved: two tensors have this path"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_path_and_type(tree: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        state_files.copied(tree)
