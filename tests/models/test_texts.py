"""Prompts to embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flow_grpo.models.texts import TextEncoder, normalize_prompt
from tests.tiny_models import CPU, make_tiny_folder, tiny_text_encoder, tiny_tokenizer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> TextEncoder:
    return TextEncoder.from_folder(Path(make_tiny_folder(tmp_path_factory.mktemp("model"))), torch.float32, device=CPU)


def test_the_network_is_loaded_by_the_first_prompt(tmp_path):
    calls = []

    def open_parts():
        calls.append(0)
        return tiny_text_encoder(), tiny_tokenizer()

    made = TextEncoder(open_parts, "x", device=CPU)
    assert not made.loaded
    made.embed("a room", 6)
    made.embed("pan left", 6)
    assert made.loaded and len(calls) == 1


@torch.no_grad()
def test_embeddings_are_those_of_the_tokens_and_no_padding(encoder):
    tokens = tiny_tokenizer()(["a room"], return_tensors="pt")
    expected = tiny_text_encoder()(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    found = encoder.embed("  a \n room ", 6)
    assert found.shape == (3, 16) and torch.equal(found, expected)
    assert normalize_prompt("  a \n room ") == "a room"


def test_long_prompts_are_truncated_with_a_warning(encoder, caplog):
    assert encoder.embed("a room with the camera pan left", 4).shape == (4, 16)
    assert "'a room with the camera pan left' has 8 tokens and is cut to 4" in caplog.text
    caplog.clear()
    encoder.embed("a room with the camera pan left", 8)
    assert not caplog.text


def test_the_identity_depends_on_weights_and_dtype(tmp_path, encoder):
    other = Path(make_tiny_folder(tmp_path, seed=1))
    found = {TextEncoder.from_folder(other, dtype, device=CPU).identity for dtype in (torch.float32, torch.bfloat16)}
    assert len(found | {encoder.identity}) == 3
