"""Code of the user's own by its place: what is loaded, once, and what is refused in one line."""

from pathlib import Path

import pytest

from flow_grpo.settings.errors import ConfigError
from flow_grpo.settings.own_code import check_call, is_own, load_own

KNOB = "reward.weights"


def place(folder: Path, text: str, name: str = "found") -> str:
    (folder / "mine.py").write_text(text)
    return f"{folder / 'mine.py'}:{name}"


def refusal(name: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_own(KNOB, name)
    text = str(refused.value)
    assert text.startswith(f"config.{KNOB}: got {name!r}, must ")
    assert "\n" not in text
    return text


def test_a_name_is_own_where_a_python_file_comes_first():
    assert is_own("mine.py:warmth") and is_own("some/folder/mine.py:Warmth") and is_own("mine.py")
    assert not any(map(is_own, ("pose_rot", "remote:mine", "remote:mine.py", "mine:warmth")))


def test_a_file_is_run_once_its_dataclasses_work_and_its_path_may_be_relative(tmp_path, monkeypatch):
    head = "from __future__ import annotations\nimport dataclasses\n"
    name = place(tmp_path, f"{head}@dataclasses.dataclass\nclass found:\n    a: int = 3\n")
    first = load_own(KNOB, name)
    assert first().a == 3
    assert load_own(KNOB, name) is first
    monkeypatch.chdir(tmp_path)
    assert load_own(KNOB, "mine.py:found")().a == 3


def test_what_is_missing_or_fails_is_named_in_one_line(tmp_path):
    assert f"there is no file nowhere.py in {Path.cwd()}; correct the path" in refusal("nowhere.py:found")
    assert "mine.py fails in line 2: ZeroDivisionError" in refusal(place(tmp_path, "x = 1\n1 / 0\n"))
    name = place(tmp_path, "import torch\n\n\ndef warmth(videos):\n    pass\n", "warmht")
    assert "must name a function or class of" in refusal(name) and refusal(name).endswith("it has warmth")
    for nothing in ("", ":torch.nowhere"):
        assert "must name a function or class of" in refusal(f"{tmp_path / 'mine.py'}{nothing}")


def test_other_arguments_are_refused_with_those_that_are_needed():
    with pytest.raises(ConfigError, match=r"must take \(videos, conditions\) but takes \(videos\): too many"):
        check_call(KNOB, "mine.py:f", lambda videos: videos, "videos", "conditions")
    check_call(KNOB, "mine.py:f", lambda videos, conditions, more=1: videos, "videos", "conditions")
