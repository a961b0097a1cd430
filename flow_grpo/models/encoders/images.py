"""The frozen image encoder (CLIP), loaded at first use."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import CLIPVisionModel, PreTrainedModel

from flow_grpo.models.encoders.frozen import load_frozen
from flow_grpo.models.files.model_files import WAY_OUT, check_component
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.runtime.tensor_store import files_key

# Part of the identity: change it when `preprocess` changes.
PREPROCESSING = "squash 1"


class ImageEncoder:
    """Pictures to features of the penultimate layer, as Wan's image-to-video models take them.

    Args:
        open_network: loads the network to the CPU.
        mean: mean of each colour, subtracted from the pixels in [0, 1].
        std: standard deviation of each colour, by which the pixels are divided.
        identity: identifies weights and preprocessing in cache keys of encodings.
        width: width of a feature.
        device: where it runs.
        offload: keep the network in CPU memory while it is not in use.
    """

    def __init__(
        self,
        open_network: Callable[[], PreTrainedModel],
        mean: Sequence[float],
        std: Sequence[float],
        identity: str,
        *,
        width: int,
        device: torch.device,
        offload: bool = False,
    ) -> None:
        self.identity, self.width = identity, width
        self._open_network, self._mean, self._std = open_network, tuple(mean), tuple(std)
        self._device, self._offload = device, offload
        self._network: PreTrainedModel | None = None

    @classmethod
    def from_folder(
        cls, folder: Path, dtype: torch.dtype, *, device: torch.device, offload: bool = False
    ) -> ImageEncoder:
        """Return the encoder of a model folder's image_encoder/ and image_processor/, without loading weights.

        Raises:
            ValueError: a file is missing or damaged, or the weights are not those of config.json.
        """
        encoder, processor = folder / "image_encoder", folder / "image_processor"
        check_component(encoder)
        mean, std = _read_statistics(processor / "preprocessor_config.json")
        identity = f"{PREPROCESSING} {files_key(encoder)} {files_key(processor)} {dtype}"
        outline = load_frozen(CLIPVisionModel, encoder, dtype, device_map="meta")  # reads headers only
        return cls(
            lambda: load_frozen(CLIPVisionModel, encoder, dtype),
            mean,
            std,
            identity,
            width=outline.config.hidden_size,
            device=device,
            offload=offload,
        )

    @property
    def loaded(self) -> bool:
        """Whether the network is in memory."""
        return self._network is not None

    @torch.no_grad()
    def embed(self, frame: Tensor) -> Tensor:
        """Return (I, D) fp32 CPU features of a picture (3, h, w) in [0, 1]: the class token, then the patches."""
        network = self._network = self._network or self._open_network()
        pixels = preprocess(frame, network.config.image_size, self._mean, self._std)
        with device_api.visiting(network, self._device, stays=not self._offload):
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


def _read_statistics(file: Path) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation of each colour; ValueError unless they are three fitting numbers each."""
    if not file.is_file():
        raise ValueError(f"{file} is missing; {WAY_OUT}")
    found = read_json_object(file, WAY_OUT)
    for name, least in (("image_mean", -math.inf), ("image_std", 0.0)):
        numbers: Any = found.get(name)
        right = isinstance(numbers, list) and len(numbers) == 3
        if not right or not all(type(one) in (int, float) and least < one < math.inf for one in numbers):
            raise ValueError(f"{file}: {name} is {numbers!r:.100}, must be 3 finite numbers above {least:g}; {WAY_OUT}")
    return found["image_mean"], found["image_std"]
