"""What a run has cost and where: seconds by phase, work, throughput, memory, and what it ran on."""

from __future__ import annotations

import math
from statistics import median

from flow_grpo.reporting.metric_names import OUTSIDE_EPOCHS, phase_of
from tools.run_folder import Run
from tools.run_report.words import NOTHING, duration, number, percent

SHOWN_VERSIONS = (
    *("torch", "torch-npu", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy"),
    *("av", "opencv-python-headless", "pycolmap", "flow-grpo"),
)


def phases(run: Run) -> list[tuple[str, float, float, float]]:
    """Return (phase, seconds, those of an epoch, share of the run), the longest first; NaN for what is in no epoch."""
    totals = {phase: sum(run.values(name)) for name in sorted(run.columns) if (phase := phase_of(name))}
    every, epochs = sum(totals.values()) or 1.0, max(1, len(run.epochs))
    return [
        (name, seconds, math.nan if name in OUTSIDE_EPOCHS else seconds / epochs, seconds / every)
        for name, seconds in sorted(totals.items(), key=lambda phase: -phase[1])
    ]


def seconds_of(run: Run) -> float:
    """Return the seconds of the epochs on record, as in curves.png; else those of the summary, evaluations included."""
    epochs = run.values("time/epoch_s")
    return sum(epochs) if epochs or run.summary is None else run.summary.train_seconds


def typical(run: Run, name: str) -> float:
    return median(run.values(name) or [math.nan])


def largest(run: Run, name: str) -> float:
    return max(run.values(name), default=math.nan)


def figures(run: Run) -> list[tuple[str, str, str]]:
    """Return (what, value, what that means where it is not plain) of the work of a run."""
    kinds = [
        f"{name.removeprefix('system/sent_').removesuffix('_gib')} {number(gib * 1024)} MiB"
        for name in sorted(run.columns)
        if name.startswith("system/sent_") and (gib := typical(run, name))
    ]
    memory, total = largest(run, "system/memory_peak_gib"), largest(run, "system/memory_total_gib")
    mfu, rate = typical(run, "system/mfu"), typical(run, "system/tflops_per_device")
    work = number(largest(run, "system/forward_equivalents"))
    return [
        ("time in epochs", duration(seconds_of(run)), ""),
        ("epochs", f"{run.finished} of {run.config.num_epochs}", ""),
        ("samples a second", number(typical(run, "system/samples_per_s")), ""),
        ("forward-equivalents", work, "transformer work so far; one forward pass of one sample is 1"),
        (
            "MFU",
            f"{percent(mfu)} ({number(rate)} TFLOP/s a device)" if math.isfinite(mfu) else NOTHING,
            "share of the device's peak arithmetic rate that the transformer reached",
        ),
        ("peak memory", f"{number(memory)} of {number(total)} GiB" if math.isfinite(memory) else NOTHING, ""),
        ("sent by a rank in an epoch", ", ".join(kinds) or NOTHING, ""),
    ]


def device(run: Run) -> str:
    return run.start.device.split(";")[0].removeprefix("device ")


def versions(run: Run) -> dict[str, str]:
    known = {name.lower().replace("_", "-"): version for name, version in run.start.versions.items()}
    return {"python": run.start.python} | {name: known[name] for name in SHOWN_VERSIONS if name in known}
