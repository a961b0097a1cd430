"""Rewards of the user's own, named by their place: functions, classes, and what is refused before a run."""

import re
from pathlib import Path

import pytest
import torch

from flow_grpo.records import Condition
from flow_grpo.rewards.base import build_reward_set, check_name, try_rewards
from flow_grpo.settings.errors import ConfigError
from tests.toy import condition

PAGE = Path(__file__).parents[2] / "docs" / "rewards.md"
CONDITIONS = tuple(condition(number) for number in range(3))
VIDEOS = torch.stack([each.source_video for each in CONDITIONS])


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that writes my_rewards.py in the working directory and returns the name of a reward in it."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str) -> str:
        Path("my_rewards.py").write_text(text)
        return f"my_rewards.py:{name}"

    return write


def test_a_plain_function_is_a_reward_beside_others(own):
    body = "return (videos[:, 0] - videos[:, 2]).double().mean((1, 2, 3))"
    name = own(f"def warmth(videos, conditions):\n    {body}\n", "warmth")
    rewards = build_reward_set({name: 1.0, "sharpness": 0.5}, data_root=".")
    result = rewards(VIDEOS, CONDITIONS)[name]
    assert torch.allclose(result.values, (VIDEOS[:, 0] - VIDEOS[:, 2]).mean((1, 2, 3)))
    assert result.values.dtype == torch.float32 and result.valid.all() and result.info == {}
    assert rewards.floors[name] == 0.0


@pytest.mark.parametrize(("number", "example", "floor"), [(0, "warmth", 0.0), (1, "Warmth", 0.005)])
def test_the_examples_on_the_page_are_rewards(own, number, example, floor):
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    name = own(blocks[number], example)
    rewards = build_reward_set({name: 1.0}, data_root=".")
    try_rewards(rewards, CONDITIONS[0])
    result = rewards(VIDEOS, CONDITIONS)[name]
    assert torch.allclose(result.values, (VIDEOS[:, 0] - VIDEOS[:, 2]).mean((1, 2, 3)), atol=1e-6)
    assert rewards.floors == {name: floor} and set(result.info) == set(rewards.rewards[0].measures)


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("def warmth(videos):\n    pass\n", "warmth", r"must take \(videos, conditions\) but takes \(videos\)"),
        ("class Warmth:\n    def __init__(self, scale): ...\n", "Warmth", r"must take \(\) but takes \(scale\)"),
        ("class Warmth:\n    def __call__(self, videos): ...\n", "Warmth", r"must take \(self, videos, conditions\)"),
        ("", "warmth", "must name a function or class of my_rewards.py"),
    ],
)
def test_other_arguments_are_refused_before_anything_is_loaded(own, text, name, message):
    with pytest.raises(ConfigError, match=message):
        check_name(own(text, name), {})


def test_rewards_that_need_what_the_data_lacks_are_refused_before_the_run():
    prompt = Condition(index=0, gid=0, slot=0, prompt="a kite", wanted_size=(5, 8, 8))
    try_rewards(build_reward_set({"sharpness": 1.0}, data_root="."), prompt)
    lacked = {"pose_rot": "source_video and target_poses and intrinsics", "target_psnr": "target_video"}
    for name, lacking in lacked.items():
        with pytest.raises(ConfigError, match=rf"got '{name}', needs the {lacking} of every condition"):
            try_rewards(build_reward_set({name: 0.0}, data_root="."), prompt)
    several = dict.fromkeys(("target_psnr", "motion_mag", "sharpness"), 0.5)
    way_out = "got 'target_psnr, motion_mag', need the target_video .* pass --config.reward.weights=sharpness=0.5, "
    with pytest.raises(ConfigError, match=way_out):
        try_rewards(build_reward_set(several, data_root="."), prompt)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return videos.mean()", r"returned shape \(\), must return a tensor of shape \(2,\), one score a video"),
        ("return videos.mean((2, 3, 4))", r"returned shape \(2, 3\), must"),
        ("return [1.0, 2.0]", "returned list, must return a tensor"),
        ("return videos[:, 7].mean()", "my_rewards.py fails in line 2: IndexError"),
    ],
)
def test_what_fails_or_has_another_shape_is_refused_on_a_trial_before_the_run(own, body, message):
    rewards = build_reward_set({own(f"def warmth(videos, conditions):\n    {body}\n", "warmth"): 1.0}, data_root=".")
    with pytest.raises(ConfigError, match=message) as refused:
        try_rewards(rewards, CONDITIONS[0])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("write", ["videos.sub_(0.5)", "videos.numpy()[:] = 0", "c.source_video.numpy()[:] = 0"])
def test_a_reward_cannot_spoil_what_others_score_whatever_way_it_writes(own, write):
    given = tuple(condition(number) for number in range(3))
    text = f"for c in conditions:\n        {write}\n        c.target_poses.numpy()[:] = 0\n"
    text += "    return videos[:, 0, 0, 0, 0]"
    rewards = build_reward_set({own(f"def warmth(videos, conditions):\n    {text}\n", "warmth"): 1.0}, data_root=".")
    before = str((VIDEOS, given))
    try_rewards(rewards, given[0])
    assert next(iter(rewards(VIDEOS, given).values())).valid.all()
    assert str((VIDEOS, given)) == before


@pytest.mark.parametrize(("text", "place"), [("sys.exit(0)\n", 2), ("def warmth(v, c):\n    sys.exit(0)\n", 3)])
def test_a_reward_that_exits_is_named_with_the_line(own, text, place):
    name = own(f"import sys\n{text}", "warmth")
    with pytest.raises(ConfigError, match=rf"my_rewards.py fails in line {place}: (SystemExit: 0|.*sys.exit\(0\))"):
        try_rewards(build_reward_set({name: 1.0}, data_root="."), CONDITIONS[0])


def test_a_reward_that_exits_later_has_no_value_and_says_why(own):
    text = "import sys\ndef warmth(videos, conditions):\n    sys.exit(0)\n"
    result = build_reward_set({own(text, "warmth"): 1.0}, data_root=".")(VIDEOS, CONDITIONS)
    (found,) = result.values()
    assert found.faulty.all() and "it called sys.exit(0)" in found.causes[0]


def test_videos_made_in_inference_mode_are_scored():
    with torch.inference_mode():
        videos = VIDEOS.clone()
    assert build_reward_set({"sharpness": 1.0}, data_root=".")(videos, CONDITIONS)["sharpness"].valid.all()
