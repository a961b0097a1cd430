"""References are measured once for the copies of a condition, and never taken from another one."""

import dataclasses

import pytest
import torch

from flow_grpo.rewards import exposure, motion_mag, source_match
from flow_grpo.rewards.base import MOST_PREPARED, RewardSet
from flow_grpo.rewards.references import References
from tests.room_films import conditions, film

FILM = film(["pan_left", "zoom_in"])
FIRST, SECOND = conditions(FILM)


def copies(*slots: int) -> list:
    """Return copies of the first condition, read from disk one by one: equal videos in different memory."""
    videos = {"source_video": FIRST.source_video, "target_video": FIRST.target_video}
    return [
        dataclasses.replace(FIRST, slot=s, **{n: None if v is None else v.clone() for n, v in videos.items()})
        for s in slots
    ]


def test_copies_are_measured_once_and_other_conditions_by_themselves():
    asked = []

    def measure(condition) -> torch.Tensor:
        asked.append(condition)
        return condition.source_video.mean()[None]

    darker = dataclasses.replace(FIRST, source_video=FIRST.source_video / 2)
    alone = dataclasses.replace(FIRST, target_video=None)
    batch = [*copies(0, 1), SECOND, darker, alone, *copies(2)]
    found = References(measure)(batch)
    assert [condition is one for condition, one in zip(asked, [batch[0], SECOND, darker, alone], strict=True)]
    assert found[:, 0].tolist() == [float(condition.source_video.mean()) for condition in batch]


@pytest.mark.parametrize(
    ("module", "name", "kind"),
    [(exposure, "_range", exposure.Exposure), (motion_mag, "_reference_motion", motion_mag.MotionMag),
     (source_match, "_allowed", source_match.SourceMatch)],
)  # fmt: skip
def test_a_reward_measures_a_group_s_references_once_and_scores_a_copy_as_alone(module, name, kind, monkeypatch):
    measured, real = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda condition: measured.append(condition) or real(condition))
    group = [*copies(0, 1, 2), SECOND]
    videos = torch.stack([torch.roll(c.source_video, place, -1) for place, c in enumerate(group)])
    reward = kind()
    RewardSet([reward], {reward.name: 1.0}).prepare(group)
    assert len(measured) == 2
    found = reward(videos, group)
    assert len(measured) == 2
    alone = [kind()(video[None], [condition]).values for video, condition in zip(videos, group, strict=True)]
    assert torch.equal(found.values, torch.cat(alone))


def test_what_is_prepared_is_bounded_and_its_errors_are_left_to_the_scoring():
    reward, given, told = source_match.SourceMatch(), [], []

    def prepare(conditions):
        given.extend(conditions)
        raise ValueError("torn")

    reward.prepare = prepare
    rewards = RewardSet([reward], {reward.name: 1.0})
    rewards.on_call = told.append
    many = [
        dataclasses.replace(FIRST, target_camera=f"cam{n // 2:02d}", slot=n % 2) for n in range(2 * MOST_PREPARED + 2)
    ]
    rewards.prepare(many)
    assert [one.target_camera for one in given] == [f"cam{n:02d}" for n in range(MOST_PREPARED)]
    assert told == ["source_match", ""]
