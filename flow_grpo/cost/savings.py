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

from flow_grpo.cost.codec_cost import rate_beside_transformer
from flow_grpo.cost.plan import Plan, largest_size, make_plan
from flow_grpo.settings.checks import check, check_world
from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.sampling import offloads_rollouts
from flow_grpo.settings.schema import Config

NOT_SEEN = 0.005  # GiB: a knob that saves less is left out
NOTES = {"model.encodings=FOLDER": "(tools/precompute.py)"}
Values: TypeAlias = dict[str, int | str]  # dotted path of a knob -> value


@dataclasses.dataclass(frozen=True)
class Saving:
    """A way to need less memory."""

    values: Callable[[Config], Values]  # new values of the knobs of a configuration that it changes
    exact: bool = True  # what is trained stays the same, up to rounding


def knobs(config: Config, devices: int) -> list[Saving]:
    """Return the knobs of a recipe that can save memory, about the cheapest first."""
    model, train = config.model, config.train
    can_shard = train.sharding == "ddp" and devices > 1
    found: list[tuple[bool, Values]] = [
        (not model.vae_slicing, {"model.vae_slicing": True}),
        (model.checkpointing == "none", {"model.checkpointing": "keep_attention"}),
        (model.checkpointing in ("none", "keep_attention"), {"model.checkpointing": "blocks"}),
        (train.batch_size > 1, {"train.batch_size": 1}),
        (not model.encodings, {"model.encodings": "FOLDER"}),
        (not offloads_rollouts(config), {"sample.offload": True}),
        (not model.offload, {"model.offload": True}),
        (can_shard, {"train.sharding": "fsdp2"}),
    ]
    inexact: list[tuple[bool, Values]] = [
        (model.dtype == "fp32", {"model.dtype": "bf16"}),
        (model.trained != "lora", {"model.trained": "lora"}),
    ]
    sizes = [size for size in (2, 4, 8) if train.context_parallel < size <= devices]
    every = [
        *(_fixed(values) for useful, values in found if useful),
        *(Saving(functools.partial(_shared, size=size)) for size in sizes),
        # Behind those: how small a batch can be depends on how many ranks share a sample.
        Saving(functools.partial(_smallest_batch, devices=devices)),
        *(_fixed(values, exact=False) for useful, values in inexact if useful),
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
    """Return how the values of knobs are passed, and what they need."""
    words = []
    for path, value in values.items():
        word = f"{path}={value if isinstance(value, str) else json.dumps(value)}"
        words.append(f"--config.{word} {NOTES.get(word, '')}".strip())
    return " ".join(words)


def smallest_set(config: Config, devices: int, rate: float, limit: float) -> tuple[Values, Plan] | None:
    """Return the values of the fewest knobs with which a recipe fits `limit` GiB, and its plan; None without any.

    Of several such sets the fastest is taken. Knobs that change what is trained are taken only where the others are
    not enough.
    """
    known = knobs(config, devices)
    for usable in ([knob for knob in known if knob.exact], known):
        for count in range(1, len(usable) + 1):
            fitting = []
            for chosen in itertools.combinations(usable, count):
                other, values = turned(config, chosen)
                plan = make_plan(other, devices, rate) if _allowed(other, devices) else None
                if plan is not None and plan.most_gib <= limit:
                    fitting.append((values, plan))
            if fitting:
                return min(fitting, key=lambda found: found[1].epoch_s)
    return None


def report(config: Config, devices: int, rate: float, limit: float) -> tuple[str, bool]:
    """Return the plan in words (costs, what was assumed, what saves memory, whether it fits), and whether it fits.

    Of each of the devices, `rate` is the operations a second that it sustains, `limit` its GiB.
    """
    plan = make_plan(config, devices, rate)
    lines = []
    for name, value in dataclasses.asdict(plan).items():
        decimals = "" if isinstance(value, int) else ".0f" if value >= 100 else ".2f"
        lines.append(f"{name:30s} {value:>14,{decimals}}")
    frames, rows, columns = largest_size(config)
    speed, folder = f"{rate / 1e12:g} TFLOP/s (tools/device_report.py measures them)", config.model.path
    network = folder if Path(folder).is_dir() else f"Wan2.1-T2V-1.3B's, as there is no folder {folder}"
    lines += [
        "",
        "assumed:",
        f"  {devices} device(s) of {limit:g} GiB that sustain {speed}",
        f"  sizes of the network: {network}",
        f"  every video {frames}x{rows}x{columns}; every group carries a signal, and no round is resampled",
        f"  the codec at {rate_beside_transformer(config.model):g} of that rate, as an H100 has it",
        "  not counted in seconds: rewards, evaluation, copies between device and CPU memory, what ranks send, waiting",
        "  not counted in GiB: fragmentation, kernel workspaces, other processes (leave a tenth of the device free),",
        "  and what model.vae_tiling saves in decoding",
        "",
    ]
    table = []
    for knob in knobs(config, devices):
        other = make_plan(turned(config, [knob])[0], devices, rate)
        saved, slower = other.most_gib - plan.most_gib, other.epoch_s - plan.epoch_s
        if -saved > NOT_SEEN:
            note = "" if knob.exact else "  changes what is trained"
            table.append(f"  {saved:+7.2f} GiB {slower:+8.1f} s  {in_words(knob.values(config))}{note}")
    now = f"{plan.most_gib:.1f} GiB at the peak, {plan.epoch_s:.0f} s an epoch"
    lines += [f"what saves memory, each alone (now {now}):", *table] if table else ["no knob saves memory"]
    if plan.most_gib <= limit:
        return "\n".join([*lines, f"fits: {plan.most_gib:.1f} of {limit:g} GiB at the peak"]), True
    found = smallest_set(config, devices, rate, limit)
    way_out = "no knob helps enough: take fewer frames or a smaller size"
    if found is not None:
        peak = f"{found[1].most_gib:.1f} GiB, {found[1].epoch_s:.0f} s an epoch"
        way_out = f"with the fewest knobs it does ({peak}): {in_words(found[0])}"
    verdict = f"does not fit: {plan.most_gib:.1f} of {limit:g} GiB at the peak; {way_out}"
    return "\n".join([*lines, verdict]), False


def _fixed(values: Values, *, exact: bool = True) -> Saving:
    return Saving(lambda _: values, exact)


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
