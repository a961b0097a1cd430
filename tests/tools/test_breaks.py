"""`tools/dev/breaks.py`: where a break is planted, which tests are near it, and when it counts as found."""

from pathlib import Path

from tools.dev import breaks

SOURCE = '''
class Group:
    def half(self, number):
        """Return number - 1 over 2."""
        return max(
            number - 1,
            0,
        ) // 2

def half(number):
    return number - 1, number - 1
'''


def test_a_break_is_planted_once_and_found_by_the_tests_near_it(tmp_path: Path) -> None:
    texts = {
        "flow_grpo/__init__.py": "",
        "flow_grpo/group.py": SOURCE,
        "tests/__init__.py": "",
        "tests/test_far.py": "",
    }
    texts["tests/test_near.py"] = (
        "from flow_grpo import group\nimport os\n"
        "def test_flaky(): assert os.environ.get('SOUND')\n"
        "def test_half(): assert group.Group().half(3) == 1\n"
    )
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    form = ["Group.half", "max(number - 1, 0)", "max(number + 1, 0)"]
    assert breaks.planted(tmp_path, [["half", "number - 1", "number"]]) is None, "twice"
    found = breaks.planted(tmp_path, [["Group.gone", "number", ""], form])
    assert found is not None and found[1] == SOURCE.replace(
        "max(\n            number - 1,\n            0,\n        )", form[2]
    )
    record = breaks.try_break(tmp_path, [form])
    assert record["tests"] == ["tests/test_near.py"]
    assert (record["result"], record["by"]) == ("found", "tests/test_near.py::test_half")
    assert record["unsound"] == ["tests/test_near.py::test_flaky"], "it fails without the break, too"
    assert (tmp_path / "flow_grpo/group.py").read_text(encoding="utf-8") == SOURCE, "mended again"
    (tmp_path / "tests/test_near.py").write_text("from flow_grpo import group\ndef test_nothing(): pass\n")
    assert breaks.try_break(tmp_path, [form])["result"] == "survived"
