"""Shared encodings: a source video that several ranks need is encoded by one of them."""

from __future__ import annotations

import json
from collections.abc import Sequence

from flow_grpo.models.policy import Policy, SharesEncodings
from flow_grpo.records import Condition
from flow_grpo.runtime.ranks.exchange import hand_out, owners
from flow_grpo.runtime.ranks.process_group import World


def share_encodings(policy: Policy, conditions: Sequence[Condition], world: World, phase: str) -> None:
    """Make sure that `policy.encode` finds its source videos encoded (collective call).

    The copies of a condition lie on several ranks, which would each encode its video. What no rank lacks costs nothing
    but a question. A policy of one's own without the methods `lacking` and `learn` encodes on every rank.

    Args:
        policy: whose encoders they are.
        conditions: conditions of this rank in the coming round.
        world: who takes part; ranks that share samples too.
        phase: what an error, which reaches all ranks before they exchange, says that it failed in.
    """
    group = world.all
    if group.size == 1 or not isinstance(policy, SharesEncodings):
        return
    with world.sync_errors(phase):
        lacking = policy.lacking(conditions)
    wanted = [json.loads(text) for text in group.gather_text(json.dumps(list(lacking)))]
    owner = owners(wanted)
    if not owner:
        return
    with world.sync_errors(phase):
        own = {key: lacking[key]() for key, rank in owner.items() if rank == group.rank}
    policy.learn(hand_out(own, owner, wanted, group))
