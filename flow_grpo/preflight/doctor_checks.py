"""The doctor's judgements on samples and weights: pure functions of what was measured, a reason beside every bound.

Letters: B rows, K stochastic steps, n latent elements looked at.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.preflight.findings import Finding, finding

SIGMAS_ALLOWED = 5.0  # standard errors: a chance of 6e-7
KS_ALLOWED = 2.745  # the same chance under Kolmogorov's law, 2 exp(-2 x^2) (Smirnov 1948)
KS_ELEMENTS = 1_000_000  # looked at at most: sorting more finds nothing more
TIMES_ALONE = 10.0  # how much further than one batch all of an epoch's may lie: the largest of more values
SHARE_OF_CLIP = 0.1  # of clip_range: what a mismatch may use up of it
CLIP_USUAL = (1e-6, 1e-2)  # recipes that clip a mean log-probability use 1e-5 to 1e-3, GRPO-Guard 2e-6: a decade around


def kolmogorov_smirnov(values: Tensor) -> float:
    """Return sqrt(n) times the largest gap between the (n,) values' distribution and the standard normal one.

    Args:
        values: (n,) on the CPU.
    """
    ordered = values.cpu().double().sort().values
    count = len(ordered)
    normal, ranks = torch.special.ndtr(ordered), torch.arange(count + 1) / count
    gap = torch.maximum((ranks[1:] - normal).max(), (normal - ranks[:-1]).max())
    return math.sqrt(count) * float(gap)


def check_residuals(residuals: Mapping[int, Tensor]) -> list[Finding]:
    """Judge what was drawn, seen from the Gaussian it is scored under: it must be standard normal.

    Args:
        residuals: step -> (next latents - mean) / std, of any shape.
    """
    said, wrong = [], False
    for step, values in residuals.items():
        flat = values.flatten()
        some = flat[:: max(1, flat.numel() // KS_ELEMENTS)].cpu().double()
        count, mean, std = len(some), float(some.mean()), float(some.std(correction=0))
        distance = kolmogorov_smirnov(some)
        wrong |= not (
            abs(mean) < SIGMAS_ALLOWED / math.sqrt(count)
            and abs(std - 1) < SIGMAS_ALLOWED / math.sqrt(2 * count)
            and distance < KS_ALLOWED
        )
        said.append(f"step {step}: mean {mean:+.4f} std {std:.4f} KS {distance:.2f} over {count} elements")
    way_out = "the rollout draws from another Gaussian than it scores: its step must be maths.sde.sample of transition"
    return [finding("residuals", "; ".join(said), fail=way_out if wrong else "")]


def check_stored(states: Tensor) -> list[Finding]:
    """Judge by its values whether what is remembered is fp32: none of it may survive rounding unchanged.

    Where calls need not agree to the last bit, the ratio may not show it.

    Args:
        states: (B, M, C, F, H, W) of the trajectory.
    """
    count = states.shape[1]
    said, short = f"{count} remembered states in fp32", False
    for dtype in (torch.float16, torch.bfloat16):  # the shorter last: most of its values survive the other as well
        rounded = sum(torch.equal(own, own.to(dtype).to(own.dtype)) for own in states.unbind(1))
        if rounded:
            said, short = f"{rounded} of {count} remembered states were rounded to {dtype}", True
    way_out = "keep the latents of stochastic steps in fp32: see Trajectory.states in flow_grpo/records.py"
    return [finding("stored", said, fail=way_out if short else "")]


def ratio_bound(clip_range: float, *, exact: bool) -> float:
    """Return how far the log-ratio may be from 0 before the first update."""
    return 0.0 if exact else SHARE_OF_CLIP * clip_range


def check_ratio(
    log_ratios: Tensor, clip_range: float, old_log_prob: str, *, exact: bool, layer: str = ""
) -> list[Finding]:
    """Judge the log-ratio before the first update, at the rollout's own geometry.

    "detach" takes the ratio against the update's own call, so what compiled blocks round differently does no harm then;
    more than the clip range is no rounding.

    Args:
        log_ratios: (B, K) log-probabilities of the replay minus those of the rollout.
        clip_range: half width of the unclipped ratio.
        old_log_prob: `train.old_log_prob`.
        exact: both sides make the same calls bit by bit, as they do on the CPU in fp32.
        layer: where the two calls part, if they do.
    """
    worst = float(log_ratios.abs().max())
    bound = ratio_bound(clip_range, exact=exact)
    said = f"largest log-ratio {worst:.2g}, at most {bound:.2g}"
    way_out = (
        "rollout and update must call the same network with the same latents: see flow_grpo/algorithm/update/updater.py"
    )
    hidden = old_log_prob == "detach" and not exact and worst <= clip_range
    warn = "" if worst <= bound else way_out
    return [finding("ratio", f"{said}; {layer}" if layer else said, fail="" if hidden else warn, warn=warn)]


def check_geometry(gaps: Mapping[int, float], clip_range: float, micro_batch: int, old_log_prob: str) -> list[Finding]:
    """Judge what other batch shapes do to log-probabilities.

    Args:
        gaps: rows of a call -> largest log-ratio to the rollout's own; the update's own must be among them.
        clip_range: half width of the unclipped ratio.
        micro_batch: rows of the update's calls.
        old_log_prob: `train.old_log_prob`.
    """
    bound = SHARE_OF_CLIP * clip_range
    said = ", ".join(f"{rows} rows {gap:.2g}" for rows, gap in gaps.items())
    kept = old_log_prob == "rollout" and not gaps[micro_batch] <= bound
    way_out = "pass --config.train.old_log_prob=auto: it scores the rollout again in the update's own batches"
    shaky = not all(gap <= bound for gap in gaps.values())
    compared = "train.old_log_prob makes up for it; a smaller effect needs fp32 or the rollout's batch size"
    return [
        finding(
            "geometry",
            f"log-ratio in calls of {said}, at most {bound:.2g} is harmless",
            fail=way_out if kept else "",
            warn=compared if shaky else "",
        )
    ]


def check_carried(gap: float, alone: float, clip_range: float, *, exact: bool) -> list[Finding]:
    """Judge what the update finds of the epoch that was rolled out: the samples themselves, in their order.

    Args:
        gap: largest log-ratio of the first update to the rollout.
        alone: the same of one batch that was handed over directly.
        clip_range: half width of the unclipped ratio, in nats.
        exact: both sides make the same calls bit by bit.
    """
    bound = 0.0 if exact else max(SHARE_OF_CLIP * clip_range, TIMES_ALONE * alone)
    said = f"largest log-ratio of the first update {gap:.2g}, at most {bound:.2g}"
    way_out = "latents or conditions change on their way into the update: see Collector and TrainingBatch.take"
    return [finding("carried", said, fail="" if gap <= bound else way_out)]


def check_noise(
    gids: Sequence[int], slots: Sequence[int], noise_ids: Sequence[Sequence[int]], *, same_initial_noise: bool
) -> list[Finding]:
    """Judge the noise of N samples over all ranks: no two were given the same.

    Args:
        gids: group of every sample.
        slots: which copy each is.
        noise_ids: hashes of each sample's initial noise and step noise.
        same_initial_noise: the copies of a group share their first noise.
    """
    owners = [(gid, 0 if same_initial_noise else slot) for gid, slot in zip(gids, slots, strict=True)]
    both = {"initial noise": owners, "step noise": list(zip(gids, slots, strict=True))}
    shared = []
    for column, (what, keys) in enumerate(both.items()):
        by_noise: dict[int, set[tuple[int, int]]] = {}
        for key, pair in zip(keys, noise_ids, strict=True):
            by_noise.setdefault(pair[column], set()).add(key)
        same = [sorted(users) for users in by_noise.values() if len(users) > 1]
        if same:
            shared.append(f"{len(same)} {what} shared, such as by (group, copy) {same[0][:3]}")
    said = "; ".join(shared) or f"{len(noise_ids)} samples of {len(set(gids))} groups, each with noise of its own"
    way_out = "draw noise by (seed, gid, slot): a rank's own seed or position must not enter, nor be all that enters"
    return [finding("noise", said, fail=way_out if shared else "")]


def check_alike(name: str, digests: Sequence[str], what: str, way_out: str) -> list[Finding]:
    """Judge whether all ranks hold the same: one digest of each."""
    count = len(set(digests))
    said = (
        f"{what} alike on {len(digests)} rank(s)" if count == 1 else f"{what} of {count} kinds on {len(digests)} ranks"
    )
    return [finding(name, said, fail="" if count == 1 else way_out)]


def check_adapters(mode: str, adapted: int, trained: int) -> list[Finding]:
    """Judge what is trained.

    Args:
        mode: `model.trained`.
        adapted: modules that carry a low-rank adapter.
        trained: trained weights.
    """
    said = f"model.trained={mode}: {trained:,} trained weights" + (f", {adapted} adapters" if mode == "lora" else "")
    nothing = trained == 0 or (mode == "lora" and adapted == 0)
    way_out = "set model.lora_targets to names of the network's own Linear layers, such as blocks.0.attn1.to_q"
    return [finding("adapters", said, fail=way_out if nothing else "")]


def check_received(mode: str, norms: Sequence[Mapping[str, float]]) -> list[Finding]:
    """Judge whether all trained weights receive gradient.

    Args:
        mode: `model.trained`; what is trained in full may hold weights that the loss never meets, adapters may not.
        norms: of the first two updates, weight -> norm of its gradient over all ranks. Two, because the gradient of one
            factor of an adapter is 0 as long as the other is.
    """
    without = [name for name in norms[0] if not any(row[name] > 0 for row in norms)]
    said = f"{len(norms[0]) - len(without)} of {len(norms[0])} trained tensors received gradient"
    said += f"; not {', '.join(without[:2])}" if without else ""
    way_out = "leave out of model.lora_targets what the velocity does not depend on" if without else ""
    hard = mode == "lora" or len(without) == len(norms[0])
    return [finding("received", said, fail=way_out if hard else "", warn=way_out)]


def check_clip(log_ratios: Tensor, clip_range: float, updates: int) -> list[Finding]:
    """Judge the clip range by how far one update moves the log-probability of B held samples.

    Args:
        log_ratios: (B, K) after one update.
        clip_range: half width of the unclipped ratio.
        updates: optimizer steps per epoch; the clip acts from the second on.
    """
    values = log_ratios.flatten().cpu().double()
    share = float((values.abs() > clip_range).float().mean())
    said = f"after one update log-ratio {float(values.mean()):+.2g} +- {float(values.std(correction=0)):.2g}, "
    said += f"{share:.0%} beyond train.clip_range={clip_range:g}"
    if not values.any():
        return [finding("clip", said, fail="nothing moved: look at train.learning_rate and at what is trained")]
    low, high = CLIP_USUAL
    warn = ""
    if not low <= clip_range <= high:
        warn = f"the ratio is that of a mean over latent elements: {low:g} to {high:g}, not 0.2 as of a sum"
    elif share > 0.5:
        warn = "most of the signal is clipped: lower train.learning_rate or raise train.clip_range"
    elif share == 0 and updates > 1:
        warn = "the clip never acts: lower train.clip_range towards the spread"
    return [finding("clip", said, warn=warn)]


def check_kl(coefficient: float, before: float, after: float, gradient: float, *, exact: bool) -> list[Finding]:
    """Judge the KL to the starting policy, in nats per latent element, and the norm of its gradient after one update.

    Args:
        coefficient: `train.kl_coef`, above 0.
        before: KL before the first update; 0, or rounding where calls are not `exact`.
        after: KL after it.
        gradient: norm over the trained weights.
        exact: both sides make the same calls bit by bit.
    """
    said = f"{before:.2g} before and {after:.2g} after one update (times train.kl_coef {coefficient * after:.2g}), "
    said += f"gradient norm {gradient:.2g}"
    # Rounding of a network in bf16: 2^-9 of the velocity, at gains up to 1.5 a KL of 4e-6.
    starts = before == 0 if exact else before < 1e-5
    way_out = "the reference must be the starting policy, and the KL must carry the gradient of the current one"
    fine = starts and after > before and gradient > 0
    return [finding("kl", said, fail="" if fine else way_out)]
