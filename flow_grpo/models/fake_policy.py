"""WanPolicy on fake tensors: real shapes, dtypes and operations, but no weights and no memory.

Networks are built from the configuration files of the model folder. Missing files and fields take the values of the
published model, so a recipe can be checked and planned before its weights are downloaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from flow_grpo.models.adapters import trained_names
from flow_grpo.models.encoders.codec import NETWORK_DTYPE, Codec, read_config
from flow_grpo.models.encoders.encodings import Encodings
from flow_grpo.models.encoders.texts import TextEncoder
from flow_grpo.models.networks.recomputation import set_checkpointing
from flow_grpo.models.registry import video_model
from flow_grpo.models.video_model import VideoModel
from flow_grpo.models.wan_policy import Networks, WanPolicy
from flow_grpo.records import Condition, Conditioning, Guidance
from flow_grpo.runtime.device import DTYPES
from flow_grpo.settings.schema import Config, ModelConfig


def transformer_config(model: VideoModel, model_folder: str | Path) -> dict[str, Any]:
    """Return the configuration of a model folder's transformer."""
    file = Path(model_folder, "transformer", "config.json")
    return dict(model.published) | (json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {})


class FakePolicy(WanPolicy):
    """A `WanPolicy` whose networks are fake: two transformer blocks, no text encoder.

    No shape depends on the number of blocks. Methods take real or fake tensors and return fake ones, so the rollout and
    the update run on it unchanged.

    Raises:
        ConfigError: the recipe's policy is one of the user's own.
        ValueError: the codec's scale factors contradict its layers.
    """

    def __init__(self, config: Config) -> None:
        own = video_model(config.model.kind)
        self.fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # the context in which new tensors are fake
        device, model, codec = torch.device("cpu"), config.model, read_config(Path(config.model.path, "vae"))
        settings = transformer_config(own, model.path)
        settings["num_layers"] = min(2, settings["num_layers"])
        with self.fake_mode:
            transformer = fake_transformer(own, settings, model)
            set_checkpointing(transformer, "none" if model.checkpointing == "none" else "blocks")

            def inputs(_: Encodings, conditions: Sequence[Condition]) -> dict[str, Tensor]:
                shapes = own.input_shapes(len(conditions), self.latent_size(conditions[0].size), settings)
                return {name: torch.empty(shape) for name, shape in shapes.items()}

            def open_codec(_: str) -> AutoencoderKLWan:
                with _default_dtype(NETWORK_DTYPE[model.vae_dtype]):
                    made: AutoencoderKLWan = AutoencoderKLWan.from_config(dict(codec))
                return made

            untiled = dataclasses.replace(model, vae_tiling=False, offload=False)
            networks = Networks(
                model=dataclasses.replace(own, inputs=inputs),  # making them may look at values, which fakes have not
                transformer=transformer,
                codec=Codec(codec, open_codec, "fake", untiled, device),
                texts=_FakeTextEncoder(_no_network, _no_network, "fake", width=settings["text_dim"], device=device),
            )
            guidance = Guidance(config.sample.guidance_scale, config.sample.negative_prompt)
            super().__init__(networks, model, guidance, device)

    def encode(self, conditions: Sequence[Condition], guidance: Guidance | None = None) -> Conditioning:
        """Return fake conditioning of the right shapes."""
        with self.fake_mode:
            return super().encode(conditions, guidance)

    def velocity(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """Return a fake velocity (B, C, F, H, W)."""
        with self.fake_mode:
            return super().velocity(latents, sigma, conditioning)

    def decode(self, latents: Tensor) -> Tensor:
        """Return fake videos (B, 3, T, h, w)."""
        with self.fake_mode:
            return super().decode(latents)


def fake_transformer(video_model: VideoModel, config: Mapping[str, Any], model: ModelConfig) -> WanTransformer3DModel:
    """Return a transformer with the adapters and the gradient flags of `model`; call it inside a `FakeTensorMode`."""
    with _default_dtype(DTYPES[model.dtype]):
        network: Any = video_model.network.from_config(dict(config))
    adapted, names = {}, set()
    if model.trained == "lora":
        linear = {name: part for name, part in network.named_modules() if isinstance(part, nn.Linear)}
        adapted = {name: part for name, part in linear.items() if re.fullmatch(model.lora_targets, name)}
        whole = [name for name in linear if name.rpartition(".")[2] in model.lora_full_modules]
        names = {f"{name}.{leaf}" for name in whole for leaf in ("weight", "bias")}
    else:
        names = trained_names(network, model.trained)
    for name, parameter in list(network.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        # Trained weights are fp32, and autocast keeps half-precision copies of them for the backward.
        made = nn.Parameter(parameter.detach().float(), True) if name in names else parameter.requires_grad_(False)
        network.get_submodule(owner)._parameters[leaf] = made
    for name, part in adapted.items():
        network.set_submodule(name, FakeAdapter(part, model.lora_rank))
    found: WanTransformer3DModel = network.eval()
    return found


class FakeAdapter(nn.Module):
    """A frozen linear layer and its low-rank adapter, with the operations of peft's, which no fake network can have."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(rank, frozen.out_features, bias=False, dtype=torch.float32)

    def forward(self, given: Tensor) -> Tensor:
        """Return the layer's output, adapted."""
        output: Tensor = self.frozen(given) + self.up(self.down(given.float())) * 1.0
        return output


class _FakeTextEncoder(TextEncoder):
    """Returns embeddings of the right shape; there is no network behind it."""

    def embed(self, prompt: str, max_tokens: int) -> Tensor:  # noqa: ARG002 - the longest prompt stands for all
        """Return (max_tokens, D) embeddings."""
        return torch.empty(max_tokens, self.width)


def _no_network() -> Any:
    raise AssertionError("a fake policy has no encoder")


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    # Networks are made in the dtype, since fake parameters cannot be cast afterwards.
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
