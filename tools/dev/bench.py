"""Measure the overhead of the library, as ratios within one run; --json prints one object.

    python tools/dev/bench.py --config config/grpo.py:tiny_recam --json --config.sample.train_batch_size=32
    python tools/dev/bench.py dynamic-sampling --json
    python tools/dev/bench.py packing --json
    python tools/dev/bench.py transformer
    python tools/dev/bench.py start
    python tools/dev/bench.py growth --plot growth.png
    python tools/dev/bench.py --all --plot growth.png

The first command times the phases of an epoch against the transformer calls alone; the second moves a group of 32 MiB
samples between 4 ranks, against gathering all samples as objects (`time_ratio`, `memory_ratio`); the third computes how
long ranks wait for each other with cost-limited batches, against packing on each rank (`idle_share`,
`naive_idle_share`); the fourth times an update step by what checkpointing recomputes; the fifth the start of a run
beside importing its libraries; the sixth measures how time, memory, work and traffic grow (exponents of tokens, frames,
k, window, steps, samples of a rank, ranks). `--all` runs these and epochs of the tiny recipe, within ten minutes on two
cores.

`rollout_update_over_bare` divides the rollout and update phases by the very calls of the network that they made, with
their backward passes; `epoch_over_bare` divides the whole epoch. Epochs and bare calls alternate and their medians are
compared, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch

from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.runtime.ranks.start_up import set_up_rank
from flow_grpo.runtime.clock import Clock
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.processes import start_program
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.sharding import unwrap
from tools.dev.bench_cases import exchange, growth, packing, start, transformer
from tools.common import make_parser

CASES: dict[str, Callable[[Namespace], dict[str, float]]] = {
    "dynamic-sampling": lambda _: exchange.measure(),
    "packing": lambda _: packing.measure(),
    "transformer": lambda _: transformer.measure(),
    "start": lambda _: start.measure(),
    "growth": lambda given: growth.measure(given.plot),
}
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any], bool]
TINY = f"{growth.ROOT}/config/grpo.py:tiny_recam"


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, and return the exit code."""
    given = list(sys.argv[1:] if words is None else words)
    case = given.pop(0) if given and given[0] in CASES else "all" if "--all" in given else "epoch"
    parser = make_parser(__doc__, recipe=case == "epoch")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    if case in ("growth", "all"):
        parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw how everything grows")
        parser.add_argument("--all", action="store_true", help="run every case")
    if case == "epoch":
        parser.add_argument("--epochs", type=int, default=5, help="measured epochs, after one warm-up epoch")
        known, overrides = parser.parse_known_args(given)
        say(f"{known.config}: one epoch to warm up and {known.epochs} measured, each beside its bare calls")
        result = measure_epochs(known.config, overrides, known.epochs)
    else:
        known, result = parser.parse_args(given), {}
        for name in CASES if case == "all" else [case]:
            say(f"the case {name}, up to a few minutes")
            result |= CASES[name](known)
        if case == "all":
            say(f"{TINY}: one epoch to warm up and 3 measured, each beside its bare calls")
            result |= measure_epochs(TINY, [], 3)
    print(json.dumps(result) if known.json else table(result))
    return 0


def say(what: str) -> None:
    """Print what is measured, on standard error: the other one is for results."""
    print(f"measuring {what}", file=sys.stderr, flush=True)


def measure_epochs(spec: str, overrides: Sequence[str], epochs: int) -> dict[str, float]:
    """Build a recipe's trainer in a temporary folder, and measure it."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"--config.output_root={folder}",
            "--config.run_name=bench",
            "--config.trackers=()",
            "--config.resume=",
        ]
        config, spec = read_command_line(["--config", spec, *overrides, *fixed])
        device, world = set_up_rank(config)
        trainer = assemble(config, spec, device, world)
        result = measure(trainer, epochs)
        trainer.tracker.close()
        process_group.shut_down(world)
    return result


def measure(trainer: Trainer, epochs: int) -> dict[str, float]:
    """Return the median seconds of an epoch, of its phases and of the bare transformer calls, and the ratios to these.

    One more epoch runs first as warm-up.
    """
    phases: list[dict[str, float]] = []
    bare: list[float] = []
    for epoch in range(epochs + 1):
        trainer.clock = Clock(trainer.device)
        begun = time.perf_counter()
        with recorded(unwrap(trainer.updater.policy.module)) as calls:
            samples = trainer.sample()
            batch = trainer.compare(trainer.choose(samples, trainer.gather(samples)))
            trainer.update(batch, epoch)
            trainer.finish_epoch(epoch)
        spent = time.perf_counter() - begun
        seconds = bare_seconds(trainer, calls)
        if epoch:  # the first warms up
            hidden = {f"{name}_hidden": value for name, value in trainer.clock.hidden.items()}
            phases.append(dict(trainer.clock.seconds) | hidden | {"epoch": spent})
            bare.append(seconds)
    medians = {f"{name}_s": statistics.median(row[name] for row in phases) for name in phases[0]}
    medians["bare_s"] = statistics.median(bare)
    medians["rollout_update_over_bare"] = statistics.median(
        (row["rollout"] + row["update"]) / seconds for row, seconds in zip(phases, bare, strict=True)
    )
    medians["epoch_over_bare"] = statistics.median(
        row["epoch"] / seconds for row, seconds in zip(phases, bare, strict=True)
    )
    return medians


@contextlib.contextmanager
def recorded(network: torch.nn.Module) -> Iterator[list[Call]]:
    """Context manager that collects the network's calls: arguments, and whether a backward pass follows."""
    calls: list[Call] = []

    def record(_: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append((arguments, options, torch.is_grad_enabled()))

    handle = network.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def bare_seconds(trainer: Trainer, calls: Sequence[Call]) -> float:
    """Return the seconds that an epoch's transformer calls take by themselves."""
    policy, device = trainer.updater.policy, trainer.device
    device_api.synchronize(device)
    begun = time.perf_counter()
    for arguments, options, train in calls:
        with torch.set_grad_enabled(train), device_api.autocast(device, policy.dtype):
            output = policy.module(*arguments, **options)[0]
        if train:
            output.float().mean().backward()
    device_api.synchronize(device)
    seconds = time.perf_counter() - begun
    trainer.updater.optimizer.zero_grad(set_to_none=True)
    return seconds


def table(result: dict[str, float]) -> str:
    """Return one line of name and value per figure."""
    return "\n".join(f"{name:28s} {value:10.4f}" for name, value in result.items())


if __name__ == "__main__":
    start_program()
    sys.exit(main())
