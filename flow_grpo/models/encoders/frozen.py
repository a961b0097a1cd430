"""Load a frozen network of the transformers library, every tensor of it from the folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from flow_grpo.models.files.model_files import summarize

LOCAL = {"local_files_only": True, "trust_remote_code": False}  # otherwise a folder's own code asks to be run


def load_frozen(kind: Any, folder: Path, dtype: torch.dtype, **placement: str) -> PreTrainedModel:
    """Load a network in eval mode, without gradients.

    Args:
        kind: a class with transformers' `from_pretrained`.
        folder: holds config.json and weights.
        dtype: dtype of the weights.
        placement: `device_map="meta"` reads the headers only.

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
    network.eval()  # type: ignore[no-untyped-call]
    network.requires_grad_(False)
    return network


def not_loaded(folder: Path, error: Exception) -> ValueError:
    """Return the error that says in one line why a folder cannot be loaded."""
    reason = " ".join(str(error).split())[:300]
    return ValueError(f"{folder} cannot be loaded ({type(error).__name__}: {reason}); download it again")
