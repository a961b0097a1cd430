"""Group-relative advantages of GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1), for one or several rewards.

The k samples of one condition form a group. Instead of a learned value function, the group's mean reward is the
baseline: A = (r - mean of the group) / (std + eps). Computed in float64 on the CPU from the rewards of all ranks, so
the result is bit-identical on every rank.

Two kinds of group need care:

    flat          all rewards within a noise floor. There is no signal, and dividing by a tiny std would turn noise into
                  a full-size gradient: advantages are exactly 0. Weights stay 1, so a KL term still acts.
    incomplete    a sample without any valid reward, or a reward with fewer than two valid values in the group. Dynamic
                  sampling rejects such groups. Advantages and weights are 0 where a sample has no valid reward or no
                  reward can be compared; a reward with too few values contributes 0 and the others still count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import torch
from torch import Tensor

ADV_NORMS = ("group", "batch", "batch_centered", "max_group", "none")


@dataclasses.dataclass(frozen=True)
class CombinedAdvantages:
    """Advantages of N gathered samples in G groups; CPU tensors.

    Attributes:
        advantages: (N,) float64, exactly 0 in flat groups and where the weight is 0.
        weights: (N,) float64 sample weights in the loss: 0 for groups in which a sample has no valid reward or no
            reward has two valid values, else 1.
        flat: (G,) bool, every reward of non-zero weight is within its floor; never set for an incomplete group.
        incomplete: (G,) bool, a sample has no valid reward, or a reward has fewer than two valid values.
        gids: (G,) int64 group ids, ascending; the order of `flat` and `incomplete`.
    """

    advantages: Tensor
    weights: Tensor
    flat: Tensor
    incomplete: Tensor
    gids: Tensor


@dataclasses.dataclass(frozen=True)
class _Groups:
    """The grouping of N samples: gids (G,) ascending, member (N,) with gids[member] the gid of each sample."""

    gids: Tensor
    member: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Return (..., G) sums of (..., N) values."""
        return values.new_zeros(*values.shape[:-1], len(self.gids)).index_add(-1, self.member, values)

    def extreme(self, values: Tensor, reduce: str) -> Tensor:
        """Return (..., G) the maximum ("amax") or minimum ("amin") of (..., N) values in every group."""
        empty = values.new_zeros(*values.shape[:-1], len(self.gids))
        return empty.scatter_reduce(-1, self.member.expand_as(values), values, reduce, include_self=False)


@dataclasses.dataclass(frozen=True)
class _Rewards:
    """R rewards and their statistics per group."""

    weights: dict[str, float]  # name -> weight of each, none of them 0
    raw: Tensor  # (R, N) values, 0 where not valid
    valid: Tensor  # (R, N) bool, marked valid and finite
    centred: Tensor  # (R, N) values minus the mean of their group's valid values; 0 where not valid
    count: Tensor  # (R, G) number of valid values
    spread: Tensor  # (R, G) largest minus smallest valid value, 0 if there is none


def combine_rewards(  # noqa: PLR0913 - a flat call that reads like the formula
    rewards: Mapping[str, Tensor],
    valid: Mapping[str, Tensor],
    weights: Mapping[str, float],
    group_ids: Tensor,
    *,
    k: int,
    floors: Mapping[str, float],
    adv_norm: str = "group",
    adv_eps: float = 1e-4,
    adv_ddof: int = 0,
    flat_eps: float = 1e-4,
    adv_clip: float = math.inf,
) -> CombinedAdvantages:
    """Return the advantages of one or several rewards, each normalised within its group, then summed with weights.

        one reward        A = weight * (r - mean) / (std + adv_eps)
        several rewards   A = sum over rewards of weight * (r - mean) / max(std, floor)

    A group whose largest |A| exceeds `adv_clip` is scaled down to it as a whole. Bounding single values would leave a
    mean other than 0, which raises or lowers the probability of all of the group's samples.

    The floor keeps a reward that hardly differs within a group from being scaled up to full size. Normalising before
    summing makes the weights independent of the rewards' units. An invalid value is left out of its own reward only.

    Args:
        rewards: name -> (N,) values gathered from all ranks, in any order; names without a weight are ignored.
        valid: name -> (N,) bool; non-finite values count as invalid.
        weights: name -> weight; rewards of weight 0 do not count.
        group_ids: (N,) integer group id of every sample, each occurring k times.
        k: group size, at least 2.
        floors: name -> noise floor, in the reward's unit: a group whose values differ by no more is flat in this
            reward. At least `flat_eps`.
        adv_norm: the std to divide by: "group", the group's own; "batch", of all rewards; "batch_centered", of all
            rewards minus their group's mean; "max_group", the largest of any group; "none" divides by 1. Groups of
            weight 0 are left out of the last four.
        adv_eps: added to the std of a single reward; much smaller than the reward's noise it amplifies that noise.
        adv_ddof: 0 or 1, the std divides by count - adv_ddof.
        flat_eps: smallest floor of every reward.
        adv_clip: largest |A|.

    Raises:
        ValueError: a group without exactly k samples (naming its gid), ids that are not integers, shapes that disagree,
            a parameter out of bounds, a weighted reward without values, or no reward of non-zero weight.
    """
    _check_parameters(k, adv_norm, adv_eps, adv_ddof, flat_eps, adv_clip)
    groups = _group(group_ids, k)
    seen = _measure(rewards, valid, weights, groups)
    floor = torch.tensor([max(floors.get(name, 0.0), flat_eps) for name in seen.weights], dtype=torch.float64)[:, None]
    lacking = groups.sum((~seen.valid.any(dim=0)).double()) > 0  # (G,) a sample has no valid reward
    too_few = seen.count < 2
    live = ~(lacking | too_few.all(dim=0))[groups.member]
    incomplete, level = lacking | too_few.any(dim=0), (seen.spread <= floor).all(dim=0)
    divisor = _divisor(seen, groups, live, floor, adv_norm, adv_eps, adv_ddof)
    # Where a reward is the group's mean, the divisor may be 0 as well.
    normalised = torch.where(seen.centred == 0, 0.0, seen.centred / divisor)
    parts = [weight * part for weight, part in zip(seen.weights.values(), normalised, strict=True)]
    advantages = sum(parts, torch.zeros(())).masked_fill(~live | level[groups.member], 0.0)
    largest = groups.extreme(advantages.abs(), "amax")
    advantages *= torch.where(largest > adv_clip, adv_clip / largest, 1.0)[groups.member]
    return CombinedAdvantages(advantages, live.double(), level & ~incomplete, incomplete, groups.gids)


def _group(group_ids: Tensor, k: int) -> _Groups:
    if group_ids.is_floating_point() or group_ids.dtype == torch.bool or group_ids.ndim != 1:
        raise ValueError(
            f"group_ids is {group_ids.dtype} of shape {tuple(group_ids.shape)}, must be integers of shape (N,): "
            "fp32 merges ids above 2^24"
        )
    gids, member, sizes = torch.unique(group_ids.cpu().long(), return_inverse=True, return_counts=True)
    wrong = [f"gid {gid}: {size}" for gid, size in zip(gids.tolist(), sizes.tolist(), strict=True) if size != k]
    if wrong:
        raise ValueError(
            f"{len(wrong)} of {len(gids)} groups have not k={k} samples ({', '.join(wrong[:8])}); gather all ranks of "
            "whole batches, and draw with the k-repeat sampler"
        )
    return _Groups(gids, member)


def _measure(
    rewards: Mapping[str, Tensor], valid: Mapping[str, Tensor], weights: Mapping[str, float], groups: _Groups
) -> _Rewards:
    active = {name: weight for name, weight in weights.items() if weight != 0}
    if not active:
        raise ValueError(f"reward weights are {dict(weights)}, at least one must be non-zero")
    if missing := [name for name in active if name not in rewards or name not in valid]:
        raise ValueError(f"rewards {missing} have a weight but no values, got {sorted(rewards)}")
    shape = groups.member.shape
    for name in active:
        if rewards[name].shape != shape or valid[name].shape != shape:
            shapes = tuple(rewards[name].shape), tuple(valid[name].shape)
            raise ValueError(f"{name} and its validity have shapes {shapes}, must be {tuple(shape)} like group_ids")
    values = torch.stack([rewards[name].detach().cpu().double() for name in active])
    usable = values.isfinite() & torch.stack([valid[name].cpu().bool() for name in active])
    values = values.masked_fill(~usable, 0.0)
    count = groups.sum(usable.double())
    mean = groups.sum(values) / count.clamp(min=1)
    largest = groups.extreme(values.masked_fill(~usable, -torch.inf), "amax")
    smallest = groups.extreme(values.masked_fill(~usable, torch.inf), "amin")
    spread = (largest - smallest).clamp(min=0)  # -inf without a valid value
    # The mean of equal values may differ from them by rounding; a constant group must be exactly 0.
    without_signal = ~usable | (spread == 0)[:, groups.member]
    centred = (values - mean[:, groups.member]).masked_fill(without_signal, 0.0)
    return _Rewards(active, values, usable, centred, count, spread)


def _divisor(
    seen: _Rewards, groups: _Groups, live: Tensor, floor: Tensor, adv_norm: str, adv_eps: float, ddof: int
) -> Tensor:
    """Return the (R, N) std of each sample: its group's, the largest group's, or a pooled one; at least the floor.

    `live` (N,) marks the samples of groups that carry a signal; only these enter a maximum or a pooled std. A single
    reward has no floor (R, 1), but `adv_eps` more.

    Two-pass, because the difference of sums of squares cancels, in fp32 down to negative variances.
    """
    if adv_norm == "none":
        return torch.ones_like(seen.centred)
    std = (groups.sum(seen.centred.square()) / (seen.count - ddof).clamp(min=1)).sqrt()[:, groups.member]
    for row, used in enumerate(live & seen.valid):
        if adv_norm == "max_group" and used.any():
            std[row] = std[row, used].max()
        if adv_norm == "batch_centered" and used.any():
            std[row] = (seen.centred[row, used].square().sum() / (used.sum() - ddof)).sqrt()
        if adv_norm == "batch" and used.any():
            std[row] = seen.raw[row, used].std(correction=ddof)
    return std + adv_eps if len(std) == 1 else std.clamp(min=floor)


def _check_parameters(k: int, adv_norm: str, adv_eps: float, adv_ddof: int, flat_eps: float, adv_clip: float) -> None:
    if k < 2:
        raise ValueError(f"k is {k}, must be at least 2: an advantage compares copies of one condition")
    if adv_norm not in ADV_NORMS:
        raise ValueError(f"adv_norm is {adv_norm!r}, must be one of {', '.join(ADV_NORMS)}")
    if adv_ddof not in (0, 1):
        raise ValueError(f"adv_ddof is {adv_ddof}, must be 0 or 1")
    if not (adv_eps >= 0 and flat_eps >= 0):
        raise ValueError(f"adv_eps is {adv_eps} and flat_eps {flat_eps}, both must be >= 0")
    if not adv_clip > 0:
        raise ValueError(f"adv_clip is {adv_clip}, must be > 0")
