"""The group structure of an epoch, printed with `config.debug`.

The lines are an interface: users of the k-repeat sampler look for them word for word.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.records import ScoredBatch

SHOWN = 30  # characters of a prompt


def batch_view(batch: ScoredBatch, sigmas: Tensor, weights: dict[str, float]) -> dict[str, object]:
    """Return a batch under the key names that flow_grpo's scripts use.

    Args:
        batch: B samples with K recorded steps.
        sigmas: (S+1,) noise levels; `timesteps` (B, K) is 1000 times the recorded ones.
        weights: reward name -> weight, for the weighted sum `rewards["avg"]` (B,) over the valid rewards.
    """
    samples, trajectory = batch.samples, batch.samples.trajectory
    rewards = {name: result.values for name, result in batch.rewards.items()}
    return {
        "prompts": [condition.prompt for condition in batch.conditions],
        "prompt_embeds": samples.conditioning.prompt_embeds,
        **samples.conditioning.inputs,
        "timesteps": 1000 * sigmas[trajectory.steps],
        "latents": trajectory.states[:, :-1],
        "next_latents": trajectory.states[:, 1:],
        "log_probs": trajectory.log_probs,
        "rewards": {**rewards, "avg": average_reward(batch, weights)},
    }


def average_reward(batch: ScoredBatch, weights: dict[str, float]) -> Tensor:
    """Return the (B,) weighted sum of the valid rewards, for printing only: advantages never use it."""
    results = batch.rewards
    terms = [weights[name] * results[name].values.where(results[name].valid, torch.zeros(())) for name in results]
    return torch.stack(terms).sum(dim=0)


def repeat_over_steps(values: Tensor, steps: int) -> Tensor:
    """Return (N, steps): each sample's value once per recorded step."""
    return values[:, None].repeat(1, steps)


def prompt_line(number: int, prompts: Sequence[str]) -> str:
    """Return the line of the prompts that a rank sampled in batch `number`."""
    return f"[Batch {number}] Prompts (前30字符): {[prompt[:SHOWN] for prompt in prompts]}"


def merged_lines(views: Sequence[dict[str, object]], expected: int, k: int) -> list[str]:
    """Return the lines that show this rank's merged samples.

    Args:
        views: `batch_view` of all samples of the epoch on this rank, one per video size.
        expected: how many there should be.
        k: group size.
    """
    names = ("latents", "log_probs", "target_cameras")  # the last where the model reads a camera
    shapes = [f"  {name}: {view[name].shape}" for view in views for name in names if name in view]  # type: ignore[attr-defined]
    total = sum(len(view["prompts"]) for view in views)  # type: ignore[arg-type, misc]
    return [
        "合并后的samples形状（验证k个副本的分布）:",
        *shapes,
        f"  总样本数（当前GPU）: {total}",
        f"  期望的总样本数: {expected}",
        f"  k (group_size): {k}",
    ]


def gathered_lines(total: int, k: int) -> list[str]:
    """Return the lines that show the counts gathered from all ranks."""
    return [
        f"Gather后的总样本数（所有GPU）: {total}",
        f"k (group_size): {k}",
        f"期望的唯一样本数: {total // k}",
        f"每个唯一样本应该有 {k} 个副本",
    ]


def group_lines(gids: Tensor, slots: Tensor, indices: Tensor, world_size: int) -> list[str]:
    """Return a line per group, sorted: which rank holds which copy.

    Args:
        gids: (N,) int64 group of every sample in gathered order, N / W per rank.
        slots: (N,) int64 copy number.
        indices: (N,) int64 position of the condition in the data set. One that is drawn twice gives two groups.
        world_size: W.
    """
    places: dict[tuple[int, int], list[tuple[int, int]]] = {}
    per_rank = len(gids) // world_size
    for row, (gid, slot, index) in enumerate(zip(gids.tolist(), slots.tolist(), indices.tolist(), strict=True)):
        places.setdefault((gid, index), []).append((slot, row // per_rank))
    groups = Counter(index for _, index in places)
    return [
        f"  group {gid}, condition {index}"
        + (f" (in {groups[index]} groups)" if groups[index] > 1 else "")
        + ": "
        + ", ".join(f"copy {slot} on rank {rank}" for slot, rank in sorted(copies))
        for (gid, index), copies in sorted(places.items())
    ]


def show(lines: Sequence[str]) -> None:
    """Write lines to standard output in one call: other processes cannot write between them."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
