"""What can be measured on clips: values and causes by reward, presets, advice, table, JSON and page."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from flow_grpo.data.splits import multicam_data
from flow_grpo.maths.poses import preset_path
from flow_grpo.rewards.camera.anchors import Source
from flow_grpo.rewards.camera.pnp import MappedView, camera_matrix
from flow_grpo.rewards.frames import grey_frames
from flow_grpo.runtime.video_file import write_video
from flow_grpo.settings.loading import load_config
from tests.command import command
from tests.refusals import refusal
from tests.textured_room import SMALL, condition, film, shoot, source_path, standing
from tools import check_sources
from tools.footage.answers import Answer, Score, measurable
from tools.footage.focal_length import focal_length

FRAMES = 5
KNOBS = {"data.num_frames": FRAMES, "data.height": SMALL[0], "data.width": SMALL[1]}


def words(clips, *more: str) -> list[str]:
    return [str(clips), *command(KNOBS, "--workers", "0", recipe="my_recam_8npu"), *more]


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Answer on five clips; return the exit code and the folder."""
    folder = tmp_path_factory.mktemp("clips")
    still = shoot(standing(FRAMES), SMALL)
    videos = {"still": still, "pan": film("pan_right"), "walk": film("source"), "short": still[:, :3]}
    videos["flat"] = torch.full_like(still, 0.5)
    for name, video in videos.items():
        write_video(folder / f"{name}.mp4", video, 24)
    (folder / "walk.json").write_text(json.dumps({"poses": source_path(FRAMES).tolist()}))
    np.savez(folder / "still.depth.npz", depth=np.full((1, *SMALL), 4.0))
    files = ["--json", str(folder / "answers.json"), "--page", str(folder / "page.html"), "--focal-px", "420.2"]
    return check_sources.main(words(folder, *files)), folder


def clips_of(folder) -> dict[str, dict]:
    return {one["clip"]: one for one in json.loads((folder / "answers.json").read_text())["clips"]}


def test_a_reward_has_its_floor_on_a_clip_in_its_own_unit(answered):
    found = clips_of(answered[1])
    cameras = {"still": "stays in place, in metres", "pan": "stays in place", "walk": "its poses, in metres"}
    assert {name: found[name]["camera"] for name in cameras} == cameras
    for name in cameras:  # the pan's own path is nowhere given: under the identity it would be degrees off
        score = found[name]["scores"]["pose_rot"]
        assert -0.005 < score["value"] <= 0 and score["text"].endswith("°)") and score["cpu_seconds"] > 0
        assert len(found[name]["presets"]) == 10
    for name in ("still", "walk"):
        score = found[name]["scores"]["pose_trans"]
        assert -0.02 < score["value"] <= 0 and score["text"].endswith(" m)")


def test_what_has_no_value_says_why_and_what_helps(answered):
    code, folder = answered
    found = clips_of(folder)
    assert code == 1 and "3 frames, needs 5" in found["short"]["cause"] and "num_frames" in found["short"]["advice"][0]
    assert found["pan"]["scores"]["pose_trans"]["value"] is None and any("--depth" in x for x in found["pan"]["advice"])
    assert "0 features, needs 50" in found["flat"]["scores"]["pose_rot"]["cause"]
    assert any(x.startswith("exclude it") for x in found["flat"]["advice"]) and found["flat"]["presets"] == []
    assert found["walk"]["scores"]["view_disp"]["cause"] == "has no true view along path01"
    assert len(found["walk"]["advice"]) == 1 and "second camera" in found["walk"]["advice"][0]


def test_the_page_shows_every_clip_and_fetches_nothing(answered):
    page = (answered[1] / "page.html").read_text()
    assert page.count("data:image/jpeg;base64,/9j/") == 4 and page.count("<figure") == 5
    assert "http" not in page.replace("http-equiv", "") and "What helps: exclude it" in page


def test_sources_of_a_data_set_are_answered_for_once_each_by_their_true_views(world, tmp_path, capsys):
    knobs = {"data.num_frames": 5, "data.height": 24, "data.width": 32, "data.tiny_world": "unit_test"}
    asked = command(knobs, "--workers", "0", "--json", str(tmp_path / "answers.json"))
    assert check_sources.main([str(world), *asked]) == 0
    found = clips_of(tmp_path)
    scores = [score["value"] for one in found.values() for score in one["scores"].values()]
    data = multicam_data(load_config(asked[1], [f"--config.data.root={world}", *asked[6:]]).data, "train")
    assert all(value is not None for value in scores)
    assert len(found) == len({data.source_file(number) for number in range(len(data))}) < len(data)
    assert capsys.readouterr().out.count("\n| train/") == len(found)


@pytest.mark.parametrize(("aside", "kept", "lost"), [(-10.0, "pan_left", "pan_right"), (10.0, "pan_right", "pan_left")])
def test_a_preset_that_turns_away_from_all_points_is_not_measurable(aside, kept, lost):
    """Of 28 degrees of view the points take 6, on one side: a turn to the other side loses them before its middle."""
    angle = np.deg2rad(aside + np.linspace(-3, 3, 80))
    xyz = 4 * np.stack([np.sin(angle), np.zeros(80), np.cos(angle)], 1)
    view = MappedView(0, np.zeros((80, 128), np.float32), xyz, np.ones(80, np.bool_))
    asked = condition("pan_right", torch.zeros(3, 21, *SMALL), preset_path("pan_right", 21))
    source = Source((view,), camera_matrix([840.0, 840.0, 208.0, 120.0]), np.ones(21, np.bool_), "", metric=False)
    found = measurable(source, asked)
    assert kept in found and lost not in found and "zoom_in" in found
    assert "zoom_in" not in measurable(dataclasses.replace(source, metric=True), asked)  # beside them in the end


def test_a_turn_tells_the_focal_length_in_pixels_of_the_file_and_nothing_else_does(tmp_path):
    for name in ("pan_right", "arc_right"):
        write_video(tmp_path / f"{name}.mp4", film(name, frames=9), 24)
    small = {"data.num_frames": 9, "data.height": 144, "data.width": 208}  # a part of the picture, smaller
    asked = command(small, "--workers", "0", "--json", str(tmp_path / "answers.json"), recipe="my_recam_8npu_footage")
    assert check_sources.main([str(tmp_path), *asked]) == 0
    found = clips_of(tmp_path)
    assert found["pan_right"]["focal_px"] == pytest.approx(420.2, rel=0.01)
    assert found["pan_right"]["advice"][0].startswith(f"--focal-px {found['pan_right']['focal_px']} is what")
    assert found["arc_right"]["focal_px"] is None and "pictures do not tell" in found["arc_right"]["advice"][0]


@pytest.mark.parametrize(("path", "told"), [("pan_left", True), ("tilt_down", True), ("zoom_in", False), ("", False)])
def test_a_focal_length_is_told_to_half_a_percent_or_not_at_all(path, told):
    video = film(path, frames=5, speed=0.5) if path else shoot(standing(5), SMALL)
    found = focal_length(grey_frames(video, range(5)))
    assert found == (pytest.approx(420.2, rel=0.005) if told else None)


def test_a_cause_that_nobody_foresaw_is_its_own_advice():
    assert Answer("a", "a.mp4 is HDR; convert it").advice() == ["a.mp4 is HDR; convert it"]


def test_a_focal_length_that_is_told_leaves_the_other_advice():
    scores = {cause: Score(None, "-", cause, 0.0) for cause in ("a has no known focal length", "a has no true view")}
    focal, view = Answer("a", focal_px=420, scores=scores).advice()
    assert focal.startswith("--focal-px 420") and "second camera" in view


@pytest.mark.parametrize("more", [["--out", "usable.json"], None])
def test_clips_or_items_are_judged_not_both(capsys, more):
    asked = words("clips", *more) if more else words("clips")[1:]
    assert "CLIPS and --out, must be one of them" in refusal(capsys, check_sources.main, asked)
