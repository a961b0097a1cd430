"""A text file is there whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from flow_grpo.runtime.atomic_file import write_whole


def test_a_file_is_replaced_its_folder_made_and_its_line_ends_kept(tmp_path):
    file = tmp_path / "new" / "table.csv"
    for text in ("a,b\r\n", "ä\n"):
        write_whole(file, text)
        assert file.read_bytes() == text.encode()
    assert list(file.parent.iterdir()) == [file]


def test_what_was_there_stays_when_writing_fails(tmp_path, monkeypatch):
    file = tmp_path / "kept.json"
    write_whole(file, "old")

    def full(self: Path, text: str, **_: object) -> int:
        self.write_bytes(text.encode()[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        write_whole(file, "new")
    assert file.read_text() == "old"
