"""The frozen text encoder."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForTextEncoding, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from flow_grpo.models.encoders.frozen import LOCAL, FrozenEncoder, load_frozen, not_loaded
from flow_grpo.models.files.model_files import check_component, check_json
from flow_grpo.runtime.prompt_text import clean_prompt
from flow_grpo.runtime.tensor_store import files_key

_log = logging.getLogger(__name__)


class TextEncoder(FrozenEncoder):
    """Prompts to embeddings; the tokenizer is opened at first use, too, and part of the `identity`."""

    def __init__(
        self,
        open_network: Callable[[], PreTrainedModel],
        open_tokenizer: Callable[[], PreTrainedTokenizerBase],
        identity: str,
        **settings: Any,
    ) -> None:
        super().__init__(open_network, identity, **settings)
        self._tokenizer = functools.cache(open_tokenizer)

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, **placement: Any) -> TextEncoder:
        """Return the encoder of a model folder's text_encoder/ and tokenizer/, without loading weights.

        ValueError if a file is missing or damaged, or the weights are not those of config.json.
        """
        encoder, tokenizer = folder / "text_encoder", folder / "tokenizer"
        check_component(encoder)
        check_json(tokenizer)
        identity = f"{files_key(encoder)} {files_key(tokenizer)} {dtype}"
        outline = load_frozen(AutoModelForTextEncoding, encoder, dtype, device_map="meta")  # reads headers only
        open_network = functools.partial(load_frozen, AutoModelForTextEncoding, encoder, dtype)
        open_tokenizer = functools.partial(_load_tokenizer, tokenizer)
        open_tokenizer()  # a damaged one is found now
        return cls(open_network, open_tokenizer, identity, width=outline.config.hidden_size, **placement)

    @torch.no_grad()
    def embed(self, prompt: str, max_tokens: int) -> Tensor:
        """Return (n, D) fp32 CPU embeddings of a prompt's n tokens, at most `max_tokens`, without padding."""
        tokenizer, text = self._tokenizer(), clean_prompt(prompt)
        tokens = tokenizer([text], truncation=True, max_length=max_tokens, return_tensors="pt")
        length = len(tokenizer(text, verbose=False).input_ids)
        if length > max_tokens:
            text = "prompt %.60r has %d tokens and is cut to %d; shorten it or raise model.max_prompt_tokens"
            _log.warning(text, prompt, length, max_tokens)
        with self._ready() as network:
            tokens = tokens.to(self._device)
            states: Tensor = network(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
        return states.float().cpu()


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), **LOCAL)
        tokenizer("a room")  # settings of a wrong type are met in use only
    except Exception as error:  # as in `load_frozen`
        raise not_loaded(folder, error) from error
    return tokenizer
