"""A configuration is loaded whole or refused in one line."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import pytest

from flow_grpo.settings.loading import ConfigError, load_config, to_dict
from flow_grpo.settings.schema import Config

ROOT = Path(__file__).resolve().parents[2]
GRPO = str(ROOT / "config" / "grpo.py")
TOY = f"{ROOT}/tests/toy_recipe.py:toy"


def load(*overrides: str) -> Config:
    return load_config(TOY, overrides)


def refusal(spec: str, *overrides: str) -> str:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:
        load_config(spec, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "section", "name", "value"),
    [
        (["--config.seed=7"], "", "seed", 7),
        (["--config.seed", "7"], "", "seed", 7),
        (["--config.run_name=true"], "", "run_name", "true"),
        (["--config.debug"], "", "debug", True),
        (["--config.debug", "--config.seed=1"], "", "debug", True),
        (["--config.debug", "False"], "", "debug", False),
        (["--config.max_minutes=2"], "", "max_minutes", 2.0),
        (["--config.trackers="], "", "trackers", ()),
        (["--config.trackers=('wandb', 'tensorboard')"], "", "trackers", ("wandb", "tensorboard")),
        (["--config.trackers=wandb"], "", "trackers", ("wandb",)),
        (["--config.data.prompt=a = b"], "data", "prompt", "a = b"),
        (["--config.sample.sde_steps=2,3,4"], "sample", "sde_steps", (2, 3, 4)),
        (["--config.sample.sde_steps=[2, 3]", "--config.sample.sde_window=1"], "sample", "sde_steps", (2, 3)),
        (["--config.sample.max_step_std=0.45"], "sample", "max_step_std", 0.45),
        (["--config.sample.max_step_std=0.45", "--config.sample.max_step_std=none"], "sample", "max_step_std", None),
        (["--config.sample.shift=5"], "sample", "shift", 5.0),
        (["--config.train.learning_rate=1e-5"], "train", "learning_rate", 1e-5),
        (["--config.seed=1", "--config.seed=2"], "", "seed", 2),
    ],
)
def test_an_override_sets_its_knob_in_the_type_of_the_field(
    overrides: list[str], section: str, name: str, value: object
) -> None:
    config = load(*overrides)
    found = getattr(getattr(config, section) if section else config, name)
    assert found == value and type(found) is type(value)


def test_an_override_changes_nothing_else() -> None:
    changed = dataclasses.replace(load("--config.seed=5"), seed=0)
    assert changed == load()


def test_num_image_per_prompt_follows_k() -> None:
    assert load("--config.sample.k=16").sample.num_image_per_prompt == 16


def test_setting_num_image_per_prompt_apart_from_k_is_refused_naming_both() -> None:
    text = refusal(f"{GRPO}:my_recam_8npu", "--config.sample.num_image_per_prompt=8")
    assert "sample.num_image_per_prompt: got 8" in text and "sample.k=4" in text


def test_a_single_weight_joins_the_recipe_s_and_a_whole_table_replaces_them() -> None:
    before = load().reward.weights
    assert load("--config.reward.weights.motion_mag=0.5").reward.weights == before | {"motion_mag": 0.5}
    assert load("--config.reward.weights=motion_mag=2,target_view=1").reward.weights == {
        "motion_mag": 2.0,
        "target_view": 1.0,
    }


def test_servers_join_like_weights() -> None:
    assert load().reward.remote == {}
    one, two = "--config.reward.remote.a=http://h:1", "--config.reward.remote.b=http://h:2"
    assert load(one, two).reward.remote == {"a": "http://h:1", "b": "http://h:2"}
    assert load(one, "--config.reward.remote=b=http://h:2,c=http://h:3").reward.remote == {
        "b": "http://h:2",
        "c": "http://h:3",
    }


def test_schedules_and_gates_join_entry_by_entry() -> None:
    assert load().reward.schedules == load().reward.gates == {}
    ramp, hold = "--config.reward.schedules.target_view=0:0,50:1", "--config.reward.gates.target_view=source_match:0.5"
    later = "--config.reward.schedules.source_match=0:1"
    reward = load(ramp, hold, later).reward
    assert reward.schedules == {"target_view": ((0, 0.0), (50, 1.0)), "source_match": ((0, 1.0),)}
    assert reward.gates == {"target_view": ("source_match", 0.5)}
    assert load(ramp, "--config.reward.schedules=").reward.schedules == {}
    assert to_dict(load(ramp))["reward"]["schedules"] == {"target_view": [[0, 0.0], [50, 1.0]]}


def test_a_recipe_writes_schedules_and_gates_as_tuples_or_lists(tmp_path: Path) -> None:
    file = tmp_path / "recipes.py"
    file.write_text(
        "from config.base import get_config\n\n"
        "def mine():\n"
        "    config = get_config()\n"
        "    config.reward.weights.source_match = 0.0\n"
        "    config.reward.schedules.target_view = ((0, 0.5), (9, 1))\n"
        "    config.reward.gates.target_view = ['source_match', 0]\n"
        "    return config\n"
    )
    reward = load_config(f"{file}:mine", ["--config.reward.schedules.source_match=0:1"]).reward
    assert reward.schedules == {"target_view": ((0, 0.5), (9, 1.0)), "source_match": ((0, 1.0),)}
    assert reward.gates == {"target_view": ("source_match", 0.0)}


def test_argparse_hands_overrides_through_in_order() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config", required=True)
    words = ["--config", TOY, "--config.sample.k", "16", "--config.debug", "--config.train.kl_coef=0.01"]
    known, overrides = parser.parse_known_args(words)
    config = load_config(known.config, overrides)
    assert (config.sample.k, config.debug, config.train.kl_coef) == (16, True, 0.01)


def test_to_dict_equals_its_copy_read_from_a_file() -> None:
    plain = to_dict(load())
    assert json.loads(json.dumps(plain)) == plain
    assert plain["sample"]["sde_steps"] == list(load().sample.sde_steps)
    assert plain["reward"]["weights"] == load().reward.weights


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        (GRPO, ["must be FILE:RECIPE", "config/grpo.py:tiny_recam"]),
        (f"{GRPO}:", ["must be FILE:RECIPE"]),
        (f"{GRPO}:tiny_recm", ["no recipe 'tiny_recm'", "did you mean tiny_recam?", "my_recam_8npu"]),
        (f"{GRPO}:get_config", ["no recipe 'get_config'", "known are my_recam_1gpu"]),
        ("config/nowhere.py:tiny_recam", ["no Python file config/nowhere.py", "full path"]),
        ("config:tiny_recam", ["no Python file config"]),
    ],
)
def test_an_unknown_recipe_is_refused_with_what_there_is(spec: str, parts: list[str]) -> None:
    text = refusal(spec)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["seed=3"], ["argument 'seed=3' is not understood", "--config.sample.k=8"]),
        (["--seed=3"], ["argument '--seed=3' is not understood"]),
        (["--config.sample.group=8"], ["config.sample.group: no such knob", "config/base.py"]),
        (["--config.sampel.k=8"], ["config.sampel.k: no such knob", "did you mean sample.k?"]),
        (["--config.train.k=8"], ["config.train.k: no such knob", "did you mean sample.k?"]),
        (["--config.train.batch_sise=8"], ["no such knob", "did you mean train.batch_size?"]),
        (["--config.seed.x=8"], ["config.seed.x: no such knob"]),
        (["--config.checkpoint=8"], ["is a section", "checkpoint.every, checkpoint.keep"]),
        (["--config.sample.k=eight"], ["config.sample.k: got 'eight'", "a whole number", "--config.sample.k=8"]),
        (["--config.sample.k=8.0"], ["got '8.0'", "a whole number"]),
        (["--config.sample.k"], ["config.sample.k: got no value", "a whole number"]),
        (["--config.run_name", "--config.seed=1"], ["config.run_name: got no value"]),
        (["--config.debug=1"], ["config.debug: got '1'", "true or false"]),
        (["--config.train.learning_rate=fast"], ["got 'fast'", "a number"]),
        (["--config.sample.max_step_std=low"], ["got 'low'", "a number or none"]),
        (["--config.sample.sde_steps=1,x"], ["got '1,x'", "whole numbers separated by commas"]),
        (["--config.reward.weights=target_view"], ["names with weights", "target_view=1"]),
        (["--config.reward.schedules.target_view=0-1"], ["epochs with weights", "schedules.target_view=0:0,50:1"]),
        (["--config.reward.schedules.target_view=0.5:1"], ["got '0.5:1'", "epochs with weights"]),
        (["--config.reward.schedules=0:1"], ["names with epochs and weights", "target_view=0:1,50:0.2"]),
        (["--config.reward.gates.pose_rot=source_match"], ["a reward's name with its least value", "match:-0.05"]),
        (["--config.reward.gates.pose_rot=motion_mag:low"], ["got 'motion_mag:low'"]),
        (["--config.reward.weights.target_view=much"], ["config.reward.weights.target_view: got 'much'", "a number"]),
    ],
)
def test_an_override_that_cannot_be_read_is_refused_with_the_way_to_write_it(
    overrides: list[str], parts: list[str]
) -> None:
    text = refusal(TOY, *overrides)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("config.sample.kk = 3", ["fails", "kk"]),
        ("config.sample.k = 'many'", ["fails", "k"]),
        ("config.unlock(); config.extra = 3", ["config.extra: no such knob"]),
        ("config.unlock(); del config.seed", ["config.seed: missing", "get_config()"]),
        (
            "config.sample.sde_steps = (1.5,)",
            ["config.sample.sde_steps: got (1.5,)", "for example --config.sample.sde_steps=1,2,3"],
        ),
        ("config.reward.weights.target_view = 'high'", ["target_view"]),
        ("config = 3", ["returns int", "ConfigDict"]),
    ],
)
def test_a_recipe_that_goes_wrong_is_refused_in_one_line(tmp_path: Path, line: str, parts: list[str]) -> None:
    file = tmp_path / "recipes.py"
    file.write_text(
        f"from config.base import get_config\n\ndef mine():\n    config = get_config()\n    {line}\n    return config\n"
    )
    text = refusal(f"{file}:mine")
    assert all(part in text for part in parts), text


def test_helpers_and_imported_functions_of_a_recipe_file_are_no_recipes(tmp_path: Path) -> None:
    file = tmp_path / "recipes.py"
    file.write_text(
        "from config.base import get_config\n\n"
        "def _private():\n    return get_config()\n\n"
        "def with_argument(steps):\n    return get_config()\n\n"
        "def mine():\n    return _private()\n"
    )
    assert refusal(f"{file}:other").endswith("known are mine")
    assert load_config(f"{file}:mine").sample.k == 4
