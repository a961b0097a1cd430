"""Draw held-out conditions before and after training, frame by frame, from the evaluation videos of runs.

python tools/dev/demo_picture.py outputs/RUN --out docs/demo.png
python tools/dev/demo_picture.py outputs/A outputs/B --titles "by A" "by B" --out docs/both.png   # of one recipe
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

from torch import Tensor

from flow_grpo.data.video_io import read_video
from flow_grpo.reporting import video_index
from flow_grpo.reporting.clips import BASE, NOW, SOURCE, TRUE
from flow_grpo.reporting.drawing.style import new_figure, styled
from tools.common import command, make_parser

Line = Mapping[str, Any]
"""Of `videos/index.jsonl`."""


def clips(run: Path) -> dict[str, dict[int, Line]]:
    """Return condition -> step -> evaluation video of a run; ValueError if no condition has two steps."""
    found: dict[str, dict[int, Line]] = {}
    for line in video_index.read(run / "videos"):
        if line["kind"] == "eval":
            found.setdefault(f"{line['scene']} {line['camera']}", {})[line["step"]] = line
    found = {condition: steps for condition, steps in found.items() if len(steps) > 1}
    if not found:
        raise ValueError(f"{run}/videos holds no evaluation videos of two steps; give the folder of a finished run")
    return found


def panel(run: Path, line: Line, frames: int, *names: str) -> Tensor:
    """Return (T, rows, columns, 3) of a video's first panel with one of these names."""
    box = video_index.panel(line, *names)
    if box is None:
        raise ValueError(f"{run}/videos/{line['file']} has no panel {names[0]!r}; give runs on videos with a true view")
    found: Tensor = box.cut(read_video(run / "videos" / line["file"], num_frames=frames).permute(1, 2, 3, 0))
    return found


def strips(runs: Sequence[Path], rows: int, frames: int) -> list[list[Tensor]]:
    """Return [source, before, after each run, true view] of the conditions that the first run changed most."""
    found, known = [], [clips(run) for run in runs]
    for name, steps in known[0].items():
        if missing := [run for run, own in zip(runs, known, strict=True) if name not in own]:
            raise ValueError(f"{missing[0]} shows no {name}, {runs[0]} does; give runs of one recipe")
        first = steps[min(steps)]
        source, base, target = (panel(runs[0], first, frames, *kinds) for kinds in ((SOURCE,), (BASE, NOW), (TRUE,)))
        made = [panel(run, own[name][max(own[name])], frames, NOW) for run, own in zip(runs, known, strict=True)]
        found.append([source, base, *made, target])
    return sorted(found, key=lambda row: -float((row[2].float() - row[1].float()).abs().mean()))[:rows]


@styled()
def draw(runs: Sequence[Path], titles: Sequence[str], out: Path, rows: int, frames: int) -> None:
    chosen = strips(runs, rows, frames)
    columns = ("source", "before training", *titles, "true view")
    shown = (0, frames // 2, frames - 1)
    figure = new_figure(figsize=(3.5 * len(columns), 1.05 * len(chosen) + 0.5), dpi=110, layout="constrained")
    groups = figure.subfigures(1, len(columns), wspace=0.02)
    for column, (group, title) in enumerate(zip(groups, columns, strict=True)):
        group.suptitle(title, fontsize=12)
        cells = group.subplots(len(chosen), len(shown), squeeze=False)
        for line, row in zip(cells, chosen, strict=True):
            for cell, frame in zip(line, shown, strict=True):
                cell.imshow(row[column][frame].numpy())
                cell.set_axis_off()
    figure.savefig(out)


@command
def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of finished runs")
    parser.add_argument("--titles", nargs="+", default=["after training"], help="one per run")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    parser.add_argument("--rows", type=int, default=4, help="conditions")
    parser.add_argument("--frames", type=int, default=5, help="frames of the runs' videos")
    args = parser.parse_args(words)
    if len(args.titles) != len(args.runs):
        raise ValueError(f"--titles names {len(args.titles)} of {len(args.runs)} runs; give one for each")
    draw(args.runs, args.titles, args.out, args.rows, args.frames)
    return 0


if __name__ == "__main__":
    sys.exit(main())
