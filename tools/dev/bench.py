"""Measure the overhead of the library, as ratios within one run; --json prints one object.

    python tools/dev/bench.py --config config/grpo.py:tiny_recam --json --config.sample.train_batch_size=32
    python tools/dev/bench.py dynamic-sampling --json
    python tools/dev/bench.py packing --json
    python tools/dev/bench.py transformer
    python tools/dev/bench.py growth --plot growth.png
    python tools/dev/bench.py --all --plot growth.png

The first command times the phases of an epoch against the transformer calls alone; the second moves a group of 32 MiB
samples between 4 ranks, against gathering all samples as objects (`time_ratio`, `memory_ratio`); the third computes how
long ranks wait for each other with cost-limited batches, against packing on each rank (`idle_share`,
`naive_idle_share`); the fourth times an update step by what checkpointing recomputes; the fifth measures how time,
memory, work and traffic grow (exponents of tokens, frames, k, window, steps, samples of a rank, ranks). `--all` runs
these and epochs of the tiny recipe, within ten minutes on two cores.

`rollout_update_over_bare` divides the rollout and update phases by the same number of forward and backward calls on the
same shapes; `epoch_over_bare` divides the whole epoch. Epochs and bare calls alternate and their medians are compared,
because the speed of a shared machine drifts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch

import train_grpo
from flow_grpo.algorithm.clock import Clock
from flow_grpo.algorithm.trainer import Trainer
from flow_grpo.records import TrainingBatch
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks import process_group
from tools.dev.bench_cases import exchange, growth, packing, transformer
from tools.common import make_parser

CASES: dict[str, Callable[[Namespace], dict[str, float]]] = {
    "dynamic-sampling": lambda _: exchange.measure(),
    "packing": lambda _: packing.measure(),
    "transformer": lambda _: transformer.measure(),
    "growth": lambda given: growth.measure(given.plot),
}
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
        config, spec = train_grpo.read_command_line(["--config", spec, *overrides, *fixed])
        device, ranks = train_grpo.set_up_rank(config)
        trainer = train_grpo.build(config, spec, device, ranks)
        result = measure(trainer, epochs)
        trainer.tracker.close()
        process_group.shut_down(ranks)
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
        samples = trainer.sample()
        batch = trainer.compare(trainer.choose(samples, trainer.gather(samples)))
        trainer.update(batch, epoch)
        trainer.finish_epoch(epoch)
        spent = time.perf_counter() - begun
        seconds = bare_seconds(trainer, batch, epoch)
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


def bare_seconds(trainer: Trainer, batch: TrainingBatch, epoch: int) -> float:
    """Return the seconds that one epoch's transformer calls take by themselves.

    Guidance calls the network with twice the rows; KL adds a reference call to every replayed step.
    """
    config, policy = trainer.config, trainer.updater.policy
    sizes = batch.sizes()
    rollouts = [
        rows
        for size in sizes.unique()
        for rows in (sizes == size).nonzero().flatten().split(config.sample.train_batch_size)
    ]
    replays = [rows for step in trainer.updater.plan(batch, epoch).steps for rows in step]
    rollouts, replays = ([_inputs(trainer, batch, rows) for rows in calls] for calls in (rollouts, replays))
    columns = range(batch.parts[0].trajectory.steps.shape[1])
    device_api.synchronize(trainer.device)
    begun = time.perf_counter()
    for inputs in rollouts:
        with torch.no_grad(), device_api.autocast(trainer.device, policy.dtype):
            for _ in range(config.sample.num_steps):
                policy.module(*inputs)
    for inputs in [call for call in replays for _ in columns]:
        with device_api.autocast(trainer.device, policy.dtype):
            if config.train.kl_coef > 0:
                with torch.no_grad():
                    policy.module(*inputs)
            output = policy.module(*inputs)[0]
        output.float().mean().backward()
    device_api.synchronize(trainer.device)
    seconds = time.perf_counter() - begun
    trainer.updater.optimizer.zero_grad(set_to_none=True)
    return seconds


def _inputs(trainer: Trainer, batch: TrainingBatch, positions: torch.Tensor) -> list[torch.Tensor]:
    """Return the network's inputs for these samples."""
    part = batch.take(positions, trainer.device)
    latents, given = part.trajectory.states[:, 0], part.conditioning
    times = torch.full((len(part),), 500.0, device=latents.device)
    values = [
        torch.cat([latents, given.inputs["source_latents"]], dim=2),
        times,
        given.prompt_embeds,
        given.inputs["target_cameras"],
    ]
    copies = 1 if trainer.config.sample.guidance_scale == 1.0 else 2
    return [value.repeat(copies, *[1] * (value.ndim - 1)) for value in values]


def table(result: dict[str, float]) -> str:
    """Return one line of name and value per figure."""
    return "\n".join(f"{name:28s} {value:10.4f}" for name, value in result.items())


if __name__ == "__main__":
    sys.exit(main())
