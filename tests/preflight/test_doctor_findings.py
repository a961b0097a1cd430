"""Findings: severity, agreement between ranks, and how they are printed."""

from __future__ import annotations

import contextlib

import pytest

from flow_grpo.preflight.doctor.findings import (
    Finding,
    as_table,
    equal_on_ranks,
    errors_as_finding,
    failed,
    finding,
    merge_over_ranks,
    summary,
)
from flow_grpo.runtime.ranks.process_group import Group, World
from tests.workers import run_ranks


@pytest.mark.parametrize(
    ("ways_out", "status", "said"),
    [
        ({}, "ok", ""),
        ({"warn": "w"}, "warn", "w"),
        ({"fail": "f"}, "fail", "f"),
        ({"fail": "f", "warn": "w"}, "fail", "f"),
    ],
)
def test_a_finding_is_as_severe_as_its_worst_way_out(ways_out, status, said):
    assert finding("x", "1", **ways_out) == Finding("x", status, "1", said)


def _on_two_ranks(world: World) -> list[Finding]:
    own = [
        finding("a", f"on {world.data.rank}", fail="mend" if world.data.rank else ""),
        finding("b", f"on {world.data.rank}"),
    ]
    found = merge_over_ranks(own, world)
    found += [equal_on_ranks(text, text[: 3 + world.data.rank], "texts", world, "mend") for text in ("one", "other")]
    with errors_as_finding("reading", found, world, "look"), world.sync_errors("reading"):
        if world.data.rank:
            raise ValueError("no\nfile")
    return found


def test_ranks_agree_on_the_worst_finding_on_differences_and_on_errors():
    first, second = run_ranks(_on_two_ranks, 2)
    assert (
        first
        == second
        == [
            Finding("a", "fail", "rank 1: on 1", "mend"),
            Finding("b", "ok", "on 0"),
            Finding("one", "ok", "texts identical on 2 rank(s)"),
            Finding("other", "fail", "texts in 2 versions on 2 rank(s)", "mend"),
            Finding("reading", "fail", "rank 1 failed in reading: ValueError: no file", "look"),
        ]
    )


@pytest.mark.parametrize("number", [1, 2])
def test_an_error_of_one_rank_alone_is_a_finding_only_when_there_are_no_other_ranks(number):
    found: list[Finding] = []
    raised = pytest.raises(RuntimeError) if number > 1 else contextlib.nullcontext()
    with raised, errors_as_finding("update", found, World.of(Group(0, number)), "look"):
        raise RuntimeError("out of memory")
    assert failed(found) == ["update"] * (number == 1)


def test_the_table_ends_with_the_worst_and_shows_every_way_out():
    findings = [finding("bad", "1", fail="mend"), finding("fine", "2\n3"), finding("odd", "4", warn="look")]
    assert as_table(findings).splitlines() == [
        "ok    fine  2",
        "            3",
        "warn  odd   4",
        "            -> look",
        "fail  bad   1",
        "            -> mend",
    ]
    assert summary(findings, 0.26) == "doctor: 1 ok, 1 warn, 1 fail in 0.3 s (bad, odd)"
    assert summary(findings[1:2], 2) == "doctor: 1 ok, 0 warn, 0 fail in 2.0 s"
