"""How much signal does a recipe have? Measured before days are spent on it.

    python tools/measure_signal.py --config config/grpo.py:tiny_recam --groups 8
    torchrun --standalone --nproc_per_node=8 tools/measure_signal.py --config config/grpo.py:my_recam_8npu --groups 2

For every reward: its spread inside groups with each copy's own initial noise and with shared initial noise, the credit
share (how much of the variance recorded noise caused), and the spread over the reward's noise floor. For every
stochastic step its noise and gain; and the root mean square of the log-ratio that one update at the recipe's rate
makes, in units of train.clip_range. With --tails 2 3 5 it also compares these values of sample.tail_steps with all of
the schedule's steps, or with --against 32 with so many second-order ones, which are the ODE: the rewards of otherwise
equal samples, and whether they rank the copies alike, group by group (flow_grpo/maths/certificate.py), beside controls:
the reference, with noise on the final latents. With --sparse it compares every tail with sample.ode_calls=sparse, too.
Nothing is kept. With --json the last line of stdout is one JSON object.
Exit code: 0, or 2 for a setting that cannot work.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from tools.common import make_parser, markdown_table

PARSER = make_parser(__doc__, recipe=True)
PARSER.add_argument("--groups", type=int, default=4, help="groups sampled on every rank, for each kind of noise")
PARSER.add_argument("--tails", type=int, nargs="+", default=[], metavar="STEPS", help="tails to compare")
words_of_against = "compare with so many second-order steps in place of all of the schedule; 32 are the ODE"
PARSER.add_argument("--against", type=int, default=0, metavar="STEPS", help=words_of_against)
PARSER.add_argument("--sparse", action="store_true", help="compare these tails with sparse calls, too")
PARSER.add_argument("--json", action="store_true", help="print one JSON object on the last line")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

import torch
from torch import Tensor

from flow_grpo.judging.evaluate import held_out_indices
from flow_grpo.judging.reward_signal import measure_signal, sample_group
from flow_grpo.maths.certificate import certify
from flow_grpo.maths.schedule import tail_levels
from flow_grpo.preflight.doctor.epoch import log_ratio_of_one_update
from flow_grpo.preflight.doctor.schedule import trained_steps
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.processes import start_program
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.start_up import refuse, set_up_rank

NOISES = (0.03, 0.06, 0.1)  # of the controls: shares of the final latents' standard deviation


def main(words: Sequence[str] | None = None) -> int:
    asked, overrides = PARSER.parse_known_args(words)
    world = None
    try:
        fixed = ["--config.run_name=signal", "--config.trackers=()", "--config.resume="]
        config, spec = read_command_line(["--config", asked.config, *overrides, *fixed])
        device, world = set_up_rank(config, watched=True)
        with world.broadcast_failure(), tempfile.TemporaryDirectory(prefix="flow_grpo_signal_") as folder:
            try:
                trainer = assemble(dataclasses.replace(config, output_root=folder), spec, device, world)
                found = measure(trainer, asked.groups) | {"tails": compare_tails(trainer, asked)}
                trainer.tracker.close()
            except ValueError as error:  # every rank raised it: the peers need not be told
                return refuse(error, world)
    except ValueError as error:
        return refuse(error, world)
    if world.is_main:
        show(found, asked)
    process_group.shut_down(world)
    return 0


def measure(trainer: Trainer, groups: int) -> dict[str, Any]:
    """Return rewards, steps and the log-ratio of one update; collective call: every rank must call it."""
    weights = trainer.config.reward.weights
    spreads = measure_signal(trainer.collector, trainer.training_data, weights, groups=groups, both=True).spreads
    rewards = {
        name: dataclasses.asdict(spread) | {"credit_share": spread.credit_share} for name, spread in spreads.items()
    }
    steps = [dataclasses.asdict(step) for step in trained_steps(trainer)]
    moved = log_ratio_of_one_update(trainer) / trainer.config.train.clip_range if steps else None
    return {"rewards": rewards, "steps": steps, "log_ratio_over_clip_range": moved}


def compare_tails(trainer: Trainer, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Return rewards of the same samples finished by tails of several lengths; collective call.

    One entry per reward and way: its mean over `asked.groups` groups a rank, of as many scenes as there are, that of
    the reference, and how far the two rank copies alike.
    """
    groups, reference = asked.groups, (asked.against, False, 0.0)
    collector, data, world = trainer.collector, trainer.training_data, trainer.world
    floors, flat = collector.rewards.floors, trainer.reward.flat_eps
    found: dict[tuple[int, bool, float], dict[str, Tensor]] = {}
    order = held_out_indices(data, len(data))
    first = world.data.rank * groups
    gids = [order[number % len(order)] for number in range(first, first + groups)]
    controls = [(asked.against, False, noise) for noise in NOISES]
    ways = [(tail, sparse, 0.0) for sparse in (False, True)[: 1 + asked.sparse] for tail in asked.tails]
    for tail, sparse, noise in dict.fromkeys([reference, *ways, *controls]) if asked.tails else []:
        levels = tail_levels(collector.sampling.sigmas, tail) if tail else None
        sampling = dataclasses.replace(collector.sampling, tails=levels, sparse=sparse, record=False)
        parts = [sample_group(collector, data, sampling, gid, noise) for gid in gids]
        own = {name: world.data.all_gather(torch.stack([one[name] for one in parts])) for name in parts[0]}
        found[tail, sparse, noise] = own
    return [
        {
            "reward": name,
            "tail_steps": tail,
            "sparse": sparse,
            "noise": noise,
            "mean": float(values.nanmean()),
            "mean_of_reference": float(found[reference][name].nanmean()),
            **dataclasses.asdict(certificate := certify(values, found[reference][name], max(floors[name], flat))),
            "holds": certificate.holds,
        }
        for (tail, sparse, noise), rewards in found.items()
        if (tail, sparse, noise) != reference
        for name, values in rewards.items()
    ]


def show(found: dict[str, Any], asked: argparse.Namespace) -> None:
    if asked.json:
        print(json.dumps(found), flush=True)
        return
    head = ["reward", "own noise", "shared noise", "floor", "credit share", "shared / floor"]
    rows = []
    for name, row in found["rewards"].items():
        over_floor = f"{row['shared'] / row['floor']:.1f}" if row["floor"] else "-"
        rows.append([name, *cells(row, ".4g", "own", "shared", "floor"), f"{row['credit_share']:.1%}", over_floor])
    print("\n".join(markdown_table(head, rows)))
    if found["steps"]:
        head = ["step", "sigma", "std", "gain", "weight"]
        rows = [[str(row["step"]), *cells(row, ".3f", *head[1:])] for row in found["steps"]]
        print("\n" + "\n".join(markdown_table(head, rows)))
        moved = found["log_ratio_over_clip_range"]
        print(f"\none update moves the log-ratio by {moved:.2g} x train.clip_range (root mean square)")
    if found["tails"]:
        against = f"with {asked.against} steps" if asked.against else "with all steps"
        head = ["reward", "tail", "mean", against, "correlation in a group", "5 % bound"]
        head += ["best and worst found", "pooled", "groups", "holds"]
        rows = [
            [
                row["reward"],
                f"{row['tail_steps'] or 'all'}"
                + ", sparse" * row["sparse"]
                + (f", noise {row['noise']:g}" if row["noise"] else ""),
                *cells(row, ".4g", "mean", "mean_of_reference"),
                *cells(row, ".3f", "correlation", "low", "ends", "pooled"),
                str(row["groups"]),
                "yes" if row["holds"] else "no",
            ]
            for row in found["tails"]
        ]
        print("\n" + "\n".join(markdown_table(head, rows)))


def cells(row: dict[str, Any], form: str, *names: str) -> list[str]:
    return [format(row[name], form) for name in names]


if __name__ == "__main__":
    start_program()
    sys.exit(main())
