"""The picture of what a run changed."""

from __future__ import annotations

import pytest
import torch
from matplotlib.image import imread

from flow_grpo.runtime.video_file import write_video
from tools.dev.demo_picture import clips, draw


def film(path, level: float) -> None:
    video = torch.zeros(3, 5, 24, 96)
    video[..., :32], video[..., 32:64], video[..., 64:] = 0.2, level, 0.9
    write_video(path, video)


def test_the_first_and_the_last_evaluation_stand_side_by_side(tmp_path):
    folder = tmp_path / "run" / "videos"
    for step, level in ((0, 0.0), (50, 0.4), (120, 1.0)):
        film(folder / f"eval_{step:06d}_val-f17_aperture10-scene1_cam05_target_view_-0.{step}.mp4", level)
    for step in (0, 120):
        film(folder / f"eval_{step:06d}_val-f17_aperture10-scene1_cam06_target_view_0.mp4", 0.7)  # did not change
    film(
        folder / "eval_000000_val-f17_aperture10-scene2_cam01_target_view_0.mp4", 0.5
    )  # measured once: nothing to compare
    assert list(clips(tmp_path / "run")) == [
        *("val-f17_aperture10-scene1_cam05", "val-f17_aperture10-scene1_cam06"),
    ]
    draw([tmp_path / "run"], ["after training"], tmp_path / "out.png", rows=1, frames=5)
    picture = imread(tmp_path / "out.png")[..., 0]
    middle = picture[int(0.7 * len(picture))]
    levels = [float(middle[int(len(middle) * place)]) for place in (0.04, 0.29, 0.54, 0.79)]
    assert levels == pytest.approx([0.2, 0.0, 1.0, 0.9], abs=0.06)


def test_several_runs_stand_side_by_side_and_must_show_the_same(tmp_path):
    for run, last in (("a", 1.0), ("b", 0.4)):
        for step, level in ((0, 0.0), (50, last)):
            film(tmp_path / run / "videos" / f"eval_{step:06d}_val-scene1_cam05_target_view_0.mp4", level)
    runs = [tmp_path / "a", tmp_path / "b"]
    draw(runs, ["by a", "by b"], tmp_path / "out.png", rows=1, frames=5)
    picture = imread(tmp_path / "out.png")[..., 0]
    middle = picture[int(0.7 * len(picture))]
    levels = [float(middle[int(len(middle) * place)]) for place in (0.03, 0.23, 0.43, 0.63, 0.83)]
    assert levels == pytest.approx([0.2, 0.0, 1.0, 0.4, 0.9], abs=0.06)
    for file in (tmp_path / "b" / "videos").iterdir():
        file.rename(file.with_name(file.name.replace("cam05", "cam06")))
    with pytest.raises(ValueError, match=r"b shows no val-scene1_cam05, .*a does"):
        draw(runs, ["by a", "by b"], tmp_path / "out.png", rows=1, frames=5)


def test_a_folder_without_two_evaluations_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no evaluation videos of two steps; give the folder of a finished run"):
        clips(tmp_path)
