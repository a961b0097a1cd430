"""Prompts from a text, CSV or JSON Lines file, for models that make a video from its description alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from flow_grpo.data.dataset import ConditionDataset
from flow_grpo.data.video_io import Size
from flow_grpo.records import Condition
from flow_grpo.runtime.json_files import read_json_lines, read_table, read_text
from flow_grpo.runtime.prompt_text import clean_prompt

COLUMN = "prompt"
ENDINGS = (".txt", ".csv", ".jsonl")


class PromptDataset(ConditionDataset):
    """One condition a prompt, without source video and camera.

    Prompts are distinct. Messages have the `name` of their file.
    """

    def __init__(self, prompts: Sequence[str], size: Size, fps: float, name: str) -> None:
        self.prompts, self._size, self._fps, self._name = tuple(prompts), size, fps, name

    def __len__(self) -> int:
        return len(self.prompts)

    def make(self, index: int, gid: int, slot: int) -> Condition:
        """Build the condition at an index; every prompt is a scene of its own."""
        scene = f"prompt-{index:05d}"
        prompt = self.prompts[index]
        return Condition(index, gid, slot, prompt, scene=scene, wanted_size=self._size, fps=self._fps)

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
    """Read the prompts of a file of `ENDINGS`, cleaned; empty ones are left out.

    Raises:
        ValueError: another ending, no such file, not what the ending says, no column or field `prompt`, no prompt, or
            prompts that occur twice.
    """
    way_out = "give a .txt with a prompt a line, a .csv with a column prompt or a .jsonl with a field prompt"
    ending = file.suffix.lower()
    if ending not in ENDINGS:
        raise ValueError(f"{file} ends in {file.suffix or 'nothing'}, must end in {', '.join(ENDINGS)}; {way_out}")
    if ending == ".csv":
        texts = [row[COLUMN] for row in read_table(file, [COLUMN], way_out)]
    elif ending == ".jsonl":
        texts = []
        for number, row in read_json_lines(file, way_out):
            if not (isinstance(row, dict) and isinstance(row.get(COLUMN), str)):
                raise ValueError(f"{file}: line {number} has no text {COLUMN}; {way_out}")
            texts.append(row[COLUMN])
    else:
        texts = read_text(file, way_out).split("\n")  # not at U+2028 and its like, which captions have inside
    numbers: dict[str, list[int]] = {}
    for number, text in enumerate(texts, 1):
        numbers.setdefault(clean_prompt(text), []).append(number)
    numbers.pop("", None)
    if not numbers:
        raise ValueError(f"{file} holds no prompt; give one a line")
    if twice := {prompt: found for prompt, found in numbers.items() if len(found) > 1}:
        prompt, found = next(iter(twice.items()))
        raise ValueError(
            f"{file}: {len(twice)} prompts occur more than once, first {prompt!r:.80} (numbers "
            f"{', '.join(map(str, found[:5]))}); a prompt's copies are sampled by sample.k, keep one of each"
        )
    return list(numbers)
