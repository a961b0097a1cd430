"""What the frozen encoders make of conditions, each distinct input once: kept in memory, on disk where one is given.

Keys are made of content: of the source video or the prompt, and of the encoder's weights. So a changed video is encoded
anew, by another encoder as well, and of two conditions with one source video one is encoded. Cameras are 12 numbers a
latent frame and not kept: computing them takes 11 us, opening a file 430.

Letters: C F H W latent channels, frames, height, width, L D prompt tokens and width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from flow_grpo.models.codec import Codec
from flow_grpo.models.texts import TextEncoder, clean
from flow_grpo.runtime.tensor_store import TensorStore

Size: TypeAlias = tuple[int, int, int]

PREPROCESSING = "fit 1"  # to be raised when `data.video_io` reads, resizes or crops videos to other pixels


class Encodings:
    """Encodes what is not remembered.

    Args:
        codec: the video codec.
        texts: the text encoder.
        store: where encodings are kept.
        max_prompt_tokens: L, prompts are cut and padded to it.
    """

    def __init__(self, codec: Codec, texts: TextEncoder, store: TensorStore, *, max_prompt_tokens: int) -> None:
        self._codec, self._texts, self._store = codec, texts, store
        self._max_prompt_tokens = max_prompt_tokens

    def source(self, source_id: str, size: Size, video: Callable[[], Tensor]) -> Tensor:
        """Return (C, F, H, W) fp32 CPU latents of a source video.

        Args:
            source_id: names the video's content.
            size: its frames, rows and columns as the model takes it.
            video: gives (3, T, h, w) in [0, 1] when it must be encoded.
        """
        return self._store.get("sources", self._source_key(source_id, size), lambda: self._codec.encode(video()))

    def prompt(self, prompt: str) -> Tensor:
        """Return (L, D) fp32 CPU embeddings, zero after the prompt's true length.

        The text is encoded and kept without padding: the same as padding first and blanking the padding's embeddings.
        """
        states = self._store.get(
            "prompts", self._prompt_key(prompt), lambda: self._texts.embed(prompt, self._max_prompt_tokens)
        )
        embeds = torch.zeros((self._max_prompt_tokens, states.shape[-1]))
        embeds[: len(states)] = states
        return embeds

    def knows_source(self, source_id: str, size: Size) -> bool:
        """Tell whether a source video's latents are on disk, soundly."""
        return self._store.has("sources", self._source_key(source_id, size))

    def knows_prompt(self, prompt: str) -> bool:
        """Tell whether a prompt's embeddings are on disk, soundly."""
        return self._store.has("prompts", self._prompt_key(prompt))

    def _source_key(self, source_id: str, size: Size) -> str:
        frames, rows, columns = size
        return f"{PREPROCESSING} codec {self._codec.identity} size {frames}x{rows}x{columns} video {source_id}"

    def _prompt_key(self, prompt: str) -> str:
        return f"encoder {self._texts.identity} tokens {self._max_prompt_tokens} prompt {clean(prompt)}"
