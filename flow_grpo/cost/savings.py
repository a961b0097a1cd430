"""What saves memory: the plan of a recipe with each knob turned, and the smallest set of knobs with which it fits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

from flow_grpo.cost import ASSUMED_RATE, CORES
from flow_grpo.cost.codec_cost import rate_beside_transformer
from flow_grpo.cost.plan import LINK, Plan, evaluations, largest_size, make_plan
from flow_grpo.cost.reward_seconds import READ, VIDEO
from flow_grpo.settings.checks import check, check_world
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.sampling import offloads_rollouts
from flow_grpo.settings.schema import Config

NOT_SEEN = 0.005  # GiB: a knob that saves less is left out
USABLE = 0.9  # of a device: fragmentation, kernel workspaces and other processes are not counted
FREE, SLOWER, UNTRIED, INEXACT = range(4)  # UNTRIED: no accelerator has run it; INEXACT: it changes what is trained
Values: TypeAlias = dict[str, int | str]  # dotted path of a knob -> value


@dataclasses.dataclass(frozen=True)
class Saving:
    """A way to need less memory."""

    values: Callable[[Config], Values]  # new values of the knobs of a configuration that it changes
    price: int = UNTRIED


def knobs(config: Config, devices: int) -> list[Saving]:
    """Return the knobs of a recipe that can save memory, about the cheapest first."""
    model, train = config.model, config.train
    sizes = [size for size in (2, 4, 8) if train.context_parallel < size <= devices]
    every = [
        _fixed(not model.vae_slicing, FREE, {"model.vae_slicing": True}),
        _fixed(train.batch_size > 1, FREE, {"train.batch_size": 1}),
        _fixed(not model.encodings, FREE, {"model.encodings": "FOLDER"}),
        _fixed(not offloads_rollouts(config), FREE, {"sample.offload": True}),
        _fixed(model.checkpointing == "none", SLOWER, {"model.checkpointing": "keep_attention"}),
        _fixed(model.checkpointing in ("none", "keep_attention"), SLOWER, {"model.checkpointing": "blocks"}),
        _fixed(not model.offload, SLOWER, {"model.offload": True}),
        _fixed(train.sharding == "ddp" and devices > 1, UNTRIED, {"train.sharding": "fsdp2"}),
        *(Saving(functools.partial(_shared, size=size)) for size in sizes),
        # Behind those: how small a batch can be depends on how many ranks share a sample.
        Saving(functools.partial(_smallest_batch, devices=devices), SLOWER),
        _fixed(model.dtype == "fp32", INEXACT, {"model.dtype": "bf16"}),
        _fixed(model.trained != "lora", INEXACT, {"model.trained": "lora"}),
    ]
    return [knob for knob in every if knob.values(config) and _allowed(turned(config, [knob])[0], devices)]


def turned(config: Config, chosen: Iterable[Saving]) -> tuple[Config, Values]:
    """Return a configuration with some of its knobs turned one after another, and the values that this changes."""
    changed: Values = {}
    for knob in chosen:
        values = knob.values(config)
        changed |= values
        for path, value in values.items():
            section, name = path.split(".")
            section_now = dataclasses.replace(getattr(config, section), **{name: value})
            config = dataclasses.replace(config, **{section: section_now})
    return config, changed


def in_words(values: Values) -> str:
    """Return how the values of knobs are passed."""
    passed = {path: value if isinstance(value, str) else json.dumps(value) for path, value in values.items()}
    return " ".join(f"--config.{path}={value}" for path, value in passed.items())


def smallest_set(config: Config, devices: int, rate: float, limit: float, cores: int) -> tuple[Values, Plan] | None:
    """Return the values of the fewest knobs with which a recipe fits `limit` GiB, and its plan; None without any.

    Of several such sets the fastest is taken. Knobs at a price are taken only where those at a lower one are not
    enough.
    """
    known = knobs(config, devices)
    for price in range(INEXACT + 1):
        usable = [knob for knob in known if knob.price <= price]
        for count in range(1, len(usable) + 1):
            fitting = []
            for chosen in itertools.combinations(usable, count):
                other, values = turned(config, chosen)
                plan = make_plan(other, devices, rate, cores) if _allowed(other, devices) else None
                if plan is not None and plan.most_gib <= limit:
                    fitting.append((values, plan))
            if fitting:
                return min(fitting, key=lambda found: found[1].epoch_s)
    return None


def report(config: Config, devices: int, limit: float, rate: float = ASSUMED_RATE, cores: int = CORES) -> str:
    """Return the plan in words: costs, what was assumed, what saves memory, whether it fits.

    Of each of the devices, `rate` is the operations a second that it sustains, `limit` its GiB, `cores` the host's.
    """
    plan = make_plan(config, devices, rate, cores)
    lines = []
    for name, value in dataclasses.asdict(plan).items():
        decimals = "" if isinstance(value, int) else ".0f" if value >= 100 else ".2f"
        lines.append(f"{name:30s} {value:>14,{decimals}}")
    table = []
    for knob in knobs(config, devices):
        other = make_plan(turned(config, [knob])[0], devices, rate, cores)
        saved, slower = other.most_gib - plan.most_gib, other.epoch_s - plan.epoch_s
        if -saved > NOT_SEEN:
            note = ("", "", "  no accelerator has run it", "  changes what is trained")[knob.price]
            table.append(f"  {saved:+7.2f} GiB {slower:+8.1f} s  {in_words(knob.values(config))}{note}")
    now = f"{plan.most_gib:.1f} GiB at the peak, {plan.epoch_s:.0f} s an epoch"
    lines += ["", *_assumed(config, devices, rate, limit, cores), ""]
    lines += [f"what saves memory, each alone (now {now}):", *table] if table else ["no knob saves memory"]
    lines.append(
        f"the run: {config.num_epochs} epochs of {plan.epoch_s:.0f} s and {evaluations(config)} evaluations of "
        f"{plan.evaluation_s:.0f} s take {plan.run_hours:.1f} hours, {plan.device_hours:.0f} of a device"
    )
    peak = f"{plan.most_gib:.1f} of {limit:g} GiB at the peak"
    if plan.most_gib <= USABLE * limit:
        return "\n".join([*lines, f"fits: {peak}"])
    found = smallest_set(config, devices, rate, USABLE * limit, cores)
    way_out = "no knob helps enough: take fewer frames or a smaller size"
    if found is not None:
        least = f"{found[1].most_gib:.1f} GiB, {found[1].epoch_s:.0f} s an epoch"
        way_out = f"with the fewest knobs it does ({least}): {in_words(found[0])}"
        if "model.encodings" in found[0]:
            lines.append("FOLDER: where tools/precompute.py has encoded the sources")
    return "\n".join([*lines, f"does not fit: {peak}, a tenth left free; {way_out}"])


def _assumed(config: Config, devices: int, rate: float, limit: float, cores: int) -> list[str]:
    frames, rows, columns = largest_size(config)
    speed, folder = f"{rate / 1e12:g} TFLOP/s (tools/device_report.py measures them)", config.model.path
    network = folder if Path(folder).is_dir() else f"Wan2.1-T2V-1.3B's, as there is no folder {folder}"
    unknown = [name for name in config.reward.weights if name not in READ and name not in VIDEO]
    free = f", {', '.join(unknown)} in no time" if unknown else ""
    return [
        "assumed:",
        f"  {devices} device(s) of {limit:g} GiB that sustain {speed}",
        f"  sizes of the network: {network}",
        f"  every video {frames}x{rows}x{columns}; every group carries a signal, and no round is resampled",
        f"  the codec at {rate_beside_transformer(config.model):g} of that rate, as an H100 has it",
        f"  rewards on {cores} cores of the host for each device{free}",
        f"  every rank sends {LINK / 1e9:g} GB/s, and nothing hides that",
        "  not counted in seconds: copies between device and CPU memory, checkpoints, the check of a short tail",
        "  not counted in GiB: fragmentation, kernel workspaces, other processes (for which a tenth is left free),",
        "  and what model.vae_tiling saves in decoding",
    ]


def _fixed(useful: bool, price: int, values: Values) -> Saving:
    return Saving(lambda _: values if useful else {}, price)


def _shared(config: Config, size: int) -> Values:
    """Return the values with which so many ranks share every sample, with as many samples an epoch as before."""
    batches, rest = divmod(config.sample.num_batches_per_epoch * size, config.train.context_parallel)
    return {} if rest else {"train.context_parallel": size, "sample.num_batches_per_epoch": batches}


def _smallest_batch(config: Config, devices: int) -> Values:
    """Return the values of the smallest batch of whole groups, with as many samples an epoch as before."""
    sample = config.sample
    unit = sample.k // math.gcd(sample.k, devices // config.train.context_parallel)
    if unit >= sample.train_batch_size or sample.expanded_batch_size % unit:
        return {}
    return {"sample.train_batch_size": unit, "sample.num_batches_per_epoch": sample.expanded_batch_size // unit}


def _allowed(config: Config, devices: int) -> bool:
    try:
        check(config)
        check_world(config, devices)
    except ConfigError:
        return False
    return True
