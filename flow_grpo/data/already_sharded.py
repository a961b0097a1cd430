"""Batch samplers that yield one rank's batches only, and therefore refuse to be sharded again by accelerate."""

from __future__ import annotations


class AlreadySharded:
    """A batch sampler whose batches are this rank's own.

    `accelerator.prepare` around its loader would, on W processes, keep one in W of them and lose the rest in silence.
    accelerate's `BatchSamplerShard` reads `drop_last` when it is made; torch's DataLoader does not. So reading refuses.
    """

    @property
    def drop_last(self) -> bool:
        """Refuse to be sharded.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"{type(self).__name__} yields this rank's batches already, so accelerator.prepare would lose all but one "
            "in num_processes of them; prepare model and optimizer only, and iterate over the loader as it is"
        )
