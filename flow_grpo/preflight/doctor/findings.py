"""Findings: the outcome of each check, merged over ranks and printed as a table."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence

from flow_grpo.runtime.ranks.process_group import World

STATUSES = ("ok", "warn", "fail")  # by severity


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check."""

    name: str
    status: str  # "ok", "warn" (training works, maybe not as intended) or "fail" (it would not learn what it should)
    measured: str  # value and its bound
    way_out: str = ""  # remedy; "" when all is well


def finding(name: str, measured: str, *, fail: str = "", warn: str = "") -> Finding:
    """Return a finding, whose status a way out in `fail` or `warn` sets, `fail` first."""
    status = "fail" if fail else "warn" if warn else "ok"
    return Finding(name, status, measured, fail or warn)


def equal_on_ranks(name: str, value: str, what: str, world: World, way_out: str) -> Finding:
    """Check that every rank passes the same `value` of `what`, a plural; collective call."""
    values = world.all.gather_text(value)
    kinds = len(set(values))
    message = f"{what} identical" if kinds == 1 else f"{what} in {kinds} versions"
    return finding(name, f"{message} on {len(values)} rank(s)", fail="" if kinds == 1 else way_out)


def merge_over_ranks(findings: Sequence[Finding], world: World) -> list[Finding]:
    """Return the most severe finding of any rank per check; collective call."""
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


def failed(findings: Iterable[Finding]) -> list[str]:
    """Return the names of the checks that failed."""
    return [found.name for found in findings if found.status == "fail"]


def as_table(findings: Sequence[Finding]) -> list[str]:
    """Return one line per finding, the most severe last; ways out follow on lines of their own."""
    width = max((len(found.name) for found in findings), default=0)
    lines = []
    for found in sorted(findings, key=lambda found: STATUSES.index(found.status)):
        first, *more = found.measured.splitlines() or [""]
        lines.append(f"{found.status:<4}  {found.name:<{width}}  {first}")
        more += [f"-> {found.way_out}"] if found.way_out else []
        lines += [f"{'':<4}  {'':<{width}}  {line}" for line in more]
    return lines


def summary(findings: Sequence[Finding], seconds: float) -> str:
    """Return one line: how many checks have each status, and which are not ok."""
    counts = [f"{sum(found.status == status for found in findings)} {status}" for status in STATUSES]
    others = [found.name for found in findings if found.status != "ok"]
    return f"doctor: {', '.join(counts)} in {seconds:.1f} s" + (f" ({', '.join(others)})" if others else "")
