"""The tiny model's text side: a word-level tokenizer and a small UMT5 encoder with fixed random weights.

The tiny world's captions are a closed set, so even a random encoder gives each its own embedding; the transformer's
text projection learns what they mean.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

from flow_grpo.data.tiny_world import WALL_COLOURS

CAPTIONS = tuple(f"a room with a {colour} wall" for colour in WALL_COLOURS)
PROMPT_TOKENS = 8


def build_text_encoder() -> tuple[UMT5EncoderModel, PreTrainedTokenizerFast]:
    """Return the encoder and its tokenizer; identical at every call."""
    words = ["<pad>", "</s>", "<unk>", *sorted({word for text in CAPTIONS for word in text.split()})]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    sizes = {"vocab_size": len(words), "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 2}
    config = UMT5Config(**sizes, dropout_rate=0.0, pad_token_id=0, eos_token_id=1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return UMT5EncoderModel(config).eval(), tokenizer


@torch.no_grad()
def encode_captions(encoder: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """Return (captions, L, D) embeddings, zero after each text's end."""
    tokens = tokenizer(
        list(CAPTIONS), padding="max_length", max_length=PROMPT_TOKENS, truncation=True, return_tensors="pt"
    )
    mask = tokens["attention_mask"]
    return encoder(input_ids=tokens["input_ids"], attention_mask=mask).last_hidden_state * mask[..., None]
