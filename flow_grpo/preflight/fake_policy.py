"""The real policy without weights: networks of fake tensors, which have shapes and types and no memory.

Everything is built from the configurations in the model folder, or from those of Wan2.1-T2V-1.3B where there is none,
so that a recipe can be walked through before weights or machines are there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flow_grpo.models.codec import Codec, read_config
from flow_grpo.models.recam_policy import DTYPES, Networks, RecamPolicy
from flow_grpo.models.texts import TextEncoder
from flow_grpo.preflight.footprint import WAN_1_3B, fake_transformer
from flow_grpo.settings.schema import Config


def transformer_config(config: Config) -> dict[str, Any]:
    """Return the configuration of the recipe's transformer."""
    file = Path(config.model.path, "transformer", "config.json")
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return dict(WAN_1_3B) | stored


def codec_config(config: Config) -> Mapping[str, Any]:
    """Return the configuration of the recipe's codec."""
    folder = Path(config.model.path, "vae")
    if (folder / "config.json").is_file():
        return read_config(folder)
    with torch.device("meta"):
        found: Mapping[str, Any] = AutoencoderKLWan().config
    return found


def outline(config: Config) -> RecamPolicy:
    """Return a policy of fake tensors; call it, and use what it returns, inside `without_memory`.

    Adapters are left out: fake networks take none, and no shape of a recipe depends on them. Blocks are alike: two
    stand for all.

    Raises:
        ValueError: the codec's scale factors are not those of its layers.
    """
    device, codec, model = torch.device("cpu"), codec_config(config), config.model
    settings = transformer_config(config)
    settings["num_layers"] = min(2, settings["num_layers"])
    transformer, _ = fake_transformer(settings, DTYPES[model.dtype], model)
    if model.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()
    networks = Networks(
        transformer=transformer,
        codec=Codec(codec, lambda _: _fake_codec(codec), "outline", device=device, slicing=model.vae_slicing),
        texts=_Texts(settings["text_dim"]),
    )
    return RecamPolicy(
        networks,
        guidance_scale=config.sample.guidance_scale,
        negative_prompt=config.sample.negative_prompt,
        max_prompt_tokens=model.max_prompt_tokens,
        dtype=DTYPES[model.dtype],
        device=device,
    )


def without_memory() -> AbstractContextManager[object]:
    """Return the context in which an outline computes: tensors made inside have no memory."""
    return FakeTensorMode()


class _Texts(TextEncoder):
    """Embeddings of the right width, of no text."""

    def __init__(self, width: int) -> None:
        super().__init__(_nothing, "outline", device=torch.device("cpu"))
        self._width = width

    def embed(self, prompt: str, max_tokens: int) -> Tensor:  # noqa: ARG002 - every prompt is as long as it may be
        """Return (max_tokens, D) embeddings."""
        return torch.empty(max_tokens, self._width)


def _nothing() -> Any:
    raise AssertionError("an outline has no text encoder")


def _fake_codec(codec: Mapping[str, Any]) -> AutoencoderKLWan:
    network: AutoencoderKLWan = AutoencoderKLWan.from_config(dict(codec))
    return network
