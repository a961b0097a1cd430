"""Bounds of every knob, and combinations that cannot work: each refusal is one line with the way out."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.maths.sde import coefficients
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.reward_checks import check_dynamic_sampling, check_rewards
from flow_grpo.settings.schema import Config

# Intervals as mathematicians write them: [ and ] include the end, ( and ) leave it out.
BOUNDS: Mapping[str, str] = {
    "seed": "[0, inf)",
    "num_threads": "[0, 1024]",
    "num_epochs": "[0, inf)",
    "max_minutes": "[0, inf)",
    "log_videos_every": "[0, inf)",
    "data.num_frames": "[5, inf)",
    "data.height": "[8, inf)",
    "data.width": "[8, inf)",
    "data.num_workers": "[0, inf)",
    "reward.most_faults": "[0, 1]",
    "model.lora_rank": "[1, inf)",
    "model.lora_alpha": "[1, inf)",
    "model.max_prompt_tokens": "[1, inf)",
    "sample.k": "[2, inf)",  # every normalisation subtracts the group's mean: one copy would always learn nothing
    "sample.train_batch_size": "[1, inf)",
    "sample.num_batches_per_epoch": "[1, inf)",
    "sample.num_steps": "[2, 1000]",  # as many as the transformer's clock has ticks
    "sample.shift": "(0, inf)",
    "sample.noise_level": "(0, inf)",
    "sample.max_step_std": "(0, inf)",
    "sample.sde_window": "[0, inf)",
    "sample.guidance_scale": "[1, inf)",
    "reward.remote_timeout": "(0, 86400]",
    "reward.adv_eps": "(0, inf)",
    "reward.adv_ddof": "[0, 1]",
    "reward.flat_eps": "[0, inf)",
    "dynamic_sampling.max_resample_times": "[0, inf)",
    "train.batch_size": "[1, inf)",
    "train.updates_per_epoch": "[1, inf)",
    "train.learning_rate": "(0, inf)",
    "train.adam_beta1": "[0, 1)",
    "train.adam_beta2": "[0, 1)",
    "train.adam_eps": "(0, inf)",
    "train.weight_decay": "[0, inf)",
    "train.max_grad_norm": "(0, inf)",
    "train.max_bad_steps": "[0, inf)",
    "train.clip_range": "(0, 1)",
    "train.adv_clip": "(0, inf)",
    "train.kl_coef": "[0, inf)",
    "train.ema_decay": "[0, 1)",
    "eval.every": "[0, inf)",
    "eval.num_conditions": "[1, inf)",
    "eval.batch_size": "[1, inf)",
    "eval.num_steps": "[1, 1000]",
    "eval.videos": "[0, inf)",
    "checkpoint.every": "[1, inf)",
    "checkpoint.keep": "[1, inf)",
    "distributed.control_s": "[1, inf)",
    "distributed.device_s": "[1, inf)",
    "distributed.collective_s": "[0, inf)",
    "distributed.dead_s": "[0, inf)",
    "distributed.silent_s": "[1, inf)",
}

CAMERA_REWARDS = ("pose_rot", "pose_trans", "view_disp", "smooth", "room_pose")
REWARDS = ("target_view", "target_psnr", "source_match", "motion_mag", "exposure", "sharpness", *CAMERA_REWARDS)

CHOICES: Mapping[str, tuple[str, ...]] = {
    "device": ("auto", "npu", "cuda", "cpu"),
    "trackers": ("wandb", "tensorboard"),
    "doctor": ("fast", "off"),
    "data.reference": ("source", "target"),
    "model.dtype": ("fp32", "bf16"),
    "model.trained": ("lora", "camera", "attention", "full"),
    "sample.sde": ("flow", "constant", "linear", "cps"),
    "sample.layout": ("spread", "shuffled", "contiguous"),
    "reward.weights": REWARDS,
    "reward.adv_norm": ("group", "batch", "batch_centered", "max_group", "none"),
    "dynamic_sampling.policy": ("fallback_original", "fill_flat", "pad", "rebalance", "raise"),
    "dynamic_sampling.metric": ("", *REWARDS),
    "train.sharding": ("ddp", "zero2", "fsdp2"),
    "train.step_weight": ("none", "inverse_gain"),
    "train.old_log_prob": ("auto", "rollout", "recompute", "detach"),
    "eval.gold": ("", "room_pose"),
}

NAMES = ("output_root", "data.root", "data.train_split", "data.eval_split", "model.path")  # must not be empty

SIZE_UNIT = 8  # pixels: the finest codec (4x) and patch (2) in use; a coarser model asks for its own multiple
RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"  # file systems take 255 bytes, and the metrics' names hold it as well
SERVED_NAME = r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}"


def check(config: Config) -> None:
    """Refuse what cannot work whatever the number of ranks.

    Raises:
        ConfigError: for the first such setting.
    """
    _check_bounds(config)
    _check_choices(config)
    _check_names(config)
    _check_video(config)
    _check_buckets(config)
    _check_steps(config)
    _check_noise(config)
    check_rewards(config)
    check_dynamic_sampling(config)
    _check_update(config)
    _check_sharding(config)
    _check_waits(config)


def check_world(config: Config, world_size: int) -> None:
    """Refuse group sizes that the ranks cannot hold.

    Raises:
        ConfigError: for a batch over all ranks that holds no whole number of groups, or a `contiguous` layout whose
            groups cannot be dealt evenly to the ranks.
    """
    sample = config.sample
    rows = world_size * sample.train_batch_size
    unit = sample.k // math.gcd(sample.k, world_size)
    if rows % sample.k:
        enough = unit * math.ceil(sample.train_batch_size / unit)
        raise refusal(
            "sample.train_batch_size",
            sample.train_batch_size,
            f"{world_size} rank(s) x {sample.train_batch_size} = {rows} samples a batch are no whole groups of "
            f"sample.k={sample.k}, must be a multiple of {unit} on {world_size} rank(s)",
            f"pass --config.sample.train_batch_size={enough}",
        )
    groups = sample.num_batches_per_epoch * rows // sample.k
    if sample.layout == "contiguous" and groups % world_size:
        raise refusal(
            "sample.layout",
            sample.layout,
            f"needs whole groups on every rank, but an epoch's {groups} groups are no multiple of {world_size} ranks",
            "pass --config.sample.layout=spread or change sample.num_batches_per_epoch",
        )


def value_of(config: Config, path: str) -> Any:
    """Return the value of a knob by its dotted path."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def _check_bounds(config: Config) -> None:
    for path, interval in BOUNDS.items():
        value = value_of(config, path)
        if value is not None and not _within(value, interval):
            raise refusal(path, value, f"must lie in {interval}", f"pass --config.{path}=VALUE within it")


def _within(value: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    below = value <= high if interval[-1] == "]" else value < high
    return above and below  # a NaN is neither


def _check_choices(config: Config) -> None:
    served = tuple(f"remote:{name}" for name in config.reward.remote)
    for path, choices in CHOICES.items():
        known = choices + served if "target_view" in choices else choices
        value = value_of(config, path)
        for name in [value] if isinstance(value, str) else value:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                way_out = f"did you mean {close[0]!r}?" if close else f"pass --config.{path} with one of them"
                if "target_view" in known and name.startswith("remote:"):
                    way_out = f"say where: --config.reward.remote.{name[7:]}=http://127.0.0.1:8000"
                raise refusal(path, name, f"must be one of {', '.join(map(repr, known))}", way_out)
    if len(set(config.trackers)) < len(config.trackers):
        raise refusal("trackers", config.trackers, "must name each tracker once", "drop the repetition")


def _check_names(config: Config) -> None:
    for path in NAMES:
        if not value_of(config, path):
            raise refusal(path, value_of(config, path), "must not be empty", f"pass --config.{path}=NAME")
    if config.run_name and not re.fullmatch(RUN_NAME, config.run_name):
        bound = (
            "must be letters, digits, '.', '_' and '-', at most 100, beginning with a letter or digit: it names one "
        )
        bound += "folder"
        raise refusal("run_name", config.run_name, bound, "pass --config.output_root for another place")
    for name in config.reward.remote:
        if not re.fullmatch(SERVED_NAME, name):
            bound = (
                "must be letters, digits, '_' and '-', at most 50, beginning with a letter or digit: files are named so"
            )
            raise refusal("reward.remote", name, bound, "pass another name and let the server score by it")
    _check_splits(config)
    model = config.model
    try:
        re.compile(model.lora_targets)
    except (re.error, OverflowError, RecursionError) as error:
        way_out = "correct it or leave the recipe's"
        raise refusal("model.lora_targets", model.lora_targets, f"is no regular expression: {error}", way_out) from None
    if model.trained == "lora" and not model.lora_targets:
        bound = "must match the modules to adapt while model.trained is 'lora'"
        raise refusal("model.lora_targets", model.lora_targets, bound, "or pass --config.model.trained=camera")


def _check_splits(config: Config) -> None:
    """Both splits are folders of the data, and no scene lies in both."""
    train, held_out = (PurePath(split) for split in (config.data.train_split, config.data.eval_split))
    for path, split in (("data.train_split", train), ("data.eval_split", held_out)):
        if split.is_absolute() or ".." in split.parts:
            way_out = "pass --config.data.root for another place"
            raise refusal(path, str(split), "must lie below data.root", way_out)
    if held_out.is_relative_to(train) or train.is_relative_to(held_out):
        bound = f"must differ from data.train_split={str(train)!r} and lie beside it, or the held-out scenes would be "
        bound += "trained on"
        raise refusal("data.eval_split", str(held_out), bound, "pass --config.data.eval_split=val")


def parse_bucket(text: str) -> tuple[int, int, int]:
    """Return (frames, height, width) of "81x480x832".

    Raises:
        ConfigError: another form.
    """
    match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
    if match is None:
        raise refusal("data.buckets", text, "must be FRAMESxHEIGHTxWIDTH", "pass for example 81x480x832,49x832x480")
    return int(match[1]), int(match[2]), int(match[3])


def _check_buckets(config: Config) -> None:
    for text in config.data.buckets:
        frames, height, width = parse_bucket(text)
        if frames % 4 != 1 or frames < 5 or height < SIZE_UNIT or height % SIZE_UNIT or width % SIZE_UNIT or not width:
            bound = f"must have 4n+1 frames, at least 5, and sides that are multiples of {SIZE_UNIT}"
            raise refusal("data.buckets", text, bound, "pass for example 81x480x832")


def _check_video(config: Config) -> None:
    data = config.data
    if data.num_frames % 4 != 1:
        near = 4 * (data.num_frames // 4) + 1
        bound = "must be 4n+1: the codec keeps the first frame and packs every four that follow"
        raise refusal("data.num_frames", data.num_frames, bound, f"pass --config.data.num_frames={near}")
    for path in ("data.height", "data.width"):
        pixels = value_of(config, path)
        if pixels % SIZE_UNIT:
            near = (pixels + SIZE_UNIT // 2) // SIZE_UNIT * SIZE_UNIT
            raise refusal(path, pixels, f"must be a multiple of {SIZE_UNIT}", f"pass --config.{path}={near}")


def _check_steps(config: Config) -> None:
    sample = config.sample
    if sample.num_image_per_prompt != sample.k:
        bound = f"must equal sample.k={sample.k}: both are the number of videos made from one condition"
        raise refusal(
            "sample.num_image_per_prompt", sample.num_image_per_prompt, bound, "set sample.k only, it follows"
        )
    steps, last = sample.sde_steps, sample.num_steps - 2
    if not steps or list(steps) != sorted(set(steps)):
        bound = "must be at least one step, each once, in rising order"
        raise refusal("sample.sde_steps", steps, bound, "pass for example --config.sample.sde_steps=1,2,3")
    if steps[0] < 0 or steps[-1] > last:
        bound = f"must lie in 0..{last} with sample.num_steps={sample.num_steps}: the last step is never stochastic"
        raise refusal("sample.sde_steps", steps, bound, "drop the steps outside or raise sample.num_steps")
    if sample.sde_window > len(steps):
        bound = f"must be at most the {len(steps)} step(s) of sample.sde_steps={steps}"
        raise refusal("sample.sde_window", sample.sde_window, bound, "0 takes all of them")


def _check_noise(config: Config) -> None:
    """Every step that may be stochastic must be a Gaussian the maths accepts at this noise."""
    sample = config.sample
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
            bound = f"does not work with sample.sde={sample.sde!r} at step {step} of sample.sde_steps: {error}"
            raise refusal("sample.noise_level", sample.noise_level, bound, "or drop that step") from None


def _check_update(config: Config) -> None:
    train, sample = config.train, config.sample
    local = sample.expanded_batch_size
    held = f"the {local} samples a rank holds per epoch (train_batch_size {sample.train_batch_size} x "
    held += f"num_batches_per_epoch {sample.num_batches_per_epoch})"
    if local % train.updates_per_epoch:
        bound = f"must divide {held}"
        raise refusal(
            "train.updates_per_epoch", train.updates_per_epoch, bound, "pass --config.train.updates_per_epoch=1"
        )
    share = local // train.updates_per_epoch
    if train.batch_size > share:
        bound = f"must be at most {share}, one update's share of {held}"
        raise refusal("train.batch_size", train.batch_size, bound, f"pass --config.train.batch_size={share}")
    if train.old_log_prob == "detach" and train.updates_per_epoch > 1:
        bound = f"is exact for one update per epoch only, got train.updates_per_epoch={train.updates_per_epoch}"
        raise refusal("train.old_log_prob", "detach", bound, "pass --config.train.old_log_prob=auto")
    if config.model.compile and config.model.dtype == "bf16" and train.old_log_prob != "detach":
        # Measured: log-ratios of 5e-4 before any update, beside a clip_range of 1e-3.
        bound = "must be 'detach' while model.compile is true in bf16: compiled blocks round differently in an update"
        raise refusal("train.old_log_prob", train.old_log_prob, bound, "pass --config.train.old_log_prob=detach")
    if train.guard and train.step_weight != "none":
        bound = f"weighs the steps itself, so train.step_weight={train.step_weight!r} must be 'none'"
        raise refusal("train.guard", True, bound, "pass --config.train.step_weight=none")
    if config.eval.videos > config.eval.num_conditions:
        bound = f"must be at most eval.num_conditions={config.eval.num_conditions}"
        raise refusal("eval.videos", config.eval.videos, bound, "pass fewer videos or more conditions")


def _check_sharding(config: Config) -> None:
    """Where a pass of the network is an exchange, every rank must make equally many."""
    kind = config.train.sharding
    if kind == "ddp":
        return
    if len(config.data.buckets) > 1:
        bound = f"allows one video size while train.sharding is {kind!r}: ranks may hold different numbers of each"
        raise refusal("data.buckets", config.data.buckets, bound, "pass one size or --config.train.sharding=ddp")
    dynamic = config.dynamic_sampling
    if dynamic.enabled and dynamic.policy == "rebalance":
        bound = f"leaves ranks with different numbers of samples, must be another while train.sharding is {kind!r}"
        raise refusal("dynamic_sampling.policy", dynamic.policy, bound, "pass --config.dynamic_sampling.policy=pad")


def _check_waits(config: Config) -> None:
    waits, least = config.distributed, 1.5 * config.distributed.silent_s
    if waits.dead_s and waits.control_s < least:
        bound = "must be at least 1.5 x distributed.silent_s, or who waits gives up before the one that hangs is named"
        raise refusal("distributed.control_s", waits.control_s, bound, f"pass --config.distributed.control_s={least:g}")
