"""One hash for every seed of a run: seeds are hashed, never added, so no two streams can coincide by arithmetic."""

from __future__ import annotations

from hashlib import blake2b

import torch


def key(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part and on their order, alike on every machine and process."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a CPU generator seeded with `key(*parts)`; CPU draws are the same on every device."""
    return torch.Generator().manual_seed(key(*parts))
