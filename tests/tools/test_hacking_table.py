"""Every trick is noticed by a reward, each companion notices its own, and the right video is best for all."""

from __future__ import annotations

import pytest

from flow_grpo.rewards.base import REWARDS
from tools.dev.hacking.tricks import COMMANDS, EXACT, HARMLESS, Stage, stage
from tools.dev.hacking_table import (
    BEGIN,
    END,
    PAGE,
    Scores,
    draw_sheet,
    report,
    score,
    table,
    weight_free_rewards,
    write_between,
)

SIZE, FRAMES = (120, 208), 5
NEEDS_MORE = {"room_pose", "room_rot", "room_trans"}  # of a known room, which no real video has
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


@pytest.fixture(scope="module")
def scores() -> Scores:
    return score(["arc_right"], SIZE, FRAMES)


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


def test_every_trick_is_noticed_and_the_exact_video_is_best(scores):
    check(scores)


def test_without_a_true_view_only_smooth_sees_a_tremble_and_only_exposure_a_grid(scores):
    others = [name for name in scores.floors if name not in NEED_THE_TRUE_VIEW]
    assert [name for name in others if scores.noticed("tremble", name)] == ["smooth"]
    assert [name for name in others if scores.noticed("grid", name)] == ["exposure"]


def test_the_displacement_sees_a_slower_pan_that_the_pose_rewards_take_for_right():
    def slower(command, size, frames):
        staged = stage(command, size, frames)
        return Stage(staged.condition, {name: staged.videos[name] for name in (EXACT, "0.98 of the speed")})

    scores = score(["pan_right"], SIZE, FRAMES, make=slower)
    noticing = {name for name in scores.floors if scores.noticed("0.98 of the speed", name)}
    assert "view_disp" in noticing and not noticing & {"pose_rot", "pose_trans", "smooth"}


def test_what_storing_does_to_a_video_is_noticed_by_rewards_of_single_pixels_only(scores):
    assert [name for name in scores.floors if scores.noticed(HARMLESS, name)] == ["target_psnr", "sharpness"]


def test_all_rewards_that_need_no_weights_are_in_the_table(scores):
    assert set(scores.floors) == set(REWARDS) - NEEDS_MORE
    assert [reward.name for reward in weight_free_rewards()] == list(scores.floors)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_trick_is_noticed_on_paths_that_only_turn_or_move():
    check(score(COMMANDS, (240, 416), FRAMES))


def by_hand() -> Scores:
    values = {
        "pan_right": {EXACT: {"a": -0.01, "target_psnr": 40.0}, "trick": {"a": -0.33, "target_psnr": 39.9}},
        "zoom_in": {EXACT: {"a": 0.0, "target_psnr": 42.0}, "trick": {"a": -0.25, "target_psnr": 42.1}},
    }
    return Scores(values, {"a": 0.1, "target_psnr": 0.1}, {"a": 1.25, "target_psnr": 0.04})


def test_a_reward_notices_what_is_three_floors_below_the_exact_video():
    assert by_hand().noticed("trick", "a") == 1
    assert by_hand().noticed("trick", "target_psnr") == 0
    assert by_hand().noticed(EXACT, "a") == 0


def test_the_table_shows_means_counts_floors_and_seconds():
    assert table(by_hand()).splitlines() == [
        "| video | `a` | `target_psnr` |",
        "|---|---|---|",
        "| exact | -0.005 | 41.0 |",
        "| trick | **-0.290** 1/2 | 41.0 |",
        "| *floor* | 0.1 | 0.1 |",
        "| *CPU-s a video* | 1.2 | 0.0 |",
    ]


def test_the_page_is_rewritten_between_its_markers_only(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nOUTDATED\n{END}\nafter\n")
    for _ in range(2):
        write_between(page, report(by_hand(), (240, 416), 21, "python tools/dev/hacking_table.py"))
    text = page.read_text()
    assert text.startswith(
        f"before\n{BEGIN}\n\n    python tools/dev/hacking_table.py\n\n21 frames of 240x416, mean over pan_right"
    )
    assert text.endswith(f"| *CPU-s a video* | 1.2 | 0.0 |\n\n{END}\nafter\n") and "OUTDATED" not in text
    page.write_text("no markers\n")
    with pytest.raises(ValueError, match="each once and in this order"):
        write_between(page, "text")


def test_the_documented_table_has_every_trick():
    text = PAGE.read_text(encoding="utf-8")
    between = text[text.index(BEGIN) : text.index(END)]
    for name in stage("arc_right", (32, 48), FRAMES).videos:
        assert f"| {name} |" in between


def test_a_video_without_a_value_is_refused_with_its_cause():
    def blind(command, size, frames):
        return stage(command, (32, 48), frames)

    with pytest.raises(ValueError, match=r"pose_rot has no value for arc_right, exact: .*unusable"):
        score(["arc_right"], SIZE, FRAMES, make=blind)


def test_the_sheet_shows_every_video(tmp_path):
    draw_sheet(stage("arc_right", (32, 48), FRAMES), tmp_path / "sheet.png")
    assert (tmp_path / "sheet.png").stat().st_size > 10_000
