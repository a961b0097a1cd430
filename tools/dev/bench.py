"""Measure the overhead of the library, as ratios within one run; --json prints one object.

    python tools/dev/bench.py --config config/grpo.py:tiny_recam --json --config.sample.train_batch_size=32
    python tools/dev/bench.py transformer

The first command times the phases of an epoch against the transformer calls alone: `rollout_update_over_bare` divides
the rollout and update phases by the very calls of the network that they made, with their backward passes;
`epoch_over_bare` divides the whole epoch. The second divides the seconds of an update step of the tiny model by those
with another checkpointing, or with all tokens in the last block instead of the target's alone. What is compared takes
turns, because the speed of a shared machine drifts.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch
from torch import Tensor

from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.networks.transformers import load_transformer
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

TINY = Path(__file__).resolve().parents[2] / "assets" / "tiny_recam" / "transformer"
# Latent frames, rows and columns of one video: 120, 640 and 2,560 tokens with its source.
VIDEOS = {120: (5, 3, 4), 640: (5, 8, 8), 2560: (5, 16, 16)}
REPEATS = 7


def main(words: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if words is None else words)
    transformer = given[:1] == ["transformer"]
    parser = make_parser(__doc__, recipe=not transformer)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    if transformer:
        known = parser.parse_args(given[1:])
        what = "steps of the transformer, up to a few minutes"
    else:
        parser.add_argument("--epochs", type=int, default=5, help="measured epochs, after one warm-up epoch")
        known, overrides = parser.parse_known_args(given)
        what = f"{known.config}: one epoch to warm up and {known.epochs} measured, each beside its bare calls"
    print(f"measuring {what}", file=sys.stderr, flush=True)  # stdout is for the results
    result = update_steps() if transformer else epochs_of(known.config, overrides, known.epochs)
    print(json.dumps(result) if known.json else "\n".join(f"{name:28s} {result[name]:10.4f}" for name in result))
    return 0


def epochs_of(spec: str, overrides: Sequence[str], epochs: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        fixed = {"output_root": folder, "run_name": "bench", "trackers": "()", "resume": ""}
        words = ["--config", spec, *overrides, *(f"--config.{name}={value}" for name, value in fixed.items())]
        config, spec = read_command_line(words)
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


def update_steps() -> dict[str, float]:
    """Return the seconds of an update step over those of the same step without a switch.

    Checkpointing is compared with recomputing blocks, the target's tokens alone in the last block with all of them.
    """
    network = load_transformer(ReCamTransformer3DModel, TINY)
    channels, text_width = network.config["in_channels"], network.config["text_dim"]
    found = {}
    for tokens, (frames, rows, columns) in VIDEOS.items():
        draw = torch.Generator().manual_seed(0)
        shapes = ((1, channels, 2 * frames, rows, columns), (1, 8, text_width), (1, frames, 12))
        latents, prompts, cameras = (torch.randn(shape, generator=draw) for shape in shapes)
        step = functools.partial(update_step, network, (latents, torch.full((1,), 500.0), prompts, cameras))
        calls = {mode: functools.partial(step, mode) for mode in ("blocks", "keep_attention", "none")}
        with_all_tokens = mock.patch.object(ReCamTransformer3DModel, "through_blocks", all_tokens)
        calls["all_tokens"] = with_all_tokens(calls["none"])
        seconds = interleaved(calls, torch.device("cpu"), REPEATS)
        found[f"update_target_only_over_all_tokens_{tokens}"] = median_ratio(seconds, "none", "all_tokens")
        for mode in ("keep_attention", "none"):
            found[f"update_{mode}_over_blocks_{tokens}"] = median_ratio(seconds, mode, "blocks")
    return found


def update_step(network: ReCamTransformer3DModel, given: Sequence[Tensor], mode: str) -> None:
    set_checkpointing(network, mode)
    network(*given)[0].square().mean().backward()


def all_tokens(self: ReCamTransformer3DModel, tokens: Tensor, *arguments: Any) -> Tensor:
    """Return what `through_blocks` returns, without its shortcut in the last block."""
    for block in self.blocks:
        tokens = block(tokens, *arguments)
    return tokens[:, : tokens.shape[1] // 2]


if __name__ == "__main__":
    start_program()
    sys.exit(main())
