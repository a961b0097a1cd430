r"""Find out, before anything is trained, which sources `pose_rot` and `pose_trans` can measure by.

    python tools/check_sources.py --config config/grpo.py:my_recam_8npu --out usable.json
    torchrun ... train_grpo.py --config config/grpo.py:my_recam_8npu --config.data.exclude=usable.json

A source is usable when enough of it can be triangulated, its own held-out frames are found where they are, and at least
half of the true view is found as well (docs/camera_rewards.md). Of an item that is not, samples would be rolled out and
then have no value; excluded, it is never drawn. The file holds a verdict on every item of the training split, "" or
what is wrong; it is written as it grows, and the same command goes on after an interruption. Items are known by their
names: after videos or cameras were replaced, remove the file. Exit code: 0, 1 when an item could not be read or
measured (it has no verdict then and is tried again next time), 2 for a setting that cannot work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tqdm import tqdm

from flow_grpo.algorithm.build import dataset
from flow_grpo.data.exclude import Verdicts, read_verdicts, settings_of, write_verdicts
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.records import Condition
from flow_grpo.rewards.camera.pose import PoseMeasurer
from flow_grpo.rewards.process_pool import usable_cores
from flow_grpo.settings.loading import load_config

AT_ONCE = 4  # items of each process between two writes of the file


def main(words: Sequence[str] | None = None) -> int:
    """Check the items that have no verdict yet, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE:RECIPE", help="its knobs may follow")
    parser.add_argument("--out", type=Path, required=True, help="the file of verdicts")
    parser.add_argument("--workers", type=int, default=usable_cores(), help="processes; 0: none but this one")
    known, overrides = parser.parse_known_args(words)
    try:
        if known.workers < 0:
            raise ValueError(f"--workers is {known.workers}, must be at least 0 (0: check in this process)")
        config = load_config(known.config, [*overrides, "--config.data.exclude="])
        data, settings = dataset(config, config.data.train_split), settings_of(config.data)
        verdicts = read_verdicts(known.out, settings) if known.out.exists() else {}
        write_verdicts(verdicts, settings, known.out)  # now, rather than after an hour
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        return 2
    problems = check(data, verdicts, lambda: write_verdicts(verdicts, settings, known.out), known.workers)
    report(data, verdicts, known.out)
    for problem in problems:
        print("error:", problem, file=sys.stderr, flush=True)
    return 1 if problems else 0


def check(data: MultiCamDataset, verdicts: Verdicts, keep: Callable[[], None], workers: int) -> list[str]:
    """Add the verdicts that are missing, and return why items are still without one.

    Args:
        data: whose items are looked at.
        verdicts: added to.
        keep: called again and again, to write them down.
        workers: processes.
    """
    measurer, problems = PoseMeasurer(workers), []
    left = [number for number in range(len(data)) if not known(data, number, verdicts)]
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


def known(data: MultiCamDataset, number: int, verdicts: Verdicts) -> bool:
    """Tell whether an item has a verdict."""
    scene, camera = data.name_of(number)
    return camera in verdicts.get(scene, {})


def report(data: MultiCamDataset, verdicts: Verdicts, out: Path) -> None:
    """Print how many items are usable, and what is wrong with the others."""
    names = [data.name_of(number) for number in range(len(data))]
    found = {(scene, camera): verdicts[scene][camera] for scene, camera in names if camera in verdicts.get(scene, {})}
    wrong = {name: text for name, text in found.items() if text}
    for (scene, camera), text in wrong.items():
        print(f"{scene} {camera}: {text}")
    print(f"{len(found) - len(wrong)} of {len(names)} items are usable, {len(wrong)} are not: {out}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
