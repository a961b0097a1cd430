"""Rules between knobs; a violation is one line that names the remedy. schema.py has the bounds of every single knob."""

from __future__ import annotations

import difflib
import math
import warnings
from pathlib import PurePath

from flow_grpo.maths.reward_rules import weights_at
from flow_grpo.maths.schedule import flow_sigmas, windows
from flow_grpo.maths.sde import coefficients
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.objectives import traits_of
from flow_grpo.settings.schema import Config, RewardConfig

# Rewards that a camera standing still loses; a server's may be one.
FOLLOWING = ("pose_rot", "pose_trans", "view_disp", "room_pose", "room_rot", "room_trans", "target_view", "target_psnr")


def check(config: Config) -> None:
    """Refuse combinations that cannot work whatever the number of ranks.

    Raises:
        ConfigError: for the first such combination.
    """
    _check_data_and_model(config)
    _check_steps(config)
    _check_noise(config)
    _check_rewards(config.reward)
    _check_signal(config)
    _check_gold(config)
    _check_dynamic_sampling(config)
    traits_of(config).forbids(config)
    _check_update(config)
    _check_sharding(config)
    _check_waits(config)
    _warn_of_selection(config)


def check_world(config: Config, world_size: int) -> None:
    """Check that the groups of an epoch fit the number of ranks.

    Raises:
        ConfigError: for ranks that are not whole groups of `train.context_parallel`, a batch over all ranks that is not
            a whole number of groups, or a `contiguous` layout whose groups do not divide evenly among the ranks.
    """
    sample, sharing = config.sample, config.train.context_parallel
    if world_size % sharing:
        text = f"must divide the number of ranks, {world_size}; start with another, or pass "
        raise refusal(
            "train.context_parallel", sharing, f"{text}--config.train.context_parallel={math.gcd(world_size, sharing)}"
        )
    world_size //= sharing  # those that samples are dealt to
    rows = world_size * sample.train_batch_size
    unit = sample.k // math.gcd(sample.k, world_size)
    if rows % sample.k:
        text = f"{world_size} rank(s) x {sample.train_batch_size} = {rows} samples a batch are no whole groups of "
        text += f"sample.k={sample.k}, must be a multiple of {unit} on {world_size} rank(s)"
        enough = unit * math.ceil(sample.train_batch_size / unit)
        text += f"; pass --config.sample.train_batch_size={enough}"
        raise refusal("sample.train_batch_size", sample.train_batch_size, text)
    groups = sample.num_batches_per_epoch * rows // sample.k
    if sample.layout == "contiguous" and groups % world_size:
        text = f"needs whole groups on every rank, but an epoch's {groups} groups are no multiple of {world_size} ranks"
        text += "; pass --config.sample.layout=spread or change sample.num_batches_per_epoch"
        raise refusal("sample.layout", sample.layout, text)


def largest_weights(config: Config) -> dict[str, float]:
    """Return reward name -> its largest weight in any epoch of a run, 0 for one that is measured and never trained."""
    by_epoch = _weights_where_they_turn(config).values()
    return {name: max(weights[name] for weights in by_epoch) for name in config.reward.weights}


def _check_data_and_model(config: Config) -> None:
    train, held_out = PurePath(config.data.train_split), PurePath(config.data.eval_split)
    if held_out.is_relative_to(train) or train.is_relative_to(held_out):
        text = f"must differ from data.train_split={str(train)!r} and neither may contain the other, or the held-out "
        text += "scenes would be trained on; pass --config.data.eval_split=val"
        raise refusal("data.eval_split", str(held_out), text)
    if config.data.prompts and not config.data.eval_prompts:
        text = "must name a file of held-out prompts while data.prompts is set; pass --config.data.eval_prompts=FILE"
        raise refusal("data.eval_prompts", "", text)
    if config.data.prompts and config.data.buckets:
        text = "must be empty with data.prompts: prompts have no size of their own; pass --config.data.buckets="
        raise refusal("data.buckets", config.data.buckets, text)
    if config.eval.split == "tune" and not config.data.tune_scenes:
        text = "needs training scenes that are set aside, and data.tune_scenes is 0; pass --config.data.tune_scenes=16"
        raise refusal("eval.split", "tune", text)
    if config.model.trained == "lora" and not config.model.lora_targets:
        text = "must match the modules to adapt while model.trained is 'lora'; or pass --config.model.trained=camera"
        raise refusal("model.lora_targets", "", text)
    if config.model.vae_tiles != "diffusers" and not config.model.vae_tiling:
        text = "has no effect while model.vae_tiling is false; pass --config.model.vae_tiling=true"
        raise refusal("model.vae_tiles", config.model.vae_tiles, text)


def _check_steps(config: Config) -> None:
    sample = config.sample
    steps, last = sample.sde_steps, sample.num_steps - 2
    if sample.num_image_per_prompt != sample.k:
        text = f"must equal sample.k={sample.k}: both are the group size; set sample.k only, it follows"
        raise refusal("sample.num_image_per_prompt", sample.num_image_per_prompt, text)
    if steps[0] < 0 or steps[-1] > last:
        text = f"must lie in 0..{last} with sample.num_steps={sample.num_steps}: the last step is never stochastic"
        raise refusal("sample.sde_steps", steps, f"{text}; drop the steps outside or raise sample.num_steps")
    if sample.sde == "ode":
        if sample.share_prefix:
            text = "needs stochastic steps, before which copies are equal, and sample.sde='ode' has none"
            raise refusal("sample.share_prefix", True, f"{text}; pass --config.sample.share_prefix=false")
        return
    try:
        windows(steps, sample.sde_window)
    except ValueError as error:
        text = f"must cut sample.sde_steps into blocks of consecutive steps: {error}; pass --config.sample.sde_window=1"
        raise refusal("sample.sde_window", sample.sde_window, text) from None
    if sample.share_prefix and not sample.same_initial_noise:
        text = "needs copies that share their initial noise; pass --config.sample.same_initial_noise=true"
        raise refusal("sample.share_prefix", True, text)
    if sample.share_prefix and config.train.sharding == "fsdp2":
        text = "leaves ranks with different numbers of calls, which train.sharding='fsdp2' does not allow"
        raise refusal("sample.share_prefix", True, f"{text}; pass --config.sample.share_prefix=false")


def _check_noise(config: Config) -> None:
    """Raise ConfigError for SDE steps that are no valid Gaussian at this noise level, see `sde.coefficients`."""
    sample = config.sample
    if sample.sde == "ode":
        return
    sigmas = flow_sigmas(sample.num_steps, sample.shift)
    for step in sample.sde_steps:
        try:
            coefficients(
                sigmas[step],
                sigmas[step + 1],
                kind=sample.sde,
                noise_level=sample.noise_level,
                sigma_cap=sigmas[1],
                max_step_std=sample.max_step_std,
            )
        except ValueError as error:
            text = f"does not work with sample.sde={sample.sde!r} at step {step} of sample.sde_steps: {error}"
            raise refusal("sample.noise_level", sample.noise_level, f"{text}; or drop that step") from None


def _check_rewards(reward: RewardConfig) -> None:
    """Raise ConfigError for schedules or gates of rewards that are not measured, and for a gate by its own reward."""
    for name in reward.schedules:
        _check_measured("reward.schedules", name, reward)
    for name, (deciding, _) in reward.gates.items():
        _check_measured("reward.gates", name, reward)
        _check_measured(f"reward.gates.{name}", deciding, reward)
        if deciding == name:
            text = "must be another reward than the one behind the gate; name what must be preserved"
            raise refusal(f"reward.gates.{name}", deciding, text)
    if reward.gates and reward.flat_eps == 0:
        text = "must be above 0 with reward.gates: copies that fail are put below the others by twice it or twice the"
        raise refusal("reward.flat_eps", 0.0, f"{text} reward's own noise floor, which may be 0; leave it as it was")


def _check_measured(path: str, name: str, reward: RewardConfig) -> None:
    if name not in reward.weights:
        close = difflib.get_close_matches(name, reward.weights, n=1)
        hint = f"did you mean {close[0]!r}? Or" if close else "or"
        text = f"must be one of the measured rewards {', '.join(reward.weights)}"
        raise refusal(path, name, f"{text}; {hint} pass --config.reward.weights.{name}=0 to measure it")


def _check_signal(config: Config) -> None:
    """Raise ConfigError if there is an epoch in which every reward has weight 0, or `smooth` without the camera's path.

    The sum of weights is never negative: where it is 0 between two turns it is 0 at both.
    """
    reward = config.reward
    for epoch, weights in _weights_where_they_turn(config).items():
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


def _weights_where_they_turn(config: Config) -> dict[int, dict[str, float]]:
    """Return epoch -> weights: the first and the last epoch and the points of the schedules, linear in between."""
    reward = config.reward
    turns = {epoch for points in reward.schedules.values() for epoch, _ in points if epoch < config.num_epochs}
    epochs = sorted({0, max(0, config.num_epochs - 1), *turns})
    return {epoch: weights_at(reward.weights, reward.schedules, epoch) for epoch in epochs}


def _check_gold(config: Config) -> None:
    """Raise ConfigError if a trained reward depends on the gold estimator."""
    gold, reward = config.eval.gold, config.reward
    unused = "must be an estimator that no reward uses"
    if any(weight for _, weight in reward.schedules.get(gold, ())):
        text = f"is trained on by reward.schedules.{gold}, {unused}; pass --config.reward.schedules.{gold}=0:0"
        raise refusal("eval.gold", gold, text)
    if gold not in reward.schedules and reward.weights.get(gold):
        text = f"is trained on by reward.weights.{gold}, {unused}; pass --config.reward.weights.{gold}=0"
        raise refusal("eval.gold", gold, text)
    for name, (deciding, _) in reward.gates.items():
        if deciding == gold:
            raise refusal("eval.gold", gold, f"decides reward.gates.{name}, {unused}; let another reward decide")


def _check_dynamic_sampling(config: Config) -> None:
    dynamic, reward = config.dynamic_sampling, config.reward
    if config.train.copies and dynamic.enabled and dynamic.policy == "rebalance":
        text = "leaves ranks with different numbers of samples, must be another while train.copies is set"
        raise refusal("dynamic_sampling.policy", "rebalance", f"{text}; pass --config.dynamic_sampling.policy=pad")
    if dynamic.metric:
        _check_measured("dynamic_sampling.metric", dynamic.metric, reward)
    if dynamic.enabled and reward.flat_eps < reward.adv_eps:
        warnings.warn(
            f"config.reward.flat_eps={reward.flat_eps:g} is below reward.adv_eps={reward.adv_eps:g}: dynamic sampling "
            "will accept groups whose advantages are mostly rounding error; raise reward.flat_eps",
            stacklevel=2,
        )


def _check_update(config: Config) -> None:
    train, sample = config.train, config.sample
    local = sample.expanded_batch_size
    held = f"the {local} samples a rank holds per epoch (train_batch_size {sample.train_batch_size} x "
    held += f"num_batches_per_epoch {sample.num_batches_per_epoch})"
    if local % train.updates_per_epoch:
        text = f"must divide {held}; pass --config.train.updates_per_epoch=1"
        raise refusal("train.updates_per_epoch", train.updates_per_epoch, text)
    share = local // train.updates_per_epoch
    if train.batch_size > share:
        text = f"must be at most {share}, one update's share of {held}; pass --config.train.batch_size={share}"
        raise refusal("train.batch_size", train.batch_size, text)
    if train.copies > sample.k:
        text = f"must be at most sample.k={sample.k}; pass --config.train.copies=0 to train all"
        raise refusal("train.copies", train.copies, text)
    if train.old_log_prob == "detach" and train.updates_per_epoch > 1:
        text = f"is exact for one update per epoch only, got train.updates_per_epoch={train.updates_per_epoch}"
        raise refusal("train.old_log_prob", "detach", f"{text}; pass --config.train.old_log_prob=auto")
    if config.model.compile and config.model.checkpointing == "keep_attention":
        text = "must be 'blocks', 'none' or 'auto' while model.compile is true: a compiled block hides its attention"
        raise refusal("model.checkpointing", "keep_attention", f"{text}; pass --config.model.checkpointing=blocks")
    if config.model.compile and config.model.dtype == "bf16" and train.old_log_prob != "detach":
        # Measured: log-ratios of 5e-4 before any update, where clip_range is 1e-3.
        text = "must be 'detach' while model.compile is true in bf16: compiled blocks round differently in an update"
        raise refusal("train.old_log_prob", train.old_log_prob, f"{text}; pass --config.train.old_log_prob=detach")
    if traits_of(config).replays_steps and train.updates_per_epoch > 1 and not train.guard:
        other = " --config.train.step_weight=none" if train.step_weight != "none" else ""
        warnings.warn(
            f"config.train.updates_per_epoch={train.updates_per_epoch} without train.guard: from the second update on "
            "log-ratios are below 0 on average, so that train.clip_range clips on one side only; pass "
            f"--config.train.guard=true{other}",
            stacklevel=2,
        )
    if train.guard and train.step_weight != "none":
        text = f"weighs the steps itself, so train.step_weight={train.step_weight!r} must be 'none'"
        raise refusal("train.guard", True, f"{text}; pass --config.train.step_weight=none")


def _check_sharding(config: Config) -> None:
    """Raise ConfigError where forward passes are collective calls and ranks might make different numbers of them."""
    sharding, dynamic = config.train.sharding, config.dynamic_sampling
    if sharding == "ddp":
        return
    if len(config.data.buckets) > 1:
        text = f"allows one video size while train.sharding is {sharding!r}: ranks may hold different numbers of each"
        raise refusal("data.buckets", config.data.buckets, f"{text}; pass one or --config.train.sharding=ddp")
    if dynamic.enabled and dynamic.policy == "rebalance":
        text = f"leaves ranks with different numbers of samples, must be another while train.sharding is {sharding!r}"
        raise refusal("dynamic_sampling.policy", "rebalance", f"{text}; pass --config.dynamic_sampling.policy=pad")


def _check_waits(config: Config) -> None:
    waits = config.distributed
    if waits.dead_s and waits.control_s < 1.5 * waits.silent_s:
        text = "must be at least 1.5 x distributed.silent_s, or waiting ranks time out before the hanging one is named"
        way_out = f"pass --config.distributed.control_s={1.5 * waits.silent_s:g}"
        raise refusal("distributed.control_s", waits.control_s, f"{text}; {way_out}")


def _warn_of_selection(config: Config) -> None:
    best = config.checkpoint.best
    if best and config.eval.split == "report":
        warnings.warn(
            f"config.checkpoint.best={best!r} chooses a checkpoint on the reported conditions (eval.split='report'): "
            "its held-out metrics are too good; choose with data.tune_scenes and eval.split='tune', report afterwards",
            stacklevel=2,
        )
