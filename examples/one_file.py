"""GRPO for a video model: the whole algorithm in one file, to be read from top to bottom.

    python examples/one_file.py        # on one CPU core, from the project's folder

The model films a given video again along a commanded camera path, but it does not know how far a command means. One
epoch of GRPO teaches it a little of that:

    sample     8 videos, the copies, of each of 8 conditions; copies differ by the noise of one denoising step
    score      every video: does the camera follow its command, does the picture look like the true view
    compare    every copy with the others of its condition: its advantage is what it scores above their mean
    update     make the steps that led to the better copies more likely, and those to the worse copies less likely

The numbers are those of `train_grpo.py --config config/grpo.py:tiny_recam` on one process, bit for bit; a test compares
them. That program adds what long runs need (many devices, checkpoints, checks) and what other recipes need. Data, model
and rewards come from the library; everything between them is on this page.

Letters: B rows (samples) of a batch, k copies of a condition, S denoising steps, C F H W latent channels, frames, height
and width, T h w video frames, rows and columns. Noise levels sigma run from 1 (noise) to 0 (clean):

    latents = (1 - sigma) * clean + sigma * noise,    the network predicts    velocity = noise - clean
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch
from torch import Tensor

from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.splits import set_aside
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.models.adapters import trained_names
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import WanPolicy, load_networks
from flow_grpo.records import Condition, Conditioning
from flow_grpo.rewards.base import Reward, build_reward

# The recipe, config/grpo.py:tiny_recam. Its knobs have the names in brackets where these differ.
SEED = 0
EPOCHS = 130  # [num_epochs]
MODEL = "assets/tiny_recam"
DATA, WORLD = "data/tiny_world", "tiny"  # textured rooms, rendered at the first start
SIZE = (5, 24, 32)  # T, h, w
TUNE_SCENES = 8  # training scenes that are kept for choosing knobs

K = 8  # copies of a condition
BATCH, BATCHES = 16, 4  # rows of a batch, batches of an epoch: 64 videos, 8 conditions [train_batch_size, ...]
STEPS, SHIFT = 8, 3.0  # S, and how much longer the schedule stays with noisy levels
NOISE_LEVEL = 0.7  # strength of a stochastic step
SDE_STEPS = (0, 1, 2, 3, 4, 5)  # one of these is a condition's stochastic step: the early ones decide the camera path
TAIL_STEPS = 3  # longer steps after it

WEIGHTS = {"room_rot": 1.0, "room_trans": 1.0, "target_psnr": 1.0}  # of degrees, metres and decibels
FLAT_EPS, ADV_CLIP = 1e-4, 5.0

COPIES = 4  # of 8 that are trained: the best 2 and the worst 2 of every condition
MICRO_BATCH = 16  # rows of one backward pass [train.batch_size]
CLIP_RANGE = 1e-3
LEARNING_RATE, WARMUP_STEPS = 4e-4, 0
ADAM = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-4}
MAX_GRAD_NORM, MAX_GRAD_RATIO = 10.0, 5.0
EMA_DECAY = 0.95

EVAL_CONDITIONS, EVAL_BATCH = 160, 16  # of scenes that are never trained on


# --- 1. Randomness -------------------------------------------------------------------------------------------------
# A draw is a function of what it is for, never of what was drawn before: samples stay the same, whichever process makes
# them, in whichever batch, and after whichever restart.


def key(*parts: object) -> int:
    """Return a 63-bit hash: unlike seed + step, no two seeds share a stream."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a generator that draws what belongs to these parts."""
    return torch.Generator().manual_seed(key(*parts))


# --- 2. Which videos to sample -------------------------------------------------------------------------------------


def plan(epoch: int, conditions: int) -> list[tuple[int, int, int, int]]:
    """Return the (step, gid, slot, index) of an epoch's samples.

    `step` counts batches over the whole run. `gid` is the group: unique for every draw of a condition, so that copies
    are compared within a draw, even where two draws have the same caption. `slot` says which of the k copies it is, and
    `index` is the condition's position in the data set.
    """
    groups = BATCH // K  # of a batch
    rows = []
    for step in range(epoch * BATCHES, (epoch + 1) * BATCHES):
        for slot in range(K):  # copies of a group lie apart: over several devices, each gets some of every group
            for gid in range(step * groups, (step + 1) * groups):
                number, place = divmod(gid, conditions)  # passes over the data set, each in an order of its own
                order = torch.randperm(conditions, generator=generator(SEED, "pass", number))
                rows.append((step, gid, slot, int(order[place])))
    return rows


def stochastic_step(gid: int) -> int:
    """Return the one denoising step of a group that adds noise and is trained.

    All copies have the same one: they are compared by what this step's noise made of them. Of 6 groups in a row each
    has another, so that all steps are trained equally often.
    """
    cycle, place = divmod(gid, len(SDE_STEPS))
    order = torch.randperm(len(SDE_STEPS), generator=generator(SEED, "sde window", cycle))
    return SDE_STEPS[int(order[place])]


# --- 3. Noise levels -----------------------------------------------------------------------------------------------


def noise_levels(u: Tensor) -> Tensor:
    """Return the fp32 sigmas of times u in [0, 1], 1 is noise: SD3's timestep shift (arXiv 2403.03206, eq. 23)."""
    return (SHIFT * u / (1 + (SHIFT - 1) * u)).float()


U = 1 - torch.arange(STEPS + 1, dtype=torch.float64) / STEPS
SIGMAS = noise_levels(U)  # (S+1,): step i leads from SIGMAS[i] to SIGMAS[i + 1]
# (S+1, TAIL_STEPS+1): row i leads from SIGMAS[i] to 0.
TAILS = noise_levels(U[:, None] * (1 - torch.arange(TAIL_STEPS + 1, dtype=torch.float64) / TAIL_STEPS))


# --- 4. Denoising steps --------------------------------------------------------------------------------------------


def per_sample(scalars: Tensor) -> Tensor:
    """Return (B,) scalars in the shape in which they multiply latents, (B, 1, 1, 1, 1) fp32."""
    return scalars.float().view(-1, 1, 1, 1, 1)


def follow_ode(
    policy: WanPolicy, latents: Tensor, levels: Tensor, given: Conditioning, *, second_order: bool = False
) -> Tensor:
    """Denoise (B, C, F, H, W) latents without adding noise, every row along its own noise levels (B, n+1).

    A first-order (Euler) step follows the velocity. A second-order one (Adams-Bashforth with steps of unequal length)
    also corrects for how the velocity changed since the step before: as good as two calls of the network, for one.
    """
    exact = levels.double()
    for i in range(levels.shape[1] - 1):
        velocity = policy.velocity(latents, levels[:, i], given)
        length = exact[:, i + 1] - exact[:, i]  # negative: sigma falls
        if second_order and i > 0:
            half = length / (exact[:, i] - exact[:, i - 1]) / 2
            latents = latents + per_sample(length * (1 + half)) * velocity - per_sample(length * half) * previous
        else:
            latents = latents + per_sample(length) * velocity
        previous = velocity
    return latents


def coefficients(steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keep, kappa and std, each (B,) float64, of stochastic steps.

    An ODE step has no density, so nothing could become more likely. Flow-GRPO (arXiv 2505.05470, eq. 9) takes one step
    of an SDE with (nearly) the same marginals instead. With the network's estimates of clean latents,
    x0 = x - sigma * v, and of noise, x1 = x + (1 - sigma) * v, it draws

        x' = mean + std * z,    z ~ N(0, 1),    mean = (1 - sigma') * x0 + c * x1  =  keep * x - kappa * v
    """
    sigma, after = SIGMAS[steps].double(), SIGMAS[steps + 1].double()
    capped = sigma.clamp(max=float(SIGMAS[1]))  # the root is infinite at sigma = 1, the first step
    std = NOISE_LEVEL * (sigma / (1 - capped)).sqrt() * (sigma - after).sqrt()
    c = after - std.square() / (2 * sigma)
    return 1 - after + c, sigma * (1 - after) - (1 - sigma) * c, std


def denoising_step(policy: WanPolicy, latents: Tensor, steps: Tensor, given: Conditioning) -> tuple[Tensor, Tensor]:
    """Return mean (B, C, F, H, W) and std (B,) of the Gaussian that the latents after `steps` (B,) are drawn from.

    Rollout and update both call this: they cannot disagree about the policy.
    """
    keep, kappa, std = coefficients(steps)
    velocity = policy.velocity(latents, SIGMAS[steps], given)
    return per_sample(keep) * latents - per_sample(kappa) * velocity, std.float()


def log_prob(drawn: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the (B,) log-density of the drawn latents: a mean over their elements, not the sum.

    The sum over a video's millions of elements would make every ratio of probabilities 0 or infinite. The mean keeps
    ratios near 1 for any size, which is why CLIP_RANGE is 1e-3 and not the 0.2 of language models.
    """
    residual = (drawn - mean) / per_sample(std)
    return -0.5 * residual.square().flatten(1).mean(dim=1) - std.log() - 0.5 * math.log(2 * math.pi)


# --- 5. Sample and score -------------------------------------------------------------------------------------------


class Samples(NamedTuple):
    """The n samples of an epoch: scores, and their stochastic step, which the update repeats."""

    gids: list[int]
    before: Tensor  # (n, C, F, H, W) latents before the stochastic step
    after: Tensor  # what was drawn there: the "action" whose probability is changed
    log_probs: Tensor  # (n,) of that draw
    scores: dict[str, Tensor]  # reward -> (n,) float64


@torch.no_grad()
def shared_prefixes(policy: WanPolicy, conditions: Mapping[int, Condition]) -> dict[int, Tensor]:
    """Return gid -> latents (C, F, H, W) before the group's stochastic step.

    The copies of a group start from the same noise and take the same deterministic steps up to there, so one row does
    for all. Copies with initial noise of their own would differ mostly by that, and no update can learn from noise that
    has no probability.
    """
    given = policy.encode(list(conditions.values()))
    shape = policy.latent_shape(list(conditions.values()))
    latents = torch.stack([torch.randn(shape, generator=generator(SEED, "xT", gid)) for gid in conditions])
    stops = torch.tensor([stochastic_step(gid) for gid in conditions])
    for step in range(int(stops.max())):
        going = (stops > step).nonzero().flatten()
        levels = SIGMAS[step : step + 2].expand(len(going), -1)
        latents[going] = follow_ode(policy, latents[going], levels, given.rows(going))
    return dict(zip(conditions, latents, strict=True))


@torch.no_grad()
def sample_and_score(
    policy: WanPolicy,
    rewards: Mapping[str, Reward],
    draws: Sequence[tuple[int, int, int, int]],
    conditions: Mapping[int, Condition],
) -> Samples:
    """Return the samples of an epoch; `conditions` by gid."""
    prefixes = shared_prefixes(policy, conditions)
    before, after, log_probs, scores = [], [], [], {name: list[Tensor]() for name in rewards}
    for first in range(0, len(draws), BATCH):
        batch = draws[first : first + BATCH]
        gids = [gid for _, gid, _, _ in batch]
        asked = [conditions[gid] for gid in gids]
        given = policy.encode(asked)  # prompt, source video and target cameras, as the network reads them
        steps = torch.tensor([stochastic_step(gid) for gid in gids])
        latents = torch.stack([prefixes[gid] for gid in gids])
        before.append(latents)

        # The step in which copies part.
        draw = [generator(SEED, "sde", gid, slot) for _, gid, slot, _ in batch]
        noise = torch.stack([torch.randn(latents.shape[1:], generator=each) for each in draw])
        mean, std = denoising_step(policy, latents, steps, given)
        latents = mean + per_sample(std) * noise
        after.append(latents)
        log_probs.append(log_prob(latents, mean, std))

        # On to clean latents, in few steps: how noise becomes a video is nothing that is trained here.
        clean = follow_ode(policy, latents, TAILS[steps + 1], given, second_order=True)
        videos = policy.decode(clean)  # (B, 3, T, h, w) in [0, 1]
        for name, reward in rewards.items():
            # NaN where a video cannot be measured: it has no score, and never a default one.
            scores[name].append(reward(videos, asked).values.double())
    return Samples(
        gids=[gid for _, gid, _, _ in draws],
        before=torch.cat(before),
        after=torch.cat(after),
        log_probs=torch.cat(log_probs),
        scores={name: torch.cat(parts) for name, parts in scores.items()},
    )


# --- 6. Compare ----------------------------------------------------------------------------------------------------


def compare(samples: Samples, floors: Mapping[str, float]) -> dict[int, float]:
    """Return row -> advantage of the samples to train on: the best and the worst copies of every group.

    The mean over its group is what a copy is measured against (GRPO, arXiv 2402.03300); no value network is needed.
    Every reward is divided by its own standard deviation before the weighted sum, so that weights do not depend on
    units. A reward's floor is its noise: copies that differ by less are equally good, and dividing by less would turn
    noise into a full-size gradient.
    """
    chosen: dict[int, float] = {}
    for gid in sorted(set(samples.gids)):
        rows = [row for row, other in enumerate(samples.gids) if other == gid]
        advantages, flat = torch.zeros(K, dtype=torch.float64), True
        for name, weight in WEIGHTS.items():
            values, floor = samples.scores[name][rows], max(floors[name], FLAT_EPS)
            known = values[values.isfinite()]
            if len(known) < 2:
                continue  # nothing to compare; the other rewards still count
            flat &= bool(known.max() - known.min() <= floor)
            spread = known.std(correction=0).clamp(min=floor)
            advantages += weight * ((values - known.mean()) / spread).nan_to_num(0.0)
        if flat:
            continue  # nothing to learn from
        # As a whole: bounding single values would leave a mean other than 0, which moves all copies one way.
        advantages *= (ADV_CLIP / advantages.abs().max()).clamp(max=1.0)
        # Copies in between have small advantages, and cost as much to train.
        best_first = advantages.argsort(descending=True, stable=True).tolist()
        for copy in best_first[: COPIES // 2] + best_first[K - COPIES // 2 :]:
            chosen[rows[copy]] = float(advantages[copy])
    return dict(sorted(chosen.items()))


# --- 7. Update -----------------------------------------------------------------------------------------------------


def step_weights() -> Tensor:
    """Return the (S,) weight of every step in the loss, of mean 1 over those that are trained ("inverse_gain").

    d log_prob / d velocity grows with kappa / std, the gain, which is small for early steps and large for late ones.
    Without weights, late steps would fill the gradient, and these sharpen the picture; early ones move the camera.
    """
    trained = torch.tensor(SDE_STEPS)
    _, kappa, std = coefficients(trained)
    weights = torch.zeros(STEPS, dtype=torch.float64)
    weights[trained] = (1 / (kappa / std)) / (1 / (kappa / std)).mean()
    return weights.float()


def accumulate_gradient(
    policy: WanPolicy, samples: Samples, conditions: Mapping[int, Condition], chosen: Mapping[int, float]
) -> dict[str, float]:
    """Repeat the stochastic steps of the chosen rows with gradient; the gradient of their loss is left in the weights."""
    losses, drifts = [], []
    for rows in torch.tensor(list(chosen)).split(MICRO_BATCH):
        gids = [samples.gids[row] for row in rows]
        steps = torch.tensor([stochastic_step(gid) for gid in gids])
        given = policy.encode([conditions[gid] for gid in gids])
        mean, std = denoising_step(policy, samples.before[rows], steps, given)
        new = log_prob(samples.after[rows], mean, std)
        # With one update an epoch the policy that sampled is the one that is trained: the ratio is 1, and only its
        # gradient matters. (The rollout's own numbers are the same but for rounding, which differs with the rows that
        # share a call; they serve as the check that rollout and update agree.) It takes several updates an epoch for
        # the ratio to leave 1 and for the clipping to end the gradient of what has changed enough.
        ratio = (new - new.detach()).exp()
        drifts.append((new.detach() - samples.log_probs[rows]).abs())

        # PPO's clipped surrogate (arXiv 1707.06347, eq. 7), negated, a mean over all chosen samples.
        advantages = torch.tensor([chosen[int(row)] for row in rows])
        bounded = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
        by_sample = torch.maximum(-advantages * ratio, -advantages * bounded) * step_weights()[steps]
        loss = (by_sample * (1 / len(chosen))).sum()
        # The gradient of a mean over D elements' independent noise falls as 1 / sqrt(D), for large videos towards Adam's
        # eps. Times sqrt(D) the update does not depend on a video's size.
        (loss * math.sqrt(mean[0].numel())).backward()
        losses.append(loss.detach())
    return {
        "train/loss": float(torch.stack(losses).sum()),
        "policy/ratio_first_max_abs_log": float(torch.cat(drifts).max()),
    }


def take_step(optimizer: torch.optim.Optimizer, averages: Sequence[Tensor], norms: list[float]) -> None:
    """Take one optimizer step; `norms` of the gradients so far gets one more."""
    (group,) = optimizer.param_groups
    weights = group["params"]
    # An outlier among gradients is cut to a multiple of what has been usual.
    usual = statistics.median(norms[-20:]) if len(norms) >= 5 else math.inf
    norm = torch.nn.utils.clip_grad_norm_(weights, min(MAX_GRAD_NORM, MAX_GRAD_RATIO * usual))
    group["lr"] = LEARNING_RATE * min(1.0, (len(norms) + 1) / max(1, WARMUP_STEPS))
    optimizer.step()
    optimizer.zero_grad()
    norms.append(norm.item())
    # What is evaluated is a moving average of the weights, over the latest 20 updates or so: single updates are noisy.
    with torch.no_grad():
        for average, weight in zip(averages, weights, strict=True):
            average.add_(weight - average, alpha=1 - EMA_DECAY)


# --- 8. Evaluate ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate(policy: WanPolicy, held_out: MultiCamDataset, rewards: Mapping[str, Reward]) -> dict[str, float]:
    """Return the mean over held-out conditions of every reward, and of the camera errors by a judge that is no reward.

    Conditions and noise are the same in every run, and the sampler is deterministic: differences are the weights'.
    """
    order = torch.randperm(len(held_out), generator=generator("eval", "conditions", len(held_out))).tolist()
    judge = build_reward("room_pose", data_root=DATA)
    values: dict[str, list[float]] = {name: [] for name in (*rewards, "rot_err_deg", "trans_err_m")}
    for first in range(0, EVAL_CONDITIONS, EVAL_BATCH):
        indices = order[first : min(first + EVAL_BATCH, EVAL_CONDITIONS)]
        asked = [held_out.condition(index) for index in indices]
        draw = [generator(key("eval", "noise"), "xT", index, 0) for index in indices]
        noise = torch.stack([torch.randn(policy.latent_shape(asked), generator=each) for each in draw])
        levels = SIGMAS.expand(len(asked), -1)
        videos = policy.decode(follow_ode(policy, noise, levels, policy.encode(asked)))
        for name, reward in rewards.items():
            values[name] += reward(videos, asked).values.tolist()
        found = judge(videos, asked)
        for name in ("rot_err_deg", "trans_err_m"):
            values[name] += found.info[name].tolist()
    known = {name: [value for value in own if math.isfinite(value)] for name, own in values.items()}
    return {f"eval/{name}": statistics.fmean(own) for name, own in known.items()}


# --- 9. Train ------------------------------------------------------------------------------------------------------


def load_policy() -> WanPolicy:
    """Return the model with self-attention and camera encoders trainable, the recipe of ReCamMaster's authors."""
    networks = load_networks(RECAM, MODEL, torch.float32, torch.device("cpu"))
    names = trained_names(networks.transformer, "attention")
    for name, weight in networks.transformer.named_parameters():
        weight.requires_grad_(name in names)
    networks.transformer.eval()
    return WanPolicy(networks, max_prompt_tokens=8, device=torch.device("cpu"))


def main() -> tuple[list[dict[str, float]], list[Tensor], list[Tensor]]:
    """Train; return the metrics after every number of epochs from 0 on, the weights and their moving average."""
    torch.set_num_threads(1)
    ensure_tiny_world(DATA, WORLD)
    train = MultiCamDataset(
        DATA, "train", SIZE, prompt="", choose=lambda found: set_aside(found, TUNE_SCENES, "scenes", attrgetter("name"))[0]
    )
    held_out = MultiCamDataset(DATA, "val", SIZE, prompt="")
    rewards = {name: build_reward(name, data_root=DATA) for name in WEIGHTS}
    policy = load_policy()
    weights = policy.trained_parameters()
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, foreach=True, **ADAM)
    norms: list[float] = []
    history = [evaluate(policy, held_out, rewards)]

    for epoch in range(EPOCHS):
        begun = time.perf_counter()
        draws = plan(epoch, len(train))
        indices = {gid: index for _, gid, _, index in draws}
        conditions = {gid: train.condition(index) for gid, index in indices.items()}
        samples = sample_and_score(policy, rewards, draws, conditions)
        chosen = compare(samples, {name: reward.floor for name, reward in rewards.items()})
        metrics = accumulate_gradient(policy, samples, conditions, chosen)
        take_step(optimizer, averages, norms)
        means = {f"reward/{name}_mean": float(own[own.isfinite()].mean()) for name, own in samples.scores.items()}
        history.append(means | metrics | {"train/grad_norm": norms[-1]})
        line = "  ".join(f"{name.partition('/')[2]} {value:.4g}" for name, value in history[-1].items())
        print(f"epoch {epoch + 1:3d}  {line}  {time.perf_counter() - begun:.1f} s", flush=True)

    trained = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, average in zip(weights, averages, strict=True):
            weight.copy_(average)
    history[-1] |= evaluate(policy, held_out, rewards)
    print(f"\n{EVAL_CONDITIONS} held-out conditions   before    after")
    for name, value in history[0].items():
        print(f"{name:22}  {value:9.4f} {history[-1][name]:9.4f}")
    return history, trained, averages


if __name__ == "__main__":
    main()
