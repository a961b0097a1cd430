"""Rewards of k copies of a condition -> group-normalised advantages, float64 on the CPU, alike on every rank.

A group is *flat* when its rewards differ by no more than a floor: there is nothing to learn from, its advantages are
exactly 0 but its samples keep their weight (a KL term still acts). It is *incomplete* when a value it needs is missing
or not finite, so that dynamic sampling does not take it: when a copy has no value at all, advantages and weights are 0;
when a reward has too few values to compare, that reward says nothing and the others still teach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

ADV_NORMS = ("group", "batch", "batch_centered", "max_group", "none")


@dataclasses.dataclass(frozen=True)
class CombinedAdvantages:
    """What N gathered samples in G groups learn from; CPU tensors.

    Attributes:
        advantages: (N,) float64, exactly 0 in flat groups and where the weight is 0.
        weights: (N,) float64 sample weights: 0 in groups with a copy that lacks every reward, and in those where no
            reward has two valid copies, else 1.
        flat: (G,) bool, every reward of non-zero weight is flat; never set for an incomplete group.
        incomplete: (G,) bool, a copy lacks every reward, or fewer than two copies are valid in one of them.
        gids: (G,) int64, ascending; `flat` and `incomplete` are in this order.
    """

    advantages: Tensor
    weights: Tensor
    flat: Tensor
    incomplete: Tensor
    gids: Tensor


@dataclasses.dataclass(frozen=True)
class _Groups:
    """Which sample belongs to which group: gids (G,) ascending, member (N,) position of each sample's gid."""

    gids: Tensor
    member: Tensor

    def sum(self, values: Tensor) -> Tensor:
        """Return (G,) sums of (N,) values."""
        return values.new_zeros(len(self.gids)).index_add(0, self.member, values)

    def extreme(self, values: Tensor, reduce: str) -> Tensor:
        """Return (G,) "amax" or "amin" of (N,) values."""
        return values.new_zeros(len(self.gids)).scatter_reduce(0, self.member, values, reduce, include_self=False)


@dataclasses.dataclass(frozen=True)
class _Reward:
    """One reward seen group by group.

    Attributes:
        raw: (N,) value, 0 where not valid.
        centred: (N,) value minus the mean of its group's valid values; 0 where not valid.
        valid: (N,) bool, given as valid and finite.
        count: (G,) valid values per group.
        spread: (G,) largest minus smallest valid value, 0 without any.
    """

    raw: Tensor
    centred: Tensor
    valid: Tensor
    count: Tensor
    spread: Tensor


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    k: int,
    valid: Tensor | None = None,
    adv_norm: str = "group",
    adv_eps: float = 1e-4,
    adv_ddof: int = 0,
    flat_eps: float = 1e-4,
) -> Tensor:
    """Return the (N,) float64 advantages of one reward: (reward - group mean) / (std + adv_eps).

    Args:
        rewards: (N,) gathered rewards, k per group in any order.
        group_ids: (N,) integer group of every sample.
        k: group size.
        valid: (N,) bool; None takes every finite reward. A group with one invalid or non-finite reward is incomplete.
        adv_norm: which std: "group", its own; "batch", of all rewards; "batch_centered", of all rewards minus their
            group's mean; "max_group", the largest of any group; "none" only centres. Over complete groups.
        adv_eps: added to the std; much smaller values turn noise into full-size signal.
        adv_ddof: 0 or 1, the std divides by count - adv_ddof.
        flat_eps: a group whose rewards differ by no more than this is flat: advantages exactly 0.

    Raises:
        ValueError: a group that has not k samples (naming its gid), ids that are not integers, shapes that disagree, or
            a parameter outside its bounds.
    """
    _check_parameters(k, adv_norm, adv_eps, adv_ddof, flat_eps)
    groups = _group(group_ids, k)
    reward = _per_group("rewards", rewards, valid, groups)
    live = (reward.count == k)[groups.member]
    std = _std(reward, groups, live, adv_norm, adv_ddof)
    divisor = torch.ones_like(std) if adv_norm == "none" else std + adv_eps
    silent = ~live | (reward.spread <= flat_eps)[groups.member]
    return _divide(reward.centred, divisor).masked_fill(silent, 0.0)


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
) -> CombinedAdvantages:
    """Return the advantages of several rewards: each normalised on its own in its group, then summed with weights.

    With one reward of non-zero weight its normaliser is `std + adv_eps`, as in `group_advantages`; with several each is
    divided by `max(std, floor)`, so that a reward whose copies are equally good is not blown up. A single invalid value
    is left out of its own reward only, and a reward of which a group has fewer than two values adds nothing there.

    Args:
        rewards: name -> (N,) gathered values; names without a weight are ignored.
        valid: name -> (N,) bool.
        weights: name -> weight; a reward of weight 0 is only watched.
        group_ids: (N,) integer group of every sample.
        k: group size.
        floors: name -> range below which a group is flat in this reward, in its unit; at least `flat_eps` is used.
        adv_norm: see `group_advantages`, as all others.
        adv_eps: added to the std of a single reward.
        adv_ddof: 0 or 1.
        flat_eps: smallest floor of every reward.

    Raises:
        ValueError: as `group_advantages`, a weighted reward that is not given, or no reward of non-zero weight.
    """
    _check_parameters(k, adv_norm, adv_eps, adv_ddof, flat_eps)
    groups = _group(group_ids, k)
    active = _active(rewards, valid, weights)
    seen = {name: _per_group(name, rewards[name], valid[name], groups) for name in active}
    floor = {name: max(floors.get(name, 0.0), flat_eps) for name in active}
    lacking, too_few = _lacking(seen, groups), torch.stack([seen[name].count < 2 for name in active])
    incomplete = lacking | too_few.any(dim=0)
    level = torch.stack([seen[name].spread <= floor[name] for name in active]).all(dim=0)
    live = ~(lacking | too_few.all(dim=0))[groups.member]
    advantages = torch.zeros(len(group_ids), dtype=torch.float64)
    for name in active:
        std = _std(seen[name], groups, live, adv_norm, adv_ddof)
        divisor = std + adv_eps if len(active) == 1 else std.clamp(min=floor[name])
        divisor = torch.ones_like(std) if adv_norm == "none" else divisor
        advantages += weights[name] * _divide(seen[name].centred, divisor)
    silent = ~live | level[groups.member]
    return CombinedAdvantages(
        advantages.masked_fill(silent, 0.0), live.double(), level & ~incomplete, incomplete, groups.gids
    )


def _lacking(seen: Mapping[str, _Reward], groups: _Groups) -> Tensor:
    """Return (G,) bool: a copy lacks every reward."""
    has_any = torch.stack([reward.valid for reward in seen.values()]).any(dim=0)
    return groups.sum((~has_any).double()) > 0


def _active(rewards: Mapping[str, Tensor], valid: Mapping[str, Tensor], weights: Mapping[str, float]) -> list[str]:
    """Return the names of rewards with a non-zero weight."""
    active = [name for name, weight in weights.items() if weight != 0]
    if not active:
        raise ValueError(f"reward weights are {dict(weights)}, at least one must be non-zero")
    missing = [name for name in active if name not in rewards or name not in valid]
    if missing:
        raise ValueError(f"rewards {missing} have a weight but no values, got {sorted(rewards)}")
    return active


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


def _per_group(name: str, values: Tensor, valid: Tensor | None, groups: _Groups) -> _Reward:
    shape = groups.member.shape
    if values.shape != shape or (valid is not None and valid.shape != shape):
        shapes = tuple(values.shape), None if valid is None else tuple(valid.shape)
        raise ValueError(f"{name} and its validity have shapes {shapes}, must be {tuple(shape)} like group_ids")
    values = values.detach().cpu().double()
    usable = values.isfinite()
    if valid is not None:
        usable = usable & valid.cpu().bool()
    values = values.masked_fill(~usable, 0.0)
    count = groups.sum(usable.double())
    mean = groups.sum(values) / count.clamp(min=1)
    largest = groups.extreme(values.masked_fill(~usable, -torch.inf), "amax")
    smallest = groups.extreme(values.masked_fill(~usable, torch.inf), "amin")
    spread = (largest - smallest).clamp(min=0)  # -inf without a valid value
    # The mean of equal values may miss them by a rounding: a constant group is exactly 0.
    silent = ~usable | (spread == 0)[groups.member]
    centred = (values - mean[groups.member]).masked_fill(silent, 0.0)
    return _Reward(values, centred, usable, count, spread)


def _std(reward: _Reward, groups: _Groups, live: Tensor, adv_norm: str, ddof: int) -> Tensor:
    """Return the (N,) std that each sample's reward is compared with; live (N,) marks samples of complete groups.

    Two-pass: sums of squares of raw rewards cancel, in fp32 down to negative variances.
    """
    own = (groups.sum(reward.centred.square()) / (reward.count - ddof).clamp(min=1)).sqrt()[groups.member]
    used = live & reward.valid
    if adv_norm in ("group", "none") or not used.any():
        return own
    if adv_norm == "max_group":
        return own[used].max().expand_as(own)
    if adv_norm == "batch_centered":
        return (reward.centred[used].square().sum() / (used.sum() - ddof)).sqrt().expand_as(own)
    return reward.raw[used].std(correction=ddof).expand_as(own)


def _divide(centred: Tensor, divisor: Tensor) -> Tensor:
    """Return centred / divisor, 0 where centred is: a std, its floor and eps may all be 0 there."""
    return torch.where(centred == 0, 0.0, centred / divisor)


def _check_parameters(k: int, adv_norm: str, adv_eps: float, adv_ddof: int, flat_eps: float) -> None:
    if k < 2:
        raise ValueError(f"k is {k}, must be at least 2: an advantage compares copies of one condition")
    if adv_norm not in ADV_NORMS:
        raise ValueError(f"adv_norm is {adv_norm!r}, must be one of {', '.join(ADV_NORMS)}")
    if adv_ddof not in (0, 1):
        raise ValueError(f"adv_ddof is {adv_ddof}, must be 0 or 1")
    if not (adv_eps >= 0 and flat_eps >= 0):
        raise ValueError(f"adv_eps is {adv_eps} and flat_eps {flat_eps}, both must be >= 0")
