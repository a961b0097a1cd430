r"""What does each choice of a recipe teach, per forward of the network? Runs of several seeds, and their table.

    python tools/learning_study.py --only today shared_noise --seeds 0 1 2     # train what has no record yet
    python tools/learning_study.py --report                                   # table and plot of all records

Every variant is a recipe of config/grpo.py with the overrides listed in VARIANTS. A run that was interrupted goes on
from its last checkpoint; a finished one leaves a record in `benchmarks/learning/`, with its curve, its changes with
95 % intervals, and the commit. The report is the generated part of docs/learning.md, and docs/learning.png.
Exit code: 0, 1 when a run failed, or 2 for an unknown variant.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

from flow_grpo.reporting.drawing.style import new_figure
from flow_grpo.run.starts import commit
from flow_grpo.runtime.atomic_file import write_atomically
from tools.common import fail, launcher, make_parser, markdown_table
from tools.run_folder import Run, read_run

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "learning"
PAGE, PLOT = ROOT / "docs" / "learning.md", ROOT / "docs" / "learning.png"
BEGIN, END = "<!-- begin of the generated part -->", "<!-- end of the generated part -->"
MEASURES = {  # -> title and decimals; what a record lacks is not shown
    "eval/trans_err_m": ("TransErr m", 3),
    "eval/rot_err_deg": ("RotErr °", 3),
    "eval/residual": ("residual (colours 0..1)", 4),
    "eval/found_path_psnr_db": ("PSNR on the found path dB", 3),
    "eval/target_view_psnr_db": ("PSNR dB (trained)", 3),
}
EVERY = 10  # epochs between evaluations
BY_CAMERA = ("demo", "twin")  # variants with a table of their own


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the study: its title, its recipe of config/grpo.py, and knob -> value."""

    title: str
    recipe: str
    overrides: dict[str, Any]


# The demo as it was before this study, every number that its recipe chose.
TODAY: dict[str, Any] = {
    "num_epochs": 65,
    "sample.num_steps": 8,
    "sample.sde": "flow",
    "sample.noise_level": 0.7,
    "sample.sde_steps": "0,1,2,3",
    "sample.sde_window": 2,
    "sample.tail_steps": 0,
    "sample.same_initial_noise": False,
    "sample.share_prefix": False,
    "reward.weights": "target_view=1,target_psnr=1",
    "train.copies": 0,
    "train.batch_size": 16,
    "train.step_weight": "none",
    "train.learning_rate": 5e-4,
    "train.ema_decay": 0.9,
}

SHARED = TODAY | {"sample.same_initial_noise": True}
PATH = SHARED | {"reward.weights": "room_rot=1,room_trans=1,target_psnr=1"}
ONE_STEP = PATH | {"sample.sde_window": 1, "sample.sde_steps": "0,1,2,3,4,5", "train.step_weight": "inverse_gain"}
PREFIX_AND_TAIL = ONE_STEP | {"sample.share_prefix": True, "sample.tail_steps": 3}
# Since the records of these rows a shared prefix includes the trained step: they are repeated without, for more F.
BY_COPIES = {"sample.share_prefix": False, "train.copies": 4, "train.batch_size": 16}
SUBSET = PREFIX_AND_TAIL | BY_COPIES
FORWARD = PATH | {
    "sample.sde": "ode",
    "sample.same_initial_noise": False,
    "train.objective": "forward",
    "train.copies": 4,
    "train.learning_rate": 2.5e-4,
    "train.ema_decay": 0.95,
}
# The twin's 8 conditions of 4 copies an update, in calls that suit 2 ranks.
TWIN: dict[str, Any] = {
    "eval.every": 40,
    "eval.num_conditions": 160,
    "eval.batch_size": 16,
    "sample.train_batch_size": 8,
    "sample.num_batches_per_epoch": 2,
    "train.batch_size": 8,
}
# `my_recam_8npu` as it was before this study.
TWIN_TODAY = TWIN | {
    "num_epochs": 180,  # as many F
    "eval.every": 20,
    "sample.sde": "constant",
    "sample.noise_level": 0.3,
    "sample.max_step_std": "none",
    "sample.sde_steps": "1,2,3,4,5,6",
    "sample.sde_window": 2,
    "sample.tail_steps": 0,
    "sample.same_initial_noise": False,
    "sample.share_prefix": False,
    "train.learning_rate": 1e-4,
    "train.step_weight": "none",
    "train.ema_decay": 0,
}
VARIANTS = {
    "today": Variant("the demo before this study", "tiny_recam", TODAY),
    "shared_noise": Variant("+ shared initial noise", "tiny_recam", SHARED),
    "camera_rewards": Variant("+ room_rot and room_trans for target_view", "tiny_recam", PATH),
    "one_step": Variant("+ one stochastic step", "tiny_recam", ONE_STEP),
    "prefix_and_tail": Variant("+ shared prefix, short tail", "tiny_recam", PREFIX_AND_TAIL),
    "subset": Variant("+ best 2 and worst 2 of 8 trained", "tiny_recam", SUBSET),
    "demo_by_copies": Variant("these, 130 updates at 4e-4, averaged over 20: the demo before", "tiny_recam", BY_COPIES),
    "demo": Variant("the demo: the trained step once a group, all 8 copies", "tiny_recam", {}),
    "forward": Variant("camera rewards, forward objective, best 2 and worst 2", "tiny_recam", FORWARD),
    "twin_today": Variant("my_recam_8npu_tiny, sampler and rate before this study", "my_recam_8npu_tiny", TWIN_TODAY),
    "twin_by_copies": Variant(
        "my_recam_8npu_tiny, a row for every copy", "my_recam_8npu_tiny", TWIN | {"sample.share_prefix": False}
    ),
    "twin": Variant("my_recam_8npu_tiny, the trained step once a group", "my_recam_8npu_tiny", TWIN),
}


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs") / "learning_study", help="folder of the runs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--report", action="store_true", help="train nothing, write table and plot of the records")
    asked = parser.parse_args(words)
    if unknown := [name for name in asked.only if name not in VARIANTS]:
        return fail(f"--only: got {unknown[0]!r}, must be one of {', '.join(VARIANTS)}")
    if asked.report:
        write_report(load_records())
        return 0
    for seed in asked.seeds:
        for name in asked.only:
            if not record_file(name, seed).exists() and not train(name, seed, asked.out.absolute(), asked.ranks):
                return 1
    return 0


def record_file(name: str, seed: int) -> Path:
    return RECORDS / f"{name}_{seed}.json"


def train(name: str, seed: int, out: Path, ranks: int) -> bool:
    """Train one variant, or go on with it, and write its record; return whether the run ended well."""
    variant, run = VARIANTS[name], f"{name}_{seed}"
    knobs = {"eval.every": EVERY, "checkpoint.every": EVERY, "eval.signal_groups": 0, "log_videos_every": 0}
    knobs["max_minutes"] = 0
    knobs |= variant.overrides | {"seed": seed, "run_name": run, "output_root": out, "resume": "auto", "trackers": ""}
    command = [*launcher(ranks), "train_grpo.py", "--config", f"config/grpo.py:{variant.recipe}"]
    command += [f"--config.{knob}={value}" for knob, value in knobs.items()]
    out.mkdir(parents=True, exist_ok=True)
    with (out / f"{run}.log").open("a", encoding="utf-8") as log:
        ended = subprocess.run(
            command, cwd=ROOT, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
        )
    if ended.returncode:
        print(f"{run} ended with code {ended.returncode}: see {out / run}.log", file=sys.stderr)
        return False
    found = {"variant": name, "seed": seed, "recipe": variant.recipe, "overrides": variant.overrides, "ranks": ranks}
    found["commit"] = commit()
    write_atomically(record_file(name, seed), json.dumps(found | outcome(read_run(out / run)), indent=1) + "\n")
    print(run, "done", flush=True)
    return True


def outcome(run: Run) -> dict[str, Any]:
    curve, seconds, forwards = [], 0.0, 0.0
    for step, row in run.rows.items():
        seconds += row.get("time/epoch_s", 0.0)
        forwards = row.get("system/forward_equivalents", forwards)
        if values := {metric: row[metric] for metric in MEASURES if metric in row}:
            place = {"epoch": float(step), "forward_equivalents": forwards, "minutes": round(seconds / 60, 2)}
            curve.append(place | values)
    summary = run.summary
    assert summary is not None
    by_camera = {
        camera: {metric: changes[metric] for metric in MEASURES if metric in changes}
        for camera, changes in summary.change_by_camera.items()
    }
    ends = {"verdict": summary.verdict.overall, "before": summary.before, "after": summary.after}
    return ends | {"change_by_camera": by_camera, "curve": curve}


def load_records() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for name in VARIANTS:
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in RECORDS.glob(f"{name}_[0-9]*.json")]
        if runs:
            found[name] = sorted(runs, key=lambda run: run["seed"])
    return found


def write_report(records: dict[str, list[dict[str, Any]]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    lines = [BEGIN, "", *table(records), ""]
    for name in BY_CAMERA:
        if name in records:
            lines += [f"By kind of camera, {VARIANTS[name].title}:", "", *table_by_camera(records[name]), ""]
    generated = "\n".join([*lines, END])
    PAGE.write_text(before + generated + rest.partition(END)[2], encoding="utf-8")
    draw(records)


def table(records: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return Markdown lines: per variant verdict and change of every measure by seed, its F and its minutes."""
    rows, shown = [], in_all(run["before"] for runs in records.values() for run in runs)
    for name, runs in records.items():
        ends = [(run["before"], run["after"]) for run in runs]
        changes = [
            in_words(metric, [(after[metric] - before[metric], *after[f"{metric}_ci95"]) for before, after in ends])
            for metric in shown
        ]
        last = [run["curve"][-1] for run in runs]
        seeds = ", ".join(str(run["seed"]) for run in runs)
        work = fmean([point["forward_equivalents"] for point in last]) / 1000
        minutes = fmean([point["minutes"] for point in last])
        words = Counter(run["verdict"] for run in runs).items()
        verdicts = ", ".join(word + (f" ×{count}" if count > 1 else "") for word, count in words)
        rows.append([VARIANTS[name].title, seeds, verdicts, *changes, f"{work:.1f}", f"{minutes:.1f}"])
    titles = [f"change of {MEASURES[metric][0]}" for metric in shown]
    return markdown_table(["variant", "seeds", "verdict", *titles, "thousand F", "minutes"], rows)


def in_all(places: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the measures that every one of `places` has."""
    common = set(MEASURES).intersection(*places)
    return [metric for metric in MEASURES if metric in common]


def table_by_camera(runs: Sequence[dict[str, Any]]) -> list[str]:
    rows, shown = [], in_all(kind for run in runs for kind in run["change_by_camera"].values())
    for camera in sorted(runs[0]["change_by_camera"]):
        found = [run["change_by_camera"][camera] for run in runs]
        rows.append([camera, *(in_words(metric, [run[metric] for run in found]) for metric in shown)])
    return markdown_table(["camera", *(f"change of {MEASURES[metric][0]}" for metric in shown)], rows)


def in_words(metric: str, found: Sequence[Sequence[float]]) -> str:
    """Return "mean (change of each seed)" of [change, low, high], a star where a seed's 95 % interval excludes 0."""
    digits = MEASURES[metric][1]
    marks = [f"{change:+.{digits}f}" + ("*" if low > 0 or high < 0 else "") for change, low, high in found]
    return f"**{fmean([change for change, *_ in found]):+.{digits}f}** ({', '.join(marks)})"


def draw(records: dict[str, list[dict[str, Any]]]) -> None:
    """Draw every measure against F and against minutes: mean over the seeds, and their range."""
    shown = in_all(point for runs in records.values() for run in runs for point in run["curve"])
    figure = new_figure(figsize=(4 * len(shown), 7), layout="constrained")
    axes = (("forward_equivalents", 1000, "thousand forward-equivalents"), ("minutes", 1, "minutes of training"))
    for row, (axis, scale, unit) in enumerate(axes):
        for column, metric in enumerate(shown):
            plot = figure.add_subplot(2, len(shown), row * len(shown) + column + 1)
            for name, runs in records.items():
                points = list(zip(*(run["curve"] for run in runs), strict=False))
                where = [fmean([point[axis] for point in same]) / scale for same in points]
                means, dashes = [fmean([point[metric] for point in same]) for same in points], name.startswith("twin")
                (line,) = plot.plot(where, means, "--" if dashes else "-", label=name)  # there are but ten colours
                low, high = ([pick(point[metric] for point in same) for same in points] for pick in (min, max))
                plot.fill_between(where, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
            plot.set(xlabel=unit, title=MEASURES[metric][0])
    lines, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=-(-len(names) // 2), fontsize=8)
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
