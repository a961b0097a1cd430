"""A short tail is compared with all steps a few times in a run, and left where it ranks copies otherwise."""

import dataclasses

import torch

from flow_grpo.maths.schedule import tail_levels
from flow_grpo.run import tail_check
from flow_grpo.run.tail_check import finish_by_all_steps
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.checkpoints import checkpoint
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.process_group import World
from tests.run.test_trainer import make_trainer, metrics_of
from tests.toy import SIGMAS, ToyPolicy, collector
from tests.workers import run_ranks


def short_tailed(trainer: Trainer) -> Trainer:
    """Give a trainer a short tail, as its recipe would."""
    trainer.collector.sampling = dataclasses.replace(trainer.collector.sampling, tails=tail_levels(SIGMAS, 2))
    trainer.__post_init__()
    return trainer


def finished_twice(world: World, batch: int) -> torch.Tensor:
    made = collector(world, ToyPolicy(), debug=False, train_batch_size=batch)
    made.sampling = dataclasses.replace(made.sampling, tails=tail_levels(SIGMAS, 2))
    (first,) = made.collect(Clock(torch.device("cpu")))
    return finish_by_all_steps(made, first, torch.device("cpu"))["brightness"]


def test_the_second_finish_is_what_a_run_without_a_short_tail_samples_on_any_number_of_ranks() -> None:
    own = finished_twice(World(), 8)
    made = collector(World(), ToyPolicy(), debug=False, train_batch_size=8)
    (exact,) = made.collect(Clock(torch.device("cpu")))
    order = (exact.samples.keys[:8] @ torch.tensor([4, 1, 0])).argsort()
    few, many = exact.rewards["brightness"].values[:8][order].double().view(2, 4)
    assert torch.equal(own[1, 1], many) and not torch.allclose(own[1, 0], many)
    assert own[0].isnan().all() and few.isfinite().all()  # no more steps are left than the tail has
    for found in run_ranks(finished_twice, 2, 4):
        torch.testing.assert_close(found, own, rtol=0, atol=1e-6, equal_nan=True)


class Dimmed(ToyPolicy):
    """Decodes for rewards at half the brightness of every second copy."""

    def decode_for_rewards(self, latents: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor([1.0, 0.5]).repeat(len(latents) // 2)
        return self.decode(latents) * scale[:, None, None, None, None]


def test_a_small_decoder_is_compared_with_the_full_one_and_left_with_the_tail() -> None:
    made = collector(World(), Dimmed(), debug=False, train_batch_size=8)
    made.small_decoder = True
    (first,) = made.collect(Clock(torch.device("cpu")))
    found = finish_by_all_steps(made, first, torch.device("cpu"))["brightness"]
    full = collector(World(), Dimmed(), debug=False, train_batch_size=8)
    full.small_decoder = True
    full.be_exact()
    (exact,) = full.collect(Clock(torch.device("cpu")))
    order = (exact.samples.keys[:8] @ torch.tensor([4, 1, 0])).argsort()
    own, other = (one.rewards["brightness"].values[:8][order].double().view(2, 4) for one in (first, exact))
    assert made.approximates and not full.approximates and not torch.allclose(own, other)
    assert torch.equal(found[:, 0], own)
    torch.testing.assert_close(found[:, 1].float(), other.float())


def test_it_is_asked_in_the_first_epoch_and_then_for_less_than_a_hundredth(tmp_path, monkeypatch) -> None:
    counts = []
    for share in (tail_check.SHARE, 1.0):
        monkeypatch.setattr(tail_check, "SHARE", share)
        monkeypatch.setattr(tail_check, "FEW_GROUPS", 2)
        trainer = short_tailed(make_trainer(tmp_path, World()))
        trainer.train()
        counts.append(trainer.state.forward_equivalents)
        asked = metrics_of(tmp_path, "system/tail_forward_equivalents")
        assert [row["step"] for row in asked] == ([1, 2] if share < 1 else [1, 2, 3])
    (window,) = trainer.collector.sampling.windows([int(trainer.state.sampler.plan(0)[0][0][1])])
    assert asked[0]["system/tail_forward_equivalents"] == 4 * (len(SIGMAS) - 2 - window[-1])
    assert counts[0] == counts[1]  # its forwards are counted apart


def test_a_tail_that_ranks_copies_otherwise_is_left_and_so_by_a_resumed_run(tmp_path, monkeypatch, capsys) -> None:
    values = torch.randn((tail_check.KEPT + 9, 2, 4), dtype=torch.float64)
    monkeypatch.setattr(tail_check, "finish_by_all_steps", lambda *_: {"brightness": values})
    trainer = short_tailed(make_trainer(tmp_path, World()))
    trainer.train()
    trainer.save()
    assert not trainer.collector.sampling.approximates
    assert "sample.tail_steps=0 ranks copies otherwise than all steps" in capsys.readouterr().out
    newest = checkpoint.published(tmp_path / "checkpoints")[-1]
    for seed, kept in ((1, {"brightness": values[9:]}), (2, {})):  # of other samples nothing is known
        resumed = make_trainer(tmp_path, World())
        resumed.collector.sampling = dataclasses.replace(resumed.collector.sampling, seed=seed)
        resumed.state.restore(newest, world=World())
        assert (short_tailed(resumed).collector.sampling.tails is None) == bool(kept)
        torch.testing.assert_close(resumed.state.tail.values, kept, rtol=0, atol=0)
