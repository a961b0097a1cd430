"""`--check` tells a judge that orders videos from one that does not, and asks it only about what it reads."""

import dataclasses

import pytest
import torch

from flow_grpo.rewards.base import build_reward
from flow_grpo.rewards.results import all_valid
from tests.limits import LIMIT_S
from tests.scripted_server import HEALTH, ScriptedServer, answer, serving
from tools.reward_server import main
from tools.serving import check
from tools.serving.http_server import RewardServer
from tools.serving.scoring_service import LocalScorer, ScoringService


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(check, "SPEC", dataclasses.replace(check.SPEC, frames=5, height=48, width=64))
    monkeypatch.setattr(check, "SCENES", 2)


class Judge:
    """Scores by `answer` of a video and its condition."""

    model, version, scores = "fake", "v1", ("fake",)
    device, wants = torch.device("cpu"), {"frames": 3}

    def __init__(self, answer, *needs: str) -> None:
        self.answer, self.needs = answer, needs

    def __call__(self, videos, conditions):
        values = [float(self.answer(*pair)) for pair in zip(videos, conditions, strict=True)]
        return {"fake": all_valid(conditions, torch.tensor(values), {})}


def checked(capsys, scorer) -> tuple[int, str]:
    service = ScoringService(scorer, 2**26)
    with serving(RewardServer(("127.0.0.1", 0), service, timeout_s=LIMIT_S)) as server:
        code = main(["--check", f"{server.url}/"])
    return code, capsys.readouterr().out


def nearness(video, condition):
    return -(video - condition.target_video).abs().mean()


def test_a_judge_that_orders_passes_with_its_cost_and_is_not_asked_about_a_prompt(capsys):
    code, said = checked(capsys, LocalScorer(build_reward("target_psnr", data_root=".")))
    assert code == 0 and "orders known-good videos above all it is asked about" in said
    assert said.count("below in 2 of 2") == 6 and "| wrong prompt |  | not asked: reads no prompt |" in said
    assert " s a score of 5x48x64, with sending; the server's peak memory: " in said and "GiB (cpu)" in said


@pytest.mark.parametrize(
    ("answer", "needs", "wrong"),
    [
        (lambda video, _: -nearness(video, _), ("target",), [*check.CASES][:6]),
        (lambda video, _: -video[:, 1:].sub(video[:, :-1]).abs().mean(), ("camera",), ["frozen", "reversed"]),
        (lambda video, _: -abs(video.mean() - 0.5), (), ["noise"]),
        (lambda video, one: len(one.prompt), ("prompt",), ["blurred", "noise"]),
        (lambda video, one: torch.nan if video.equal(one.target_video) else 0, ("target",), [*check.CASES][:6]),
        (
            lambda video, _: torch.nan if video.diff(dim=1).abs().mean() > 0.2 else video.diff().square().mean(),
            (),
            ["noise"],
        ),
    ],
)
def test_a_judge_that_does_not_order_fails_and_is_told_what(capsys, answer, needs, wrong):
    code, said = checked(capsys, Judge(answer, *needs))
    last = said.splitlines()[-1].removeprefix("does not order above: ").split("; ")
    assert code == 1 and {f"fake {case}" for case in wrong} <= set(last)
    assert not set(last) & {f"fake {case}" for case in check.CASES if check.not_asked(case, needs)}
    assert "score of 3x48x64" in said


def test_what_is_asked_follows_from_what_a_judge_reads():
    asked = {
        needs: [case for case in check.CASES if not check.not_asked(case, needs)]
        for needs in ((), ("prompt",), ("source",), ("camera",), ("source", "camera"), ("target",))
    }
    views = ["frozen", "reversed", "mirrored"]
    assert asked == {
        (): ["blurred", "noise"],
        ("prompt",): ["blurred", "noise", "wrong prompt"],
        ("source",): ["mirrored", "blurred", "noise"],
        ("camera",): [*views, "noise", "wrong camera"],
        ("source", "camera"): [*views, "noise", "wrong camera"],
        ("target",): [*views, "blurred", "noise", "wrong camera"],
    }


def test_a_known_good_video_is_its_true_view_and_its_room_is_known():
    condition, films = check.examples(0)
    assert set(films) == {"known-good", *check.CASES} and torch.equal(films["known-good"], condition.target_video)
    assert torch.allclose(condition.target_poses[0], torch.eye(4).double())
    for case in set(check.CASES) - {"wrong prompt"}:
        assert nearness(films[case], condition) < -0.01, case


@pytest.mark.parametrize(
    ("health", "why"), [(HEALTH | {"protocol": 1}, "speaks protocol 1"), ([], "TypeError"), ({}, "KeyError")]
)
def test_an_address_without_a_judge_is_an_error_of_one_line(capsys, health, why):
    with ScriptedServer(answer({}), health=answer(health)) as server:
        assert main(["--check", server.url]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --check {server.url}: ") and why in said and said.count("\n") == 1
