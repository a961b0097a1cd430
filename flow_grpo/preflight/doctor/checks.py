"""Checks of samples, gradients and updates: pure functions of what was measured, with their bounds.

Letters: B rows, K stochastic steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flow_grpo.preflight.doctor.findings import Finding, finding
from flow_grpo.records import Guidance

STANDARD_ERRORS = 5.0  # a false alarm with probability 6e-7
KS_BOUND = 2.745  # the same probability under Kolmogorov's law, 2 exp(-2 x^2) (Smirnov 1948)
KS_ELEMENTS = 1_000_000  # at most: sorting more finds nothing more
PROBE_FACTOR = 10.0  # how much larger the maximum over an epoch may be than over one batch
SHARE_OF_CLIP = 0.1  # of clip_range that a mismatch may use up
CLIP_USUAL = (1e-6, 1e-2)  # clip ranges of mean log-probabilities are 1e-5 to 1e-3, GRPO-Guard's 2e-6: a decade around
EPS_FACTOR, SHARE_NEAR_EPS = 10.0, 0.05  # at 10 x adam_eps the eps makes Adam's step 9 % shorter
LARGE_SHARE, DESTROYING_SHARE = 0.03, 0.2  # of a weight's size that one update moves it; recipes: 0.004 to 0.006
BF16_KL = 1e-5  # rounding: 2^-9 of the velocity, at gains up to 1.5 a KL of 4e-6


def kolmogorov_smirnov(values: Tensor) -> float:
    """Return sqrt(n) times the largest gap between the (n,) values' distribution and the standard normal."""
    ordered = values.cpu().double().sort().values
    count = len(ordered)
    normal, ranks = torch.special.ndtr(ordered), torch.arange(count + 1) / count
    gap = torch.maximum((ranks[1:] - normal).max(), (normal - ranks[:-1]).max())
    return math.sqrt(count) * float(gap)


def check_residuals(steps: Tensor, residuals: Tensor) -> Finding:
    """Check that the drawn latents follow the Gaussian under which they are scored.

    Args:
        steps: (B, K) int64 CPU denoising steps.
        residuals: (B, K, ...) (next latents - mean) / std.
    """
    said, wrong = [], False
    for step in steps.unique().tolist():
        flat = residuals[(steps == step).to(residuals.device)].flatten()
        some = flat[:: max(1, flat.numel() // KS_ELEMENTS)].cpu().double()
        count, mean, std = len(some), float(some.mean()), float(some.std(correction=0))
        distance = kolmogorov_smirnov(some)
        wrong |= not (
            abs(mean) < STANDARD_ERRORS / math.sqrt(count)
            and abs(std - 1) < STANDARD_ERRORS / math.sqrt(2 * count)
            and distance < KS_BOUND
        )
        said.append(
            f"step {step}: mean {mean:+.4f} std {std:.4f} Kolmogorov-Smirnov {distance:.2f} of {count} elements"
        )
    way_out = "the rollout draws from another Gaussian than it scores: its step must be maths.sde.sample of transition"
    measured = f"(next latents - mean) / std must be standard normal; {'; '.join(said)}"
    return finding("residuals", measured, fail=way_out if wrong else "")


def check_latents_fp32(states: Tensor) -> Finding:
    """Check by their values that stored latents are fp32: rounding to half precision must change them.

    The ratio alone may not show rounded latents on devices where replays are not exact to the bit.

    Args:
        states: (B, M, C, F, H, W) of the trajectory.
    """
    count = states.shape[1]
    said, rounded = f"{count} stored latents per sample are fp32", False
    for dtype in (torch.float16, torch.bfloat16):  # bf16 last: most of its values survive fp16 as well
        short = sum(torch.equal(own, own.to(dtype).to(own.dtype)) for own in states.unbind(1))
        if short:
            said, rounded = f"{short} of {count} stored latents per sample were rounded to {dtype}", True
    way_out = "keep the latents of stochastic steps in fp32: see Trajectory.states in flow_grpo/records.py"
    return finding("latents_fp32", said, fail=way_out if rounded else "")


def ratio_bound(clip_range: float, *, exact: bool) -> float:
    """Return the largest acceptable |log-ratio| before the first update."""
    return 0.0 if exact else SHARE_OF_CLIP * clip_range


def check_ratio(log_ratios: Tensor, clip_range: float, old_log_prob: str, *, exact: bool, layer: str = "") -> Finding:
    """Check that replaying a rollout batch reproduces its log-probabilities.

    With `old_log_prob="detach"` the ratio is taken against the update's own call, so differences in rounding, such as
    those of compiled blocks, only warn; beyond the clip range it is no rounding.

    Args:
        log_ratios: (B, K) log-probabilities of the replay minus those of the rollout.
        clip_range: half width of the unclipped ratio.
        old_log_prob: `train.old_log_prob`.
        exact: the device reproduces calls bit for bit, as a CPU does in fp32.
        layer: the first layer that differs, if one does.
    """
    worst = float(log_ratios.abs().max())
    bound = ratio_bound(clip_range, exact=exact)
    said = f"largest |log-ratio| before the first update {worst:.2g}, bound {bound:.2g}"
    way_out = (
        "rollout and update must call the same network with the same latents: see flow_grpo/algorithm/update/updater.py"
    )
    hidden = old_log_prob == "detach" and not exact and worst <= clip_range
    warn = "" if worst <= bound else way_out
    return finding("ratio", f"{said}; {layer}" if layer else said, fail="" if hidden else warn, warn=warn)


def check_ratio_by_batch_size(
    gaps: Mapping[int, float], clip_range: float, micro_batch: int, old_log_prob: str
) -> Finding:
    """Check how much log-probabilities depend on the number of rows in a call.

    Args:
        gaps: rows of a call -> largest |log-ratio| to the rollout's own call; includes `micro_batch`.
        clip_range: half width of the unclipped ratio.
        micro_batch: rows of the update's calls.
        old_log_prob: `train.old_log_prob`.
    """
    bound = SHARE_OF_CLIP * clip_range
    said = ", ".join(f"{rows}: {gap:.2g}" for rows, gap in gaps.items())
    harmful = old_log_prob == "rollout" and not gaps[micro_batch] <= bound
    way_out = "pass --config.train.old_log_prob=auto: it recomputes old log-probabilities in the update's own batches"
    shaky = not all(gap <= bound for gap in gaps.values())
    corrected = "train.old_log_prob corrects for it; to lower it use fp32 or the rollout's batch size in the update"
    return finding(
        "ratio_by_batch_size",
        f"largest |log-ratio| of the same samples replayed in batches of {said}; harmless up to {bound:.2g}",
        fail=way_out if harmful else "",
        warn=corrected if shaky else "",
    )


def check_ratio_in_update(gap: float, probe_gap: float, clip_range: float, *, exact: bool) -> Finding:
    """Check that the samples of an epoch reach the update unchanged and in order.

    Args:
        gap: largest |log-ratio| of the first update to the rollout, in nats.
        probe_gap: the same of one batch that was replayed directly.
        clip_range: half width of the unclipped ratio, in nats.
        exact: the device reproduces calls bit for bit.
    """
    bound = 0.0 if exact else max(SHARE_OF_CLIP * clip_range, PROBE_FACTOR * probe_gap)
    said = f"largest |log-ratio| between the rollout of an epoch and its first update {gap:.2g}, bound {bound:.2g}"
    way_out = "latents or conditions change on their way into the update: see Collector and TrainingBatch.take"
    return finding("ratio_in_update", said, fail="" if gap <= bound else way_out)


def check_noise(
    gids: Sequence[int], slots: Sequence[int], noise_ids: Sequence[Sequence[int]], *, same_initial_noise: bool
) -> Finding:
    """Check that no two of the N samples over all ranks were drawn from the same noise.

    Args:
        gids: group of every sample.
        slots: copy number of every sample.
        noise_ids: hashes of each sample's initial noise and step noise.
        same_initial_noise: the copies of a group share their initial noise.
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
            shared.append(f"{len(same)} {what} shared, for example by (group, copy) {same[0][:3]}")
    said = "; ".join(shared) or f"{len(noise_ids)} samples of {len(set(gids))} groups, each with its own noise"
    way_out = "draw noise from (seed, gid, slot): from all three, and from nothing of the rank or the batch"
    return finding("noise", said, fail=way_out if shared else "")


def check_adapters(mode: str, adapted: int, trained: int) -> Finding:
    """Check that something is trained.

    Args:
        mode: `model.trained`.
        adapted: modules with a LoRA adapter.
        trained: number of trained weights.
    """
    said = f"model.trained={mode}: {trained:,} trained weights" + (f", {adapted} adapters" if mode == "lora" else "")
    nothing = trained == 0 or (mode == "lora" and adapted == 0)
    way_out = "set model.lora_targets to names of the network's own Linear layers, such as blocks.0.attn1.to_q"
    return finding("adapters", said, fail=way_out if nothing else "")


def check_guidance(training: Guidance, evaluation: Guidance) -> Finding:
    """Check that training and the held-out evaluation sample with the same guidance."""
    scales = training.scale, evaluation.scale
    same = scales[0] == scales[1] and (scales[0] == 1 or training.negative_prompt == evaluation.negative_prompt)
    said = f"training samples with guidance {scales[0]:g}, evaluation with {scales[1]:g}"
    if not same and scales[0] == scales[1]:
        said += " and another negative prompt"
    way_out = (
        "a rising reward/ may be guidance that the weights recover: look at the change of eval/, measured with the "
    )
    way_out += "same guidance before and after, and at the evaluation's videos"
    return finding("guidance", said, warn="" if same else way_out)


def check_gradient_coverage(mode: str, norms: Sequence[Mapping[str, float]]) -> Finding:
    """Check that every trained tensor receives a gradient.

    Args:
        mode: `model.trained`; other modes than "lora" may train weights that the loss does not depend on.
        norms: of the first two updates, weight -> gradient norm over all ranks. Two, because one factor of a LoRA
            adapter has no gradient until the other has moved.
    """
    without = [name for name in norms[0] if not any(row[name] > 0 for row in norms)]
    said = f"{len(norms[0]) - len(without)} of {len(norms[0])} trained tensors received a gradient in two updates"
    said += f"; not {', '.join(without[:2])}" if without else ""
    way_out = "remove from model.lora_targets what the velocity does not depend on" if without else ""
    hard = mode == "lora" or len(without) == len(norms[0])
    return finding("gradient_coverage", said, fail=way_out if hard else "", warn=way_out)


def check_rate(shares: Sequence[float], learning_rate: float) -> Finding:
    """Check that one optimizer step does not replace the weights: Adam's first one moves every weight by its rate.

    Args:
        shares: learning rate / root mean square of every trained tensor that is not zero.
        learning_rate: `train.learning_rate`.
    """
    share = float(torch.tensor(shares).median()) if shares else 0.0
    said = f"one update moves a weight by {share:.2g} of its size (median of {len(shares)} tensors)"
    way_out = f"lower train.learning_rate={learning_rate:g}"
    destroys = f"one update replaces the weights: {way_out}" if share > DESTROYING_SHARE else ""
    return finding("rate", said, fail=destroys, warn=way_out if share > LARGE_SHARE else "")


def check_gradient_size(below: int, present: int, adam_eps: float) -> Finding:
    """Check that gradients are large beside Adam's eps, which shortens the step of those that are not.

    Args:
        below: elements of the trained weights' gradient that are not 0 and smaller than 10 x adam_eps.
        present: elements that are not 0.
        adam_eps: of the optimizer.
    """
    share = below / max(1, present)
    said = f"{share:.1%} of the {present:,} gradients are below {EPS_FACTOR:g} x train.adam_eps={adam_eps:g}"
    way_out = f"Adam hardly moves these weights: pass --config.train.adam_eps={adam_eps * 1e-4:g}"
    return finding("gradient_size", said, warn=way_out if share > SHARE_NEAR_EPS else "")


def check_clip(log_ratios: Tensor, clip_range: float, updates: int) -> Finding:
    """Check the clip range against how far one update moves the log-probabilities of a batch.

    Args:
        log_ratios: (B, K) after one update.
        clip_range: half width of the unclipped ratio.
        updates: optimizer steps per epoch; only from the second on does the clip act.
    """
    values = log_ratios.flatten().cpu().double()
    share = float((values.abs() > clip_range).float().mean())
    said = f"after one update log-ratio {float(values.mean()):+.2g} +- {float(values.std(correction=0)):.2g}, "
    said += f"{share:.0%} beyond train.clip_range={clip_range:g}"
    if not values.any():
        return finding("clip", said, fail="nothing moved: check train.learning_rate and model.trained")
    low, high = CLIP_USUAL
    warn, all_clipped = "", share > 0.99 and updates > 1
    if not low <= clip_range <= high:
        warn = f"log-probabilities are means over latent elements: use {low:g} to {high:g}, not the 0.2 usual for sums"
    elif share > 0.5:
        warn = "most of the signal is clipped: lower train.learning_rate or raise train.clip_range"
    elif share == 0 and updates > 1:
        warn = "the clip never acts: lower train.clip_range towards the spread"
    return finding("clip", said, fail=warn if all_clipped else "", warn=warn)


def check_kl(coefficient: float, before: float, after: float, gradient: float, *, exact: bool) -> Finding:
    """Check that the KL to the reference policy starts at 0, rises with an update, and has a gradient.

    Args:
        coefficient: `train.kl_coef`, above 0.
        before: KL before the first update, in nats per latent element.
        after: KL after it.
        gradient: norm of the KL's gradient over the trained weights, after the update.
        exact: the device reproduces calls bit for bit.
    """
    said = f"{before:.2g} before and {after:.2g} after one update (times train.kl_coef {coefficient * after:.2g}), "
    said += f"gradient norm {gradient:.2g}"
    starts = before == 0 if exact else before < BF16_KL
    way_out = "the reference must be the starting policy, and the KL must carry the gradient of the current one"
    return finding("kl", said, fail="" if starts and after > before and gradient > 0 else way_out)
