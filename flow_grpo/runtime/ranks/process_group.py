"""Start-up of the ranks, small CPU collectives between them, and synchronised errors.

Everything here uses a gloo control group and CPU tensors, whatever the accelerator: metrics, group ids and error texts
are small, and an accelerator's communication library aborts the process on mistakes that gloo can report.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import signal
import socket
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.ranks.rendezvous import RENDEZVOUS_S, STARTED, join_attempt
from flow_grpo.runtime.ranks.watchdog import Heartbeat
from flow_grpo.settings.errors import RunStoppedError
from flow_grpo.settings.schema import DistributedConfig

SENT_KINDS = ("gradients", "weights", "tokens", "rows", "control")  # of `Group.sent`
LAUNCHER_S = 10.0  # for a running launcher's store to answer
_QUOTED = 80  # characters of each rank's text in an error


class InputError(RunStoppedError):
    """An input of the run is unusable, such as a damaged file; the message is one line that names it."""

    def __str__(self) -> str:
        # An error re-raised from a data loader's worker has that worker's traceback in front.
        return super().__str__().rpartition(f"{type(self).__name__}: ")[2].strip()


class RankError(RuntimeError):
    """What failed on which ranks: rank, phase and cause of each."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Ranks that exchange small CPU tensors and texts; where there is one, every call returns its own input."""

    rank: int = 0  # of this process, 0..size-1
    size: int = 1
    gloo: dist.ProcessGroup | None = None  # None where there is one rank
    heartbeat: Heartbeat | None = None  # the watchdog of this process
    # Kind -> bytes that this rank has sent to others; one counter for all groups of a run.
    sent: Counter[str] = dataclasses.field(default_factory=Counter, compare=False)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Gather (n, ...) CPU rows of all ranks, in rank order and bit for bit, to (size*n, ...) (collective call).

        Shape and dtype must be the same on every rank. They are compared first: gloo aborts the process on a mismatch.

        Raises:
            ValueError: on every rank, if shapes or dtypes differ, or a tensor is not on the CPU or is 0-dimensional.
        """
        kinds = self.gather_text(f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}")
        if len(set(kinds)) > 1 or tensor.dim() == 0 or tensor.device.type != "cpu":
            raise ValueError(
                "all_gather needs rows of one shape and dtype in CPU memory on all ranks, "
                f"got {_by_rank(kinds)}; pad or cut the rows first"
            )
        if self.gloo is None or tensor.numel() == 0:
            return tensor.detach().clone().repeat(self.size, *[1] * (tensor.dim() - 1))
        # As bytes: gloo lacks some dtypes, and bytes preserve NaN payloads.
        rows = self._gather_equal(tensor.detach().contiguous().view(-1).view(torch.uint8))
        return rows.view(tensor.dtype).view(self.size * tensor.shape[0], *tensor.shape[1:])

    def all_gather_scalars(self, values: Mapping[str, float]) -> dict[str, Tensor]:
        """Gather numbers by name, the same names on all ranks: name -> (ranks,) float64 (collective call)."""
        rows = self.all_gather(torch.tensor([list(values.values())], dtype=torch.float64))
        return dict(zip(values, rows.unbind(dim=1), strict=True))

    def gather_text(self, text: str) -> list[str]:
        """Gather every rank's text, of any length, in rank order. Collective call."""
        if self.gloo is None:
            return [text]
        encoded = text.encode(errors="backslashreplace")  # file names may not be valid UTF-8
        lengths = self._gather_equal(torch.tensor([len(encoded)])).tolist()
        padded = encoded.ljust(max(*lengths, 1), b"\0")
        rows = self._gather_equal(torch.frombuffer(bytearray(padded), dtype=torch.uint8)).view(self.size, -1)
        return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True)]

    def check_equal(self, fingerprint: str, what: str) -> None:
        """Check that all ranks pass the same fingerprint, a text that identifies `what`. Collective call.

        Raises:
            ValueError: on every rank, with each rank's value.
        """
        values = self.gather_text(fingerprint)
        if len(set(values)) > 1:
            raise ValueError(
                f"{what} must be the same on all ranks, got {_by_rank(values)}; "
                "give every rank the same files, configuration and software"
            )

    def waiting_for_peers(self) -> AbstractContextManager[None]:
        """Context for blocking collectives: the watchdog then looks for the hanging rank elsewhere."""
        return contextlib.nullcontext() if self.heartbeat is None else self.heartbeat.waiting_for_peers()

    def _gather_equal(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        self.sent["control"] += tensor.nbytes * (self.size - 1)
        with self.waiting_for_peers():
            dist.all_gather(parts, tensor, group=self.gloo)
        return torch.cat(parts)


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the processes of a run, in named groups.

    Ranks that share samples (`train.context_parallel`) hold the same ones: `data` has one rank of each such group, and
    `sample` is this rank's. Where none are shared, `data` is `all`, and `sample` this rank alone.
    """

    all: Group = dataclasses.field(default_factory=Group)
    data: Group = dataclasses.field(default_factory=Group)  # ranks with different samples, this one among them
    sample: Group = dataclasses.field(default_factory=Group)  # ranks with the same samples as this one
    restarted: bool = False  # by the launcher, after an attempt that called `mark_started`
    store: Store | None = None  # the launcher's, which outlives the ranks
    timeouts: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)

    @classmethod
    def of(cls, group: Group) -> World:
        """Make a world in which no rank shares samples."""
        return cls(all=group, data=group)

    @property
    def is_main(self) -> bool:
        """Whether this is the run's rank 0, which prints, logs and publishes."""
        return self.all.rank == 0

    def sent_metrics(self) -> dict[str, float]:
        """`system/sent_<kind>_gib` of what ranks have sent, on average over ranks (collective call)."""
        sent = self.all.all_gather_scalars({kind: self.all.sent[kind] for kind in SENT_KINDS})
        return {f"system/sent_{kind}_gib": float(sent[kind].mean()) / 2**30 for kind in sent if sent[kind].any()}

    def dealt_rows(self, number: int, count: int) -> slice:
        """Choose this rank's of the `count` rows of batch `number`, where one of the ranks with a sample is enough.

        Batches of equal size are dealt row by row, one after the other: numbers of rows differ by at most one between
        ranks. The rows that a rank gets of a batch are consecutive, and in the order of the ranks.
        """
        owners = sorted((number * count + row) % self.sample.size for row in range(count))
        first = sum(owner < self.sample.rank for owner in owners)
        return slice(first, first + owners.count(self.sample.rank))

    def broadcast_text(self, text: str) -> str:
        """Send the text of the run's rank 0 to every rank; that of the others is ignored. Collective call."""
        return self.all.gather_text(text if self.is_main else "")[0]

    def raise_if_any_failed(self, error: BaseException | None, phase: str) -> None:
        """Raise on every rank if any rank passes an error. Collective call at the end of a phase, and a barrier.

        Raises:
            InputError: all errors are InputErrors; their messages, each once.
            RankError: the same message on every rank, with rank, phase, type and message of each error.
                In both cases the original exception is the cause on a rank that failed.
        """
        failed = torch.tensor([0 if error is None else 1 if isinstance(error, InputError) else 2], dtype=torch.int32)
        if self.all.gloo is not None:
            with self._announced(error), self.all.waiting_for_peers():
                dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=self.all.gloo)
        if not failed.item():
            return
        # Never empty for an error, even one without a message; empty means that the rank has none.
        texts = self.all.gather_text("" if error is None else _in_words(error))
        if failed.item() == 1:
            messages = [text.removeprefix(f"{InputError.__name__}: ") for text in texts if text]
            raise InputError("; ".join(dict.fromkeys(messages))) from error
        failures = [_failure(rank, phase, text) for rank, text in enumerate(texts) if text]
        raise RankError("; ".join(failures)) from error

    @contextlib.contextmanager
    def _announced(self, error: BaseException | None) -> Iterator[None]:
        # Peers blocked in another collective then exit instead of waiting. An InputError is not published: peers may
        # finish their work and save the run.
        if self.all.heartbeat is None or error is None or isinstance(error, InputError):
            yield
            return
        self.all.heartbeat.announce(_in_words(error))
        try:
            yield
        except RuntimeError:  # the peers have exited
            raise RankError(_failure(self.all.rank, self.all.heartbeat.phase, _in_words(error))) from error
        self.all.heartbeat.withdraw()

    @contextlib.contextmanager
    def sync_errors(self, phase: str) -> Iterator[None]:
        """Run a block, then `raise_if_any_failed`. Collective call.

        The block must contain no collective that a failing rank could skip: the others would wait until it times out.

        Raises:
            InputError: on every rank, as `raise_if_any_failed`.
            RankError: likewise.
        """
        self.begin_phase(phase)
        try:
            yield
        except BaseException as error:
            self.raise_if_any_failed(error, phase)
            raise
        self.raise_if_any_failed(None, phase)

    @contextlib.contextmanager
    def broadcast_failure(self) -> Iterator[None]:
        """Publish an exception raised in the block so that peers blocked in any collective exit; not collective.

        Every error gets an attribute `last_line` for the console: the rank, the phase, the cause, and how to go on.

        Raises:
            RankError: for an error of only this rank; other errors are re-raised unchanged, `sys.exit` as an error.
        """
        try:
            try:
                yield
            except SystemExit as error:  # of code that the run calls: it would end with exit code 0 without a word
                raise RuntimeError(_in_words(error)) from None
        except Exception as error:
            heart = self.all.heartbeat
            if heart is None:
                raise
            if self.all.size == 1:
                heart.stop()
            elif not isinstance(error, RankError):  # which every rank has
                error = RankError(self._tell_peers(error, heart))
            text = str(error) if isinstance(error, RankError) else _failure(0, heart.phase, _in_words(error))
            vars(error)["last_line"] = text + heart.way_on
            raise error from error.__cause__

    def _tell_peers(self, error: Exception, heart: Heartbeat) -> str:
        # Returns what failed, in words: not a connection that a peer has left, but that the peer is gone.
        # When a peer has died, torchrun sends SIGTERM at once and kills after 30 s, time to say who that was.
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        lost = "gloo/transport" in str(error)
        with contextlib.suppress(OSError):  # stderr may be closed
            if not lost:
                traceback.print_exc()  # now: when the peers exit, their launcher kills this rank
        gone = [f"rank {rank} is gone" for rank in heart.fail(_in_words(error))]
        signal.signal(signal.SIGTERM, before)
        text = _failure(self.all.rank, heart.phase, "a connection closed" if lost and gone else _in_words(error))
        return f"{', '.join(gone)}: killed, or its machine is lost; so {text}" if gone else text

    def begin_phase(self, phase: str) -> None:
        """Set the phase that peers report if this rank fails, dies or hangs; counts as progress."""
        if self.all.heartbeat is not None:
            self.all.heartbeat.begin_phase(phase)

    def report_progress(self) -> None:
        """Tell the watchdog that this rank is not hanging."""
        if self.all.heartbeat is not None:
            self.all.heartbeat.report_progress()

    def calls_reward(self, name: str) -> None:
        """Tell the watchdog which reward this rank is in, "" for none: its code may hang. Counts as progress."""
        if self.all.heartbeat is not None:
            self.all.heartbeat.inside = f", inside reward {name}" if name else ""
            self.all.heartbeat.report_progress()

    def mark_started(self) -> None:
        """Record in the launcher's store that start-up succeeded, so that `restarted` is True after a restart."""
        if self.store is not None and self.is_main:
            self.store.set(STARTED, "")


def init_ranks(device: torch.device, timeouts: DistributedConfig, *, init_method: str = "env://") -> World:
    """Initialise the process groups; call once, after `device.setup` and before any other communication.

    Order: select the device, create the default process group, run one small collective on the device (the first one
    creates the communicator), then create the control group. Without a launcher (RANK is not set) there is one rank.

    Raises:
        RuntimeError: the launcher is gone, a rank is missing, or the first collective returns a wrong result; peers
            with a watchdog exit, too.
    """
    if "RANK" not in os.environ:
        return World.of(Group(heartbeat=_watchdog(timeouts, HashStore, 0, 1)))
    rank, world_size = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE"))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == world_size:
        # Over the loopback interface a single node works with an unresolvable host name.
        loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    device_api.select(device)
    control_timeout = datetime.timedelta(seconds=timeouts.control_s)
    # We make the store ourselves because the watchdog needs it as well. A launcher's store exists before its ranks: if
    # it does not answer, the launcher was killed.
    from_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    found_s = datetime.timedelta(seconds=LAUNCHER_S if from_launcher else RENDEZVOUS_S)
    try:
        store, _, _ = next(iter(rendezvous(init_method, rank, world_size, timeout=found_s)))
    except dist.DistNetworkError as error:
        raise RuntimeError(
            f"rank {rank} finds no store to meet the others by: its launcher is gone ({error})"
        ) from None
    attempt, restarted = join_attempt(store, rank, world_size)
    store.set_timeout(control_timeout)
    # A cloned connection: blocking calls on the original would delay heartbeats.
    keeper = "the launcher" if from_launcher else "rank 0"
    heartbeat = _watchdog(
        timeouts, lambda: PrefixStore(f"heartbeat/{attempt}", store.clone()), rank, world_size, keeper
    )
    group = Group(rank, world_size, heartbeat=heartbeat)
    world = World(group, group, Group(), restarted, store, timeouts)
    with world.broadcast_failure():
        dist.init_process_group(
            device_api.process_group_backend(device),
            store=PrefixStore(f"process_group/{attempt}", store),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=group_s(timeouts, device)),
        )
        probe = torch.ones(1, device=device)
        dist.all_reduce(probe)
        if (total := probe.item()) != world_size:
            raise RuntimeError(f"the first all-reduce over {world_size} ranks on {device} summed ones to {total}")
        group = dataclasses.replace(group, gloo=dist.new_group(backend="gloo", timeout=control_timeout))
    return dataclasses.replace(world, all=group, data=group)


def group_s(timeouts: DistributedConfig, device: torch.device) -> float:
    """Timeout of the default process group, whose collectives run on `device`."""
    return timeouts.control_s if device.type == "cpu" else max(timeouts.device_s, timeouts.control_s)


def shut_down(world: World) -> None:
    """Wait for all ranks, then destroy the process groups. Collective call.

    Without the barrier, leaving a gloo group may abort the process. Do not call it after an error on this rank only:
    the others would never reach the barrier; exit instead, and the launcher ends them.
    """
    if world.all.gloo is not None:
        with world.all.waiting_for_peers():
            dist.barrier(group=world.all.gloo)
    if world.all.heartbeat is not None:
        world.all.heartbeat.stop()
    if world.all.gloo is not None:
        dist.destroy_process_group()


def _watchdog(
    timeouts: DistributedConfig, store: Callable[[], Store], rank: int, world_size: int, keeper: str = ""
) -> Heartbeat | None:
    # A single process has one too, since it may hang.
    if not timeouts.dead_s:
        return None
    return Heartbeat(store(), rank, world_size, dead_s=timeouts.dead_s, silent_s=timeouts.silent_s, keeper=keeper)


def _failure(rank: int, phase: str, text: str) -> str:
    return f"rank {rank} failed in {phase}: {text}"


def _in_words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"sys.exit({error.code}) was called at {place.filename}:{place.lineno}, must be an exception that says why"
        )
    return f"{type(error).__name__}: {error}"


def _by_rank(values: list[str]) -> str:
    return ", ".join(f"{value[:_QUOTED]} on rank {rank}" for rank, value in enumerate(values))
