"""A file is replaced as a whole or not at all."""

import contextlib
from pathlib import Path

import pytest

from flow_grpo.runtime.atomic_file import atomic_path, replace_folder, write_atomically


def test_a_file_is_replaced_its_folder_created_and_its_line_ends_kept(tmp_path):
    file = tmp_path / "new" / "table.csv"
    for text in ("a,b\r\n", "ä\n"):
        write_atomically(file, text)
        assert file.read_bytes() == text.encode()
    assert list(file.parent.iterdir()) == [file]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "kept.json"
    write_atomically(file, "old")
    with contextlib.suppress(OSError), atomic_path(file) as temporary:
        temporary.write_text("ne")
        raise OSError(28, "No space left on device")
    assert file.read_text() == "old" and list(tmp_path.iterdir()) == [file]


def test_concurrent_writers_do_not_share_a_temporary_file(tmp_path):
    file = tmp_path / "shared"
    with atomic_path(file) as first, atomic_path(file) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert file.read_text() == "first"


def test_a_folder_appears_whole_or_not_at_all_and_replaces_none_with_content(tmp_path):
    folder = tmp_path / "model"
    with contextlib.suppress(OSError), atomic_path(folder) as temporary:
        temporary.mkdir()
        (temporary / "half").touch()
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        (temporary / "whole").touch()
    with pytest.raises(OSError, match="not empty"), atomic_path(folder) as temporary:
        temporary.mkdir()
    assert list(tmp_path.iterdir()) == [folder] and [file.name for file in folder.iterdir()] == ["whole"]


def test_a_folder_replaces_another_or_leaves_it_as_it_was(tmp_path, monkeypatch):
    old, new, target = tmp_path / "old", tmp_path / "new", tmp_path / "adapter"
    for made in (old, new):
        made.mkdir()
        (made / made.name).touch()
    replace_folder(old, target)
    rename = Path.rename

    def stale(path: Path, to: Path) -> Path:
        if path == new:
            raise OSError(116, "Stale file handle")
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", stale)
        with pytest.raises(OSError, match="Stale"):
            replace_folder(new, target)
    assert [path.name for path in target.iterdir()] == ["old"]
    replace_folder(new, target)
    assert [path.name for path in target.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [target]
