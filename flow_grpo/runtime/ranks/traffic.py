"""What ranks send each other, by kind, as metrics; `Ranks.sent` counts it."""

from __future__ import annotations

import torch

from flow_grpo.runtime.ranks.process_group import Ranks

KINDS = ("gradients", "weights", "tokens", "rows", "control")


def sent_metrics(ranks: Ranks) -> dict[str, float]:
    """Return `system/sent_<kind>_gib` of the kinds that there were: a rank's, on average (collective call)."""
    own = torch.tensor([[float(ranks.sent[kind]) for kind in KINDS]])
    mean = ranks.everyone.all_gather(own).mean(dim=0).tolist()
    return {f"system/sent_{kind}_gib": count / 2**30 for kind, count in zip(KINDS, mean, strict=True) if count}
