"""What a checkpoint holds and what it refuses."""

import pytest
import torch

from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.models.adapters import Ema
from flow_grpo.run.run_state import RunState
from flow_grpo.runtime.checkpoints import saving
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.tensor_store import weights_key
from tests.toy import ToyPolicy, group, training_batch, update, updater, weights_of

LATER = {"bad_steps", "grad_norms", "steps_taken"}  # not in checkpoints of the first version


def a_run(tmp_path, *, seed=0, ema=True, lr=1e-2, k=4, camera_lr=0.0) -> tuple[RunState, ToyPolicy]:
    policy = ToyPolicy(seed)
    first, *others = policy.trained_parameters()
    camera = {"params": [first], "lr": camera_lr}
    return RunState(
        module=policy.net,
        optimizer=torch.optim.AdamW([{"params": others}, camera] if camera_lr else [first, *others], lr=lr),
        sampler=DistributedKRepeatSampler(24, 4, k, 1, 0, seed=1),
        ema=Ema(policy.trained_parameters(), 0.5) if ema else None,
        device=torch.device("cpu"),
        identity={"model": weights_key(policy.net.named_parameters())},
    ), policy


def step(state: RunState, policy: ToyPolicy, epoch: int) -> None:
    # Four optimizer steps on one sample each: the sixth and later are clipped to half the median norm, and the learning
    # rate rises until the tenth.
    updating = updater(policy, updates_per_epoch=4, max_grad_ratio=0.5, warmup_steps=10)
    updating.optimizer, updating.after_step = state.optimizer, state.ema.update if state.ema else lambda: None
    update(updating, training_batch(policy, [group(epoch, 4)]), epoch, history=state.history)
    state.sampler.set_epoch(epoch + 1)
    state.finished = epoch + 1


@pytest.mark.parametrize("camera_lr", [0.0, 3e-3])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_by_bit(tmp_path, camera_lr):
    whole, policy = a_run(tmp_path, camera_lr=camera_lr)
    for epoch in (1, 2, 3):
        step(whole, policy, epoch)
        if epoch == 2:
            whole.before, whole.train_seconds = {"eval/x": 1.5}, 7.0
            whole.history.bad_steps[:] = ["a gradient is not finite"]
            path = whole.save(tmp_path, keep=2, world=World()).wait()
            wanted = torch.rand(3)  # the random state comes back, too
            assert len(whole.history.norms) == 8
    resumed, other = a_run(tmp_path, camera_lr=camera_lr)
    resumed.restore(path, world=World())
    assert torch.equal(torch.rand(3), wanted)
    assert (resumed.finished, resumed.before, resumed.train_seconds) == (3, {"eval/x": 1.5}, 7.0)
    assert resumed.sampler.state_dict()["next_step"] == 3
    assert resumed.history.bad_steps == ["a gradient is not finite"]  # the next one is the second in a row
    step(resumed, other, 3)
    assert torch.equal(weights_of(other), weights_of(policy))
    with resumed.ema.applied(), whole.ema.applied():
        assert torch.equal(weights_of(other), weights_of(policy))


def test_a_checkpoint_of_an_earlier_version_without_a_history_is_restored(tmp_path, monkeypatch):
    state, policy = a_run(tmp_path)
    step(state, policy, 1)
    begin = saving.begin

    def saved_before(*args, state, **given):
        return begin(*args, state={name: value for name, value in state.items() if name not in LATER}, **given)

    monkeypatch.setattr(saving, "begin", saved_before)
    path = state.save(tmp_path, keep=1, world=World()).wait()
    other, restored = a_run(tmp_path)
    other.history.bad_steps = ["of another run"]
    other.restore(path, world=World())
    assert other.history == UpdateHistory() and other.finished == 2
    assert torch.equal(weights_of(restored), weights_of(policy))


def test_learning_rates_are_the_configuration_s_also_of_a_group_of_weights_that_had_none_of_its_own(tmp_path):
    state, policy = a_run(tmp_path)
    step(state, policy, 1)
    path = state.save(tmp_path, keep=1, world=World()).wait()
    slower, _ = a_run(tmp_path, lr=3e-4)
    slower.restore(path, world=World())
    assert slower.optimizer.param_groups[0]["lr"] == 3e-4 and len(slower.optimizer.state) == 4
    other, restored = a_run(tmp_path, camera_lr=1e-2)  # in another order, at the same rate
    other.restore(path, world=World())
    for run, own in ((state, policy), (other, restored)):
        step(run, own, 2)
    torch.testing.assert_close(weights_of(restored), weights_of(policy), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("saved", "loaded", "said"),
    [
        ({}, {"seed": 1}, "belongs to another run: model is"),
        ({}, {"k": 2}, "k was 4, is 2"),
        ({"ema": True}, {"ema": False}, "was saved with a weight average"),
        ({"ema": False}, {"ema": True}, "was saved without a weight average"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(tmp_path, saved, loaded, said):
    path = a_run(tmp_path, **saved)[0].save(tmp_path, keep=1, world=World()).wait()
    other, policy = a_run(tmp_path, **loaded)
    with pytest.raises(ValueError, match=said):
        other.restore(path, world=World())
    assert torch.equal(weights_of(policy), weights_of(ToyPolicy(loaded.get("seed", 0))))


def test_metrics_before_and_after_are_measured_alike_or_not_compared(tmp_path):
    state, _ = a_run(tmp_path)
    state.measured_on, state.before = {"eval.num_conditions": 16, "eval.gold": "room_pose"}, {"eval/x": 1.5}
    state.restore(state.save(tmp_path, keep=1, world=World()).wait(), world=World())
    state.match_evaluation({"eval.num_conditions": 16, "eval.of_a_later_version": 1}, own=True)
    other = {"eval.num_conditions": 64, "eval.gold": "room_pose"}
    with pytest.raises(ValueError, match=r"^config.eval.num_conditions: got 64, must be 16, as when .*evaluate.py"):
        state.match_evaluation(other, own=True)
    assert state.before == {"eval/x": 1.5}
    state.match_evaluation(other, own=False)
    assert state.before is None and state.measured_on == {}
