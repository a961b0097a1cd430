"""An update without memory names the knobs that need less."""

from __future__ import annotations

import pytest
import torch

from flow_grpo.algorithm.update.memory_hint import memory_named


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("3 GiB"), RuntimeError("NPU out of memory. Tried 3 GiB")])
def test_it_comes_with_ways_out(error):
    for size, way_out in ((4, r"3 GiB; pass --config\.train\.batch_size=2, "), (1, r"pass --config\.model\.gradient")):
        with pytest.raises(RuntimeError, match=rf"update of {size} sample.*{way_out}"), memory_named(size):
            raise error


def test_other_errors_stay_what_they_are():
    shapes = RuntimeError("shapes")
    with pytest.raises(RuntimeError) as caught, memory_named(4):
        raise shapes
    assert caught.value is shapes
