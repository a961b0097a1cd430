"""Held-out evaluation: fixed inputs, the same numbers on any number of ranks, honest means."""

import contextlib
import dataclasses
import math
from unittest import mock

import pytest
import torch

from flow_grpo.judging import evaluate
from flow_grpo.judging.evaluate import Evaluator, held_out_indices, keeps_start
from flow_grpo.judging.table import means_by_camera
from flow_grpo.records import Condition, Guidance, RewardResult
from flow_grpo.rewards.base import RewardSet
from flow_grpo.runtime.ranks.context_parallel import share_samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import Config, EvalConfig, ModelConfig, SampleConfig, TrainConfig
from tests.toy import BrightnessReward, ToyPolicy, condition
from tests.workers import run_ranks

PRESETS = ("pan_right", "zoom_in", None)


class ToyData:
    def __len__(self) -> int:
        return 12

    def condition(self, index: int, gid: int = 0, slot: int = 0) -> Condition:
        return dataclasses.replace(condition(index, gid, slot), preset=PRESETS[index % 3])

    def size_of(self, index: int) -> tuple[int, int, int]:
        return (5, 2, 2)

    def scene_of(self, index: int) -> str:
        return str(index)

    def fingerprint(self) -> str:
        return "toys"


class Gold:
    name = "gold"
    floor = 0.0
    measures = ("trans_err_m",)

    def __call__(self, videos, conditions):
        index = torch.tensor([float(c.index) for c in conditions])
        return RewardResult(-index, index != 4, ("",) * len(index), {"trans_err_m": index})


def evaluator(world=None, *, policy=None, number=7, batch_size=3, kl_coef=0.1, **knobs) -> Evaluator:
    """A policy of the user's own, which has a copy of its start with a KL only."""
    rewards = RewardSet([BrightnessReward(broken=[(5, 0)])], {"brightness": 1.0})
    config = Config(
        model=ModelConfig(kind="toy.py:Toy"),
        sample=SampleConfig(shift=3.0),
        train=TrainConfig(kl_coef=kl_coef),
        eval=EvalConfig(num_conditions=number, batch_size=batch_size, num_steps=6, videos=2, **knobs),
    )
    return Evaluator(policy or ToyPolicy(), ToyData(), rewards, Gold(), config, world or World())


def test_conditions_are_of_as_many_scenes_as_there_are_and_each_as_often():
    class Scenes(ToyData):
        def scene_of(self, index: int) -> str:
            return "ab"[index < 8] if index else "c"  # four, seven and one of 12

    chosen = [[Scenes().scene_of(index) for index in held_out_indices(Scenes(), count)] for count in (3, 5, 12)]
    assert sorted(chosen[0]) == ["a", "b", "c"] and sorted(chosen[1]) == ["a", "a", "b", "b", "c"]
    assert sorted(held_out_indices(Scenes(), 12)) == list(range(12))
    assert held_out_indices(Scenes(), 12)[:5] == held_out_indices(Scenes(), 5)  # more conditions are added


def test_the_deterministic_sampler_is_used_and_every_condition_measured_once():
    policy = ToyPolicy()
    found = evaluator(policy=policy).run()
    assert [rows for rows, *_ in policy.calls] == [3] * 6 + [3] * 6 + [1] * 6
    assert found.metrics == evaluator().run().metrics


def test_conditions_are_encoded_with_the_evaluation_s_guidance():
    policy, seen = ToyPolicy(), []
    encode = policy.encode
    policy.encode = lambda conditions, guidance: (seen.append(guidance), encode(conditions))[1]
    evaluator(policy=policy, guidance_scale=5.0, negative_prompt="blurry").run()
    assert set(seen) == {Guidance(5.0, "blurry")}


def test_every_condition_has_noise_of_its_own_and_always_the_same():
    first, second = evaluator(), evaluator(number=3)
    assert second.indices == first.indices[:3] and len(set(first.indices)) == 7
    firsts = []
    for number in (7, 3):
        policy = ToyPolicy()
        velocity, seen = policy.velocity, []
        policy.velocity = lambda latents, *rest, v=velocity, s=seen: (s.append(latents), v(latents, *rest))[1]
        evaluator(policy=policy, number=number, batch_size=7).run()
        firsts.append(seen[0])
    assert len(firsts[0].flatten(1).unique(dim=0)) == 7
    assert torch.equal(firsts[0][:3], firsts[1])


def test_every_condition_has_a_row_and_means_leave_out_what_has_no_value_and_count_it():
    found = evaluator(number=12).run()
    assert found.metrics["eval/trans_err_m"] == pytest.approx((sum(range(12)) - 4) / 11)
    assert found.metrics["eval/trans_err_m_valid"] == pytest.approx(11 / 12)
    assert found.metrics["eval/brightness_valid"] == pytest.approx(11 / 12)
    assert "eval/brightness_valid" not in evaluator(number=1).run().metrics
    assert found.metrics["eval/brightness_percent"] == pytest.approx(100 * found.metrics["eval/brightness"])
    assert found.metrics["eval/gold"] == pytest.approx(-(sum(range(12)) - 4) / 11)
    scenes = {row["scene"]: row for row in found.table.rows()}
    assert len(scenes) == 12 and set(found.table.cameras) == {"cam02"}
    first, fifth = scenes["val/f17_aperture10/scene0"], scenes["val/f17_aperture10/scene5"]
    assert (first["preset"], fifth["preset"]) == ("pan_right", "")
    assert first["values"].keys() == {"brightness", "brightness_percent", "gold", "trans_err_m"}
    assert fifth["values"]["trans_err_m"] == 5.0 and math.isnan(fifth["values"]["brightness"])


def test_presets_and_kinds_of_camera_have_their_own_means_and_shares():
    evaluation = evaluator(number=12).run()
    assert [(row["preset"], row["count"]) for row in evaluation.presets] == [("pan_right", 4), ("zoom_in", 4)]
    found = means_by_camera(evaluation.table)
    assert {name.split("/")[1] for name in found} == {"pan_right", "zoom_in", "cam02"}
    assert found["eval_by_camera/pan_right/trans_err_m"] == pytest.approx((0 + 3 + 6 + 9) / 4)
    assert found["eval_by_camera/zoom_in/trans_err_m"] == pytest.approx((1 + 7 + 10) / 3)
    means = [row["trans_err_m"] for row in evaluation.presets]
    assert means == [found[f"eval_by_camera/{preset}/trans_err_m"] for preset in ("pan_right", "zoom_in")]
    assert found["eval_by_camera/zoom_in/trans_err_m_valid"] == pytest.approx(3 / 4)
    assert found["eval_by_camera/cam02/trans_err_m"] == pytest.approx((2 + 5 + 8 + 11) / 4)
    assert found["eval_by_camera/cam02/brightness_valid"] == pytest.approx(3 / 4)
    assert "eval_by_camera/pan_right/brightness_valid" not in found


class Seen(Gold):
    def __init__(self) -> None:
        self.videos: dict[int, torch.Tensor] = {}

    def __call__(self, videos, conditions):
        self.videos |= {c.index: video for c, video in zip(conditions, videos, strict=True)}
        return super().__call__(videos, conditions)


def test_the_floor_is_the_gold_estimator_on_what_the_codec_keeps_of_the_true_videos_there_are():
    made = evaluator(number=12)
    made.gold = Seen()
    assert made.floor() == {
        "eval_floor/gold": pytest.approx(-(sum(range(12)) - 4) / 11),
        "eval_floor/gold_valid": pytest.approx(11 / 12),
        "eval_floor/trans_err_m": pytest.approx((sum(range(12)) - 4) / 11),
        "eval_floor/trans_err_m_valid": pytest.approx(11 / 12),
    }
    assert sorted(made.gold.videos) == list(range(12))
    for index, video in made.gold.videos.items():
        torch.testing.assert_close(video[:, 0], condition(index).target_video[:, 0].mean(0).expand(3, -1, -1))
    assert made.policy.calls == []
    whole = made.dataset.condition
    made.dataset.condition = lambda i: whole(i) if i in (1, 7) else dataclasses.replace(whole(i), target_video=None)
    assert made.floor()["eval_floor/trans_err_m"] == pytest.approx(4.0)
    made.dataset.condition = lambda index: dataclasses.replace(whole(index), target_video=None)
    assert made.floor() == {}
    made.dataset.condition, made.gold = whole, None
    assert made.floor() == {}


def _evaluate(world: World, share: int = 1) -> tuple[tuple[dict, dict], tuple, int]:
    made = evaluator(share_samples(world, share, torch.device("cpu"))[0])
    found = made.run()
    counts = [row["count"] for row in found.presets]
    return (found.metrics | made.floor(), means_by_camera(found.table)), (counts, found.table.scenes), len(found.clips)


@pytest.mark.parametrize(("world_size", "share"), [(2, 1), (8, 1), (4, 2), (2, 2)])
def test_any_number_of_ranks_gives_the_same_numbers_whether_they_share_samples_or_not(world_size, share):
    (metrics, by_camera), rows, _ = _evaluate(World())
    results = run_ranks(_evaluate, world_size, share)
    assert all(result[:2] == results[0][:2] for result in results)
    assert results[0][0][0] == pytest.approx(metrics, rel=1e-6)
    assert results[0][0][1] == pytest.approx(by_camera, rel=1e-6)
    assert results[0][1] == rows
    assert [clips for *_, clips in results[1:]] == [0] * (world_size - 1)


def _fail_on_one(world: World) -> str:
    broken = evaluator(world)
    if world.data.rank == 1:
        broken.dataset.condition = lambda index, gid: 1 / 0
    with pytest.raises(RuntimeError) as caught:
        broken.run()
    return str(caught.value)


def test_a_failure_on_one_rank_is_raised_on_all():
    texts = run_ranks(_fail_on_one, 2)
    assert texts == ["rank 1 failed in evaluation: ZeroDivisionError: division by zero"] * 2


def test_the_given_weights_are_in_place_while_sampling_only():
    policy = ToyPolicy()

    @contextlib.contextmanager
    def brighter():
        policy.net.outer.bias.data -= 5
        yield
        policy.net.outer.bias.data += 5

    plain = evaluator(policy=policy).run()
    averaged = evaluator(policy=policy).run(brighter())
    assert averaged.metrics["eval/brightness"] > plain.metrics["eval/brightness"] + 0.2
    assert evaluator(policy=policy).run().metrics == pytest.approx(plain.metrics, abs=1e-5)


class Locating(Gold):
    asked = 0

    def locate(self, videos, conditions):
        self.asked += len(videos)
        return torch.stack([c.target_poses + 1 for c in conditions])


@pytest.mark.parametrize("gold", [Gold(), Locating()])
def test_a_shown_video_says_what_was_measured_and_where_an_estimator_saw_the_cameras(gold):
    made = evaluator(number=12)
    made.gold = gold
    clips = made.run().clips
    assert len(clips) == 2 == getattr(gold, "asked", 2)  # for the shown videos only
    for clip in clips:
        assert list(clip.panels) == ["source", "now", "true view"] and (clip.estimated is None) == (type(gold) is Gold)
        assert clip.scores["trans_err_m"] == clip.of["condition"]
        assert 0 < clip.scores["brightness"] < 1
        if clip.estimated is not None:
            torch.testing.assert_close(clip.estimated, clip.commanded + 1)


def test_conditions_shown_once_more_have_what_the_starting_policy_makes_of_them_beside():
    policy = ToyPolicy()
    before = evaluator(policy=policy).run()
    policy.net.outer.bias.data -= 5
    after = evaluator(policy=policy).run()
    first = before.table.scenes.index(before.clips[0].of["scene"])
    (clip,) = evaluator(policy=policy).clips([first], before.table, after.table)
    assert list(clip.panels) == ["source", "base", "now", "true view"]
    now = (before.clips[0].panels["now"], after.clips[0].panels["now"])
    for name, wanted in zip(("base", "now"), now, strict=True):
        torch.testing.assert_close(clip.panels[name], wanted, atol=1, rtol=0)
    assert clip.before["brightness"] == pytest.approx(before.clips[0].scores["brightness"])


def test_a_policy_without_a_copy_of_its_start_is_shown_without():
    policy = ToyPolicy()
    policy.reference = mock.Mock(side_effect=AttributeError("a copy that was never made"))
    made = evaluator(policy=policy, kl_coef=0.0)
    table = made.run().table
    (clip,) = made.clips([0], table, table)
    assert "base" not in clip.panels


@pytest.mark.parametrize("few", [10**6, 1])
def test_a_small_model_keeps_a_copy_of_its_start_to_show_it(monkeypatch, few):
    monkeypatch.setattr(evaluate, "FEW", few)
    made = evaluator(kl_coef=0.0)
    made.config = dataclasses.replace(made.config, model=ModelConfig(trained="attention"))
    table = made.run().table
    (clip,) = made.clips([0], table, table)
    assert ("base" in clip.panels) == (few > 1) == keeps_start(made.config, made.policy)


def _clips(world: World) -> list[list[str]]:
    made = evaluator(world)
    table = made.run().table
    return [list(clip.panels) for clip in made.clips([0, 2], table, table)]


def test_all_ranks_sample_what_the_first_one_shows():
    assert run_ranks(_clips, 2) == [[["source", "base", "now", "true view"]] * 2, []]
