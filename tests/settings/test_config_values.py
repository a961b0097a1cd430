"""Text and recipe values become typed values, or are refused."""

from __future__ import annotations

from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flow_grpo.settings import schema
from flow_grpo.settings.schema import Gate, Schedule
from flow_grpo.settings.values import KINDS

NAMED = vars(schema).values()
SECTIONS = [value for value in NAMED if isinstance(value, type) and value.__name__.endswith("Config")]


def test_every_type_of_every_field_and_of_every_entry_of_a_table_is_known() -> None:
    hints = {hint for section in SECTIONS for hint in get_type_hints(section).values() if hint not in SECTIONS}
    entries = {get_args(hint)[1] for hint in hints if get_origin(hint) is dict}
    assert hints | entries == set(KINDS)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_example_of_a_kind_can_be_read_and_its_value_put_into_a_recipe(kind: Any) -> None:
    value = KINDS[kind].parse(KINDS[kind].example)
    assert KINDS[kind].convert(value) == value


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, True),
        (int, 1.0),
        (float, "1"),
        (float, True),
        (float, None),
        (bool, 1),
        (str, None),
        (float | None, "low"),
        (tuple[int, ...], (1, True)),
        (tuple[int, ...], 1),
        (tuple[str, ...], "wandb"),
        (dict[str, float], {"target_view": "1"}),
        (dict[str, float], {1: 1.0}),
        (dict[str, float], ["target_view"]),
        (Schedule, ()),
        (Schedule, ((0, 1.0), (5,))),
        (Schedule, ((0.5, 1.0),)),
        (Schedule, (("0", 1.0),)),
        (Schedule, ((0, "1"),)),
        (Schedule, {0: 1.0}),
        (dict[str, Schedule], {"target_view": ()}),
        (dict[str, Schedule], {1: ((0, 1.0),)}),
        (dict[str, Schedule], ["target_view"]),
        (Gate, ("source_match",)),
        (Gate, ("source_match", 0.5, 1)),
        (Gate, (0.5, "source_match")),
        (Gate, "source_match:0.5"),
        (dict[str, Gate], {"pose_rot": 0.5}),
        (dict[str, str], {"judge": 8000}),
        (dict[str, str], {1: "http://h"}),
        (dict[str, str], {"judge": "h:8000"}),
        (dict[str, str], {"judge": "ftp://h"}),
        (dict[str, str], {"judge": "http://"}),
        (dict[str, str], {"judge": "http://me:pw@h"}),
        (dict[str, str], {"judge": "http://h/?key=1"}),
        (dict[str, str], {"judge": "http://h/\nX: y"}),
        (dict[str, str], ["http://h"]),
    ],
)
def test_a_recipe_value_of_another_type_is_refused(kind: Any, value: object) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        KINDS[kind].convert(value)


def test_an_address_whose_port_is_none_is_refused() -> None:
    for port in ("x", "99999", "-1", "0"):
        with pytest.raises(ValueError):  # noqa: PT011 - the standard library's own words
            KINDS[dict[str, str]].convert({"judge": f"http://h:{port}"})


def test_a_whole_number_will_do_where_a_number_is_asked_for() -> None:
    value = KINDS[float].convert(3)
    assert value == 3.0 and type(value) is float
    assert KINDS[dict[str, float]].convert({"target_view": 1}) == {"target_view": 1.0}


def test_tables_of_schedules_and_gates_are_written_without_quotes_or_brackets() -> None:
    schedules, gates = KINDS[dict[str, Schedule]].parse, KINDS[dict[str, Gate]].parse
    assert schedules("a=0:1,50:0.2,remote:b=0:0,9:1,20:1") == {
        "a": ((0, 1.0), (50, 0.2)),
        "remote:b": ((0, 0.0), (9, 1.0), (20, 1.0)),
    }
    assert gates("a=b:0.5,remote:c=remote:d:-1") == {"a": ("b", 0.5), "remote:c": ("remote:d", -1.0)}
    assert schedules("") == gates("") == {}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *((Schedule, text) for text in ("", "x", "5", "0:0,,5:1", "0.5:1", "0:x")),
        *((dict[str, Schedule], text) for text in ("x", "a=", "a=5", "5:0,a=0:0", "a=0:0,b", "a=0.5:1")),
        *((Gate, text) for text in ("", "x", "b:", "remote:clip")),
        *((dict[str, Gate], text) for text in ("x", "a=", "a=b", "a=b:c", "a=b:1,c")),
    ],
    ids=str,
)
def test_a_schedule_or_gate_that_cannot_be_read_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - int's and float's own words
        KINDS[kind].parse(text)


@given(st.lists(st.integers()))
def test_a_tuple_reads_back_as_python_writes_it(numbers: list[int]) -> None:
    parse = KINDS[tuple[int, ...]].parse
    assert parse(str(numbers)) == parse(str(tuple(numbers))) == tuple(numbers)


@given(st.floats(allow_nan=False))
def test_a_number_reads_back_as_python_writes_it(number: float) -> None:
    assert KINDS[float].parse(str(number)) == number
