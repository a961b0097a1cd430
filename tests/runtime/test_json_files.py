"""JSON files from elsewhere are read, or refused in one line that names the file."""

import os
import re

import pytest

from flow_grpo.runtime.json_files import read_json, read_json_object


def test_json_is_read_with_or_without_a_byte_order_mark(tmp_path):
    file = tmp_path / "a.json"
    for content in (b'{"a": [1]}', b'\xef\xbb\xbf{"a": [1]}'):
        file.write_bytes(content)
        assert read_json(file, "write it") == read_json_object(file, "write it") == {"a": [1]}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"9" * 5000, "is not JSON"),
        (b"\xff", "cannot be read"),
        (b"[]", "holds a list, must be a JSON object"),
        (b'{"a": {"b": 1, "b": 2}}', "key 'b' comes twice"),
    ],
)
def test_a_bad_file_is_refused_with_its_name_the_reason_and_the_way_out(tmp_path, content, reason):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        read_json_object(file, "write it again")
    text = str(caught.value)
    assert str(file) in text and text.endswith("; write it again") and "\n" not in text


def test_a_folder_and_a_pipe_are_no_files(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"{path} cannot be read .*no regular file.*; write it again"):
            read_json(path, "write it again")
