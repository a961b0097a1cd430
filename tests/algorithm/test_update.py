"""The update: on-policy contract, accumulation, synchronisation, and what it refuses."""

import contextlib
import dataclasses
import math

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from flow_grpo.algorithm.rollout.denoise import step_transition
from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.updater import Updater, name_memory_knobs
from flow_grpo.maths.sde import log_prob
from flow_grpo.records import TrainingBatch
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.sampling import Sampling
from tests.toy import (
    SDE,
    SIGMAS,
    BrightnessReward,
    ToyPolicy,
    batch_of,
    group,
    scored,
    training_batch,
    update,
    updater,
    weights_of,
)
from tests.workers import run_ranks

BATCHES = [group(1, 4), group(2, 4), group(3, 4)]


def updated(*, batches=BATCHES, rollout_batch_size=4, epoch=0, policy=None, batch=None, **changes):
    policy = policy or ToyPolicy()
    batch = batch or training_batch(policy, batches)
    policy.calls.clear()
    metrics = update(updater(policy, rollout_batch_size=rollout_batch_size, **changes), batch, epoch)
    return weights_of(policy), metrics, policy


def rows_of(batch: TrainingBatch, rows: torch.Tensor) -> TrainingBatch:
    return batch_of(batch.take(rows, "cpu"))


def test_another_log_probability_than_the_rollout_s_shows_also_where_the_ratio_is_one_by_construction():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    batch.parts[0].trajectory.log_probs[5, 1] += 0.25
    _, metrics, _ = updated(policy=policy, batch=batch, old_log_prob="recompute")
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert metrics["policy/ratio_first_max_abs_log"] == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize(("micro", "most"), [(4, 0.0), (1, 1e-6), (3, 1e-6), (5, 1e-6), (12, 1e-6)])
def test_before_the_first_update_the_ratio_is_one_exactly_so_at_the_rollout_s_micro_batch(micro, most):
    _, metrics, _ = updated(old_log_prob="rollout", batch_size=micro)
    assert metrics["policy/ratio_first_max_abs_log"] <= most


def test_auto_calls_the_network_without_gradients_only_for_several_updates_of_other_batches():
    for updates, batch_size, extra in ((1, 4, 0), (1, 3, 0), (3, 4, 0), (3, 3, 12)):
        _, metrics, policy = updated(batch_size=batch_size, updates_per_epoch=updates, guard=False)
        assert sum(not grad for _, _, grad, _ in policy.calls) == extra
        if updates == 1:
            assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0


def test_recompute_and_detach_give_the_same_single_update_as_the_rollout_s_log_probs():
    wanted, *_ = updated(old_log_prob="rollout")
    for mode in ("recompute", "detach"):
        torch.testing.assert_close(updated(old_log_prob=mode)[0], wanted, rtol=0, atol=1e-8)


@pytest.mark.parametrize("micro", [1, 3, 12])
def test_micro_batch_size_does_not_change_the_update(micro):
    wanted, *_ = updated(batch_size=4)
    got, *_ = updated(batch_size=micro)
    assert (wanted - weights_of(ToyPolicy())).abs().max() > 3e-5
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)


def test_the_update_follows_the_gradient_of_the_mean_over_samples_and_steps():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    got, metrics, _ = updated(policy=policy, batch=batch, max_grad_norm=1e9)
    policy = ToyPolicy()
    total = 0.0
    batch = batch.take(torch.arange(12), "cpu")
    for column in range(2):
        before, after = batch.trajectory.states[:, column], batch.trajectory.states[:, column + 1]
        steps = batch.trajectory.steps[:, column]
        drawn_from = step_transition(policy, before, batch.conditioning, steps, Sampling(SIGMAS, SDE, 5))
        ratio = (log_prob(after, drawn_from) - batch.trajectory.log_probs[:, column]).exp()
        total = total - (batch.advantages * ratio).mean() / 2
    (total * math.sqrt(16)).backward()  # of the latents of a sample
    wanted = torch.cat([(p - 1e-2 * p.grad).detach().flatten() for p in policy.net.parameters()])
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-7)
    assert metrics["train/loss"] == pytest.approx(total.item(), abs=1e-6)


def test_only_the_recorded_steps_are_replayed_at_their_own_sigmas():
    *_, policy = updated()
    assert len(policy.calls) == 3 * 2
    assert sorted({round(sigma, 4) for _, sigma, *_ in policy.calls}) == [0.8571, 0.9375]


def test_no_reference_forward_without_kl_and_one_per_replayed_step_with_it():
    *_, plain = updated()
    assert not any(reference for *_, reference in plain.calls)
    *_, penalised = updated(kl_coef=0.1)
    assert sum(reference for *_, reference in penalised.calls) == 6
    assert not any(grad for _, _, grad, reference in penalised.calls if reference)


def test_the_kl_is_zero_at_the_start_and_pulls_back_once_the_policy_has_moved():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    silent = dataclasses.replace(batch, advantages=torch.zeros(12))
    before, metrics, _ = updated(policy=policy, batch=silent, kl_coef=1.0)
    assert metrics["policy/kl"] == 0.0
    assert torch.equal(before, weights_of(ToyPolicy()))
    with torch.no_grad():
        policy.net.outer.bias += 0.1
    moved = policy.net.outer.bias.detach().clone()
    _, metrics, _ = updated(policy=policy, batch=silent, kl_coef=1.0, max_grad_norm=1e9)
    assert metrics["policy/kl"] > 0
    assert ((policy.net.outer.bias - moved) < 0).all()


def test_a_sample_of_weight_zero_has_no_effect():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    weights = torch.ones(12)
    weights[4:8] = 0
    loud = batch.advantages.clone()
    loud[4:8] = 100.0
    masked, *_ = updated(batch=dataclasses.replace(batch, weights=weights, advantages=loud))
    without, *_ = updated(batch=rows_of(batch, torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])))
    torch.testing.assert_close(masked, without, rtol=0, atol=1e-7)


def test_an_update_without_any_weight_is_skipped_and_counted():
    policy = ToyPolicy()
    batch = dataclasses.replace(training_batch(policy, BATCHES), weights=torch.zeros(12))
    weights, metrics, _ = updated(batch=batch)
    assert torch.equal(weights, weights_of(ToyPolicy()))
    assert metrics == {"train/updates": 0.0, "train/skipped_updates": 1.0, "train/bad_steps": 0.0}


def dealt(updating: Updater, rows: int, epoch: int) -> list[list[list[int]]]:
    batch = training_batch(ToyPolicy(), [group(1, rows)])
    return [[rows.tolist() for rows in micro_batches] for micro_batches in updating.plan(batch, epoch).steps]


def test_several_updates_deal_every_row_once_evenly_and_reproducibly():
    plan = dealt(updater(ToyPolicy(), updates_per_epoch=3, rollout_batch_size=4), 12, epoch=7)
    assert [len(micro_batches) for micro_batches in plan] == [1, 1, 1]
    assert sorted(row for (rows,) in plan for row in rows) == list(range(12))
    assert all(rows == list(range(rows[0], rows[0] + 4)) for (rows,) in plan)
    orders = {str(dealt(updater(ToyPolicy(), updates_per_epoch=3), 12, epoch)) for epoch in range(6)}
    assert len(orders) > 1
    assert plan == dealt(updater(ToyPolicy(), updates_per_epoch=3), 12, epoch=7)
    plan = dealt(updater(ToyPolicy(), updates_per_epoch=4, rollout_batch_size=12, batch_size=2), 12, epoch=0)
    assert [[len(rows) for rows in micro] for micro in plan] == [[2, 1]] * 4
    plan = dealt(updater(ToyPolicy(), updates_per_epoch=13, batch_size=2), 2, epoch=0)
    assert sorted(row for (rows,) in plan for row in rows) == [0, 1]


def test_the_ratio_moves_away_from_one_with_several_updates_and_the_clip_acts():
    _, metrics, _ = updated(updates_per_epoch=3, learning_rate=1.0, clip_range=1e-4)
    assert metrics["train/updates"] == 3
    assert metrics["policy/ratio_first_max_abs_log"] == 0.0
    assert metrics["policy/ratio_max"] > 1.0001
    assert 0 < metrics["policy/clip_fraction"] < 1


@pytest.mark.parametrize("mode", ["rollout", "recompute", "detach"])
def test_the_probe_sees_the_ratio_after_the_update_whatever_the_update_divided_by(mode):
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    metrics = update(updater(policy, old_log_prob=mode), batch, probe=True)
    assert 0 < metrics["policy/ratio_after_max_abs_log"] < 1


def test_guard_starts_with_ratios_of_exactly_one():
    _, metrics, policy = updated(guard=True, old_log_prob="auto")
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    assert sum(not grad for _, _, grad, _ in policy.calls) == 6  # the old means
    _, detached, other = updated(guard=True, old_log_prob="detach")
    assert detached["policy/ratio_max"] == 1.0
    assert all(grad for _, _, grad, _ in other.calls)


def test_a_step_weight_scales_its_own_step_only():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    moves = []
    for weight in ([1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0]):
        policy = ToyPolicy()
        updating = updater(policy, max_grad_norm=1e9)
        weights = torch.tensor(weight, dtype=torch.float32)
        updating.objective = dataclasses.replace(updating.objective, step_weight=weights)
        update(updating, batch)
        moves.append(weights_of(policy) - weights_of(ToyPolicy()))
    torch.testing.assert_close(moves[0], moves[1] + moves[2], rtol=0, atol=1e-7)
    assert (moves[1] - moves[2]).abs().max() > 1e-4


def test_gradients_are_clipped_to_the_norm():
    free, loose, _ = updated(max_grad_norm=1e9)
    bound, tight, _ = updated(max_grad_norm=1e-3)
    start = weights_of(ToyPolicy())
    assert loose["train/grad_norm"] == pytest.approx(tight["train/grad_norm"])
    assert (bound - start).norm().item() == pytest.approx(1e-2 * 1e-3, rel=1e-2)
    assert (free - start).norm() > 10 * (bound - start).norm()


def test_a_gradient_far_above_the_median_of_the_latest_norms_is_clipped_to_a_multiple_of_it():
    policy, history = ToyPolicy(), UpdateHistory(norms=[1e-3] * 5)
    bound = updater(policy, max_grad_ratio=2.0, max_grad_norm=1e9)
    metrics = update(bound, training_batch(policy, BATCHES), history=history)
    assert (weights_of(policy) - weights_of(ToyPolicy())).norm().item() == pytest.approx(1e-2 * 2e-3, rel=1e-2)
    assert metrics["train/grad_clipped"] == 1.0
    assert history.norms == [*[1e-3] * 5, pytest.approx(metrics["train/grad_norm"])]
    assert metrics["train/grad_norm"] > 1e-2  # before clipping


def test_the_learning_rate_rises_linearly_over_the_first_steps_and_then_stays():
    full, rates, moves = updated()[0] - weights_of(ToyPolicy()), [], []
    for taken in (0, 1, 3, 4, 100):
        policy = ToyPolicy()
        updating = updater(policy, warmup_steps=4)
        update(updating, training_batch(policy, BATCHES), history=UpdateHistory(taken=taken))
        rates.append(updating.learning_rates()["train/learning_rate"])
        moves.append(float((weights_of(policy) - weights_of(ToyPolicy())).norm() / full.norm()))
    assert rates == pytest.approx([0.0025, 0.005, 0.01, 0.01, 0.01])
    assert moves == pytest.approx([0.25, 0.5, 1.0, 1.0, 1.0], rel=1e-3)


def test_steps_that_are_not_finite_are_left_out_until_they_are_too_many_in_a_row():
    policy = ToyPolicy()
    good, bad = (training_batch(policy, BATCHES[:1]) for _ in range(2))
    bad.parts[0].trajectory.log_probs[1, 0] = torch.nan
    updating, history = updater(policy, max_bad_steps=2), UpdateHistory()
    for epoch in (0, 1):
        metrics = update(updating, bad, epoch, history=history, probe=True)
        assert (metrics["train/bad_steps"], metrics["train/updates"]) == (1, 0)
        assert torch.equal(weights_of(policy), weights_of(ToyPolicy()))
    metrics = update(updating, good, 2, history=history)
    assert metrics["train/bad_steps"] == 0 and not history.bad_steps  # counted anew
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.equal(weights_of(policy), updated(batch=training_batch(ToyPolicy(), BATCHES[:1]), epoch=2)[0])
    for epoch in (3, 4):
        update(updating, bad, epoch, history=history)
    with pytest.raises(RuntimeError, match=r"3 optimizer step\(s\) in a row are not finite, train.max_bad_steps is 2"):
        update(updating, bad, 5, history=history)


def test_a_gradient_that_is_not_finite_is_dropped():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES[:1])
    updating, history = updater(policy, max_bad_steps=1), UpdateHistory()
    hook = policy.trained_parameters()[0].register_hook(lambda gradient: gradient * torch.inf)
    metrics = update(updating, batch, history=history)
    assert metrics["train/bad_steps"] == 1 and "gradient's norm is" in history.bad_steps[0]
    assert torch.equal(weights_of(policy), weights_of(ToyPolicy()))
    hook.remove()
    update(updating, batch)
    assert torch.equal(weights_of(policy), updated(batch=training_batch(ToyPolicy(), BATCHES[:1]))[0])


def test_a_step_that_is_not_finite_leaves_the_other_steps_of_its_epoch_alone_and_is_none_of_the_warm_up():
    policy, history = ToyPolicy(), UpdateHistory()
    batch = training_batch(policy, BATCHES[:2])
    batch.parts[0].trajectory.log_probs[1, 0] = torch.nan
    metrics = update(updater(policy, updates_per_epoch=2, max_bad_steps=1), batch, history=history)
    assert (metrics["train/bad_steps"], metrics["train/updates"], history.taken) == (1, 1, 1)
    assert not torch.equal(weights_of(policy), weights_of(ToyPolicy()))
    assert all(math.isfinite(value) for value in metrics.values())


def test_gradients_are_exchanged_in_the_last_backward_of_a_step_only():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    events = []

    class Wrapped(torch.nn.Module):
        def __init__(self, net):
            super().__init__()
            self.net = net

        def forward(self, *given):
            events.append("forward")
            return self.net(*given)

        @contextlib.contextmanager
        def no_sync(self):
            events.append("begin no_sync")
            yield
            events.append("end no_sync")

    policy.module = Wrapped(policy.net)
    update(updater(policy), batch)
    assert events == ["begin no_sync", "forward", "end no_sync"] * 5 + ["forward"]


def test_after_step_is_called_once_per_optimizer_step_with_the_gradients_cleared():
    policy = ToyPolicy()
    batch = training_batch(policy, BATCHES)
    calls = []
    updating = updater(policy, updates_per_epoch=3)
    updating.after_step = lambda: calls.append(all(p.grad is None for p in policy.trained_parameters()))
    update(updating, batch)
    assert calls == [True] * 3


def _distributed_update(world: World, changes: dict) -> tuple[torch.Tensor, dict[str, float]]:
    policy = ToyPolicy()
    batches = [group(gid, 4) for gid in (1, 2, 3, 4)]
    batch = training_batch(policy, batches, reward=BrightnessReward(broken=[(2, 1)]))
    assert batch.weights.tolist() == [1.0] * 4 + [0.0] * 4 + [1.0] * 8  # none for the group without a value
    assert batch.advantages[4:8].tolist() == [0.0] * 4
    rows = torch.arange(16).view(world.data.size, -1)[world.data.rank]
    if world.data.size > 1:
        policy.module = DistributedDataParallel(policy.net)
    updating = updater(policy, world=world, **changes)
    metrics = update(updating, rows_of(batch, rows))
    return weights_of(policy), metrics


@pytest.mark.parametrize("changes", [{}, {"kl_coef": 0.5, "batch_size": 3}], ids=["plain", "kl, micro-batch 3"])
def test_two_ranks_take_the_same_update_as_one(changes):
    wanted, alone = _distributed_update(World(), changes)
    (first, metrics), (second, _) = run_ranks(_distributed_update, 2, changes)
    assert torch.equal(first, second)
    assert (wanted - weights_of(ToyPolicy())).abs().max() > 3e-5
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-7)
    assert metrics["train/loss"] == pytest.approx(alone["train/loss"], abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(alone["train/grad_norm"], rel=1e-4)


def _broken_rank(world: World) -> str:
    policy = ToyPolicy()
    batch = training_batch(policy, [group(1 + world.data.rank, 4)])
    if world.data.rank == 1:
        batch.parts[0].trajectory.log_probs[0, 1] = torch.inf
    policy.module = DistributedDataParallel(policy.net)
    with pytest.raises(RuntimeError, match="not finite") as caught:
        update(updater(policy, world=world), batch)
    assert torch.equal(weights_of(policy), weights_of(ToyPolicy()))
    return str(caught.value)


def test_a_non_finite_log_ratio_on_one_rank_stops_all_with_rank_pass_and_gid_and_leaves_the_weights():
    first, second = run_ranks(_broken_rank, 2)
    assert first == second
    assert "rank 1: log-ratio is not finite in pass 1 of gids [2]" in first and "rank 0" not in first


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("3 GiB"), RuntimeError("NPU out of memory. Tried 3 GiB")])
def test_an_update_without_memory_names_the_knobs_that_need_less(error):
    for size, way_out in (
        (4, r"3 GiB; pass --config\.train\.batch_size=2, "),
        (1, r"pass --config\.model\.checkpointing=blocks"),
    ):
        with pytest.raises(RuntimeError, match=rf"update of {size} row.*{way_out}"), name_memory_knobs(size):
            raise error
    shapes = RuntimeError("shapes")
    with pytest.raises(RuntimeError) as caught, name_memory_knobs(4):
        raise shapes
    assert caught.value is shapes


def test_a_toy_bandit_grows_brighter():
    policy = ToyPolicy()
    reward = BrightnessReward()
    means = []
    updating = updater(policy, rollout_batch_size=32)
    updating.optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=3e-3)
    for epoch in range(30):
        conditions = [c for gid in range(4 * epoch, 4 * epoch + 4) for c in group(gid, 8, index=gid % 7)]
        means.append(scored(policy, conditions, reward=reward, seed=1).rewards["brightness"].values.mean().item())
        update(updating, training_batch(policy, [conditions], seed=1), epoch)
    assert sum(means[-3:]) / 3 > sum(means[:3]) / 3 + 0.05, means
