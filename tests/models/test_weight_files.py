"""Files of weights: every kind reads alike, and what is no checkpoint is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from flow_grpo.models.recam_transformer import stays_fp32
from flow_grpo.models.weight_files import read_checkpoint, read_tensors, target_dtypes

STATE = {name: torch.randn(2, 3).to(torch.bfloat16) for name in ("a.weight", "blocks.0.norm2.weight", "norm22.weight")}


@pytest.mark.parametrize("kind", ["ckpt", "pt", "safetensors", "safetensors.index.json"])
def test_every_kind_of_file_gives_the_same_tensors(tmp_path, kind):
    state, file = STATE, tmp_path / f"step.{kind}"
    if kind.endswith("json"):
        file.write_text(json.dumps({"weight_map": {name: f"{len(name) % 3}.safetensors" for name in state}}))
        for shard in range(3):
            part = {name: value for name, value in state.items() if len(name) % 3 == shard}
            safetensors.torch.save_file(part, tmp_path / f"{shard}.safetensors")
    elif kind == "safetensors":
        safetensors.torch.save_file(state, file)
    else:
        torch.save(state, file)
    found = read_checkpoint(file)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == torch.bfloat16 for name in state)


def test_a_torch_file_is_mapped_and_only_tensors_are_unpickled(tmp_path, monkeypatch):
    torch.save(STATE, tmp_path / "step.ckpt")
    given, load = [], torch.load
    monkeypatch.setattr(torch, "load", lambda file, **how: (given.append(how), load(file, **how))[1])
    read_checkpoint(tmp_path / "step.ckpt")
    assert given == [{"weights_only": True, "mmap": True, "map_location": "cpu"}]


def shards(folder: Path, listed, held) -> Path:
    safetensors.torch.save_file({name: torch.zeros(1) for name in held}, folder / "a.safetensors")
    file = folder / "x.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": listed}))
    return file


class Secret:
    """Something that a weight file may not hold."""


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.ckpt", None, "no checkpoint at"),
        ("x.zip", b"", "ends in '.zip'"),
        ("x.ckpt", b"garbage" * 100, "cannot be read as a state dict"),
        ("x.ckpt", {"a": Secret()}, r"cannot be read as a state dict: Weights only load failed\. \("),
        ("x.pt", torch.zeros(2), "holds a Tensor, expected a flat table"),
        ("x.pt", {3: torch.zeros(2)}, "expected a flat table"),
        ("x.pt", {"state_dict": {"a": torch.zeros(2)}, "step": 3}, r"2 \(state_dict: dict, step: int\)"),
        ("x.pt", {"a": torch.zeros(2, dtype=torch.int8)}, r"1 \(a: torch.int8\) beside weights"),
        ("x.safetensors", b"garbage" * 100, "is damaged"),
        ("x.index.json", b"garbage", "is not JSON"),
        ("x.index.json", b'{"weight_map": {"a": "../b"}}', "names the shard '../b', must be a file beside it"),
        ("x.index.json", b'{"weight_map": {"a": "/etc/b"}}', "names the shard '/etc/b', must be a file beside it"),
        ("x.index.json", b'{"weight_map": 3}', "is no index of shards"),
        ("x.index.json", b'{"weight_map": {"a": "b"}}', "names the shard b, which is not there"),
    ],
)
def test_files_that_are_no_checkpoint_are_refused(tmp_path, name, content, message):
    file = tmp_path / name
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    with pytest.raises(ValueError, match=message) as caught:
        read_checkpoint(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("held", ["a", "abc"])
def test_an_index_and_a_shard_that_disagree_are_refused(tmp_path, held):
    with pytest.raises(ValueError, match=r"disagree on 1 \((b|c)\)"):
        read_checkpoint(shards(tmp_path, {"a": "a.safetensors", "b": "a.safetensors"}, held))


def test_a_safetensors_file_is_read_with_its_header(tmp_path):
    safetensors.torch.save_file(STATE, tmp_path / "x.safetensors", {"made": "here"})
    tensors, header = read_tensors(tmp_path / "x.safetensors")
    assert header == {"made": "here"}
    assert all(torch.equal(tensors[name], STATE[name]) for name in STATE)


def test_what_wan_computes_in_fp32_is_stored_so_by_whole_words_of_its_name():
    assert [name for name in STATE if stays_fp32(name)] == ["blocks.0.norm2.weight"]
    half, full = torch.float16, torch.float32
    assert list(target_dtypes(STATE, half).values()) == [half, full, half]
    assert set(target_dtypes(STATE, half, keep_fp32=False).values()) == {half}
    assert set(target_dtypes(STATE, None).values()) == {torch.bfloat16}
