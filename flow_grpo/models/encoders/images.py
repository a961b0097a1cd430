"""The frozen image encoder (CLIP)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import CLIPVisionModel, PreTrainedModel

from flow_grpo.models.encoders.frozen import FrozenEncoder, load_frozen
from flow_grpo.models.files.model_files import WAY_OUT, check_component, read_statistics
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.runtime.tensor_store import files_key

# Part of the identity: change it when `preprocess` changes.
PREPROCESSING = "squash 1"


class ImageEncoder(FrozenEncoder):
    """Pictures to features of the penultimate layer, as Wan's image-to-video models take them."""

    def __init__(
        self,
        open_network: Callable[[], PreTrainedModel],
        mean: Sequence[float],
        std: Sequence[float],
        identity: str,
        **settings: Any,
    ) -> None:
        super().__init__(open_network, identity, **settings)
        self._mean, self._std = tuple(mean), tuple(std)

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, **placement: Any) -> ImageEncoder:
        """Return the encoder of a model folder's image_encoder/ and image_processor/, without loading weights.

        ValueError if a file is missing or damaged, or the weights are not those of config.json.
        """
        encoder, processor = folder / "image_encoder", folder / "image_processor"
        check_component(encoder)
        file = processor / "preprocessor_config.json"
        if not file.is_file():
            raise ValueError(f"{file} is missing; {WAY_OUT}")
        mean, std = read_statistics(file, read_json_object(file, WAY_OUT), ("image_mean", "image_std"), 3)
        identity = f"{PREPROCESSING} {files_key(encoder)} {files_key(processor)} {dtype}"
        outline = load_frozen(CLIPVisionModel, encoder, dtype, device_map="meta")  # reads headers only
        open_network = functools.partial(load_frozen, CLIPVisionModel, encoder, dtype)
        return cls(open_network, mean, std, identity, width=outline.config.hidden_size, **placement)

    @torch.no_grad()
    def embed(self, frame: Tensor) -> Tensor:
        """Return (I, D) fp32 CPU features of a picture (3, h, w) in [0, 1]: the class token, then the patches."""
        with self._ready() as network:
            pixels = preprocess(frame, network.config.image_size, self._mean, self._std)
            layers = network(pixels.to(self._device, network.dtype), output_hidden_states=True).hidden_states
        features: Tensor = layers[-2][0]
        return features.float().cpu()


def preprocess(frame: Tensor, side: int, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return (1, 3, side, side) fp32 normalised pixels of a picture (3, h, w) in [0, 1].

    The whole picture is squashed to a square without antialiasing, as in Wan's own code (wan/modules/clip.py) and the
    code that ReDirector was trained with. diffusers' pipeline instead crops the centre and antialiases, which gives
    other features.
    """
    batch = rearrange(frame.float().cpu(), "c h w -> 1 c h w")
    small = interpolate(batch, size=(side, side), mode="bicubic", align_corners=False)
    return (small - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)
