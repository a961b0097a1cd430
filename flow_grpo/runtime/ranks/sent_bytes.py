"""What ranks send each other, by kind: the bytes of gradients, and metrics of what `World.sent` counts."""

from __future__ import annotations

import torch

from flow_grpo.runtime.ranks.process_group import World

KINDS = ("gradients", "weights", "tokens", "rows", "control")


def gradient_bytes(sharding: str, trained: int, world_size: int, *, passes: float, steps: float) -> float:
    """Return the bytes that a rank sends for gradients, along a ring.

    Args:
        sharding: `train.sharding`.
        trained: trainable parameters.
        world_size: number of ranks.
        passes: backward passes.
        steps: optimizer steps, before each of which one of the passes averages.
    """
    once = 4.0 * trained * (world_size - 1) / world_size
    if sharding == "ddp":
        return 2 * once * steps  # ring all-reduce: reduce-scatter and all-gather
    return once * passes


def sent_metrics(world: World) -> dict[str, float]:
    """Return `system/sent_<kind>_gib` of the kinds that there were: a rank's, on average (collective call)."""
    own = torch.tensor([[float(world.sent[kind]) for kind in KINDS]])
    mean = world.all.all_gather(own).mean(dim=0).tolist()
    return {f"system/sent_{kind}_gib": count / 2**30 for kind, count in zip(KINDS, mean, strict=True) if count}
