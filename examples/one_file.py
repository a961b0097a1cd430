"""GRPO for a video model: the whole algorithm in one file, to be read from top to bottom.

    python examples/one_file.py        # from the project's folder; about eight minutes on one CPU core

The model films a given video again along a commanded camera path, but does not know how far a command moves or turns
it. One epoch of GRPO teaches it a little of that:

    sample     8 videos ("copies") of each of 8 conditions; copies differ by the noise of one denoising step
    score      does the camera follow its command, does the picture look like the true view
    compare    the advantage of a copy: its score minus the mean of its condition's copies, divided by their spread
    update     make the draw that led to a better copy more likely, and the one that led to a worse copy less likely

Data, model and rewards come from the library; everything between them is written out here. The numbers are those of
`train_grpo.py --config config/grpo.py:tiny_recam` on one process, bit for bit, as a test checks (README.md's table
is of other seeds, on two processes). docs/maths.md has the formulas with numbers to check by hand, docs/walk.md the
same way through the trainer's files.

Letters: B rows (samples) of a batch, C F H W latent channels, frames, height, width. Noise levels sigma run from 1
(noise) to 0 (clean): latents = (1 - sigma) * clean + sigma * noise, and the network predicts velocity = noise - clean.
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
from torch.utils.data import DataLoader

from flow_grpo.data.multicam import MultiCamDataset, Scene
from flow_grpo.data.splits import set_aside
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.models.adapters import trained_names
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import WanPolicy, load_networks
from flow_grpo.records import Condition, Conditioning, Guidance
from flow_grpo.rewards.base import Reward, build_reward
from flow_grpo.settings.schema import ModelConfig

# The numbers of the recipe, where docs/config.md and docs/learning.md say more about each.
SEED = 0
EPOCHS = 120
MODEL = "assets/tiny_recam"
DATA, WORLD = "data/tiny_world", "tiny"  # textured rooms, rendered at the first start
SIZE = (5, 24, 32)  # frames, rows and columns of a video
TUNE_SCENES = 8  # training scenes set aside

K = 8  # copies of a condition: a group
BATCH, BATCHES = 16, 4  # rows of a batch and batches of an epoch: 64 videos of 8 conditions
STEPS, SHIFT = 8, 3.0  # denoising steps; a larger shift spends more of them on noisy levels
NOISE_LEVEL = 0.7  # strength of a stochastic step's noise
SDE_STEPS = (0, 1, 2, 3, 4)  # one of these is stochastic: the early ones decide how the camera moves
BOUNDARY = 0.7  # noise level below which the weights before training answer: these keep the picture
TAIL_STEPS = 3  # from the stochastic step to the clean video, instead of the 3 to 7 that the schedule has left

# Minus the errors of turning and of moving; PSNR in dB to the room from wherever the camera is, and to the true view.
WEIGHTS = {"room_rot": 1.0, "room_trans": 1.0, "room_content": 1.0, "target_psnr": 1.0}
FLAT_EPS, ADV_CLIP = 1e-4, 5.0  # least spread that counts as a difference; largest advantage

MICRO_BATCH = 8  # groups of a backward pass
CLIP_RANGE = 1e-3
LEARNING_RATE, WARMUP_STEPS = 4e-4, 0
BETAS, EPS, WEIGHT_DECAY = (0.9, 0.999), 1e-8, 1e-4
MAX_GRAD_NORM, MAX_GRAD_RATIO = 10.0, 5.0
EMA_DECAY = 0.95

EVAL_CONDITIONS, EVAL_BATCH = 160, 16  # of rooms that are never trained on


# --- 1. Randomness: a draw depends on what it is for, never on what was drawn before. So the noise of a sample is the
# same on any number of devices, in any batch and after any restart. All devices must have the same SEED: with another,
# a device would give its copies of a group another condition, another initial noise and another stochastic step.


def generator(*parts: object) -> torch.Generator:
    """Return a generator seeded with a hash of its purpose; sums like seed + step would repeat streams across seeds."""
    return torch.Generator().manual_seed(key(*parts))


def key(*parts: object) -> int:
    """Return 63 bits of the hash of some parts."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


# --- 2. What to sample


def trained_scenes(scenes: list[Scene]) -> list[Scene]:
    """Return the scenes to train on, without those set aside for choosing the numbers above."""
    return set_aside(scenes, TUNE_SCENES, 0, "scenes", attrgetter("name"))[0]


def plan(epoch: int, conditions: int) -> list[list[tuple[int, int, int, int]]]:
    """Return an epoch's batches of (batch, gid, slot, index) rows: every condition that is drawn comes K times.

    `batch` counts batches over the whole run, `index` is the condition's position in the data set of `conditions`
    conditions, `slot` the copy's in its group. `gid` is the group's number, unique in the run: a condition that is
    drawn again is another group.
    """
    batches, groups = [], BATCH // K
    for batch in range(epoch * BATCHES, (epoch + 1) * BATCHES):
        rows = []
        for slot in range(K):  # the outer loop: several devices, of which each takes a part, have copies of every group
            for gid in range(batch * groups, (batch + 1) * groups):
                number, place = divmod(gid, conditions)  # passes over the data set, each in an order of its own
                order = torch.randperm(conditions, generator=generator(SEED, "pass", number))
                rows.append((batch, gid, slot, int(order[place])))
        batches.append(rows)
    return batches


def stochastic_step(gid: int) -> int:
    """Return the denoising step at which the copies of a group part; it alone is trained.

    Copies with different steps could not be compared. Of groups 0 to 5, 6 to 11, ... each has another of the six steps,
    so that all are trained equally often.
    """
    cycle, place = divmod(gid, len(SDE_STEPS))
    order = torch.randperm(len(SDE_STEPS), generator=generator(SEED, "sde window", cycle))
    return SDE_STEPS[int(order[place])]


# --- 3. Noise levels


def noise_levels(u: Tensor) -> Tensor:
    """Return fp32 sigmas of times u from 1 (noise) to 0: the timestep shift of SD3 (arXiv 2403.03206, eq. 23)."""
    return (SHIFT * u / (1 + (SHIFT - 1) * u)).float()


# Step i leads from SIGMAS[i] to SIGMAS[i + 1].
SIGMAS = noise_levels(1 - torch.arange(STEPS + 1, dtype=torch.float64) / STEPS)
# Row i leads from SIGMAS[i] to 0 in nearly equal steps of the noise level, the last a little longer.
LEFT = (1 - torch.arange(TAIL_STEPS + 1, dtype=torch.float64) / TAIL_STEPS) ** 0.85
TAILS = (SIGMAS.double()[:, None] * LEFT).float()


# --- 4. The policy: one denoising step, without noise and with it


def per_sample(scalars: Tensor) -> Tensor:
    """Return (B,) scalars as (B, 1, 1, 1, 1) fp32, factors of latents."""
    return scalars.float().view(-1, 1, 1, 1, 1)


def follow_ode(
    policy: WanPolicy, latents: Tensor, levels: Tensor, conditioning: Conditioning, *, second_order: bool = False
) -> Tensor:
    """Denoise latents (B, C, F, H, W) without noise, each row along its noise levels (B, n+1).

    A second-order step (Adams-Bashforth) follows the velocity and its change since the step before: nearly the accuracy
    of two calls of the network for one, so that steps may be longer.
    """
    exact = levels.double()
    previous: Tensor | None = None
    for i in range(levels.shape[1] - 1):
        velocity = policy.velocity(latents, levels[:, i], conditioning)
        length = exact[:, i + 1] - exact[:, i]  # negative
        if second_order and previous is not None:
            half = length / (exact[:, i] - exact[:, i - 1]) / 2
            latents = latents + per_sample(length * (1 + half)) * velocity - per_sample(length * half) * previous
        else:
            latents = latents + per_sample(length) * velocity
        previous = velocity
    return latents


def coefficients(steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return keep, kappa and std of stochastic steps (B,), each (B,) float64: the factors in the last line below.

    A step without noise has no probability that training could raise. Flow-GRPO (arXiv 2505.05470, eq. 9) takes a step
    of an SDE with the same marginals instead. With the network's guesses of clean, x0 = x - sigma * v, and of noise,
    x1 = x + (1 - sigma) * v, the next latents are

        x' = mean + std * z,    z ~ N(0, 1),    mean = (1 - sigma') * x0 + c * x1 = keep * x - kappa * v

    sigma' is the level after the step, c what is left of the old noise beside the new.
    """
    sigma, after = SIGMAS[steps].double(), SIGMAS[steps + 1].double()
    capped = sigma.clamp(max=float(SIGMAS[1]))  # at sigma = 1 std would be infinite
    std = NOISE_LEVEL * (sigma / (1 - capped)).sqrt() * (sigma - after).sqrt()
    c = after - std.square() / (2 * sigma)
    return 1 - after + c, sigma * (1 - after) - (1 - sigma) * c, std


def gaussian_step(
    policy: WanPolicy, latents: Tensor, steps: Tensor, conditioning: Conditioning
) -> tuple[Tensor, Tensor]:
    """Return mean (B, C, F, H, W) and std (B,) of the latents after steps (B,); rollout and update both call this."""
    keep, kappa, std = coefficients(steps)
    velocity = policy.velocity(latents, SIGMAS[steps], conditioning)
    return per_sample(keep) * latents - per_sample(kappa) * velocity, std.float()


def log_prob(drawn: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the (B,) log-density of drawn latents, as a mean over their elements.

    With the sum over millions of elements any ratio of densities would be 0 or infinite. With the mean it is close to 1
    for latents of any size, and CLIP_RANGE is 1e-3 instead of the 0.2 of language models.
    """
    residual = (drawn - mean) / per_sample(std)
    return -0.5 * residual.square().flatten(1).mean(dim=1) - std.log() - 0.5 * math.log(2 * math.pi)


# --- 5. Sample and score


class Group(NamedTuple):
    """The copies of a condition: the stochastic step in which they part, which the update repeats."""

    condition: Condition  # the data set has put the gid on it
    step: int  # of denoising, from SIGMAS[step] to SIGMAS[step + 1]
    before: Tensor  # (C, F, H, W) latents before the step
    after: Tensor  # (K, C, F, H, W) what each copy drew: its action, in the words of RL
    log_probs: Tensor  # (K,) of those draws
    scores: list[dict[str, float]]  # of each copy by reward, NaN where it could not be measured: never a default


@torch.no_grad()
def sample_groups(policy: WanPolicy, conditions: Sequence[Condition]) -> list[Group]:
    """Return the groups up to the draws of their copies, without scores, given one copy of every group.

    Copies start from the same noise, so up to there they are the same: their steps and the network's velocity in the
    stochastic one are computed once. Noise of their own would make most of their difference, and no update could learn
    from it: it has no probability under the policy.
    """
    conditioning, shape = policy.encode(conditions), policy.latent_shape(conditions)
    latents = torch.stack([torch.randn(shape, generator=generator(SEED, "xT", copy.gid)) for copy in conditions])
    steps = torch.tensor([stochastic_step(copy.gid) for copy in conditions])
    for step in range(int(steps.max())):
        rows = (steps > step).nonzero().flatten()
        levels = SIGMAS[step : step + 2].expand(len(rows), -1)
        latents[rows] = follow_ode(policy, latents[rows], levels, conditioning.rows(rows))

    # Here the copies part: each draws noise of its own.
    mean, std = gaussian_step(policy, latents, steps, conditioning)
    generators = [generator(SEED, "sde", condition.gid, slot) for condition in conditions for slot in range(K)]
    noise = torch.stack([torch.randn(shape, generator=each) for each in generators])
    means, stds = mean.repeat_interleave(K, 0), std.repeat_interleave(K)  # the copies of a group one after the other
    after = means + per_sample(stds) * noise
    log_probs = log_prob(after, means, stds)
    columns = conditions, steps.tolist(), latents, after.unflatten(0, (-1, K)), log_probs.view(-1, K)
    return [Group(*row, [{} for _ in range(K)]) for row in zip(*columns, strict=True)]


@torch.no_grad()
def sample_and_score(
    policy: WanPolicy, rewards: Mapping[str, Reward], batches: Sequence[Sequence[Condition]]
) -> list[Group]:
    """Return the groups, every copy of which was scored."""
    groups = sample_groups(policy, [copy for batch in batches for copy in batch if copy.slot == 0])
    of_gid = {group.condition.gid: group for group in groups}
    for batch in batches:
        conditioning = policy.encode(batch)  # prompt, source video and target cameras as the network reads them
        steps = torch.tensor([of_gid[copy.gid].step for copy in batch])
        after = torch.stack([of_gid[copy.gid].after[copy.slot] for copy in batch])
        clean = follow_ode(policy, after, TAILS[steps + 1], conditioning, second_order=True)
        videos = policy.decode(clean)  # (B, 3, frames, rows, columns) in [0, 1]
        for name, reward in rewards.items():
            for copy, value in zip(batch, reward(videos, batch).values.tolist(), strict=True):
                of_gid[copy.gid].scores[copy.slot][name] = value
    return groups


# --- 6. Compare


def compare(groups: Sequence[Group], floors: Mapping[str, float]) -> Tensor:
    """Return the (G, K) advantages of the copies of G groups.

    The baseline of a copy is the mean of its group (GRPO, arXiv 2402.03300). Every reward is normalised for itself, so
    that weights need not know units. A reward's floor is its measuring noise, which must not be scaled up to full size.
    A score that is missing adds nothing to its copy's advantage.
    """
    found = []
    for group in groups:
        advantages, flat = torch.zeros(K, dtype=torch.float64), True
        for name, weight in WEIGHTS.items():
            values = torch.tensor([scores[name] for scores in group.scores], dtype=torch.float64)
            known, floor = values[values.isfinite()], max(floors[name], FLAT_EPS)
            if len(known) < 2:
                continue
            flat &= bool(known.max() - known.min() <= floor)
            std = known.std(correction=0).clamp(min=floor)
            advantages += weight * torch.where(values.isfinite(), (values - known.mean()) / std, 0.0)
        if flat:
            advantages.zero_()  # equally good copies teach nothing
        else:  # scaled as a whole: with single values cut the group's order would be lost
            advantages *= (ADV_CLIP / advantages.abs().max()).clamp(max=1.0)
        found.append(advantages)
    return torch.stack(found).float()


# --- 7. Update

# The gradient of a step's log-probability grows with its gain, kappa / std. Late steps have the largest and would
# dominate, though they only sharpen the picture. Weights of mean 1 even that out.
_, KAPPAS, STDS = coefficients(torch.tensor(SDE_STEPS))
INVERSE_GAINS = 1 / (KAPPAS / STDS)
STEP_WEIGHTS = dict(zip(SDE_STEPS, (INVERSE_GAINS / INVERSE_GAINS.mean()).tolist(), strict=True))


def add_gradients(policy: WanPolicy, groups: Sequence[Group], advantages: Tensor) -> dict[str, float]:
    """Repeat the stochastic step of every group, now with gradient, and add up the gradients of its copies' loss.

    The step is one call of the network, however many copies a group has: only their draws and advantages differ.
    """
    losses, differences = [], []
    for first in range(0, len(groups), MICRO_BATCH):
        rows = groups[first : first + MICRO_BATCH]
        conditioning = policy.encode([row.condition for row in rows])
        before, after = torch.stack([row.before for row in rows]), torch.cat([row.after for row in rows])
        mean, std = gaussian_step(policy, before, torch.tensor([row.step for row in rows]), conditioning)
        new = log_prob(after, mean.repeat_interleave(K, 0), std.repeat_interleave(K))
        # One update per epoch: the policy that sampled is the one that is trained, so the ratio of their probabilities
        # is 1, what counts is its gradient, and the clip never acts. With more updates the ratio would part from 1, and
        # the clipped loss would stop pushing a sample whose probability has changed enough.
        old = new.detach()
        ratio = (new - old).exp()
        # The log-probability of the rollout is a check only: it must be the same, or but for rounding where other rows
        # shared its call. More would be a bug, which policy/ratio_first_max_abs_log shows.
        differences.append((old - torch.cat([row.log_probs for row in rows])).abs())

        # PPO's clipped surrogate (arXiv 1707.06347, eq. 7), negated.
        advantage = advantages[first : first + MICRO_BATCH].flatten()
        clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)
        surrogate = torch.maximum(-advantage * ratio, -advantage * clipped)
        weights = torch.tensor([STEP_WEIGHTS[row.step] for row in rows]).repeat_interleave(K)
        loss = (surrogate * weights * (1 / advantages.numel())).sum()
        # log_prob is a mean over D elements with independent noise, so its gradient shrinks as 1 / sqrt(D), in large
        # videos down to Adam's eps. Times sqrt(D) an update is as large for videos of any size; ratio and clip stay.
        (loss * math.sqrt(mean[0].numel())).backward()
        losses.append(loss.detach())
    return {
        "train/loss": float(torch.stack(losses).sum()),
        "policy/ratio_first_max_abs_log": float(torch.cat(differences).max()),
    }


def take_step(optimizer: torch.optim.Optimizer, averages: Sequence[Tensor], norms: list[float]) -> None:
    """Take one optimizer step with the gradients, and append their norm to those of earlier steps."""
    (group,) = optimizer.param_groups
    usual = statistics.median(norms[-20:]) if len(norms) >= 5 else math.inf  # an outlier must not undo many steps
    bound = min(MAX_GRAD_NORM, MAX_GRAD_RATIO * usual)
    # The trainer leaves a step out whose gradient is not finite, and ends after several in a row.
    norm = torch.nn.utils.clip_grad_norm_(group["params"], bound, error_if_nonfinite=True)
    group["lr"] = LEARNING_RATE * min(1.0, (len(norms) + 1) / max(1, WARMUP_STEPS))
    optimizer.step()
    optimizer.zero_grad()
    norms.append(norm.item())
    with torch.no_grad():  # single updates are noisy: what is evaluated is an average over the latest 20 or so
        for average, weight in zip(averages, group["params"], strict=True):
            average.add_(weight - average, alpha=1 - EMA_DECAY)


# --- 8. Evaluate


@torch.no_grad()
def evaluate(policy: WanPolicy, rewards: Mapping[str, Reward], held_out: MultiCamDataset) -> dict[str, float]:
    """Return means over held-out conditions of the rewards, and of the camera errors that room_pose finds.

    The estimator room_pose is no reward, so that it cannot have been gamed. Conditions and noise are the same every
    time and the sampler adds no noise: what differs between two evaluations is the weights.
    """
    estimator = build_reward("room_pose", data_root=DATA)
    values: dict[str, list[float]] = {name: [] for name in (*rewards, "rot_err_deg", "trans_err_m")}
    order = torch.randperm(len(held_out), generator=generator("eval", "conditions", len(held_out)))
    for indices in order[:EVAL_CONDITIONS].split(EVAL_BATCH):
        batch = [held_out.condition(index) for index in indices.tolist()]
        # A seed of the evaluation's own, the same in every run; the condition's index in place of a gid, slot 0.
        generators = [generator(key("eval", "noise"), "xT", condition.index, 0) for condition in batch]
        noise = torch.stack([torch.randn(policy.latent_shape(batch), generator=each) for each in generators])
        clean = follow_ode(policy, noise, SIGMAS.expand(len(batch), -1), policy.encode(batch))
        videos = policy.decode(clean)
        columns = {name: reward(videos, batch).values for name, reward in rewards.items()}
        columns |= estimator(videos, batch).info
        for name, column in values.items():
            column += columns[name].tolist()
    return {f"eval/{name}": statistics.fmean(filter(math.isfinite, column)) for name, column in values.items()}


# --- 9. Train


def main() -> tuple[list[dict[str, float]], dict[str, Tensor], list[Tensor]]:
    """Return the metrics after 0, 1, 2, ... epochs, the trained weights by name and their moving averages."""
    torch.set_num_threads(1)
    ensure_tiny_world(DATA, WORLD)
    train = MultiCamDataset(DATA, "train", SIZE, prompt="", choose=trained_scenes)
    held_out = MultiCamDataset(DATA, "val", SIZE, prompt="")
    rewards = {name: build_reward(name, data_root=DATA) for name in WEIGHTS}

    cpu = torch.device("cpu")
    model = ModelConfig(path=MODEL, dtype="fp32", max_prompt_tokens=8, vae_slicing=False)
    networks = load_networks(RECAM, model, cpu)
    names = trained_names(networks.transformer, "attention")  # self-attention and camera encoder of every block
    for name, weight in networks.transformer.eval().named_parameters():
        weight.requires_grad_(name in names)
    policy = WanPolicy(networks, model, Guidance(1.0, ""), cpu)
    policy.boundary_ratio = BOUNDARY
    policy.keep_reference()  # a copy of what is trained
    weights = policy.trained_parameters()  # in fp32, like all that is computed here
    averages = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, foreach=True)

    norms: list[float] = []
    history = [evaluate(policy, rewards, held_out)]
    for epoch in range(EPOCHS):
        begun = time.perf_counter()
        loader = DataLoader(train, batch_sampler=plan(epoch, len(train)), collate_fn=list)
        batches = [[condition for _, condition in items] for items in loader]
        groups = sample_and_score(policy, rewards, batches)
        advantages = compare(groups, {name: reward.floor for name, reward in rewards.items()})
        metrics = add_gradients(policy, groups, advantages)
        take_step(optimizer, averages, norms)

        copies = [scores for group in groups for scores in group.scores]
        scores = {name: torch.tensor([each[name] for each in copies], dtype=torch.float64) for name in rewards}
        means = {f"reward/{name}_mean": float(column[column.isfinite()].mean()) for name, column in scores.items()}
        history.append(means | metrics | {"train/grad_norm": norms[-1]})
        shown = "  ".join(f"{name.partition('/')[2]} {value:.4g}" for name, value in history[-1].items())
        print(f"epoch {epoch + 1}/{EPOCHS}  {shown}  {time.perf_counter() - begun:.1f} s", flush=True)

    state = networks.transformer.state_dict()
    trained = {name: weight.clone() for name, weight in state.items() if name in names}
    with torch.no_grad():
        for weight, average in zip(weights, averages, strict=True):
            weight.copy_(average)
    history[-1] |= evaluate(policy, rewards, held_out)
    print(f"\nmean over {EVAL_CONDITIONS} held-out conditions:\n{'':20}{'before':>9}{'after':>9}")
    for name, value in history[0].items():
        print(f"{name:20}{value:9.4f}{history[-1][name]:9.4f}")
    return history, trained, averages


if __name__ == "__main__":
    main()
