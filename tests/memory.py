"""Resident memory of this process, read from /proc: Linux only, as getrusage may report the parent process's peak."""

from pathlib import Path


def resident_mib() -> float:
    """Return this process's resident MiB, and reset its peak."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_mib("VmRSS")


def peak_mib() -> float:
    """Return this process's peak resident MiB since `resident_mib`."""
    return _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
