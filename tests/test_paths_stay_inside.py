"""Names from elsewhere never lead out of their folder.

`bad_input_cases.py` covers the command line, a checkpoint's manifest and a data folder.
"""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from flow_grpo.data.camera_files import read_cameras
from flow_grpo.data.multicam import CAMERAS_JSON
from flow_grpo.reporting.clips import make_clip
from flow_grpo.reporting.gallery import Gallery
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.tensor_store import TensorStore
from flow_grpo.settings.loading import ConfigError, load_config
from tests.data.test_multicam import FRAMES, extrinsics, open_split, write_scene
from tests.toy import condition

TOY = f"{Path(__file__).parent}/toy_recipe.py:toy"
ESCAPES = ("..", "../x", "/abs", "a/../../b", "a//b", "a/", "./a", "a\0b", "a\nb", "", " ", "~", "a\\..\\b")


@pytest.mark.parametrize("name", ESCAPES)
def test_names_of_runs_splits_and_rewards_are_refused_and_an_encoding_lies_in_its_store(tmp_path, name):
    given = {"run_name": name, "data.train_split": name}
    given["reward.remote"] = f"{name}=http://127.0.0.1:1,b=http://127.0.0.1:2"
    if not name:  # a run without a name gets one
        del given["run_name"]
    if name in ("a\\..\\b", "~", " ", "./a", "a/", "a//b", "a\nb"):  # folders below the data
        del given["data.train_split"]
    for knob, value in given.items():
        with pytest.raises(ConfigError, match=rf"^config\.{knob}"):
            load_config(TOY, [f"--config.{knob}={value}"])
    path = TensorStore(tmp_path).path("prompts", name)
    assert path.parent.parent == tmp_path / "prompts" and ".." not in path.parts


@pytest.mark.parametrize("name", ["../../x", "/abs/x", "a/../../b"])
def test_a_clip_lies_in_its_folder_whatever_its_condition_is_called(tmp_path, name):
    named = dataclasses.replace(condition(), scene=name, target_camera=name, preset=name, target_video=None)
    generated = torch.zeros_like(named.source_video)
    estimated = torch.eye(4).double().repeat(len(named.target_poses), 1, 1)
    clip = make_clip(named, generated, {f"remote:{name}": 1.0}, estimated=estimated)
    tracker = Tracker(tmp_path / "run", {}, (), World())
    gallery = Gallery(tracker, tmp_path / "run")
    gallery.evaluation([clip], 1, before=True)
    gallery.paths([clip])
    tracker.close()
    for ending, folder in (("mp4", "videos"), ("png", "paths")):
        files = [file for file in tmp_path.rglob(f"*.{ending}") if file.name not in ("curves.png", "filmstrip.png")]
        assert [file.parent for file in files] == [tmp_path / "run" / folder]


def test_names_in_captions_and_camera_files_are_compared_and_not_opened(tmp_path):
    scene = tmp_path / "data" / "train" / "scene1"
    write_scene(scene)
    (tmp_path / "cam01.mp4").write_text("outside")
    rows = [f"../../../{camera}.mp4,a room" for camera in ("cam01", "cam02", "cam10")]
    (scene / "metadata.csv").write_text("\n".join(["file_name,text", *rows]))
    data = open_split(tmp_path / "data")
    assert data.condition(0).prompt == "a room" and data.source_file(0).parent == scene / "videos"
    content = {frame: {f"../{camera}": text for camera, text in row.items()} for frame, row in extrinsics().items()}
    (scene / CAMERAS_JSON).write_text(json.dumps(content))
    with pytest.raises(ValueError, match="has no cam01 in frame0"):
        read_cameras(scene / CAMERAS_JSON, ("cam01",), FRAMES)
