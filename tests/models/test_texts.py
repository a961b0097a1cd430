"""Prompts to embeddings."""

from __future__ import annotations

import hashlib
import string
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given
from hypothesis import strategies as st

from config.grpo import WAN_NEGATIVE_PROMPT
from flow_grpo.models.texts import TextEncoder, clean_prompt
from tests.tiny_models import CPU, make_tiny_folder, tiny_text_encoder, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


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


def test_long_prompts_are_truncated_with_a_warning(encoder, caplog):
    assert encoder.embed("a room with the camera pan left", 4).shape == (4, 16)
    assert "'a room with the camera pan left' has 8 tokens and is cut to 4" in caplog.text
    caplog.clear()
    encoder.embed("a room with the camera pan left", 8)
    assert not caplog.text


@pytest.mark.parametrize(
    "prompt",
    [
        WAN_NEGATIVE_PROMPT,
        "“curly” quotes",
        "a &amp;lt; b",
        "schÃ¶n  full，width",
        " \u00a0a\r\nroom\t",
        "",
        "ﬁn",
    ],
)
def test_a_prompt_is_cleaned_as_diffusers_pipelines_do(prompt):
    assert clean_prompt(prompt) == prompt_clean(prompt)


def test_the_negative_prompt_is_the_published_one_and_is_tokenized_with_ascii_commas():
    digest = hashlib.sha256(WAN_NEGATIVE_PROMPT.encode()).hexdigest()
    assert digest == "ce96e0324e4b54ce4b6e867f669ca520952e1a34cc116543516b1897f0d3c47e"
    assert clean_prompt(WAN_NEGATIVE_PROMPT) == WAN_NEGATIVE_PROMPT.replace("，", ",")


@given(st.text(string.ascii_letters + string.digits + string.punctuation.replace("&", "") + " \n"))
def test_ascii_prompts_have_the_tokens_of_before_prompts_were_cleaned(prompt):
    before = " ".join(prompt.split())  # all that was done then
    assert clean_prompt(prompt) == before
    assert TOKENIZER(clean_prompt(prompt)).input_ids == TOKENIZER(before).input_ids


def test_the_identity_depends_on_weights_and_dtype(tmp_path, encoder):
    other = Path(make_tiny_folder(tmp_path, seed=1))
    found = {TextEncoder.from_folder(other, dtype, device=CPU).identity for dtype in (torch.float32, torch.bfloat16)}
    assert len(found | {encoder.identity}) == 3
