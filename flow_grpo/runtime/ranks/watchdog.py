"""No rank waits for one that will never come.

In an exchange a rank cannot see that another one was killed, lost its machine, raised where the others go on, or
hangs: it waits until the group's timeout, half an hour or more. So a thread of every rank writes a line into the store
that the ranks met by, every few seconds, and reads those of the others. A rank that sees another one fail or fall
silent says which one, where and why, shows where it stands itself, and ends its process; all do so within seconds of
each other.

What a thread can tell apart: a process that is gone writes no lines; one that hangs still writes them, but its count of
progress stands still; one that raised has announced its error.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from torch.distributed import Store  # type: ignore[attr-defined]

FAULT_GRACE_S = 15.0  # a rank that raised usually tells so in the exchange that ends the phase, beside other causes
EXIT_CODE = 1
_DONE = "done"


@dataclasses.dataclass
class _Heard:
    """What is known of another rank: its last line, and when that and its progress last changed."""

    line: str = ""
    changed: float = 0.0
    progress: str = ""
    moved: float = 0.0


class Heartbeat:
    """This rank's sign of life, and its eye on the others.

    Args:
        store: of the process group; used from a thread of its own.
        rank: of this process.
        world_size: number of ranks.
        dead_s: seconds without a line after which a rank counts as gone.
        silent_s: seconds without progress after which a rank counts as hanging; more than anything takes in between.
        end: called with what is wrong; None shows it on stderr and ends the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        dead_s: float,
        silent_s: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._dead_s, self._silent_s = dead_s, silent_s
        self._every = min(5.0, dead_s / 6)
        self._phase, self._progress, self._count, self._waiting = "start-up", 0, 0, False
        now = time.monotonic()
        self._heard = {other: _Heard(changed=now, moved=now) for other in range(world_size) if other != rank}
        self._own = _Heard(moved=now)
        self._store_answered, self._failed_since = now, 0.0
        self._end = end or self._end_process
        self._stopped = threading.Event()
        self._store.set_timeout(datetime.timedelta(seconds=dead_s))
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()

    def enter(self, phase: str) -> None:
        """Note that this rank begins a phase, which is progress."""
        self._phase = phase
        self.tick()

    def tick(self) -> None:
        """Note progress within the phase."""
        self._progress += 1

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, this rank waits for others: it is not the one that hangs."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
            self.tick()

    @property
    def phase(self) -> str:
        """Where this rank is."""
        return self._phase

    def announce(self, text: str) -> None:
        """Tell the others of an error of this rank; they end themselves if no exchange tells them soon."""
        self._store.set(self._fault_key(self._rank), f"in {self._phase}: {text}")

    def withdraw(self) -> None:
        """Take the announcement back: an exchange has told all."""
        self._store.set(self._fault_key(self._rank), "")

    def leave(self, text: str) -> None:
        """Announce an error that no exchange will tell of, and wait until the others end, a few beats at most.

        A connection that closes earlier would tell them first, and without the cause.
        """
        self._stopped.set()
        last = time.monotonic() + 3 * self._every
        others = [self._left_key(rank) for rank in self._heard]
        # A store that is gone has nobody left to tell.
        with contextlib.suppress(RuntimeError):
            self._store.set(self._left_key(self._rank), "")
            self.announce(text)
            while time.monotonic() < last and not self._store.check(others):
                time.sleep(0.1)

    def stop(self) -> None:
        """Leave in peace: the others expect no more of this rank."""
        self._stopped.set()
        self._thread.join()
        self._store.set(self._key(self._rank), _DONE)

    def _key(self, rank: int) -> str:
        return f"beat/{rank}"

    def _fault_key(self, rank: int) -> str:
        return f"fault/{rank}"

    def _left_key(self, rank: int) -> str:
        return f"left/{rank}"

    def _read(self, key: str) -> str:
        """Return what is kept under a key, or "": asking for one that is not there would wait for it."""
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _watch(self) -> None:
        while not self._stopped.wait(self._every):
            problem = ""
            try:
                self._beat()
                problem = self._look()
                self._store_answered = time.monotonic()
            except (RuntimeError, ValueError) as error:
                silent = time.monotonic() - self._store_answered
                if silent > self._dead_s:
                    problem = f"the ranks' store has not answered for {silent:.0f} s ({error}); its node is gone"
            if problem and not self._stopped.is_set():
                with contextlib.suppress(RuntimeError):
                    self._store.set(self._left_key(self._rank), "")
                self._end(problem)
                return

    def _stand(self) -> str:
        return f"{self._progress}|{'waiting' if self._waiting else 'working'}|{self._phase}"

    def _beat(self) -> None:
        self._count += 1
        self._store.set(self._key(self._rank), f"{self._count}|{self._stand()}")

    def _look(self) -> str:
        """Return what is wrong with another rank or with this one, or ""."""
        now = time.monotonic()
        if failed := {rank: text for rank in self._heard if (text := self._read(self._fault_key(rank)))}:
            self._failed_since = self._failed_since or now
            left = any(self._store.check([self._left_key(rank)]) for rank in failed)
            if not left and now - self._failed_since < FAULT_GRACE_S:
                return ""
            return "; ".join(f"rank {rank} failed {text}" for rank, text in failed.items())
        self._failed_since = 0.0
        for rank, heard in self._heard.items():
            self._hear(rank, heard, now)
            if heard.line != _DONE and now - heard.changed > self._dead_s:
                where = heard.line.partition("|")[2].split("|")[-1] or "start-up"
                silent = f"has not been heard of for {now - heard.changed:.0f} s"
                return f"rank {rank} {silent}, it was in {where}: its process or its machine is gone"
        return self._hanging(now)

    def _hear(self, rank: int, heard: _Heard, now: float) -> None:
        line = self._read(self._key(rank))
        if line != heard.line:
            heard.line, heard.changed = line, now
        progress = line.partition("|")[2]
        if progress != heard.progress:
            heard.progress, heard.moved = progress, now

    def _hanging(self, now: float) -> str:
        """Return which rank hangs, or "".

        It is not one that waits for others, unless all wait for each other; and of those that stand still within an
        exchange of a device, or of gradients, it is the one that came least far.
        """
        own = self._stand()
        if own != self._own.progress:
            self._own.progress, self._own.moved = own, now
        silent: dict[tuple[bool, int], list[str]] = {}
        over = []
        for rank, heard in sorted({self._rank: self._own, **self._heard}.items()):
            count, _, state = heard.progress.partition("|")
            waits, seconds = state.startswith("waiting"), now - heard.moved
            late = seconds - (1.5 if waits else 1.0) * self._silent_s
            if heard.line != _DONE and late > -3 * self._every:  # of the others one hears with a delay
                said = f"rank {rank} has made no progress for {seconds:.0f} s in {state.partition('|')[2]}"
                silent.setdefault((waits, int(count or 0)), []).append(said)
                over.append(late > 0)
        why = "it hangs, or distributed.silent_s is less than a call of the network takes"
        return f"{'; '.join(silent[min(silent)])}: {why}" if any(over) else ""

    def _end_process(self, problem: str) -> None:
        try:  # whoever read the output may be gone
            sys.stderr.write(f"error: rank {self._rank} ends in {self._phase}: {problem}\n")
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.stderr)
            sys.stdout.flush()
        finally:
            os._exit(EXIT_CODE)
