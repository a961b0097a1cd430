"""Prompts from a text or CSV file, for models that make a video from its description alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from flow_grpo.data.dataset import ConditionDataset
from flow_grpo.data.video_io import Size
from flow_grpo.records import Condition
from flow_grpo.runtime.json_files import read_table, read_text

COLUMN = "prompt"


class PromptDataset(ConditionDataset):
    """One condition a prompt, without source video and camera.

    Prompts are distinct. Messages have the `name` of their file.
    """

    def __init__(self, prompts: Sequence[str], size: Size, name: str) -> None:
        self.prompts, self._size, self._name = tuple(prompts), size, name

    def __len__(self) -> int:
        return len(self.prompts)

    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Build the condition at an index; every prompt is a scene of its own."""
        scene = f"prompt-{index:05d}"
        return Condition(
            index=index, gid=gid, slot=slot, prompt=self.prompts[index], scene=scene, wanted_size=self._size
        )

    def prompt_of(self, index: int) -> str:
        """Prompt of the item."""
        return self.prompts[index]

    def fingerprint(self) -> str:
        """Hash of the prompts in their order: what an index means."""
        return hashlib.blake2b("\n".join(self.prompts).encode(), digest_size=16).hexdigest()

    def contents(self) -> str:
        """The fingerprint: the prompts are the data."""
        return self.fingerprint()

    def cameras(self) -> list[str]:
        """No camera is commanded."""
        return []

    def has_scene_file(self, name: str) -> bool:  # noqa: ARG002
        """There are no scene folders."""
        return False

    def check_apart(self, held_out: ConditionDataset) -> None:
        """Raise ValueError if a prompt here is also held out."""
        assert isinstance(held_out, PromptDataset)
        if shared := sorted(set(self.prompts) & set(held_out.prompts)):
            raise ValueError(
                f"{len(shared)} prompts of {held_out._name} are in {self._name}, too, such as {shared[0]!r:.80}: what "
                "is held out must not be trained on; remove them from one of the two"
            )


def read_prompts(file: Path) -> list[str]:
    """Read the prompts of a text file, one a line, or of the column `prompt` of a .csv; empty ones are left out.

    Raises:
        ValueError: no such file, no text or table, no such column, no prompt, or a prompt that occurs twice.
    """
    way_out = "give a text file with a prompt a line, or a .csv with a column prompt"
    if file.suffix.lower() == ".csv":
        lines = [row[COLUMN] for row in read_table(file, [COLUMN], way_out)]
    else:
        lines = read_text(file, way_out).splitlines()
    prompts: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        prompt = " ".join(line.split())
        if prompt in prompts:
            raise ValueError(
                f"{file}: prompts {prompts[prompt]} and {number} are the same, {prompt!r:.80}; a prompt's copies are "
                "sampled by sample.k, remove one"
            )
        if prompt:
            prompts[prompt] = number
    if not prompts:
        raise ValueError(f"{file} holds no prompt; give one a line")
    return list(prompts)
