"""Train under random faults for an hour, and check that every run ends bit for bit where an undisturbed one does.

    python tools/dev/soak.py --minutes 60 --out soak

A shrunk tiny recipe is trained once undisturbed on `--ranks` processes. Then it is trained again and again with a
checkpoint after every epoch: each launch meets one random fault, dies from it or not, and is relaunched until the run
is complete. Weights, optimizer moments and all metrics except times must equal the undisturbed run's, no process may be
left over, and no launch may exceed its time limit. The faults:

    kill        SIGKILL to a rank            kill_all    to every rank at once
    kill_save   to a rank while a checkpoint is written
    launcher    SIGKILL to torchrun          worker      to a loader process of a rank
    term        SIGTERM to a rank: it finishes its epoch, saves and exits with code 0
    nan         inside a rank, the gradient becomes NaN before the optimizer step
    reward      every reward raises          slow        the rewards take 20 seconds

OUT/soak.jsonl gets a line per launch, OUT/summary.json the summary. Exit code: 0, 1 when anything was lost, 2 for
invalid options, or when the undisturbed run used up `--minutes` and nothing was tested.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

from tools.common import fail, launcher, make_parser
from tools.dev.same_numbers import BARE, differing, metrics, tensors
from tools.run_folder import read_run

ROOT = Path(__file__).resolve().parents[2]
INSIDE = {"nan": "gradient", "reward": "reward", "slow": "very slow"}  # names in `tests/saboteur.py`
OUTSIDE = ("kill", "kill_all", "kill_save", "launcher", "worker", "term")
KNOBS = BARE | {
    "device": "cpu",  # accelerators sum in varying order: runs would not be equal bit for bit
    "num_threads": 1,
    "data.num_workers": 1,
    "sample.num_steps": 4,
    "sample.sde_steps": "0,1,2",
    "sample.sde_window": 0,
    "train.max_bad_steps": 0,  # a skipped step would change the result
    "eval.num_steps": 2,
    "checkpoint.every": 1,
    "distributed.dead_s": 15,
}
START_BOUND_S = 300.0  # for a launch under a fault, until its last process is gone


@dataclasses.dataclass
class Started:
    """The outcome of one launch."""

    fault: str
    at: float  # when it was due: seconds after the launch, or epoch of the process
    struck: bool = False
    code: int | None = None  # exit code of torchrun
    seconds: float = 0.0  # until every process was gone
    gone_s: float | None = None  # from the fault until every process was gone
    saved: int = 0  # finished epochs in the newest checkpoint
    done: bool = False  # the run is complete
    left: int = 0  # processes left over, which the soak killed


class Family:
    """A launcher and all its descendants, orphans included."""

    def __init__(self, launcher: subprocess.Popen[bytes]) -> None:
        self.launcher = launcher
        self.seen: dict[int, psutil.Process] = {launcher.pid: psutil.Process(launcher.pid)}

    def look(self) -> None:
        for process in list(self.seen.values()):
            for child in _ask(process.children, [], recursive=True):
                self.seen.setdefault(child.pid, child)

    def alive(self) -> list[psutil.Process]:
        running = [process for process in self.seen.values() if process.is_running()]
        return [process for process in running if _ask(process.status, psutil.STATUS_ZOMBIE) != psutil.STATUS_ZOMBIE]

    def ranks(self) -> list[psutil.Process]:
        return [process for process in self.alive() if _ask(process.ppid, -1) == self.launcher.pid]

    def workers(self) -> list[psutil.Process]:
        ranks = {rank.pid for rank in self.ranks()}
        found = [process for process in self.alive() if _ask(process.ppid, -1) in ranks]
        return [process for process in found if "spawn_main" in " ".join(_ask(process.cmdline, []))]


def _ask(method: Any, gone: Any, **given: Any) -> Any:
    """Call a method of a process; return `gone` if the process no longer exists."""
    try:
        return method(**given)
    except psutil.NoSuchProcess:
        return gone


class Soak:
    """Launches runs and faults; `args` are the command's options."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.draw = args, random.Random(args.seed)
        self.begun = time.monotonic()
        self.epoch_s, self.startup_s = 5.0, 20.0  # measured by `peace`

    def words(self, name: str) -> list[str]:
        knobs = KNOBS | {"num_epochs": self.args.epochs, "run_name": name, "resume": "auto"}
        knobs |= {"output_root": self.args.out / "runs", "data.root": self.args.out / "world"}
        knobs |= {"model.path": ROOT / "assets" / "tiny_recam", "seed": self.args.seed}
        program = [*launcher(self.args.ranks), str(ROOT / "tests" / "saboteur.py")]
        recipe = ["--config", f"{ROOT}/config/grpo.py:tiny_recam"]
        return [*program, *recipe, *(f"--config.{knob}={value}" for knob, value in knobs.items())]

    def start(self, name: str, fault: str) -> Started:
        """Launch or resume a run, inject the fault, and wait until all its processes have ended."""
        saved = self.saved(name)
        left = self.args.epochs - saved
        inside = fault in INSIDE and left > 0  # a run killed after its last epoch has none left to disturb
        rank, epoch = self.draw.randrange(self.args.ranks), self.draw.randrange(min(left, 3)) if inside else 0
        started = Started(fault, float(epoch))
        if fault in OUTSIDE:
            started.at = round(self.draw.uniform(0.3 * self.startup_s, self.startup_s + min(left, 4) * self.epoch_s), 2)
        plan = {"FAULT": INSIDE[fault] if inside else "", "FAULTY_RANK": str(rank), "FAULTY_EPOCH": str(saved + epoch)}
        environment = os.environ | plan | {"OMP_NUM_THREADS": "1"}
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
        """Send the fault's signal if its target exists; return whether it was sent.

        `kill_save` waits for a checkpoint being written; faults of ranks and workers wait for all ranks to run.
        """
        if fault == "kill_save" and not list(self.folder(name).glob("checkpoint_*.tmp-*")):
            return False
        if fault == "launcher":
            victims = [psutil.Process(family.launcher.pid)]
        else:
            victims = family.workers() if fault == "worker" else family.ranks()
            if not victims or len(family.ranks()) < self.args.ranks:
                return False
        for victim in victims if fault == "kill_all" else [self.draw.choice(victims)]:
            victim.send_signal(signal.SIGTERM if fault == "term" else signal.SIGKILL)
        return True

    def folder(self, name: str) -> Path:
        return Path(self.args.out, "runs", name, "checkpoints")

    def saved(self, name: str) -> int:
        steps = [path.name.removeprefix("checkpoint_") for path in self.folder(name).glob("checkpoint_*")]
        return max((int(step) for step in steps if step.isdigit()), default=0)

    def peace(self) -> None:
        begun = time.monotonic()
        started = self.start("peace", "none")
        assert started.done, f"the undisturbed run failed: {started}, see {self.args.out}/peace.log"
        seconds = read_run(self.folder("peace").parent, live=True).values("time/epoch_s")
        self.epoch_s = max(0.5, sum(seconds) / self.args.epochs)
        self.startup_s = max(5.0, time.monotonic() - begun - sum(seconds))
        self.note({"run": "peace", "epoch_s": round(self.epoch_s, 2), "startup_s": round(self.startup_s, 1)})

    def trouble(self, number: int) -> dict[str, Any]:
        """Train one run, restarted after every fault until it is complete; return a record of it.

        It is compared with the undisturbed run, and its folder is deleted if it is equal.
        """
        name, starts, same = f"trouble_{number}", [], ""
        while not starts or not starts[-1].done:
            fault = self.draw.choice(self.args.faults)
            # When the time is over, the run is completed without further faults.
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
        return time.monotonic() - self.begun > 60 * self.args.minutes

    def note(self, row: dict[str, Any]) -> None:
        line = json.dumps({"minute": round((time.monotonic() - self.begun) / 60, 2), **row})
        print(line, flush=True)
        with (self.args.out / "soak.jsonl").open("a") as file:
            file.write(line + "\n")


def difference(one: Path, other: Path) -> str:
    """Return how two finished runs differ in newest checkpoint, adapter or metrics except times, "" if they do not."""
    found = differing("tensors", tensors(one), tensors(other))
    return "; ".join(found + differing("metrics", metrics(one), metrics(other)))


def options() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="output folder, must not exist yet")
    add("--minutes", type=float, default=60.0, help="after which no new run and no new fault starts")
    add("--epochs", type=int, default=8, help="per run")
    add("--ranks", type=int, default=2, help="processes per run")
    add("--seed", type=int, default=0, help="of the faults and of the runs")
    add("--faults", nargs="+", default=[*OUTSIDE, *INSIDE], choices=[*OUTSIDE, *INSIDE], help="which to inject")
    return parser


def main(words: Sequence[str] | None = None) -> int:
    args = options().parse_args(words)
    if args.out.exists() or args.epochs < 2 or args.ranks < 1:
        return fail(f"--out {args.out} must not exist, --epochs be at least 2, --ranks 1")
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
        "faults": struck.total(),
        "by_fault": dict(struck),
        "slowest_end_s": max((result["slowest_end_s"] for result in results), default=0.0),
        "lost": lost,
        "minutes": round((time.monotonic() - soak.begun) / 60, 1),
    }
    (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    soak.note(summary)
    if not results:
        return fail("the undisturbed run used up --minutes, no fault was tried; allow more")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
