"""Ranks: start-up in the one right order, small exchanges between CPUs, and "did any rank fail".

Everything here travels over a gloo control group as plain CPU tensors, whatever the accelerator: metrics, group ids and
error texts are small, and an accelerator's own library aborts the process on a mistake that gloo can report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from flow_grpo.runtime import device as device_door
from flow_grpo.runtime.ranks.rendezvous import MEET_S, admit, meet
from flow_grpo.runtime.ranks.watchdog import Heartbeat

LAUNCHER_S = 10.0  # to answer, where it lives
_SHOWN = 80  # characters of a differing text that an error quotes


class InputError(ValueError):
    """Something given to a run is not fit, such as a broken file: one line that names it."""

    def __str__(self) -> str:
        # From a loader's worker it comes behind that one's traceback.
        return super().__str__().rpartition(f"{type(self).__name__}: ")[2].strip()


class RankError(RuntimeError):
    """What went wrong on some ranks, by rank, phase and cause."""


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Who this process is among its equals; without a process group every exchange returns its own input.

    Attributes:
        rank: 0..world_size-1 over all nodes.
        world_size: number of processes, W.
        local_rank: 0.. on this node.
        control_group: gloo group of all ranks, or None for a single process.
        heartbeat: tells the others of this rank and watches all, itself included, or None.
        again: whether the launcher has started the ranks before, as after one was killed, and they were admitted.
        store: of the launcher, which outlives the ranks, or None.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    control_group: dist.ProcessGroup | None = None
    heartbeat: Heartbeat | None = None
    again: bool = False
    store: Store | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, logs and publishes."""
        return self.rank == 0

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the (W*n, ...) rows of all ranks in rank order, bit for bit, from every rank's (n, ...) CPU tensor.

        Every rank must call it with the same shape and dtype; that is compared first, because plain gloo aborts the
        process on a mismatch.

        Raises:
            ValueError: the tensor is not on the CPU or has no rows dimension, or ranks differ (every shape is named).
        """
        kinds = self.gather_text(f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}")
        if len(set(kinds)) > 1 or tensor.dim() == 0 or tensor.device.type != "cpu":
            raise ValueError(
                "all_gather needs rows of one shape and dtype in CPU memory on all ranks, "
                f"got {_by_rank(kinds)}; pad or cut the rows first"
            )
        if self.control_group is None or tensor.numel() == 0:
            return tensor.detach().clone().repeat(self.world_size, *[1] * (tensor.dim() - 1))
        # As bytes: gloo lacks some dtypes, and bytes also keep NaN payloads.
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        parts = [torch.empty_like(flat) for _ in range(self.world_size)]
        with self.waiting():
            dist.all_gather(parts, flat, group=self.control_group)
        return torch.cat(parts).view(tensor.dtype).view(self.world_size * tensor.shape[0], *tensor.shape[1:])

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's text in rank order; lengths may differ. Every rank must call it."""
        if self.control_group is None:
            return [text]
        encoded = text.encode(errors="backslashreplace")  # names of files may be no UTF-8
        lengths = self._gather_equal(torch.tensor([len(encoded)])).tolist()
        padded = encoded.ljust(max(*lengths, 1), b"\0")
        rows = self._gather_equal(torch.frombuffer(bytearray(padded), dtype=torch.uint8)).view(self.world_size, -1)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on every rank; the others' argument is ignored. Every rank must call it."""
        return self.gather_text(text if self.is_main else "")[0]

    def all_equal(self, fingerprint: str, what: str) -> None:
        """Check that all ranks hold the same fingerprint.

        Args:
            fingerprint: any text that tells two states apart.
            what: what it is a fingerprint of, for the message.

        Raises:
            ValueError: on every rank alike, naming each rank's value.
        """
        values = self.gather_text(fingerprint)
        if len(set(values)) > 1:
            raise ValueError(
                f"{what} must be the same on all ranks, got {_by_rank(values)}; "
                "give every rank the same files, configuration and software"
            )

    def raise_together(self, error: BaseException | None, phase: str) -> None:
        """End a phase on all ranks alike: return if no rank brings an error, else raise on every rank.

        Every rank must call it once at the end of the phase. It also serves as the barrier after work of one rank.

        Args:
            error: what went wrong on this rank, or None.
            phase: name of the phase, for the message.

        Raises:
            InputError: no rank brings anything but such: what they say, each text once.
            RankError: the same text on every rank, naming rank, phase, type and message of each failure.
                In both cases the original exception is the cause on a rank that failed.
        """
        failed = torch.tensor([0 if error is None else 1 if isinstance(error, InputError) else 2], dtype=torch.int32)
        if self.control_group is not None:
            with self._announced(error), self.waiting():
                dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.control_group)
        if not failed.item():
            return
        # Marked by length: an exception may have an empty message, a rank without one sends an empty text.
        texts = self.gather_text("" if error is None else _in_words(error))
        if failed.item() == 1:
            said = [text.removeprefix(f"{InputError.__name__}: ") for text in texts if text]
            raise InputError("; ".join(dict.fromkeys(said))) from error
        failures = [_failure(rank, phase, text) for rank, text in enumerate(texts) if text]
        raise RankError("; ".join(failures)) from error

    @contextlib.contextmanager
    def _announced(self, error: BaseException | None) -> Iterator[None]:
        """Inside, the others are asked to end should they not come: they may wait for this rank somewhere else.

        Bad input is not worth that: who is busy may finish, and the run be saved.
        """
        if self.heartbeat is None or error is None or isinstance(error, InputError):
            yield
            return
        self.heartbeat.announce(_in_words(error))
        try:
            yield
        except RuntimeError:  # they did end
            raise RankError(_failure(self.rank, self.heartbeat.phase, _in_words(error))) from error
        self.heartbeat.withdraw()

    @contextlib.contextmanager
    def sync_errors(self, phase: str) -> Iterator[None]:
        """Run a block, then `raise_together`.

        The block holds no exchange of its own, or only such as no rank can miss: a rank that fails leaves the others
        waiting in theirs until that times out.

        Raises:
            InputError: on every rank, as `raise_together`.
            RankError: likewise.
        """
        self.enter(phase)
        try:
            yield
        except BaseException as error:
            self.raise_together(error, phase)
            raise
        self.raise_together(None, phase)

    def enter(self, phase: str) -> None:
        """Note that a phase begins: the others are told its name when this rank fails, dies or hangs in it."""
        if self.heartbeat is not None:
            self.heartbeat.enter(phase)

    def tick(self) -> None:
        """Note progress within a phase, so that a long one is not taken for a rank that hangs."""
        if self.heartbeat is not None:
            self.heartbeat.tick()

    @contextlib.contextmanager
    def broadcast_failure(self) -> Iterator[None]:
        """Let the others know of an error inside, wherever they wait for this rank; they end.

        Raises:
            RankError: for an error of this rank alone; others are raised as they are.
        """
        try:
            yield
        except Exception as error:
            if self.heartbeat is None:
                raise
            if self.world_size == 1:
                self.heartbeat.stop()
                raise
            if isinstance(error, RankError):  # which all have
                raise
            with contextlib.suppress(OSError):  # nobody reads it
                traceback.print_exc()  # before the others end, whose launcher then ends this rank
            self.heartbeat.leave(_in_words(error))
            raise RankError(_failure(self.rank, self.heartbeat.phase, _in_words(error))) from None

    def admit(self) -> None:
        """Note that this start was found right: started again by the same launcher, the run goes on by itself."""
        if self.store is not None and self.is_main:
            admit(self.store)

    def waiting(self) -> AbstractContextManager[None]:
        """Return what notes that this rank waits for the others inside."""
        return contextlib.nullcontext() if self.heartbeat is None else self.heartbeat.waiting()

    def _gather_equal(self, tensor: Tensor) -> Tensor:
        """Gather tensors that are of one shape by construction."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self.waiting():
            dist.all_gather(parts, tensor, group=self.control_group)
        return torch.cat(parts)


@dataclasses.dataclass(frozen=True)
class Patience:
    """How long ranks wait for each other, in seconds.

    Attributes:
        control_s: in an exchange between CPUs; more than one rank may lag behind another.
        device_s: in one between devices; more than the vendor's own timeouts, which explain themselves better.
        dead_s: without a sign of life before a rank counts as gone; 0 asks for none.
        silent_s: without progress before it counts as hanging.
    """

    control_s: float
    device_s: float = 7200.0
    dead_s: float = 0.0
    silent_s: float = 1800.0

    def group_s(self, device: torch.device) -> float:
        """Return what bounds an exchange of the process group, which is between devices of this kind."""
        return self.control_s if device.type == "cpu" else max(self.device_s, self.control_s)

    def watch(self, store: Callable[[], Store], rank: int, world_size: int) -> Heartbeat | None:
        """Return this rank's heartbeat, if one is asked for; a single process has one as well, for it may hang."""
        if not self.dead_s:
            return None
        return Heartbeat(store(), rank, world_size, dead_s=self.dead_s, silent_s=self.silent_s)


def start(device: torch.device, patience: Patience, *, init_method: str = "env://") -> Ranks:
    """Join the other ranks; call once, after `device.setup` and before anything else communicates.

    Order: select the device, make the process group, run one small collective on the device (the first one builds the
    communicator), then make the control group. A process without launcher (no RANK in the environment) is alone.

    Args:
        device: this rank's device, from `device.resolve`.
        patience: how long the ranks wait for each other.
        init_method: rendezvous of `torch.distributed`; "env://" is the launcher's.

    Raises:
        RuntimeError: the launcher is gone, a rank does not come, or the first collective gives a wrong answer; the
            others, if they are watched, end by it.
    """
    if "RANK" not in os.environ:
        return Ranks(heartbeat=patience.watch(HashStore, 0, 1))
    rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world_size:
        _prefer_loopback()
    device_door.select(device)
    control_timeout = datetime.timedelta(seconds=patience.control_s)
    # The store is ours, for the heartbeat has need of it beside the process group. A launcher's own is there before us:
    # where nobody answers it was killed.
    of_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found_s = datetime.timedelta(seconds=LAUNCHER_S if of_launcher else MEET_S)
    try:
        store, _, _ = next(iter(rendezvous(init_method, rank, world_size, timeout=found_s)))
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"rank {rank} finds no store to meet the others by: its launcher is gone ({error})"
        ) from None
    attempt, again = meet(store, rank, world_size)
    store.set_timeout(control_timeout)
    # On a connection that nobody waits on.
    heartbeat = patience.watch(lambda: PrefixStore(f"heartbeat/{attempt}", store.clone()), rank, world_size)
    ranks = Ranks(rank, world_size, local_rank, None, heartbeat, again, store)
    with ranks.broadcast_failure():
        dist.init_process_group(
            device_door.process_group_backend(device),
            store=PrefixStore(f"process_group/{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=patience.group_s(device)),
        )
        probe = torch.ones(1, device=device)
        dist.all_reduce(probe)
        if (total := probe.item()) != world_size:
            raise RuntimeError(f"the first all-reduce over {world_size} ranks on {device} summed ones to {total}")
        control_group = dist.new_group(backend="gloo", timeout=control_timeout)
    return dataclasses.replace(ranks, control_group=control_group)


def stop(ranks: Ranks) -> None:
    """Leave together: wait for all ranks, then take the process group down.

    Leaving a gloo group without this may abort the process. Not for a rank that failed alone: the others would never
    come, and the launcher ends them when the failed process exits.
    """
    if ranks.control_group is not None:
        with ranks.waiting():
            dist.barrier(group=ranks.control_group)
    if ranks.heartbeat is not None:
        ranks.heartbeat.stop()
    if ranks.control_group is not None:
        dist.destroy_process_group()


def _failure(rank: int, phase: str, text: str) -> str:
    return f"rank {rank} failed in {phase}: {text}"


def _in_words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _by_rank(values: list[str]) -> str:
    return ", ".join(f"{value[:_SHOWN]} on rank {rank}" for rank, value in enumerate(values))


def _prefer_loopback() -> None:
    """On a single node let gloo use the loopback interface, so that an unresolvable host name does no harm."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
