r"""What does RL teach where labels end, beside what else one could do? Runs of several seeds, and their tables.

    python tools/learning_study.py --only base sft rl --seeds 1 2 3     # train what has no record yet
    python tools/learning_study.py --report                             # tables and plot of all records

VARIANTS names the rows: recipes of config/grpo.py with overrides, supervised fine-tuning on the labels there are, and
both. A run that was interrupted goes on from its last checkpoint; a finished one leaves a record in
`benchmarks/learning/`: every held-out condition's measures, its work, its curve, and the commit. The report is the
generated part of docs/learning.md, and docs/learning.png. Exit code: 0, 1 when a run failed, or 2 for an unknown name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import fail, launcher, make_parser, markdown_table


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row of the study.

    Attributes:
        title: in the tables.
        recipe: of config/grpo.py.
        knobs: of the recipe, changed.
        labels: items of supervised fine-tuning on true videos that come first; 0 none.
        taught: split of their rooms: "labelled" has videos of the labelled paths; the demo's items all have.
        epochs: of RL; None as in the recipe.
    """

    title: str
    recipe: str = "room_recam"
    knobs: dict[str, Any] = dataclasses.field(default_factory=dict)
    labels: int = 0
    taught: str = "labelled"
    epochs: int | None = None


# The twin's 8 conditions of 4 copies an update, in calls that suit 2 ranks.
TWIN = {
    "sample.train_batch_size": 8,
    "sample.num_batches_per_epoch": 2,
    "train.batch_size": 8,
    "eval.num_conditions": 160,
}
VARIANTS = {
    "base": Variant("base", epochs=0),
    "constant": Variant("best constant on the command", epochs=0),
    "sft": Variant("supervised fine-tuning continued", labels=12800, epochs=0),
    "bound": Variant("supervised fine-tuning on all commands", labels=12800, taught="all_labelled", epochs=0),
    "rl": Variant("RL"),
    "sft_rl": Variant("supervised fine-tuning, then RL", labels=6400, epochs=40),
    "footage_base": Variant("base of unsure labels", recipe="room_recam_footage", epochs=0),
    "footage": Variant("RL on clips without poses or true views", recipe="room_recam_footage"),
    "demo_base": Variant("the demo's base", recipe="tiny_recam", epochs=0),
    "demo_sft": Variant(
        "supervised fine-tuning on the demo's true videos", recipe="tiny_recam", labels=12800, epochs=0
    ),
    "demo": Variant("the demo", recipe="tiny_recam"),
    "demo_sparse": Variant("the demo, its ODE by sparse calls", "tiny_recam", {"sample.ode_calls": "sparse"}),
    "twin_base": Variant("the demo's base, sampled as my_recam_8npu", "my_recam_8npu_tiny", TWIN, epochs=0),
    "twin": Variant("RL as my_recam_8npu", recipe="my_recam_8npu_tiny", knobs=TWIN),
}
RANKS = 2  # that the recipes are written for
PARSER = make_parser(__doc__)
PARSER.add_argument("--only", nargs="+", default=list(VARIANTS), metavar="NAME", help=", ".join(VARIANTS))
PARSER.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
PARSER.add_argument("--out", type=Path, default=Path("outputs") / "learning_study", help="folder of the runs")
PARSER.add_argument("--ranks", type=int, default=RANKS, help="of a run; an epoch has as many samples on 1, 2 or 4")
PARSER.add_argument("--report", action="store_true", help="train nothing, write tables and plot of the records")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

from flow_grpo.data.rooms import LABELLED, RECAMMASTER, UNLABELLED, UNSEEN
from flow_grpo.judging.changes import TRAVEL, at_equal_travel, paired_changes
from flow_grpo.judging.table import Table
from flow_grpo.reporting.drawing.style import new_figure
from flow_grpo.reporting.metric_files import read_rows
from flow_grpo.run.starts import commit
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.settings.loading import load_config

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "benchmarks" / "learning"
PAGE, PLOT = ROOT / "docs" / "learning.md", ROOT / "docs" / "learning.png"
BEGIN, END = "<!-- begin of the generated part -->", "<!-- end of the generated part -->"
ROOMS, CLIPS, DEMO = ("room_recam",), ("room_recam_footage",), ("tiny_recam", "my_recam_8npu_tiny")  # of a world
GROUPS = {  # of held-out commands: recipes, kinds
    "labelled": (ROOMS, LABELLED),
    "unlabelled": (ROOMS, UNLABELLED),
    "unseen": (ROOMS, UNSEEN),
    "unlabelled, of clips": (CLIPS, UNLABELLED),
    "the demo's": (DEMO, RECAMMASTER),
}
PAIRS = (
    ("rl", "sft"),
    ("rl", "base"),
    ("sft", "base"),
    ("bound", "sft"),
    ("sft_rl", "sft"),
    ("footage", "footage_base"),
    ("demo", "demo_base"),
    ("demo_sft", "demo_base"),
    ("demo_sparse", "demo_base"),
    ("twin", "twin_base"),
)
MEASURES = {  # of a held-out condition -> title and decimals
    "trans_err_m": ("TransErr m", 3),
    "rot_err_deg": ("RotErr °", 2),
    "residual": ("residual", 4),
    "found_path_psnr_db": ("PSNR on the found path dB", 2),
    "target_view_psnr_db": ("PSNR to the true view dB", 2),
}
COMPARED = {  # of pairs of conditions
    "trans_err_m": ("TransErr m", 3),
    "rot_err_deg": ("RotErr °", 2),
    "equal_travel_residual": ("residual at equal travel", 4),
    "equal_travel_found_path_psnr_db": ("PSNR on the found path at equal travel dB", 2),
    "target_view_psnr_db": ("PSNR to the true view dB", 2),
}
EVERY = 20  # epochs between evaluations
Record = dict[str, Any]
BATCH = 32  # items of a step of supervised fine-tuning
CONSTANTS = (100, 90, 110, 120, 135, 150)  # percent
RATE = {"train.learning_rate": 2e-4}


def main(words: Sequence[str] | None = None) -> int:
    asked = PARSER.parse_args(words)
    if unknown := [name for name in asked.only if name not in VARIANTS]:
        return fail(f"--only: got {unknown[0]!r}, must be one of {', '.join(VARIANTS)}")
    if asked.report:
        write_report(load_records())
        return 0
    for seed in asked.seeds:
        for name in asked.only:
            study = Study(name, seed, asked.out.absolute(), asked.ranks)
            if not study.record.exists() and not study.run():
                return 1
    return 0


@dataclasses.dataclass(frozen=True)
class Study:
    """One variant with one seed."""

    name: str
    seed: int
    out: Path
    ranks: int

    @property
    def record(self) -> Path:
        """Its record."""
        return RECORDS / f"{self.name}_{self.seed}.json"

    def run(self) -> bool:
        """Train it, or go on with it, and write its record; return whether all programs ended well."""
        variant, run = VARIANTS[self.name], f"{self.name}_{self.seed}"
        knobs = variant.knobs | ({} if variant.epochs is None else {"num_epochs": variant.epochs})
        if variant.labels:
            knobs["model.path"] = model = self.out / f"{run}_labels" / "model"
            if not model.exists() and not self.fine_tune(variant):
                return False
        if self.name == "constant":
            knobs["model.kind"] = self.best_constant()
        if not (folder := self.train(run, variant.recipe, knobs)):
            return False
        forwards, seconds, curve = work_of(folder)
        labelled = work_of_labels(self.out / f"{run}_labels") if variant.labels else 0.0
        found = {
            "variant": self.name,
            "seed": self.seed,
            "recipe": variant.recipe,
            "knobs": {name: str(value) for name, value in knobs.items() if name != "model.path"},
            "ranks": self.ranks,
            "commit": commit(),
            "forward_equivalents": forwards + 3 * variant.labels,
            "minutes": round((seconds + labelled) / 60, 2),
            "verdict": json.loads((folder / "summary.json").read_text())["verdict"]["overall"],
            "curve": curve,
            "rows": rows_of(folder),
        }
        write_atomically(self.record, json.dumps(found) + "\n")
        print(run, "done", flush=True)
        return True

    def train(self, run: str, recipe: str, knobs: dict[str, Any]) -> Path | None:
        """Run train_grpo.py and return its folder; None if it failed."""
        fixed = {"eval.every": EVERY, "checkpoint.every": EVERY, "eval.signal_groups": 0, "log_videos_every": 0}
        fixed |= {"max_minutes": 0, "seed": self.seed, "run_name": run, "output_root": self.out, "trackers": ""}
        fixed |= {"resume": "auto"} | knobs
        spec, words = f"config/grpo.py:{recipe}", [f"--config.{knob}={value}" for knob, value in fixed.items()]
        batches = load_config(spec, words).sample.num_batches_per_epoch
        words.append(f"--config.sample.num_batches_per_epoch={batches * RANKS // self.ranks}")
        ended = self.launch("train_grpo.py", run, "--config", spec, *words)
        return self.out / run if ended else None

    def fine_tune(self, variant: Variant) -> bool:
        run, epochs = f"{self.name}_{self.seed}_labels", 1000  # the steps end it
        options = [f"--run-name={run}", f"--seed={self.seed}", "--no-use-dynamic-batch", "--resume", "--num-workers=0"]
        options += [
            f"--batch-size={BATCH // self.ranks}",
            f"--max-steps={variant.labels // BATCH}",
            f"--epochs={epochs}",
        ]
        knobs = RATE | {"output_root": self.out}
        if variant.recipe in ROOMS:
            knobs |= {"data.root": f"data/{variant.taught}_rooms", "data.tiny_world": f"furnished_{variant.taught}"}
            knobs |= {"data.train_split": variant.taught, "data.tune_scenes": 0}
        words = [f"--config.{knob}={value}" for knob, value in knobs.items()]
        recipe = f"config/grpo.py:{variant.recipe}"
        return self.launch("tools/finetune_recam.py", run, "--config", recipe, *options, *words)

    def best_constant(self) -> str:
        """Return the model that is told commands times the constants that do best on the split for tuning.

        First a factor on the moves, then one on the turns beside it: a policy that takes the one for the other gains in
        TransErr what it loses in RotErr, so the sum of both, each in shares of the base's, decides.
        """
        errors: dict[tuple[int, int], dict[str, float]] = {}
        scores: dict[tuple[int, int], float] = {}

        def best(tried: Sequence[tuple[int, int]]) -> tuple[int, int]:
            for factors in tried:
                if factors not in errors:
                    errors[factors] = self.errors_with(*factors)
                scores[factors] = sum(errors[factors][name] / errors[100, 100][name] for name in errors[factors])
            print({factors: round(scores[factors] / 2, 3) for factors in tried}, flush=True)
            return min(tried, key=scores.__getitem__)

        move, _ = best([(percent, 100) for percent in CONSTANTS])
        return "tools/study/scaled_recam.py:by_{}_{}".format(*best([(move, percent) for percent in CONSTANTS]))

    def errors_with(self, move: int, turn: int) -> dict[str, float]:
        """Return TransErr and RotErr of the base model on the split for tuning, commands times constants in percent."""
        kind = f"tools/study/scaled_recam.py:by_{move}_{turn}"
        knobs = {"num_epochs": 0, "model.kind": kind, "eval.split": "tune", "eval.num_conditions": 72}
        folder = self.train(f"constant_{move}_{turn}", "room_recam", knobs)
        if folder is None:
            raise SystemExit(1)
        return {name: fmean(row[name] for row in rows_of(folder).values()) for name in ("trans_err_m", "rot_err_deg")}

    def launch(self, program: str, run: str, *words: str) -> bool:
        self.out.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self.out / f"{run}.log").open("a", encoding="utf-8") as log:
            command = [*launcher(self.ranks), program, *words]
            ended = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, env=environment, check=False)
        if ended.returncode:
            print(f"{run} ended with code {ended.returncode}: see {self.out / run}.log", file=sys.stderr)
        return not ended.returncode


def work_of(folder: Path) -> tuple[float, float, list[dict[str, float]]]:
    """Return the forward-equivalents and seconds of a run's training, and its evaluations on the way."""
    forwards, seconds, curve = 0.0, 0.0, []
    for step, row in read_rows(folder / "metrics.jsonl").items():
        seconds += row.get("time/epoch_s", 0.0)
        forwards = row.get("system/forward_equivalents", forwards)
        values = {name: row[f"eval/{name}"] for name in MEASURES if f"eval/{name}" in row}
        if values:
            curve.append({"epoch": step, "forward_equivalents": forwards, "minutes": seconds / 60} | values)
    return forwards, seconds, curve


def work_of_labels(folder: Path) -> float:
    """Return the seconds of supervised steps, as they were logged."""
    rows = read_rows(folder / "metrics.jsonl").values()
    return sum(10 * BATCH / row["train/items_per_s"] for row in rows if "train/items_per_s" in row)


def rows_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return "scene camera" -> kind of camera and measures of each held-out condition, as a run left them."""
    rows = json.loads((folder / "held_out.json").read_text())["after"]
    return {
        f"{row['scene']} {row['camera']}": {"kind": row["preset"]}
        | {name: round(row["values"][name], 5) for name in (*MEASURES, TRAVEL) if name in row["values"]}
        for row in rows
    }


def load_records() -> dict[str, list[Record]]:
    found: dict[str, list[Record]] = {}
    for name in VARIANTS:
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in RECORDS.glob(f"{name}_[0-9]*.json")]
        if runs:
            found[name] = sorted(runs, key=lambda run: run["seed"])
    return found


def write_report(records: dict[str, list[Record]]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    lines = [BEGIN, ""]
    for group in GROUPS:
        if rows := table(records, group):
            lines += [f"Commands that are {group}:", "", *rows, ""]
    for name, other in PAIRS:
        if name in records and other in records:
            title = f"{VARIANTS[name].title} less {VARIANTS[other].title}"
            lines += [f"{title}, paired by condition:", "", *differences(records[name], records[other]), ""]
    PAGE.write_text(before + "\n".join([*lines, END]) + rest.partition(END)[2], encoding="utf-8")
    draw(records)


def rows_in(run: Record, group: str) -> dict[str, dict[str, Any]]:
    """Return the held-out conditions of a run that are of a group."""
    recipes, kinds = GROUPS[group]
    return {key: row for key, row in run["rows"].items() if run["recipe"] in recipes and row["kind"] in kinds}


def table(records: dict[str, list[Record]], group: str) -> list[str]:
    """Return Markdown lines: per variant the mean of every measure over the seeds, and in brackets each."""
    rows = []
    for name, runs in records.items():
        cells, found = [], [rows_in(run, group).values() for run in runs]
        if not any(found):
            continue
        for measure, (_, digits) in MEASURES.items():
            values = [fmean(row[measure] for row in rows if measure in row) for rows in found]
            cells.append(f"**{fmean(values):.{digits}f}** ({', '.join(f'{value:.{digits}f}' for value in values)})")
        work = fmean(run["forward_equivalents"] for run in runs) / 1000
        minutes = fmean(run["minutes"] for run in runs)
        rows.append([VARIANTS[name].title, *cells, f"{work:.1f}", f"{minutes:.1f}"])
    titles = [title for title, _ in MEASURES.values()]
    return markdown_table(["", *titles, "thousand F", "minutes"], rows) if rows else []


def differences(runs: list[Record], others: list[Record]) -> list[str]:
    """Return Markdown lines: per group and seed the mean difference of every measure, a star where it is certain.

    The interval is a bootstrap over scenes at 95 %. Other runs than one each seed are compared with the first.
    """
    rows = []
    by_seed = {run["seed"]: run for run in others}
    for group in GROUPS:
        for run in runs:
            if not (own := as_table(run, group)).scenes:
                continue
            other = as_table(by_seed.get(run["seed"], others[0]), group)
            other = at_equal_travel(other, other)
            changes, start = paired_changes(other, at_equal_travel(other, own)), other.means()
            cells = []
            for measure, (_, digits) in COMPARED.items():
                if (found := changes.get(f"eval/{measure}")) is None:
                    cells.append("–")
                    continue
                star = "*" if found.low > 0 or found.high < 0 else ""
                share = "" if measure.endswith("_db") else f" ({100 * found.mean / start[measure]:+.0f} %)"
                cells.append(
                    f"{found.mean:+.{digits}f}{star}{share} [{found.low:+.{digits}f}, {found.high:+.{digits}f}]"
                )
            rows.append([group, str(run["seed"]), *cells])
    return markdown_table(["commands", "seed", *(title for title, _ in COMPARED.values())], rows)


def as_table(run: Record, group: str) -> Table:
    """Return the held-out conditions of a run that are of a group, with the measures that it has."""
    rows = rows_in(run, group)
    names = [name for name in (*MEASURES, TRAVEL) if any(name in row for row in rows.values())]
    return Table.of_rows(
        [
            dict(zip(("scene", "camera"), key.split(" "), strict=True))
            | {"preset": row["kind"], "values": {name: row.get(name, math.nan) for name in names}}
            for key, row in rows.items()
        ]
    )


def draw(records: dict[str, list[Record]]) -> None:
    """Draw every measure against F: mean over the seeds, and their range; variants without a curve as a level.

    Worlds without any curve are left out.
    """
    learned = {runs[0]["recipe"] for runs in records.values() if len(runs[0]["curve"]) > 1}
    worlds = [world for world in (ROOMS, CLIPS, DEMO) if learned.intersection(world)]
    figure = new_figure(figsize=(4 * len(MEASURES), 3.5 * len(worlds)), layout="constrained")
    places = [(world, measure) for world in worlds for measure in MEASURES.items()]
    for place, (world, (measure, (title, _))) in enumerate(places, start=1):
        plot = figure.add_subplot(len(worlds), len(MEASURES), place)
        for number, (name, runs) in enumerate(records.items()):
            if runs[0]["recipe"] not in world:
                continue
            look = {"label": VARIANTS[name].title, "color": f"C{number}"}
            points = list(zip(*(run["curve"] for run in runs), strict=False))
            if len(points) > 1:
                where = [fmean(point["forward_equivalents"] for point in same) / 1000 for same in points]
                means = [fmean(point[measure] for point in same) for same in points]
                plot.plot(where, means, **look)
                low, high = ([pick(point[measure] for point in same) for same in points] for pick in (min, max))
                plot.fill_between(where, low, high, color=look["color"], alpha=0.15, linewidth=0)
            else:
                level = fmean(row[measure] for run in runs for row in run["rows"].values() if measure in row)
                plot.axhline(level, linestyle="--", linewidth=1, **look)
        plot.set(xlabel="thousand forward-equivalents", title=title)
        if place % len(MEASURES) == 0:  # beside the row, where it hides no curve
            plot.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.savefig(PLOT, dpi=110)


if __name__ == "__main__":
    sys.exit(main())
