"""Draw what a run changed: the same held-out conditions before and after training, frame by frame.

python tools/demo_picture.py outputs/RUN --out docs/demo.png
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from flow_grpo.data.video_io import read_video

NAME = re.compile(r"eval_(\d+)_(.+?_cam\d+)_.*")  # step, scene and camera; rewards follow
COLUMNS = ("source", "before training", "after training", "true view")


def clips(run: Path) -> dict[str, dict[int, Path]]:
    """Return condition -> step -> video file of a run's evaluations.

    Raises:
        ValueError: the folder holds no evaluation videos of two steps.
    """
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
    """Return source, generated and target (T, rows, columns, 3) of a side-by-side video."""
    video = read_video(path, num_frames=frames)
    return list(video.permute(1, 2, 3, 0).chunk(3, dim=2))


def strips(run: Path, rows: int, frames: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Return source, before, after and true view of the conditions that training changed most."""
    found = []
    for steps in clips(run).values():
        source, before, target = thirds(steps[min(steps)], frames)
        after = thirds(steps[max(steps)], frames)[1]
        found.append((source, before, after, target))
    return sorted(found, key=lambda row: -float((row[2].float() - row[1].float()).abs().mean()))[:rows]


def draw(run: Path, out: Path, rows: int, frames: int) -> None:
    """Write the picture."""
    chosen = strips(run, rows, frames)
    shown = (0, frames // 2, frames - 1)
    figure = Figure(figsize=(14, 1.05 * len(chosen) + 0.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    groups = figure.subfigures(1, len(COLUMNS), wspace=0.02)
    for column, (group, title) in enumerate(zip(groups, COLUMNS, strict=True)):
        group.suptitle(title, fontsize=12)
        cells = group.subplots(len(chosen), len(shown), squeeze=False)
        for line, row in zip(cells, chosen, strict=True):
            for cell, frame in zip(line, shown, strict=True):
                cell.imshow(row[column][frame].numpy())
                cell.set_axis_off()
    figure.savefig(out)


def main() -> None:
    """Draw; one line says what is wrong when it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--out", type=Path, required=True, help="PNG file")
    parser.add_argument("--rows", type=int, default=4, help="conditions")
    parser.add_argument("--frames", type=int, default=5, help="frames in a video of the run")
    args = parser.parse_args()
    try:
        draw(args.run, args.out, args.rows, args.frames)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
