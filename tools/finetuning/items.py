"""What `tools/finetune_recam.py` reads: items with their cost and weight. Loader processes import this file alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from torch.utils.data import Dataset

from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.records import Condition
from flow_grpo.runtime.json_files import read_json_object

LARGEST = sys.float_info.max


@dataclasses.dataclass
class Items(Dataset[Condition | str]):
    """Conditions by index; an unreadable one is its error text, as loader workers wrap exceptions in tracebacks."""

    dataset: MultiCamDataset

    def __getitem__(self, index: int) -> Condition | str:
        try:
            return self.dataset.condition(index)
        except (ValueError, OSError) as error:
            return f"item {index} cannot be read: {error}"


def item_tokens(by_size: Mapping[tuple[int, int, int], int], item: Condition | str) -> int:
    """Return the target tokens of an item, 1 for one that cannot be read."""
    return 1 if isinstance(item, str) else by_size[item.size]


def item_weights(file: Path, dataset: MultiCamDataset) -> list[float]:
    """Return every item's weight by a file of names and weights; ValueError for an unusable one."""
    weights = read_json_object(file, "write it again")
    for name, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= LARGEST:
            raise ValueError(f"--weights {file}: {name} has weight {weight!r}, must be a number of at least 0")
    found, unused = [], set(weights)
    for index in range(len(dataset)):
        parts = "/".join(dataset.name_of(index)).split("/")
        names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
        name = next((name for name in names if name in weights), "")
        unused.discard(name)
        found.append(float(weights.get(name, 1.0)))
    if unused:
        first = "/".join(dataset.name_of(0))
        raise ValueError(f"--weights {file}: {min(unused)!r} names no item or folder; items are named like {first!r}")
    return found
