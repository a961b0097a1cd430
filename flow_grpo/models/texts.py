"""The frozen text encoder, loaded at first use."""

from __future__ import annotations

import html
import logging
from collections.abc import Callable
from pathlib import Path

import ftfy
import torch
from torch import Tensor
from transformers import AutoModelForTextEncoding, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from flow_grpo.models.model_files import check_component, check_json, summarize
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.tensor_store import files_key

_LOCAL = {"local_files_only": True, "trust_remote_code": False}  # otherwise a folder's own code asks to be run
_log = logging.getLogger(__name__)


class TextEncoder:
    """Prompts to embeddings.

    Args:
        open_parts: loads network and tokenizer to the CPU.
        identity: identifies the weights in cache keys of encodings.
        device: where it runs.
        offload: keep the network in CPU memory while it is not in use.
    """

    def __init__(
        self,
        open_parts: Callable[[], tuple[PreTrainedModel, PreTrainedTokenizerBase]],
        identity: str,
        *,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.identity = identity
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
        _load_network(parts[0], dtype, device_map="meta")  # reads headers only
        _load_tokenizer(parts[1])
        return cls(lambda: _load(*parts, dtype), identity, device=device, offload=offload)

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
    repaired = html.unescape(html.unescape(ftfy.fix_text(prompt)))  # twice: "&amp;lt;" occurs in scraped captions
    return " ".join(repaired.split())


def _load(text_encoder: Path, tokenizer: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    network = _load_network(text_encoder, dtype)
    network.eval()  # type: ignore[no-untyped-call]
    return network, _load_tokenizer(tokenizer)


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(folder), **_LOCAL)
    except Exception as error:  # as in `_load_network`
        raise _not_loaded(folder, error) from error
    return tokenizer


def _not_loaded(folder: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:300]
    return ValueError(f"{folder} cannot be loaded ({type(error).__name__}: {reason}); download it again")


def _load_network(folder: Path, dtype: torch.dtype, **placement: str) -> PreTrainedModel:
    """Load the network; ValueError if a tensor is missing or has another shape, which transformers would draw anew."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # every rank would draw one
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its report is a table of lines
    try:
        network: PreTrainedModel
        network, report = AutoModelForTextEncoding.from_pretrained(
            str(folder),
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, too
            **_LOCAL,
            **placement,
        )
    except Exception as error:  # transformers raises a different type for each kind of nonsense in config.json
        raise _not_loaded(folder, error) from error
    finally:
        transformers_logging.set_verbosity(level)
    wrong = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if wrong:
        raise ValueError(f"{folder} lacks the weights of config.json for {summarize(wrong)}; download it again")
    return network
