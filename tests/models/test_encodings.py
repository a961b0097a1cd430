"""Encodings on disk: cached equals fresh, keys follow content, and a warm cache loads no encoder."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flow_grpo.models.recam_policy import RecamPolicy, load_networks
from flow_grpo.runtime.tensor_store import TensorStore
from tests.models.test_recam_policy import condition
from tests.tiny_models import CPU, make_tiny_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny_folder(tmp_path_factory.mktemp("model"))


def policy(folder: str, cache, **settings) -> RecamPolicy:
    networks = load_networks(folder, torch.float32, CPU)
    return RecamPolicy(networks, max_prompt_tokens=6, device=CPU, store=TensorStore(cache), **settings)


CONDITIONS = [condition(0, prompt="a room"), condition(1, prompt="pan left"), condition(0, slot=1, prompt="a room")]


def test_cached_equals_fresh_bit_for_bit_and_a_warm_cache_loads_no_encoder(folder, tmp_path):
    guided = {"guidance_scale": 5.0, "negative_prompt": "slowly"}
    fresh = policy(folder, None, **guided).encode(CONDITIONS)
    written = policy(folder, tmp_path, **guided).encode(CONDITIONS)
    warm = policy(folder, tmp_path, **guided)
    cached = warm.encode(CONDITIONS)
    for name, tensor in fresh.tensors().items():
        assert torch.equal(tensor, written.tensors()[name]) and torch.equal(tensor, cached.tensors()[name]), name
    assert warm.codec.loaded == () and not warm.texts.loaded
    kinds = {kind.name: len(list(kind.rglob("*.safetensors"))) for kind in tmp_path.iterdir()}
    assert kinds == {"sources": 2, "prompts": 3}


def test_the_padding_of_a_prompt_is_not_kept(folder, tmp_path):
    made = policy(folder, tmp_path)
    made.encode(CONDITIONS)
    store = TensorStore(tmp_path)
    entry = store.get("prompts", made.encodings._prompt_key("a  room "), lambda: torch.zeros(0))
    assert entry.shape == (3, 16)  # a, room, </s>


def test_videos_of_one_content_share_an_entry_whatever_they_are_called(folder):
    made, calls = policy(folder, None), []
    encode = made.codec.encode
    made.codec.encode = lambda video: calls.append(0) or encode(video)
    renamed = dataclasses.replace(condition(0), index=7, scene="other", source_camera="cam09")
    made.encode([condition(0), renamed])
    assert len(calls) == 1
    made.encode([dataclasses.replace(condition(0), source_video=1 - condition(0).source_video)])
    assert len(calls) == 2


def test_a_source_id_stands_for_the_pixels_at_one_size(folder):
    made, calls = policy(folder, None), []
    encode = made.codec.encode
    made.codec.encode = lambda video: calls.append(0) or encode(video)
    one = dataclasses.replace(condition(0), source_id="x")
    made.encode([one])
    made.encode([dataclasses.replace(condition(1), source_id="x")])
    assert len(calls) == 1
    made.encode([dataclasses.replace(condition(1, size=(9, 16, 24)), source_id="x")])
    assert len(calls) == 2


def test_another_encoder_or_length_makes_its_own_entries(folder, tmp_path):
    policy(folder, tmp_path / "cache").encode(CONDITIONS)
    other = policy(make_tiny_folder(tmp_path / "model", seed=1), tmp_path / "cache")
    other.encode(CONDITIONS)
    assert other.codec.loaded and other.texts.loaded
    shorter = RecamPolicy(
        load_networks(folder, torch.float32, CPU),
        max_prompt_tokens=2,
        device=CPU,
        store=TensorStore(tmp_path / "cache"),
    )
    shorter.encode(CONDITIONS)
    assert shorter.texts.loaded and not shorter.codec.loaded


def test_knows_says_whether_nothing_is_left_to_encode(folder, tmp_path):
    made = policy(folder, tmp_path)
    one = dataclasses.replace(condition(0), source_id="x")
    known = made.encodings
    assert not known.knows_source("x", one.size) and not known.knows_prompt(one.prompt)
    made.encode([one])
    assert known.knows_source("x", one.size) and known.knows_prompt(one.prompt)
    assert not known.knows_prompt("pan left") and not known.knows_source("y", one.size)
    path = next((tmp_path / "sources").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert not known.knows_source("x", one.size)
