"""Seeds by hashing: seed + step would repeat random streams across seeds, a hash of (seed, step) does not."""

from __future__ import annotations

from hashlib import blake2b

import torch


def key(*parts: object) -> int:
    """Return a 63-bit hash of the parts and their order, identical in every process and on every machine."""
    text = "|".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a CPU generator seeded with `key(*parts)`; draw on the CPU to be independent of the device.

    torch seeds it with the lower 32 bits: two streams are the same with probability 2^-32.
    """
    return torch.Generator().manual_seed(key(*parts))
