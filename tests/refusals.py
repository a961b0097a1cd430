"""What a program says when it refuses: one line."""

from collections.abc import Callable, Sequence

import pytest


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on stderr, which must begin with `error: `."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    """Return whether that line holds all the words."""
    line = error_line(capsys)
    return all(word in line for word in words)


def refusal(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], words: Sequence[object]) -> str:
    """Call a program that must refuse with exit code 2, and return its one line."""
    capsys.readouterr()
    assert main([str(word) for word in words]) == 2
    return error_line(capsys)
