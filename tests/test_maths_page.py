"""The numbers of docs/maths.md are those of the code."""

import math
import re
from pathlib import Path
from typing import get_args

import pytest
import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

from flow_grpo.maths.advantages import combine_rewards
from flow_grpo.maths.loss import grpo_loss
from flow_grpo.maths.schedule import flow_sigmas, step_weights
from flow_grpo.maths.sde import coefficients
from flow_grpo.settings.schema import KNOBS

PAGE = (Path(__file__).parents[1] / "docs" / "maths.md").read_text(encoding="utf-8")
SIGMAS = flow_sigmas(10, 3.0)


def table(first: str) -> list[list[str]]:
    """Return the rows of the table whose head begins so."""
    (found,) = re.findall(rf"^\| {re.escape(first)}.*\n\|[-|]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip().strip("`") for cell in row.strip("|").split("|")] for row in found.splitlines()]


def test_the_schedule() -> None:
    own, given = (FlowMatchEulerDiscreteScheduler(shift=3.0) for _ in range(2))
    own.set_timesteps(10)
    given.set_timesteps(sigmas=[1 - i / 10 for i in range(10)])
    for (_, *levels), sigmas in zip(table("i |"), (SIGMAS, own.sigmas), strict=True):
        assert [float(level) for level in levels] == pytest.approx(sigmas.tolist(), abs=5.1e-5)
    assert given.sigmas.tolist() == pytest.approx(SIGMAS.tolist(), abs=1e-6)


def test_the_steps() -> None:
    rows = table("step |")
    assert len(rows) == 9
    for number, kind, level, *said in rows:
        here, after = SIGMAS[int(number) : int(number) + 2].tolist()
        step = coefficients(here, after, kind=kind, noise_level=float(level), sigma_cap=float(SIGMAS[1]))
        excess = 100 * (math.hypot(step.c, step.std) / after - 1)
        found = [float(step.std), float(step.c), float(step.gain), excess]
        for text, value, digits in zip(said, found, (4, 4, 4, 1), strict=True):
            assert float(text.removesuffix(" %")) == pytest.approx(value, abs=0.51 * 10**-digits), (number, kind)


def test_the_weights_of_steps() -> None:
    rows = table("`train.step_weight`")
    assert len(rows) == 3
    for name, *said in rows:
        weight, _, guard = name.partition("`")
        assert weight in get_args(KNOBS["train.step_weight"].kind)  # no weight that the knob refuses
        name = "inverse_delta" if "train.guard" in guard else weight
        found = step_weights(name, SIGMAS, [1, 5, 8], kind="flow", noise_level=0.7)[[1, 5, 8]]
        assert [float(text) for text in said] == pytest.approx(found.tolist(), abs=6e-4)


def test_the_advantages() -> None:
    _, *columns = zip(*table("copy"), strict=True)
    first, second, alone, both = (torch.tensor([float(text) for text in column]) for column in columns)
    rewards = {"first": first, "second": second}
    valid, gids = dict.fromkeys(rewards, torch.ones(4, dtype=torch.bool)), torch.zeros(4, dtype=torch.int64)
    for weights, said in (({"first": 1.0}, alone), ({"first": 1.0, "second": 0.5}, both)):
        found = combine_rewards(rewards, valid, weights, gids, k=4, floors={"second": 0.3}).advantages
        assert said.tolist() == pytest.approx(found.tolist(), abs=6e-5)


def test_the_loss() -> None:
    rows = table("A | ratio")
    assert len(rows) == 5
    for advantage, ratio, policy, flows in rows:
        log_prob = torch.tensor([[math.log(float(ratio))]], requires_grad=True)
        loss = grpo_loss(log_prob, torch.zeros(1, 1), torch.tensor([float(advantage)]), clip_range=1e-3)
        (gradient,) = torch.autograd.grad(loss.per_sample.sum(), log_prob)
        assert float(policy) == pytest.approx(loss.per_sample.item(), abs=6e-5)
        assert flows.startswith("yes") == bool(gradient != 0)
    assert f"a `beta` of {0.004 / (SIGMAS[5] - SIGMAS[6]):.3f} there" in PAGE
