"""Files of verdicts, and data sets that leave items out by them."""

from __future__ import annotations

import dataclasses

import pytest

from flow_grpo.data.exclude import read_verdicts, settings_of, write_verdicts
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.settings.loading import load_config

DATA = load_config("config/grpo.py:tiny_recam", []).data
SETTINGS = settings_of(DATA)
SIZE = {"num_frames": 5, "height": 24, "width": 32, "prompt": "a room"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "world"
    ensure_tiny_world(root, "unit_test")
    return root


def test_verdicts_come_back_as_they_were_written(tmp_path):
    verdicts = {"val/f18_aperture10/scene1": {"cam01": "", "cam02": "3 anchors – too few"}}
    write_verdicts(verdicts, SETTINGS, tmp_path / "usable.json")
    assert read_verdicts(tmp_path / "usable.json", SETTINGS) == verdicts
    assert [file.name for file in tmp_path.iterdir()] == ["usable.json"]


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"scene": []}', '{"scene": {"cam01": 3}}'])
def test_another_file_is_refused(tmp_path, text):
    table = f'{{"settings": {{}}, "verdicts": {text}}}' if "scene" in text else text
    (tmp_path / "x.json").write_text(table)
    with pytest.raises(ValueError, match=r"x\.json"):
        read_verdicts(tmp_path / "x.json", SETTINGS)


def test_verdicts_on_other_pictures_are_refused(tmp_path):
    write_verdicts({}, SETTINGS, tmp_path / "x.json")
    for change in ({"height": 480}, {"buckets": ("5x24x32",)}, {"reference": "target"}):
        with pytest.raises(ValueError, match=rf"data\.{next(iter(change))} .* there and .* here"):
            read_verdicts(tmp_path / "x.json", settings_of(dataclasses.replace(DATA, **change)))


def test_a_missing_file_is_refused_with_the_way_to_it(tmp_path):
    with pytest.raises(ValueError, match=r"there is no file .*check_sources"):
        read_verdicts(tmp_path / "x.json", SETTINGS)


def test_items_with_a_bad_verdict_are_left_out_and_the_others_stay_what_they_were(world):
    whole = MultiCamDataset(world, "train", **SIZE)
    names = [whole.name_of(index) for index in range(len(whole))]
    (scene, bad), (_, good) = names[1], names[0]
    less = MultiCamDataset(world, "train", **SIZE, exclude={scene: {bad: "no parallax", good: ""}, "elsewhere": {}})
    assert [less.name_of(index) for index in range(len(less))] == [names[0], *names[2:]]
    one, other = whole.condition(2), less.condition(1)
    assert (one.scene, one.source_camera, one.target_camera) == (other.scene, other.source_camera, other.target_camera)
    assert less.cameras() == [less.condition(index).camera for index in range(len(less))] != whole.cameras()
    same = MultiCamDataset(world, "train", **SIZE, exclude={scene: {good: ""}})
    assert whole.fingerprint() == same.fingerprint() != less.fingerprint()


def test_leaving_out_everything_is_refused(world):
    whole = MultiCamDataset(world, "train", **SIZE)
    verdicts: dict[str, dict[str, str]] = {}
    for index in range(len(whole)):
        scene, camera = whole.name_of(index)
        verdicts.setdefault(scene, {})[camera] = "dark"
    with pytest.raises(ValueError, match=rf"all {len(whole)} items of .*train are excluded"):
        MultiCamDataset(world, "train", **SIZE, exclude=verdicts)
