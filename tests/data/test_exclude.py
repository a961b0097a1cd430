"""Files of verdicts, and datasets that leave items out by them."""

import dataclasses
import json

import pytest

from flow_grpo.data.exclude import read_verdicts, settings_of, write_verdicts
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.settings.loading import load_config
from tests.data.cases import refusal

DATA = load_config("config/grpo.py:tiny_recam", []).data
SETTINGS = settings_of(DATA)
FILES = {"val/f18_aperture10/scene1": "a hash", "val/f18_aperture10/scene2": "another"}


def test_verdicts_come_back_and_are_refused_for_other_settings(tmp_path):
    file = tmp_path / "usable.json"
    verdicts = {"val/f18_aperture10/scene1": {"cam01": "", "cam02": "3 anchors – too few"}}
    write_verdicts(verdicts, SETTINGS, FILES, file)
    assert read_verdicts(file, SETTINGS, FILES) == verdicts
    assert [child.name for child in tmp_path.iterdir()] == ["usable.json"]
    for change in ({"height": 480}, {"buckets": ("5x24x32",)}, {"reference": "target"}):
        other = settings_of(dataclasses.replace(DATA, **change))
        assert f"data.{next(iter(change))} " in refusal(lambda other=other: read_verdicts(file, other, FILES))


@pytest.mark.parametrize("text", [None, "[]", "{", "{}", '{"scene": []}', '{"scene": {"cam01": 3}}'])
def test_a_missing_file_and_another_file_are_refused(tmp_path, text):
    file = tmp_path / "x.json"
    if text is not None:
        file.write_text(f'{{"settings": {{}}, "verdicts": {text}}}' if "scene" in text else text)
    got = refusal(lambda: read_verdicts(file, SETTINGS, FILES))
    assert "x.json" in got and "tools/check_sources.py" in got


def test_verdicts_of_another_data_set_are_refused_even_if_its_scenes_have_the_same_names(tmp_path):
    file, verdicts = tmp_path / "usable.json", {scene: {"cam01": ""} for scene in FILES}
    write_verdicts(verdicts, SETTINGS, FILES, file)
    for other in (dict.fromkeys(FILES, "of other files"), {"val/elsewhere": "a hash"}):
        for forget in (False, True):
            said = refusal(lambda other=other, forget=forget: read_verdicts(file, SETTINGS, other, forget=forget))
            assert "verdicts of another data set, such as of 'val/f18_aperture10/scene1'" in said
    broken, whole = FILES
    repaired = FILES | {broken: "repaired"}
    assert "the files of 1 scenes changed, such as those of" in refusal(lambda: read_verdicts(file, SETTINGS, repaired))
    assert [*read_verdicts(file, SETTINGS, repaired, forget=True)] == [whole]
    file.write_text(json.dumps({"settings": SETTINGS, "verdicts": {}}))
    assert "does not say from which files it was made" in refusal(lambda: read_verdicts(file, SETTINGS, FILES))


def test_items_with_a_bad_verdict_are_left_out_and_the_others_stay_what_they_were(tmp_path):
    ensure_tiny_world(tmp_path / "world", "unit_test")

    def opened(exclude=None) -> MultiCamDataset:
        verdicts = None if exclude is None else lambda _: exclude
        return MultiCamDataset(tmp_path / "world", "train", (5, 24, 32), prompt="a room", exclude=verdicts)

    whole = opened()
    names = [whole.name_of(index) for index in range(len(whole))]
    (scene, bad), (_, good) = names[1], names[0]
    less = opened({scene: {bad: "no parallax", good: ""}, "elsewhere": {}})
    assert [less.name_of(index) for index in range(len(less))] == [names[0], *names[2:]]
    one, other = whole.condition(2), less.condition(1)
    assert (one.scene, one.source_camera, one.target_camera) == (other.scene, other.source_camera, other.target_camera)
    assert less.cameras() == [less.condition(index).camera for index in range(len(less))] != whole.cameras()
    assert whole.fingerprint() == opened({scene: {good: ""}}).fingerprint() != less.fingerprint()
    everything = {scene: dict.fromkeys((camera for _, camera in names), "dark") for scene, _ in names}
    assert f"all {len(whole)} items" in refusal(lambda: opened(everything))
