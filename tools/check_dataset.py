"""Check a folder in MultiCamVideo layout: report what it contains and every problem that training would run into.

    python tools/check_dataset.py data/MultiCamVideo --split val --frames 81 --size 1280x1280 --decode --json out.json

Exit code: 0 clean, 1 problems found, 2 invalid arguments.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import image_size, make_parser

# Well above any camera of the dataset: 4.87 m and 75 degrees in 80 frames at varying speed.
MAX_STEP = (1.0, 30.0)
PARSER = make_parser(__doc__)
PARSER.add_argument("root", type=Path, help="dataset folder, the parent of the splits")
PARSER.add_argument("--split", action="append", help="folder below the root, may be repeated; default: all")
PARSER.add_argument("--decode", action="store_true", help="decode every frame: finds hidden damage, slow")
PARSER.add_argument("--frames", type=int, help="least number of frames of every video and camera file")
PARSER.add_argument("--size", type=image_size, help="required pixels of every video, as ROWSxCOLUMNS")
PARSER.add_argument(
    "--max-step",
    type=float,
    nargs=2,
    default=MAX_STEP,
    metavar=("METRES", "DEGREES"),
    help="most that a camera may move and turn between two frames; default: %(default)s",
)
PARSER.add_argument("--workers", type=int, default=1, help="processes")
PARSER.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON instead of printing tables")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from flow_grpo.data import captions, multicam
from flow_grpo.data.camera_files import BAD_JSON, read_cameras
from flow_grpo.data.depth_files import depth_file, read_depth
from flow_grpo.data.video_io import frame_rate, read_video, video_size
from flow_grpo.maths.poses import rot_err
from flow_grpo.runtime.json_files import read_json_object

SHORT_M = 0.02  # of a path: that of a file in metres, read as centimetres
MOTIONS = ("path_m", "rotation_deg", "step_m", "step_deg")


@dataclasses.dataclass
class SceneReport:
    """Contents of one scene, in plain values that can be pickled and written as JSON."""

    name: str  # folder relative to the root
    cameras: int = 0  # number of camera videos
    clips: list[tuple[int, int, int, float]] = dataclasses.field(default_factory=list)  # frames, rows, columns, fps
    captions: int | None = None  # videos with a caption; None without a caption file
    # Per camera: path length (m), largest angle to the start (deg), largest step (m), largest step (deg).
    motions: list[tuple[float, float, float, float]] = dataclasses.field(default_factory=list)
    problems: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # (path relative to the root, text)

    @property
    def place(self) -> tuple[str, str]:
        """Split and lens folder, "" if there is none."""
        parts = self.name.split("/")
        return parts[0], next((part for part in parts if multicam.LENS_FOLDER.fullmatch(part)), "")


def scene_folders(folder: Path) -> Iterator[Path]:
    if any((folder / part).is_dir() for part in ("videos", "cameras")):
        yield folder
        return
    children = sorted(child for child in folder.iterdir() if child.is_dir() and child.name[0] != ".")
    if not children:
        yield folder
    for child in children:
        yield from scene_folders(child)


def check_scene(args: argparse.Namespace, folder: Path) -> SceneReport:
    name = folder.relative_to(args.root).as_posix()
    report = SceneReport(name)
    try:
        multicam.find_scenes(args.root, name)  # as a split of this scene only
    except (ValueError, OSError) as error:
        text = str(error) if (folder / "videos").is_dir() else f"no videos here, only {sorted(os.listdir(folder))}"
        if f"has no {multicam.CAMERAS_JSON.as_posix()}" not in text:  # _check_cameras reports that one in any case
            report.problems.append((name, text))
    videos = sorted(folder.joinpath("videos").glob("[!.]*.mp4"))
    report.cameras = len(videos)
    commands = folder / multicam.COMMANDS  # paths that are asked for, of which a video need not exist
    shown = sorted(commands.joinpath("videos").glob("[!.]*.mp4"))
    frames = _check_videos(args, [*videos, *shown], report)
    needed = not commands.is_dir() and ((folder / "videos").is_dir() or (folder / "cameras").is_dir())
    if needed or (folder / multicam.CAMERAS_JSON).is_file():
        _check_cameras(args, folder, [video.stem for video in videos], frames, report)
    if commands.is_dir():
        _check_cameras(args, commands, None, frames, report)
    for video in videos:
        _tried(report, depth_file(video).relative_to(args.root).as_posix(), read_depth, video, 8, 8)
    _check_captions(args.root, folder, videos, report)
    for file in (folder / multicam.PRESETS_JSON, commands / multicam.PRESETS_JSON):
        if file.is_file():
            _tried(report, file.relative_to(args.root).as_posix(), read_json_object, file, BAD_JSON)
    # Messages of the library contain absolute paths; the report's are relative to the root.
    report.problems = [(file, text.replace(f"{args.root}{os.sep}", "")) for file, text in report.problems]
    return report


def _check_videos(args: argparse.Namespace, videos: Sequence[Path], report: SceneReport) -> int | None:
    """Check all videos, and return the frame count that they have or must have; None if unknown."""
    found: dict[str, tuple[int, int, int]] = {}
    for video in videos:
        name = video.relative_to(args.root).as_posix()
        try:
            size, rate = video_size(video), frame_rate(video)
            if args.decode:  # decodes every frame but keeps only the last one
                read_video(video, 1, start=max(size[0], args.frames or 0, 1) - 1)
        except (ValueError, OSError) as error:
            report.problems.append((name, str(error)))
            continue
        found[name] = size
        report.clips.append((*size, rate))
    if len(rates := {clip[3] for clip in report.clips}) > 1:
        text = " and ".join(f"{rate:g}" for rate in sorted(rates))
        report.problems.append((report.name, f"cameras at {text} frames per second: frame i is another moment in each"))
    common = Counter(found.values()).most_common(1)
    if not common:
        return args.frames
    frames, *rows_columns = common[0][0]
    needed = args.size or tuple(rows_columns)
    for name, (count, *own) in found.items():
        if tuple(own) != needed:
            report.problems.append((name, f"{own[0]}x{own[1]} pixels, must be {needed[0]}x{needed[1]}"))
        if count < (args.frames or 0) or (args.frames is None and count != frames):
            report.problems.append((name, f"{count} frames, must be {args.frames or frames}"))
    return args.frames or frames


def _check_cameras(
    args: argparse.Namespace, folder: Path, names: list[str] | None, frames: int | None, report: SceneReport
) -> None:
    """Check the poses of these cameras; None: of all that the file names."""
    file = folder / multicam.CAMERAS_JSON
    name = file.relative_to(args.root).as_posix()
    content: dict[str, Any] | None = _tried(report, name, read_json_object, file, BAD_JSON)
    if content is None:
        return
    frames = frames or sum(1 for key in content if re.fullmatch(r"frame\d+", key))
    first = content.get("frame0")
    known = first if isinstance(first, dict) else {}
    names = [*known] if names is None else names
    spare = {camera for entry in content.values() if isinstance(entry, dict) for camera in entry} - set(names)
    if spare:
        report.problems.append((name, f"poses of {', '.join(sorted(spare))}, which have no video"))
    if args.frames is None and f"frame{frames}" in content:
        report.problems.append((name, f"poses beyond frame{frames - 1}, the last of the videos"))
    texts: list[str] = []
    for camera in names:
        if not multicam.PUBLIC_NAME.fullmatch(camera) and camera not in known:
            continue  # a stray, which `find_scenes` names
        try:
            posed = 0
            while isinstance(entry := content.get(f"frame{posed}"), dict) and camera in entry:
                posed += 1
            motion = _motion(read_cameras(file, [camera], max(frames, posed, 1))[0])
        except ValueError as error:
            texts.append(str(error).replace(f" for {camera};", ";"))
            continue
        report.motions.append(motion)
        if motion[2] > args.max_step[0] or motion[3] > args.max_step[1]:
            step, limit = "{:.3g} m and {:.3g} degrees".format(*motion[2:]), "{:g} m, {:g}".format(*args.max_step)
            texts.append(f"{camera} moves {step} between two frames, at most {limit} degrees are plausible")
    report.problems.extend((name, text) for text in dict.fromkeys(texts))  # a frame that all cameras lack: once


def _motion(poses: torch.Tensor) -> tuple[float, float, float, float]:
    """Return path length (m), largest angle to the first frame, largest step (m, deg) of (T, 4, 4) poses."""
    before = torch.cat([poses[:1], poses[:-1]])
    steps = torch.linalg.vector_norm(poses[:, :3, 3] - before[:, :3, 3], dim=-1)
    angles = rot_err(poses, poses[:1]).rad2deg()
    parts = (steps.sum(), angles.max(), steps.max(), rot_err(poses, before).rad2deg().max())
    return tuple(round(part.item(), 6) for part in parts)


def _check_captions(root: Path, folder: Path, videos: Sequence[Path], report: SceneReport) -> None:
    file = next(captions.tables(folder / "videos", root), None)
    if file is None:
        return
    name = file.relative_to(root).as_posix()
    report.captions = 0
    table: captions.Captions | None = _tried(report, name, captions.read_captions, file)
    for video in videos if table is not None else ():
        texts = captions.captions_of(video, file, table)
        if len(texts) == 1 and texts[0].strip():
            report.captions += 1
        else:
            report.problems.append(
                (name, f"{len(texts)} rows for {video.relative_to(file.parent)}, must be one, with text")
            )


def _tried(report: SceneReport, name: str, read: Callable[..., Any], *words: Any) -> Any:
    """Return what is read; None where that is refused, which is a problem of the file `name`."""
    try:
        return read(*words)
    except ValueError as error:
        report.problems.append((name, str(error)))
        return None


def summarise(args: argparse.Namespace, scenes: Sequence[SceneReport]) -> dict[str, Any]:
    problems = [problem for scene in scenes for problem in scene.problems]
    lenses = [_summarise_lens(place, scenes) for place in sorted({scene.place for scene in scenes})]
    splits = []
    for split in sorted({scene.place[0] for scene in scenes}):
        own = [scene for scene in scenes if scene.place[0] == split]
        bare = [scene.name for scene in own if scene.captions is None and scene.cameras]
        if any(scene.captions is not None for scene in own):
            problems += [(name, f"no caption file, other scenes of {split} have one") for name in bare]
        motions = list(zip(*(motion for scene in own for motion in scene.motions), strict=True)) or [()] * len(MOTIONS)
        splits.append({"split": split} | {n: _range(values) for n, values in zip(MOTIONS, motions, strict=True)})
    listed = [{"file": file, "problem": text} for file, text in problems]
    notes = [note for split in splits for note in _notes(split, [s for s in scenes if s.place[0] == split["split"]])]
    head = {"root": str(args.root), "decoded": args.decode}
    return head | {"lenses": lenses, "motion": splits, "problems": listed, "notes": notes}


def _notes(split: dict[str, Any], scenes: Sequence[SceneReport]) -> list[str]:
    name, path = split["split"], split[MOTIONS[0]]
    notes = []
    if path and path["max"] < SHORT_M:
        notes.append(
            f"{name}: no camera moves {SHORT_M:g} m (at most {path['max']:g}): is it in metres? must be centimetres"
        )
    if bare := sum(not scene.place[1] for scene in scenes):
        text = "no focal length in a folder's name (f24_aperture5): pose_rot and pose_trans cannot measure them"
        notes.append(f"{name}: {bare} scenes have {text}")
    return notes


def _summarise_lens(place: tuple[str, str], scenes: Sequence[SceneReport]) -> dict[str, Any]:
    own = [scene for scene in scenes if scene.place == place]
    clips = [clip for scene in own for clip in scene.clips]
    return {
        "split": place[0],
        "lens": place[1],
        "scenes": len(own),
        "cameras": _counts(scene.cameras for scene in own),
        "clips": len(clips),
        "frames": _counts(clip[0] for clip in clips),
        "sizes": _counts(f"{clip[1]}x{clip[2]}" for clip in clips),
        "seconds": _range([clip[0] / clip[3] for clip in clips if clip[3]]),
        "captioned": sum(scene.captions or 0 for scene in own),
    }


def _counts(values: Iterable[object]) -> dict[str, int]:
    return dict(sorted(Counter(map(str, values)).items()))


def _range(values: Sequence[float]) -> dict[str, float] | None:
    parts = (("min", min), ("median", statistics.median), ("max", max))
    return {name: round(part(values), 6) for name, part in parts} if values else None


def show(report: dict[str, Any]) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=160)
    table = Table("split", "lens", "scenes", "cameras", "clips", "frames", "rows x columns", "seconds", "captions")
    for row in report["lenses"]:
        counts = [", ".join(f"{key} ({n})" for key, n in row[name].items()) for name in ("cameras", "frames", "sizes")]
        names = (row["split"], row["lens"] or "none", str(row["scenes"]))
        captions = f"{row['captioned']} of {row['clips']}"
        table.add_row(*names, counts[0], str(row["clips"]), *counts[1:], _text(row["seconds"]), captions)
    table.caption = "in brackets how many: scenes with that number of cameras, videos of that length and size"
    console.print(table)
    table = Table("split", "path (m)", "rotation (deg)", "step (m)", "step (deg)")
    table.title = "min / median / max over the cameras, all frames"
    for row in report["motion"]:
        table.add_row(row["split"], *(_text(row[name]) for name in MOTIONS))
    console.print(table)
    for problem in report["problems"]:
        print(f"{problem['file']}: {problem['problem']}")
    for note in report["notes"]:
        print(f"note: {note}")
    count = f"{len(report['problems'])} problems" if report["problems"] else "no problems"
    print(f"{count}, but see the note above" if report["notes"] else count)


def _text(values: dict[str, float] | None) -> str:
    return " / ".join(f"{value:.3g}" for value in values.values()) if values else "-"


def check(args: argparse.Namespace, folders: Sequence[Path]) -> list[SceneReport]:
    bars = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    pool = ProcessPoolExecutor(args.workers, mp_context=get_context("spawn")) if args.workers > 1 else None
    run = pool.map if pool else map  # spawn: forking with torch's threads can hang
    with bars, pool or nullcontext():
        return list(bars.track(run(partial(check_scene, args), folders), len(folders), description="scenes"))


def main(argv: Sequence[str] | None = None) -> int:
    args = PARSER.parse_args(argv)
    if not args.root.is_dir():
        PARSER.error(f"the dataset folder {args.root} does not exist")
    if args.json and not args.json.parent.is_dir():
        PARSER.error(f"the folder of --json {args.json} does not exist")
    if args.workers < 1 or (args.frames is not None and args.frames < 1):
        PARSER.error(f"--workers is {args.workers} and --frames {args.frames}, must be at least 1")
    splits = args.split or sorted(p.name for p in args.root.iterdir() if p.is_dir() and p.name[0] != ".")
    missing = [split for split in splits if not (args.root / split).is_dir()]
    if missing or not splits:
        PARSER.error(f"dataset {args.root} has no split {' or '.join(missing)}; name folders below the root")
    folders = [folder for split in splits for folder in scene_folders(args.root / split)]
    print(f"checking {len(folders)} scenes of {args.root}", flush=True)
    try:
        report = summarise(args, check(args, folders))
    except BrokenProcessPool:
        PARSER.error("a worker died, of a broken file or lack of memory; run with --workers 1 to see where")
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        print(f"{len(report['problems'])} problems, report in {args.json}")
    else:
        show(report)
    return int(bool(report["problems"]))


if __name__ == "__main__":
    raise SystemExit(main())
