"""A refusal is one line that says what, got, bound and way out."""

from __future__ import annotations

from flow_grpo.config_errors import ConfigError, refusal


def test_a_refusal_holds_its_four_parts_in_one_line_and_is_a_value_error() -> None:
    error = refusal("sample.k", "four", "must be a whole number", "pass --config.sample.k=4")
    assert isinstance(error, ConfigError) and isinstance(error, ValueError)
    assert str(error) == "config.sample.k: got 'four', must be a whole number; pass --config.sample.k=4"
