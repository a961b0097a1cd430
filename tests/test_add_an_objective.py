"""An objective is one class and one entry of traits: trained, planned, examined, and refused where it must be."""

import dataclasses

import pytest
import torch

import train_grpo
from flow_grpo.algorithm.rollout.denoise import step_transition
from flow_grpo.algorithm.update.objective import Loss
from flow_grpo.cost.plan import make_plan
from flow_grpo.maths.loss import grpo_loss
from flow_grpo.maths.sde import log_prob
from flow_grpo.settings.errors import ConfigError, refusal
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.objectives import OBJECTIVES, Traits
from tests.command import command
from tests.test_train_grpo import SMALL, metrics_of


@dataclasses.dataclass(frozen=True)
class LastStepObjective:
    """Learns from the last recorded step of every sample, with its log-probability as it is."""

    policy: object
    rollout: object
    train: object

    @classmethod
    def build(cls, config, policy, rollout, average):
        return cls(policy, rollout, config.train)

    def passes(self, samples):
        return 1

    def remember(self, take, *, as_rolled_out):
        return None

    def loss(self, micro, memory, number):
        new, recorded = self._log_prob(micro), micro.trajectory.log_probs[:, -1]
        terms = grpo_loss(new[:, None], new.detach()[:, None], micro.advantages.to(new), clip_range=0.5)
        return Loss(terms, new.detach() - recorded)

    @torch.no_grad()
    def drift(self, micro, memory):
        return self._log_prob(micro) - micro.trajectory.log_probs[:, -1]

    def _log_prob(self, micro):
        last = micro.replayed(micro.passes - 1)
        step = step_transition(self.policy, last.latents, micro.conditioning, last.steps, self.rollout)
        return log_prob(last.drawn, step)


def forbids(config) -> None:
    if config.train.kl_coef:
        raise refusal("train.kl_coef", config.train.kl_coef, "must be 0; pass --config.train.kl_coef=0")


@pytest.fixture(autouse=True)
def entry(monkeypatch):
    traits = Traits(
        implementation=f"{__name__}:{LastStepObjective.__name__}",
        replays_steps=True,
        passes=lambda config: 1,
        forwards=lambda config: 0,
        forbids=forbids,
    )
    monkeypatch.setitem(OBJECTIVES, "last_step", traits)


def recipe(**knobs: object) -> list[str]:
    return command(SMALL | {"train.objective": "last_step"}, **knobs)


def test_it_trains_two_epochs_examined_before(tmp_path, capsys):
    given = recipe(output_root=tmp_path, run_name="run", data__root=tmp_path / "world", doctor="fast")
    assert train_grpo.main(given) == 0
    assert "doctor:" in capsys.readouterr().out
    rows = [row for row in metrics_of(tmp_path / "run") if "train/grad_norm" in row]
    assert len(rows) == 2 and all(row["train/grad_norm"] > 0 for row in rows)


def test_it_is_planned_by_its_traits_and_refused_where_they_forbid():
    _, spec, *words = recipe(sample__sde_window=2)
    assert make_plan(load_config(spec, words), 1, 1e12).update_calls == 2  # one pass of each of two batches
    grpo = load_config(spec, [*words, "--config.train.objective=grpo"])
    assert make_plan(grpo, 1, 1e12).update_calls == 4
    with pytest.raises(ConfigError, match=r"train\.kl_coef: got 0\.1, must be 0"):
        load_config(spec, [*words, "--config.train.kl_coef=0.1"])
    with pytest.raises(ConfigError, match=r"train\.objective: got 'none', must be one of grpo, forward, last_step"):
        load_config(spec, [*words, "--config.train.objective=none"])
