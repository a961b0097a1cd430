"""Row-wise choice between records of tensors."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from flow_grpo.maths.where_rows import choose


@dataclasses.dataclass(frozen=True)
class Pair:
    flat: Tensor
    deep: Tensor


def test_every_field_is_taken_by_rows_whatever_its_further_dimensions():
    first = Pair(torch.arange(6.0).view(2, 3), torch.ones(2, 3, 4, 5))
    second = Pair(-torch.arange(6.0).view(2, 3) - 1, torch.zeros(2, 3, 4, 5))
    mask = torch.tensor([[True, False, True], [False, False, True]])
    found = choose(mask, first, second)
    assert found.flat.tolist() == [[0, -2, 2], [-4, -5, 5]]
    assert torch.equal(found.deep, mask.float()[..., None, None].expand(2, 3, 4, 5))
