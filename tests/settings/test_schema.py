"""What the schema says of every knob holds: its default is accepted, whatever is outside its type or bounds refused."""

import math
import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from config.base import get_config
from flow_grpo.maths import advantages, schedule, sde
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.reference import help_text, page
from flow_grpo.settings.schema import KNOBS, Config, Knob
from tests.tools.test_commands import without_torch

ROOT = Path(__file__).resolve().parents[2]
BASE = f"{ROOT}/config/base.py:get_config"
NUMBERS = {path: knob for path, knob in KNOBS.items() if knob.kind in (int, float, float | None)}


def load_with(tmp_path: Path, path: str, value: object) -> Config:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(
        "from math import inf, nan\nfrom config.base import get_config\n\n\ndef run():\n    config = get_config()\n"
        f"    with config.ignore_type():\n        config.{path} = {value!r}\n    return config\n"
    )
    return load_config(f"{recipe}:run")


def refused(tmp_path: Path, path: str, value: object) -> str:
    with pytest.raises(ConfigError, match=rf"^config\.{re.escape(path)}[^\n]*: got [^\n]*; [^\n]+$") as caught:
        load_with(tmp_path, path, value)
    return str(caught.value)


def outside(knob: Knob) -> list[float]:
    step = 1 if knob.kind is int else 1e-6
    limits = {"ge": -step, "gt": 0, "le": step, "lt": 0}
    values = [knob.bounds[name] + shift for name, shift in limits.items() if name in knob.bounds]
    values += [knob.bounds["ge"] + 1] if "multiple_of" in knob.bounds else []
    return values + ([10**18] if knob.kind is int else [math.nan, math.inf])


def of_other_types(kind: Any) -> list[object]:
    if kind is bool:
        return [1, "true"]
    if kind in (int, float, float | None):
        return ["1", 1.0, True] if kind is int else ["1"]  # a ConfigDict makes 1.0 of a True for a float
    if get_origin(kind) is tuple:
        return ["a", 1, (1.5,), (None,)]
    if get_origin(kind) is dict:
        return [1, {"target_view": "high"}, {"target_view": None}]
    texts: list[object] = [1, "a\0b", "caf\udce9"]
    return texts if kind == (str | None) else [*texts, None]


def test_a_recipe_that_sets_nothing_is_the_schema_s_defaults() -> None:
    assert load_config(BASE) == Config()
    assert get_config().sample.num_image_per_prompt == Config().sample.k


@pytest.mark.parametrize("path", NUMBERS)
def test_a_number_outside_its_bounds_is_refused_with_its_name_and_the_way_out(tmp_path, path) -> None:
    knob = NUMBERS[path]
    assert knob.bounds or path == "sample.num_image_per_prompt"  # that one must equal sample.k
    for value in outside(knob):
        text = refused(tmp_path, path, value)
        assert f"got {value!r}" in text and re.search(r"must (be|lie)", text), text


@pytest.mark.parametrize("path", KNOBS)
def test_a_value_of_another_type_is_refused_with_its_name(tmp_path, path) -> None:
    for value in of_other_types(KNOBS[path].kind):
        refused(tmp_path, path, value)


@pytest.mark.parametrize("path", [path for path, knob in KNOBS.items() if get_origin(knob.kind) is Literal])
def test_a_choice_that_is_none_is_refused_with_all_there_are(path) -> None:
    choices = get_args(KNOBS[path].kind)
    with pytest.raises(ConfigError, match=rf"^config\.{path}: got 'zzz', .*--config\.{path}=") as caught:
        load_config(BASE, [f"--config.{path}=zzz"])
    assert all(repr(choice) in str(caught.value) for choice in choices)
    with pytest.raises(ConfigError, match=rf"did you mean '{choices[-1]}'\?"):
        load_config(BASE, [f"--config.{path}={choices[-1]}z"])


@pytest.mark.parametrize("path", ["output_root", "data.root", "data.train_split", "data.eval_split", "model.path"])
def test_a_folder_s_name_may_not_be_empty(tmp_path, path) -> None:
    assert "at least 1 character" in refused(tmp_path, path, "")


@pytest.mark.parametrize(
    ("path", "values", "bound"),
    [
        ("run_name", ["../x", "..", "a/b", "a\\b", "/tmp", "a" * 101, "a\n"], "at most 100"),
        ("trackers", [("wandb", "wandb")], "once"),
        ("data.train_split", ["../x", "/x", "a/../../b"], "below data.root"),
        ("data.num_frames", [8], "4n+1"),
        ("data.buckets", [("5x24",), ("6x24x32",), ("1x24x32",), ("5x20x32",), ("5x24x0",)], "x"),
        ("model.lora_targets", ["blocks(", "a{99999999999999999999}"], "regular expression"),
        ("sample.sde_steps", [(), (2, 1), (1, 1)], "rising order"),
        ("reward.weights", [{"target_view": -1.0}, {"target_view": math.nan}], "must"),
        ("reward.schedules", [{"a": ()}, {"a": ((5, 1.0), (5, 0.0))}, {"a": ((5, 1.0), (3, 0.0))}], "rising"),
        ("reward.schedules", [{"a": ((-1, 1.0),)}], "from 0 on"),
        ("reward.schedules", [{"a": ((0, 1.0), (5,))}, {"a": ((0.5, 1.0),)}, {"a": ((0, -1.0),)}], ""),
        ("reward.schedules", [{"a": ((0, math.inf),)}], "finite"),
        ("reward.gates", [{"a": ("b",)}, {"a": ("b", 0.5, 1)}, {"a": (0.5, "b")}, {"a": "b:0.5"}], ""),
        ("reward.gates", [{"a": ("b", math.nan)}, {"a": ("b", -math.inf)}], "finite"),
        ("reward.remote", [{"a/b": "http://h:1"}, {"": "http://h:1"}, {"a" * 51: "http://h:1"}], "at most 50"),
        (
            "reward.remote",
            [
                {"a": address}
                for address in (
                    *("h:8000", "ftp://h", "http://", "http://me:pw@h", "http://h/?key=1", "http://h/#x", "http://h/é"),
                    *("http://h/\nX: y", "http://h:x", "http://h:99999", "http://h:-1", "http://h:0"),
                )
            ],
            "http://127.0.0.1:8000",
        ),
    ],
)
def test_a_value_that_means_nothing_is_refused_with_its_name_and_the_way_out(tmp_path, path, values, bound) -> None:
    for value in values:
        text = refused(tmp_path, path, value)
        assert bound in text and "pw@" not in text, text


@pytest.mark.parametrize(
    ("path", "value", "kept"),
    [
        ("run_name", "seed-1_v2.0", "seed-1_v2.0"),
        ("max_minutes", 3, 3.0),
        ("sample.max_step_std", None, None),
        ("sample.sde_steps", [1, 2], (1, 2)),
        ("reward.weights", {"target_view": 1}, {"target_view": 1.0}),
        ("reward.remote", {"a": "https://h/b", "b": "http://h:1"}, {"a": "https://h/b", "b": "http://h:1"}),
        ("reward.schedules", {"target_view": [[0, 0.5], (9, 1)]}, {"target_view": ((0, 0.5), (9, 1.0))}),
    ],
)
def test_a_value_that_can_be_meant_is_taken_in_the_type_of_the_knob(tmp_path, path, value, kept) -> None:
    found: Any = load_with(tmp_path, path, value)
    for name in path.split("."):
        found = getattr(found, name)
    assert found == kept and repr(found) == repr(kept)


def test_choices_are_those_that_the_code_knows() -> None:
    def choices(path: str) -> set[str]:
        return set(get_args(KNOBS[path].kind))

    assert choices("reward.adv_norm") == set(advantages.ADV_NORMS)
    assert choices("sample.sde") | {"ode"} == set(sde.KINDS)
    assert choices("train.step_weight") < set(schedule.STEP_WEIGHTS)


def test_every_knob_has_one_line_of_meaning_which_help_and_page_show() -> None:
    for path, knob in KNOBS.items():
        assert knob.meaning.strip() and "\n" not in knob.meaning, path
        assert f"\n  {path}=" in help_text() and f"\n      {knob.meaning}\n" in f"{help_text()}\n"
        assert f"\n| `{path}` |" in page()


def test_the_page_of_all_knobs_is_not_stale() -> None:
    """Else run: python -m flow_grpo.settings.reference > docs/config.md."""
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == page()


def test_the_help_of_training_and_the_refusal_of_a_knob_need_no_torch() -> None:
    done = without_torch(ROOT, "../train_grpo", "--help")
    assert "--config FILE:RECIPE" in done.stdout and "\n  train.learning_rate=" in done.stdout
    done = without_torch(ROOT, "../train_grpo", "--config", "config/grpo.py:tiny_recam", "--config.sample.kk=4")
    assert done.returncode == 2 and done.stderr.startswith(
        "error: config.sample.kk: no such knob (did you mean sample.k?)"
    )
