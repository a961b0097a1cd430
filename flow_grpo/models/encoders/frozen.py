"""Frozen networks of the transformers library: every tensor from the folder, loaded at first use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from flow_grpo.models.files.model_files import check_finite, summarize
from flow_grpo.runtime import device as device_api

LOCAL = {"local_files_only": True, "trust_remote_code": False}  # otherwise a folder's own code asks to be run


class FrozenEncoder:
    """A network that is loaded at first use.

    Args:
        open_network: loads it to the CPU.
        identity: identifies its weights and their input in cache keys of encodings.
        width: width of an embedding.
        device: where it runs.
        offload: keep it in CPU memory while it is not in use.
    """

    def __init__(
        self,
        open_network: Callable[[], PreTrainedModel],
        identity: str,
        *,
        width: int,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.identity, self.width = identity, width
        self._open_network, self._device, self._offload = open_network, device, offload
        self._network: PreTrainedModel | None = None

    @contextlib.contextmanager
    def _ready(self) -> Iterator[PreTrainedModel]:
        if self._network is None:
            self._network = self._open_network()
        with device_api.visiting(self._network, self._device, stays=not self._offload):
            yield self._network


def load_frozen(kind: Any, folder: Path, dtype: torch.dtype, **placement: str) -> PreTrainedModel:
    """Load a network of a transformers class in eval mode, without gradients; `device_map="meta"` reads headers only.

    Raises:
        ValueError: the folder cannot be loaded, or a tensor is missing or has another shape, which transformers would
            draw anew.
    """
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # every rank would draw one
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its report is a table of lines
    try:
        network: PreTrainedModel
        network, report = kind.from_pretrained(
            str(folder),
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the report, too
            **LOCAL,
            **placement,
        )
    except Exception as error:  # transformers raises a different type for each kind of nonsense in config.json
        raise not_loaded(folder, error) from error
    finally:
        transformers_logging.set_verbosity(level)
    wrong = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if wrong:
        raise ValueError(f"{folder} lacks the weights of config.json for {summarize(wrong)}; download it again")
    check_finite(dict(network.named_parameters()), folder)
    network.eval()  # type: ignore[no-untyped-call]
    network.requires_grad_(False)
    return network


def not_loaded(folder: Path, error: Exception) -> ValueError:
    """Return the error that says in one line why a folder cannot be loaded."""
    reason = " ".join(str(error).split())[:300]
    return ValueError(f"{folder} cannot be loaded ({type(error).__name__}: {reason}); download it again")
