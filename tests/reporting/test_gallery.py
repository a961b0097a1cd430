"""The videos of a run: what stands in them, in their index, and in the film strip; what a resumed run knows of them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from flow_grpo.maths.poses import preset_path
from flow_grpo.records import Condition
from flow_grpo.reporting import filmstrip, video_index
from flow_grpo.reporting.clips import Clip, make_clip
from flow_grpo.reporting.drawing.path_sketch import flat_path
from flow_grpo.reporting.gallery import Gallery
from flow_grpo.reporting.labelled_video import Panel, draw_labelled, rate
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.video_file import read_frames
from tests.toy import BrightnessReward, ToyPolicy, condition, group, scored

SIZE = (5, 12, 16)


def shown(index: int = 3, **changes: object) -> Condition:
    return dataclasses.replace(
        condition(index),
        source_video=torch.full((3, *SIZE), 0.25),
        target_video=torch.full((3, *SIZE), 1.0),
        target_poses=preset_path("arc_left", 5),
        **changes,
    )


def clip_of(level: float, index: int = 3, **changes: object) -> Clip:
    return make_clip(shown(index, **changes), torch.full((3, *SIZE), level), {"brightness": level})


def write(run: Path, *evaluations: tuple[int, list[Clip]], resumed_step: int | None = None) -> list[dict[str, object]]:
    tracker = Tracker(run, {}, (), World(), resumed_step=resumed_step)
    gallery = Gallery(tracker, run)
    for step, clips in evaluations:
        gallery.evaluation(clips, step, before=step == 0)
    tracker.close()
    return video_index.read(run / "videos")


def levels_of(run: Path, line: dict[str, object]) -> dict[str, float]:
    frame = list(read_frames(run / "videos" / line["file"]))[2] / 255
    return {
        box["name"]: float(frame[box["y"] : box["y"] + box["height"], box["x"] : box["x"] + box["width"]].mean())
        for box in line["panels"]
    }


def test_what_the_policy_made_before_training_stands_beside_what_it_makes_now(tmp_path):
    first, second = write(tmp_path, (0, [clip_of(0.5)]), (2, [clip_of(0.75)]))
    assert levels_of(tmp_path, first) == pytest.approx({"source": 0.25, "base": 0.5, "true view": 1.0}, abs=0.02)
    wanted = {"source": 0.25, "base": 0.5, "now": 0.75, "true view": 1.0}
    assert levels_of(tmp_path, second) == pytest.approx(wanted, abs=0.02)
    assert list(levels_of(tmp_path, second)) == list(wanted)
    assert (first["before"], second["before"]) == ({}, {"brightness": 0.5})


def test_a_resumed_run_still_shows_the_base_and_forgets_what_came_later(tmp_path):
    write(tmp_path, (0, [clip_of(0.5)]), (2, [clip_of(0.6)]), (4, [clip_of(0.7)]))
    lines = write(tmp_path, (4, [clip_of(0.75)]), resumed_step=2)
    assert [(line["step"], line["kind"]) for line in lines] == [(0, "eval"), (2, "eval"), (4, "eval")]
    assert levels_of(tmp_path, lines[-1])["base"] == pytest.approx(0.5, abs=0.02)
    assert [line["step"] for line in write(tmp_path, (0, [clip_of(0.5)]))] == [0]  # a run that begins


@pytest.mark.parametrize("damage", ["gone", "broken", "other size", "other condition"])
def test_a_base_that_is_missing_or_does_not_fit_is_left_out(tmp_path, damage):
    (first,) = write(tmp_path, (0, [clip_of(0.5, index=3)]))
    file = tmp_path / "videos" / first["file"]
    again = clip_of(0.75, index=4 if damage == "other condition" else 3)
    if damage == "gone":
        file.unlink()
    elif damage == "broken":
        file.write_bytes(b"no video")
    elif damage == "other size":
        again = dataclasses.replace(again, panels={n: v[:, :4] for n, v in again.panels.items()}, commanded=None)
    *_, last = write(tmp_path, (2, [again]), resumed_step=0)
    assert last["step"] == 2 and [box["name"] for box in last["panels"]] == ["source", "now", "true view"]


def test_a_line_of_the_index_says_what_a_video_shows(tmp_path):
    poses = preset_path("arc_left", 5)
    estimated = poses.clone()
    estimated[1] = torch.nan
    clip = dataclasses.replace(clip_of(0.5, preset="arc_left"), estimated=estimated)
    (line,) = write(tmp_path, (0, [clip]))
    paths = line.pop("paths")
    assert np.allclose(paths["commanded"], poses[:, :3, 3]) and paths["estimated"][1] is None
    assert np.allclose(paths["estimated"][4], poses[4, :3, 3])
    assert [list(box) for box in line.pop("panels")] == [["name", "x", "y", "width", "height"]] * 3
    assert line == {
        "file": "eval_000000_val-f17_aperture10-scene3_cam02_brightness_0.500.mp4",
        "kind": "eval",
        "step": 0,
        "condition": 3,
        "scene": "val/f17_aperture10/scene3",
        "camera": "cam02",
        "preset": "arc_left",
        "prompt": "",
        "scores": {"brightness": 0.5},
        "before": {},
        "caption": "val/f17_aperture10/scene3, cam01 to cam02 (arc_left): brightness 0.500",
    }


def test_training_samples_and_a_group_s_copies_are_written_when_asked_for(tmp_path):
    tracker = Tracker(tmp_path, {}, (), World())
    batch = scored(ToyPolicy(), group(3, 4), reward=BrightnessReward())
    Gallery(tracker, tmp_path).training(batch, 7, count=2, weights={"brightness": 1.0}, k=4)
    tracker.close()
    lines = video_index.read(tmp_path / "videos")
    assert [line["kind"] for line in lines] == ["train", "train", "group"]
    assert [box["name"] for box in lines[-1]["panels"]] == [f"copy {place}" for place in (1, 2, 3, 4)]
    assert all((tmp_path / "videos" / line["file"]).stat().st_size for line in lines)


def ending_in(level: float, index: int) -> Clip:
    video = torch.zeros((3, *SIZE))
    video[:, -1] = level
    return make_clip(shown(index), video, {})


def test_the_film_strip_has_last_frames_a_row_per_condition_and_a_column_per_evaluation(tmp_path):
    steps = [(step, [ending_in(level, index) for index in (1, 2)]) for step, level in ((0, 0.0), (2, 0.5), (4, 0.75))]
    write(tmp_path, *steps)
    with Image.open(tmp_path / "filmstrip.png") as picture:
        levels = np.asarray(picture.convert("L")) / 255
    rows = [levels[y] for y in (130, 130 + 239)]
    for row in rows:
        found = [float(row[int(len(row) * (place + 0.5) / 4)]) for place in range(4)]
        assert found == pytest.approx([0.0, 0.5, 0.75, 1.0], abs=0.03)


@pytest.mark.parametrize(
    ("steps", "wanted"), [([3], [3]), ([0, 2], [0, 2]), (list(range(0, 101, 10)), [0, 20, 40, 60, 80, 100])]
)
def test_the_first_and_the_last_evaluation_are_always_in_the_film_strip(steps, wanted):
    assert filmstrip.chosen_steps(steps) == wanted


def test_a_line_that_cannot_be_read_is_passed_over(tmp_path):
    (tmp_path / "index.jsonl").write_text('{"file": "a", "step": 1}\n{"fi\n[]\n{"file": 3, "step": 1}\n')
    assert video_index.read(tmp_path) == [{"file": "a", "step": 1}]
    video_index.add(tmp_path, {"file": "a", "step": 2})
    assert json.loads((tmp_path / "index.jsonl").read_text()) == {"file": "a", "step": 2}


def a_film(rows: int, columns: int, count: int = 2, poses: Tensor | None = None):
    panel = torch.randint(0, 256, (3, 5, rows, columns), dtype=torch.uint8)
    names = ["source", "base", "now", "true view", *(f"copy {place}" for place in range(20))][:count]
    panels = [Panel(name, panel, "said after it") for name in names]
    video, boxes = draw_labelled(panels, ["a title", "word " * 40], poses)
    return panel, video, boxes


@pytest.mark.parametrize(("rows", "columns", "factor"), [(24, 32, 10), (7, 13, 35), (240, 416, 1), (480, 832, 1)])
def test_small_panels_are_enlarged_by_a_whole_factor_without_smoothing(rows, columns, factor):
    panel, video, boxes = a_film(rows, columns, poses=preset_path("arc_left", 5))
    assert video.shape[2] % 2 == video.shape[3] % 2 == 0
    for box in boxes:
        assert (box.height, box.width) == (factor * rows, factor * columns) and box.height >= 240
        assert box.x % 2 == box.y % 2 == 0
        part = video[:, :, box.y : box.y + box.height, box.x : box.x + box.width]
        assert torch.equal(part, panel.repeat_interleave(factor, 2).repeat_interleave(factor, 3))


def test_many_wide_panels_go_into_several_rows():
    _, video, boxes = a_film(480, 832, count=6)
    assert video.shape[3] <= 4096 and len({box.y for box in boxes}) == 2
    places = {(box.x, box.y) for box in boxes}
    assert len(places) == 6 and max(box.y + box.height for box in boxes) < video.shape[2]


def test_a_short_clip_lasts_two_seconds():
    assert [rate(frames, 24) for frames in (1, 5, 21, 81)] == [0.5, 2.5, 10.5, 24]


def test_the_marked_frame_moves_along_the_path_and_nothing_else_does():
    frozen = torch.zeros(3, 5, 24, 32, dtype=torch.uint8)
    video, (box,) = draw_labelled([Panel("now", frozen)], ["a title"], preset_path("arc_left", 5))
    changed = (video != video[:, :1]).any(dim=0).any(dim=0)
    assert changed.any() and not changed[: box.y + box.height].any() and not changed[:, : video.shape[3] // 2].any()
    assert len(video.flatten(2).unique(dim=1)[0]) == 5


@pytest.mark.parametrize(
    ("preset", "name", "axis"),
    [
        ("arc_left", "from above", 0),
        ("zoom_in", "from above", 1),
        ("translate_up", "from behind", 1),
        ("pan_right", "viewing direction", 0),
        ("tilt_up", "viewing direction", 1),
    ],
)
def test_a_path_is_drawn_from_where_its_motion_is_seen(preset, name, axis):
    found, points = flat_path(preset_path(preset, 5))
    moved = np.subtract(points[-1], points[0])
    assert found == name and np.argmax(np.abs(moved)) == axis
    assert (moved[axis] < 0) == (preset == "arc_left")  # left is left, up is up
