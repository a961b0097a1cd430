"""Downsampling, blur, and rows of the better of two records."""

import dataclasses

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.pictures import blur, blur_matrix, choose, shrink


def test_shrinking_averages_square_blocks():
    picture = torch.arange(32.0).reshape(1, 1, 4, 8)
    assert torch.equal(shrink(picture, 4), picture.reshape(1, 1, 2, 2, 4, 2).mean(dim=(3, 5)))


@pytest.mark.parametrize(("columns", "size"), [(32, (24, 32)), (48, (24, 32)), (31, (12, 16)), (8, (6, 8))])
def test_at_most_the_asked_for_columns_are_left(columns, size):
    assert shrink(torch.zeros(2, 3, 24, 32), columns).shape == (2, 3, *size)


def test_blur_spreads_a_point_by_sigma_equally_in_rows_and_columns_and_replicates_the_border():
    assert torch.allclose(blur(torch.full((1, 3, 5, 7), 0.4), 2.0), torch.full((1, 3, 5, 7), 0.4))
    row = torch.zeros(1, 1, 1, 9)
    row[..., 0] = 1
    spread = blur(row, 1.0)[0, 0, 0]
    assert spread[0] > 0.69 and spread[-1] == 0  # 0.4 of its own and 0.3 that would fall outside
    spread = blur_matrix(41, 3.0)[20]
    place = torch.arange(41.0) - 20
    assert spread.sum().item() == pytest.approx(1.0)
    assert (spread * place.square()).sum().sqrt().item() == pytest.approx(3.0, rel=0.02)
    point = torch.zeros(1, 1, 21, 21)
    point[..., 10, 10] = 1
    spread = blur(point, 1.5)
    assert torch.allclose(spread, spread.mT)
    assert spread[0, 0, 10, 10] > spread[0, 0, 10, 11] > spread[0, 0, 11, 11] > 0


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
