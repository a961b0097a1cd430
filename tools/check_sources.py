r"""Say what a recipe's rewards can measure on your clips, or find the items of a data set that no training should draw.

    python tools/check_sources.py clips --config config/grpo.py:my_recam_8npu --focal-px 840 --page clips.html
    python tools/check_sources.py --config config/grpo.py:my_recam_8npu --out usable.json
    torchrun ... train_grpo.py --config config/grpo.py:my_recam_8npu --config.data.exclude=usable.json

CLIPS is a folder of videos, with what is known of them beside them (tools/prepare_clips.py), or a data set, whose
sources are taken once each. Every reward of the recipe scores a perfect retake of each: the clip's own frames, or the
true view's, written and read once. It has a value there, its floor on the clip, or a cause why not, and what would help
(docs/your_videos.md); --json and --page write the table as data, and with pictures.

--out judges the items of the training split by whether `pose_rot` and `pose_trans` can locate frames. A source is
usable if enough of it can be triangulated, its own held-out frames are located correctly, and at least half
of the true view is located as well (docs/camera_rewards.md). Samples of an unusable item would be rolled out and get no
reward; excluded items are never drawn. The file holds a verdict per item of the training split, "" or the problem; it
is updated as the check proceeds, and the same command resumes; scenes whose files have changed are judged again.

Exit code: 0, 1 if a clip or an item could not be read or measured (such an item has no verdict and is retried next
time) or fewer than half of the items are usable, 2 for invalid settings.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from flow_grpo.runtime.processes import usable_cores
from tools.common import add_clip_options, command, fail, make_parser

PARSER = make_parser(__doc__, recipe=True)
PARSER.add_argument("clips", type=Path, nargs="?", help="folder of videos, or a data set in place of data.root")
PARSER.add_argument("--json", type=Path, metavar="FILE", help="to write the answers on clips to")
PARSER.add_argument("--page", type=Path, metavar="FILE", help="HTML page of them, with pictures")
PARSER.add_argument("--out", type=Path, metavar="FILE", help="of the verdicts on the items of a data set")
add_clip_options(PARSER)
PARSER.add_argument("--workers", type=int, default=usable_cores(), help="processes; 0: run in this one")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

from tqdm import tqdm

from flow_grpo.data.exclude import Verdicts, read_verdicts, settings_of, write_verdicts
from flow_grpo.data.multicam import MultiCamDataset, contents_by_scene
from flow_grpo.data.splits import multicam_data
from flow_grpo.data.trajectories import find_videos
from flow_grpo.data.video_io import video_size
from flow_grpo.records import Condition
from flow_grpo.rewards.base import build_reward_set
from flow_grpo.rewards.camera.pose import PoseMeasurer
from flow_grpo.rewards.process_pool import CallPool
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config
from tools.footage.answers import Answer, examine
from tools.footage.layout import one_width
from tools.footage.show import ABOUT, table
from tools.run_report.page import fill

LEAST_USABLE = 0.5  # share of the items below which something common to all is suspected
SHOWN = 5  # of the scenes without a usable item
CAUSES = (
    "Where anchors are missing, pictures may lack texture or cameras parallax; else the poses are not inverted or in "
    "another convention, or the focal length in the folder's name is wrong (docs/your_videos.md)"
)
AT_ONCE = 4  # items per process between two writes of the file
CLIP_SECONDS = 1800.0  # for a clip: anchors by structure from motion may take minutes


@command
def main(words: Sequence[str] | None = None) -> int:
    known, overrides = PARSER.parse_known_args(words)
    if known.workers < 0:
        raise ValueError(f"--workers is {known.workers}, must be at least 0 (0: check in this process)")
    if bool(known.clips) == bool(known.out):
        raise ValueError(f"got {'both' if known.out else 'neither'} CLIPS and --out, must be one of them; see --help")
    config = load_config(known.config, [*overrides, "--config.data.exclude="])
    return (answer_clips if known.clips else judge_items)(known, config)


def answer_clips(known: argparse.Namespace, config: Config) -> int:
    """Print, and write where asked, what can be measured on each clip; return the exit code."""
    items: list[Path | int]
    if (known.clips / config.data.train_split).is_dir():
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, root=str(known.clips)))
        data = multicam_data(config.data, config.data.train_split)
        items = [*{data.source_file(number): number for number in reversed(range(len(data)))}.values()][::-1]
    else:
        items, sizes = [*(clips := find_videos(known.clips))], {}
        for clip in clips if known.focal_px else ():
            with contextlib.suppress(ValueError):  # the clip's own answer says it
                sizes[clip] = video_size(clip)
        one_width(sizes, known.focal_px)
    rewards = build_reward_set(config.reward.weights, data_root=config.data.root, servers=config.reward.remote)
    answers: list[Answer] = []
    pool, step = CallPool(known.workers), max(1, known.workers)
    with tqdm(total=len(items), unit="clip") as bar:
        for start in range(0, len(items), step):
            jobs = [(config, item, known) for item in items[start : start + step]]
            made = pool.run(examine, jobs, seconds=CLIP_SECONDS, what="clips")
            answers += [one.value or Answer(str(job[1]), one.fault) for job, one in zip(jobs, made, strict=True)]
            bar.update(len(jobs))
    pool.close()
    print("\n".join(table(answers, rewards.floors)), flush=True)
    size = config.data.num_frames, config.data.height, config.data.width
    if known.json:
        clips = [dataclasses.asdict(one) | {"advice": one.advice(), "thumbnail": None} for one in answers]
        content = {"recipe": known.config, "size": size, "floors": rewards.floors, "clips": clips}
        write_atomically(known.json, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    if known.page:
        facts = {"floors": rewards.floors, "recipe": known.config, "size": size, "about": ABOUT}
        write_atomically(known.page, fill("clips.html.j2", "", answers=answers, **facts))
    return int(any(one.cause for one in answers))


def judge_items(known: argparse.Namespace, config: Config) -> int:
    """Write the verdicts on the items of the training split; return the exit code."""
    data = multicam_data(config.data, config.data.train_split)
    made_from = settings_of(config.data), contents_by_scene(data.scenes)
    verdicts = read_verdicts(known.out, *made_from, forget=True) if known.out.exists() else {}
    write_verdicts(verdicts, *made_from, known.out)  # fails now rather than after an hour
    problems = check(data, verdicts, lambda: write_verdicts(verdicts, *made_from, known.out), known.workers)
    enough = report(data, verdicts, known.out)
    for problem in problems:
        fail(problem)
    return 0 if enough and not problems else 1


def check(data: MultiCamDataset, verdicts: Verdicts, keep: Callable[[], None], workers: int) -> list[str]:
    """Add the missing verdicts, calling `keep` regularly to save them; return the errors of items left without one."""
    measurer, problems = PoseMeasurer(workers), []
    names = map(data.name_of, range(len(data)))
    left = [number for number, (scene, camera) in enumerate(names) if camera not in verdicts.get(scene, {})]
    step = AT_ONCE * max(1, workers)
    with tqdm(total=len(left), unit="item") as bar:
        for start in range(0, len(left), step):
            conditions: list[Condition] = []
            for number in left[start : start + step]:
                try:
                    conditions.append(data.condition(number))
                except ValueError as error:
                    problems.append(str(error))
            for condition, found in zip(conditions, measurer.sources(conditions), strict=True):
                if found.failed:
                    problems.append(f"{condition.scene} {condition.target_camera}: {found.fault}")
                else:
                    verdicts.setdefault(condition.scene, {})[condition.target_camera] = found.fault
            keep()
            bar.update(len(left[start : start + step]))
    measurer.pool.close()
    return problems


def report(data: MultiCamDataset, verdicts: Verdicts, out: Path) -> bool:
    names = [data.name_of(number) for number in range(len(data))]
    found = {(scene, camera): verdicts[scene][camera] for scene, camera in names if camera in verdicts.get(scene, {})}
    wrong = {name: text for name, text in found.items() if text}
    for (scene, camera), text in wrong.items():
        print(f"{scene} {camera}: {text}")
    print(f"{len(found) - len(wrong)} of {len(names)} items are usable, {len(wrong)} are not: {out}", flush=True)
    enough = len(found) - len(wrong) >= LEAST_USABLE * len(found)
    useless = sorted({scene for scene, _ in found} - {scene for scene, _ in found.keys() - wrong.keys()})
    if useless:
        print(f"no item is usable of {', '.join(useless[:SHOWN])}{' and others' * (len(useless) > SHOWN)}")
    if not enough:
        print(f"fewer than {LEAST_USABLE:.0%} are usable: do not train before you know why")
    if useless or not enough:
        print(CAUSES)
    return enough


if __name__ == "__main__":
    sys.exit(main())
