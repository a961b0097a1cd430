"""Check a run before days are spent on it, through the code of training.

    python tools/doctor.py --config config/grpo.py:tiny_recam
    torchrun --standalone --nproc_per_node=8 tools/doctor.py --config config/grpo.py:my_recam_8npu

One batch is rolled out and replayed in several batch sizes, the rewards are compared on true and wrong views, an epoch
is sampled, scored and compared, and two updates are taken. Start it with as many ranks as the run will have: some
faults only show between ranks. Nothing is kept. Every knob may follow as --config.section.knob=value. With --json
stdout holds one JSON object; everything else goes to stderr.
Exit code: 0 when no check failed, 1 when one did, 2 for a setting that cannot work.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from tools.common import make_parser

PARSER = make_parser(__doc__, recipe=True)
PARSER.add_argument("--json", action="store_true", help="print one JSON object, everything else on stderr")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

import torch

from flow_grpo.models.adapters import AdapterError
from flow_grpo.preflight.doctor.examine import full, run_checks
from flow_grpo.preflight.doctor.findings import Finding, as_table, failed, finding, summary
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.runtime.processes import start_program
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.start_up import refuse, set_up_rank
from flow_grpo.settings.checks import check, check_world
from flow_grpo.settings.loading import ConfigError
from flow_grpo.settings.objectives import micro_batch
from flow_grpo.settings.schema import Config


def main(words: Sequence[str] | None = None) -> int:
    known, overrides = PARSER.parse_known_args(words)
    begun, world = time.perf_counter(), None
    try:
        with stdout_to_stderr() if known.json else contextlib.nullcontext():
            fixed = ["--config.run_name=doctor", "--config.trackers=()", "--config.resume="]
            config, spec = read_command_line(["--config", known.config, *overrides, *fixed])
            device, world = set_up_rank(config, watched=True)
            with world.broadcast_failure():
                try:
                    findings = examine(config, spec, device, world)
                except ValueError as error:
                    return refuse(error, world)
    except ValueError as error:
        return refuse(error, world)
    if world.is_main:
        seconds = time.perf_counter() - begun
        rows = [dataclasses.asdict(found) for found in findings]
        told = json.dumps({"failed": failed(findings), "seconds": seconds, "findings": rows})
        print(told if known.json else "\n".join([*as_table(findings), summary(findings, seconds)]), flush=True)
    process_group.shut_down(world)
    return 1 if failed(findings) else 0


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, file descriptor 1 is stderr, also for libraries and child processes."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def examine(config: Config, spec: str, device: torch.device, world: World) -> list[Finding]:
    """Build a run and return its findings, or raise ValueError, the same on every rank. Collective call."""
    short = shortened(config, world.data.size)
    with tempfile.TemporaryDirectory(prefix="flow_grpo_doctor_") as folder:
        try:
            trainer = assemble(dataclasses.replace(short, output_root=folder), spec, device, world)
        except ValueError as error:
            if not isinstance(error.__cause__, AdapterError):
                raise
            return [finding("adapters", str(error), fail="set model.lora_targets to names like those")]
        # Its disk is checked; nothing is written there.
        trainer.run_folder = Path(config.output_root) / "doctor"
        findings = run_checks(trainer, full(config.train.updates_per_epoch))
        trainer.tracker.close()
    return findings


def shortened(config: Config, world_size: int) -> Config:
    """Return the recipe with one update per epoch, of as few batches as its checks and full micro-batches allow."""
    train = dataclasses.replace(config.train, updates_per_epoch=1)
    full = micro_batch(dataclasses.replace(config, train=train))
    for batches in range(1, config.sample.num_batches_per_epoch):
        sample = dataclasses.replace(config.sample, num_batches_per_epoch=batches)
        short = dataclasses.replace(config, sample=sample, train=train)
        try:
            check(short)
            check_world(short, world_size)
        except ConfigError:
            continue
        if micro_batch(short) == full:
            return short
    return dataclasses.replace(config, train=train)


if __name__ == "__main__":
    start_program()
    sys.exit(main())
