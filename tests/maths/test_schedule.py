"""Noise levels, the stochastic window and step weights against known numbers."""

import pytest
import torch

from flow_grpo.maths.schedule import flow_sigmas, step_weights, tail_levels, window_of, windows
from flow_grpo.maths.sde import coefficients


def test_the_grid_has_the_known_levels() -> None:
    expected = [1, 27 / 28, 12 / 13, 7 / 8, 9 / 11, 3 / 4, 2 / 3, 9 / 16, 3 / 7, 1 / 4, 0]
    sigmas = flow_sigmas(10, 3.0)  # rounded once, from float64
    assert sigmas.dtype == torch.float32
    assert sigmas.tolist() == torch.tensor(expected, dtype=torch.float64).float().tolist()
    # The end of ReCamMaster's inference grid.
    assert flow_sigmas(50, 5.0)[-4:-1].tolist() == pytest.approx([0.2419, 0.1724, 0.0926], abs=5e-5)
    for steps, shift in ((1, 1.0), (4, 3.0), (16, 5.0), (50, 0.5)):
        sigmas = flow_sigmas(steps, shift)
        assert len(sigmas) == steps + 1 and sigmas[0] == 1 and sigmas[-1] == 0
        assert (sigmas.diff() < 0).all()


@pytest.mark.parametrize(("steps", "shift", "word"), [(0, 3.0, "num_steps"), (4, 0.0, "shift"), (4, -1.0, "shift")])
def test_impossible_grids_are_refused(steps: int, shift: float, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        flow_sigmas(steps, shift)


@pytest.mark.parametrize("steps", [(), (0, 9), (-1, 0), (3, 2), (2, 2), (10,)])
def test_the_last_step_and_unordered_steps_are_never_stochastic(steps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sde_steps"):
        step_weights("none", flow_sigmas(10, 3.0), steps, kind="cps", noise_level=0.5)


def test_windows_are_blocks_that_hold_every_step_once() -> None:
    assert windows((1, 2, 3, 5, 6, 7), 3) == [(1, 2, 3), (5, 6, 7)]
    assert windows((1, 3, 5), 1) == [(1,), (3,), (5,)]
    assert windows((1, 2, 3), 0) == windows((1, 2, 3), 3) == [(1, 2, 3)]


def test_of_neighbouring_groups_each_takes_another_window_as_a_function_of_seed_and_gid() -> None:
    blocks = windows((1, 2, 3, 4, 5, 6), 2)
    drawn = [window_of(gid, blocks, seed=0) for gid in range(300)]
    assert all(sorted(drawn[first : first + 3]) == blocks for first in range(0, 300, 3))
    assert len({tuple(drawn[first : first + 3]) for first in range(0, 300, 3)}) == 6  # every order occurs
    torch.rand(7)
    assert [window_of(gid, blocks, seed=0) for gid in (17, 4)] == [drawn[17], drawn[4]]
    assert [window_of(gid, blocks, seed=4) for gid in range(300)] != drawn


@pytest.mark.parametrize(("steps", "window"), [((1, 2, 3), -1), ((1, 2, 3), 4), ((1, 2, 3), 2), ((1, 2, 4, 5), 4)])
def test_windows_that_do_not_fit_their_steps_are_refused(steps: tuple[int, ...], window: int) -> None:
    with pytest.raises(ValueError, match="window"):
        windows(steps, window)


def test_tails_lead_from_every_level_to_zero_in_steps_that_grow_a_little() -> None:
    sigmas = flow_sigmas(8, 3.0)
    tails = tail_levels(sigmas, 4)
    assert tails.shape == (9, 5) and tails.dtype == torch.float32
    assert torch.equal(tails[:, 0], sigmas) and not tails[:, 4].any() and not tails[8].any()
    torch.testing.assert_close(tails[0], torch.tensor([1, 0.783073, 0.554785, 0.307786, 0]), rtol=0, atol=1e-6)
    torch.testing.assert_close(tails[4], sigmas[4] * tails[0], rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="tail_steps is 0"):
        tail_levels(sigmas, 0)


@pytest.mark.parametrize("kind_of_weight", ["none", "inverse_gain", "inverse_delta"])
def test_weights_have_mean_one_over_the_trained_steps_and_are_zero_elsewhere(kind_of_weight: str) -> None:
    steps = [1, 2, 3, 4, 5]
    weights = step_weights(kind_of_weight, flow_sigmas(16, 5.0), steps, kind="flow", noise_level=0.7)
    assert weights.shape == (16,)
    assert weights[steps].mean().item() == pytest.approx(1, abs=1e-6)
    assert weights[[0, *range(6, 16)]].tolist() == [0.0] * 11


def test_inverse_gain_levels_the_gain_of_the_std_that_is_really_added():
    # A grid that starts below 1, as UniPC's: the closed form without the std clip weighs step 0 two hundred times more.
    sigmas = flow_sigmas(10, 3.0)
    sigmas[0], sigmas[1] = 0.999999, 0.964324
    settings = {"kind": "flow", "noise_level": 1.0, "max_step_std": 0.45}
    weights = step_weights("inverse_gain", sigmas, range(9), **settings)
    step = coefficients(sigmas[:9], sigmas[1:10], sigma_cap=sigmas[1], **settings)
    pull = weights[:9].double() * step.gain
    assert pull.tolist() == pytest.approx([pull[0].item()] * 9, rel=1e-5)
    assert weights[0] / weights[1] < 2


def test_inverse_delta_weighs_by_the_step_length() -> None:
    sigmas = flow_sigmas(10, 3.0)
    weights = step_weights("inverse_delta", sigmas, [1, 8], kind="constant", noise_level=0.3)
    deltas = (27 / 28 - 12 / 13, 3 / 7 - 1 / 4)
    assert (weights[1] / weights[8]).item() == pytest.approx(deltas[1] / deltas[0], rel=1e-5)


def test_weights_of_unknown_kind_and_without_noise_are_refused() -> None:
    sigmas = flow_sigmas(10, 3.0)
    with pytest.raises(ValueError, match="step weight is 'gain'"):
        step_weights("gain", sigmas, [1], kind="constant", noise_level=0.3)
    with pytest.raises(ValueError, match="adds no noise"):
        step_weights("inverse_gain", sigmas, [1], kind="constant", noise_level=0.0)
