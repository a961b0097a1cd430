"""What to do when the device has no memory left for an update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flow_grpo.runtime import device as device_door


@contextmanager
def memory_named(batch_size: int) -> Iterator[None]:
    """Inside, an error of a device without memory left comes with the knobs that need less.

    Args:
        batch_size: samples of a micro-batch.

    Raises:
        RuntimeError: in place of the device's own.
    """
    try:
        yield
    except RuntimeError as error:
        if not device_door.is_out_of_memory(error):
            raise
        smaller = f"--config.train.batch_size={batch_size // 2}, " if batch_size > 1 else ""
        raise RuntimeError(
            f"out of memory in the update of {batch_size} sample(s) at once: {error}; pass {smaller}"
            "--config.model.gradient_checkpointing=true, --config.sample.offload=true or "
            "--config.train.sharding=fsdp2, and go on from the last checkpoint"
        ) from error
