"""Values of the printed group structure; `test_real_recipe.py` checks lines and shapes."""

import torch

from flow_grpo.algorithm import debug_print
from tests.toy import SIGMAS, BrightnessReward, ToyPolicy, group, scored


def test_a_batch_s_view_holds_its_timesteps_and_counts_invalid_rewards_as_0():
    policy = ToyPolicy()
    batch = scored(policy, group(3, 4), reward=BrightnessReward(broken=[(3, 2)]))
    view = debug_print.batch_view(batch, SIGMAS, {"brightness": 2.0})
    assert torch.equal(view["timesteps"], (1000 * SIGMAS[[1, 2]]).expand(4, 2))
    assert torch.equal(view["latents"][:, 1], view["next_latents"][:, 0])
    values = batch.rewards["brightness"].values
    assert set(view["rewards"]) == {"brightness", "avg"}
    assert view["rewards"]["avg"].tolist() == [2 * values[0], 2 * values[1], 0.0, 2 * values[3]]


def test_sizes_are_shown_as_torch_prints_them_and_only_the_merged_counts_are_indented():
    view = debug_print.batch_view(scored(ToyPolicy(), group(3, 4)), SIGMAS, {"brightness": 1.0})
    _, *shapes, total, expected, k = debug_print.merged_lines([view], 4, 4)
    assert shapes == [f"  {name}: {view[name].shape!s}" for name in ("latents", "log_probs", "target_cameras")]
    assert all(": torch.Size([4, " in line for line in shapes)
    assert [total, expected, k] == ["  总样本数（当前GPU）: 4", "  期望的总样本数: 4", "  k (group_size): 4"]
    gathered = debug_print.gathered_lines(32, 4)
    assert not any(line.startswith(" ") for line in gathered)
    assert [line.rpartition(": ")[2] for line in gathered[:3]] == ["32", "4", "8"]  # samples, copies, groups


def test_every_group_s_copies_are_shown_with_their_ranks_and_a_condition_drawn_twice_is_said_so():
    gids, slots = torch.tensor([4, 3, 5, 3, 4, 5]), torch.tensor([0, 0, 0, 1, 1, 1])
    assert debug_print.group_lines(gids, slots, torch.tensor([7, 9, 9, 9, 7, 9]), 3) == [
        "  group 3, condition 9 (in 2 groups): copy 0 on rank 0, copy 1 on rank 1",
        "  group 4, condition 7: copy 0 on rank 0, copy 1 on rank 2",
        "  group 5, condition 9 (in 2 groups): copy 0 on rank 1, copy 1 on rank 2",
    ]
