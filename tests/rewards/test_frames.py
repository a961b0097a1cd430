"""Which frames are looked at, their weights and grey levels."""

import numpy as np
import torch

from flow_grpo.rewards.frames import frame_numbers, frame_weights, grey_frames, luma


def test_weights_grow_threefold_and_sum_to_one():
    weights = frame_weights(torch.tensor([True] * 5))
    assert torch.allclose(weights, torch.tensor([1, 1.5, 2, 2.5, 3], dtype=torch.float64) / 10)
    weights = frame_weights(torch.tensor([True, True, False, True, True]))
    assert torch.allclose(weights, torch.tensor([1, 1.5, 0, 2.5, 3], dtype=torch.float64) / 8)
    assert frame_weights(torch.tensor([True])).tolist() == [1.0]


def test_at_most_21_frames_are_looked_at():
    assert frame_numbers(81) == list(range(0, 81, 4))
    assert frame_numbers(5) == [0, 1, 2, 3, 4]
    assert len(frame_numbers(49)) == 21 and frame_numbers(49)[-1] == 48


def test_grey_levels_are_those_of_the_weighted_colours_of_the_chosen_frames():
    video = torch.zeros(3, 3, 2, 2)
    video[0, 1], video[1, 1], video[2, 2] = 1.0, 0.5, 1.0
    levels = grey_frames(video, [2, 1])
    assert levels.dtype == np.uint8 and levels.shape == (2, 2, 2)
    assert levels[:, 0, 0].tolist() == [round(255 * 0.114), round(255 * (0.299 + 0.5 * 0.587))]
    assert torch.allclose(luma(torch.ones(3, 1, 2, 2)), torch.ones(1, 2, 2))
