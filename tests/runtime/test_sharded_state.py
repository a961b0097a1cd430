"""Sharded checkpoints: written by every rank, loaded on any number of ranks."""

from pathlib import Path

import pytest
import torch

from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.models.adapters import Ema
from flow_grpo.run.run_state import RunState
from flow_grpo.runtime.checkpoints import state_files
from flow_grpo.runtime.checkpoints.state_files import join_shards, map_tensors
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import averaging_gradients, parallelize, take_step, whole
from tests.models.test_wan_policy import condition, noisy
from tests.runtime.test_sharding import made
from tests.tiny_models import CPU
from tests.workers import run_ranks

MODES = ["lora", "full"]


def a_run(world: World, mode: str, kind: str) -> tuple[RunState, object]:
    policy = made(mode)
    policy.module = parallelize(policy.module, kind, CPU, world)
    optimizer = torch.optim.AdamW(policy.trained_parameters(), lr=1e-2, foreach=True)
    state = RunState(
        module=policy.module,
        optimizer=optimizer,
        sampler=DistributedKRepeatSampler(24, 4, 4, world.data.size, world.data.rank, seed=1),
        ema=Ema(policy.trained_parameters(), 0.5),
        device=CPU,
        identity={"model": "x"},
    )
    return state, policy


def step(state: RunState, policy, world: World) -> None:
    encoded, arguments = policy.encode([condition(0)]), noisy(policy, [condition(0)])
    with averaging_gradients(policy.module, now=True):
        policy.velocity(*arguments, encoded).square().mean().backward()
    take_step(state.optimizer, 1.0)
    state.ema.update()
    state.finished += 1


def weights(state: RunState, policy) -> torch.Tensor:
    learned = [whole(p).flatten().clone() for p in policy.trained_parameters()]
    with state.ema.applied():
        learned += [whole(p).flatten().clone() for p in policy.trained_parameters()]
    return torch.cat(learned)


def save_and_go_on(world: World, folder: Path, mode: str, kind: str) -> tuple[Path, torch.Tensor]:
    state, policy = a_run(world, mode, kind)
    step(state, policy, world)
    path = state.save(folder, keep=2, world=world).wait()
    step(state, policy, world)
    return path, weights(state, policy)


def resume_and_go_on(world: World, path: Path, mode: str, kind: str) -> torch.Tensor:
    state, policy = a_run(world, mode, kind)
    state.sampler.load_state_dict = lambda state: None  # whose numbers are those of the ranks that saved
    state.restore(path, world=world)
    assert state.finished == 1
    step(state, policy, world)
    return weights(state, policy)


@pytest.mark.parametrize("mode", MODES)
def test_a_sharded_run_resumes_bit_for_bit_and_on_other_numbers_of_ranks(tmp_path, mode):
    (path, expected), _ = run_ranks(save_and_go_on, 2, tmp_path, mode, "fsdp2")
    for resumed in run_ranks(resume_and_go_on, 2, path, mode, "fsdp2"):
        assert torch.equal(resumed, expected)
    alone = resume_and_go_on(World(), path, mode, "ddp")
    torch.testing.assert_close(alone, expected, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_one_process_resumes_sharded(tmp_path):
    path, expected = save_and_go_on(World(), tmp_path, "full", "ddp")
    for resumed in run_ranks(resume_and_go_on, 2, path, "full", "fsdp2"):
        torch.testing.assert_close(resumed, expected, rtol=1e-5, atol=1e-6)


def test_every_rank_writes_only_its_shards(tmp_path):
    (path, _), _ = run_ranks(save_and_go_on, 2, tmp_path, "full", "fsdp2")
    names = {file.name: file.stat().st_size for file in path.glob("*.safetensors")}
    shares = [names["rank_0.safetensors"], names["rank_1.safetensors"]]
    assert max(shares) < 0.65 * sum(shares)
    assert names["state.safetensors"] < 0.05 * sum(shares)


def test_shards_are_joined_one_tensor_at_a_time(tmp_path):
    full = {"a": {"b": torch.arange(10.0).view(5, 2), "step": torch.tensor(3.0)}, "none": None, "rows": torch.arange(1)}
    parts = [{"learned": map_tensors(full, lambda _, t, r=r: (*t.chunk(2), t[:0])[r] if t.ndim else t)} for r in (0, 1)]
    stems = [tmp_path / f"rank_{rank}" for rank in (0, 1)]
    for stem, part in zip(stems, parts, strict=True):
        state_files.write(stem, state_files.copied(part))
    asked = []
    joined = join_shards(stems, "learned", lambda path, tensor: asked.append(path) or tensor)
    assert sorted(asked) == ["a/b", "a/step", "rows"]
    assert torch.equal(joined["a"]["b"], full["a"]["b"]) and joined["a"]["step"] == 3 and joined["none"] is None
    assert torch.equal(joined["rows"], full["rows"])
    with pytest.raises(ValueError, match="so another version saved it; resume with that version"):
        join_shards(stems, "trained", lambda _, tensor: tensor)
