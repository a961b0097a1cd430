"""What saves memory: the plan of a recipe with each knob turned, and the smallest set of knobs with which it fits."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path

from flow_grpo.preflight.plan import Plan, largest_size, make_plan
from flow_grpo.settings.checks import check, check_world
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.schema import Config

NOT_SEEN = 0.005  # GiB: a knob that saves less is left out


@dataclasses.dataclass(frozen=True)
class Knob:
    """A way to need less memory.

    Attributes:
        words: how it is passed.
        turn: returns the configuration with it.
        exact: what is trained stays the same, up to rounding.
    """

    words: str
    turn: Callable[[Config], Config]
    exact: bool = True


def knobs(config: Config, devices: int) -> list[Knob]:
    """Return the knobs of a recipe that can save memory, the cheapest first."""
    model, train, sample = config.model, config.train, config.sample
    batch, batches = _smallest_batch(config, devices)
    shards = "--config.train.sharding=fsdp2"
    shards += " --config.sample.share_prefix=false" if sample.share_prefix else ""
    found = [
        (not model.vae_slicing, Knob("--config.model.vae_slicing=true", _turned("model", vae_slicing=True))),
        (
            model.checkpointing == "none",
            Knob("--config.model.checkpointing=keep_attention", _turned("model", checkpointing="keep_attention")),
        ),
        (
            model.checkpointing in ("none", "keep_attention"),
            Knob("--config.model.checkpointing=blocks", _turned("model", checkpointing="blocks")),
        ),
        (train.batch_size > 1, Knob("--config.train.batch_size=1", _turned("train", batch_size=1))),
        (
            batch < sample.train_batch_size,
            Knob(
                f"--config.sample.train_batch_size={batch} --config.sample.num_batches_per_epoch={batches}",
                _turned("sample", train_batch_size=batch, num_batches_per_epoch=batches),
            ),
        ),
        (
            not model.encodings,
            Knob("--config.model.encodings=FOLDER (tools/precompute.py)", _turned("model", encodings="FOLDER")),
        ),
        (
            not sample.offload and not config.dynamic_sampling.enabled,
            Knob("--config.sample.offload=true", _turned("sample", offload=True)),
        ),
        (not model.offload, Knob("--config.model.offload=true", _turned("model", offload=True))),
        (
            train.sharding == "ddp" and devices > 1,
            Knob("--config.train.sharding=zero2 (needs DeepSpeed)", _turned("train", sharding="zero2")),
        ),
        (train.sharding == "ddp" and devices > 1, Knob(shards, _in_shards)),
        *((size <= devices, _shared(config, size)) for size in (2, 4, 8) if size > train.context_parallel),
        (model.dtype == "fp32", Knob("--config.model.dtype=bf16", _turned("model", dtype="bf16"), exact=False)),
        (model.trained != "lora", Knob("--config.model.trained=lora", _turned("model", trained="lora"), exact=False)),
    ]
    return [knob for useful, knob in found if useful and _allowed(knob.turn(config), devices)]


def each_alone(config: Config, devices: int, rate: float) -> list[tuple[Knob, Plan]]:
    """Return the knobs that lower a recipe's peak, each with the plan of the recipe with it alone."""
    most = make_plan(config, devices, rate).most_gib
    plans = [(knob, make_plan(knob.turn(config), devices, rate)) for knob in knobs(config, devices)]
    return [(knob, plan) for knob, plan in plans if most - plan.most_gib > NOT_SEEN]


def smallest_set(config: Config, devices: int, rate: float, limit: float) -> tuple[list[Knob], Plan] | None:
    """Return the fewest knobs with which a recipe fits `limit` GiB, of several such sets the fastest; None without any.

    Knobs that change what is trained are taken only where the others are not enough.
    """
    known = knobs(config, devices)
    for usable in ([knob for knob in known if knob.exact], known):
        for count in range(1, len(usable) + 1):
            fitting = []
            for chosen in itertools.combinations(usable, count):
                turned = config
                for knob in chosen:
                    turned = knob.turn(turned)
                plan = make_plan(turned, devices, rate) if _allowed(turned, devices) else None
                if plan is not None and plan.most_gib <= limit:
                    fitting.append((list(chosen), plan))
            if fitting:
                return min(fitting, key=lambda found: found[1].epoch_s)
    return None


def report(config: Config, devices: int, rate: float, limit: float) -> tuple[str, bool]:
    """Return the plan in words (costs, what was assumed, what saves memory, whether it fits), and whether it fits.

    Args:
        config: the recipe.
        devices: number of ranks.
        rate: operations per second that a device sustains.
        limit: GiB of a device.
    """
    plan = make_plan(config, devices, rate)
    fits = plan.most_gib <= limit
    lines = [*_costs(plan), "", *_assumptions(config, devices, rate, limit), "", *_table(config, devices, rate, plan)]
    if fits:
        return "\n".join([*lines, f"fits: {plan.most_gib:.1f} of {limit:g} GiB at the peak"]), True
    verdict = f"does not fit: {plan.most_gib:.1f} of {limit:g} GiB at the peak; "
    found = smallest_set(config, devices, rate, limit)
    if found is None:
        return "\n".join([*lines, f"{verdict}no knob helps enough: take fewer frames or a smaller size"]), False
    words = " ".join(knob.words for knob in found[0])
    peak = f"{found[1].most_gib:.1f} GiB, {found[1].epoch_s:.0f} s an epoch"
    return "\n".join([*lines, f"{verdict}with the fewest knobs it does ({peak}): {words}"]), False


def _costs(plan: Plan) -> list[str]:
    return [
        f"{name:30s} {value:>14,}" if isinstance(value, int) else f"{name:30s} {value:>14,.{0 if value >= 100 else 2}f}"
        for name, value in dataclasses.asdict(plan).items()
    ]


def _assumptions(config: Config, devices: int, rate: float, limit: float) -> list[str]:
    frames, rows, columns = largest_size(config)
    speed = f"{rate / 1e12:g} TFLOP/s (tools/device_report.py measures them)"
    folder = config.model.path
    network = folder if Path(folder).is_dir() else f"Wan2.1-T2V-1.3B's, as there is no folder {folder}"
    return [
        "assumed:",
        f"  {devices} device(s) of {limit:g} GiB that sustain {speed}",
        f"  sizes of the network: {network}",
        f"  every video {frames}x{rows}x{columns}; every group carries a signal, and no round is resampled",
        "  not counted in seconds: rewards, evaluation, copies between device and CPU memory, what ranks send, waiting",
        "  not counted in GiB: fragmentation, kernel workspaces, other processes (leave a tenth of the device free),",
        "  and what model.vae_tiling saves in decoding",
    ]


def _table(config: Config, devices: int, rate: float, plan: Plan) -> list[str]:
    found = each_alone(config, devices, rate)
    if not found:
        return ["no knob saves memory"]
    head = f"what saves memory, each alone (now {plan.most_gib:.1f} GiB at the peak, {plan.epoch_s:.0f} s an epoch):"
    lines = []
    for knob, other in found:
        note = "" if knob.exact else "  changes what is trained"
        saved, slower = other.most_gib - plan.most_gib, other.epoch_s - plan.epoch_s
        lines.append(f"  {saved:+7.2f} GiB {slower:+8.1f} s  {knob.words}{note}")
    return [head, *lines]


def _turned(section: str, **values: object) -> Callable[[Config], Config]:
    """Return a function that returns a configuration with other values in a section."""

    def turn(config: Config) -> Config:
        changed = dataclasses.replace(getattr(config, section), **values)
        return dataclasses.replace(config, **{section: changed})

    return turn


def _in_shards(config: Config) -> Config:
    # A sharded network needs as many calls on every rank.
    return _turned("train", sharding="fsdp2")(_turned("sample", share_prefix=False)(config))


def _shared(config: Config, size: int) -> Knob:
    """Return the knob that lets so many ranks share every sample, with as many samples an epoch as before."""
    batches = config.sample.num_batches_per_epoch * size // config.train.context_parallel
    words = f"--config.train.context_parallel={size} --config.sample.num_batches_per_epoch={batches}"
    sharing, epoch = _turned("train", context_parallel=size), _turned("sample", num_batches_per_epoch=batches)
    return Knob(words, lambda given: epoch(sharing(given)))


def _smallest_batch(config: Config, devices: int) -> tuple[int, int]:
    """Return the smallest sample.train_batch_size of whole groups, and the batches that keep an epoch's samples."""
    sample = config.sample
    unit = sample.k // math.gcd(sample.k, devices // config.train.context_parallel)
    if sample.expanded_batch_size % unit:
        return sample.train_batch_size, sample.num_batches_per_epoch
    return unit, sample.expanded_batch_size // unit


def _allowed(config: Config, devices: int) -> bool:
    try:
        check(config)
        check_world(config, devices)
    except ConfigError:
        return False
    return True
