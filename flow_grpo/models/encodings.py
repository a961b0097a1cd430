"""Cache of the frozen encoders' outputs, in memory and optionally on disk.

A key identifies the source video by content, the prompt by the text that is tokenized, and the encoder by its weights,
so an entry is never stale.
Cameras are not cached: computing them takes 11 us, opening a file 430.

Letters: C F H W latent channels, frames, height, width, L D prompt tokens and width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from flow_grpo.models.codec import Codec
from flow_grpo.models.images import ImageEncoder
from flow_grpo.models.texts import TextEncoder, clean_prompt
from flow_grpo.records import Condition
from flow_grpo.runtime.tensor_store import TensorStore, content_key

Size: TypeAlias = tuple[int, int, int]

# Part of the key: change it when `data.video_io` changes how videos are read, resized or cropped.
PREPROCESSING = "fit 1"


class Encodings:
    """Source latents and prompt embeddings, encoded when they are not in the store.

    Args:
        codec: the video codec.
        texts: the text encoder.
        store: the cache.
        images: the image encoder, of models that have one.
        max_prompt_tokens: L; prompts are truncated and padded to it.
    """

    def __init__(
        self,
        codec: Codec,
        texts: TextEncoder,
        store: TensorStore,
        *,
        images: ImageEncoder | None = None,
        max_prompt_tokens: int,
    ) -> None:
        self.codec = codec
        self._texts, self._images, self._store = texts, images, store
        self._max_prompt_tokens = max_prompt_tokens

    def source(self, source_id: str, size: Size, video: Callable[[], Tensor]) -> Tensor:
        """Return (C, F, H, W) fp32 CPU latents of a source video.

        Args:
            source_id: identifies the video's content.
            size: (T, h, w) after resizing.
            video: returns (3, T, h, w) in [0, 1]; called only on a cache miss.
        """
        return self._store.get("sources", self._source_key(source_id, size), lambda: self.codec.encode(video()))

    def sources(self, conditions: Sequence[Condition]) -> Tensor:
        """Return (B, C, F, H, W) fp32 CPU latents of the source videos; each distinct video is encoded once."""
        return _of_distinct(conditions, self.source)

    def lacking(self, conditions: Sequence[Condition]) -> dict[str, Callable[[], Tensor]]:
        """Return key -> encoder of the source videos that are neither in memory nor on disk, each video once."""
        found: dict[str, Callable[[], Tensor]] = {}
        for condition in conditions:
            source_id = condition.source_id or content_key(condition.need_source())
            key = self._source_key(source_id, condition.size)
            if key not in found and not self._store.knows("sources", key):
                found[key] = functools.partial(self.source, source_id, condition.size, condition.need_source)
        return found

    def learn(self, latents: Mapping[str, Tensor]) -> None:
        """Take over what another process has encoded, by the keys of `lacking`."""
        for key, tensor in latents.items():
            self._store.put("sources", key, tensor)

    def first_frame(self, source_id: str, size: Size, video: Callable[[], Tensor]) -> Tensor:
        """Return (I, D) fp32 CPU features of a source video's first frame; arguments as in `source`."""
        assert self._images is not None, "the model has no image encoder"
        images = self._images
        key = self._frame_key(images, source_id, size)
        return self._store.get("images", key, lambda: images.embed(video()[:, 0]))

    def first_frames(self, conditions: Sequence[Condition]) -> Tensor:
        """Return (B, I, D) fp32 CPU features of the source videos' first frames, each distinct one encoded once."""
        return _of_distinct(conditions, self.first_frame)

    def prompt(self, prompt: str) -> Tensor:
        """Return (L, D) fp32 CPU embeddings, zero-padded after the prompt's own tokens.

        Encoding without padding gives the same as Wan's pipeline, which pads first and then zeroes the padding.
        """
        states = self._store.get(
            "prompts", self._prompt_key(prompt), lambda: self._texts.embed(prompt, self._max_prompt_tokens)
        )
        embeds = torch.zeros((self._max_prompt_tokens, states.shape[-1]))
        embeds[: len(states)] = states
        return embeds

    def prepare_source(self, source_id: str, size: Size, video: Callable[[], Tensor]) -> None:
        """Encode what there is to encode of a source video, see `source`, if it is not in the store."""
        self.source(source_id, size, video)
        if self._images is not None:
            self.first_frame(source_id, size, video)

    def knows_source(self, source_id: str, size: Size) -> bool:
        """Return whether all that `prepare_source` makes is on disk, undamaged."""
        images = self._images
        seen = images is None or self._store.has("images", self._frame_key(images, source_id, size))
        return seen and self._store.has("sources", self._source_key(source_id, size))

    def knows_prompt(self, prompt: str) -> bool:
        """Return whether a prompt's embeddings are on disk, undamaged."""
        return self._store.has("prompts", self._prompt_key(prompt))

    def _source_key(self, source_id: str, size: Size) -> str:
        return _video_key(f"codec {self.codec.identity}", source_id, size)

    def _frame_key(self, images: ImageEncoder, source_id: str, size: Size) -> str:
        # The frame is resized and cropped as the video is before the encoder sees it.
        return _video_key(f"image {images.identity}", source_id, size)

    def _prompt_key(self, prompt: str) -> str:
        return f"encoder {self._texts.identity} tokens {self._max_prompt_tokens} prompt {clean_prompt(prompt)}"


def _video_key(encoder: str, source_id: str, size: Size) -> str:
    frames, height, width = size
    return f"{PREPROCESSING} {encoder} size {frames}x{height}x{width} video {source_id}"


def _of_distinct(
    conditions: Sequence[Condition], encode: Callable[[str, Size, Callable[[], Tensor]], Tensor]
) -> Tensor:
    """Return what `encode` makes of the conditions' source videos, stacked; each distinct video is encoded once."""

    def encoded(condition: Condition) -> Tensor:
        video = condition.need_source()
        return encode(condition.source_id or content_key(video), condition.size, lambda: video)

    distinct = {_source_key(condition): condition for condition in conditions}
    results = {key: encoded(condition) for key, condition in distinct.items()}
    return torch.stack([results[_source_key(condition)] for condition in conditions])


def _source_key(condition: Condition) -> str | int:
    """Return a key of the source video among the conditions of one call: copies share the tensor object."""
    return condition.source_id or id(condition.source_video)
