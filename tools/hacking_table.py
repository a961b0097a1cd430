"""Which reward notices which trick: every trick video scored by every reward that needs no weights, as a table.

python tools/hacking_table.py --size 240x416 --write-docs        # the table of docs/camera_rewards.md, made anew
python tools/hacking_table.py --size 480x832 --out table.md      # to a file; without --out to the terminal
python tools/hacking_table.py --sheet tricks.png                 # first, middle and last frame of every video
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from flow_grpo.maths.poses import PRESETS
from flow_grpo.rewards.base import Reward
from flow_grpo.rewards.camera.pose import PoseMeasurer, PoseRot, PoseTrans
from flow_grpo.rewards.exposure import Exposure
from flow_grpo.rewards.motion_mag import MotionMag
from flow_grpo.rewards.process_pool import CallPool
from flow_grpo.rewards.sharpness import Sharpness
from flow_grpo.rewards.camera.smooth import Smooth
from flow_grpo.rewards.source_match import SourceMatch
from flow_grpo.rewards.target_view import TargetPsnr, TargetView
from flow_grpo.rewards.camera.view_disp import ViewDisp
from tools.hacking.tricks import COMMANDS, EXACT, Stage, stage

FACTOR = 3.0  # a reward notices a video that it puts so many floors below the exact one
PAGE = Path(__file__).resolve().parents[1] / "docs" / "camera_rewards.md"
BEGIN, END = "<!-- hacking table: begin, written by tools/hacking_table.py -->", "<!-- hacking table: end -->"


@dataclasses.dataclass(frozen=True)
class Scores:
    """Values of videos.

    Attributes:
        values: command -> video -> reward -> value.
        floors: reward -> its floor.
        seconds: reward -> CPU-seconds a video, mean; what is made once per command is part of it.
    """

    values: dict[str, dict[str, dict[str, float]]]
    floors: dict[str, float]
    seconds: dict[str, float]

    @property
    def videos(self) -> list[str]:
        """Return the names of the videos, the exact one first."""
        return list(next(iter(self.values.values())))

    def noticed(self, video: str, reward: str) -> int:
        """Return in how many commands a reward puts a video below the exact one by more than `FACTOR` floors."""
        limit = FACTOR * self.floors[reward]
        return sum(by[video][reward] < by[EXACT][reward] - limit for by in self.values.values())

    def mean(self, video: str, reward: str) -> float:
        """Return a reward's value of a video, the mean over commands."""
        return sum(by[video][reward] for by in self.values.values()) / len(self.values)


def weight_free_rewards() -> list[Reward]:
    """Return every reward that needs neither weights nor a server, in this process; those of poses share one PnP."""
    measurer = PoseMeasurer()
    pose = [PoseRot(measurer), PoseTrans(measurer), Smooth(measurer)]
    return [
        *pose,
        ViewDisp(CallPool()),
        TargetView(),
        TargetPsnr(),
        SourceMatch(),
        MotionMag(),
        Exposure(),
        Sharpness(),
    ]


def score(
    commands: Sequence[str],
    size: tuple[int, int],
    frames: int,
    *,
    make: Callable[[str, tuple[int, int], int], Stage] = stage,
    tell: Callable[[str], None] = lambda _: None,
) -> Scores:
    """Score the videos of every command by every reward.

    Args:
        commands: names of presets.
        size: rows and columns.
        frames: of a video.
        make: what films a command.
        tell: takes a line of progress.

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
            tell(f"{command}, {name}: " + ", ".join(f"{key} {value:.3f}" for key, value in scores.items()))
    count = sum(map(len, values.values()))
    floors = {reward.name: reward.floor for reward in rewards}
    return Scores(values, floors, {name: spent / count for name, spent in seconds.items()})


def table(scores: Scores) -> str:
    """Return the table in Markdown: videos x rewards, mean values, and in how many commands a trick is noticed."""
    rewards, commands = list(scores.floors), len(scores.values)
    lines = ["| video | " + " | ".join(f"`{name}`" for name in rewards) + " |", "|---" * (len(rewards) + 1) + "|"]
    for video in scores.videos:
        cells = []
        for reward in rewards:
            value, noticed = scores.mean(video, reward), scores.noticed(video, reward)
            digits = 1 if reward == "target_psnr" else 3
            # No "-0.000": what is not below 0 in the digits shown is 0.
            text = f"{round(value, digits) + 0.0:.{digits}f}"
            cells.append(f"**{text}** {noticed}/{commands}" if noticed else text)
        lines.append(f"| {video} | " + " | ".join(cells) + " |")
    lines.append("| *floor* | " + " | ".join(f"{scores.floors[name]:.2g}" for name in rewards) + " |")
    lines.append("| *CPU-s a video* | " + " | ".join(f"{scores.seconds[name]:.1f}" for name in rewards) + " |")
    return "\n".join(lines)


def report(scores: Scores, size: tuple[int, int], frames: int, call: str) -> str:
    """Return the table with the command that makes it."""
    legend = f"{frames} frames of {size[0]}x{size[1]}, mean over {', '.join(scores.values)}. Bold: in so many of these "
    legend += f"commands the value is more than {FACTOR:g} floors below the exact video's."
    return f"    {call}\n\n{legend}\n\n{table(scores)}"


def write_between(page: Path, text: str) -> None:
    """Replace what stands between the two marker lines of a page.

    Raises:
        ValueError: the page does not hold each marker once, in order.
    """
    old = page.read_text(encoding="utf-8")
    if old.count(BEGIN) != 1 or old.count(END) != 1 or old.index(BEGIN) > old.index(END):
        raise ValueError(f"{page} must hold the lines {BEGIN!r} and {END!r}, each once and in this order")
    before, after = old[: old.index(BEGIN)], old[old.index(END) :]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{after}", encoding="utf-8")


def draw_sheet(staged: Stage, out: Path) -> None:
    """Draw the first, the middle, the last but one and the last frame of every video of a command as one picture."""
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


def _size(text: str) -> tuple[int, int]:
    """Return rows and columns of "240x416"."""
    height, _, width = text.partition("x")
    return int(height), int(width)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    """Score and write; one line says what is wrong when it cannot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=_size, default=(240, 416), help="rows x columns, such as 480x832")
    parser.add_argument("--frames", type=int, default=21, help="of a video, at least 5")
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=list(PRESETS), help="camera presets")
    parser.add_argument("--out", type=Path, help="Markdown file")
    parser.add_argument("--write-docs", action="store_true", help=f"rewrite the table in docs/{PAGE.name}")
    parser.add_argument("--sheet", type=Path, help="PNG file: draw the videos of the first command, score nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)  # CPU-seconds are then seconds of one core
    if args.sheet:
        draw_sheet(stage(args.commands[0], args.size, args.frames), args.sheet)
        return
    size = f"{args.size[0]}x{args.size[1]}"
    call = f"python tools/hacking_table.py --size {size} --frames {args.frames} --commands {' '.join(args.commands)}"
    try:
        scores = score(args.commands, args.size, args.frames, tell=_tell)
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
