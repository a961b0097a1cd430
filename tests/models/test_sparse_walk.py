"""Approximate calls along the ODE: their attention by its definition, when the source is computed, what is kept."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

from flow_grpo.algorithm.rollout.denoise import rollout, step_transition
from flow_grpo.maths.schedule import flow_sigmas, tail_levels
from flow_grpo.maths.sde import log_prob
from flow_grpo.models.networks import sparse_attention as sparse
from flow_grpo.settings.sampling import Sampling, SdeSettings
from tests.models.test_wan_policy import condition, handing_over, noisy, policy


def by_definition(query, key, value, kept, size):
    """Return attention in which a mean stands for each block that is not kept, as often as the block has tokens."""
    attended = torch.empty_like(query)
    for row, head, place in itertools.product(*map(range, query.shape[:3])):
        keys, values, counts = [], [], []
        for block in range(math.ceil(key.shape[2] / size)):
            own_keys, own_values = (x[row, head, block * size : (block + 1) * size] for x in (key, value))
            if block in kept[row, head, place // size]:
                keys, values, counts = [*keys, *own_keys], [*values, *own_values], [*counts, *[1.0] * len(own_keys)]
            else:
                keys, values = [*keys, own_keys.mean(0)], [*values, own_values.mean(0)]
                counts.append(float(len(own_keys)))
        shares = torch.tensor(counts) * (torch.stack(keys) @ query[row, head, place] / query.shape[3] ** 0.5).exp()
        attended[row, head, place] = shares @ torch.stack(values) / shares.sum()
    return attended


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_attention_reads_chosen_blocks_in_full_and_a_mean_of_each_other_one_whatever_the_kernel():
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, n, 16, generator=draw, dtype=torch.float64) for n in (21, 37, 37))
    blocks = sparse.choose_blocks(query, key, value, 8, 0.5)
    assert blocks.kept.shape == (2, 3, 3, 3)  # of five, the last of five tokens
    expected = by_definition(query, key, value, blocks.kept.numpy(), 8)
    for at_once in (1, sparse.AT_ONCE):
        torch.testing.assert_close(sparse.gathered_blocks(query, blocks, at_once), expected)
    torch.testing.assert_close(sparse.flex_blocks(query, blocks, compiled=False), expected)
    exact = functional.scaled_dot_product_attention(query, key, value)
    every = sparse.choose_blocks(query, key, value, 8, 1.0)
    torch.testing.assert_close(sparse.gathered_blocks(query, every), exact)
    assert (expected - exact).abs().max() > 0.01


def test_the_blocks_that_matter_are_chosen_and_the_share_of_attention_that_they_hold_is_told():
    draw = torch.Generator().manual_seed(0)
    key, value = torch.zeros(1, 256, 2, 16), torch.randn(1, 256, 2, 16, generator=draw)
    key[:, 40:44, :, 0] = 40.0
    query = torch.zeros(1, 128, 2, 16)
    query[..., 0] = 1.0
    attended, kept = sparse.sparse_attention(query, key, value)
    inside = 4 * math.exp(10)
    torch.testing.assert_close(kept, torch.tensor((inside + 124) / (inside + 252)))  # 32 of 64 blocks
    exact = functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
    torch.testing.assert_close(attended, exact, rtol=0, atol=2e-3)
    assert [sparse.block_size(n) for n in (1, 288, 1_000, 65_520)] == [4, 4, 8, 128]


@pytest.fixture
def all_blocks(monkeypatch):
    """Sparse attention reads all blocks, so that the source alone is approximate."""
    monkeypatch.setattr(sparse.choose_blocks, "__defaults__", (1.0,))


@torch.no_grad()
@pytest.mark.usefixtures("all_blocks")
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_every_second_call_keeps_the_source_of_whatever_weights_and_the_last_computes_it(guidance):
    made, conditions = handing_over("attention", guidance_scale=guidance), [condition(index) for index in range(3)]
    encoded, (latents, _) = made.encode(conditions), noisy(made, conditions)
    levels = [torch.tensor([0.9, 0.8, 0.3]), torch.tensor([0.7, 0.5, 0.2]), torch.tensor([0.6, 0.4, 0.1])]
    tokens = []
    made.module.blocks[0].attn1.to_q.register_forward_hook(lambda _, __, out: tokens.append(out.shape[1]))
    exact = [made.velocity(latents, level, encoded) for level in levels]
    whole = tokens.pop()
    tokens.clear()
    with made.approximate(3):
        found = [made.velocity(latents, level, encoded) for level in levels]
    assert [own / whole for own in tokens] == [1, 1, 0.5, 0.5, 1, 1]  # of either weights
    for own, other, same in zip(found, exact, (True, False, True), strict=True):
        assert torch.allclose(own, other, rtol=1e-4, atol=1e-5) == same
    relative = (found[1] - exact[1]).norm() / exact[1].norm()
    assert relative < 0.2
    with made.approximate(3):  # nothing changes in between: what is kept is what would be computed
        still = [made.velocity(latents, levels[1], encoded) for _ in range(3)]
    torch.testing.assert_close(still[1], still[0], rtol=1e-4, atol=1e-5)
    with made.approximate(3):  # of other rows nothing is kept
        made.velocity(latents, levels[0], encoded)
        fewer = made.velocity(latents[:2], levels[1][:2], encoded.rows(slice(0, 2)))
    torch.testing.assert_close(fewer, exact[1][:2], rtol=1e-4, atol=1e-5)
    assert math.isnan(policy().attention_kept()) and made.attention_kept() == pytest.approx(1) and not made._kept
    assert torch.equal(made.velocity(latents, levels[1], encoded), exact[1])  # exact again


@torch.no_grad()
def test_a_rollout_is_approximate_before_and_behind_its_window_and_exact_in_it():
    made, conditions, sigmas = policy(), [condition(index) for index in range(2)], flow_sigmas(8, 3.0)
    encoded, sde = made.encode(conditions), SdeSettings("flow", 0.7)
    sampling = Sampling(sigmas, sde, seed=3, tails=tail_levels(sigmas, 3), sparse=True)
    assert sampling.approximates and not sampling.exact.approximates
    windows = [(3,), (2,)]
    found, exact = (rollout(made, conditions, encoded, windows, one) for one in (sampling, sampling.exact))
    states, again = found.trajectory.states, exact.trajectory.states
    assert not torch.equal(states[:, 0], again[:, 0]) and not torch.equal(found.final_latents, exact.final_latents)
    gaussian = step_transition(made, states[:, 0], encoded, found.trajectory.steps[:, 0], sampling)
    assert torch.equal(log_prob(states[:, 1], gaussian), found.trajectory.log_probs[:, 0])
    assert 0.4 < made.attention_kept() < 1
