"""A source video that several ranks need is encoded once among them, and what they sample stays the same."""

import dataclasses
from pathlib import Path
from unittest.mock import Mock

import torch

from flow_grpo.algorithm.rollout.collector import Collector
from flow_grpo.algorithm.rollout.shared_encodings import share_encodings
from flow_grpo.judging.evaluate import Evaluator
from flow_grpo.judging.reward_signal import sample_group
from flow_grpo.records import Condition
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.ranks.context_parallel import share_samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.tensor_store import TensorStore
from flow_grpo.settings.sampling import Sampling
from flow_grpo.settings.schema import Config, EvalConfig
from tests.models.test_wan_policy import condition
from tests.tiny_models import CPU, tiny_networks, tiny_policy
from tests.toy import SDE, SIGMAS, BrightnessReward, blocks_of, sample_config
from tests.workers import run_ranks

LARGE = (9, 16, 24)


def encoded(world: World, folder: str, *, share: bool) -> tuple[dict[str, torch.Tensor], int, float]:
    store = TensorStore(Path(folder) if folder else None)
    made = tiny_policy(tiny_networks(), store=store)
    made.codec.encode = Mock(wraps=made.codec.encode)
    # Two groups that both ranks hold, in two sizes, and one that is a rank's own.
    conditions = [condition(0, slot=world.data.rank), condition(5 + world.data.rank)]
    larger = [condition(1, slot=world.data.rank, size=LARGE), condition(2, slot=world.data.rank, size=LARGE)]
    sent = world.all.sent["rows"]
    for _ in range(2):  # the second round lacks nothing
        if share:
            share_encodings(made, conditions + larger, world, "encoding")
        tensors = {
            f"{n} {k}": t for n, own in enumerate((conditions, larger)) for k, t in made.encode(own).tensors().items()
        }
    return tensors, made.codec.encode.call_count, world.all.sent["rows"] - sent


def _both(world: World, folder: str):
    return encoded(world, "", share=False), encoded(world, folder, share=True)


def test_each_video_is_encoded_once_among_the_ranks_and_every_rank_has_the_same_numbers_as_alone():
    results = run_ranks(_both, 2, "")
    for (alone, *_), (shared, *_) in results:
        assert all(torch.equal(tensor, shared[name]) for name, tensor in alone.items())
    assert [calls for (_, calls, _), _ in results] == [4, 4]
    assert sum(calls for _, (_, calls, _) in results) == 5, "three that both need, and one of each rank's own"
    latents = 4 * 4 * 4 * 6  # bytes of a latent frame: fp32, channels, rows, columns
    assert sum(sent for *_, (_, _, sent) in results) == latents * (2 + 3 + 3)


def test_what_is_shared_is_on_disk_once_and_found_there(tmp_path):
    first = run_ranks(_both, 2, str(tmp_path))
    assert len(list((tmp_path / "sources").rglob("*.safetensors"))) == 5
    again = run_ranks(_both, 2, str(tmp_path))
    for (*_, (written, *_)), (*_, (read, calls, sent)) in zip(first, again, strict=True):
        assert calls == 0 and sent == 0
        assert all(torch.equal(tensor, read[name]) for name, tensor in written.items())


def _failing(world: World) -> str:
    made = tiny_policy(tiny_networks())
    error = OSError("no memory") if world.data.rank == 1 else None
    made.codec.encode = Mock(side_effect=error, wraps=made.codec.encode)
    conditions = [condition(0), condition(1)]
    try:
        share_encodings(made, conditions, world, "encoding")
    except Exception as error:  # noqa: BLE001 - returned
        return str(error)
    return ""


def test_a_video_that_one_rank_cannot_encode_is_an_error_on_every_rank():
    assert all("no memory" in text for text in run_ranks(_failing, 2))


class Held:
    def __len__(self) -> int:
        return 3

    def condition(self, index: int, gid: int = 0, slot: int = 0) -> Condition:
        return dataclasses.replace(condition(index, slot=slot), gid=gid)

    def scene_of(self, index: int) -> str:
        return str(index)

    def size_of(self, index: int) -> tuple[int, int, int]:
        return self.condition(index).size


def _measured(world: World) -> tuple[int, int]:
    world, _ = share_samples(world, 2, CPU)
    made = tiny_policy(tiny_networks())
    made.codec.encode = Mock(wraps=made.codec.encode)
    rewards = RewardSet([BrightnessReward()], {"brightness": 1.0})
    config = dataclasses.replace(Config(), sample=sample_config())
    sampling = Sampling(SIGMAS, SDE, seed=3, blocks=blocks_of(config.sample))
    sample_group(Collector(made, Mock(), rewards, sampling, config, world), Held(), sampling, gid=2)
    of_group = made.codec.encode.call_count
    config = dataclasses.replace(config, eval=EvalConfig(num_conditions=3, batch_size=2, num_steps=2, videos=0))
    Evaluator(made, Held(), rewards, None, config, world).run()
    return of_group, made.codec.encode.call_count


def test_ranks_that_share_samples_encode_a_video_once_in_evaluation_and_in_measuring_the_signal():
    found = run_ranks(_measured, 2)
    assert (sum(of_group for of_group, _ in found), sum(in_all for _, in_all in found)) == (1, 3)
