"""Score trick videos with every reward that needs no weights, and show which reward notices which trick.

python tools/dev/hacking_table.py --size 240x416 --write-docs        # renew the table in docs/camera_rewards.md
python tools/dev/hacking_table.py --size 480x832 --out table.md      # to a file; without --out to the terminal
python tools/dev/hacking_table.py --sheet tricks.png                 # first, middle and last frames of every video
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flow_grpo.maths.poses import PRESETS
from flow_grpo.rewards.base import Reward
from flow_grpo.rewards.camera.pose import PoseMeasurer, PoseRot, PoseTrans
from flow_grpo.rewards.camera.smooth import Smooth
from flow_grpo.rewards.camera.view_disp import ViewDisp
from flow_grpo.rewards.exposure import Exposure
from flow_grpo.rewards.motion_mag import MotionMag
from flow_grpo.rewards.process_pool import CallPool
from flow_grpo.rewards.sharpness import Sharpness
from flow_grpo.rewards.source_match import SourceMatch
from flow_grpo.rewards.target_view import TargetPsnr, TargetView
from tools.common import image_size, make_parser, markdown_table
from tools.dev.hacking.tricks import COMMANDS, EXACT, Stage, stage

FACTOR = 3.0  # a reward notices a video scored this many floors below the exact one
PAGE = Path(__file__).resolve().parents[2] / "docs" / "camera_rewards.md"
BEGIN, END = "<!-- hacking table: begin, written by tools/dev/hacking_table.py -->", "<!-- hacking table: end -->"


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of all videos."""

    values: dict[str, dict[str, dict[str, float]]]  # command -> video -> reward -> value
    floors: dict[str, float]  # reward -> its noise floor
    seconds: dict[str, float]  # reward -> mean CPU seconds per video, including what is computed once per command

    @property
    def videos(self) -> list[str]:
        """Names of the videos, the exact one first."""
        return list(next(iter(self.values.values())))

    def noticed(self, video: str, reward: str) -> int:
        """Return for how many commands a reward scores a video more than `FACTOR` floors below the exact one."""
        limit = FACTOR * self.floors[reward]
        return sum(by[video][reward] < by[EXACT][reward] - limit for by in self.values.values())

    def mean(self, video: str, reward: str) -> float:
        """Return the mean over commands of the value that a reward gives a video."""
        return sum(by[video][reward] for by in self.values.values()) / len(self.values)


def weight_free_rewards() -> list[Reward]:
    """Return every reward that needs neither weights nor a server, run in this process; pose rewards share one PnP."""
    measurer = PoseMeasurer()
    pose = [PoseRot(measurer), PoseTrans(measurer), Smooth(measurer), ViewDisp(CallPool())]
    return [*pose, TargetView(), TargetPsnr(), SourceMatch(), MotionMag(), Exposure(), Sharpness()]


def score(
    commands: Sequence[str],
    size: tuple[int, int],
    frames: int,
    *,
    make: Callable[[str, tuple[int, int], int], Stage] = stage,
    progress: Callable[[str], None] = lambda _: None,
) -> Scores:
    """Score the videos of every command with every reward.

    Args:
        commands: preset names.
        size: rows and columns.
        frames: per video.
        make: renders the videos of a command.
        progress: called with a line per video.

    Raises:
        ValueError: a reward has no value for a video.
    """
    rewards = weight_free_rewards()
    seconds = dict.fromkeys((reward.name for reward in rewards), 0.0)
    values: dict[str, dict[str, dict[str, float]]] = {}
    for command in commands:
        staged = make(command, size, frames)
        values[command] = {}
        for name, video in staged.videos.items():
            scores = values[command][name] = {}
            for reward in rewards:
                start = time.process_time()
                result = reward(video[None], [staged.condition])
                seconds[reward.name] += time.process_time() - start
                if not result.valid.all():
                    raise ValueError(f"{reward.name} has no value for {command}, {name}: {result.causes[0]}")
                scores[reward.name] = float(result.values)
            progress(f"{command}, {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in scores.items()))
    count = sum(map(len, values.values()))
    floors = {reward.name: reward.floor for reward in rewards}
    return Scores(values, floors, {name: spent / count for name, spent in seconds.items()})


def table(scores: Scores) -> str:
    """Return a Markdown table of mean values, with the number of commands in which a trick is noticed."""
    commands = len(scores.values)
    rows = []
    for video in scores.videos:
        cells = []
        for reward in scores.floors:
            value, noticed = scores.mean(video, reward), scores.noticed(video, reward)
            digits = 1 if reward == "target_psnr" else 3
            text = f"{round(value, digits) + 0.0:.{digits}f}"  # + 0.0 avoids "-0.000"
            cells.append(f"**{text}** {noticed}/{commands}" if noticed else text)
        rows.append([video, *cells])
    rows.append(["*floor*", *(f"{floor:.2g}" for floor in scores.floors.values())])
    rows.append(["*CPU-s a video*", *(f"{scores.seconds[name]:.1f}" for name in scores.floors)])
    return "\n".join(markdown_table(["video", *(f"`{name}`" for name in scores.floors)], rows))


def report(scores: Scores, size: tuple[int, int], frames: int, call: str) -> str:
    """Return the table with its legend and the command that made it."""
    legend = f"{frames} frames of {size[0]}x{size[1]}, mean over {', '.join(scores.values)}. Bold: in so many of these "
    legend += f"commands the value is more than {FACTOR:g} floors below the exact video's."
    return f"    {call}\n\n{legend}\n\n{table(scores)}"


def write_between(page: Path, text: str) -> None:
    """Replace the text between the two marker lines of a page.

    Raises:
        ValueError: the page does not contain each marker once, in order.
    """
    old = page.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{page} must hold the lines {BEGIN!r} and {END!r}, each once and in this order")
    before, after = old[: old.index(BEGIN)], old[old.index(END) :]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{after}", encoding="utf-8")


def draw_sheet(staged: Stage, out: Path) -> None:
    """Draw the first, middle, last but one and last frame of every video of a command into one picture."""
    frames = staged.condition.source_video.shape[1]
    shown = (0, frames // 2, frames - 2, frames - 1)
    videos = {"source": staged.condition.source_video} | staged.videos
    figure = Figure(figsize=(2.6 * len(shown) + 1, 1.6 * len(videos)), dpi=80, layout="constrained")
    FigureCanvasAgg(figure)
    cells = figure.subplots(len(videos), len(shown))
    for line, (name, video) in zip(cells, videos.items(), strict=True):
        for cell, frame in zip(line, shown, strict=True):
            cell.imshow(video[:, frame].permute(1, 2, 0).numpy())
            cell.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, rotation=0, ha="right", va="center")
    figure.savefig(out)


def main() -> None:
    """Score and write the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--size", type=image_size, default=(240, 416), help="rows x columns, such as 480x832")
    parser.add_argument("--frames", type=int, default=21, help="per video, at least 5")
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=list(PRESETS), help="camera presets")
    parser.add_argument("--out", type=Path, help="Markdown file")
    parser.add_argument("--write-docs", action="store_true", help=f"rewrite the table in docs/{PAGE.name}")
    parser.add_argument("--sheet", type=Path, help="PNG file: draw the videos of the first command, score nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)  # CPU seconds are then seconds of one core
    if args.sheet:
        draw_sheet(stage(args.commands[0], args.size, args.frames), args.sheet)
        return
    size = f"{args.size[0]}x{args.size[1]}"
    call = (
        f"python tools/dev/hacking_table.py --size {size} --frames {args.frames} --commands {' '.join(args.commands)}"
    )
    progress = functools.partial(print, file=sys.stderr, flush=True)
    try:
        scores = score(args.commands, args.size, args.frames, progress=progress)
        text = report(scores, args.size, args.frames, call + " --write-docs" * args.write_docs)
        if args.write_docs:
            write_between(PAGE, text)
        if args.out:
            args.out.write_text(text + "\n", encoding="utf-8")
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if not (args.write_docs or args.out):
        print(text)


if __name__ == "__main__":
    main()
