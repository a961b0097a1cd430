"""Any matrix in a camera file and any value of a knob is either valid or refused in one line."""

import json
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from flow_grpo.data.camera_files import read_cameras
from flow_grpo.maths.poses import FARTHEST, check_poses
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.schema import KNOBS
from tests.data.test_multicam import FRAMES, PATHS, extrinsics

ROOT = Path(__file__).parents[2]
NUMBERS = st.sampled_from(["0", "1", "-1", "0.5", "1e-9", "1e5", "1e300", "1e999", "nan", "-inf", "1_0", "x", "", "٣"])
ROWS = st.lists(st.lists(NUMBERS, max_size=5).map(" ".join), max_size=5)
MATRICES = st.one_of(st.text(max_size=20), ROWS.map(lambda rows: " ".join(f"[{row}]" for row in rows)))
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | MATRICES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["frame0", "cam01", "x"]), inner),
    max_leaves=8,
)
FRAME_NAMES = st.sampled_from([f"frame{number}" for number in range(FRAMES)])


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("cameras") / "camera_extrinsics.json"


@settings(max_examples=200)
@given(FRAME_NAMES, st.sampled_from([*PATHS]), MATRICES | ANYTHING)
def test_a_valid_camera_file_with_another_matrix_is_poses_or_one_line(file, frame, camera, value):
    content: dict = extrinsics()
    content[frame][camera] = value
    file.write_text(json.dumps(content))
    said, poses = "", torch.empty(0)
    try:
        poses = read_cameras(file, ("cam01", "cam10"), FRAMES)
    except ValueError as error:
        said = str(error)
    if said:
        assert str(file) in said and len(said.splitlines()) == 1
        return
    assert poses.shape == (2, FRAMES, 4, 4) and poses.dtype == torch.float64
    check_poses(poses)
    assert poses[..., :3, 3].abs().max() <= FARTHEST


WORDS = st.sampled_from(
    ["true", "none", "nan", "inf", "-1", "0", "1", "2", "5", "8", "0.5", "1e400", "1e-400", "()", "["]
)
ENTRIES = st.sampled_from(["motion_mag", "target_view", "remote:a", "a", "a.b", "http://h:1", "0:1", "motion_mag:0.5"])
TABLES = st.lists(st.tuples(ENTRIES, ENTRIES | WORDS).map("=".join), max_size=3).map(",".join)
LISTS = st.lists(WORDS | ENTRIES, max_size=4).map(",".join)
VALUES = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(codec=None), max_size=3),
    WORDS,
    LISTS,
    TABLES,
    st.integers().map(str),
    st.integers(300, 5000).map(lambda digits: "9" * digits),
    st.sampled_from(["(" * 5000, "a{99999999999999999999}", "[[a]", "../x", "/x", "5x24x32", "http://me:pw@h"]),
)
PATHS_OF_KNOBS = st.one_of(
    st.sampled_from(sorted(KNOBS)),
    st.sampled_from([knob for knob in sorted(KNOBS) if knob.startswith("reward.")]).flatmap(
        lambda knob: (ENTRIES | st.text(max_size=3)).map(lambda name: f"{knob}.{name}")
    ),
    st.text(max_size=8),
)


def config_or_one_line(*words: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of patterns that will change their meaning, of floors that are low
        try:
            load_config(f"{ROOT}/tests/toy_recipe.py:toy", words)
        except ConfigError as error:
            said = str(error)
        else:
            return
    assert len(said.splitlines()) == 1 and "pw@" not in said


@settings(max_examples=200)
@given(PATHS_OF_KNOBS, VALUES)
@example("data.height", "9" * 4300)
@example("reward.schedules", "target_view=0:0," + "9" * 400 + ":1")
@example("sample.num_steps", "9" * 12)
@example("model.lora_targets", "a{99999999999999999999}")
@example("data.prompt", "\udc80")
def test_any_text_for_any_knob_is_a_configuration_or_one_line(knob, value):
    config_or_one_line(f"--config.{knob}={value}")


@settings(max_examples=60)
@given(st.lists(st.text(max_size=12) | st.just("--config.debug") | st.just("--config.sample.k"), max_size=4))
def test_any_words_are_a_configuration_or_one_line(words):
    config_or_one_line(*words)
