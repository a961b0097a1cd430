"""Every trick is noticed by a reward, each companion notices its own, and the right video is best for all."""

import dataclasses
from collections.abc import Collection, Sequence

import pytest

from flow_grpo.rewards.base import REWARDS, Reward
from flow_grpo.rewards.camera.pose import PoseMeasurer, PoseRot, PoseTrans
from flow_grpo.rewards.camera.smooth import Smooth
from flow_grpo.rewards.camera.view_disp import ViewDisp
from flow_grpo.rewards.exposure import Exposure
from flow_grpo.rewards.motion_mag import MotionMag
from flow_grpo.rewards.sharpness import Sharpness
from flow_grpo.rewards.source_match import SourceMatch
from flow_grpo.rewards.target_view import TargetPsnr, TargetView
from tests.tricks import COMMANDS, EXACT, HARMLESS, stage

SIZE, FRAMES = (120, 208), 5
# Of a known room, which no real video has; a measure to judge by, of which a copy of the source is best; no value for a
# pan.
NEEDS_MORE = {"room_pose", "room_tracks", "room_rot", "room_trans", "room_content", "source_texture", "pose_dir"}
# Tricks that each reward must notice.
NOTICES = {
    "pose_rot": ("static first frame", "copied source", "reversed", "0.5 of the speed", "1.5 of the speed", "mirrored"),
    "pose_trans": ("static first frame", "copied source", "reversed", "0.5 of the speed", "1.5 of the speed", "noise"),
    "smooth": ("tremble", "last third jitters"),
    "view_disp": ("0.98 of the speed", "0.5 of the speed", "copied source", "last third jitters", "mirrored"),
    "target_view": ("static first frame", "copied source", "0.5 of the speed", "over-exposed", "mirrored", "noise"),
    "target_psnr": ("blurred", "0.98 of the speed", "grid", "flicker"),
    "source_match": ("noise", "mirrored", "over-exposed", "garish colours"),
    "motion_mag": ("static first frame", "blurred", "flicker", "noise"),
    "exposure": ("grid", "over-exposed", "garish colours", "flicker", "noise"),
    "sharpness": ("blurred",),
}
HACKED = {"sharpness": ("noise",)}  # tricks scored above the exact video
NEED_THE_TRUE_VIEW = ("view_disp", "target_view", "target_psnr")


FACTOR = 3.0  # a reward notices a video scored this many floors below the exact one


@dataclasses.dataclass(frozen=True)
class Scores:
    values: dict[str, dict[str, dict[str, float]]]  # command -> video, the exact one first -> reward -> value
    floors: dict[str, float]  # reward -> its noise floor

    @property
    def videos(self) -> list[str]:
        return list(next(iter(self.values.values())))

    def noticed(self, video: str, reward: str) -> int:
        limit = FACTOR * self.floors[reward]
        return sum(by[video][reward] < by[EXACT][reward] - limit for by in self.values.values())


def weight_free_rewards() -> list[Reward]:
    """Return every reward that needs neither weights nor a server, run in this process; pose rewards share one PnP."""
    measurer = PoseMeasurer()
    pose = [PoseRot(measurer), PoseTrans(measurer), Smooth(measurer), ViewDisp(measurer.features)]
    return [*pose, TargetView(), TargetPsnr(), SourceMatch(), MotionMag(), Exposure(), Sharpness()]


def score(commands: Sequence[str], size: tuple[int, int], frames: int, videos: Collection[str] = ()) -> Scores:
    rewards, values = weight_free_rewards(), {}
    for command in commands:
        staged = stage(command, size, frames)
        values[command] = {}
        for name in videos or staged.videos:
            results = {reward.name: reward(staged.videos[name][None], [staged.condition]) for reward in rewards}
            assert all(result.valid.all() for result in results.values()), (command, name, results)
            values[command][name] = {reward: float(result.values) for reward, result in results.items()}
    return Scores(values, {reward.name: reward.floor for reward in rewards})


def check(scores: Scores) -> None:
    """Assert what docs/camera_rewards.md says about commands that turn and move."""
    commands, tricks = len(scores.values), [name for name in scores.videos if name not in (EXACT, HARMLESS)]
    for trick in tricks:
        assert any(scores.noticed(trick, reward) == commands for reward in scores.floors if reward not in HACKED), trick
    for reward, named in NOTICES.items():
        for trick in named:
            assert scores.noticed(trick, reward), (reward, trick)
    for by_video in scores.values.values():
        for reward, floor in scores.floors.items():
            best = max(values[reward] for values in by_video.values())
            assert by_video[EXACT][reward] >= best - floor or reward in HACKED, reward
        for reward, tricks in HACKED.items():
            assert all(by_video[trick][reward] > by_video[EXACT][reward] + scores.floors[reward] for trick in tricks)


def test_every_trick_is_noticed_the_exact_video_is_best_and_each_trick_has_its_own_reward():
    scores = score(["arc_right"], SIZE, FRAMES)
    check(scores)
    others = [name for name in scores.floors if name not in NEED_THE_TRUE_VIEW]
    assert [name for name in others if scores.noticed("tremble", name)] == ["smooth"]
    assert [name for name in others if scores.noticed("grid", name)] == ["exposure"]
    # Storing a video is noticed by rewards of single pixels only.
    assert [name for name in scores.floors if scores.noticed(HARMLESS, name)] == ["target_psnr", "sharpness"]
    assert set(scores.floors) == set(REWARDS) - NEEDS_MORE
    assert [reward.name for reward in weight_free_rewards()] == list(scores.floors)


def test_the_displacement_sees_a_slower_pan_that_the_pose_rewards_take_for_right():
    scores = score(["pan_right"], SIZE, FRAMES, (EXACT, "0.98 of the speed"))
    noticing = {name for name in scores.floors if scores.noticed("0.98 of the speed", name)}
    assert "view_disp" in noticing and not noticing & {"pose_rot", "pose_trans", "smooth"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_trick_is_noticed_on_paths_that_only_turn_or_move():
    check(score(COMMANDS, (240, 416), FRAMES))
