r"""Measure how well generated videos follow their camera paths, by structure from motion on each video.

    python tools/evaluate.py outputs/first/generated --focal-px 1225.6

reads a folder of `tools/generate.py` as it is; where it made each video before and after training, both are measured
and compared video by video. A run's held-out conditions, generated with its adapter and without:

    python tools/evaluate.py --run outputs/first --out outputs/first/evaluation

The same for one of its checkpoints (while the run is training), or for a recipe and an adapter, without "before":

    python tools/evaluate.py --checkpoint outputs/first/checkpoints/checkpoint_000010 --out evaluation
    python tools/evaluate.py --config config/grpo.py:my_recam_1gpu --adapter outputs/first/adapter --out evaluation

After --run, --checkpoint and --config any knob can follow as --config.section.knob=value. Videos of any other origin:

    python tools/evaluate.py --videos results --cameras camera_extrinsics.json --focal-px 630.3 --out evaluation

`--cameras` is JSON of video name -> T OpenCV camera-to-world 4x4 matrices in metres, or a MultiCamVideo camera file;
ReCamMaster's result folders (cam_type1/video0.mp4 ...) are read as they are. `tools/evaluation/inputs.py` describes
both formats, docs/evaluation.md the metrics. No reward uses this estimator, unless a source came without poses.
Outputs in --out:

    metrics.json                 settings, one row per video, and the summary: means, intervals, failure rate
    rows.csv summary.csv         the same as tables
    summary.md                   the same as text
    plots/VIDEO.png              commanded and estimated path
    rows/VIDEO.json              finished rows; the next call reuses them and measures only what changed
    before/                      all of this for the videos before training

A video whose path cannot be estimated is a row with registered=false. Exit code: 0, or 2 for invalid arguments or
inputs, checked before the first estimate.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from flow_grpo.runtime.processes import usable_cores
from tools.common import command, make_parser

MOST_SECONDS = 900.0  # per video: about 18 times the usual time at 480x832
PARSER = make_parser(__doc__)
add = PARSER.add_argument
add("--folder", type=Path, help="or as the first word: folder of tools/generate.py, searched recursively")
add("--run", type=Path, help="folder of a run, outputs/NAME: generate its held-out conditions")
add("--videos", type=Path, help="folder of other videos, searched recursively; with --cameras")
add("--cameras", type=Path, help="JSON of video -> matrices, or camera_extrinsics.json")
add("--focal-px", type=float, help="focal length in pixels of videos whose own is not known")
add("--config", metavar="FILE:RECIPE", help="generate this recipe's held-out conditions")
add("--adapter", type=Path, help="with --config: adapter folder of a run; default: the base model")
add("--checkpoint", type=Path, help="of a run: generate its held-out conditions")
add("--out", type=Path, help="output folder; an existing one is continued; default: FOLDER/evaluation")
before_help = "leave out the videos before training, of FOLDER or --run; --baseline does so, too"
add("--no-before", dest="before", action="store_false", help=before_help)
add("--baseline", type=Path, help="metrics.json of other videos with the same names, for paired differences")
add("--workers", type=int, default=usable_cores(), help="processes; 0: run in this one, without a time limit")
add("--seconds", type=float, default=MOST_SECONDS, help="time limit per video")
add("--no-plots", dest="plots", action="store_false", help="draw no paths")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

import cv2
import numpy as np
import torch
from tqdm import tqdm

from flow_grpo.data.video_io import read_video
from flow_grpo.maths.path_errors import CONVENTIONS, LEAST_BASELINE_M, LEAST_FRAMES, baseline_m, path_errors
from flow_grpo.reporting.drawing.path_plots import draw_paths
from flow_grpo.rewards.camera import structure_from_motion as motion
from flow_grpo.rewards.camera.matched_motion import Estimate
from flow_grpo.rewards.camera.pose import LEAST_LOCATED
from flow_grpo.rewards.frames import MOST_FRAMES, frame_numbers
from flow_grpo.rewards.process_pool import CallPool, Outcome
from flow_grpo.runtime.atomic_file import write_atomically
from tools.evaluation.inputs import EvaluationTask, find_generated, find_tasks
from tools.evaluation.tables import baseline_lines, compare, read_baseline, summarise, write_tables


@dataclasses.dataclass(frozen=True)
class Finished:
    """The result of one video."""

    row: dict[str, Any]  # its line of the tables
    poses: torch.Tensor  # (F, 4, 4) estimated, NaN where not registered
    cached: bool = False  # read from an earlier call's file


@command
def main(words: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if words is None else words)
    # Not a positional of argparse, which would take the value of an override such as --config.eval.num_steps 8.
    folder = ["--folder"] if given and not given[0].startswith("-") else []
    args, overrides = PARSER.parse_known_args([*folder, *given])
    check_options(args, overrides)
    settings = {"estimator": motion.name(), "most_frames": MOST_FRAMES}
    tasks, before = tasks_of(args, overrides)
    asked = [{"video": task.name, "asked": command_hash(task)} for task in tasks]
    baseline = read_baseline(args.baseline, settings, asked) if args.baseline else None
    args.out.mkdir(parents=True, exist_ok=True)
    against = "the baseline"
    print(f"measuring {len(tasks)} videos" + f", and {len(before)} before training" * bool(before), flush=True)
    if before:
        against = "the same before training"
        baseline = rows_of(before, settings, args, args.out / "before")
        write_tables(args.out / "before", settings, baseline, summarise(baseline))
    rows = rows_of(tasks, settings, args, args.out)
    summary = summarise(rows)
    if baseline is not None:
        summary["baseline"] = compare(rows, baseline, against)
        print("\n".join(baseline_lines(summary["baseline"])), flush=True)
    write_tables(args.out, settings, rows, summary)
    failed = f"{summary['videos'] - summary['registered']} not registered ({summary['failure_rate']:.1%})"
    causes = Counter(row["cause"] for row in rows if row["cause"]).most_common(1)
    why = f", most often: {causes[0][0]}" if causes else ""
    print(f"{len(rows)} videos; {failed}{why}; {args.out / 'summary.md'}", flush=True)
    return 0


def rows_of(
    tasks: Sequence[EvaluationTask], settings: dict[str, Any], args: argparse.Namespace, out: Path
) -> list[dict[str, Any]]:
    """Measure videos into `out`, with plots of their paths if asked for, and return their rows in order.

    Each worker is a thread with a process of its own: a crash or a timeout costs only the current video. A row is saved
    as soon as it is ready; those saved earlier are read back.
    """
    own, pools = threading.local(), set()

    def measured(task: EvaluationTask) -> Finished:
        file, key = out / "rows" / f"{task.name}.json", input_hash(task, settings)
        if cached := read_row(file, key):
            return cached
        pool = own.__dict__.setdefault("pool", CallPool(min(args.workers, 1)))
        pools.add(pool)
        frames = frame_numbers(len(task.commanded))
        call = (task.file, len(task.commanded), frames, task.focal_px)
        outcome = pool.run(estimate, [call], seconds=args.seconds, what=f"video {task.name}")[0]
        finished = judge(task, outcome, frames)
        if not outcome.fault:  # a failure of the estimator itself is retried by the next call
            poses = [pose.tolist() if pose.isfinite().all() else None for pose in finished.poses]
            content = {"key": key, "row": finished.row, "poses": poses}
            write_atomically(file, json.dumps(content, allow_nan=False))
        return finished

    with ThreadPoolExecutor(max(args.workers, 1)) as threads:
        futures = {threads.submit(measured, task): task for task in tasks}
        try:
            for future in tqdm(as_completed(futures), total=len(tasks), desc="videos", unit="video", disable=None):
                finished = future.result()
                if args.plots:
                    plot(futures[future], finished, out)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for pool in list(pools):
                pool.close()
    found = [future.result() for future in futures]
    if reused := sum(finished.cached for finished in found):
        print(f"{reused} of {len(tasks)} videos were measured before", flush=True)
    return [finished.row for finished in found]


def tasks_of(args: argparse.Namespace, overrides: Sequence[str]) -> tuple[list[EvaluationTask], list[EvaluationTask]]:
    """Return the videos to judge, and the same before training where there are any; generate them if asked for."""
    if args.folder:
        after, before = find_generated(args.folder, args.focal_px)
        return after, before if args.before and not args.baseline else []
    if args.videos:
        return find_tasks(args.videos, args.cameras, args.focal_px), []
    # Imported here: the estimating processes load this file too and need no model.
    from flow_grpo.run.starts import LEAST_ROWS, checkpoint_configuration, configuration_of
    from flow_grpo.settings.loading import load_config
    from tools.evaluation.videos import make_videos
    from tools.export_adapter import export

    if args.run:
        config = configuration_of(args.run, overrides)
    elif args.checkpoint:
        config = checkpoint_configuration(args.checkpoint, overrides)
    else:
        config = load_config(args.config, overrides)
    if config.data.height < LEAST_ROWS:
        raise ValueError(
            f"config.data.height: the videos are {config.data.height} rows high, must be at least {LEAST_ROWS} for "
            "structure from motion: a run as small is judged by its own estimator (eval.gold), whose result is in its "
            "summary.json; the last lines of its output have the command that measures it again"
        )
    if args.run:
        made = [make_videos(config, args.run / "adapter", args.out, args.focal_px, args.run)]
        start = Path(config.model.adapter) if config.model.adapter else None
        made += [make_videos(config, start, args.out / "before", args.focal_px, args.run)] if args.before else []
        after, *before = (find_tasks(*places, args.focal_px) for places in made)
        return after, before[0] if before and not args.baseline else []
    if not args.checkpoint:
        return find_tasks(*make_videos(config, args.adapter, args.out, args.focal_px), args.focal_px), []
    with tempfile.TemporaryDirectory() as place:  # not in --out, which may still be rejected for holding other videos
        export(config, args.checkpoint, Path(place))
        return find_tasks(*make_videos(config, Path(place), args.out, args.focal_px), args.focal_px), []


def check_options(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    ways = {"FOLDER": args.folder, "--run": args.run, "--checkpoint": args.checkpoint, "--config": args.config}
    ways["--videos"] = args.videos or args.cameras
    given = [way for way, value in ways.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise ValueError(
            f"got {got}, must be one of FOLDER, --run, --checkpoint, --config, or --videos with --cameras; see --help"
        )
    if given == ["--videos"] and (args.videos is None or args.cameras is None):
        raise ValueError("--videos and --cameras are both needed; a folder of tools/generate.py goes without either")
    if args.out is None and args.folder is None:
        raise ValueError("--out FOLDER is needed, the folder of the results")
    args.out = args.out or args.folder / "evaluation"
    if not args.config and (args.adapter or (overrides and not (args.run or args.checkpoint))):
        word = "--adapter" if args.adapter else overrides[0]
        raise ValueError(f"{word} is no option without --config FILE:RECIPE; see --help")
    if args.focal_px is not None and not 0 < args.focal_px < math.inf:
        raise ValueError(f"--focal-px is {args.focal_px:g}, must be the focal length in pixels, above 0, such as 630.3")
    if args.workers < 0 or not 0 < args.seconds < math.inf:
        raise ValueError(f"--workers is {args.workers} and --seconds {args.seconds:g}, must be at least 0 and above 0")
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file, must be a folder")


def command_hash(task: EvaluationTask) -> str:
    """Return a hash of a video's commanded path and focal length."""
    return hashlib.blake2b(json.dumps((task.commanded.tolist(), task.focal_px)).encode(), digest_size=16).hexdigest()


def input_hash(task: EvaluationTask, settings: dict[str, Any]) -> str:
    names = (task.name, task.camera_type, task.source, task.shares_estimator, command_hash(task), settings)
    content = hashlib.blake2b(json.dumps(names).encode(), digest_size=16)
    with task.file.open("rb") as file:
        while part := file.read(1 << 20):
            content.update(part)
    return content.hexdigest()


def estimate(video: Path, num_frames: int, frames: Sequence[int], focal_px: float) -> Estimate:
    """Estimate the cameras of these frames of a video file with `num_frames`; ValueError where it cannot be read."""
    begun = time.process_time()
    colours = read_video(video, num_frames)[:, list(frames)].permute(1, 2, 3, 0).numpy()
    grey = np.stack([cv2.cvtColor(picture, cv2.COLOR_RGB2GRAY) for picture in np.ascontiguousarray(colours)])
    found = motion.reconstruct(grey, focal_px)
    return dataclasses.replace(found, cpu_seconds=time.process_time() - begun)


def judge(task: EvaluationTask, outcome: Outcome[Estimate], frames: Sequence[int]) -> Finished:
    """Compare the estimated with the commanded path at `frames`; return the row."""
    commanded = task.commanded[list(frames)]
    seen = outcome.value or Estimate(np.full((len(frames), 4, 4), np.nan))
    poses, found = torch.from_numpy(seen.poses), int(seen.found.sum())
    registered = found >= max(LEAST_FRAMES, LEAST_LOCATED * len(frames))
    needed = f"{found} of {len(frames)} frames registered, needs half and {LEAST_FRAMES}"
    errors = path_errors(commanded, poses, metric=seen.metric) if registered else dict.fromkeys(CONVENTIONS)
    baseline = baseline_m(commanded)
    turns_only = registered and baseline < LEAST_BASELINE_M and math.isfinite(seen.parallax_deg)
    row = {
        "video": task.name,
        "source": task.source,
        "camera_type": task.camera_type,
        "registered": registered,
        "cause": outcome.fault or ("" if registered else needed),
        "fault": bool(outcome.fault),
        "frames": len(frames),
        "frames_registered": found,
        **errors,
        "drift_parallax_deg": seen.parallax_deg if turns_only else None,
        "baseline_m": baseline,
        "points": seen.points,
        "shares_estimator": task.shares_estimator,
        "focal_px": task.focal_px,
        "cpu_seconds": round(seen.cpu_seconds, 2),
        "asked": command_hash(task),
    }
    return Finished(row, poses)


def read_row(file: Path, key: str) -> Finished | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["key"] != key:
            return None
        lost = [[math.nan] * 4] * 4
        poses = torch.tensor([pose or lost for pose in content["poses"]], dtype=torch.float64)
        return Finished(content["row"], poses, cached=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def plot(task: EvaluationTask, finished: Finished, out: Path) -> None:
    file = out / "plots" / f"{task.name}.png"
    if not finished.row["registered"]:
        file.unlink(missing_ok=True)
        return
    if finished.cached and file.is_file():
        return
    error = f"RotErr {finished.row['rot_deg_mean']:.3g} degrees"
    shape = finished.row["trans_sim3_rel"]
    error += "" if shape is None else f", TransErr {shape:.3g} of the path (Sim(3))"
    commanded = task.commanded[frame_numbers(len(task.commanded))]
    draw_paths(commanded, finished.poses, file, f"{task.name} ({task.camera_type}): {error}")


if __name__ == "__main__":
    sys.exit(main())
