"""Draw held-out conditions before and after training, frame by frame, from the evaluation videos of runs.

python tools/dev/demo_picture.py outputs/RUN --out docs/demo.png
python tools/dev/demo_picture.py outputs/A outputs/B --titles "by A" "by B" --out docs/both.png   # of one recipe
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from flow_grpo.data.video_io import read_video
from tools.common import make_parser

NAME = re.compile(r"eval_(\d+)_(.+?_cam\d+)_.*")  # step, scene and camera; rewards follow


def clips(run: Path) -> dict[str, dict[int, Path]]:
    """Return condition -> step -> evaluation video of a run; ValueError if no condition has two steps."""
    found: dict[str, dict[int, Path]] = {}
    for path in sorted((run / "videos").glob("eval_*.mp4")):
        match = NAME.fullmatch(path.stem)
        if match:
            found.setdefault(match[2], {})[int(match[1])] = path
    found = {condition: steps for condition, steps in found.items() if len(steps) > 1}
    if not found:
        raise ValueError(f"{run}/videos holds no evaluation videos of two steps; give the folder of a finished run")
    return found


def thirds(path: Path, frames: int) -> list[Tensor]:
    """Return source, generated and target video (T, rows, columns, 3) of a side-by-side video."""
    video = read_video(path, num_frames=frames)
    return list(video.permute(1, 2, 3, 0).chunk(3, dim=2))


def strips(runs: Sequence[Path], rows: int, frames: int) -> list[list[Tensor]]:
    """Return [source, before, after each run, true view] of the conditions that the first run changed most.

    Raises:
        ValueError: a run without evaluation videos, or with other conditions than the first.
    """
    found, known = [], [clips(run) for run in runs]
    for name, steps in known[0].items():
        source, before, target = thirds(steps[min(steps)], frames)
        if missing := [run for run, own in zip(runs, known, strict=True) if name not in own]:
            raise ValueError(f"{missing[0]} shows no {name}, {runs[0]} does; give runs of one recipe")
        after = [thirds(own[name][max(own[name])], frames)[1] for own in known]
        found.append([source, before, *after, target])
    return sorted(found, key=lambda row: -float((row[2].float() - row[1].float()).abs().mean()))[:rows]


def draw(runs: Sequence[Path], titles: Sequence[str], out: Path, rows: int, frames: int) -> None:
    """Write the picture."""
    chosen = strips(runs, rows, frames)
    columns = ("source", "before training", *titles, "true view")
    shown = (0, frames // 2, frames - 1)
    figure = Figure(figsize=(3.5 * len(columns), 1.05 * len(chosen) + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    groups = figure.subfigures(1, len(columns), wspace=0.02)
    for column, (group, title) in enumerate(zip(groups, columns, strict=True)):
        group.suptitle(title, fontsize=12)
        cells = group.subplots(len(chosen), len(shown), squeeze=False)
        for line, row in zip(cells, chosen, strict=True):
            for cell, frame in zip(line, shown, strict=True):
                cell.imshow(row[column][frame].numpy())
                cell.set_axis_off()
    figure.savefig(out)


def main() -> None:
    """Draw the picture."""
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--titles", nargs="+", default=["after training"], help="one per run")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    parser.add_argument("--rows", type=int, default=4, help="conditions")
    parser.add_argument("--frames", type=int, default=5, help="frames of the runs' videos")
    args = parser.parse_args()
    try:
        if len(args.titles) != len(args.runs):
            raise ValueError(f"--titles names {len(args.titles)} of {len(args.runs)} runs; give one for each")
        draw(args.runs, args.titles, args.out, args.rows, args.frames)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
