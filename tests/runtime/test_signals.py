"""The first stop signal is recorded, the second one kills; workers exit with their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from flow_grpo.rewards.process_pool import CallPool
from flow_grpo.runtime.signals import EndRequest
from tests.limits import LIMIT_S


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_recorded_and_the_handlers_are_restored(number, capfd):
    before = signal.getsignal(number)
    with EndRequest() as end:
        assert not end.signal
        os.kill(os.getpid(), number)
        assert end.signal == signal.Signals(number).name
    assert signal.getsignal(number) is before
    assert f"{end.signal}: the run ends after this epoch" in capfd.readouterr().err


TWICE = """
import os, signal, time
from flow_grpo.runtime import signals
signals.REPEAT_S = 3600.0
with signals.EndRequest():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    signals.REPEAT_S = 0.0
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


def test_a_second_signal_kills_unless_it_is_a_duplicate_of_the_first():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM and done.stdout == "still here\n"


def test_a_signal_is_recorded_with_stderr_closed():
    done = subprocess.run([sys.executable, "-c", UNREAD], check=False)
    assert done.returncode == 0


UNREAD = """
import os, signal
from flow_grpo.runtime.signals import EndRequest
with EndRequest() as end:
    os.close(2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert end.signal == "SIGTERM"
os._exit(0)
"""


def wait_until_gone(*processes: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while left := [pid for pid in processes if os.path.exists(f"/proc/{pid}")]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


HELPERS = """
import os, sys
from flow_grpo.rewards.process_pool import CallPool
if __name__ == "__main__":
    found = CallPool(2).run(os.getpgid, [(0,)] * 4, seconds=600, what="groups")
    print(*sorted({outcome.value for outcome in found}), flush=True)
    sys.stdin.read()
"""


def test_workers_leave_the_process_group_and_exit_when_their_parent_is_killed(tmp_path):
    (tmp_path / "helpers.py").write_text(HELPERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    command, pipe = [sys.executable, str(tmp_path / "helpers.py")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as parent:
        helpers = [int(word) for word in parent.stdout.readline().split()]
        assert helpers and os.getpgid(parent.pid) not in helpers
        parent.kill()
    wait_until_gone(*helpers)


def test_a_closed_pool_leaves_no_process():
    pool = CallPool(1)
    (found,) = pool.run(os.getpid, [()], seconds=LIMIT_S, what="process")
    pool.close()
    wait_until_gone(found.value)
