"""Measure the overhead of the library, as ratios within one run; --json prints one object.

    python tools/dev/bench.py --config config/grpo.py:tiny_recam --json --config.sample.train_batch_size=32

The phases of an epoch are timed against the transformer calls alone: `rollout_update_over_bare` divides the rollout and
update phases by the very calls of the network that they made, with their backward passes; `epoch_over_bare` divides the
whole epoch. What is compared takes turns, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch

from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.processes import start_program
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.sharding import unwrap
from flow_grpo.runtime.ranks.start_up import set_up_rank
from tools.common import make_parser
from tools.device.timing import interleaved, median_ratio


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__, recipe=True)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--epochs", type=int, default=5, help="measured epochs, after one warm-up epoch")
    known, overrides = parser.parse_known_args(words)
    what = f"{known.config}: one epoch to warm up and {known.epochs} measured, each beside its bare calls"
    print(f"measuring {what}", file=sys.stderr, flush=True)  # stdout is for the results
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"output_root": folder, "run_name": "bench", "trackers": "()", "resume": ""}
        overrides += [f"--config.{name}={value}" for name, value in fixed.items()]
        config, spec = read_command_line(["--config", known.config, *overrides])
        device, world = set_up_rank(config)
        trainer = assemble(config, spec, device, world)
        result = measure(trainer, known.epochs)
        trainer.tracker.close()
        process_group.shut_down(world)
    print(json.dumps(result) if known.json else "\n".join(f"{name:28s} {result[name]:10.4f}" for name in result))
    return 0


def measure(trainer: Trainer, epochs: int) -> dict[str, float]:
    """Return the median seconds of an epoch, of its phases and of the bare transformer calls, and the ratios to these.

    One more epoch runs first as warm-up.
    """
    policy, device = trainer.updater.policy, trainer.device
    phases: list[dict[str, float]] = []
    calls: list[tuple[tuple[Any, ...], dict[str, Any], bool]] = []  # arguments, and whether a backward pass follows

    def record(_: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        calls.append((arguments, options, torch.is_grad_enabled()))

    def epoch() -> None:
        calls.clear()
        trainer.clock = Clock(device)
        handle = unwrap(policy.module).register_forward_pre_hook(record, with_kwargs=True)
        samples = trainer.sample()
        batch = trainer.compare(trainer.choose(samples, trainer.gather(samples)))
        trainer.update(batch, len(phases))
        trainer.finish_epoch(len(phases))
        handle.remove()
        hidden = {f"{name}_hidden": value for name, value in trainer.clock.hidden.items()}
        phases.append(dict(trainer.clock.seconds) | hidden)

    def bare() -> None:
        for arguments, options, train in calls:
            with torch.set_grad_enabled(train), device_api.autocast(device, policy.dtype):
                output = policy.module(*arguments, **options)[0]
            if train:
                output.float().mean().backward()
        trainer.updater.optimizer.zero_grad(set_to_none=True)

    seconds = interleaved({"epoch": epoch, "bare": bare}, device, epochs)
    seconds = {name: [row[name] for row in phases[1:]] for name in phases[1]} | seconds
    both = [rollout + update for rollout, update in zip(seconds["rollout"], seconds["update"], strict=True)]
    return {f"{name}_s": statistics.median(row) for name, row in seconds.items()} | {
        "rollout_update_over_bare": median_ratio(seconds | {"both": both}, "both", "bare"),
        "epoch_over_bare": median_ratio(seconds, "epoch", "bare"),
    }


if __name__ == "__main__":
    start_program()
    sys.exit(main())
