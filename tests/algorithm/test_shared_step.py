"""Steps that the copies of a group share: who takes them, that samples and updates stay the same, what is saved."""

import dataclasses
from collections import Counter

import pytest
import torch

from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.groups.compare import Chosen
from flow_grpo.algorithm.groups.subset import narrow
from flow_grpo.algorithm.update.objective import GrpoObjective, OldPolicy
from flow_grpo.maths.advantages import CombinedAdvantages
from flow_grpo.records import Samples, ScoredBatch
from flow_grpo.runtime.clock import Clock
from flow_grpo.runtime.ranks.exchange import dealt, owners
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import parallelize
from flow_grpo.settings.sampling import Sampling
from tests.rounds import dynamic
from tests.toy import SDE, SIGMAS, ToyPolicy, collector, reward_config, train_config, update, updater, weights_of
from tests.workers import run_ranks

STEPS = len(SIGMAS) - 1
K = 4


def test_every_thing_has_one_owner_that_needs_it_and_the_load_is_even():
    gids = [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 4, 5], [4, 5, 4, 6]]
    found = owners(gids)
    assert list(found) == list(range(7))
    assert all(gid in gids[rank] for gid, rank in found.items())
    assert max(Counter(found.values()).values()) == 2


@pytest.mark.parametrize("seed", range(20))
def test_groups_are_dealt_evenly_to_ranks_that_hold_copies_however_these_are_shuffled(seed):
    draw = torch.Generator().manual_seed(seed)
    ranks, each = int(torch.randint(1, 9, (), generator=draw)), int(torch.randint(1, 7, (), generator=draw))
    copies = torch.arange(ranks * each).repeat(K)[torch.randperm(K * ranks * each, generator=draw)]
    held = [own.tolist() for own in copies.chunk(ranks)]
    found = owners(held)
    assert Counter(found.values()) == dict.fromkeys(range(ranks), each)
    assert all(gid in held[rank] for gid, rank in found.items())


def test_of_neighbours_that_all_ranks_hold_copies_of_each_rank_makes_one():
    found = owners([[*range(12)]] * 4)
    assert [sorted(found[gid] for gid in range(first, first + 4)) for first in (0, 4, 8)] == [[0, 1, 2, 3]] * 3


def test_fewer_groups_than_ranks_leave_some_a_group_of_another_s_without_weight():
    held = [[0, 1], [0, 1], [0, 1], [0, 1]]
    found = owners(held)
    assert Counter(found.values()).most_common() == [(found[0], 1), (found[1], 1)]
    owner, share = dealt(held)
    assert owner == found and [len(own) for own in share] == [1] * 4
    assert all(gid in share[rank] for gid, rank in owner.items())


def test_a_rank_that_alone_needs_more_than_its_share_makes_more():
    assert owners([[0, 1, 2], [3], [3]]) in ({0: 0, 1: 0, 2: 0, 3: 1}, {0: 0, 1: 0, 2: 0, 3: 2})
    assert owners([[], []]) == {} and owners([["b", "a"]]) == {"a": 0, "b": 0}


def collected(world: World, share: bool, policy: ToyPolicy | None = None, **changes) -> tuple[ScoredBatch, int]:
    policy = policy or ToyPolicy()
    sampling = collector(world, policy, debug=False, same_initial_noise=True, share_prefix=share, **changes)
    (batch,) = sampling.collect(Clock(torch.device("cpu")))
    return batch, sum(rows for rows, *_ in policy.calls)


def of_size(layout: str, size: int) -> dict[str, object]:
    return {"layout": layout, "train_batch_size": size, "num_batches_per_epoch": 8 // size}


def _both(world: World, layout: str, size: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int, int]:
    shared, fewer = collected(world, True, **of_size(layout, size))
    plain, all_rows = collected(world, False, **of_size(layout, size))
    return shared.samples.tensors(), plain.samples.tensors(), fewer, all_rows


@pytest.mark.parametrize("layout", ["spread", "shuffled", "contiguous"])
def test_shared_steps_change_no_sample_and_save_their_calls_in_every_layout(layout):
    results = run_ranks(_both, 2, layout, 8)
    for shared, plain, *_ in results:
        for name, tensor in plain.items():
            torch.testing.assert_close(shared[name], tensor, rtol=0, atol=1e-6, msg=name)
    first = [steps[0] for _, plain, *_ in results for steps in plain["trajectory.steps"].tolist()]
    saved = sum(all_rows - fewer for *_, fewer, all_rows in results)
    assert sum(all_rows for *_, all_rows in results) == 16 * STEPS
    shared = sum(first) + len(first)  # the prefix, and the window's first step
    assert saved == shared - shared // K > 0


def test_with_calls_of_one_row_a_shared_step_changes_no_bit():
    for shared, plain, *_ in run_ranks(_both, 4, "spread", 1):
        assert all(torch.equal(shared[name], tensor) for name, tensor in plain.items())


@pytest.mark.parametrize("window", [1, 2])
def test_a_group_s_record_holds_the_steps_of_its_copies(window):
    batch, _ = collected(World(), True, sde_window=window, **of_size("spread", 8))
    groups, samples = batch.groups, batch.samples
    assert groups.copies == K and groups.passes == 1 + K * (window - 1)
    assert groups.trajectory.states.shape[:2] == (2, 1 + K * window)
    place = {(gid, slot): row for row, (gid, slot, _) in enumerate(samples.keys.tolist())}
    for row, gid in enumerate(groups.keys[:, 0].tolist()):
        own = samples.trajectory
        rows = [place[gid, slot] for slot in range(K)]
        states, log_probs = groups.trajectory.states[row], groups.trajectory.log_probs[row]
        assert torch.equal(states[0], own.states[rows[0], 0])
        assert torch.equal(states[1:].view(K, window, *states.shape[1:]), own.states[rows, 1:])
        torch.testing.assert_close(log_probs.view(K, window), own.log_probs[rows], rtol=0, atol=1e-6)
        assert torch.equal(groups.trajectory.steps[row], own.steps[rows[0]])


def as_samples(groups: Samples) -> Samples:
    """Return the copies of groups as rows of their own."""
    k, columns, trajectory = groups.copies, groups.trajectory.steps.shape[1], groups.trajectory
    after = trajectory.states[:, 1:].unflatten(1, (k, columns)).flatten(0, 1)
    before = trajectory.states[:, :1].repeat_interleave(k, 0)
    rows = groups.rows(torch.arange(len(groups)).repeat_interleave(k))
    return dataclasses.replace(
        rows,
        trajectory=dataclasses.replace(
            rows.trajectory,
            states=torch.cat([before, after], dim=1),
            log_probs=trajectory.log_probs.unflatten(1, (k, columns)).flatten(0, 1),
        ),
        advantages=groups.advantages.flatten(),
        weights=groups.weights.flatten(),
        copies=1,
    )


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"kl_coef": 0.5}, {"guard": True}, {"old_log_prob": "recompute"}])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_the_gradient_of_shared_steps_is_that_of_a_row_for_every_copy(window, settings, dtype, bound):
    batch, _ = collected(World(), True, sde_window=window, **of_size("spread", 8))
    draw = torch.Generator().manual_seed(3)
    advantages, weights = torch.randn(2, 2, K, generator=draw), torch.rand(2, 2, K, generator=draw)
    whole = dataclasses.replace(batch.groups, advantages=advantages[0], weights=weights[0])
    whole = whole.map(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)

    def gradient(samples: Samples) -> torch.Tensor:
        policy = ToyPolicy()
        policy.net.to(dtype)
        policy.start = {name: value + 0.01 for name, value in policy.net.state_dict().items()}
        objective = GrpoObjective(policy, Sampling(SIGMAS, SDE, 1), None, train_config(**settings))
        memory = objective.remember(lambda: samples, as_rolled_out=False)
        for number in range(objective.passes(samples)):
            loss = objective.loss(samples, memory, number)
            ((loss.terms.per_sample * loss.weights / objective.passes(samples)).sum() * loss.scale).backward()
        return torch.cat([parameter.grad.flatten() for parameter in policy.net.parameters()])

    wanted, got = gradient(as_samples(whole)), gradient(whole)
    assert wanted.norm() > 1e-3
    assert (got - wanted).norm() <= bound * wanted.norm()


def test_the_steps_after_the_first_are_replayed_copy_by_copy_in_calls_of_as_many_rows_as_groups():
    policy = ToyPolicy()
    batch, _ = collected(World(), True, policy, sde_window=2, **of_size("spread", 8))
    groups = dataclasses.replace(batch.groups, advantages=torch.ones(2, K), weights=torch.ones(2, K))
    policy.calls.clear()
    objective = GrpoObjective(policy, Sampling(SIGMAS, SDE, 1), None, train_config())
    for number in range(groups.passes):
        loss = objective.loss(groups, OldPolicy(None), number)
        assert len(loss.drift) == (2 * K if number == 0 else 2)
        assert loss.drift.abs().max() < 1e-6
    assert [rows for rows, *_ in policy.calls] == [2] * (1 + K)


def updated(world: World, policy: ToyPolicy, chosen: Chosen, compared: CombinedAdvantages, changes: dict[str, object]):
    """Return weights and metrics after an epoch's update of what was chosen, and the weight of this rank's rows."""
    own = compare.own_rows(chosen, compared, world)
    policy.module = parallelize(policy.net, "ddp", torch.device("cpu"), world)
    moving = updater(policy, world=world, **({"rollout_batch_size": 8, "batch_size": 16} | changes))
    metrics = update(moving, own)
    return weights_of(policy), metrics, own.weights.sum().item()


def trained(world: World, share: bool, sample: dict[str, object], changes: dict[str, object] | None = None):
    """Return weights after an epoch's update, its metrics and the rows of the update's calls."""
    policy = ToyPolicy()
    batch, _ = collected(world, share, policy, **{"sde_window": 1} | sample)
    policy.calls.clear()
    gathered = compare.gather([batch], world)
    compared = compare.advantages(gathered, reward_config(), k=K, floors={})
    weights, metrics, _ = updated(
        world,
        policy,
        compare.everything([batch], gathered, world),
        compared,
        {"old_log_prob": "detach"} | (changes or {}),
    )
    return weights, metrics, sum(rows for rows, *_ in policy.calls)


@pytest.mark.parametrize("layout", ["spread", "shuffled", "contiguous"])
@pytest.mark.parametrize("window", [1, 2])
def test_an_update_by_groups_is_that_by_samples_on_any_number_of_ranks(layout, window):
    start, sample = weights_of(ToyPolicy()), of_size(layout, 8) | {"sde_window": window}
    for ranks in (1, 2, 4):
        alone, together = (run_ranks(trained, ranks, share, sample) for share in (False, True))
        assert (alone[0][0] - start).abs().max() > 1e-5
        for (plain, before, rows), (groups, after, fewer) in zip(alone, together, strict=True):
            assert torch.equal(groups, together[0][0])
            torch.testing.assert_close(groups, plain, rtol=0, atol=2e-7)
            for name in ("train/loss", "train/grad_norm", "policy/clip_fraction"):
                assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6)
            assert rows == 8 * window and fewer == 2 * (1 + K * (window - 1))


def test_the_same_draws_on_1_2_and_4_ranks_give_the_same_weights_whatever_the_micro_batch():
    found = []
    for ranks, micro in ((1, 16), (2, 1), (4, 1), (2, 16), (1, 1)):
        sample = {"train_batch_size": 8 // ranks, "num_batches_per_epoch": 2}
        changes = {"rollout_batch_size": 8 // ranks, "batch_size": micro}
        found.append(run_ranks(trained, ranks, True, sample, changes)[0][0])
    for weights in found[1:]:
        torch.testing.assert_close(weights, found[0], rtol=0, atol=2e-7)


def test_before_the_first_update_the_ratio_is_one_exactly_in_calls_of_the_rollout_s_groups():
    sample = of_size("spread", 8)
    _, metrics, _ = trained(World(), True, sample, {"old_log_prob": "auto"})
    assert metrics["policy/ratio_first_max_abs_log"] == 0.0
    assert metrics["policy/ratio_min"] == metrics["policy/ratio_max"] == 1.0
    _, metrics, _ = trained(World(), True, sample, {"batch_size": 1, "old_log_prob": "rollout"})
    assert 0 < metrics["policy/ratio_first_max_abs_log"] < 1e-6


def test_several_updates_take_whole_groups_and_recompute_their_old_log_probabilities():
    changes = {"batch_size": 1, "updates_per_epoch": 2, "old_log_prob": "auto"}
    _, metrics, rows = trained(World(), True, of_size("spread", 8), changes)
    assert metrics["train/updates"] == 2.0 and rows == 2 * 2
    assert metrics["policy/ratio_first_max_abs_log"] < 1e-6


def _with_resampling(world: World, share: bool, layout: str, policy_name: str, copies: int):
    policy, sample = ToyPolicy(), of_size(layout, 8) | {"sde_window": 1, "share_prefix": share}
    sampling = collector(world, policy, debug=False, same_initial_noise=True, **sample)

    def sample_round(_: int = 0):
        batches = sampling.collect(Clock(torch.device("cpu")))
        return batches, compare.gather(batches, world)

    reward = reward_config(flat_eps=2.85e-2)  # half of the groups range over more
    dynamic_sampling = dataclasses.replace(
        dynamic(world, local=8, policy=policy_name, max_resample_times=2), floors={"brightness": 0.0}
    )
    chosen, metrics = dynamic_sampling.choose(*sample_round(), sample_round, reward=reward, shortages=[])
    compared = compare.advantages(chosen.gathered, reward, k=K, floors={})
    if copies:
        chosen, compared = narrow(chosen, compared, copies, world)
    weights, _, mass = updated(world, policy, chosen, compared, {"old_log_prob": "detach"})
    return weights, metrics, mass


@pytest.mark.parametrize(("policy", "copies"), [("pad", 0), ("fill_flat", 0), ("rebalance", 0), ("pad", 2)])
@pytest.mark.parametrize("layout", ["spread", "contiguous"])
def test_dynamic_sampling_moves_whole_groups_and_the_best_and_worst_copies_have_the_weight(layout, policy, copies):
    plain = run_ranks(_with_resampling, 2, False, layout, policy, copies)
    groups = run_ranks(_with_resampling, 2, True, layout, policy, copies)
    start = weights_of(ToyPolicy())
    for (wanted, before, mass), (got, after, own_mass) in zip(plain, groups, strict=True):
        assert (wanted - start).abs().max() > 1e-5
        torch.testing.assert_close(got, wanted, rtol=0, atol=2e-7)
        for name in ("dyn/resample_rounds", "dyn/pool_samples", "dyn/valid_groups_ratio_initial", "dyn/padded_samples"):
            assert after[name] == before[name], name
        assert after["dyn/resample_rounds"] > 0
        assert own_mass == mass or policy == "rebalance" or copies
    assert sum(mass for *_, mass in groups) == sum(mass for *_, mass in plain)
