"""The picture of what a run changed."""

import pytest
import torch
from matplotlib.image import imread

from flow_grpo.reporting import video_index
from flow_grpo.runtime.video_file import write_video
from tools.dev.demo_picture import clips, draw


def film(run, step: int, scene: str, camera: str, level: float) -> None:
    """Write an evaluation's video of three panels, and its line."""
    video = torch.zeros(3, 5, 24, 96)
    video[..., :32], video[..., 32:64], video[..., 64:] = 0.2, level, 0.9
    name = f"eval_{step:06d}_{scene}_{camera}.mp4"
    write_video(run / "videos" / name, video)
    names = ("source", "now" if step else "base", "true view")
    panels = [{"name": name, "x": 32 * x, "y": 0, "width": 32, "height": 24} for x, name in enumerate(names)]
    line = {"file": name, "kind": "eval", "step": step, "scene": scene, "camera": camera, "panels": panels}
    video_index.add(run / "videos", line)


def test_the_first_and_the_last_evaluation_of_runs_stand_side_by_side_and_must_show_the_same(tmp_path):
    runs = [tmp_path / "a", tmp_path / "b"]
    for run, last in zip(runs, (1.0, 0.4), strict=True):
        for step, level in ((0, 0.0), (50, 0.7), (120, last)):
            film(run, step, "scene1", "cam05", level)
            film(run, step, "scene1", "cam06", 0.7)  # did not change
    film(runs[0], 0, "scene2", "cam01", 0.5)  # measured once: nothing to compare
    assert list(clips(runs[0])) == ["scene1 cam05", "scene1 cam06"]
    draw(runs, ["by a", "by b"], tmp_path / "out.png", rows=1, frames=5)
    picture = imread(tmp_path / "out.png")[..., 0]
    middle = picture[int(0.7 * len(picture))]
    levels = [float(middle[int(len(middle) * place)]) for place in (0.03, 0.23, 0.43, 0.63, 0.83)]
    assert levels == pytest.approx([0.2, 0.0, 1.0, 0.4, 0.9], abs=0.06)
    index = tmp_path / "b" / "videos" / "index.jsonl"
    index.write_text(index.read_text().replace("cam05", "cam06"))
    with pytest.raises(ValueError, match=r"b shows no scene1 cam05, .*a does"):
        draw(runs, ["by a", "by b"], tmp_path / "out.png", rows=1, frames=5)
    with pytest.raises(ValueError, match=r"no evaluation videos of two steps; give the folder of a finished run"):
        clips(tmp_path)
