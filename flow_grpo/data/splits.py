"""The data a recipe trains and evaluates on: the videos of a folder, or prompts alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias, TypeVar

from flow_grpo.data.exclude import Verdicts, read_verdicts, settings_of
from flow_grpo.data.multicam import MultiCamDataset, Scene, contents_by_scene
from flow_grpo.data.prompts import PromptDataset, read_prompts
from flow_grpo.maths.keys import key
from flow_grpo.settings.schema import DataConfig, EvalConfig
from flow_grpo.settings.values import parse_bucket

Item = TypeVar("Item")
Split: TypeAlias = MultiCamDataset | PromptDataset
"""A data set that a run trains or evaluates on."""


def multicam_data(data: DataConfig, split: str, choose: Callable[[list[Scene]], list[Scene]] = list) -> MultiCamDataset:
    """List a split of the videos below `data.root`, without the training items that `data.exclude` names.

    By default it has all scenes of the split.
    """

    def excluded(scenes: list[Scene]) -> Verdicts:
        return read_verdicts(Path(data.exclude), settings_of(data), contents_by_scene(scenes))

    return MultiCamDataset(
        data.root,
        split,
        (data.num_frames, data.height, data.width),
        prompt=data.prompt,
        reference=data.reference,
        buckets=[parse_bucket(text) for text in data.buckets],
        choose=choose,
        exclude=excluded if data.exclude and split == data.train_split else None,
    )


def prompt_data(data: DataConfig, file: str, choose: Callable[[list[str]], list[str]] = list) -> PromptDataset:
    """Read the prompts of a file, by default all."""
    return PromptDataset(choose(read_prompts(Path(file))), (data.num_frames, data.height, data.width), file)


def training_data(data: DataConfig) -> Split:
    """Conditions to train on: the training split without what `data.tune_scenes` sets aside.

    Raises:
        ValueError: the data are missing or unusable.
    """
    return _training_split(data, held=False)


def held_out_data(data: DataConfig, evaluation: EvalConfig) -> Split:
    """Conditions that `eval.split` evaluates on: the reported ones, or those set aside.

    Raises:
        ValueError: the data are missing or unusable.
    """
    if evaluation.split != "report":
        return _training_split(data, held=True)
    return prompt_data(data, data.eval_prompts) if data.prompts else multicam_data(data, data.eval_split)


def whole_splits(data: DataConfig) -> list[Split]:
    """All that a run may train or evaluate on.

    Raises:
        ValueError: the data are missing or unusable.
    """
    if data.prompts:
        return [prompt_data(data, file) for file in (data.prompts, data.eval_prompts)]
    return [multicam_data(data, split) for split in (data.train_split, data.eval_split)]


def set_aside(
    items: Sequence[Item], count: int, kind: str, name: Callable[[Item], str]
) -> tuple[list[Item], list[Item]]:
    """Part items into (the others, `count`), each in the given order, by a hash of their distinct names.

    The items' `kind` is "scenes" or "prompts".

    Raises:
        ValueError: no item would be left.
    """
    if count >= len(items):
        raise ValueError(
            f"data.tune_scenes is {count}, must be below the {len(items)} training {kind} there are; lower it, 0 sets "
            "none aside"
        )
    chosen = set(sorted(map(name, items), key=lambda text: key(f"tune {kind}", text))[:count])
    return [item for item in items if name(item) not in chosen], [item for item in items if name(item) in chosen]


def _training_split(data: DataConfig, *, held: bool) -> Split:
    # What `data.tune_scenes` sets aside of the training data if `held`, else the rest.
    count = data.tune_scenes
    if data.prompts:
        return prompt_data(data, data.prompts, lambda prompts: set_aside(prompts, count, "prompts", str)[held])
    name = attrgetter("name")
    return multicam_data(data, data.train_split, lambda scenes: set_aside(scenes, count, "scenes", name)[held])
