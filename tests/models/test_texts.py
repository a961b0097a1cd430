"""Prompts to embeddings."""

import hashlib
import json
import string
from pathlib import Path

import pytest
import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from config.grpo import WAN_NEGATIVE_PROMPT
from flow_grpo.models.encoders.texts import TextEncoder
from flow_grpo.runtime.prompt_text import clean_prompt
from tests.tiny_models import CPU, make_tiny_folder, tiny_text_encoder, tiny_tokenizer


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> TextEncoder:
    return TextEncoder.from_folder(Path(make_tiny_folder(tmp_path_factory.mktemp("model"))), torch.float32, device=CPU)


def test_the_network_is_loaded_by_the_first_prompt(tmp_path):
    calls = []

    def open_network():
        calls.append(0)
        return tiny_text_encoder()

    made = TextEncoder(open_network, tiny_tokenizer, "x", width=16, device=CPU)
    assert made._network is None
    made.embed("a room", 6)
    made.embed("pan left", 6)
    assert made._network is not None and len(calls) == 1


def test_long_prompts_are_truncated_with_a_warning(encoder, caplog):
    assert encoder.embed("a room with the camera pan left", 4).shape == (4, 16)
    assert "'a room with the camera pan left' has 8 tokens and is cut to 4" in caplog.text
    caplog.clear()
    encoder.embed("a room with the camera pan left", 8)
    assert not caplog.text


@pytest.mark.parametrize(
    "prompt",
    [WAN_NEGATIVE_PROMPT, "“curly” quotes", "a &amp;lt; b", "schÃ¶n  full，width", " \u00a0a\r\nroom\t", "", "ﬁn"],
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


def test_the_identity_depends_on_weights_and_dtype(tmp_path, encoder):
    other = Path(make_tiny_folder(tmp_path, seed=1))
    found = {TextEncoder.from_folder(other, dtype, device=CPU).identity for dtype in (torch.float32, torch.bfloat16)}
    assert len(found | {encoder.identity}) == 3


@pytest.fixture
def folder(tmp_path) -> Path:
    return Path(make_tiny_folder(tmp_path))


@pytest.mark.parametrize("change", ["missing", "cut"])
def test_weights_that_would_be_drawn_and_a_tokenizer_that_is_none_are_refused_before_a_prompt(folder, change):
    (file,) = (folder / "text_encoder").glob("*.safetensors")
    whole, name = load_file(file), "encoder.block.0.layer.0.SelfAttention.q.weight"
    state = dict(whole)
    if change == "missing":
        state.pop(name)
    else:
        state[name] = state[name][:4].clone()
    save_file(state, file, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"text_encoder lacks the weights.* 1 \({name}\); download it again"):
        TextEncoder.from_folder(folder, torch.float32, device=CPU)
    save_file(whole, file, {"format": "pt"})
    (folder / "tokenizer" / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"tokenizer cannot be loaded .*download it again"):
        TextEncoder.from_folder(folder, torch.float32, device=CPU)


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (
            "text_encoder/config.json",
            {
                "model_type": "nobodys",
                "auto_map": {"AutoConfig": "own.Config", "AutoModelForTextEncoding": "own.Model"},
            },
        ),
        (
            "tokenizer/tokenizer_config.json",
            {"tokenizer_class": "Nobodys", "auto_map": {"AutoTokenizer": ["own.Tokenizer", None]}},
        ),
    ],
    ids=["text_encoder", "tokenizer"],
)
def test_code_in_a_model_folder_is_neither_run_nor_asked_about(folder, monkeypatch, file, own):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asks whether to run code"))
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    (path.parent / "own.py").write_text("raise SystemExit('run')")
    with pytest.raises(ValueError, match=rf"{path.parent.name} cannot be loaded .*download it again"):
        TextEncoder.from_folder(folder, torch.float32, device=CPU)
