"""Recipe and command line become one checked configuration, or one line that says what is wrong."""

import dataclasses
import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.settings.errors import refusal
from flow_grpo.settings.loading import ConfigError, as_written, differences, load_config, to_dict
from flow_grpo.settings.schema import KNOBS, Config
from flow_grpo.settings.values import parse

ROOT = Path(__file__).resolve().parents[2]
GRPO = str(ROOT / "config" / "grpo.py")
TOY = f"{ROOT}/tests/toy_recipe.py:toy"
REMOTE, SCHEDULES, GATES = (f"--config.reward.{name}" for name in ("remote", "schedules", "gates"))


def load(*settings: str) -> Config:
    return load_config(TOY, [f"--config.{setting}" for setting in settings])


def refused(spec: str, *words: str) -> str:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as caught:
        load_config(spec, words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--config.seed=7"], "seed", 7),
        (["--config.seed", "7"], "seed", 7),
        (["--config.seed=1", "--config.seed=2"], "seed", 2),
        (["--config.seed=1_000"], "seed", 1000),
        (["--config.run_name=true"], "run_name", "true"),
        (["--config.debug", "--config.seed=1"], "debug", True),
        (["--config.debug", "False"], "debug", False),
        (["--config.max_minutes=2"], "max_minutes", 2.0),
        (["--config.train.learning_rate=1e-5"], "train.learning_rate", 1e-5),
        (["--config.trackers="], "trackers", ()),
        (["--config.trackers=()"], "trackers", ()),
        (["--config.trackers=('wandb', 'tensorboard')"], "trackers", ("wandb", "tensorboard")),
        (["--config.trackers=wandb"], "trackers", ("wandb",)),
        (["--config.data.prompt=a = b"], "data.prompt", "a = b"),
        (["--config.data.prompt=None"], "data.prompt", "None"),
        (["--config.sample.sde_steps=(1,2)"], "sample.sde_steps", (1, 2)),
        (["--config.sample.sde_steps=[2, 3]"], "sample.sde_steps", (2, 3)),
        (["--config.sample.max_step_std=0.45"], "sample.max_step_std", 0.45),
        (["--config.sample.max_step_std=0.45", "--config.sample.max_step_std=none"], "sample.max_step_std", None),
        (["--config.sample.k=16"], "sample.num_image_per_prompt", 16),
        (["--config.reward.weights.motion_mag=1"], "reward.weights", {"motion_mag": 1.0, **load().reward.weights}),
        (["--config.reward.weights=motion_mag=2,exposure=1"], "reward.weights", {"exposure": 1.0, "motion_mag": 2.0}),
        ([f"{REMOTE}.a=http://h:1", f"{REMOTE}.b=http://h:2"], "reward.remote", {"a": "http://h:1", "b": "http://h:2"}),
        ([f"{REMOTE}.a=http://h:1", f"{REMOTE}="], "reward.remote", {}),
        (
            ["--config.reward.schedules=target_view=0:1,50:0.2,source_match=0:1"],
            "reward.schedules",
            {"source_match": ((0, 1.0),), "target_view": ((0, 1.0), (50, 0.2))},
        ),
        ([f"{SCHEDULES}.target_view=0:0.5,9:1"], "reward.schedules", {"target_view": ((0, 0.5), (9, 1.0))}),
        ([f"{GATES}.target_view=source_match:-0.5"], "reward.gates", {"target_view": ("source_match", -0.5)}),
        (["--config.reward.weights=a=1,remote:b=1", f"{GATES}=a=remote:b:1"], "reward.gates", {"a": ("remote:b", 1.0)}),
    ],
)
def test_an_override_sets_its_knob_in_the_knob_s_type_and_nothing_else(words, path, value) -> None:
    config = load_config(TOY, words)
    assert repr(attrgetter(path)(config)) == repr(value)
    section, _, name = path.rpartition(".")
    if "k=16" not in words[0] and len(words) == 1 and section:
        own = attrgetter(section)(load())
        assert dataclasses.replace(attrgetter(section)(config), **{name: getattr(own, name)}) == own


def test_to_dict_equals_its_copy_read_from_a_file() -> None:
    plain = to_dict(load("reward.schedules.target_view=0:0,50:1"))
    assert json.loads(json.dumps(plain)) == plain
    assert plain["sample"]["sde_steps"] == [0, 1, 2, 3]
    assert plain["reward"]["schedules"] == {"target_view": [[0, 0.0], [50, 1.0]]}


@given(st.lists(st.integers()))
def test_a_tuple_reads_back_as_python_writes_it(numbers: list[int]) -> None:
    kind = KNOBS["sample.sde_steps"].kind
    assert parse(kind, str(numbers)) == parse(kind, str(tuple(numbers))) == tuple(numbers)


@given(st.floats(allow_nan=False))
def test_a_number_reads_back_as_python_writes_it(number: float) -> None:
    assert parse(float, str(number)) == number


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
    text = refused(spec)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("seed=3", ["argument 'seed=3' is not understood", "--config.sample.k=8"]),
        ("--seed=3", ["argument '--seed=3' is not understood"]),
        ("--config.sample.group=8", ["config.sample.group: no such knob", "docs/config.md"]),
        ("--config.sampel.k=8", ["config.sampel.k: no such knob", "did you mean sample.k?"]),
        ("--config.train.k=8", ["config.train.k: no such knob", "did you mean sample.k?"]),
        ("--config.train.batch_sise=8", ["no such knob", "did you mean train.batch_size?"]),
        ("--config.seed.x=8", ["config.seed.x: no such knob"]),
        ("--config.checkpoint=8", ["is a section", "checkpoint.every, checkpoint.keep"]),
        ("--config.sample.k=eight", ["config.sample.k: got 'eight'", "--config.sample.k=INTEGER"]),
        ("--config.sample.k=8.0", ["got '8.0'", "INTEGER"]),
        ("--config.sample.k", ["config.sample.k: got no value", "INTEGER"]),
        (f"--config.seed={'9' * 5000}", ["config.seed: got '999", "INTEGER"]),
        ("--config.debug=1", ["config.debug: got '1'", "true|false"]),
        ("--config.train.learning_rate=fast", ["got 'fast'", "NUMBER"]),
        ("--config.sample.max_step_std=low", ["got 'low'", "NUMBER|none"]),
        ("--config.sample.sde_steps=1,x", ["got '1,x'", "INTEGER,..."]),
        ("--config.reward.weights=target_view", ["got 'target_view'", "NAME=NUMBER,..."]),
        ("--config.reward.weights.target_view=much", ["config.reward.weights.target_view: got 'much'", "NUMBER"]),
        ("--config.reward.remote=../hps=http://h:1", ["config.reward.remote: got '../hps", "at most 50 letters"]),
        ("--config.reward.schedules=0:1", ["got '0:1'", "NAME=INTEGER:NUMBER,...,..."]),
        ("--config.reward.schedules=a=0:0,b", ["got 'a=0:0,b'"]),
        ("--config.reward.schedules.target_view=0.5:1", ["got '0.5:1'", "=INTEGER:NUMBER,..."]),
        ("--config.reward.schedules.target_view=0:x", ["got '0:x'"]),
        ("--config.reward.gates=a=b:1,c", ["got 'a=b:1,c'", "NAME=TEXT:NUMBER,..."]),
        ("--config.reward.gates.pose_rot=source_match", ["got 'source_match'", "=TEXT:NUMBER"]),
        ("--config.reward.gates.pose_rot=remote:clip", ["got 'remote:clip'"]),
    ],
)
def test_an_override_that_cannot_be_read_is_refused_with_the_way_to_write_it(word: str, parts: list[str]) -> None:
    text = refused(TOY, word)
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("words", [[], ["--config.sample.k=8"]])
@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("config.sample.kk = 3", ["fails in line 5", "kk", "correct it"]),
        ("config.sample.k = 'many'", ["fails", "k"]),
        ("config.unlock(); config.extra = 3", ["config.extra: no such knob"]),
        ("config.unlock(); del config.seed", ["config.seed: missing", "get_config()"]),
        ("config.unlock(); del config.sample", ["config.sample.guidance_scale: missing", "get_config()"]),
        ("config.sample = None", ["config.sample"]),
        ("with config.ignore_type(): config.sample = 3", ["config.sample"]),
        ("config.reward.weights.source_match = 10**400", ["fails in line 5: OverflowError: ", "; correct it"]),
        ("config.reward.weights = {'source_match': 10**400}", ["config.reward.weights.source_match: got 1000"]),
        ("config = 3", ["returns int", "ConfigDict"]),
        ("1 / 0", ["recipes.py:mine fails", "division by zero"]),
        ("import sys; sys.exit(0)", ["fails in line 5: SystemExit: 0; correct it"]),
        ("return (", ["recipes.py fails", "SyntaxError"]),
        ("pass\nimport nothing_here", ["recipes.py fails", "nothing_here"]),
        ("\0", ["recipes.py fails"]),
    ],
)
def test_a_recipe_that_goes_wrong_is_refused_in_one_line(tmp_path: Path, body: str, parts: list[str], words) -> None:
    file = tmp_path / "recipes.py"
    file.write_text(f"from tests.toy_recipe import toy\n\ndef mine():\n    config = toy()\n    {body}")
    file.write_text(file.read_text() + ("" if "\n" in body else "\n    return config\n"))
    text = refused(f"{file}:mine", *words)
    assert all(part in text for part in parts), text


def test_helpers_and_imported_functions_of_a_recipe_file_are_no_recipes(tmp_path: Path) -> None:
    file = tmp_path / "recipes.py"
    file.write_text(
        "from config.base import get_config\n\n"
        "def _private():\n    return get_config()\n\n"
        "def with_argument(steps):\n    return get_config()\n\n"
        "def mine():\n    return _private()\n"
    )
    assert refused(f"{file}:other").endswith("known are mine")
    assert load_config(f"{file}:mine").sample.k == 4


def test_a_refusal_is_one_line_that_shows_a_long_value_in_part() -> None:
    assert str(refusal("sample.k", 1, "must be 2; pass 4")) == "config.sample.k: got 1, must be 2; pass 4"
    assert len(str(refusal("data.prompt", "a" * 10_000, "must be shorter; cut it"))) < 300
    assert str(ConfigError("one\ntwo\r\nthree")) == "one two three"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("got 'http://me:pw@host:1/x'", "got '***@host:1/x'"),
        ("got 'a=http://me:pw@host,b=http://pw@other'", "got 'a=***@other'"),
        ("got 'me:pw@host'", "got '***@host'"),
        ("got 'http://host:1/score?token=pw', must", "got 'http://host:1/score?***', must"),
        ("got 'http://host#pw'", "got 'http://host?***'"),
        ("for example a=http://127.0.0.1:8000", "for example a=http://127.0.0.1:8000"),
        ("(did you mean sample.k?); see docs/config.md", "(did you mean sample.k?); see docs/config.md"),
    ],
)
def test_secrets_of_addresses_are_starred(text: str, shown: str) -> None:
    assert str(ConfigError(text)) == shown


def test_starring_secrets_takes_no_longer_for_a_long_text() -> None:
    for text in ("a" * 300_000, "a@" * 150_000, "a=b@" * 75_000, "a://" * 75_000, "http://a?" * 30_000):
        assert "pw" not in str(ConfigError(f"{text}pw@host"))  # a quadratic search would not end within a test's limit


@pytest.mark.parametrize(
    "word",
    [
        *("distributed.dead_s=1e308", "model.lora_rank=100000000000000000", "train.adv_clip=1e300"),
        *("train.learning_rate=1e38", "data.height=99999999992", "data.buckets=5x24x99999999992", "sample.k=9999999"),
        *("output_root=~/runs", f"output_root={'a' * 300}", f"data.root={'b/' * 3000}", f"resume={'é' * 200}"),
        "reward.weights.source_match=1e300",
    ],
)
def test_values_that_no_run_can_hold_are_refused_by_their_bound(word) -> None:
    with pytest.raises(ConfigError, match=rf"config\.{re.escape(word.partition('=')[0])}: got .*must "):
        load(word)


def test_tables_are_split_by_entry_on_request_and_knobs_of_a_single_start_are_left_out():
    values = {"seed": 1, "reward.weights": {"b": 1.0, "a": 0.5}, "run_name": "first", "resume": "auto"}
    assert as_written(values) == {"seed": "1", "reward.weights": '{"a": 0.5, "b": 1.0}'}
    assert as_written(values, by_entry=True) == {"seed": "1", "reward.weights.b": "1.0", "reward.weights.a": "0.5"}


def test_what_differs_has_every_configuration_s_value_and_none_where_a_configuration_lacks_it():
    found = differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}, {"a": "1", "b": "2", "c": "4"})
    assert found == {"b": ["2", "3", "2"], "c": [None, "4", "4"]}
    assert differences({"a": "1"}, {"a": "1"}) == differences({}, {}) == {}


def test_a_misspelt_data_root_is_refused_where_a_world_would_be_rendered(tmp_path: Path) -> None:
    word = f"--config.data.root={tmp_path / 'wrold'}"
    with pytest.raises(ConfigError, match=r"no such folder; misspelt\? .*--config.data.tiny_world=tiny, for videos of"):
        load_config(f"{GRPO}:tiny_recam", [word])
    asked = load_config(f"{GRPO}:tiny_recam", [word, "--config.data.tiny_world=tiny"])
    (tmp_path / "wrold").mkdir()
    assert load_config(f"{GRPO}:tiny_recam", [word]) == asked
    assert load_config(f"{GRPO}:my_recam_8npu", ["--config.data.root=/nowhere"]).data.root == "/nowhere"
