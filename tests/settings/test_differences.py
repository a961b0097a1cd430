"""Knobs in which configurations differ."""

from __future__ import annotations

from flow_grpo.settings.differences import as_written, differences


def test_tables_are_split_by_entry_on_request_and_knobs_of_a_single_start_are_left_out():
    values = {"seed": 1, "reward.weights": {"b": 1.0, "a": 0.5}, "run_name": "first", "resume": "auto"}
    assert as_written(values) == {"seed": "1", "reward.weights": '{"a": 0.5, "b": 1.0}'}
    assert as_written(values, by_entry=True) == {"seed": "1", "reward.weights.b": "1.0", "reward.weights.a": "0.5"}


def test_what_differs_has_every_configuration_s_value_and_none_where_a_configuration_lacks_it():
    found = differences({"a": "1", "b": "2"}, {"a": "1", "b": "3", "c": "4"}, {"a": "1", "b": "2", "c": "4"})
    assert found == {"b": ["2", "3", "2"], "c": [None, "4", "4"]}
    assert differences({"a": "1"}, {"a": "1"}) == differences({}, {}) == {}
