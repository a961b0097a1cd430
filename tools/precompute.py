"""Encode a recipe's prompts and source videos once, to disk, so that training loads no encoder.

    torchrun --nproc_per_node=8 tools/precompute.py --config config/grpo.py:my_recam_8npu --config.model.encodings=enc

Pass the same --config.model.encodings to train_grpo.py. Both splits are encoded, shared out over the ranks. What is
there is verified and left, so the same command goes on after an interruption, and after videos were added. A source
video of 81x480x832 takes 8 MiB. The exit code is 0 when everything is there, 1 when files could not be read (they are
listed), 2 for a setting that cannot work.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch

import train_grpo
from flow_grpo.algorithm.build import dataset
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.schema import Config
from flow_grpo.data.dataset import ConditionDataset
from flow_grpo.models.codec import Codec
from flow_grpo.models.encodings import Encodings
from flow_grpo.models.recam_policy import DTYPES, check_folder
from flow_grpo.models.texts import TextEncoder
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import Ranks
from flow_grpo.runtime.tensor_store import TensorStore

REPORT_S = 10.0  # seconds between progress lines
WAIT_S = 7 * 24 * 3600.0  # how long a rank that is done waits for the others


@dataclasses.dataclass(frozen=True)
class Task:
    """One thing to encode.

    Attributes:
        name: for messages.
        is_there: whether a sound entry exists.
        encode: makes the entry.
    """

    name: str
    is_there: Callable[[], bool]
    encode: Callable[[], object]


@dataclasses.dataclass
class Tally:
    """What became of a rank's tasks."""

    made: int = 0
    kept: int = 0
    problems: list[str] = dataclasses.field(default_factory=list)


def main(words: Sequence[str] | None = None) -> int:
    """Encode what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE:RECIPE", help="its knobs may follow")
    known, overrides = parser.parse_known_args(words)
    ranks = None
    try:
        config = load_config(known.config, overrides)
        if not config.model.encodings:
            raise ConfigError(
                "config.model.encodings: got '', must name a folder; pass --config.model.encodings=FOLDER"
            )
        device, ranks = train_grpo.init_ranks(config, WAIT_S)
        with train_grpo.alike(ranks):
            splits = [dataset(config, split) for split in (config.data.train_split, config.data.eval_split)]
            encodings = open_encodings(config, device)
            tasks = share([*video_tasks(splits, encodings), *prompt_tasks(config, splits, encodings)], ranks)
    except ValueError as error:
        train_grpo.refuse(error, ranks)
        return 2
    with ranks.sync_errors("encoding"):
        tally = work(tasks, ranks)
    problems = report(tally, config, ranks)
    process_group.stop(ranks)
    return 1 if problems else 0


def open_encodings(config: Config, device: torch.device) -> Encodings:
    """Return the encoders of a recipe over its folder; ValueError when the model folder lacks a part."""
    model, folder = config.model, check_folder(config.model.path)
    codec = Codec.from_folder(folder / "vae", device=device, tiling=model.vae_tiling, slicing=model.vae_slicing)
    texts = TextEncoder.from_folder(folder, DTYPES[model.dtype], device=device)
    store = TensorStore(Path(model.encodings), kept=1)
    return Encodings(codec, texts, store, max_prompt_tokens=model.max_prompt_tokens)


def video_tasks(splits: Sequence[ConditionDataset], encodings: Encodings) -> Iterator[Task]:
    """Yield one task for every distinct source video and size."""
    seen = set()
    for data in splits:
        for index in range(len(data)):
            place = data.source_file(index), data.size_of(index)
            if place not in seen:
                seen.add(place)
                yield _video_task(data, index, encodings)


def _video_task(data: ConditionDataset, index: int, encodings: Encodings) -> Task:
    size = data.size_of(index)

    def encode() -> object:
        return encodings.source(data.source_id(index), size, lambda: data.source_video(index))

    return Task(str(data.source_file(index)), lambda: encodings.knows_source(data.source_id(index), size), encode)


def prompt_tasks(config: Config, splits: Sequence[ConditionDataset], encodings: Encodings) -> Iterator[Task]:
    """Yield one task for every distinct prompt, the negative one included where guidance uses it."""
    prompts = [data.prompt_of(index) for data in splits for index in range(len(data))]
    if config.sample.guidance_scale != 1.0:
        prompts.append(config.sample.negative_prompt)
    for prompt in dict.fromkeys(prompts):
        yield Task(
            f"prompt {prompt[:60]!r}",
            lambda prompt=prompt: encodings.knows_prompt(prompt),  # type: ignore[misc]
            lambda prompt=prompt: encodings.prompt(prompt),  # type: ignore[misc]
        )


def share(tasks: Sequence[Task], ranks: Ranks) -> Sequence[Task]:
    """Return this rank's tasks."""
    return tasks[ranks.rank :: ranks.world_size]


def work(tasks: Sequence[Task], ranks: Ranks) -> Tally:
    """Do the tasks; a file that cannot be read is noted, and the next one taken."""
    tally, begun, reported = Tally(), time.perf_counter(), time.perf_counter()
    for number, task in enumerate(tasks, 1):
        try:
            if task.is_there():
                tally.kept += 1
            else:
                task.encode()
                tally.made += 1
        except ValueError as error:
            tally.problems.append(f"{task.name}: {error}")
        now = time.perf_counter()
        if ranks.is_main and now - reported > REPORT_S:
            reported, left = now, (now - begun) / number * (len(tasks) - number)
            print(f"{number} of {len(tasks)} on rank 0, about {left / 60:.0f} min left", flush=True)
    return tally


def report(tally: Tally, config: Config, ranks: Ranks) -> list[str]:
    """Print the sums over all ranks and what failed, and return the latter; every rank must call it."""
    made, kept = ranks.all_gather(torch.tensor([[tally.made, tally.kept]])).sum(dim=0).tolist()
    problems = [line for text in ranks.gather_text("\n".join(tally.problems)) for line in text.splitlines()]
    if ranks.is_main:
        print(f"{made} encoded, {kept} were there, {len(problems)} failed: {config.model.encodings}", flush=True)
        for problem in problems:
            print("error:", problem, file=sys.stderr, flush=True)
    return problems


if __name__ == "__main__":
    sys.exit(main())
