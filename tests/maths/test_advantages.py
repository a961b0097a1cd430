"""Group-relative advantages against numbers computed by hand; flat and incomplete groups."""

import math

import pytest
import torch
from torch import Tensor

from flow_grpo.maths.advantages import ADV_NORMS, CombinedAdvantages, combine_rewards


def group_advantages(rewards: Tensor, ids: Tensor, *, valid: Tensor | None = None, **settings: object) -> Tensor:
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
    return combine_rewards({"r": rewards}, {"r": valid}, {"r": 1.0}, ids, floors={}, **settings).advantages


def lone_winner(k: int, height: float = 1.0) -> Tensor:
    rewards = torch.zeros(k, dtype=torch.float64)
    rewards[0] = height
    return rewards


def one_group(rewards: Tensor | list[float], **settings: object) -> Tensor:
    values = torch.as_tensor(rewards, dtype=torch.float64)
    return group_advantages(values, torch.zeros(len(values), dtype=torch.int64), k=len(values), **settings)


@pytest.mark.parametrize(
    ("k", "ddof", "expected"), [(4, 0, math.sqrt(3)), (4, 1, 1.5), (24, 0, math.sqrt(23)), (24, 1, 23 / math.sqrt(24))]
)
def test_lone_winner(k, ddof, expected):
    # 1.73 and 1.50 at k = 4; 4.80 and 4.70 at k = 24, so an advantage clip of 5 is not reached.
    advantages = one_group(lone_winner(k), adv_ddof=ddof)
    assert advantages[0].item() == pytest.approx(expected, rel=1e-3)
    assert one_group(lone_winner(k), adv_ddof=ddof, adv_eps=0.0)[0].item() == pytest.approx(expected, rel=1e-12)
    assert advantages.dtype == torch.float64
    assert advantages.sum().item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("k", "size"), [(2, 0.33), (4, 0.52), (24, 0.80)])
def test_noise_within_the_flat_range_is_exactly_zero_and_not_full_size(k: int, size: float) -> None:
    assert one_group(lone_winner(k, 1e-4), flat_eps=0.0)[0].item() == pytest.approx(size, abs=5e-3)
    assert one_group(lone_winner(k, 1e-4)).tolist() == [0.0] * k
    assert one_group(lone_winner(k, 1.01e-4))[0].item() != 0


@pytest.mark.parametrize("k", [2, 4, 5, 6, 8, 12, 16, 24])
def test_a_constant_group_is_exactly_zero_without_any_tolerance(k):
    # The std of equal fp32 values is often above 0: 56 % of groups of 12.
    values = torch.rand(200, generator=torch.Generator().manual_seed(0)).repeat_interleave(k)
    ids = torch.arange(200).repeat_interleave(k)
    for eps in (1e-4, 0.0):
        assert (group_advantages(values, ids, k=k, flat_eps=0.0, adv_eps=eps) == 0).all()


def test_rewards_far_from_zero_keep_their_digits():
    # One pass over sums of squares in fp32 gives a negative variance here.
    values = 100 + 0.01 * torch.tensor([1.0, -1.0, 0.5, -0.5])
    expected = one_group(0.01 * torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=torch.float64))
    assert one_group(values).tolist() == pytest.approx(expected.tolist(), rel=2e-3)


def test_groups_are_found_by_id_wherever_their_copies_lie() -> None:
    rewards = torch.randn(24, generator=torch.Generator().manual_seed(1))
    ids = torch.arange(6).repeat_interleave(4) * 1000 + 7
    ordered = group_advantages(rewards, ids, k=4)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(group_advantages(rewards[order], ids[order], k=4), ordered[order], rtol=1e-12, atol=1e-12)
    for gid in ids.unique():
        members = rewards[ids == gid].double()
        expected = (members - members.mean()) / (members.std(correction=0) + 1e-4)
        assert torch.allclose(ordered[ids == gid], expected, rtol=1e-12, atol=1e-12)


def test_ids_that_fp32_would_merge_stay_apart() -> None:
    ids = torch.tensor([2**24, 2**24, 2**24 + 1, 2**24 + 1])
    rewards = torch.tensor([0.0, 1.0, 10.0, 30.0])
    assert ids.float().unique().numel() == 1
    assert group_advantages(rewards, ids, k=2).tolist() == pytest.approx([-1, 1, -1, 1], rel=1e-3)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, None])
def test_one_missing_reward_silences_its_group_and_no_other(broken: float | None) -> None:
    rewards = torch.tensor([1.0, 2.0, 4.0, 1.0, 2.0, 4.0])
    valid = torch.ones(6, dtype=torch.bool)
    if broken is None:
        valid[4] = False
    else:
        rewards[4] = broken
    ids = torch.tensor([1, 1, 1, 2, 2, 2])
    for norm in ADV_NORMS:
        advantages = group_advantages(rewards, ids, k=3, valid=valid, adv_norm=norm)
        alone = group_advantages(rewards[:3], ids[:3], k=3, adv_norm=norm)
        assert advantages[3:].tolist() == [0.0] * 3
        assert torch.equal(advantages[:3], alone)


def test_the_four_other_normalisers_by_hand() -> None:
    rewards, ids = torch.tensor([0.0, 2.0, 10.0, 18.0]), torch.tensor([0, 0, 1, 1])  # means 1, 14; stds 1, 4

    def normalised(norm: str, ddof: int = 0) -> list[float]:
        return group_advantages(rewards, ids, k=2, adv_norm=norm, adv_eps=0.0, adv_ddof=ddof).tolist()

    raw = math.sqrt((7.5**2 + 5.5**2 + 2.5**2 + 10.5**2) / 4)
    within = math.sqrt((1 + 1 + 16 + 16) / 4)
    assert normalised("none") == [-1, 1, -4, 4]
    assert normalised("max_group") == pytest.approx([-0.25, 0.25, -1, 1])
    assert normalised("batch") == pytest.approx([-1 / raw, 1 / raw, -4 / raw, 4 / raw])
    assert normalised("batch_centered") == pytest.approx([-1 / within, 1 / within, -4 / within, 4 / within])
    assert normalised("batch", 1)[1] == pytest.approx(1 / (raw * math.sqrt(4 / 3)))
    assert normalised("batch_centered", 1)[1] == pytest.approx(1 / (within * math.sqrt(4 / 3)))
    assert normalised("max_group", 1)[1] == pytest.approx(0.25 / math.sqrt(2))


def test_flat_groups_and_groups_without_values_get_zeros_whatever_the_normaliser() -> None:
    rewards, ids = torch.tensor([5.0, 5.0, 0.0, 1.0]), torch.tensor([0, 0, 1, 1])
    for norm in ADV_NORMS:
        advantages = group_advantages(rewards, ids, k=2, adv_norm=norm)
        assert advantages[:2].tolist() == [0.0, 0.0]
        assert advantages[3] > 0
        missing = group_advantages(torch.full((4,), math.nan), torch.zeros(4).long(), k=4, adv_norm=norm)
        assert missing.tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": 1}, "k is 1"),
        ({"adv_norm": "global"}, "adv_norm is 'global'"),
        ({"adv_ddof": 2}, "adv_ddof is 2"),
        ({"adv_eps": -1.0}, "adv_eps is -1.0"),
        ({"flat_eps": math.nan}, "flat_eps nan"),
        ({"adv_clip": 0.0}, "adv_clip is 0.0"),
        ({"rewards": torch.zeros(2, 1)}, "must be \\(2,\\) like group_ids"),
        ({"valid": torch.ones(3, dtype=torch.bool)}, "must be \\(2,\\) like group_ids"),
        ({"ids": torch.zeros(2)}, r"group_ids is torch.float32 .* must be integers"),
        ({"ids": torch.tensor([5, 9])}, "k=2 samples .gid 5: 1, gid 9: 1"),
    ],
)
def test_input_outside_its_bounds_is_refused(changes: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"rewards": torch.zeros(2), "ids": torch.zeros(2, dtype=torch.int64), "k": 2}
    with pytest.raises(ValueError, match=message):
        group_advantages(**(given | changes))


def combine(rewards: dict[str, list[float]], weights, ids, k: int, floors=None, **settings) -> CombinedAdvantages:
    """Combine rewards given as lists; NaN means not valid."""
    values = {name: torch.tensor(row, dtype=torch.float64) for name, row in rewards.items()}
    valid = {name: row.isfinite() for name, row in values.items()}
    return combine_rewards(values, valid, weights, torch.tensor(ids), k=k, floors=floors or {}, **settings)


def test_rewards_of_weight_zero_do_not_count_and_flat_groups_keep_their_weight() -> None:
    rewards = {"a": [0.0, 1.0, 3.0, 3.0, 2.0, 2.0], "b": [0.0, math.nan, 1.0, 2.0, 9.0, 0.0]}
    combined = combine(rewards, {"a": 1.0, "b": 0.0}, [4, 4, 2, 2, 9, 9], 2)
    assert combined.advantages.tolist() == pytest.approx([-1, 1, 0, 0, 0, 0], abs=3e-4)
    assert combined.gids.tolist() == [2, 4, 9]
    assert combined.flat.tolist() == [True, False, True]
    assert combined.incomplete.tolist() == [False] * 3
    assert combined.weights.tolist() == [1.0] * 6  # a KL term still acts in flat groups


def test_several_rewards_are_each_divided_by_their_std_and_then_summed_with_weights() -> None:
    combined = combine({"a": [0.0, 2.0, 4.0], "b": [30.0, 0.0, 0.0]}, {"a": 1.0, "b": 0.3}, [7, 7, 7], 3)
    std_a, std_b = math.sqrt(8 / 3), math.sqrt(200)
    expected = [-2 / std_a + 0.3 * 20 / std_b, -0.3 * 10 / std_b, 2 / std_a - 0.3 * 10 / std_b]
    assert combined.advantages.tolist() == pytest.approx(expected, rel=1e-12)


def test_a_reward_below_its_floor_is_damped_and_not_blown_up() -> None:
    noise = {"a": [0.0, 2.0], "b": [0.01, 0.0]}
    combined = combine(noise, {"a": 1.0, "b": 1.0}, [7, 7], 2, {"b": 0.1})
    assert combined.advantages.tolist() == pytest.approx([-1 + 0.005 / 0.1, 1 - 0.005 / 0.1], rel=1e-6)


def test_a_constant_reward_without_a_floor_adds_nothing_to_another():
    # Three times 0.1 in float64 has a mean above 0.1: a rounding over its own std would be of size 1.
    found = combine({"a": [0.0, 1.0, 2.0], "b": [0.1] * 3}, {"a": 1.0, "b": 1.0}, [0] * 3, 3, flat_eps=0.0)
    assert found.advantages.tolist() == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)], rel=1e-12)


def test_a_group_is_flat_when_every_weighted_reward_is_within_its_floor() -> None:
    rewards = {"a": [0.0, 0.05, 0.0, 0.05, 0.0, 0.5], "b": [1.0, 1.0, 1.0, 3.0, 1.0, 1.0], "c": [0.0, 9.0] * 3}
    combined = combine(rewards, {"a": 1.0, "b": 1.0, "c": 0.0}, [0, 0, 1, 1, 2, 2], 2, {"a": 0.1, "b": 0.1})
    assert combined.flat.tolist() == [True, False, False]
    assert combined.advantages[:2].tolist() == [0.0, 0.0]
    assert combined.weights.tolist() == [1.0] * 6
    single = combine({"a": [0.0, 0.05]}, {"a": 1.0}, [0, 0], 2, {"a": 0.1})
    assert single.flat.tolist() == [True]
    assert combine({"a": [0.0, 0.05]}, {"a": 1.0}, [0, 0], 2).flat.tolist() == [False]


def test_one_invalid_value_is_masked_in_its_own_reward_only() -> None:
    rewards = {"a": [0.0, 2.0, 7.0], "b": [0.0, 2.0, math.nan]}
    combined = combine(rewards, {"a": 1.0, "b": 1.0}, [7, 7, 7], 3)
    own = combine({"a": rewards["a"]}, {"a": 1.0}, [7, 7, 7], 3, adv_eps=0.0).advantages
    assert combined.incomplete.tolist() == [False]
    assert combined.weights.tolist() == [1.0] * 3
    assert (combined.advantages - own).tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-12)
    for norm in ("batch", "batch_centered"):  # the masked copy does not count in the std over all samples either
        found = combine(rewards, {"a": 1e-12, "b": 1.0}, [7, 7, 7], 3, adv_norm=norm)
        assert found.advantages.tolist() == pytest.approx([-1.0, 1.0, 0.0], abs=1e-9)


@pytest.mark.parametrize(
    ("a", "b", "incomplete", "weight"),
    [
        ([0.0, 1.0, math.nan], [0.0, 1.0, math.nan], True, 0.0),  # a copy lacks every reward
        ([0.0, 1.0, 2.0], [math.nan, math.nan, 1.0], True, 1.0),  # fewer than two copies valid in b
        ([0.0, math.nan, math.nan], [math.nan, 2.0, math.nan], True, 0.0),
        ([1.0, math.nan], [math.nan, 2.0], True, 0.0),  # nothing to compare in either
        ([math.nan, 1.0, 2.0], [0.0, math.nan, 1.0], False, 1.0),
        ([1.0, 1.0, math.nan], [math.nan] * 3, True, 0.0),  # equal values are not flat while one is missing
    ],
)
def test_an_incomplete_group_has_no_weight_unless_a_reward_can_be_compared(a, b, incomplete, weight):
    k = len(a)
    other = [0.0, 1.0, 5.0][:k]
    rewards, gids = {"a": a + other, "b": b + other}, [3] * k + [8] * k
    combined = combine(rewards, {"a": 1.0, "b": 1.0}, gids, k)
    assert combined.incomplete.tolist() == [incomplete, False]
    assert combined.weights.tolist() == [weight] * k + [1.0] * k
    assert (combined.advantages[:k] == 0).all().item() is (weight == 0)
    assert combined.advantages.isfinite().all()
    assert not combined.flat.any()
    watched = combine(rewards, {"a": 1.0, "b": 0.0}, gids, k)
    assert watched.incomplete.tolist() == [any(math.isnan(value) for value in a), False]


def test_an_incomplete_group_is_left_out_of_the_batch_normalisers() -> None:
    rewards = {"a": [0.0, 1000.0, math.nan, 0.0, 1.0, 2.0], "b": [math.nan] * 3 + [0.0, 1.0, 2.0]}
    for norm in ("batch", "batch_centered", "max_group"):
        combined = combine(rewards, {"a": 1.0, "b": 1.0}, [0, 0, 0, 1, 1, 1], 3, adv_norm=norm)
        assert combined.advantages.tolist() == pytest.approx([0, 0, 0, -(6**0.5), 0, 6**0.5], rel=1e-6)


def test_a_reward_that_a_group_lacks_adds_nothing_there_and_the_others_teach() -> None:
    rewards = {"a": [0.0, 2.0, 1.0, 3.0], "b": [math.nan, 9.0, 0.0, 2.0]}
    both = combine(rewards, {"a": 1.0, "b": 1.0}, [0, 0, 1, 1], 2)
    alone = combine({"a": rewards["a"]}, {"a": 1.0}, [0, 0, 1, 1], 2, adv_eps=0.0)
    assert both.advantages.tolist() == pytest.approx([-1.0, 1.0, -2.0, 2.0])
    assert both.advantages[:2].tolist() == pytest.approx(alone.advantages[:2].tolist())
    assert both.incomplete.tolist() == [True, False] and both.weights.tolist() == [1.0] * 4


@pytest.mark.parametrize("norm", ADV_NORMS)
def test_a_group_beyond_the_clip_is_scaled_as_a_whole_and_keeps_its_mean_of_zero(norm: str) -> None:
    rewards = {name: [9.0, 0.0, 0.0, 0.0, 0.1, 0.2, 0.3, 0.2] for name in "abcd"}
    weights, gids = dict.fromkeys(rewards, 1.0), [0] * 4 + [1] * 4
    free = combine(rewards, weights, gids, 4, adv_norm=norm).advantages
    bound = combine(rewards, weights, gids, 4, adv_norm=norm, adv_clip=5.0).advantages
    assert free[0] > 5.0
    assert bound[:4].tolist() == pytest.approx([5.0, -5 / 3, -5 / 3, -5 / 3])
    torch.testing.assert_close(bound[4:], free[4:] * min(1.0, 5.0 / free[4:].abs().max().item()))
    assert bound.view(2, 4).sum(dim=1).tolist() == pytest.approx([0.0, 0.0], abs=1e-12)


def test_weights_without_values_and_weights_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rewards \['b'\] have a weight but no values, got \['a'\]"):
        combine({"a": [0.0, 1.0]}, {"a": 1.0, "b": 1.0}, [0, 0], 2)
    with pytest.raises(ValueError, match="at least one must be non-zero"):
        combine({"a": [0.0, 1.0]}, {"a": 0.0}, [0, 0], 2)
