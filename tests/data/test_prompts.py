"""Prompts from files, and what is set aside of the training data."""

from operator import attrgetter
from pathlib import Path

import pytest

from flow_grpo.data.multicam import Scene
from flow_grpo.data.prompts import PromptDataset, read_prompts
from flow_grpo.data.splits import held_out_data, set_aside, training_data, whole_splits
from flow_grpo.settings.loading import load_config
from tests.test_train_grpo import ROOT

SIZE = (5, 32, 32)


def test_a_text_file_holds_a_prompt_a_line_a_csv_a_column_and_a_jsonl_a_field(tmp_path):
    (tmp_path / "a.txt").write_text("a red\u2028kite\r\n\n  a  blue   boat \n")
    (tmp_path / "c.JSONL").write_text('{"prompt": "salt &amp; pepper", "id": 1}\n\n{"prompt": "a dog"}\n')
    assert read_prompts(tmp_path / "c.JSONL") == ["salt & pepper", "a dog"]
    (tmp_path / "b.csv").write_text('id,prompt\n1,"a cat, asleep"\n2,a dog\n')
    assert read_prompts(tmp_path / "a.txt") == ["a red kite", "a blue boat"]
    assert read_prompts(tmp_path / "b.csv") == ["a cat, asleep", "a dog"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", "\n \n", "holds no prompt; give one a line"),
        ("a.txt", "a &\nb\na  &amp;\nb\n", r"2 prompts occur more than once, first 'a &' \(numbers 1, 3\); "),
        ("a.tsv", "prompt\na cat\n", "ends in .tsv, must end in .txt, .csv, .jsonl; "),
        ("prompts", "a cat\n", "ends in nothing, must end in .txt, .csv, .jsonl; "),
        ("a.jsonl", '{"prompt": "a cat"}\n{"text": "a dog"}\n', "line 2 has no text prompt; give a .txt"),
        ("a.jsonl", '{"prompt": "a cat"}\na dog\n', "line 2 is not JSON"),
        ("a.csv", "text\na cat\n", r"has the columns \['text'\], must have prompt; add or rename"),
        ("a.csv", "prompt\na cat, asleep\n", "line 2 has more fields than columns; put texts in quotes"),
        ("a.csv", 'prompt\n"a cat\na dog\n', "is no table .*; correct its quotes"),
        ("a.csv", f"prompt\n{'a cat ' * 30_000}\n", "is no table .*; correct its quotes"),
        ("none.txt", None, "give a .txt with a prompt a line"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused_by_name(tmp_path, name, text, message):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=rf"{name}.*{message}"):
        read_prompts(tmp_path / name)


def test_a_condition_has_its_prompt_and_the_size_that_is_asked_for():
    data = PromptDataset(["a cat", "a dog"], SIZE, 24.0, "x.txt")
    made = data.condition(1, gid=7, slot=2)
    assert (made.prompt, made.scene, made.size, made.gid, made.slot) == ("a dog", "prompt-00001", SIZE, 7, 2)
    assert made.source_video is None and made.target_poses is None and made.camera == ""
    assert data.fingerprint() != PromptDataset(["a dog", "a cat"], SIZE, 24.0, "x.txt").fingerprint()


def test_the_splits_of_a_recipe_of_prompts_are_its_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    recipe = "config/grpo.py:tiny_wan_t2v"
    given, tune = load_config(recipe, []), load_config(recipe, ["--config.eval.split=tune"])
    train, report = training_data(given.data), held_out_data(given.data, given.eval)
    aside = held_out_data(tune.data, tune.eval)
    whole = [data.prompt_of(index) for data in whole_splits(given.data) for index in range(len(data))]
    assert [len(data) for data in (train, report, aside)] == [20, 8, 4] and len(whole) == 32
    train.check_apart(report)
    with pytest.raises(ValueError, match=r"1 prompts of b.txt are in a.txt, too, such as 'a cat'"):
        PromptDataset(["a cat"], SIZE, 24.0, "a.txt").check_apart(PromptDataset(["a cat", "b"], SIZE, 24.0, "b.txt"))


def test_scenes_are_set_aside_by_name_whatever_their_order_and_number():
    def aside(scenes, tune, report=0):
        return set_aside(scenes, tune, report, "scenes", attrgetter("name"))

    scenes = [Scene(Path(), f"train/f18_aperture10/scene{number}", ("cam01", "cam02"), None) for number in range(30)]
    rest, tuned, reported = aside(scenes, 8, 5)
    assert (len(tuned), len(reported)) == (8, 5)
    assert sorted([*rest, *tuned, *reported], key=scenes.index) == scenes
    for part in (rest, tuned, reported):
        assert part == sorted(part, key=scenes.index) != scenes[: len(part)]
    assert aside(scenes[::-1], 8, 5) == (rest[::-1], tuned[::-1], reported[::-1])
    assert aside([scene for scene in scenes if scene != rest[0]], 8, 5)[1:] == (tuned, reported)
    assert aside(scenes, 8)[1] == tuned  # those to report do not change them
    assert aside(scenes, 0) == (scenes, [], [])
    with pytest.raises(ValueError, match=r"tune_scenes is 20 and data\.report_scenes 10, together .* below the 30"):
        aside(scenes, 20, 10)
