"""A refusal is one line that says what, got, bound and way out."""

from __future__ import annotations

import pytest

from flow_grpo.settings.errors import ConfigError, refusal


def test_a_refusal_holds_its_four_parts_in_one_line_and_is_a_value_error() -> None:
    error = refusal("sample.k", "four", "must be a whole number", "pass --config.sample.k=4")
    assert isinstance(error, ConfigError) and isinstance(error, ValueError)
    assert str(error) == "config.sample.k: got 'four', must be a whole number; pass --config.sample.k=4"


def test_a_long_value_is_shown_in_part_and_lines_are_joined() -> None:
    assert len(str(refusal("data.prompt", "a" * 10_000, "must be shorter", "cut it"))) < 300
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
        ("(did you mean sample.k?); see config/base.py", "(did you mean sample.k?); see config/base.py"),
    ],
)
def test_secrets_of_addresses_are_starred(text: str, shown: str) -> None:
    assert str(ConfigError(text)) == shown
