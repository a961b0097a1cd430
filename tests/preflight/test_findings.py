"""Findings: their weight, what ranks agree on, and how they look."""

from __future__ import annotations

import contextlib

import pytest

from flow_grpo.preflight.findings import Finding, agreed, as_table, attempted, failed, finding, in_one_line
from flow_grpo.runtime.ranks.process_group import Ranks
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
def test_a_finding_is_as_bad_as_the_worst_way_out_it_names(ways_out, status, said):
    assert finding("x", "1", **ways_out) == Finding("x", status, "1", said)


def _differing(ranks: Ranks) -> list[Finding]:
    own = [finding("a", f"on {ranks.rank}", fail="mend" if ranks.rank else ""), finding("b", f"on {ranks.rank}")]
    return agreed(own, ranks)


def test_ranks_agree_on_the_worst_finding_and_say_whose_it_is():
    wanted = [Finding("a", "fail", "rank 1: on 1", "mend"), Finding("b", "ok", "on 0")]
    assert run_ranks(_differing, 2) == [wanted, wanted]


def _failing_on_one(ranks: Ranks) -> list[Finding]:
    found: list[Finding] = []
    with attempted("reading", found, ranks, "look"), ranks.sync_errors("reading"):
        if ranks.rank:
            raise ValueError("no\nfile")
    return found


def test_what_breaks_on_one_rank_is_a_failed_check_on_all():
    said = "rank 1 failed in reading: ValueError: no file"
    assert run_ranks(_failing_on_one, 2) == [[Finding("reading", "fail", said, "look")]] * 2


@pytest.mark.parametrize("number", [1, 2])
def test_what_a_rank_raises_for_itself_is_a_finding_of_a_single_one_only(number):
    found: list[Finding] = []
    raised = pytest.raises(RuntimeError) if number > 1 else contextlib.nullcontext()
    with raised, attempted("update", found, Ranks(0, number), "look"):
        raise RuntimeError("out of memory")
    assert [each.status for each in found] == ["fail"] * (number == 1)


def test_an_attempt_that_goes_well_adds_nothing():
    found: list[Finding] = []
    with attempted("reading", found, Ranks(), "look"):
        pass
    assert found == []


FINDINGS = [finding("bad", "1", fail="mend"), finding("fine", "2\n3"), finding("odd", "4", warn="look")]


def test_the_table_has_the_worst_last_and_every_way_out():
    assert as_table(FINDINGS).splitlines() == [
        "ok    fine  2",
        "            3",
        "warn  odd   4",
        "            -> look",
        "fail  bad   1",
        "            -> mend",
    ]


def test_one_line_counts_and_names_what_is_not_ok():
    assert in_one_line(FINDINGS, 0.26) == "doctor: 1 ok, 1 warn, 1 fail in 0.3 s (bad, odd)"
    assert in_one_line(FINDINGS[1:2], 2) == "doctor: 1 ok, 0 warn, 0 fail in 2.0 s"
    assert failed(FINDINGS) == ["bad"]
