"""Findings: severity, agreement between ranks, errors of checks, and how they are printed."""

from unittest import mock

import pytest

from flow_grpo.preflight.doctor import examine
from flow_grpo.preflight.doctor.findings import Finding, as_table, equal_on_ranks, failed, finding, summary
from flow_grpo.runtime.ranks.process_group import Group, World
from tests.workers import run_ranks


def examined(world: World, first, **checks) -> tuple[list[Finding], str]:
    """Return the findings of a list of checks that begins with `first`, and what was printed on the way."""
    trainer = mock.Mock(world=world)
    with mock.patch.object(examine, "BEFORE_SAMPLING", (first,)):
        found = examine.run_checks(trainer, checks)
    return found, str(trainer.progress.say.call_args_list)


def _on_two_ranks(world: World) -> list[Finding]:
    rank = world.data.rank

    def first(_):
        yield finding("a", f"on {rank}", fail="mend" if rank else "")
        yield finding("b", f"on {rank}")
        for text in ("one", "other"):
            yield equal_on_ranks(text, text[: 3 + rank], "texts", world, "mend")

    def reading(_):
        yield finding("c", "before the error")
        with world.sync_errors("reading"):
            if rank:
                raise ValueError("no\nfile")

    return examined(world, first, reading=reading)[0]


def test_ranks_agree_on_the_worst_finding_on_differences_and_on_errors():
    first, second = run_ranks(_on_two_ranks, 2)
    assert first == second
    assert first == [
        Finding("a", "fail", "rank 1: on 1", "mend"),
        Finding("b", "ok", "on 0"),
        Finding("one", "ok", "texts identical on 2 rank(s)"),
        Finding("other", "fail", "texts in 2 versions on 2 rank(s)", "mend"),
        Finding("c", "ok", "before the error"),
        Finding("reading", "fail", "rank 1 failed in reading: ValueError: no file", examine.WAY_OUT),
    ]


def test_an_error_of_one_rank_alone_is_a_finding_only_when_there_are_no_other_ranks():
    def first(_):
        yield finding("a", "1")

    def update(_):
        yield finding("b", "2")
        raise RuntimeError("out of memory")

    assert failed(examined(World(), first, update=update)[0]) == ["update"]
    trainer = mock.Mock(world=World.of(Group(0, 2)))
    with mock.patch.object(examine, "BEFORE_SAMPLING", (first,)), pytest.raises(RuntimeError, match="out of memory"):
        examine.run_checks(trainer, {"update": update})
    (said,) = trainer.progress.say.call_args.args
    assert "ok    a  1" in said and "ok    b  2" in said


def test_nothing_is_sampled_with_steps_that_fail_but_the_rewards_are_examined():
    def unsound(_):
        yield finding("steps", "std 3", fail="lower the noise")

    def named(name):
        return lambda _: iter([finding(name, "1")])

    checks = {name: named(name) for name in ("rollout", "rewards", "signal", "epoch")}
    assert [found.name for found in examined(World(), unsound, **checks)[0]] == ["steps", "rewards"]
    checks["rollout"] = lambda _: iter([finding("rollout", "1", fail="mend")])
    found, _ = examined(World(), named("steps"), **checks)
    assert [found.name for found in found] == ["steps", "rollout", "rewards"]


def test_the_table_ends_with_the_worst_and_shows_every_way_out():
    findings = [finding("bad", "1", fail="mend"), finding("fine", "2\n3"), finding("odd", "4", warn="look")]
    assert as_table(findings) == [
        "ok    fine  2",
        "            3",
        "warn  odd   4",
        "            -> look",
        "fail  bad   1",
        "            -> mend",
    ]
    assert summary(findings, 0.26) == "doctor: 1 ok, 1 warn, 1 fail in 0.3 s (bad, odd)"
    assert summary(findings[1:2], 2) == "doctor: 1 ok, 0 warn, 0 fail in 2.0 s"
