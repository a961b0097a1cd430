"""The stopwatch: repetitions of calls in turns, the device synchronised, and where the time of one call goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from flow_grpo.runtime import device as device_api

LONGEST = 16  # kernels named in a breakdown
SLICE_S = 20.0  # repeats of one figure end here, so that a slow device still reaches the last part
Call = Callable[[], object]


def timed(call: Call, device: torch.device) -> float:
    """Return the seconds of one call, the device synchronised at both ends."""
    device_api.synchronize(device)
    begun = time.perf_counter()
    call()
    device_api.synchronize(device)
    return time.perf_counter() - begun


def interleaved(
    calls: Mapping[str, Call], device: torch.device, repeats: int, *, slice_s: float = float("inf")
) -> dict[str, list[float]]:
    """Return the seconds of every call in each turn.

    All calls take part in a turn, because the speed of a shared machine drifts: compare them within a turn. There are
    at most `repeats` turns, after one to warm up; the last is the one that exceeds `slice_s` seconds in all.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            spent = timed(call, device)
            seconds[name] += [spent] if turn else []  # the first warms up
        if sum(map(sum, seconds.values())) > slice_s:
            break
    return seconds


def median_ratio(seconds: Mapping[str, list[float]], name: str, base: str) -> float:
    return statistics.median(one / other for one, other in zip(seconds[name], seconds[base], strict=True))


def measure(call: Call, device: torch.device, repeats: int) -> dict[str, Any]:
    """Return the median seconds of a call, and the highest memory of all calls in GiB.

    A CPU process has one peak for its whole life, loading of libraries included.
    """
    device_api.reset_peak_memory(device)
    (seconds,) = interleaved({"": call}, device, repeats, slice_s=SLICE_S).values()
    memory = device_api.memory(device)
    return {
        "seconds": statistics.median(seconds),
        "repeats": len(seconds),
        "peak_gib": memory.get("peak"),
        "reserved_gib": memory.get("reserved"),
    }


def breakdown(call: Call, device: torch.device) -> dict[str, Any]:
    """Return where the time of one call goes: the share in which the device works, and its longest kernels.

    `kernels` holds (name, milliseconds, share of all kernels' time), longest first.
    """
    activity = getattr(torch.profiler.ProfilerActivity, device.type.upper(), None)
    if activity is None:
        return {"unavailable": f"torch's own profiler does not know {device.type}"}
    device_api.synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profile:
        seconds = timed(call, device)
    spent: dict[str, float] = {}
    for row in profile.key_averages():
        own = row.self_cpu_time_total if device.type == "cpu" else row.self_device_time_total
        spent[row.key] = spent.get(row.key, 0.0) + own / 1e6
    total = sum(spent.values())
    if not total:
        return {"unavailable": "the profiler saw no kernels"}
    longest = sorted(spent.items(), key=lambda pair: -pair[1])[:LONGEST]
    return {
        "busy_share": total / seconds,
        "kernels": [(name[:100], 1e3 * own, own / total) for name, own in longest],
    }
