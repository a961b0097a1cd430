r"""Train the four runs of docs/healthy_run.md, normal, flat, hacked and collapsing, and draw docs/healthy_run.png.

python tools/dev/healthy_run.py     # ten minutes on two cores; runs that are there are only drawn
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

from flow_grpo.judging.verdict import direction
from flow_grpo.reporting.drawing.plots import draw_panel, panel_of_metric
from flow_grpo.reporting.drawing.style import new_figure, styled
from tools.common import launcher, make_parser
from tools.run_folder import Run, read_run

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "outputs" / "healthy_run"
COMMON = "num_epochs=40 eval.every=10 eval.split=tune eval.num_conditions=80 eval.fixed_conditions=32 trackers="
# Recipe of config/grpo.py and what is changed: a third of the demo; noise so weak that copies differ by their initial
# noise, which no update can credit, at a small rate; one narrow reward; twenty times the demo's rate.
FLAT = "sample.noise_level=0.1 sample.same_initial_noise=False sample.share_prefix=False train.learning_rate=5e-5"
RUNS = {
    "normal": "tiny_recam",
    "flat": f"tiny_recam {FLAT}",
    "hacked": "tiny_recam_hacking",
    "collapsing": "tiny_recam train.learning_rate=8e-3",
}


def main() -> int:
    make_parser(__doc__).parse_args()
    for name, words in RUNS.items():
        if not (FOLDER / name / "metrics.jsonl").exists():
            recipe, *knobs = f"{words} {COMMON} run_name={name}".split()
            command = [*launcher(2), "train_grpo.py", "--config", f"config/grpo.py:{recipe}"]
            command += [f"--config.{knob}" for knob in (*knobs, f"output_root={FOLDER}")]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            ended = subprocess.run(command, cwd=ROOT, env=environment, check=False)  # 2 where a rule has stopped it
            print(f"{name} ended with code {ended.returncode}", flush=True)
    draw([read_run(FOLDER / name) for name in RUNS], ROOT / "docs" / "healthy_run.png")
    return 0


@styled()
def draw(runs: list[Run], file: Path) -> None:
    """Draw a column a run: a trained reward with that on fixed conditions, the camera and the picture."""
    figure = new_figure(figsize=(4.3 * len(runs), 9.5), dpi=90, layout="constrained")
    for column, title, run in zip(figure.subplots(3, len(runs)).T, RUNS, runs, strict=True):
        trained = "sharpness" if title == "hacked" else "room_trans"
        for axes, name in zip(
            column, (f"reward/{trained}_mean", "eval/trans_err_m", "eval/equal_travel_residual"), strict=True
        ):
            panel = panel_of_metric([run.rows], name, lambda name: direction(name, ()))
            axes.set_title(f"{title}: {panel.title}" if axes is column[0] else panel.title)
            draw_panel(axes, panel)
    figure.supxlabel("epoch")
    figure.savefig(file)


if __name__ == "__main__":
    sys.exit(main())
