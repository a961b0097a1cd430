"""A run's folder serves one process at a time."""

import errno
import os
import subprocess
import sys

import filelock
import pytest

from flow_grpo.runtime.checkpoints.run_lock import LOCK, RunLock, is_held

HOLD = """
import sys
from pathlib import Path
from flow_grpo.runtime.checkpoints.run_lock import RunLock
held = RunLock(Path(sys.argv[1]))
held.take()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_with_the_holders_name_until_the_first_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=rf"run is in use by process {holder.pid} on .*another --config.run_name"):
            RunLock(tmp_path / "run").take()
        holder.kill()
    ours = RunLock(tmp_path / "run")
    ours.take()
    ours.take()
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()} on"):
        RunLock(tmp_path / "run").take()
    ours.release()
    RunLock(tmp_path / "run").take()


def test_without_file_system_locks_the_run_continues_with_a_warning_and_its_lock_file(tmp_path, monkeypatch, caplog):
    def unsupported(self):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(filelock.FileLock, "acquire", unsupported)
    RunLock(tmp_path).take()
    assert "cannot be locked" in caplog.text
    assert (tmp_path / LOCK).read_text().startswith(f"process {os.getpid()} on ")


def test_a_lock_file_that_is_a_symbolic_link_is_neither_followed_nor_truncated(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(target)
    with pytest.raises(ValueError, match=r"\.lock is a symbolic link.*remove it"):
        RunLock(tmp_path / "run").take()
    assert target.read_text() == "content"


def test_the_lock_is_seen_without_being_touched_while_held_and_after_its_holder_is_gone(tmp_path, monkeypatch):
    assert is_held(tmp_path / "run") is None
    command = [sys.executable, "-c", HOLD, str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        monkeypatch.delattr("fcntl.flock")
        assert is_held(tmp_path / "run") is True
        holder.kill()
    assert is_held(tmp_path / "run") is False
    lock = tmp_path / "run" / LOCK
    lock.write_text(f"process {os.getpid()} on {os.uname().nodename}")
    assert is_held(tmp_path / "run") is None, "a file system without locks, or another process with that number"
    lock.write_text(f"process {holder.pid} on elsewhere")
    assert is_held(tmp_path / "run") is None
