"""Times starts, as ratios: `--help`, and a run up to its first rollout, beside importing its libraries."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from flow_grpo.reporting.metric_files import read_rows

ROOT = Path(__file__).resolve().parents[3]
REPEATS = 3
TIMED = "import time; begun = time.perf_counter(); {}; print(time.perf_counter() - begun)"
PACKAGES = "import torch, diffusers, transformers"  # which load their classes on demand
CLASSES = (
    "import torch; from diffusers import AutoencoderKLWan, WanTransformer3DModel; "
    "from transformers import AutoTokenizer, UMT5EncoderModel"
)
RECIPE = ("train_grpo.py", "--config", "config/grpo.py:tiny_recam")
SHORT = {  # what follows the first rollout, and the evaluation before it, which does not count
    "device": "cpu",
    "num_epochs": 1,
    "sample.num_batches_per_epoch": 1,
    "eval.num_conditions": 2,
    "eval.signal_groups": 0,
    "eval.videos": 1,
    "trackers": "()",
    "run_name": "start",
}


def measure(repeats: int = REPEATS, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Return medians of seconds, and of ratios within a turn: the speed of a shared machine drifts.

    `help_over_torch` divides `train_grpo.py --help` by `python -c "import torch"`. `first_rollout` is the time from a
    run's begin to its first epoch, without the evaluation before it; `doctor_rollout` the same with `doctor=off`, near
    the moment when the fast doctor otherwise rolls its batch out. They are divided by the time of importing torch,
    diffusers and transformers: the `packages`, which hold hardly a class then, or the `classes` that the recipe's model
    is made of.

    Args:
        repeats: measured turns, after one to warm up.
        overrides: further words of the runs' command lines.
    """
    turns = [_turn(overrides) for _ in range(repeats + 1)][1:]
    return {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}


def _turn(overrides: Sequence[str]) -> dict[str, float]:
    """Return the seconds and ratios of one turn."""
    seconds = {
        "torch": _wall("-c", "import torch"),
        "help": _wall("train_grpo.py", "--help"),
        "packages": float(_output("-c", TIMED.format(PACKAGES))),
        "classes": float(_output("-c", TIMED.format(CLASSES))),
        "first_rollout": first_rollout(overrides),
        "doctor_rollout": first_rollout([*overrides, "--config.doctor=off"]),
    }
    pairs = [
        ("help", "torch"),
        *((way, base) for way in ("first_rollout", "doctor_rollout") for base in ("packages", "classes")),
    ]
    ratios = {f"{way}_over_{base}": seconds[way] / seconds[base] for way, base in pairs}
    return {f"{name}_s": value for name, value in seconds.items()} | ratios


def first_rollout(overrides: Sequence[str]) -> float:
    """Train for one epoch in a temporary folder, and return the seconds before its rollout.

    Raises:
        RuntimeError: the run failed.
    """
    with tempfile.TemporaryDirectory() as root:
        knobs = SHORT | {"output_root": root}
        _output(*RECIPE, *(f"--config.{name}={value}" for name, value in knobs.items()), *overrides)
        return read_rows(Path(root) / "start" / "metrics.jsonl")[0]["time/start_s"]


def _wall(*words: str) -> float:
    begun = time.perf_counter()
    _output(*words)
    return time.perf_counter() - begun


def _output(*words: str) -> str:
    """Return what Python prints, run with these words in the project's folder on one thread."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(words)} exits with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
