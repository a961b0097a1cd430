"""The data a recipe trains and evaluates on: the videos of a folder, or prompts alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flow_grpo.data.dataset import Split
from flow_grpo.data.exclude import Verdicts, read_verdicts, settings_of
from flow_grpo.data.multicam import MultiCamDataset, Scene, contents_by_scene, set_aside
from flow_grpo.data.prompts import PromptDataset, read_prompts, set_prompts_aside
from flow_grpo.settings.schema import DataConfig, EvalConfig
from flow_grpo.settings.values import parse_bucket


def multicam_data(data: DataConfig, split: str, choose: Callable[[list[Scene]], list[Scene]] = list) -> MultiCamDataset:
    """Return a split of the videos below `data.root`, by default all its scenes.

    Of the training split, the items that `data.exclude` names are left out.
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


def training_data(data: DataConfig) -> Split:
    """Return the conditions to train on: the training split without what `data.tune_scenes` sets aside.

    Raises:
        ValueError: the data are missing or unusable.
    """
    if data.prompts:
        return _prompts(data, data.prompts, held=False)
    return multicam_data(data, data.train_split, lambda scenes: set_aside(scenes, data.tune_scenes)[0])


def held_out_data(data: DataConfig, evaluation: EvalConfig) -> Split:
    """Return the conditions that `eval.split` evaluates on: the reported ones, or those set aside.

    Raises:
        ValueError: the data are missing or unusable.
    """
    report = evaluation.split == "report"
    if data.prompts:
        return _prompts(data, data.eval_prompts if report else data.prompts, held=not report)
    if report:
        return multicam_data(data, data.eval_split)
    return multicam_data(data, data.train_split, lambda scenes: set_aside(scenes, data.tune_scenes)[1])


def whole_splits(data: DataConfig) -> list[Split]:
    """Return all that a run may train or evaluate on.

    Raises:
        ValueError: the data are missing or unusable.
    """
    if data.prompts:
        size = (data.num_frames, data.height, data.width)
        return [PromptDataset(read_prompts(Path(file)), size, file) for file in (data.prompts, data.eval_prompts)]
    return [multicam_data(data, split) for split in (data.train_split, data.eval_split)]


def _prompts(data: DataConfig, file: str, *, held: bool) -> PromptDataset:
    """Return the prompts of a file; of the training file those that are set aside if `held`, else the others."""
    prompts = read_prompts(Path(file))
    if file == data.prompts:
        prompts = set_prompts_aside(prompts, data.tune_scenes)[held]
    return PromptDataset(prompts, (data.num_frames, data.height, data.width), file)
