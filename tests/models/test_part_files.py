"""A part of a model folder is of one piece, or refused by the name of the file that is not."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flow_grpo.models.part_files import check_json, check_part, listed_shards


@pytest.fixture
def part(tmp_path) -> Path:
    """A part in two shards."""
    (tmp_path / "config.json").write_text('{"width": 3}')
    names = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for tensor, file in names.items():
        save_file({tensor: torch.zeros(9)}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return tmp_path


def test_a_part_of_one_piece_gives_its_configuration(part):
    assert check_part(part) == {"width": 3}
    assert set(listed_shards(part / "model.safetensors.index.json").values()) == {
        "model-1.safetensors",
        "model-2.safetensors",
    }


def break_tail(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda part: (part / "config.json").unlink(), "config.json is missing; give a model folder"),
        (lambda part: (part / "config.json").write_text("["), "config.json is not JSON"),
        (lambda part: (part / "vocabulary.json").write_text("[]"), "vocabulary.json holds a list"),
        (lambda part: (part / "model-2.safetensors").unlink(), "model-2.safetensors is missing or damaged"),
        (lambda part: break_tail(part / "model-1.safetensors"), "model-1.safetensors is missing or damaged"),
        (lambda part: (part / "model-1.safetensors").write_text("<html>" * 9), "model-1.safetensors is missing or dam"),
        (lambda part: [file.unlink() for file in part.glob("model*")], "no weights in"),
        (
            lambda part: (part / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../a"}}'),
            "names the shard '../a', must be a file beside it",
        ),
    ],
)
def test_a_part_that_is_not_is_refused(part, spoil, said):
    spoil(part)
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        check_part(part)
    assert str(part) in str(caught.value)


def test_only_the_texts_of_a_tokenizer_are_looked_at(part):
    for file in part.glob("model-*"):
        file.unlink()
    check_json(part)
    (part / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not JSON"):
        check_json(part)
