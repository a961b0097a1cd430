"""A name of its own for every attempt of the ranks to meet.

A launcher that starts ranks again keeps its store, and in it what earlier attempts left: addresses of processes that
are gone, faults that were announced. How often it did so it tells every node another number (torch 2.13 counts only a
node's own failures). So rank 0 makes up a name and deals it to those who are there, and says whether an attempt before
was admitted to its run.
"""

from __future__ import annotations

import datetime
import time
import uuid

from torch.distributed import Store  # type: ignore[attr-defined]

_ADMITTED = "admitted"
MEET_S = 600.0  # the slowest node may still be reading its libraries from a cold file system


def meet(store: Store, rank: int, world_size: int, wait_s: float = MEET_S) -> tuple[str, bool]:
    """Wait for the other ranks of this attempt; return its name, and whether one before was admitted, see `admit`.

    The latter is only known where the launcher keeps the store, as torchrun does unless it is told not to.

    Args:
        store: of the launcher, or of rank 0.
        rank: of this process.
        world_size: number of ranks.
        wait_s: how long the last one may take.

    Raises:
        RuntimeError: somebody did not come.
    """
    store.set_timeout(datetime.timedelta(seconds=wait_s))
    own = uuid.uuid4().hex
    if rank:
        store.set(f"hello/{rank}", own)
        name = store.get(f"welcome/{own}").decode()
        store.set(f"met/{name}/{rank}", "")
    else:
        name = f"{own}-{'again' if store.check([_ADMITTED]) else 'first'}"
        _welcome(store, name, world_size, wait_s)
    return name, name.endswith("again")


def admit(store: Store) -> None:
    """Note that this launch may go on with what its run saved, should it be started again."""
    store.set(_ADMITTED, "")


def _welcome(store: Store, name: str, world_size: int, wait_s: float) -> None:
    """Deal the name until all have it: what says hello first may be left from a process that is gone."""
    last, missing = time.monotonic() + wait_s, set(range(1, world_size))
    while missing:
        missing = {rank for rank in missing if not store.check([f"met/{name}/{rank}"])}
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                store.set(f"welcome/{store.get(f'hello/{rank}').decode()}", name)
        if missing and time.monotonic() > last:
            raise RuntimeError(f"rank(s) {', '.join(map(str, sorted(missing)))} did not come within {wait_s:.0f} s")
        time.sleep(0.02)
