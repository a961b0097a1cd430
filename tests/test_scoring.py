"""Latents -> videos -> rewards."""

from __future__ import annotations

import pytest
import torch

from flow_grpo.algorithm.scoring import decode, score
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
