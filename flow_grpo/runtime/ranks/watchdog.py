"""A watchdog that ends all ranks when one dies, hangs or fails alone.

A rank blocked in a collective cannot see that a peer was killed, lost its machine, raised an exception or hangs; it
would wait for the collective's timeout, half an hour or more. So a thread in every rank writes a status line into the
store of the rendezvous every few seconds and reads those of the others. When it finds a failed or silent rank, it
prints which one, where and why, dumps its own stack traces and exits; all ranks do so within seconds of each other.

A dead process writes no lines. A hanging one does, but its progress count does not change. One that raised an exception
has announced it. The process that holds the store may freeze, too: then no call of the store ever returns, whatever its
timeout, so a second thread counts the checks that do.
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
from collections.abc import Iterator

from torch.distributed import Store  # type: ignore[attr-defined]

from flow_grpo.runtime.processes import say_last

FAULT_GRACE_S = 15.0  # a synchronised error usually reaches all ranks by its own collective, which names every cause
EXIT_CODE = 1
_DONE = "done"


@dataclasses.dataclass
class _Peer:
    """The last status line of a rank, and when the line and the progress in it last changed."""

    changed: float
    moved: float
    line: str = ""
    progress: str = ""


class Monitor:
    """The watchdog without its thread: publishes this rank's status and judges that of all ranks.

    A rank counts as dead after `dead_s` seconds without a new status line, and as hanging after `silent_s` without
    progress, which must exceed the longest step. `now` is in seconds on the clock of later `check` calls.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, dead_s: float, silent_s: float, now: float | None = None
    ) -> None:
        now = time.monotonic() if now is None else now
        self._store, self._rank = store, rank
        self._dead_s, self._silent_s, self.interval_s = dead_s, silent_s, min(5.0, dead_s / 6)
        self.phase, self._progress, self._beats, self._waiting = "start-up", 0, 0, False
        self.inside = ""  # ", inside reward NAME" while that may be what hangs
        self.way_on = ""  # how to go on with the run, the end of a failure's last line
        self._peers = {peer: _Peer(now, now) for peer in range(world_size) if peer != rank}
        self._own = _Peer(now, now)
        self._store_answered, self._fault_seen = now, 0.0
        self._store.set_timeout(datetime.timedelta(seconds=dead_s))

    def begin_phase(self, phase: str) -> None:
        """Set the phase shown in reports about this rank; counts as progress."""
        self.phase = phase
        self.report_progress()

    def report_progress(self) -> None:
        """Note that this rank is not hanging."""
        self._progress += 1

    @contextlib.contextmanager
    def waiting_for_peers(self) -> Iterator[None]:
        """Mark this rank as blocked in a collective during the block: it is not the one that hangs."""
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
            self.report_progress()

    def announce(self, text: str) -> None:
        """Publish an error of this rank; peers exit if no collective delivers it within FAULT_GRACE_S."""
        self._store.set(f"fault/{self._rank}", f"in {self.phase}: {text}")

    def withdraw(self) -> None:
        """Remove the announcement: a collective has delivered the error."""
        self._store.set(f"fault/{self._rank}", "")

    def check(self, now: float) -> str:
        """Publish this rank's status and return what is wrong with any rank, or ""."""
        try:
            self._beats += 1
            self._store.set(f"beat/{self._rank}", f"{self._beats}|{self._status()}")
            problem = self._fault(now)
            if problem is None:
                problem = self._dead(now) or self._hanging(now)
            self._store_answered = now
        except (RuntimeError, ValueError) as error:
            silent = now - self._store_answered
            if silent <= self._dead_s:
                return ""
            problem = f"the ranks' store has not answered for {silent:.0f} s ({error}); its node is gone"
        return problem

    def _status(self) -> str:
        return f"{self._progress}|{'waiting' if self._waiting else 'working'}|{self.phase}{self.inside}"

    def _read(self, key: str) -> str:
        # "" if it is missing: `get` would block on it.
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _fault(self, now: float) -> str | None:
        # The errors that failed ranks announced, None if no rank failed. During a grace period it is "": the ranks may
        # still exchange the errors themselves through a collective.
        faults = {peer: text for peer in self._peers if (text := self._read(f"fault/{peer}"))}
        if not faults:
            self._fault_seen = 0.0
            return None
        self._fault_seen = self._fault_seen or now
        left = any(self._store.check([f"left/{peer}"]) for peer in faults)
        if not left and now - self._fault_seen < FAULT_GRACE_S:
            return ""
        return "; ".join(f"rank {peer} failed {text}" for peer, text in faults.items())

    def _dead(self, now: float) -> str:
        # Reads the peers' status, and says which one has stopped writing it.
        for rank, peer in self._peers.items():
            line = self._read(f"beat/{rank}")
            if line != peer.line:
                peer.line, peer.changed = line, now
            _, _, progress = line.partition("|")
            if progress != peer.progress:
                peer.progress, peer.moved = progress, now
            if peer.line != _DONE and now - peer.changed > self._dead_s:
                where = progress.rpartition("|")[2] or "start-up"
                since = f"has not been heard of for {now - peer.changed:.0f} s"
                return f"rank {rank} {since}, it was in {where}: its process or its machine is gone"
        return ""

    def _hanging(self, now: float) -> str:
        # Ranks that wait for peers are only blamed if all ranks wait. Device collectives and gradient synchronisation
        # are not marked as waiting; of the ranks stuck there, the one with the least progress is blamed.
        own = self._status()
        if own != self._own.progress:
            self._own.progress, self._own.moved = own, now
        late_ranks: dict[tuple[bool, int], list[str]] = {}
        over = []
        for rank, peer in sorted({self._rank: self._own, **self._peers}.items()):
            count, _, state = peer.progress.partition("|")
            waits, seconds = state.startswith("waiting"), now - peer.moved
            late = seconds - (1.5 if waits else 1.0) * self._silent_s
            if peer.line != _DONE and late > -3 * self.interval_s:  # status of peers arrives with a delay
                text = f"rank {rank} has made no progress for {seconds:.0f} s in {state.partition('|')[2]}"
                late_ranks.setdefault((waits, int(count or 0)), []).append(text)
                over.append(late > 0)
        why = "it hangs, or distributed.silent_s is less than a call of the network or a reward takes"
        return f"{'; '.join(late_ranks[min(late_ranks)])}: {why}" if any(over) else ""


class Heartbeat(Monitor):
    """A monitor with a thread that checks every few seconds and ends the process when something is wrong.

    The store needs its own connection: blocking calls on a shared one would delay the checks. `keeper` is the process
    that holds it, in words.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, *, dead_s: float, silent_s: float, keeper: str = ""
    ) -> None:
        super().__init__(store, rank, world_size, dead_s=dead_s, silent_s=silent_s)
        self._keeper, self._checks = keeper, 0
        self._stopped, self._left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_store, name="store", daemon=True).start()

    def fail(self, text: str) -> list[int]:
        """Announce an error that no collective will deliver, and wait a few beats for the peers to exit.

        Closing the connection earlier would end them too, but without the cause. Returned are the peers that neither
        left nor gave a sign meanwhile: they are gone, which may be the cause.
        """
        self._stopped.set()
        deadline, silent = time.monotonic() + 3 * self.interval_s, list[int]()
        peers = [f"left/{peer}" for peer in self._peers]
        # Without the store no peer can be informed.
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._rank}", "")
            self.announce(text)
            before = {peer: self._read(f"beat/{peer}") for peer in self._peers}
            while time.monotonic() < deadline and not self._store.check(peers):
                time.sleep(0.1)
            still = [peer for peer, line in before.items() if line != _DONE and self._read(f"beat/{peer}") == line]
            silent = [peer for peer in still if not self._store.check([f"left/{peer}"])]
        self._left.set()
        return silent

    def stop(self) -> None:
        """Stop monitoring, and tell the peers to expect no more status from this rank."""
        self._stopped.set()
        self._thread.join()
        self._store.set(f"beat/{self._rank}", _DONE)
        self._left.set()

    def _watch(self) -> None:
        while not self._stopped.wait(self.interval_s):
            problem = self.check(time.monotonic())
            if problem and not self._stopped.is_set():
                with contextlib.suppress(RuntimeError):
                    self._store.set(f"left/{self._rank}", "")
                self.end_process(problem)
                return
            self._checks += 1

    def _watch_store(self) -> None:
        # Counts its own looks, not seconds: a process that was stopped and goes on, as by Ctrl-Z, is no fault.
        seen, missed = 0, 0
        while not self._left.wait(self.interval_s):
            missed = missed + 1 if self._checks == seen else 0
            seen = self._checks
            if (missed + 1) * self.interval_s >= self._dead_s:
                silent = f"has not answered for {missed * self.interval_s:.0f} s"
                self.end_process(f"{self._keeper}, which holds the ranks' store, {silent}: it is frozen or gone")
                return

    def end_process(self, problem: str) -> None:
        """Print the stack traces of this process and then the problem, and exit, without finalisers."""
        try:  # stderr may be closed
            sys.stderr.flush()
            faulthandler.dump_traceback(file=sys.stderr)
            say_last(f"rank {self._rank} ends in {self.phase}: {problem}{self.way_on}")
            sys.stdout.flush()
        finally:
            os._exit(EXIT_CODE)
