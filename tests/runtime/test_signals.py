"""The first stop signal is recorded, the second one kills."""

import os
import signal
import subprocess
import sys

import pytest

from flow_grpo.runtime.signals import EndRequest


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_the_first_signal_is_recorded_and_the_handlers_are_restored(number, capfd, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launcher's")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "45")
    before = signal.getsignal(number)
    with EndRequest() as end:
        assert not end.signal
        os.kill(os.getpid(), number)
        assert end.signal == signal.Signals(number).name
    assert signal.getsignal(number) is before
    said = capfd.readouterr().err
    assert f"{end.signal}: the run ends after this epoch" in said and said.endswith("kills it after 45 s\n")


TWICE = """
import os, signal, time
from flow_grpo.runtime import signals
signals.REPEAT_S = 3600.0
with signals.EndRequest() as end:
    os.close(2)
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here,", end.signal, flush=True)
    signals.REPEAT_S = 0.0
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)
"""


def test_a_second_signal_kills_unless_it_is_a_duplicate_of_the_first_also_with_stderr_closed():
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGTERM and done.stdout == "still here, SIGTERM\n"
