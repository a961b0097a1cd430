"""What a check of the doctor found: how it is judged, agreed on by all ranks, and shown."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence

from flow_grpo.runtime.ranks.process_group import RankError, Ranks

STATUSES = ("ok", "warn", "fail")  # by rising weight


@dataclasses.dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        name: of the check.
        status: "ok", "warn" (a run works, maybe not as meant) or "fail" (a run would learn nothing or something else).
        measured: what was measured, with the bound it was compared with.
        way_out: what to do about it; "" when all is well.
    """

    name: str
    status: str
    measured: str
    way_out: str = ""


def finding(name: str, measured: str, *, fail: str = "", warn: str = "") -> Finding:
    """Return a finding that is as bad as the worse of the ways out it is given: none of them is "ok"."""
    status = "fail" if fail else "warn" if warn else "ok"
    return Finding(name, status, measured, fail or warn)


def agreed(findings: Sequence[Finding], ranks: Ranks) -> list[Finding]:
    """Return one finding per check, the worst of all ranks, alike on every rank; every rank must call it."""
    texts = ranks.gather_text(json.dumps([dataclasses.astuple(found) for found in findings]))
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
def attempted(name: str, findings: list[Finding], ranks: Ranks, way_out: str) -> Iterator[None]:
    """Inside, what is raised on all ranks alike, as `Ranks.together` does, becomes a failed check.

    What one rank of several raises for itself is no finding: the others wait in an exchange.

    Args:
        name: of that check.
        findings: it is added to them.
        ranks: who takes part.
        way_out: of the failure.
    """
    try:
        yield
    except (RuntimeError, ValueError, AssertionError) as error:
        if ranks.world_size > 1 and not isinstance(error, RankError | ValueError):
            raise
        findings.append(finding(name, " ".join(str(error).split()), fail=way_out))


def failed(findings: Iterable[Finding]) -> list[str]:
    """Return the names of the checks that failed."""
    return [found.name for found in findings if found.status == "fail"]


def as_table(findings: Sequence[Finding]) -> str:
    """Return one line per finding, worst last where the eye is, each way out on a line of its own."""
    width = max((len(found.name) for found in findings), default=0)
    lines = []
    for found in sorted(findings, key=lambda found: STATUSES.index(found.status)):
        first, *more = found.measured.splitlines() or [""]
        lines.append(f"{found.status:<4}  {found.name:<{width}}  {first}")
        lines += [f"{'':<4}  {'':<{width}}  {line}" for line in more]
        if found.way_out:
            lines.append(f"{'':<4}  {'':<{width}}  -> {found.way_out}")
    return "\n".join(lines)


def in_one_line(findings: Sequence[Finding], seconds: float) -> str:
    """Return how many checks passed, and which did not."""
    counts = [f"{sum(found.status == status for found in findings)} {status}" for status in STATUSES]
    others = [found.name for found in findings if found.status != "ok"]
    return f"doctor: {', '.join(counts)} in {seconds:.1f} s" + (f" ({', '.join(others)})" if others else "")
