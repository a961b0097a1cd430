"""DDP and FSDP2 train to the numbers of a single process."""

import dataclasses
import os
import types

import accelerate
import pytest
import torch
from accelerate.utils import DistributedType

from flow_grpo.models.adapters import Ema, apply_training_mode
from flow_grpo.models.networks.transformers import stays_fp32
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.runtime.ranks import sharding
from flow_grpo.runtime.ranks.process_group import Group, World
from tests.models.test_adapters import LORA
from tests.models.test_wan_policy import condition, noisy, policy
from tests.tiny_models import CPU, tiny_networks, tiny_policy
from tests.workers import run_ranks

ROWS = 4


def made(mode: str, dtype: torch.dtype = torch.float32) -> WanPolicy:
    parts = tiny_networks()
    if dtype != torch.float32:
        for name, parameter in parts.transformer.named_parameters():
            parameter.data = parameter.data.to(torch.float32 if stays_fp32(name) else dtype)
    apply_training_mode(parts.transformer, dataclasses.replace(LORA, trained=mode, checkpointing="blocks"))
    parts.transformer.enable_gradient_checkpointing()
    return tiny_policy(parts, dtype="fp32" if dtype == torch.float32 else "bf16")


def train(policy: WanPolicy, world: World, kind: str = "ddp", steps: int = 3) -> tuple[list[float], torch.Tensor]:
    """Take AdamW steps over one sample at a time; return gradient norms, then trained and averaged weights."""
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=1e-2, foreach=True)
    ema = Ema(policy.trained_parameters(), 0.5)
    share, norms = ROWS // world.data.size, []
    rows = range(share * world.data.rank, share * (world.data.rank + 1))
    conditions = [condition(index) for index in range(ROWS)]
    encoded, (latents, sigma) = policy.encode(conditions), noisy(policy, conditions)
    for _ in range(steps):
        for row in rows:
            one = slice(row, row + 1)
            with sharding.averaging_gradients(policy.module, now=row == rows[-1]):
                policy.velocity(latents[one], sigma[one], encoded.rows(one)).square().sum().backward()
        if world.data.size == 1:
            for parameter in policy.trained_parameters():
                parameter.grad /= 2  # two ranks average their sums
        norms.append(sharding.take_step(optimizer, 1.0).item())
        ema.update()
        with torch.no_grad():  # a rollout between updates
            policy.velocity(latents[rows[0] : rows[0] + 1], sigma[:1], encoded.rows(slice(0, 1)))
    weights = [sharding.whole(p).flatten().clone() for p in policy.trained_parameters()]
    with ema.applied():
        weights += [sharding.whole(p).flatten().clone() for p in policy.trained_parameters()]
    return norms, torch.cat(weights)


def train_on_ranks(world: World, kind: str, mode: str, dtype: torch.dtype) -> tuple[bool, list[float], torch.Tensor]:
    torch.manual_seed(0)
    policy = made(mode, dtype)
    policy.module = sharding.parallelize(policy.module, kind, CPU, world)
    norms, weights = train(policy, world, kind)
    return sharding.is_sharded(policy.module), norms, weights


@pytest.mark.parametrize(
    ("kind", "mode", "dtype"),
    [
        ("ddp", "lora", torch.float32),
        ("fsdp2", "lora", torch.float32),
        ("fsdp2", "attention", torch.float32),
        ("fsdp2", "full", torch.float32),
        ("fsdp2", "lora", torch.bfloat16),
    ],
)
def test_two_ranks_train_to_the_numbers_of_one(kind, mode, dtype):
    norms, weights = train(made(mode, dtype), World())
    for sharded, other_norms, other_weights in run_ranks(train_on_ranks, 2, kind, mode, dtype):
        assert sharded == (kind == "fsdp2")
        assert other_norms == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(other_weights, weights, rtol=1e-4, atol=1e-5 if dtype == torch.float32 else 1e-4)
    assert len({round(norm, 3) for norm in norms}) == 3  # the weights moved, and the rollouts between saw it


def shards(world: World) -> tuple[list[tuple[int, int]], list[bool]]:
    policy = made("full")
    policy.module = sharding.parallelize(policy.module, "fsdp2", CPU, world)
    shares = [(sharding.local(p).numel(), p.numel()) for p in sharding.unwrap(policy.module).parameters()]
    found = []
    for parameter in policy.trained_parameters():
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        part = sharding.part_like(values, parameter)
        alike = sharding.local(part).shape == sharding.local(parameter).shape
        found.append(alike and torch.equal(sharding.whole(part), values))
    return shares, found


def test_each_rank_holds_only_its_shard_and_full_values_are_sharded_like_the_parameter():
    shares, found = zip(*run_ranks(shards, 2), strict=True)
    assert all(sum(rank[n][0] for rank in shares) == shares[0][n][1] for n in range(len(shares[0])))
    held = [sum(own for own, _ in rank) / sum(total for _, total in rank) for rank in shares]
    assert max(held) < 0.6
    assert all(map(all, found))
    plain = torch.nn.Parameter(torch.zeros(3))
    assert torch.equal(sharding.part_like(torch.ones(3, dtype=torch.float64), plain), torch.ones(3))


def reference_under_shards(world: World, mode: str, offload: bool) -> list[bool]:
    policy = made(mode)
    policy.module = sharding.parallelize(policy.module, "fsdp2", CPU, world)
    policy.keep_reference(offload=offload)
    encoded, arguments = policy.encode([condition(0)]), noisy(policy, [condition(0)])
    with torch.no_grad():
        start = policy.velocity(*arguments, encoded)
    optimizer = torch.optim.SGD(policy.trained_parameters(), lr=0.1)
    found = []
    for _ in range(2):
        with torch.no_grad(), policy.reference():
            found.append(torch.equal(policy.velocity(*arguments, encoded), start))
        policy.velocity(*arguments, encoded).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            found.append(not torch.equal(policy.velocity(*arguments, encoded), start))
    return found


@pytest.mark.parametrize(("mode", "offload"), [("lora", False), ("attention", False), ("attention", True)])
def test_the_reference_policy_does_not_change_under_fsdp2(mode, offload):
    assert run_ranks(reference_under_shards, 2, mode, offload) == [[True] * 4] * 2


def handed_over_under_shards(world: World, mode: str) -> tuple[bool, int]:
    policy, calls = made(mode), []
    policy.module = sharding.parallelize(policy.module, "fsdp2", CPU, world)
    policy.keep_reference()
    conditions = [condition(0), condition(1)]
    encoded, (latents, sigma) = policy.encode(conditions), noisy(policy, conditions)  # levels 0.2 and 0.9
    policy.velocity(latents, sigma, encoded).square().mean().backward()
    torch.optim.SGD(policy.trained_parameters(), lr=1.0).step()
    with torch.no_grad():
        trained = policy.velocity(latents, sigma, encoded)
        with policy.reference():
            expected = torch.stack([policy.velocity(latents, sigma, encoded)[0], trained[1]])
        policy.boundary_ratio = 0.5
        sharding.on_every_call(policy.module, lambda: calls.append(1))
        rows = [slice(0, 2), slice(0, 1), slice(1, 2)][world.all.rank]  # both sides of the boundary, below, above
        found = policy.velocity(latents[rows], sigma[rows], encoded.rows(rows))
    moved = not torch.equal(trained[0], expected[0])
    return moved and torch.allclose(found, expected[rows], rtol=1e-4, atol=1e-5), len(calls)


@pytest.mark.parametrize("mode", ["lora", "attention"])
def test_sharded_ranks_whose_rows_lie_on_other_sides_of_the_boundary_make_the_same_calls(mode):
    assert run_ranks(handed_over_under_shards, 3, mode) == [(True, 2)] * 3


def calls_counted(world: World, kind: str) -> list[int]:
    policy, calls = made("lora"), []
    policy.module = sharding.parallelize(policy.module, kind, CPU, world)
    sharding.on_every_call(policy.module, lambda: calls.append(torch.is_grad_enabled()))
    conditions = [condition(0)]
    encoded, (latents, sigma) = policy.encode(conditions), noisy(policy, conditions)
    with torch.no_grad():
        for _ in range(2):
            policy.velocity(latents, sigma, encoded)
    policy.velocity(latents, sigma, encoded).square().sum().backward()
    return [calls.count(False), calls.count(True)]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_every_call_of_the_network_is_counted_in_rollouts_and_updates(kind):
    assert run_ranks(calls_counted, 2, kind) == [[2, 1], [2, 1]]


def test_a_single_process_keeps_its_module():
    module = policy(mode="camera").module
    for kind in ("ddp", "fsdp2"):
        assert sharding.parallelize(module, kind, CPU, World()) is module and not sharding.is_sharded(module)


def gradients_between_passes(world: World) -> list[bool]:
    policy = made("attention")
    policy.module = sharding.parallelize(policy.module, "fsdp2", CPU, world)
    encoded, arguments = policy.encode([condition(0)]), noisy(policy, [condition(0)])
    with sharding.averaging_gradients(policy.module, now=False):
        policy.velocity(*arguments, encoded).square().mean().backward()
    pairs = [(p, p.grad) for p in policy.trained_parameters() if p.grad is not None]
    return [sharding.local(grad).numel() == sharding.local(p).numel() for p, grad in pairs]


def test_under_fsdp2_gradients_are_sharded_between_micro_batches_too():
    for found in run_ranks(gradients_between_passes, 2):
        assert found and all(found)


def accelerator_threads(world: World) -> int:
    del os.environ["OMP_NUM_THREADS"]  # accelerate then divides the cores itself
    torch.set_num_threads(3)
    sharding.accelerator(CPU, world)
    return torch.get_num_threads()


def test_the_accelerator_keeps_the_number_of_threads() -> None:
    assert run_ranks(accelerator_threads, 2, fresh=True) == [3, 3]


def accelerator_that_disagrees(world: World) -> str:
    with pytest.raises(RuntimeError) as caught:
        sharding.accelerator(CPU, World.of(Group(world.all.rank, 5, world.all.gloo)))
    return str(caught.value)


def test_an_accelerator_with_another_number_of_processes_is_refused() -> None:
    assert "accelerate sees 3 processes where 5 were started" in run_ranks(accelerator_that_disagrees, 3)[0]


def test_an_accelerator_on_another_kind_of_device_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(accelerate, "Accelerator", lambda cpu: types.SimpleNamespace(num_processes=1, device=CPU))
    with pytest.raises(RuntimeError, match=r"to cpu.*device is cuda:0; unset ACCELERATE_USE_CPU"):
        sharding.accelerator(torch.device("cuda", 0), World())


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_an_accelerate_configuration_that_shards_weights_is_refused(monkeypatch, kind) -> None:
    class Sharding:
        num_processes = 1
        device = CPU
        distributed_type = DistributedType(kind)

        def __init__(self, **options: object) -> None: ...

    monkeypatch.setattr(accelerate, "Accelerator", Sharding)
    with pytest.raises(ValueError, match=f"configured for {kind}.*start with torchrun"):
        sharding.accelerator(CPU, World())
