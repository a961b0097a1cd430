"""Statistics of an update: collected on the device, read once, reduced over all ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flow_grpo.maths.bootstrap import percentiles
from flow_grpo.maths.loss import LossTerms
from flow_grpo.runtime.ranks.process_group import RankError, World

SAME_NORM = 1e-3  # by which the norms of one averaged gradient may differ between devices


class UpdateStats:
    """Collects the loss terms of one epoch's updates on one rank."""

    def __init__(self) -> None:
        self.passes: list[dict[str, Tensor]] = []  # of a micro-batch each: name -> 1-dimensional values
        self.norms: list[Tensor] = []
        self.skipped = 0  # optimizer steps in which every sample on every rank has weight 0
        self.bad = self.bounded = 0

    def add(self, terms: LossTerms, share: Tensor, drift: Tensor | None) -> None:
        """Collect the terms of b samples in one pass.

        Args:
            terms: terms of the loss, one value per sample.
            share: (b,) weight of each sample in the mean over all ranks, samples and passes of an optimizer step.
            drift: (b,) new minus rollout log-probability before the first update, else None.
        """
        own = {name: getattr(terms, name).detach().flatten() for name in ("ratio", "log_ratio", "clipped", "kl")}
        own["loss"] = (terms.per_sample.detach() * share).sum()[None]
        own["drift"] = share.new_zeros(1) if drift is None else drift.abs()
        self.passes.append(own)

    def stepped(self, norm: Tensor, bound: float) -> None:
        """Count an optimizer step with its gradient norm and the norm it was clipped to."""
        self.norms.append(norm.detach())
        self.bounded += int(norm > bound)

    def forget(self, passes: int) -> None:
        """Count an optimizer step that is not finite, and drop its statistics: all behind so many passes."""
        self.bad += 1
        del self.passes[passes:]

    def joined(self, name: str) -> Tensor:
        """Return the values of all passes."""
        return torch.cat([own[name] for own in self.passes])


def gather_stats(stats: UpdateStats, world: World) -> dict[str, float]:
    """Return the `policy/` and `train/` metrics over all ranks (collective call).

    Ratios are per latent element (geometric mean over the elements of a sample). `approx_kl` estimates the KL of the
    old policy to the new one as the mean of log p_old - log p_new over what the old one drew (Schulman, "Approximating
    KL Divergence", k1), in nats per latent element; 0 with one update, before which the ratio is taken.
    `ratio_first_max_abs_log` is the largest distance between the rollout's log-probability and the update's own before
    the first update, 0 when both share their geometry.
    """
    metrics = {
        "train/updates": float(len(stats.norms)),
        "train/skipped_updates": float(stats.skipped),
        "train/bad_steps": float(stats.bad),
    }
    if not stats.norms:
        return metrics
    ratio = stats.joined("ratio").cpu().double()
    local = {
        "count": float(len(ratio)),
        "ratio": ratio.sum().item(),
        "approx_kl": stats.joined("log_ratio").cpu().double().neg().sum().item(),
        "clipped": stats.joined("clipped").float().sum().item(),
        "kl": stats.joined("kl").mean().item() * len(ratio),
        "loss": stats.joined("loss").sum().item(),
        "drift": stats.joined("drift").max().item(),
    }
    by_name = world.data.all_gather_scalars(local)
    total = {name: float(column.sum()) for name, column in by_name.items()}
    norms = torch.stack(stats.norms)
    # Ranks may have unequally many ratios.
    padded = torch.cat([ratio, ratio.new_zeros(int(by_name["count"].max()) - len(ratio))])
    of_ranks = zip(world.data.all_gather(padded[None]), by_name["count"], strict=True)
    ratios = torch.cat([row[: int(count)] for row, count in of_ranks])
    return metrics | {
        "policy/ratio_mean": total["ratio"] / total["count"],
        "policy/ratio_min": float(ratios.min()),
        "policy/ratio_max": float(ratios.max()),
        **percentiles("policy/ratio_p", ratios),
        "policy/ratio_first_max_abs_log": float(by_name["drift"].max()),
        "policy/clip_fraction": total["clipped"] / total["count"],
        "policy/approx_kl": total["approx_kl"] / total["count"],
        "policy/kl": total["kl"] / total["count"],
        "train/loss": total["loss"] / len(stats.norms),
        "train/grad_norm": norms.mean().item(),
        "train/grad_norm_max": norms.max().item(),
        "train/grad_clipped": stats.bounded / len(norms),
    }


def check_averaged(norms: Sequence[float], world: World) -> None:
    """Check that the latest gradient was averaged over the ranks: otherwise their weights part in silence.

    Collective call.

    Args:
        norms: norms of this rank's gradients, the latest last.
        world: who takes part.

    Raises:
        RankError: on every rank.
    """
    latest = world.all.all_gather(torch.tensor(norms[-1:] or [0.0], dtype=torch.float64))
    if float(latest.max()) > (1 + SAME_NORM) * float(latest.min()):
        raise RankError(
            f"the gradients are not averaged over the ranks, their norms are {latest.tolist()}: with gradients enabled "
            "the policy must call its network through `module`, and every weight that requires a gradient must have a "
            "part in the velocity"
        )
