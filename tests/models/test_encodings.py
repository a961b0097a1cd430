"""Cached encodings equal fresh ones, keys follow content, and a warm cache loads no encoder."""

import dataclasses
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import WanPolicy, load_networks
from flow_grpo.runtime.tensor_store import TensorStore
from tests.models.test_wan_policy import condition
from tests.tiny_models import CPU, make_tiny_folder, tiny_policy, tiny_settings


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return make_tiny_folder(tmp_path_factory.mktemp("model"))


def policy(folder: str, cache, **settings) -> WanPolicy:
    networks = load_networks(RECAM, tiny_settings(folder), CPU)
    return tiny_policy(networks, store=TensorStore(cache), **settings)


CONDITIONS = [condition(0, prompt="a room"), condition(1, prompt="pan left"), condition(0, slot=1, prompt="a room")]


def test_cached_equals_fresh_bit_for_bit_and_a_warm_cache_loads_no_encoder(folder, tmp_path):
    guided = {"guidance_scale": 5.0, "negative_prompt": "slowly"}
    fresh = policy(folder, None, **guided).encode(CONDITIONS)
    written = policy(folder, tmp_path, **guided).encode(CONDITIONS)
    warm = policy(folder, tmp_path, **guided)
    cached = warm.encode(CONDITIONS)
    for name, tensor in fresh.tensors().items():
        assert torch.equal(tensor, written.tensors()[name]) and torch.equal(tensor, cached.tensors()[name]), name
    assert not warm.codec._halves and warm.texts._network is None
    kinds = {kind.name: len(list(kind.rglob("*.safetensors"))) for kind in tmp_path.iterdir()}
    assert kinds == {"sources": 2, "prompts": 3}


def test_videos_are_identified_by_their_pixels_or_by_source_id_and_size(folder):
    made = policy(folder, None)
    made.codec.encode = Mock(wraps=made.codec.encode)
    first = condition(0)
    elsewhere = dataclasses.replace(first, index=7, scene="other", source_camera="cam09")
    named = [dataclasses.replace(condition(index), source_id="x") for index in (0, 1)]
    larger = dataclasses.replace(condition(1, size=(9, 16, 24)), source_id="x")
    expected = [(first, 1), (elsewhere, 1), (dataclasses.replace(first, source_video=1 - first.source_video), 2)]
    for one, count in [*expected, (named[0], 3), (named[1], 3), (larger, 4)]:
        made.encode([one])
        assert made.codec.encode.call_count == count


def test_another_encoder_or_length_makes_its_own_entries(folder, tmp_path):
    policy(folder, tmp_path / "cache").encode(CONDITIONS)
    other = policy(make_tiny_folder(tmp_path / "model", seed=1), tmp_path / "cache")
    other.encode(CONDITIONS)
    assert other.codec._halves and other.texts._network is not None
    shorter = policy(folder, tmp_path / "cache", max_prompt_tokens=2)
    shorter.encode(CONDITIONS)
    assert shorter.texts._network is not None and not shorter.codec._halves


def test_a_precomputed_video_or_prompt_is_known_until_its_file_is_damaged(folder, tmp_path):
    made = policy(folder, tmp_path)
    one = dataclasses.replace(condition(0), source_id="x")
    known = made.encodings
    assert not known.knows_source("x", one.size) and not known.knows_prompt(one.prompt)
    made.encode([one])
    assert known.knows_source("x", one.size) and known.knows_prompt(one.prompt)
    assert not known.knows_prompt("pan left") and not known.knows_source("y", one.size)
    path = next((tmp_path / "sources").rglob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    assert known.knows_source("x", one.size), "it is in memory"
    assert not policy(folder, tmp_path).encodings.knows_source("x", one.size)


def test_a_prompt_is_cached_under_the_text_that_is_tokenized_and_without_padding(folder, tmp_path):
    known = policy(folder, tmp_path).encodings
    known.prompt("a room, slowly")
    assert known.knows_prompt(" a\nroom， slowly") and known.knows_prompt("a room&#44; slowly")
    assert not known.knows_prompt("a room slowly")
    policy(folder, tmp_path / "other").encodings.prompt("a  room ")
    (file,) = (tmp_path / "other" / "prompts").rglob("*.safetensors")
    assert load_file(file)["value"].shape == (3, 16)  # a, room, </s>
