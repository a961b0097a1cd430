"""The frozen text encoder, loaded at first use."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForTextEncoding, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from flow_grpo.models.encoders.frozen import LOCAL, load_frozen, not_loaded
from flow_grpo.models.files.model_files import check_component, check_json
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.tensor_store import files_key

_log = logging.getLogger(__name__)


class TextEncoder:
    """Prompts to embeddings.

    Args:
        open_parts: loads network and tokenizer to the CPU.
        identity: identifies the weights in cache keys of encodings.
        width: width of an embedding.
        device: where it runs.
        offload: keep the network in CPU memory while it is not in use.
    """

    def __init__(
        self,
        open_parts: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
        identity: str,
        *,
        width: int,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.identity, self.width = identity, width
        self._open_parts = open_parts
        self._device, self._offload = device, offload
        self._parts: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: torch.dtype, *, device: torch.device, offload: bool = False
    ) -> TextEncoder:
        """Return the encoder of a model folder's text_encoder/ and tokenizer/, without loading weights.

        Raises:
            ValueError: a file is missing or damaged, or the weights are not those of config.json.
        """
        parts = folder / "text_encoder", folder / "tokenizer"
        check_component(parts[0])
        check_json(parts[1])
        identity = f"{files_key(parts[0])} {files_key(parts[1])} {dtype}"
        outline = load_frozen(AutoModelForTextEncoding, parts[0], dtype, device_map="meta")  # reads headers only
        _load_tokenizer(parts[1])

        def open_parts() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
            return load_frozen(AutoModelForTextEncoding, parts[0], dtype), _load_tokenizer(parts[1])

        return cls(open_parts, identity, width=outline.config.hidden_size, device=device, offload=offload)

    @property
    def loaded(self) -> bool:
        """Whether the network is in memory."""
        return self._parts is not None

    @torch.no_grad()
    def embed(self, prompt: str, max_tokens: int) -> Tensor:
        """Return (n, D) fp32 CPU embeddings of a prompt's n tokens, at most `max_tokens`, without padding."""
        if self._parts is None:
            network, tokenizer = self._open_parts()
            network.requires_grad_(False)
            self._parts = network, tokenizer
        network, tokenizer = self._parts
        text = clean_prompt(prompt)
        tokens = tokenizer([text], truncation=True, max_length=max_tokens, return_tensors="pt")
        length = len(tokenizer(text, verbose=False).input_ids)
        if length > max_tokens:
            _log.warning(
                "prompt %.60r has %d tokens and is cut to %d; shorten it or raise model.max_prompt_tokens",
                prompt,
                length,
                max_tokens,
            )
        with device_api.visiting(network, self._device, stays=not self._offload):
            tokens = tokens.to(self._device)
            states: Tensor = network(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
        return states.float().cpu()


def clean_prompt(prompt: str) -> str:
    """Return the text that is tokenized, as ReCamMaster's code and diffusers' Wan pipelines clean it.

    Broken encodings and HTML entities are repaired, full-width punctuation and curly quotes become ASCII, and every run
    of white space becomes one space. ASCII text without "&" only changes in white space.
    """
    import ftfy  # here: what plans or measures a model encodes no prompts

    repaired = html.unescape(html.unescape(ftfy.fix_text(prompt)))  # twice: "&amp;lt;" occurs in scraped captions
    return " ".join(repaired.split())


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), **LOCAL)
    except Exception as error:  # as in `load_frozen`
        raise not_loaded(folder, error) from error
    return tokenizer
