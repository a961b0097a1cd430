"""Latents -> videos -> rewards."""

from __future__ import annotations

import threading

import pytest
import torch

from flow_grpo.algorithm.clock import Clock
from flow_grpo.algorithm.rollout.scoring import ScoringQueue, decode, score
from flow_grpo.rewards.base import RewardSet
from tests.toy import FRAMES, SHAPE, BrightnessReward, ToyPolicy, group

REWARDS = RewardSet([BrightnessReward(broken=[(3, 1)])], {"brightness": 1.0})


def test_rewards_and_videos_come_back_in_row_order_whatever_the_batch():
    policy = ToyPolicy()
    latents = torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(0))
    whole = score(policy, group(3, 4), latents, REWARDS, batch_size=4)
    parts = score(policy, group(3, 4), latents, REWARDS, batch_size=3)
    torch.testing.assert_close(whole.videos, parts.videos, rtol=0, atol=1e-6)
    assert whole.videos.shape == (4, 3, FRAMES, 2, 2)
    values = whole.rewards["brightness"].values
    assert torch.equal(values[[0, 2, 3]], policy.decode(latents).flatten(1).mean(dim=1)[[0, 2, 3]])


def test_videos_are_fp32_on_the_cpu_without_gradient():
    videos = decode(ToyPolicy(), torch.zeros(3, *SHAPE, requires_grad=True), batch_size=2)
    assert (videos.dtype, videos.device.type, videos.requires_grad) == (torch.float32, "cpu", False)


class Narrow(ToyPolicy):
    """Has memory to decode so many videos at once."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most, self.sizes = most, []

    def decode(self, latents):
        self.sizes.append(len(latents))
        if len(latents) > self.most:
            raise torch.OutOfMemoryError("3 GiB")
        return super().decode(latents)


def test_what_there_is_no_memory_for_is_decoded_in_halves(caplog):
    narrow = Narrow(2)
    latents = torch.randn(5, *SHAPE, generator=torch.Generator().manual_seed(0))
    wanted = decode(ToyPolicy(), latents, batch_size=1)
    torch.testing.assert_close(decode(narrow, latents, batch_size=5), wanted, rtol=0, atol=1e-6)
    assert narrow.sizes == [5, 3, 2, 1, 2]
    assert "decoding them in halves" in caplog.text
    with pytest.raises(RuntimeError, match=r"decoding one video .*3 GiB; pass --config.model.vae_tiling=true"):
        decode(Narrow(0), latents, batch_size=5)


def test_a_failed_reward_is_masked_and_never_a_score():
    result = score(ToyPolicy(), group(3, 4), torch.zeros(4, *SHAPE), REWARDS, batch_size=4).rewards["brightness"]
    assert result.valid.tolist() == [True, False, True, True]
    assert result.causes[1] == "broken on purpose"


def test_videos_of_another_size_than_the_source_are_refused():
    class Short(ToyPolicy):
        def decode(self, latents):
            return super().decode(latents)[:, :, :4]

    with pytest.raises(ValueError, match=r"\(4, 3, 4, 2, 2\), the conditions ask for \(4, 3, 5, 2, 2\)"):
        score(Short(), group(3, 4), torch.zeros(4, *SHAPE), REWARDS, batch_size=4)


CPU = torch.device("cpu")


class Watching(BrightnessReward):
    """Notes who measures, with gradients or not, and may wait for a signal first."""

    def __init__(self, wait_for: threading.Event | None = None) -> None:
        super().__init__()
        self.seen: list[tuple[int, str, bool, int]] = []
        self.wait_for = wait_for

    def __call__(self, videos, conditions):
        if self.wait_for is not None:
            assert self.wait_for.wait(20), "nobody sampled on while this batch was measured"
        here = threading.current_thread().name
        self.seen.append((conditions[0].gid, here, torch.is_grad_enabled(), torch.get_num_threads()))
        return super().__call__(videos, conditions)


def latents_of(gid: int) -> torch.Tensor:
    return torch.randn(4, *SHAPE, generator=torch.Generator().manual_seed(gid))


def measured(reward: BrightnessReward, *, beside: bool, gids=(3, 4, 5)) -> tuple[list, Clock]:
    clock = Clock(CPU)
    with ScoringQueue(ToyPolicy(), RewardSet([reward], {"brightness": 1.0}), clock, beside=beside).open() as scoring:
        for gid in gids:
            scoring.add(tuple(group(gid, 4)), latents_of(gid))
        return scoring.scores(), clock


def test_scores_beside_the_rollouts_are_those_after_them_and_of_one_batch_alone():
    beside, after = (Watching() for _ in range(2))
    found, clock = measured(beside, beside=True)
    plain, serial_clock = measured(after, beside=False)
    for gid, one, other in zip((3, 4, 5), found, plain, strict=True):
        alone = score(ToyPolicy(), group(gid, 4), latents_of(gid), REWARDS, batch_size=4)
        for each in (other, alone):
            assert torch.equal(one.videos, each.videos)
            assert torch.equal(one.rewards["brightness"].values, each.rewards["brightness"].values) or gid == 3
        assert torch.equal(one.rewards["brightness"].values, other.rewards["brightness"].values)
    assert [gid for gid, *_ in beside.seen] == [gid for gid, *_ in after.seen] == [3, 4, 5]
    assert {name for _, name, *_ in beside.seen} == {"scoring_0"}
    assert {(gradients, threads) for *_, gradients, threads in beside.seen} == {(False, torch.get_num_threads())}
    assert clock.hidden["score"] >= 0
    assert not serial_clock.hidden


def test_a_batch_is_measured_while_the_next_is_sampled():
    sampled_on, clock = threading.Event(), Clock(CPU)
    rewards = RewardSet([Watching(sampled_on)], {"brightness": 1.0})
    with ScoringQueue(ToyPolicy(), rewards, clock, beside=True).open() as scoring:
        scoring.add(tuple(group(3, 4)), latents_of(3))
        sampled_on.set()  # as the rollout of the next batch would go on; measuring at once would wait for ever
        (scores,) = scoring.scores()
    assert scores.rewards["brightness"].valid.all()


@pytest.mark.parametrize("beside", [False, True])
def test_what_fails_is_told_when_scores_are_asked_for(beside):
    class Broken(ToyPolicy):
        def decode(self, latents):
            raise MemoryError("no room for videos")

    with ScoringQueue(Broken(), REWARDS, Clock(CPU), beside=beside).open() as scoring:
        scoring.add(tuple(group(3, 4)), latents_of(3))
        scoring.add(tuple(group(4, 4)), latents_of(4))
        with pytest.raises(MemoryError, match="no room"):
            scoring.scores()


def test_after_an_error_elsewhere_nothing_more_is_measured():
    watching, go_on = Watching(threading.Event()), None
    go_on = watching.wait_for
    with pytest.raises(ValueError, match="a file is broken"):  # noqa: PT012, SIM117
        with ScoringQueue(
            ToyPolicy(), RewardSet([watching], {"brightness": 1.0}), Clock(CPU), beside=True
        ).open() as scoring:
            for gid in (3, 4, 5):
                scoring.add(tuple(group(gid, 4)), latents_of(gid))
            raise ValueError("a file is broken")
    go_on.set()
    assert [gid for gid, *_ in watching.seen] in ([], [3])
