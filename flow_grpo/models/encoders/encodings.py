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

from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.encoders.images import ImageEncoder
from flow_grpo.models.encoders.texts import TextEncoder
from flow_grpo.records import Condition
from flow_grpo.runtime.prompt_text import clean_prompt
from flow_grpo.runtime.tensor_store import TensorStore, content_key

Size: TypeAlias = tuple[int, int, int]

# Part of the key: change it when `data.video_io` changes how videos are read, resized or cropped.
PREPROCESSING = "fit 1"


class Encodings:
    """Source latents and prompt embeddings, encoded when they are not in the store.

    Prompts are truncated and padded to `max_prompt_tokens`, L; some models have an image encoder.
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
        self._texts, self._store, self._max_prompt_tokens = texts, store, max_prompt_tokens
        # Kind in the store -> the encoder's part of the key, and what it makes of a video.
        self._kinds: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
            "sources": (f"codec {codec.identity}", lambda video: codec.encode(video))
        }
        if images is not None:
            self._kinds["images"] = f"image {images.identity}", lambda video: images.embed(video[:, 0])

    def sources(self, conditions: Sequence[Condition]) -> Tensor:
        """Return (B, C, F, H, W) fp32 CPU latents of the source videos; each distinct video is encoded once."""
        return self._of_distinct("sources", conditions)

    def first_frames(self, conditions: Sequence[Condition]) -> Tensor:
        """Return (B, I, D) fp32 CPU features of the source videos' first frames; each distinct one is encoded once."""
        return self._of_distinct("images", conditions)

    def lacking(self, conditions: Sequence[Condition]) -> dict[str, Callable[[], Tensor]]:
        """Return key -> encoder of the source videos that are neither in memory nor on disk, each video once."""
        found: dict[str, Callable[[], Tensor]] = {}
        for condition in conditions:
            source_id = condition.source_id or content_key(condition.need_source())
            key = self._key("sources", source_id, condition.size)
            if key not in found and not self._store.has("sources", key):
                encode = functools.partial(self.codec.encode, condition.need_source())
                found[key] = functools.partial(self._store.get, "sources", key, encode)
        return found

    def learn(self, latents: Mapping[str, Tensor]) -> None:
        """Take over what another process has encoded, by the keys of `lacking`."""
        for key, tensor in latents.items():
            self._store.put("sources", key, tensor)

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
        """Encode what is not in the store of a source video of size (T, h, w), called for only if something is missing.

        `source_id` identifies its content; `video` returns (3, T, h, w) in [0, 1].
        """
        for kind, (_, encode) in self._kinds.items():
            self._store.get(kind, self._key(kind, source_id, size), lambda encode=encode: encode(video()))  # type: ignore[misc]

    def knows_source(self, source_id: str, size: Size) -> bool:
        """Return whether all that `prepare_source` makes is on disk, undamaged."""
        return all(self._store.has(kind, self._key(kind, source_id, size)) for kind in self._kinds)

    def knows_prompt(self, prompt: str) -> bool:
        """Return whether a prompt's embeddings are on disk, undamaged."""
        return self._store.has("prompts", self._prompt_key(prompt))

    def _key(self, kind: str, source_id: str, size: Size) -> str:
        # A frame is resized and cropped as the video is before its encoder sees it.
        frames, height, width = size
        return f"{PREPROCESSING} {self._kinds[kind][0]} size {frames}x{height}x{width} video {source_id}"

    def _of_distinct(self, kind: str, conditions: Sequence[Condition]) -> Tensor:
        found: dict[str | int, Tensor] = {}
        copies = [condition.source_id or id(condition.source_video) for condition in conditions]  # they share a tensor
        for copy, condition in zip(copies, conditions, strict=True):
            if copy not in found:
                video = condition.need_source()
                key = self._key(kind, condition.source_id or content_key(video), condition.size)
                found[copy] = self._store.get(kind, key, functools.partial(self._kinds[kind][1], video))
        return torch.stack([found[copy] for copy in copies])

    def _prompt_key(self, prompt: str) -> str:
        return f"encoder {self._texts.identity} tokens {self._max_prompt_tokens} prompt {clean_prompt(prompt)}"
