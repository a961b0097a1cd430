"""The data a recipe trains and evaluates on: the videos of a folder, or prompts alone; ValueError if unusable."""

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
    size = data.num_frames, data.height, data.width
    return PromptDataset(choose(read_prompts(Path(file))), size, data.fps, file)


def training_data(data: DataConfig) -> Split:
    """Conditions to train on: the training split without what is set aside."""
    return _training_split(data, 0)


def held_out_data(data: DataConfig, evaluation: EvalConfig) -> Split:
    """Conditions that `eval.split` evaluates on: those set aside, or of `data.eval_split` where none are to report."""
    if evaluation.split == "tune" or data.report_scenes:
        return _training_split(data, 1 if evaluation.split == "tune" else 2)
    return prompt_data(data, data.eval_prompts) if data.prompts else multicam_data(data, data.eval_split)


def whole_splits(data: DataConfig) -> list[Split]:
    """All that a run may train or evaluate on."""
    whole = prompt_data(data, data.prompts) if data.prompts else multicam_data(data, data.train_split)
    return [whole] if data.report_scenes else [whole, held_out_data(data, EvalConfig())]


def set_aside(
    items: Sequence[Item], tune: int, report: int, kind: str, name: Callable[[Item], str]
) -> tuple[list[Item], list[Item], list[Item]]:
    """Part items into (the others, `tune`, `report`), each in the given order, by a hash of their distinct names.

    The items' `kind` is "scenes" or "prompts". How many are reported does not change which are tuned on. ValueError if
    no item would be left.
    """
    if tune + report >= len(items):
        raise ValueError(
            f"data.tune_scenes is {tune} and data.report_scenes {report}, together they must be below the {len(items)} "
            f"training {kind} there are; lower one, 0 sets none aside"
        )
    order = sorted(map(name, items), key=lambda text: key(f"tune {kind}", text))
    names = order[tune + report :], order[:tune], order[tune : tune + report]
    others, tuned, reported = ([item for item in items if name(item) in part] for part in map(set, names))
    return others, tuned, reported


def _training_split(data: DataConfig, part: int) -> Split:
    # Of the training data: 0 what is trained on, 1 what `data.tune_scenes` and 2 `data.report_scenes` set aside.
    counts = data.tune_scenes, data.report_scenes
    if data.prompts:
        return prompt_data(data, data.prompts, lambda prompts: set_aside(prompts, *counts, "prompts", str)[part])
    name = attrgetter("name")
    return multicam_data(data, data.train_split, lambda scenes: set_aside(scenes, *counts, "scenes", name)[part])
