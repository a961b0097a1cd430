"""How a program starts, and the worker processes that it spawns to read data and to score."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.settings.errors import ConfigError

REFUSED_S = 30.0  # that rank 0 may need longer than another rank to read the same configuration


def start_program() -> None:
    """Call in a program once its imports are done, and before it spawns processes.

    What was imported stays: garbage collection does not walk these millions of objects again, not even at the exit,
    where that takes a second. Spawned processes import what their work needs, not the program: they would first run
    their parent's main file again, with every import of training, 5 s and 340 MiB for each process of each rank.
    multiprocessing leaves that out for a main module of this name, as for `python -m package`. What such a process is
    sent must not be defined in the main file.
    """
    gc.freeze()
    gc.enable()  # after a program that imports without it
    sys.modules["__main__"].__spec__ = ModuleSpec("__main__", None)


def launch(main: Callable[..., int], begun: float | None = None) -> NoReturn:
    """Run a training program's `main(begun=...)` and exit with the code that it returns.

    The process began at `begun`, by `time.perf_counter`. After an error the interpreter's shutdown is skipped, which
    can abort or hang while a process group is up. The trace of an error is printed where it helps: on the rank that
    failed, unless it names a file that could not be used.
    """
    start_program()
    try:
        code = main(begun=begun)
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - printed; the exit code tells the launcher
        try:
            own = error.__cause__ if type(error).__name__ == "RankError" else error
            if own is not None and not getattr(own, "filename", ""):
                traceback.print_exception(own)
            say_last(getattr(error, "last_line", f"{type(error).__name__}: {error}"))
            sys.stdout.flush()
        finally:
            os._exit(1)
    sys.exit(code)


def refused(error: ValueError) -> int:
    """Print why this process cannot begin, in one line, and return exit code 2; a setting is refused by rank 0."""
    if os.environ.get("RANK", "0") == "0" or not isinstance(error, ConfigError):
        say_last(str(error))
    else:  # the first rank that exits lets the launcher end all: that must be the one that prints
        time.sleep(REFUSED_S)
    return 2


def say_last(cause: str) -> None:
    """Print why this process ends in one line, and leave it to torchrun for the end of its own report."""
    line = " ".join(cause.split())
    sys.stderr.write(f"error: {line}\n")
    sys.stderr.flush()
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        about = {"message": line, "extraInfo": {"py_callstack": line, "timestamp": str(int(time.time()))}}
        write_atomically(Path(report), json.dumps({"message": about}))


def usable_cores() -> int:
    """Return how many cores this process may use: in a container or a batch job often fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def live_as_long_as_the_parent() -> None:
    """Call in a worker process: leave the parent's process group, and exit when the parent exits.

    Ctrl-C and the launcher signal the whole group, but the parent needs its workers to finish the epoch. An idle worker
    would not notice that its parent was killed.
    """
    os.setpgid(0, 0)
    parent = multiprocessing.parent_process()
    assert parent is not None, "must be called in a process started by multiprocessing"

    def exit_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
