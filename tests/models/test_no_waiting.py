"""No host synchronisation inside a step: a device computes behind the program, which must not wait for it.

On a pretend accelerator, which notes every wait; no profile of a real one was taken.
"""

import dataclasses

import pytest
import torch

from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.objective import GrpoObjective
from flow_grpo.algorithm.update.updater import Updater
from flow_grpo.maths.schedule import flow_sigmas, tail_levels
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.records import Samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import Sampling, SdeSettings
from tests.models.test_wan_policy import condition, policy
from tests.pretend_device import PRETEND, OnDevice, Watch, move
from tests.toy import batch_of, train_config, update_config

SIGMAS = flow_sigmas(6, 3.0)
SDE = SdeSettings("flow", 0.7)
CONDITIONS = [condition(number) for number in range(4)]
WINDOWS = [(1, 2), (2, 3), (1, 2), (3, 4)]


def rolled(made: WanPolicy, *, windows=WINDOWS, tail: bool = False, record: bool = True) -> tuple[Samples, list[str]]:
    tails = tail_levels(SIGMAS, 2) if tail else None
    settings = Sampling(SIGMAS, SDE, seed=3, tails=tails, record=record)
    with Watch() as watch:
        conditioning = made.encode(CONDITIONS)
        watch.waits.clear()
        return rollout(made, CONDITIONS, conditioning, windows, settings), watch.waits


def on_device(made: WanPolicy) -> WanPolicy:
    move(made.module)
    made.device = PRETEND
    return made


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"guidance_scale": 5.0}, {"tail": True}),
        ({"round_timestep": True}, {"windows": [()] * 4, "record": False}),
    ],
    ids=str,
)
def test_a_rollout_waits_for_nothing(settings, options):
    made = policy(mode="lora", **settings)
    there, waits = rolled(on_device(policy(mode="lora", **settings)), **options)
    assert waits == []
    assert isinstance(there.final_latents, OnDevice)
    torch.testing.assert_close(there.final_latents.held, rolled(made, **options)[0].final_latents, rtol=1e-4, atol=1e-5)


def waits_of_an_update(batch_size: int, **changes) -> list[str]:
    made = on_device(policy(mode="lora"))
    samples, _ = rolled(made)
    samples = dataclasses.replace(samples, advantages=torch.tensor([1.0, -1.0, 0.5, -0.5]), weights=torch.ones(4))
    train = train_config(batch_size=batch_size, **changes)
    optimizer = torch.optim.SGD(made.trained_parameters(), lr=1e-3)
    objective = GrpoObjective(made, Sampling(SIGMAS, SDE, 3), None, train)
    moving = Updater(made, objective, optimizer, update_config(4, train), World())
    batch = batch_of(samples)
    with Watch() as watch:
        moving.run(batch, moving.plan(batch, 0), UpdateHistory())
    return watch.waits


@pytest.mark.parametrize("changes", [{}, {"kl_coef": 0.1, "guard": True}], ids=str)
def test_an_update_waits_as_often_with_four_micro_batches_as_with_one(changes):
    one, four = (waits_of_an_update(batch_size, **changes) for batch_size in (4, 1))
    assert one == four
    assert one, "an optimizer step is taken only once its ratios and its gradient's norm are known"


def test_a_wait_is_noticed():
    with Watch() as watch:
        there = torch.ones(3).to(PRETEND, non_blocking=True)
        assert watch.waits == []
        assert float(there.sum()) == 3
        there.cpu()
        torch.ones(3).to(PRETEND)
        there[torch.tensor([0])]
        there[there > 0]
    kinds = [wait.split(": ")[1].split()[0] for wait in watch.waits]
    assert kinds == ["_local_scalar_dense", "a", "a", "index", "index"]
    with Watch(), pytest.raises(AssertionError, match="device and of CPU memory"):
        there + torch.ones(3)
