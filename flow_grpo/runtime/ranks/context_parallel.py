"""Sequence parallelism: ranks that compute one sample together, each on its share of the tokens.

Every rank of such a group has a slice of the patches of every latent frame, so that whatever belongs to a frame (its
camera, target or source) is on all of them. Only attention needs all tokens: for its duration ranks exchange tokens for
heads (DeepSpeed-Ulysses, arXiv 2309.14509). Where the heads do not divide by the ranks, these form teams: tokens are
exchanged for heads inside a team, and keys and values gathered from the other teams.

Outside of the network all ranks of a group hold the whole sample and compute the same. A rank's gradient is only a part
of the sample's: the sum over its group is the whole, and the mean over all ranks, which DDP and FSDP2 take, is
too small by the size of the group. `Share.join`, through which every gradient passes, makes up for it: its backward
pass adds up what all ranks of the group, which compute the same loss, ask of a slice.

Letters: B rows, S tokens of a sample, s those of one rank, H heads, d their width.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange
from torch import Tensor

from flow_grpo.runtime.ranks.process_group import Group, World

DeviceGroup = dist.ProcessGroup | None


class ContextParallel:
    """The ranks that share the tokens of a sample; by default this one alone, and nothing is exchanged.

    The device group is of the same ranks, for tensors on the device; the timeout is that of its collectives.

    Attributes:
        team: number of consecutive ranks that exchange tokens for heads.
    """

    def __init__(self, ranks: Group | None = None, device_group: DeviceGroup = None, timeout_s: float = 0.0) -> None:
        self.ranks = ranks or Group()
        self.team = 1
        self._group, self._team_group, self._mates_group = device_group, device_group, device_group
        self._timeout_s = timeout_s

    @property
    def size(self) -> int:
        """How many ranks share a sample."""
        return self.ranks.size

    def divide_heads(self, heads: int) -> None:
        """Form teams for attention of so many heads (collective call of all ranks)."""
        self.team = math.gcd(heads, self.size)
        if 1 < self.team < self.size:
            teams = torch.arange(dist.get_world_size()).view(-1, self.size // self.team, self.team)
            self._team_group = _own_group(teams.flatten(0, 1), self._timeout_s)
            self._mates_group = _own_group(teams.mT.flatten(0, 1), self._timeout_s)

    def share(self, patches: int) -> Share:
        """Share the patches of a frame evenly, the first ranks having one more where need be.

        Raises:
            ValueError: there are fewer patches than ranks.
        """
        if patches < self.size:
            raise ValueError(
                f"train.context_parallel is {self.size}, must be at most {patches}, the patches of a latent frame that "
                "its ranks share; lower it, or raise data.height and data.width"
            )
        return Share(self, tuple((patches + rank) // self.size for rank in reversed(range(self.size))))

    def gather(self, x: Tensor, patches: Sequence[int], *, teams: bool = False) -> list[Tensor]:
        """Gather (B, tokens, ...) of every rank, or of every team; each has so many `patches` of a frame."""
        own, group = self.ranks.rank, self._group
        if teams:
            own, group = own // self.team, self._mates_group
        frames, token = x.shape[1] // patches[own], len(x) * math.prod(x.shape[2:])
        parts = self._exchange([x] * len(patches), [frames * count * token for count in patches], group)
        return [part.view(len(x), -1, *x.shape[2:]) for part in parts]

    def exchange(self, outgoing: Sequence[Tensor], lengths: Sequence[int]) -> list[Tensor]:
        """Send each member of the team a tensor of any shape; receive a flat one of these lengths from each."""
        return self._exchange(outgoing, lengths, self._team_group)

    def _exchange(self, outgoing: Sequence[Tensor], lengths: Sequence[int], group: DeviceGroup) -> list[Tensor]:
        joined = torch.cat([part.flatten() for part in outgoing])
        apply: Any = _AllToAll.apply
        received: Tensor = apply(joined, [part.numel() for part in outgoing], list(lengths), group, self)
        return list(received.split(list(lengths)))


class _AllToAll(torch.autograd.Function):
    """`all_to_all_single` of flat tensors, whose backward pass sends the gradients back."""

    @staticmethod
    def forward(
        ctx: Any, flat: Tensor, send: list[int], receive: list[int], group: DeviceGroup, context: ContextParallel
    ) -> Tensor:
        ctx.given = send, receive, group, context
        return _all_to_all(flat, send, receive, group, context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        send, receive, group, context = ctx.given
        return _all_to_all(grad.contiguous(), receive, send, group, context), None, None, None, None


def _all_to_all(
    flat: Tensor, send: list[int], receive: list[int], group: DeviceGroup, context: ContextParallel
) -> Tensor:
    received = flat.new_empty(sum(receive))
    dist.all_to_all_single(received, flat, receive, send, group=group)
    context.ranks.sent["tokens"] += (len(flat) - send[dist.get_rank(group)]) * flat.itemsize
    return received


@dataclasses.dataclass(frozen=True)
class Share:
    """This rank's part of a sample's tokens; see the module."""

    context: ContextParallel  # the ranks that have the others
    patches: tuple[int, ...]  # how many of a frame each of them has

    @property
    def own(self) -> int:
        """Patches of a frame that this rank has."""
        return self.patches[self.context.ranks.rank]

    def cut(self, x: Tensor) -> Tensor:
        """Cut this rank's (B, s, ...) out of all tokens (B, S, ...)."""
        if self.context.size == 1:
            return x
        before = sum(self.patches[: self.context.ranks.rank])
        frames: Tensor = x.unflatten(1, (-1, sum(self.patches)))
        return frames.narrow(2, before, self.own).flatten(1, 2)

    def join(self, x: Tensor) -> Tensor:
        """Gather all tokens (B, S, ...) from each rank's (B, s, ...); the inverse of `cut`."""
        if self.context.size == 1:
            return x
        parts = zip(self.context.gather(x, self.patches), self.patches, strict=True)
        return torch.cat([part.unflatten(1, (-1, patches)) for part, patches in parts], dim=2).flatten(1, 2)

    def to_heads(self, x: Tensor) -> Tensor:
        """Exchange own tokens for all heads (B, s, H, d) for the team's, for own heads (B, t, H / team, d)."""
        if self.context.team == 1:
            return x
        outgoing = rearrange(x, "b s (team h) d -> team b s h d", team=self.context.team)
        token = outgoing[0].numel() // self.own
        parts = self.context.exchange(list(outgoing), [token * patches for patches in self._of_team()])
        return torch.cat([part.view(len(x), -1, *outgoing.shape[3:]) for part in parts], dim=1)

    def to_keys(self, x: Tensor) -> Tensor:
        """Exchange (B, s, H, d) for all tokens for own heads (B, S, H / team, d), ordered by team and rank."""
        x, size = self.to_heads(x), self.context.team
        if size == self.context.size:
            return x
        teams = [sum(self.patches[first : first + size]) for first in range(0, self.context.size, size)]
        return torch.cat(self.context.gather(x, teams, teams=True), dim=1)

    def to_tokens(self, x: Tensor) -> Tensor:
        """Exchange (B, t, H / team, d) for own tokens for all heads (B, s, H, d); the inverse of `to_heads`."""
        if self.context.team == 1:
            return x
        team = self._of_team()
        frames = x.shape[1] // sum(team)
        outgoing = x.split([frames * patches for patches in team], dim=1)
        shape = (len(x), frames * self.own, *x.shape[2:])
        parts = self.context.exchange(outgoing, [math.prod(shape)] * len(team))
        return torch.cat([part.view(shape) for part in parts], dim=2)

    def _of_team(self) -> tuple[int, ...]:
        # Patches of a frame on each member of this rank's team.
        size = self.context.team
        first = self.context.ranks.rank // size * size
        return self.patches[first : first + size]


def share_samples(world: World, size: int, device: torch.device) -> tuple[World, ContextParallel]:
    """Let consecutive ranks share samples, `train.context_parallel` of them each one (collective call).

    It returns the world with its groups `data` and `sample`, and `sample` for tensors on the device.
    """
    if size == 1:
        return world, ContextParallel()
    everyone, timeouts = world.all, world.timeouts
    members = torch.arange(everyone.size).view(-1, size)
    gloo = _own_group(members, timeouts.control_s, "gloo")
    sample = dataclasses.replace(everyone, rank=everyone.rank % size, size=size, gloo=gloo)
    gloo_data = _own_group(members.T, timeouts.control_s, "gloo")
    data = dataclasses.replace(everyone, rank=everyone.rank // size, size=len(members), gloo=gloo_data)
    device_group = gloo if device.type == "cpu" else _own_group(members, timeouts.device_s)
    context = ContextParallel(sample, device_group, timeouts.device_s)
    return dataclasses.replace(world, data=data, sample=sample), context


def _own_group(members: Tensor, timeout_s: float, backend: str | None = None) -> DeviceGroup:
    # A group for each row of `members`, this rank's is returned (collective call).
    timeout = datetime.timedelta(seconds=timeout_s)
    own: DeviceGroup
    own, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timeout, backend=backend)
    return own
