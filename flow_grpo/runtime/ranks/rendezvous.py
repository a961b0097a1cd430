"""A unique id for every attempt of the ranks to start.

A launcher that restarts its ranks keeps its store, which still holds what earlier attempts left: addresses of dead
processes, announced faults. The launcher's restart count cannot tell attempts apart, because nodes may disagree on it
(torch 2.13 counts only a node's own failures). So rank 0 makes up an id and sends it to the ranks that are present,
along with whether an earlier attempt got as far as `World.mark_started`.
"""

from __future__ import annotations

import datetime
import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

STARTED = "admitted"  # key in the launcher's store: an attempt has started
RENDEZVOUS_S = 600.0  # the slowest node may still be reading its libraries from a cold file system


def join_attempt(store: Store, rank: int, world_size: int, wait_s: float = RENDEZVOUS_S) -> tuple[str, bool]:
    """Wait for all ranks of this attempt; return its id, and whether an earlier one had started.

    The latter is only known if the store is kept by the launcher, as torchrun does by default, and not by rank 0.

    Raises:
        RuntimeError: a rank is missing after `wait_s` seconds.
    """
    store.set_timeout(datetime.timedelta(seconds=wait_s))
    own = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", own)
        attempt = store.get(f"welcome/{own}").decode()
        store.set(f"met/{attempt}/{rank}", "")
    else:
        attempt = f"{own}-{'again' if store.check([STARTED]) else 'first'}"
        _send_id(store, attempt, world_size, wait_s)
    return attempt, attempt.endswith("again")


def _send_id(store: Store, attempt: str, world_size: int, wait_s: float) -> None:
    # Until all ranks have confirmed it: the first hello of a rank may be left over from a dead process.
    deadline, missing = time.monotonic() + wait_s, set(range(1, world_size))
    while missing:
        missing = {rank for rank in missing if not store.check([f"met/{attempt}/{rank}"])}
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", attempt)
        if missing and time.monotonic() > deadline:
            raise RuntimeError(f"rank(s) {', '.join(map(str, sorted(missing)))} did not come within {wait_s:.0f} s")
        time.sleep(0.02)
