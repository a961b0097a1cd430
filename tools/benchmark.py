r"""Prepare and score the test sets that papers report: DAVIS along ten presets, and Redirect4D-Bench.

    python tools/benchmark.py prepare davis --root DAVIS --out davis
    sh davis/generate.sh --run outputs/first                       # options of tools/generate.py
    python tools/benchmark.py score davis --vipe vipe_results      # or --focal-px 700: our estimator

    python tools/benchmark.py prepare redirect4d --root redirect4d_bench --sources source_tracks --out redirect4d
    sh redirect4d/generate.sh --run outputs/first
    python tools/benchmark.py score redirect4d --vipe vipe_results

`prepare` writes sources, camera paths, the list of videos (benchmark.json) and generate.sh. `score` judges what lies in
OUT/videos, made by generate.sh or by any other program under the same names, and writes OUT/scores/NAME/:

    benchmark.md                            means, what they are over, and published figures if the protocol is theirs
    metrics.json rows.csv summary.csv .md   as tools/evaluate.py writes them; metrics.json can be another's --baseline

Of Redirect4D-Bench also, in OUT: VIDEOS/TRACK_TRAJECTORY.mp4 for its scorer, cases/TRACK__TRAJECTORY.mp4 for its pose
script, and pose/TRACK__TRAJECTORY/summary.json, its pose errors under its keys. docs/benchmarks.md explains all of it.
Exit code: 0, or 2 for invalid arguments or inputs.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.runtime.processes import usable_cores
from tools.common import command, image_size, make_parser

PARSER = make_parser(__doc__)
commands = PARSER.add_subparsers(required=True, dest="command", metavar="{prepare,score}")
add = commands.add_parser("prepare", help="write sources, paths and generate.sh").add_argument
add("set", choices=("davis", "redirect4d"), help="test set")
add("--root", type=Path, required=True, help="its folder: DAVIS-2017, or redirect4d_bench")
add("--out", type=Path, required=True, help="folder to write; must not exist or be empty")
add("--size", type=image_size, default=(480, 832), help="rows x columns of the generated videos, such as 480x832")
add("--list", type=Path, help="davis: text file of videos; default: the 50 of DAVIS 2016")
add("--captions", type=Path, help="davis: JSON of video -> what it shows; default: generate.py's own prompt")
add("--frames-at-most", type=int, help="of a video, to try it out; figures of papers are over all frames")
add("--sources", type=Path, help="redirect4d: folder of the source videos, which the public set lacks")
add = commands.add_parser("score", help="judge the videos").add_argument
add("out", type=Path, help="folder that `prepare` wrote")
add("--videos", type=Path, help="folder of the videos; default: OUT/videos")
add("--before", action="store_true", help="score the videos that generate.py --before made without the adapter")
add("--vipe", type=Path, help="ViPE's output, searched for pose/NAME.npz; default: our estimator")
add("--metric", action="store_true", help="davis: ViPE's poses are in metres; of redirect4d they always are")
add("--focal-px", type=float, help="of our estimator: focal length in pixels of videos whose own is not known")
add("--results", type=Path, help="folder of NAME/results.txt as ReDirector's evaluation writes it, for MEt3R")
add("--vbench", type=Path, help="folder of VBench's *_eval_results.json")
add("--baseline", type=Path, help="metrics.json of other videos of the same set, for paired differences")
add("--workers", type=int, default=usable_cores(), help="of our estimator: processes; 0: run in this one")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

from flow_grpo.maths.benchmarks import printed_errors, redirect4d_errors
from flow_grpo.rewards.camera import structure_from_motion as motion
from flow_grpo.rewards.camera.matched_motion import Estimate
from flow_grpo.rewards.frames import MOST_FRAMES
from flow_grpo.rewards.process_pool import Outcome
from flow_grpo.runtime.atomic_file import write_atomically
from tools import evaluate
from tools.evaluation.inputs import EvaluationTask
from tools.evaluation.tables import compare, read_baseline, summarise, write_tables
from tools.generation.records import AFTER, BEFORE
from tools.published.claims import PRINTED
from tools.published.davis import DAVIS_2016, prepare_davis
from tools.published.plan import SCRIPT, VIDEOS, BenchmarkPlan, find_tasks, read_plan, write_plan
from tools.published.redirect4d import FRAMES, case_name, prepare_redirect4d
from tools.published.report import report
from tools.published.results import met3r_values, vbench_scores, vipe_files, vipe_poses


@command
def main(words: Sequence[str] | None = None) -> int:
    args = PARSER.parse_args(words)
    return prepare(args) if args.command == "prepare" else score(args)


def prepare(args: argparse.Namespace) -> int:
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        raise ValueError(f"--out {args.out} exists already, must not exist or be empty")
    if args.frames_at_most is not None and args.frames_at_most < 5:
        raise ValueError(f"--frames-at-most is {args.frames_at_most}, must be at least 5")
    if min(args.size) < 1:
        raise ValueError(f"--size is {args.size[0]}x{args.size[1]}, must be rows x columns, such as 480x832")
    if args.set == "davis":
        names = args.list or DAVIS_2016
        plan = prepare_davis(args.root, args.out, args.size, names, args.captions, args.frames_at_most)
    elif args.sources is None:
        raise ValueError("--sources is needed: the folder of redirect4d's source videos, which the public set lacks")
    else:
        plan = prepare_redirect4d(args.root, args.sources, args.out, args.size, args.frames_at_most or FRAMES)
    write_plan(args.out, plan)
    sources = len({item.source for item in plan.items})
    print(f"{len(plan.items)} videos of {sources} sources; generate them: sh {args.out / SCRIPT} --run outputs/NAME")
    return 0


def score(args: argparse.Namespace) -> int:
    plan = read_plan(args.out)
    ending = BEFORE if args.before else AFTER
    tasks = find_tasks(args.out, plan, args.videos or args.out / VIDEOS, ending, None if args.vipe else args.focal_px)
    if not args.vipe and not all(0 < task.focal_px < math.inf for task in tasks):
        raise ValueError(f"--focal-px is {args.focal_px}, must be the videos' focal length in pixels; or give --vipe")
    place = args.out / "scores" / (("vipe" if args.vipe else "own") + "_before" * args.before)
    settings = {"benchmark": plan.benchmark, "estimator": "ViPE" if args.vipe else motion.name()}
    settings["most_frames"] = max(len(task.commanded) for task in tasks) if args.vipe else MOST_FRAMES
    asked = [{"video": task.name, "asked": evaluate.command_hash(task)} for task in tasks]
    baseline = read_baseline(args.baseline, settings, asked) if args.baseline else None
    place.mkdir(parents=True, exist_ok=True)
    if plan.benchmark == "redirect4d" and not args.before:
        items = {item.name: item for item in plan.items}
        for task in tasks:  # under the names that the benchmark's scorer and its pose script look for
            for folder, name in (("VIDEOS", task.name), ("cases", case_name(items[task.name]))):
                (args.out / folder).mkdir(exist_ok=True)
                shutil.copyfile(task.file, args.out / folder / f"{name}.mp4")
    if args.vipe:
        rows = vipe_rows(args, plan, tasks)
    else:
        options = argparse.Namespace(workers=args.workers, seconds=evaluate.MOST_SECONDS, plots=False)
        rows = evaluate.rows_of(tasks, settings, options, place)
    if args.results:
        rows = [row | met3r_values(args.results, task.file.stem) for row, task in zip(rows, tasks, strict=True)]
    scores = vbench_scores(args.vbench, [task.file.stem for task in tasks]) if args.vbench else {}
    summary = summarise(rows)
    if baseline is not None:
        summary["baseline"] = compare(rows, baseline, "the baseline")
    write_tables(place, settings, rows, summary)
    text = report(plan, tasks, settings, rows, summary, scores)
    write_atomically(place / "benchmark.md", text)
    print(text + str(place / "benchmark.md"), flush=True)
    return 0


def vipe_rows(args: argparse.Namespace, plan: BenchmarkPlan, tasks: Sequence[EvaluationTask]) -> list[dict[str, Any]]:
    """Return a row of each video over all its frames, by the poses in ViPE's files; one without a file has failed."""
    items, rows = {item.name: item for item in plan.items}, []
    files, metric = vipe_files(args.vipe), args.metric or plan.benchmark == "redirect4d"
    for task in tasks:
        frames, item = len(task.commanded), items[task.name]
        names = [task.file.stem] + [case_name(item)] * (plan.benchmark == "redirect4d" and not args.before)
        poses = vipe_poses(files, names, frames)
        found = None if poses is None else Estimate(poses.numpy(), metric=metric)
        cause = f"ViPE has no pose/{names[0]}.npz" if found is None else ""
        row = evaluate.judge(task, Outcome(found, cause), range(frames)).row | {"focal_px": None}
        if plan.benchmark == "davis":
            pair = (None, None) if poses is None else printed_errors(task.commanded, poses)
            row |= dict(zip(PRINTED, pair, strict=True))
        elif poses is not None and not args.before:
            errors = redirect4d_errors(task.commanded, poses) | {"track": item.source, "trajectory": item.camera}
            write_atomically(args.out / "pose" / case_name(item) / "summary.json", json.dumps(errors, indent=2))
        rows.append(row)
    if not any(row["registered"] for row in rows):
        raise ValueError(f"--vipe {args.vipe} has poses of no video: looked for pose/{tasks[0].file.stem}.npz below it")
    return rows


if __name__ == "__main__":
    sys.exit(main())
