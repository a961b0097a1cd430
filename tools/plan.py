"""Estimate a recipe's memory and time on given devices, without loading a model.

    python tools/plan.py --config config/grpo.py:my_recam_8npu --devices 8 --memory 64GiB
    python tools/plan.py --run outputs/first

The second puts the plan of a run beside its metrics, at the rate that rollouts and updates had in the median epoch.
--tflops is the device's sustained rate on this model, not the data sheet's; tools/device_report.py measures it.
Without a model folder, network and codec are those of Wan2.1-T2V-1.3B. flow_grpo/cost/plan.py says what each line
counts; each knob that saves memory is listed with its GiB and seconds, and what does not fit ends with the fewest
knobs with which it does, those first that cost least. Above stands what share of the run its evaluations take, and
which change they can see, by the spread of changes that was measured on the demo.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.cost import ASSUMED_RATE, CORES
from flow_grpo.run.at_once import answer_at_once
from tools.common import command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("--config", metavar="FILE:RECIPE", help="its knobs may follow")
PARSER.add_argument("--run", type=Path, metavar="FOLDER", help="of a run: its plan beside its metrics")
PARSER.add_argument("--devices", type=int, default=8, help="ranks")
PARSER.add_argument("--memory", default="64GiB", help="of one device, such as 64GiB")
rate = f"what a device sustains, in 1e12 operations a second; {ASSUMED_RATE / 1e12:g} is 40 to 48 %% of an Ascend 910B"
PARSER.add_argument("--tflops", type=float, default=ASSUMED_RATE / 1e12, help=rate)
PARSER.add_argument("--cores", type=int, default=CORES, help="of the host for each device, which score videos")
PARSER.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

from flow_grpo.cost.choose_recomputation import choose_recomputation
from flow_grpo.cost.plan import make_plan
from flow_grpo.cost.savings import USABLE, report
from flow_grpo.judging import power
from flow_grpo.settings.checks import check_world
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.schema import Config
from tools.run_folder import read_run


@command
def main(words: Sequence[str] | None = None) -> int:
    known, overrides = PARSER.parse_known_args(words)
    limit, rate = _limits(known)
    if known.run is not None:
        print(beside_run(known.run))
        return 0
    config = load_config(known.config, overrides)
    check_world(config, known.devices)
    config, message = choose_recomputation(config, known.devices, limit)
    if not known.json:
        print(f"counting the costs of {known.config}; nothing is allocated", flush=True)
    plan = make_plan(config, known.devices, rate, known.cores)
    fits = plan.most_gib <= USABLE * limit
    if known.json:
        print(json.dumps(dataclasses.asdict(plan) | {"fits": fits}))
    else:
        evaluation = (
            f"evaluation: {plan.evaluation_share:.0%} of the run's hours; at most {_seen(config, known.devices)}"
        )
        text = report(config, known.devices, limit, rate, known.cores)
        print(*([message] if message else []), evaluation, text, sep="\n")
    return 0 if fits else 1


def _seen(config: Config, devices: int) -> str:
    # Of what is set aside the number of scenes is known; else there are at most as many as conditions.
    aside = config.data.tune_scenes if config.eval.split == "tune" else config.data.report_scenes
    conditions, ranks = config.eval.num_conditions, devices // config.train.context_parallel
    return power.in_words(power.usual_spreads(config), conditions, min(conditions, aside or conditions), ranks)


def _limits(known: argparse.Namespace) -> tuple[float, float]:
    """Return a device's GiB and operations a second; ConfigError for options that are missing or out of bounds."""
    if (known.config is None) == (known.run is None):
        raise ConfigError("one of --config FILE:RECIPE and --run FOLDER is needed; see --help")
    for name in ("devices", "cores"):
        if getattr(known, name) < 1:
            raise ConfigError(f"--{name}: got {getattr(known, name)}, must be at least 1")
    if not 0 < known.tflops < math.inf:
        raise ConfigError(f"--tflops: got {known.tflops:g}, must be finite and above 0")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB)?", known.memory)
    if match is None:
        raise ConfigError(f"--memory: got {known.memory!r}, must be a number of GiB; for example --memory 64GiB")
    return float(match[1]) / (1024 if match[2] == "MiB" else 1), known.tflops * 1e12


def beside_run(folder: Path) -> str:
    run = read_run(folder)
    epochs, config, ranks = list(run.epochs.values()), run.config, run.start.ranks
    if not epochs:
        raise ValueError(f"--run {folder} has no finished epoch yet")

    def measured(name: str, average: Callable[[list[float]], float] = statistics.median) -> float | None:
        found = [row[name] for row in epochs if math.isfinite(row.get(name, math.nan))]
        return average(found) if found else None

    on_cpu = run.start.device.startswith("device cpu")
    # As train_grpo.py decided it: ranks on a CPU share the machine's memory.
    gib = epochs[-1].get("system/memory_total_gib", math.nan) / (ranks if on_cpu else 1)
    config, message = (config, "") if math.isnan(gib) else choose_recomputation(config, ranks, gib)
    work, spent = make_plan(config, ranks, 1.0), [measured(f"time/{name}_s") for name in ("rollout", "update")]
    rate = (work.rollout_s + work.update_s) / sum(spent) if all(spent) else math.nan
    plan = make_plan(config, ranks, rate, 1 if on_cpu else CORES)
    at = f"seconds planned at the {rate / 1e12:.3g} TFLOP/s that rollouts and updates sustained"
    lines = [
        f"{folder}: {len(epochs)} epochs on {ranks} rank(s), {run.start.device.partition(';')[0]}; {at}",
        *([message] if message else []),
        f"{'':34s} {'planned':>12s} {'measured':>12s}",
    ]
    for what, planned, metric in (
        ("forwards a sample", plan.forward_equivalents_per_sample, "system/forward_equivalents_per_sample"),
        ("seconds of encoding", plan.encode_s, "time/encode_s"),
        ("seconds of rollouts", plan.rollout_s, "time/rollout_s"),
        ("seconds of decoding and scoring", plan.decode_s + plan.reward_s, "time/score_s"),
        ("seconds of the update", plan.update_s, "time/update_s"),
        ("seconds of an epoch", plan.epoch_s, "time/epoch_s"),
        ("seconds of an evaluation", plan.evaluation_s, "time/evaluation_s"),
        ("GiB at the peak", plan.most_gib, "system/memory_peak_gib"),
        ("GiB sent: gradients", plan.sent_gradients_gib, "system/sent_gradients_gib"),
        ("GiB sent: sharded weights", plan.sent_weights_gib, "system/sent_weights_gib"),
        ("GiB sent: tokens", plan.sent_tokens_gib, "system/sent_tokens_gib"),
    ):
        # Forwards differ with the epoch's windows, which take turns; seconds with what else the machine did.
        found = measured(metric, statistics.fmean if what == "forwards a sample" else statistics.median)
        lines.append(f"{what:34s} {_number(planned):>12s} {_number(found):>12s}")
    if on_cpu:
        lines.append("a CPU's peak is that of the whole process, Python and its libraries included")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4g}"


if __name__ == "__main__":
    sys.exit(main())
