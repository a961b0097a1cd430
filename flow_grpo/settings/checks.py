"""Rules between knobs; a violation is one line that names the remedy. schema.py has the bounds of every single knob."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from pathlib import PurePath
from typing import Any

from flow_grpo.maths.reward_rules import weights_at
from flow_grpo.maths.schedule import flow_sigmas, windows
from flow_grpo.maths.sde import coefficients
from flow_grpo.settings.errors import all_of, refusal
from flow_grpo.settings.objectives import trained_rows, trains_groups, traits_of
from flow_grpo.settings.schema import Config, RewardConfig

# Rewards that a camera standing still loses; a server's may be one.
CAMERA = ("pose_rot", "pose_trans", "pose_dir", "view_disp", "room_pose", "room_tracks", "room_rot", "room_trans")
FOLLOWING = (*CAMERA, "target_view", "target_psnr")


# Knob, when it is refused, what it must be, and the way out; in braces other knobs, and numbers that `check` adds.
Rule = tuple[str, Callable[[Config], object], str, str]


def _overlap(one: str, other: str) -> bool:
    return PurePath(one).is_relative_to(other) or PurePath(other).is_relative_to(one)


def _last_trained_step(config: Config) -> int:
    levels = flow_sigmas(config.sample.num_steps, config.sample.shift)
    return int((levels >= config.model.boundary_ratio).sum()) - 1  # they fall from 1


# fmt: off
RULES: tuple[Rule, ...] = (
    ("data.eval_split", lambda c: _overlap(c.data.train_split, c.data.eval_split),
     "must lie apart from data.train_split={data.train_split!r}, or the held-out scenes would be trained on",
     "pass --config.data.eval_split=val"),
    ("data.eval_prompts", lambda c: c.data.prompts and not (c.data.eval_prompts or c.data.report_scenes),
     "must name a file of held-out prompts while data.prompts is set and data.report_scenes is 0",
     "pass --config.data.eval_prompts=FILE"),
    ("data.buckets", lambda c: c.data.prompts and c.data.buckets,
     "must be empty with data.prompts: prompts have no size of their own", "pass --config.data.buckets="),
    ("data.buckets", lambda c: c.train.sharding != "ddp" and len(c.data.buckets) > 1,
     "allows one video size while train.sharding is {train.sharding!r}: ranks may hold different numbers of each",
     "pass one or --config.train.sharding=ddp"),
    ("eval.split", lambda c: c.eval.split == "tune" and not c.data.tune_scenes,
     "needs training scenes that are set aside, and data.tune_scenes is 0", "pass --config.data.tune_scenes=16"),
    ("model.lora_targets", lambda c: c.model.trained == "lora" and not c.model.lora_targets,
     "must match the modules to adapt while model.trained is 'lora'", "or pass --config.model.trained=camera"),
    ("model.adapter", lambda c: c.model.adapter and (c.model.trained != "lora" or c.model.boundary_ratio),
     "must be empty unless model.trained is 'lora' and model.boundary_ratio 0: it is what adapters start from",
     "pass --config.model.adapter=, or a model.path that holds the starting weights"),
    ("model.vae_tiles", lambda c: c.model.vae_tiles != "diffusers" and not c.model.vae_tiling,
     "has no effect while model.vae_tiling is false", "pass --config.model.vae_tiling=true"),
    ("sample.num_image_per_prompt", lambda c: c.sample.num_image_per_prompt != c.sample.k,
     "must equal sample.k={sample.k}: both are the group size", "set sample.k only, it follows"),
    ("sample.sde_steps", lambda c: c.sample.sde_steps[0] < 0 or c.sample.sde_steps[-1] > c.sample.num_steps - 2,
     "must lie in 0..{last_step} with sample.num_steps={sample.num_steps}: the last step is never stochastic",
     "drop the steps outside or raise sample.num_steps"),
    ("sample.sde_steps", lambda c: traits_of(c).replays_steps and c.sample.sde_steps[-1] > _last_trained_step(c),
     "must end at step {last_trained_step}: the later ones lie below noise level "
     "model.boundary_ratio={model.boundary_ratio:g}, where the starting weights answer and nothing is learned",
     "drop those steps or lower model.boundary_ratio"),
    ("sample.share_prefix", lambda c: c.sample.share_prefix and c.sample.sde == "ode",
     "needs stochastic steps, before which copies are equal, and sample.sde='ode' has none",
     "pass --config.sample.share_prefix=false"),
    ("sample.share_prefix", lambda c: c.sample.share_prefix and not c.sample.same_initial_noise,
     "needs copies that share their initial noise", "pass --config.sample.same_initial_noise=true"),
    ("sample.ode_calls", lambda c: c.sample.ode_calls != "exact" and not traits_of(c).replays_steps,
     "must be 'exact' with train.objective={train.objective!r}, which learns from the clean samples",
     "pass --config.sample.ode_calls=exact"),
    ("sample.ode_calls", lambda c: c.sample.ode_calls != "exact" and c.train.context_parallel > 1,
     "must be 'exact' while ranks share samples: blocks of keys would be others than on one rank",
     "pass --config.train.context_parallel=1"),
    ("reward.flat_eps", lambda c: c.reward.gates and c.reward.flat_eps == 0,
     "must be above 0 with reward.gates: copies that fail are put below the others by twice it or twice the "
     "reward's own noise floor, which may be 0", "leave it as it was"),
    ("dynamic_sampling.policy",
     lambda c: (c.dynamic_sampling.enabled and c.dynamic_sampling.policy == "rebalance"
                and (c.train.copies or c.train.sharding != "ddp")),
     "leaves ranks with different numbers of samples, which train.copies and sharded weights do not allow",
     "pass --config.dynamic_sampling.policy=pad"),
    ("train.updates_per_epoch", lambda c: trained_rows(c) % c.train.updates_per_epoch,
     "must divide the {rows} {what} a rank trains on per epoch (train_batch_size {sample.train_batch_size} x "
     "num_batches_per_epoch {sample.num_batches_per_epoch})", "pass --config.train.updates_per_epoch=1"),
    ("train.copies", lambda c: c.train.copies > c.sample.k,
     "must be at most sample.k={sample.k}", "pass --config.train.copies=0 to train all"),
    ("train.old_log_prob", lambda c: c.train.old_log_prob == "detach" and c.train.updates_per_epoch > 1,
     "is exact for one update per epoch only, got train.updates_per_epoch={train.updates_per_epoch}",
     "pass --config.train.old_log_prob=auto"),
    # Measured: log-ratios of 5e-4 before any update, where clip_range is 1e-3.
    ("train.old_log_prob", lambda c: c.model.compile and c.model.dtype == "bf16" and c.train.old_log_prob != "detach",
     "must be 'detach' while model.compile is true in bf16: compiled blocks round differently in an update",
     "pass --config.train.old_log_prob=detach"),
    ("train.guard", lambda c: c.train.guard and c.train.step_weight != "none",
     "weighs the steps itself, so train.step_weight={train.step_weight!r} must be 'none'",
     "pass --config.train.step_weight=none"),
    ("distributed.control_s",
     lambda c: c.distributed.dead_s and c.distributed.control_s < 1.5 * c.distributed.silent_s,
     "must be at least 1.5 x distributed.silent_s, or waiting ranks time out before the hanging one is named",
     "pass --config.distributed.control_s={least_wait:g}"),
)
# fmt: on


def check(config: Config) -> None:
    """Refuse, by one ConfigError, all combinations that cannot work whatever the number of ranks."""
    numbers = {
        "last_step": config.sample.num_steps - 2,
        "last_trained_step": _last_trained_step(config),
        "rows": trained_rows(config),
        "what": "groups" if trains_groups(config) else "samples",
        "least_wait": 1.5 * config.distributed.silent_s,
    }

    def keep(knob: str, refused: Callable[[Config], object], bound: str, way_out: str) -> None:
        if refused(config):
            text = f"{bound}; {way_out}".format(**vars(config), **numbers)
            raise refusal(knob, attrgetter(knob)(config), text)

    checks = (_check_stochastic_steps, _check_rewards, _check_signal, _check_gold, traits_of(config).forbids)
    all_of([*(partial(keep, *rule) for rule in RULES), *(partial(check, config) for check in checks)])
    _warn(config)


def check_world(config: Config, world_size: int) -> None:
    """Check that the groups of an epoch fit the number of ranks; ConfigError where they do not."""
    sample, sharing = config.sample, config.train.context_parallel
    if world_size % sharing:
        fewer = f"--config.train.context_parallel={math.gcd(world_size, sharing)}"
        text = f"must divide the number of ranks, {world_size}; start with another, or pass {fewer}"
        raise refusal("train.context_parallel", sharing, text)
    world_size //= sharing  # those that samples are dealt to
    rows = world_size * sample.train_batch_size
    unit = sample.k // math.gcd(sample.k, world_size)
    if rows % sample.k:
        enough = unit * math.ceil(sample.train_batch_size / unit)
        text = f"{world_size} rank(s) x {sample.train_batch_size} = {rows} samples a batch are no whole groups of "
        text += f"sample.k={sample.k}, must be a multiple of {unit} on {world_size} rank(s); "
        least = sharing * sample.k // math.gcd(sample.k, sample.train_batch_size)  # ranks that hold whole groups
        below = sharing * world_size // least * least
        start = f"{below} or {below + least}" if below else str(least)
        text += f"start {start} rank(s), or pass --config.sample.train_batch_size={enough}"
        raise refusal("sample.train_batch_size", sample.train_batch_size, text)
    groups = sample.num_batches_per_epoch * rows // sample.k
    if sample.layout == "contiguous" and groups % world_size:
        text = f"needs whole groups on every rank, but an epoch's {groups} groups are no multiple of {world_size} ranks"
        text += "; pass --config.sample.layout=spread or change sample.num_batches_per_epoch"
        raise refusal("sample.layout", sample.layout, text)


def largest_weights(config: Config) -> dict[str, float]:
    """Return reward name -> its largest weight in any epoch of a run, 0 for one that is measured and never trained."""
    by_epoch = weights_where_they_turn(config).values()
    return {name: max(weights[name] for weights in by_epoch) for name in config.reward.weights}


def trained_rewards(config: Config) -> list[str]:
    """Return the rewards that shape what is learned: those with a weight in any epoch, and those that decide a gate."""
    holders = [holder for holder, _ in config.reward.gates.values()]
    return [name for name, weight in largest_weights(config).items() if weight or name in holders]


def _check_stochastic_steps(config: Config) -> None:
    sample = config.sample
    if sample.sde == "ode":
        return
    try:
        windows(sample.sde_steps, sample.sde_window)
    except ValueError as error:
        text = f"must cut sample.sde_steps into blocks of consecutive steps: {error}; pass --config.sample.sde_window=1"
        raise refusal("sample.sde_window", sample.sde_window, text) from None
    sigmas = flow_sigmas(sample.num_steps, sample.shift)
    noise: dict[str, Any] = {"kind": sample.sde, "noise_level": sample.noise_level, "max_step_std": sample.max_step_std}
    for step in sample.sde_steps:
        try:
            coefficients(sigmas[step], sigmas[step + 1], sigma_cap=sigmas[1], **noise)
        except ValueError as error:
            text = f"does not work with sample.sde={sample.sde!r} at step {step} of sample.sde_steps: {error}"
            raise refusal("sample.noise_level", sample.noise_level, f"{text}; or drop that step") from None


def _check_rewards(config: Config) -> None:
    reward = config.reward
    for name in reward.schedules:
        _check_measured("reward.schedules", name, reward)
    for name, (deciding, _) in reward.gates.items():
        _check_measured("reward.gates", name, reward)
        _check_measured(f"reward.gates.{name}", deciding, reward)
        if deciding == name:
            text = "must be another reward than the one behind the gate; name what must be preserved"
            raise refusal(f"reward.gates.{name}", deciding, text)
    if config.dynamic_sampling.metric:
        _check_measured("dynamic_sampling.metric", config.dynamic_sampling.metric, reward)


def _check_measured(path: str, name: str, reward: RewardConfig) -> None:
    if name not in reward.weights:
        close = difflib.get_close_matches(name, reward.weights, n=1)
        hint = f"did you mean {close[0]!r}? Or" if close else "or"
        text = f"must be one of the measured rewards {', '.join(reward.weights)}"
        raise refusal(path, name, f"{text}; {hint} pass --config.reward.weights.{name}=0 to measure it")


def _check_signal(config: Config) -> None:
    reward = config.reward
    # The sum of weights is never negative: where it is 0 between two turns it is 0 at both.
    for epoch, weights in weights_where_they_turn(config).items():
        weighted = {name for name, weight in weights.items() if weight}
        if "smooth" in weighted and not any(name in FOLLOWING or name.startswith("remote:") for name in weighted):
            text = f"rewards a video that stands still: in epoch {epoch} nothing weighted asks for the commanded path; "
            text += "pass --config.reward.weights.pose_rot=1 --config.reward.weights.pose_trans=1 with it"
            raise refusal("reward.weights.smooth", weights["smooth"], text)
        if weighted:
            continue
        if not reward.schedules:
            text = "must hold a weight above 0, or there is nothing to learn"
            raise refusal("reward.weights", weights, f"{text}; pass for example --config.reward.weights.target_view=1")
        text = f"leaves every reward without weight in epoch {epoch} ({weights}), must leave one something to learn"
        raise refusal("reward.schedules", reward.schedules, f"{text}; let two schedules overlap")


def weights_where_they_turn(config: Config, first: int = 0) -> dict[int, dict[str, float]]:
    """Return epoch -> weights, linear in between: `first`, the points of the schedules behind it, the last epoch."""
    reward, last = config.reward, max(first, config.num_epochs - 1)
    turns = {epoch for points in reward.schedules.values() for epoch, _ in points if first < epoch < last}
    epochs = sorted({first, last, *turns})
    return {epoch: weights_at(reward.weights, reward.schedules, epoch) for epoch in epochs}


def _check_gold(config: Config) -> None:
    gold, reward = config.eval.gold, config.reward
    unused = "must be an estimator that no reward uses"
    scheduled = gold in reward.schedules
    trained = any(weight for _, weight in reward.schedules[gold]) if scheduled else reward.weights.get(gold)
    if trained:
        table, nothing = ("schedules", "0:0") if scheduled else ("weights", "0")
        text = f"is trained on by reward.{table}.{gold}, {unused}; pass --config.reward.{table}.{gold}={nothing}"
        raise refusal("eval.gold", gold, text)
    for name, (deciding, _) in reward.gates.items():
        if deciding == gold:
            raise refusal("eval.gold", gold, f"decides reward.gates.{name}, {unused}; let another reward decide")


def _warn(config: Config) -> None:
    train, reward, best = config.train, config.reward, config.checkpoint.best
    if config.dynamic_sampling.enabled and reward.flat_eps < reward.adv_eps:
        warnings.warn(
            f"config.reward.flat_eps={reward.flat_eps:g} is below reward.adv_eps={reward.adv_eps:g}: dynamic sampling "
            "will accept groups whose advantages are mostly rounding error; raise reward.flat_eps",
            stacklevel=2,
        )
    if traits_of(config).replays_steps and train.updates_per_epoch > 1 and not train.guard:
        other = " --config.train.step_weight=none" if train.step_weight != "none" else ""
        warnings.warn(
            f"config.train.updates_per_epoch={train.updates_per_epoch} without train.guard: from the second update on "
            "log-ratios are below 0 on average, so that train.clip_range clips on one side only; pass "
            f"--config.train.guard=true{other}",
            stacklevel=2,
        )
    if best and config.eval.split == "report":
        warnings.warn(
            f"config.checkpoint.best={best!r} chooses a checkpoint on the reported conditions (eval.split='report'): "
            "its held-out metrics are too good; choose with data.tune_scenes and eval.split='tune', report afterwards",
            stacklevel=2,
        )
