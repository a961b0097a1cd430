"""What every data set of conditions does alike."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from flow_grpo.data.conditions import Conditions, file_id
from tests.models.test_recam_policy import condition


class Two(Conditions):
    """Two conditions of one file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 2

    def make(self, index, gid, slot):
        return condition(index, slot=slot)

    def source_file(self, index):
        return self.file

    def source_video(self, index):
        return torch.zeros(3, 5, 16, 24)

    def prompt_of(self, index):
        return "a room"

    def structure(self, index):
        return 5, 16, 24


def test_a_draw_gives_the_step_and_the_condition(tmp_path):
    step, found = Two(tmp_path)[(7, 0, 3, 1)]
    assert (step, found.index, found.slot) == (7, 1, 3)


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_is_refused(tmp_path, index):
    with pytest.raises(IndexError, match=f"index is {index}, must be within 0..1"):
        Two(tmp_path).condition(index)


def test_a_file_is_named_by_its_content_and_read_again_when_it_changes(tmp_path):
    one, copy = tmp_path / "one.mp4", tmp_path / "copy.mp4"
    one.write_bytes(b"content")
    copy.write_bytes(b"content")
    assert file_id(one) == file_id(copy) == Two(one).source_id(0)
    before = file_id(copy)
    copy.write_bytes(b"CONTENT")
    os.utime(copy, ns=(1, 1))
    assert file_id(copy) != before
    with pytest.raises(ValueError, match=r"absent.mp4 cannot be read"):
        file_id(tmp_path / "absent.mp4")
