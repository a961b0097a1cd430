"""Encode a recipe's prompts and source videos once, to disk, so that training loads no encoder.

    torchrun --nproc_per_node=8 tools/precompute.py --config config/grpo.py:my_recam_8npu --config.model.encodings=enc

Pass the same --config.model.encodings to train_grpo.py. Both splits are encoded, divided among the ranks. Existing
entries are verified and kept, so the same command resumes, and adds new videos. A source video of 81x480x832 takes
8 MiB. Exit code: 0 if everything is encoded, 1 if files could not be read (they are listed), 2 for invalid settings.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from tools.common import fail, make_parser

PARSER = make_parser(__doc__, recipe=True)
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

import torch

from flow_grpo.data.dataset import ConditionDataset
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.splits import whole_splits
from flow_grpo.judging.evaluate import eval_guidance, training_guidance
from flow_grpo.models.encoders.encodings import Encodings
from flow_grpo.models.registry import video_model
from flow_grpo.models.wan_policy import open_encoders
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.start_up import raise_on_all_ranks, refuse, set_up_rank
from flow_grpo.runtime.tensor_store import TensorStore
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.schema import Config

REPORT_S = 10.0  # seconds between progress lines
WAIT_S = 7 * 24 * 3600.0  # how long a finished rank waits for the others


# A name for messages, and a function that encodes unless an intact entry exists and says whether it did.
Task: TypeAlias = tuple[str, Callable[[], bool]]


def main(words: Sequence[str] | None = None) -> int:
    known, overrides = PARSER.parse_known_args(words)
    world = None
    try:
        config = load_config(known.config, overrides)
        if not config.model.encodings:
            raise ConfigError(
                "config.model.encodings: got '', must name a folder; pass --config.model.encodings=FOLDER"
            )
        device, world = set_up_rank(config, WAIT_S)
        with raise_on_all_ranks(world):
            splits = whole_splits(config.data)
            encodings = open_encodings(config, device)
            of_videos = [data for data in splits if isinstance(data, MultiCamDataset)]
            tasks = [*video_tasks(of_videos, encodings), *prompt_tasks(config, splits, encodings)]
    except ValueError as error:
        return refuse(error, world)
    with world.sync_errors("encoding"):
        counts, problems = work(tasks, world)
    problems = report(counts, problems, config, world)
    process_group.shut_down(world)
    return 1 if problems else 0


def open_encodings(config: Config, device: torch.device) -> Encodings:
    """Return a recipe's encoders and the store of their results; ValueError for an incomplete model folder."""
    model = dataclasses.replace(config.model, offload=False)
    codec, texts, images = open_encoders(video_model(model.kind), model, device)
    store = TensorStore(Path(model.encodings), limit=0)
    return Encodings(codec, texts, store, images=images, max_prompt_tokens=model.max_prompt_tokens)


def video_tasks(splits: Sequence[MultiCamDataset], encodings: Encodings) -> Iterator[Task]:
    """Yield one task per distinct source video and size."""
    places = {(data.source_file(i), data.size_of(i)): (data, i) for data in splits for i in range(len(data))}
    for (file, _), place in places.items():
        yield str(file), functools.partial(encode_source, encodings, *place)


def encode_source(encodings: Encodings, data: MultiCamDataset, index: int) -> bool:
    content, size = data.source_id(index), data.size_of(index)
    if encodings.knows_source(content, size):
        return False
    encodings.prepare_source(content, size, lambda: data.source_video(index))
    return True


def prompt_tasks(config: Config, splits: Sequence[ConditionDataset], encodings: Encodings) -> Iterator[Task]:
    """Yield one task per distinct prompt, including the negative ones that guidance uses."""
    prompts = [data.prompt_of(index) for data in splits for index in range(len(data))]
    guidances = training_guidance(config), eval_guidance(config)
    prompts += [guidance.negative_prompt for guidance in guidances if guidance.scale != 1.0]
    for prompt in dict.fromkeys(prompts):
        yield f"prompt {prompt[:60]!r}", functools.partial(encode_prompt, encodings, prompt)


def encode_prompt(encodings: Encodings, prompt: str) -> bool:
    if encodings.knows_prompt(prompt):
        return False
    encodings.prompt(prompt)
    return True


def work(tasks: Sequence[Task], world: World) -> tuple[Counter[str], list[str]]:
    """Run this rank's share of the tasks; return how many were encoded or already cached, and the unreadable files."""
    tasks = tasks[world.data.rank :: world.data.size]
    counts, problems = Counter(made=0, kept=0), []
    begun = reported = time.perf_counter()
    for number, (name, encode) in enumerate(tasks, 1):
        try:
            counts["made" if encode() else "kept"] += 1
        except ValueError as error:
            problems.append(f"{name}: {error}")
        now = time.perf_counter()
        if world.is_main and now - reported > REPORT_S:
            reported, left = now, (now - begun) / number * (len(tasks) - number)
            print(f"{number} of {len(tasks)} on rank 0, about {left / 60:.0f} min left", flush=True)
    return counts, problems


def report(counts: Counter[str], problems: Sequence[str], config: Config, world: World) -> list[str]:
    """Print the totals and failures of all ranks, and return the failures. Collective call."""
    made, kept = (int(count.sum()) for count in world.data.all_gather_scalars(counts).values())
    problems = [line for text in world.data.gather_text("\n".join(problems)) for line in text.splitlines()]
    if world.is_main:
        print(f"{made} encoded, {kept} were there, {len(problems)} failed: {config.model.encodings}", flush=True)
        for problem in problems:
            fail(problem)
    return problems


if __name__ == "__main__":
    sys.exit(main())
