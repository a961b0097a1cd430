"""DeepSpeed's ZeRO-2 trains to the numbers of a single process; each rank holds a shard of the optimizer state."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml

from flow_grpo.records import TrainingBatch
from flow_grpo.run.run_state import RunState
from flow_grpo.runtime.ranks import zero2
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.runtime.ranks.sharding import averaging_gradients, parallelize, partition, take_step, unwrap
from tests.models.test_wan_policy import condition, noisy
from tests.runtime import test_sharded_state as runs
from tests.runtime.test_sharding import made, train
from tests.tiny_models import CPU
from tests.toy import ToyPolicy, group, train_config, training_batch, update, updater, weights_of
from tests.workers import run_ranks

needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: pip install deepspeed"
)
PLAIN = {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}


def on_two_ranks(function: Any, *args: object) -> list[Any]:
    """Run on processes of their own: DeepSpeed keeps groups and its choice of device for good."""
    return run_ranks(function, 2, *args, fresh=True)


# --- without DeepSpeed


def test_without_deepspeed_the_refusal_names_the_ways_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    network = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(network.parameters())
    with pytest.raises(ValueError, match=r"cannot be imported.*pip install deepspeed.*train\.sharding=fsdp2"):
        partition(network, optimizer, train_config(sharding="zero2"), CPU, Ranks(0, 2))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"zero_optimization": {"stage": 3}}, "stage=3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, "offload_optimizer='cpu'"),
        ({"bf16": {"enabled": True}}, "bf16="),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5"),
        ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
    ],
)
def test_accelerate_settings_that_contradict_the_run_are_refused(monkeypatch, changes, word):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    plugin = mock.Mock(deepspeed_config=PLAIN | changes)
    with mock.patch("accelerate.DeepSpeedPlugin", return_value=plugin), pytest.raises(ValueError, match=word) as caught:
        zero2.deepspeed_config(1.0, 10)
    assert "config/accelerate/zero2.yaml" in str(caught.value)


def test_accelerates_precision_is_refused(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    plugin = mock.Mock(deepspeed_config=PLAIN)
    with mock.patch("accelerate.DeepSpeedPlugin", return_value=plugin), pytest.raises(ValueError, match="'bf16'"):
        zero2.deepspeed_config(1.0, 10)


def test_accelerates_zero_section_is_used(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    zero = {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 7, "offload_param": {"device": "none"}}
    plugin = mock.Mock(deepspeed_config=PLAIN | {"zero_optimization": zero, "steps_per_print": math.inf})
    with mock.patch("accelerate.DeepSpeedPlugin", return_value=plugin):
        found = zero2.deepspeed_config(1.0, 10)
    assert found["zero_optimization"] == {"stage": 2, "overlap_comm": False, "reduce_bucket_size": 7}
    assert not {"fp16", "bf16"} & set(found)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    assert zero2.deepspeed_config(1.0, 10)["zero_optimization"] == {"stage": 2, "reduce_bucket_size": 10}


def test_the_shipped_accelerate_file_agrees_with_a_run():
    path = Path(__file__).resolve().parents[2] / "config" / "accelerate" / "zero2.yaml"
    given = yaml.safe_load(path.read_text())
    assert given["distributed_type"] == "DEEPSPEED" and given["mixed_precision"] == "no"
    assert given["deepspeed_config"]["zero_stage"] == 2
    assert {value for name, value in given["deepspeed_config"].items() if name.startswith("offload")} == {"none"}


# --- with it, on two CPU ranks


def train_in_parts(ranks: Ranks, mode: str, dtype: torch.dtype) -> tuple[list[float], torch.Tensor, bool]:
    torch.manual_seed(0)
    policy = made(mode, dtype)
    policy.module = parallelize(policy.module, "zero2", CPU, ranks)
    frozen = {n: p.detach().clone() for n, p in policy.module.named_parameters() if not p.requires_grad}
    norms, weights = train(policy, ranks, "zero2")
    after = dict(unwrap(policy.module).named_parameters())
    kept = all(torch.equal(after[name], value) and after[name].dtype == value.dtype for name, value in frozen.items())
    return norms, weights, kept and not unwrap(policy.module).training


@needs_deepspeed
@pytest.mark.parametrize(
    ("mode", "dtype"), [("lora", torch.float32), ("attention", torch.float32), ("lora", torch.bfloat16)]
)
def test_two_ranks_train_to_the_numbers_of_one_and_leave_frozen_weights_unchanged(mode, dtype):
    norms, weights = train(made(mode, dtype), Ranks())
    first, second = on_two_ranks(train_in_parts, mode, dtype)
    assert torch.equal(first[1], second[1])
    for other_norms, other_weights, kept in (first, second):
        assert kept
        assert other_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(other_weights, weights, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-4)
    assert len({round(norm, 3) for norm in norms}) == 3


def update_in_parts(ranks: Ranks, changes: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    policy = ToyPolicy()
    (part,) = training_batch(policy, [group(gid, 4) for gid in (1, 2, 3, 4)]).parts
    share = 16 // ranks.world_size
    own = part.rows(torch.arange(share) + share * ranks.rank)
    updating = updater(policy, ranks=ranks, sharding="zero2", **changes)
    updating.optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=1e-3)
    policy.module = partition(policy.module, updating.optimizer, updating.settings.train, CPU, ranks)
    batch = TrainingBatch((dataclasses.replace(own, places=torch.arange(share)),), share)
    metrics = update(updating, batch)
    return weights_of(policy), metrics


@needs_deepspeed
@pytest.mark.parametrize("changes", [{}, {"kl_coef": 0.5, "batch_size": 3}], ids=["plain", "kl, micro-batch 3"])
def test_the_updater_takes_the_update_of_one_rank(changes):
    wanted, alone = update_in_parts(Ranks(), changes)
    (first, metrics), (second, _) = on_two_ranks(update_in_parts, changes)
    assert torch.equal(first, second)
    assert (wanted - weights_of(ToyPolicy())).abs().max() > 5e-4
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(alone["train/grad_norm"], rel=1e-4)


def moment_after_a_step(ranks: Ranks, bound: float) -> tuple[float, float]:
    policy = made("camera")
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=1e-2)
    policy.module = partition(policy.module, optimizer, train_config(sharding="zero2"), CPU, ranks)
    encoded, arguments = policy.encode([condition(0)]), noisy(policy, [condition(0)])
    with averaging_gradients(policy.module, now=True) as backward:
        backward(policy.velocity(*arguments, encoded).sum())
    norm = take_step(policy.module, optimizer, bound)
    held = sum(state["exp_avg"].square().sum() for state in optimizer.state.values())
    return norm.item(), ranks.all_gather(held[None]).sum().sqrt().item()


@needs_deepspeed
def test_every_step_is_clipped_to_its_own_bound():
    for norm, moment in on_two_ranks(moment_after_a_step, 1e-3):  # the engine was made for 1.0
        assert norm > 1.0
        assert moment == pytest.approx((1 - 0.9) * 1e-3, rel=1e-2)


def refuse_on_one_rank(ranks: Ranks, value: float) -> tuple[bool, bool]:
    policy = made("camera")
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=1e-2)
    policy.module = partition(policy.module, optimizer, train_config(sharding="zero2"), CPU, ranks)
    before = torch.cat([p.detach().flatten() for p in policy.trained_parameters()])
    encoded, arguments = policy.encode([condition(0)]), noisy(policy, [condition(0)])
    with averaging_gradients(policy.module, now=True) as backward:
        backward(policy.velocity(*arguments, encoded).sum() * (value if ranks.rank == 1 else 1.0))
    norm = take_step(policy.module, optimizer, 1.0)
    after = torch.cat([p.detach().flatten() for p in policy.trained_parameters()])
    return bool(norm.isfinite()), torch.equal(before, after)


@needs_deepspeed
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_on_one_rank_changes_no_weight_on_any(value):
    assert on_two_ranks(refuse_on_one_rank, value) == [(False, True)] * 2


def moments_of(ranks: Ranks, folder: Path, mode: str) -> tuple[Path, torch.Tensor, int, int]:
    state, policy = runs.a_run(ranks, mode, "zero2")
    runs.step(state, policy, ranks)
    path = state.save(folder, keep=2, ranks=ranks)
    held = sum(value["exp_avg"].numel() for value in state.optimizer.state.values())
    runs.step(state, policy, ranks)
    return path, runs.weights(state, policy), held, sum(p.numel() for p in policy.trained_parameters())


@needs_deepspeed
@pytest.mark.parametrize("mode", ["lora", "attention"])
def test_a_zero2_run_resumes_bit_for_bit_and_only_on_as_many_ranks(tmp_path, mode):
    (path, expected, held, trained), _ = on_two_ranks(moments_of, tmp_path, mode)
    assert held <= trained / 2 + 8  # DeepSpeed fills up to a round number
    for resumed in on_two_ranks(runs.resume_and_go_on, path, mode, "zero2"):
        assert torch.equal(resumed, expected)
    state, policy = runs.a_run(Ranks(), mode, "ddp")
    before = runs.weights(state, policy)
    with pytest.raises(ValueError, match=r"in 2 part\(s\), this run needs 1.*as many ranks"):
        state.restore(path, ranks=Ranks())
    assert torch.equal(runs.weights(state, policy), before)


def resume_from_whole(ranks: Ranks, path: Path) -> str:
    state, _ = runs.a_run(ranks, "lora", "zero2")
    with pytest.raises(ValueError, match="part") as caught:
        RunState.restore(state, path, ranks=ranks)
    return str(caught.value)


@needs_deepspeed
def test_a_checkpoint_of_unsharded_state_is_refused_on_every_rank(tmp_path):
    path, _ = runs.save_and_go_on(Ranks(), tmp_path, "lora", "ddp")
    first, second = on_two_ranks(resume_from_whole, path)
    assert first == second and "in 1 part(s), this run needs 2" in first
