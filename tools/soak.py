"""Train for an hour under faults, and see whether the run ends where an undisturbed one does, bit for bit.

    python tools/soak.py --minutes 60 --out soak

The tiny recipe, shrunk, is trained once in peace on `--ranks` processes. Then it is trained again and again with a
checkpoint after every epoch: each start meets one fault drawn by chance, ends by it or not, and is started again until
the run is complete. Weights, moments and all metrics but times have to be those of the peaceful run, no process may be
left over, and no start may take longer than its bound. The faults:

    kill        SIGKILL to a rank            kill_all    to every rank at once
    kill_save   to a rank while a checkpoint is written
    launcher    SIGKILL to torchrun          worker      to a loader process of a rank
    term        SIGTERM to a rank: it finishes its epoch, saves and exits with code 0
    nan, reward, slow   inside a rank, see `tools/dev/soak_rank.py`

A line for every start goes to OUT/soak.jsonl, the summary to OUT/summary.json. Exit code: 0, 1 when anything was lost,
2 for options that cannot work, or when the run in peace used up `--minutes` and nothing was tested.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[1]
INSIDE = ("nan", "reward", "slow")
OUTSIDE = ("kill", "kill_all", "kill_save", "launcher", "worker", "term")
KNOBS = {
    "device": "cpu",  # an accelerator adds in an order of its own: nothing would be the same bit for bit
    "max_minutes": 0,
    "log_videos_every": 0,
    "trackers": "",
    "num_threads": 1,
    "data.tiny_world": "unit_test",
    "data.num_workers": 1,
    "sample.k": 4,
    "sample.train_batch_size": 4,
    "sample.num_batches_per_epoch": 2,
    "sample.num_steps": 4,
    "sample.sde_steps": "0,1,2",
    "train.batch_size": 4,
    "train.max_bad_steps": 0,  # left out, a step would be missing
    "eval.every": 0,
    "eval.num_conditions": 4,
    "eval.num_steps": 2,
    "eval.videos": 0,
    "eval.gold": "",
    "checkpoint.every": 1,
    "distributed.dead_s": 15,
}
START_BOUND_S = 300.0  # a start under a fault, to the last process gone


@dataclasses.dataclass
class Started:
    """What became of one start.

    Attributes:
        fault: its name.
        at: where it struck: seconds after the start, or the epoch of the process.
        struck: whether it did.
        code: torchrun's exit code.
        seconds: until every process was gone.
        gone_s: from the blow to the last process gone, or None.
        saved: finished epochs of the newest checkpoint afterwards.
        done: whether the run is complete.
        left: processes that were left over, which were killed then.
    """

    fault: str
    at: float
    struck: bool = False
    code: int | None = None
    seconds: float = 0.0
    gone_s: float | None = None
    saved: int = 0
    done: bool = False
    left: int = 0


class Family:
    """A launcher and all processes that it or its descendants start."""

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        self.launcher = launcher
        self.seen: dict[int, psutil.Process] = {launcher.pid: psutil.Process(launcher.pid)}

    def look(self) -> None:
        """Note who is new."""
        for process in list(self.seen.values()):
            try:
                for child in process.children(recursive=True):
                    self.seen.setdefault(child.pid, child)
            except psutil.NoSuchProcess:
                continue

    def alive(self) -> list[psutil.Process]:
        """Return who still runs."""
        return [process for process in self.seen.values() if _runs(process)]

    def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks."""
        return [process for process in self.alive() if _parent(process) == self.launcher.pid]

    def workers(self) -> list[psutil.Process]:
        """Return the ranks' loader processes."""
        ranks = {rank.pid for rank in self.ranks()}
        found = [process for process in self.alive() if _parent(process) in ranks]
        return [process for process in found if any("spawn_main" in word for word in _words(process))]


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _parent(process: psutil.Process) -> int:
    try:
        return int(process.ppid())
    except psutil.NoSuchProcess:
        return -1


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


class Soak:
    """One soak.

    Args:
        args: the options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.draw = args, random.Random(args.seed)
        self.begun = time.monotonic()
        self.log = args.out / "soak.jsonl"
        self.epoch_s, self.startup_s = 5.0, 20.0

    def words(self, name: str) -> list[str]:
        """Return the command of a start."""
        knobs = KNOBS | {"num_epochs": self.args.epochs, "run_name": name, "resume": "auto"}
        knobs |= {"output_root": self.args.out / "runs", "data.root": self.args.out / "world"}
        knobs |= {"model.path": ROOT / "assets" / "tiny_recam", "seed": self.args.seed}
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program = [f"--nproc_per_node={self.args.ranks}", str(ROOT / "tools" / "dev" / "soak_rank.py")]
        recipe = ["--config", f"{ROOT}/config/grpo.py:tiny_recam"]
        return [*launcher, *program, *recipe, *(f"--config.{knob}={value}" for knob, value in knobs.items())]

    def start(self, name: str, fault: str) -> Started:
        """Start the run, let the fault happen, and wait until everybody is gone."""
        left = self.args.epochs - self.saved(name)
        inside = fault in INSIDE and left > 0  # of a run killed after its last epoch only the end is left
        plan = {"fault": fault if inside else "none", "epoch": 0, "rank": self.draw.randrange(self.args.ranks)}
        if inside:
            plan["epoch"] = self.draw.randrange(min(left, 3))
        started = Started(fault, float(plan["epoch"]))
        if fault in OUTSIDE:
            started.at = round(self.draw.uniform(0.3 * self.startup_s, self.startup_s + min(left, 4) * self.epoch_s), 2)
        environment = os.environ | {"FLOW_GRPO_SOAK": json.dumps(plan), "OMP_NUM_THREADS": "1"}
        begun = time.monotonic()
        with (self.args.out / f"{name}.log").open("ab") as output:
            launcher = subprocess.Popen(
                self.words(name), stdout=output, stderr=output, env=environment, start_new_session=True
            )
            self.watch(Family(launcher), started, name, begun)
        started.struck = started.struck or (inside and (started.code != 0 or fault == "slow"))
        started.saved, started.seconds = self.saved(name), round(time.monotonic() - begun, 1)
        started.done = started.code == 0 and started.saved == self.args.epochs
        return started

    def watch(self, family: Family, started: Started, name: str, begun: float) -> None:
        """Follow a start to its end, striking from outside when it is time."""
        struck_at = 0.0
        while time.monotonic() - begun < START_BOUND_S:
            family.look()
            code = family.launcher.poll()
            started.code = code if started.code is None else started.code
            if code is not None and not family.alive():
                break
            due = started.fault in OUTSIDE and not started.struck and time.monotonic() - begun > started.at
            if due and self.strike(started.fault, family, name):
                started.struck, struck_at = True, time.monotonic()
            time.sleep(0.02)
        if struck_at:
            started.gone_s = round(time.monotonic() - struck_at, 1)
        for process in family.alive():
            started.left += 1
            process.kill()
        family.launcher.wait()

    def strike(self, fault: str, family: Family, name: str) -> bool:
        """Do it; return whether there was anybody to do it to."""
        if fault == "kill_save" and not list(self.folder(name).glob("checkpoint_*.tmp-*")):
            return False
        chosen: Callable[[], list[psutil.Process]] = family.workers if fault == "worker" else family.ranks
        victims = [psutil.Process(family.launcher.pid)] if fault == "launcher" else chosen()
        if not victims or (fault != "launcher" and len(family.ranks()) < self.args.ranks):
            return False
        for victim in victims if fault == "kill_all" else [self.draw.choice(victims)]:
            victim.send_signal(signal.SIGTERM if fault == "term" else signal.SIGKILL)
        return True

    def folder(self, name: str) -> Path:
        """Return where a run's checkpoints are."""
        return Path(self.args.out, "runs", name, "checkpoints")

    def saved(self, name: str) -> int:
        """Return the finished epochs of a run's newest checkpoint."""
        steps = [path.name.removeprefix("checkpoint_") for path in self.folder(name).glob("checkpoint_*")]
        return max((int(step) for step in steps if step.isdigit()), default=0)

    def peace(self) -> None:
        """Train undisturbed, and learn how long that takes."""
        begun = time.monotonic()
        started = self.start("peace", "none")
        assert started.done, f"the undisturbed run failed: {started}, see {self.args.out}/peace.log"
        seconds = [row.get("time/epoch_s", 0.0) for row in metrics(self.folder("peace").parent)]
        self.epoch_s = max(0.5, sum(seconds) / self.args.epochs)
        self.startup_s = max(5.0, time.monotonic() - begun - sum(seconds))
        self.note({"run": "peace", "epoch_s": round(self.epoch_s, 2), "startup_s": round(self.startup_s, 1)})

    def trouble(self, number: int) -> dict[str, Any]:
        """Train once more under faults, to the end; return what became of it."""
        name, starts, same = f"trouble_{number}", [], ""
        while not starts or not starts[-1].done:
            fault = self.draw.choice(self.args.faults)
            # The last words of a soak that is over are a start in peace.
            starts.append(self.start(name, "none" if self.over() and len(starts) > 1 else fault))
            self.note({"run": name, **dataclasses.asdict(starts[-1])})
            if len(starts) > 20 * self.args.epochs or starts[-1].left:
                break
        else:
            same = difference(self.folder("peace").parent, self.folder(name).parent)
        complete = starts[-1].done
        result = {"run": name, "starts": len(starts), "complete": complete, "difference": same}
        result["struck"] = dict(Counter(start.fault for start in starts if start.struck))
        result["left"] = sum(start.left for start in starts)
        result["slowest_end_s"] = max((start.gone_s or 0.0 for start in starts if start.fault != "term"), default=0.0)
        self.note(result)
        if complete and not same:
            shutil.rmtree(self.folder(name).parent)
        return result

    def over(self) -> bool:
        """Tell whether the time is used up."""
        return time.monotonic() - self.begun > 60 * self.args.minutes

    def note(self, row: dict[str, Any]) -> None:
        """Print and keep a line."""
        line = json.dumps({"minute": round((time.monotonic() - self.begun) / 60, 2), **row})
        print(line, flush=True)
        with self.log.open("a") as file:
            file.write(line + "\n")


def metrics(run: Path) -> list[dict[str, float]]:
    """Return the rows of a run's metrics."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def difference(one: Path, other: Path) -> str:
    """Return in what two finished runs differ, or "": newest checkpoint, adapter and metrics, but for times."""
    for name in ("checkpoints", "adapter"):
        ends = [max((run / name).glob("checkpoint_*")) if name == "checkpoints" else run / name for run in (one, other)]
        for file in sorted(ends[0].glob("*.safetensors")):
            if file.read_bytes() != (ends[1] / file.name).read_bytes():
                return f"{name}/{file.name}"
    rows = [[_numbers(row) for row in metrics(run)] for run in (one, other)]
    for first, second in zip(*rows, strict=False):
        if first != second:
            return f"metrics of step {first['step']}: {sorted(n for n in first if first[n] != second.get(n))[:3]}"
    return "" if len(rows[0]) == len(rows[1]) else f"{len(rows[0])} rows of metrics and {len(rows[1])}"


def _numbers(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(("time/", "system/"))}


def options() -> argparse.ArgumentParser:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder, which must not exist yet")
    add("--minutes", type=float, default=60.0, help="after which no further run begins and no further fault strikes")
    add("--epochs", type=int, default=8, help="of every run")
    add("--ranks", type=int, default=2, help="processes of a run")
    add("--seed", type=int, default=0, help="of the faults and of the runs")
    add("--faults", nargs="+", default=[*OUTSIDE, *INSIDE], choices=[*OUTSIDE, *INSIDE], help="which may happen")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    """Soak, and return the exit code."""
    args = options().parse_args(words)
    if args.out.exists() or args.epochs < 2 or args.ranks < 1:
        print(f"error: --out {args.out} must not exist, --epochs be at least 2, --ranks 1", file=sys.stderr, flush=True)
        return 2
    args.out = args.out.absolute()
    args.out.mkdir(parents=True)
    soak, results = Soak(args), []
    soak.peace()
    while not soak.over():
        results.append(soak.trouble(len(results)))
        if results[-1]["difference"] or not results[-1]["complete"]:
            break
    struck: Counter[str] = sum((Counter(result["struck"]) for result in results), Counter())
    lost = [result for result in results if result["difference"] or result["left"] or not result["complete"]]
    summary = {
        "runs": len(results),
        "starts": sum(result["starts"] for result in results),
        "faults": sum(struck.values()),
        "by_fault": dict(struck),
        "slowest_end_s": max((result["slowest_end_s"] for result in results), default=0.0),
        "lost": lost,
        "minutes": round((time.monotonic() - soak.begun) / 60, 1),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    soak.note(summary)
    if not results:
        print("error: the run in peace used up --minutes, no fault was tried; allow more", file=sys.stderr, flush=True)
        return 2
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
