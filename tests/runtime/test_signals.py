"""Signals to end: the first is remembered, the second obeyed; helpers live as long as their parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from flow_grpo.rewards.process_pool import CallPool
from flow_grpo.runtime.signals import EndRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_is_remembered_and_the_handlers_put_back(number, capfd):
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
with signals.EndRequest():
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
    signals.REPEAT_S = 0.0
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


def test_a_second_signal_is_obeyed_at_once_unless_it_is_the_first_one_once_more():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGTERM and done.stdout == "still here\n"


def test_a_signal_whose_message_nobody_reads_is_remembered_as_well():
    told = subprocess.run([sys.executable, "-c", UNREAD], timeout=60, check=False)
    assert told.returncode == 0


UNREAD = """
import os, signal
from flow_grpo.runtime.signals import EndRequest
with EndRequest() as end:
    os.close(2)
    os.kill(os.getpid(), signal.SIGTERM)
    assert end.signal == "SIGTERM"
os._exit(0)
"""


HELPERS = """
import os, time
from flow_grpo.rewards.process_pool import CallPool
if __name__ == "__main__":
    found = CallPool(2).run(os.getpgid, [(0,)] * 4, seconds=60, what="groups")
    print(*sorted({outcome.value for outcome in found}), flush=True)
    time.sleep(60)
"""


def test_helpers_are_no_part_of_the_group_and_go_when_their_parent_is_killed(tmp_path):
    (tmp_path / "helpers.py").write_text(HELPERS)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path])}
    parent = subprocess.Popen(
        [sys.executable, str(tmp_path / "helpers.py")], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert parent.stdout is not None
    helpers = [int(word) for word in parent.stdout.readline().split()]
    assert helpers and os.getpgid(parent.pid) not in helpers
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in helpers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in helpers if os.path.exists(f"/proc/{pid}")]


def test_a_pool_that_is_closed_leaves_no_process():
    pool = CallPool(1)
    (found,) = pool.run(os.getpid, [()], seconds=60, what="process")
    pool.close()
    deadline = time.monotonic() + 20
    while os.path.exists(f"/proc/{found.value}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{found.value}")
