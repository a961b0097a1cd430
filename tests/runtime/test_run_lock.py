"""A run's folder serves one process at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys

import pytest

from flow_grpo.runtime.checkpoints.run_lock import LOCK, RunLock

HOLD = """
import sys
from pathlib import Path
from flow_grpo.runtime.checkpoints.run_lock import RunLock
held = RunLock(Path(sys.argv[1]))
held.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_by_name_until_the_first_has_ended(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdin is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=rf"run is in use by process {holder.pid} on .*another --config.run_name"):
        RunLock(tmp_path / "run").take()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    holder.stdin.close()
    ours = RunLock(tmp_path / "run")
    ours.take()
    ours.take()
    with pytest.raises(ValueError, match="in use"):
        RunLock(tmp_path / "run").take()
    ours.release()
    RunLock(tmp_path / "run").take()
    assert str(os.getpid()) in (tmp_path / "run" / LOCK).read_text()


def test_where_there_are_no_locks_the_run_goes_on_with_a_warning(tmp_path, monkeypatch, caplog):
    def none(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    RunLock(tmp_path).take()
    assert "cannot be locked" in caplog.text
    assert str(os.getpid()) in (tmp_path / LOCK).read_text()  # by which a user finds it
