"""Findings: the outcome of each check, merged over ranks and printed as a table."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

from flow_grpo.runtime.ranks.process_group import RankError, World

STATUSES = ("ok", "warn", "fail")  # by severity


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: of the check.
        status: "ok", "warn" (training works, maybe not as intended) or "fail" (it would not learn what it should).
        measured: what was measured, and its bound.
        way_out: what to do about it; "" when all is well.
    """

    name: str
    status: str
    measured: str
    way_out: str = ""


def finding(name: str, measured: str, *, fail: str = "", warn: str = "") -> Finding:
    """Return a finding; a non-empty way out in `fail` or `warn` sets the status, `fail` first."""
    status = "fail" if fail else "warn" if warn else "ok"
    return Finding(name, status, measured, fail or warn)


def equal_on_ranks(name: str, value: str, what: str, world: World, way_out: str) -> Finding:
    """Check that every rank passes the same value; collective call: every rank must call it.

    Args:
        name: of the check.
        value: this rank's, such as a hash.
        what: the value is of, in the plural.
        world: this rank and its peers.
        way_out: of ranks that differ.
    """
    values = world.all.gather_text(value)
    kinds = len(set(values))
    said = f"{what} identical" if kinds == 1 else f"{what} in {kinds} versions"
    return finding(name, f"{said} on {len(values)} rank(s)", fail="" if kinds == 1 else way_out)


def merge_over_ranks(findings: Sequence[Finding], world: World) -> list[Finding]:
    """Return the most severe finding of any rank per check; collective call: every rank must call it."""
    texts = world.all.gather_text(json.dumps([dataclasses.astuple(found) for found in findings]))
    merged: dict[str, Finding] = {}
    for rank, text in enumerate(texts):
        for found in (Finding(*row) for row in json.loads(text)):
            known = merged.get(found.name)
            if known is None:
                merged[found.name] = found
            elif STATUSES.index(found.status) > STATUSES.index(known.status):
                merged[found.name] = dataclasses.replace(found, measured=f"rank {rank}: {found.measured}")
    return list(merged.values())


@contextlib.contextmanager
def errors_as_finding(name: str, findings: list[Finding], world: World, way_out: str) -> Iterator[None]:
    """Inside, an error that is raised on all ranks, as by `World.sync_errors`, becomes a failed check.

    With several ranks any other error is raised: the peers are waiting in a collective call.

    Args:
        name: of the check.
        findings: the failed check is appended to them.
        world: this rank and its peers.
        way_out: of the failed check.
    """
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        if world.all.size > 1 and not isinstance(error, RankError | ValueError):
            raise
        findings.append(finding(name, " ".join(str(error).split()), fail=way_out))


def failed(findings: Iterable[Finding]) -> list[str]:
    """Return the names of the checks that failed."""
    return [found.name for found in findings if found.status == "fail"]


def as_table(findings: Sequence[Finding]) -> str:
    """Return one line per finding, the most severe last; ways out follow on lines of their own."""
    width = max((len(found.name) for found in findings), default=0)
    lines = []
    for found in sorted(findings, key=lambda found: STATUSES.index(found.status)):
        first, *more = found.measured.splitlines() or [""]
        lines.append(f"{found.status:<4}  {found.name:<{width}}  {first}")
        lines += [f"{'':<4}  {'':<{width}}  {line}" for line in more]
        if found.way_out:
            lines.append(f"{'':<4}  {'':<{width}}  -> {found.way_out}")
    return "\n".join(lines)


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """Return one line: how many checks have each status, and which are not ok."""
    counts = [f"{sum(found.status == status for found in findings)} {status}" for status in STATUSES]
    others = [found.name for found in findings if found.status != "ok"]
    return f"doctor: {', '.join(counts)} in {seconds:.1f} s" + (f" ({', '.join(others)})" if others else "")
