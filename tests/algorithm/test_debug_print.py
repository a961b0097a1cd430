"""The group structure as users see it, and its counts."""

from __future__ import annotations

import contextlib

import pytest
import torch

from flow_grpo.algorithm import debug_print
from flow_grpo.algorithm.clock import Clock
from flow_grpo.algorithm.groups import compare
from flow_grpo.algorithm.rollout import collector as collector_module
from flow_grpo.records import Conditioning, RewardResult, Samples, Trajectory
from flow_grpo.runtime.ranks.process_group import Ranks
from tests.toy import SIGMAS, BrightnessReward, ToyPolicy, collector, group, sample_config, scored
from tests.workers import run_ranks


def test_the_view_of_a_batch_has_the_keys_of_flow_grpo_s_scripts():
    policy = ToyPolicy()
    batch = scored(policy, group(3, 4), reward=BrightnessReward(broken=[(3, 2)]))
    view = debug_print.batch_view(batch, SIGMAS, {"brightness": 2.0})
    assert list(view) == [
        "prompts",
        "prompt_embeds",
        "source_latents",
        "target_cameras",
        "timesteps",
        "latents",
        "next_latents",
        "log_probs",
        "rewards",
    ]
    assert torch.equal(view["timesteps"], (1000 * SIGMAS[[1, 2]]).expand(4, 2))
    assert torch.equal(view["latents"][:, 1], view["next_latents"][:, 0])
    values = batch.rewards["brightness"].values
    assert set(view["rewards"]) == {"brightness", "avg"}
    assert view["rewards"]["avg"].tolist() == [2 * values[0], 2 * values[1], 0.0, 2 * values[3]]


def fake_samples(rows: int, steps: int) -> Samples:
    """A batch in the shapes of the 8-NPU recipe: 21 latent frames of 60x104, without the memory."""
    states = torch.zeros(()).expand(rows, steps + 1, 16, 21, 60, 104)
    trajectory = Trajectory(
        states, torch.zeros(rows, steps), state_index=tuple(range(steps)), steps=tuple(range(1, steps + 1))
    )
    conditioning = Conditioning(torch.zeros(rows, 5, 8), states[:, 0], torch.zeros(rows, 21, 12))
    return Samples(
        keys=torch.zeros((rows, 3), dtype=torch.int64),
        places=torch.arange(rows),
        noise_ids=torch.zeros((rows, 2), dtype=torch.int64),
        conditioning=conditioning,
        trajectory=trajectory,
        final_latents=states[:, 0],
    )


def test_the_merged_shapes_are_printed_word_for_word():
    trajectory = fake_samples(4, 2).trajectory
    view = {
        "prompts": ["a"] * 4,
        "latents": trajectory.states[:, :2],
        "log_probs": trajectory.log_probs,
        "target_cameras": torch.zeros(4, 21, 12),
    }
    assert debug_print.merged_lines([view], 4, 4) == [
        "合并后的samples形状（验证k个副本的分布）:",
        "  latents: [4, 2, 16, 21, 60, 104]",
        "  log_probs: [4, 2]",
        "  target_cameras: [4, 21, 12]",
        "总样本数（当前GPU）: 4",
        "期望的总样本数: 4",
        "k (group_size): 4",
    ]


def test_batches_of_one_size_are_concatenated_on_dimension_0():
    result = RewardResult(torch.zeros(2), torch.ones(2, dtype=torch.bool), ("",) * 2)
    copies = [tuple(group(1, 2)), tuple(group(2, 2))]
    (merged,) = collector_module.merge_sizes(copies, [fake_samples(2, 2)] * 2, [{"avg": result}] * 2)
    assert merged.samples.trajectory.states.shape == (4, 3, 16, 21, 60, 104)
    assert merged.samples.trajectory.log_probs.shape == (4, 2)
    assert merged.samples.conditioning.target_cameras.shape == (4, 21, 12)
    assert merged.rewards["avg"].values.shape == (4,)
    assert len(merged.rewards["avg"].causes) == len(merged.conditions) == 4


def _one_epoch(ranks: Ranks) -> tuple[list[str], dict[str, object]]:
    lines: list[str] = []
    debug_print.show = lines.extend  # the ranks of a pool share no console
    policy = ToyPolicy()
    collected = collector(ranks, policy).collect(1, Clock(torch.device("cpu")))
    gathered = compare.gather(collected, ranks)
    compare.check(gathered, sample_config(), ranks)
    compare.show_gathered(collected, gathered, sample_config(), ranks, {"brightness": 1.0})
    facts = {
        "prompts": [c.prompt[:30] for c in collected[0].conditions],
        "encoded": sum(len(part) for part in policy.encoded),
        "gids": gathered.gids.tolist(),
    }
    return lines, facts


def test_rank_0_prints_the_group_structure_word_for_word_and_no_other_rank_prints():
    results = run_ranks(_one_epoch, 8)
    lines, facts = results[0]
    assert lines == [
        f"[Batch 0] Prompts (前30字符): {facts['prompts'][:2]}",
        f"[Batch 1] Prompts (前30字符): {facts['prompts'][2:]}",
        "合并后的samples形状（验证k个副本的分布）:",
        "  latents: [4, 2, 2, 2, 2, 2]",
        "  log_probs: [4, 2]",
        "  target_cameras: [4, 2, 12]",
        "总样本数（当前GPU）: 4",
        "期望的总样本数: 4",
        "k (group_size): 4",
        "Gather后的总样本数（所有GPU）: 32",
        "k (group_size): 4",
        "期望的唯一样本数: 8",
        "每个唯一样本应该有 4 个副本",
    ]
    assert all(other == [] for other, _ in results[1:])
    assert all(everyone["gids"] == facts["gids"] for _, everyone in results)


def test_the_events_of_an_epoch_come_in_their_order(monkeypatch, capsys):
    events: list[str] = []
    ranks = Ranks()

    def spy(module, name, event):
        original = getattr(module, name)

        def recorded(*args, **kwargs):
            events.append(event)
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, recorded)

    sampling = collector(ranks, ToyPolicy(), train_batch_size=4)
    sampler = sampling.stream._sampler
    original_set_epoch = sampler.set_epoch
    monkeypatch.setattr(sampler, "set_epoch", lambda v: (events.append(f"set_epoch {v}"), original_set_epoch(v)))
    original_take = sampling.stream.take
    monkeypatch.setattr(sampling.stream, "take", lambda step: (original_take(step), events.append("append"))[0])
    spy(debug_print, "prompt_line", "prompt print")
    spy(collector_module, "merge_sizes", "concatenate")
    spy(debug_print, "merged_lines", "shape print")
    spy(debug_print, "gathered_lines", "gather print")
    sample = sample_config(train_batch_size=4)
    for number in (0, 1):
        collected = sampling.collect(number, Clock(torch.device("cpu")))
        events.append("gather")
        gathered = compare.gather(collected, ranks)
        compare.show_gathered(collected, gathered, sample, ranks, {"brightness": 1.0})
    once = ["append", "prompt print"]
    after = ["concatenate", "shape print", "gather", "gather print"]
    assert events == [
        *["set_epoch 0", *once, "set_epoch 1", *once, *after],
        *["set_epoch 2", *once, "set_epoch 3", *once, *after],
    ]
    assert capsys.readouterr().out.count("[Batch 1] Prompts (前30字符): ") == 2


def test_nothing_is_printed_without_debug(capsys):
    collector(Ranks(), ToyPolicy(), train_batch_size=4, debug=False).collect(0, Clock(torch.device("cpu")))
    assert capsys.readouterr().out == ""


def test_rewards_are_repeated_over_the_remembered_steps_for_the_eye():
    assert debug_print.repeat_over_steps(torch.tensor([1.0, 2.0]), 3).tolist() == [[1.0] * 3, [2.0] * 3]


@pytest.mark.parametrize(
    ("gids", "slots", "message"),
    [
        ([1, 1, 2, 2], [0, 1, 0, 1], None),
        ([1, 2, 1, 2], [0, 0, 1, 1], None),
        ([1, 1, 2], [0, 1, 0], "3 samples were gathered, expected 4"),
        ([1, 1, 1, 1], [0, 1, 0, 1], "1 groups were gathered, expected 2"),
        ([1, 1, 2, 2], [0, 1, 0, 0], r"groups \[2\] do not hold each of the 2 copies once"),
        ([1, 1, 1, 2], [0, 1, 1, 0], r"groups \[1, 2\] do not hold"),
    ],
)
def test_the_gathered_counts_are_asserted_always(gids, slots, message):
    context = pytest.raises(AssertionError, match=message) if message else contextlib.nullcontext()
    with context:
        debug_print.check_gathered(torch.tensor(gids), torch.tensor(slots), 4, 2)


def test_the_local_count_is_asserted_always():
    debug_print.check_merged(4, 4)
    with pytest.raises(AssertionError, match="holds 3 samples of the epoch, expected 4"):
        debug_print.check_merged(3, 4)


def test_the_window_is_drawn_per_round_alike_for_every_batch():
    settings = collector(Ranks(), ToyPolicy(), train_batch_size=4).settings
    assert {settings.window(number) for number in range(20)} == {(1, 2), (2, 3)}
