"""Does a reward of the camera beside a source that stays in place order the copies of a group by their true errors?

    python tools/dev/pose_study.py --size 240x416 --out benchmarks/fixed_source_240x416.jsonl
    python tools/dev/pose_study.py --groups 0 --out benchmarks/fixed_source_240x416.jsonl     # print what it holds

Rooms of three textures (`tests/textured_room.py`), a still and a panning source without poses, every preset, groups of
eight videos whose cameras err: 0 to 3 degrees, 0.5 to 1.2 of the speed, up to 10 degrees of direction, where a preset
only turns a drift of up to 30 cm; all spoiled by an object that crosses the picture, blur of 2.5 px at 832 columns and
JPEG 70. The depth of the source is true, or 10 % too large and 5 % noisy. One line a group is added to --out; groups
that it holds are not measured again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.rewards  # noqa: F401, I001 - before torch, which loads accelerator plug-ins unguarded

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import Tensor

from flow_grpo.maths.poses import PRESETS, pose, rotation_matrix
from flow_grpo.rewards.camera import pose as rewards
from flow_grpo.rewards.camera.anchors import PosedFrames
from flow_grpo.rewards.camera.features import find_features
from flow_grpo.rewards.camera.fixed_source import make_fixed_source
from flow_grpo.rewards.camera.pnp import camera_matrix
from tests import textured_room as room
from tools.common import image_size, make_parser, markdown_table

SOURCES = ("still", "panning")
TEXTURES, COPIES = 3, 8
# Where a video goes that must score below the exact one: its preset, its speed; "mirrored" is the exact one mirrored.
CHEATS = {"static": 0.0, "opposite": -1.0, "other preset": 1.0, "half speed": 0.5, "mirrored": 1.0}


def wrong(path: Tensor, draw: np.random.Generator) -> Tensor:
    """Return a path (T, 4, 4) near the commanded one: another speed and direction, and a turn that grows."""
    progress = torch.linspace(0, 1, len(path), dtype=torch.float64)[:, None]
    axes = [torch.from_numpy(axis / np.linalg.norm(axis)) for axis in draw.normal(size=(3, 3))]
    turn = rotation_matrix(progress * axes[0] * np.deg2rad(draw.uniform(0, 3)))
    aside = rotation_matrix(axes[1] * np.deg2rad(draw.uniform(0, 10)))
    centres = path[:, :3, 3] @ aside.T * draw.uniform(0.5, 1.2)
    if not centres.any():
        centres = progress * axes[2] * draw.uniform(0, 0.3)
    return pose(turn @ path[:, :3, :3], centres)


def measure(preset: str, kind: str, number: int, size: tuple[int, int], frames: int) -> dict[str, object]:
    """Return a group's true and found values, those of cheats, and the CPU-seconds of its source and a video."""
    seed, draw = number % TEXTURES, np.random.default_rng([number, list(PRESETS).index(preset)])
    command = room.slowed(preset, frames, 1.0)
    stays = room.standing(frames) if kind == "still" else room.slowed("pan_right", frames, 0.5)
    pictures = room.grey(room.shoot(stays, size, seed=seed, walk=0.5))
    true = room.depths(stays, size)
    depths = {"true": true, "near": 1.1 * true * np.exp(0.05 * draw.normal(size=true.shape))}
    camera = camera_matrix(room.intrinsics(size).tolist())
    begun = time.process_time()
    shown = PosedFrames(pictures, np.full((frames, 4, 4), np.nan), tuple(range(frames)))
    sources = {name: make_fixed_source(shown, camera, depth) for name, depth in depths.items()}
    seconds = [time.process_time() - begun]

    def values(path: Tensor, mirrored: bool = False) -> tuple[list[list[float]], list[list[float]]]:
        video = room.spoiled(room.shoot(path, size, seed=seed, take=3, walk=0.5), sigma=2.5, quality=70, sprite=True)
        grey = room.grey(video)[:, :, ::-1] if mirrored else room.grey(video)
        begun = time.process_time()
        seen = tuple(map(find_features, np.ascontiguousarray(grey)))
        found = [source.locate(seen, command.numpy()) for source in sources.values()]
        seconds.append(time.process_time() - begun)
        longer = pose(path[:, :3, :3], 1.1 * path[:, :3, 3])
        return [_values(command, torch.from_numpy(one)) for one in found], [_values(command, p) for p in (path, longer)]

    others = list(PRESETS)
    other = others[(others.index(preset) + 3) % len(others)]
    copies = [values(wrong(command, draw)) for _ in range(COPIES)]
    exact = values(command)[0]
    cheats = {
        name: values(room.slowed(other if name == "other preset" else preset, frames, speed), name == "mirrored")[0]
        for name, speed in CHEATS.items()
        if number < TEXTURES  # once in every room
    }
    return {
        "preset": preset,
        "source": kind,
        "group": number,
        "size": size,
        "frames": frames,
        "found": [one for one, _ in copies],  # (copies, depths, 2)
        "true": [one for _, one in copies],
        "exact": exact,
        "cheats": cheats,
        "source_s": seconds[0] / len(depths),
        "video_s": statistics.median(seconds[1:]),
    }


def _values(command: Tensor, path: Tensor) -> list[float]:
    errors = rewards.compare(command, path, command, torch.ones(len(command), dtype=torch.bool))
    return [rewards.rotation_value(errors), rewards.translation_value(errors)]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rank correlations with the true errors, mean / worst group, and which cheats are not below."""

    def ranks(found: NDArray[np.float64], true: NDArray[np.float64]) -> str:
        each = [spearmanr(one, other).statistic for one, other in zip(found, true, strict=True)]
        return f"{np.mean(each):.2f} / {np.min(each):.2f}"

    lines = []
    for preset, kind in itertools.product(PRESETS, SOURCES):
        own = [row for row in rows if (row["preset"], row["source"]) == (preset, kind)]
        if not own:
            continue
        found, true = (np.array([row[name] for row in own]) for name in ("found", "true"))  # (groups, copies, 2, 2)
        asked = true[:, :, 0]
        lines.append(
            [
                f"`{preset}`, {kind}",
                ranks(found[:, :, 1, 0], asked[:, :, 0]),
                ranks(found[:, :, 0, 1], asked[:, :, 1]),
                ranks(found[:, :, 1, 1], asked[:, :, 1]),
                ranks(true[:, :, 1, 1], asked[:, :, 1]),
                ranks(found[:, :, 1].sum(-1), asked.sum(-1)),
            ]
        )
    head = ["command, source", "rotation", "translation, true depth", "translation", "the best it can be", "sum"]
    passed = [
        f"{row['preset']}, {row['source']}, group {row['group']}: {name}"
        for row in rows
        for name, value in row["cheats"].items()
        if sum(value[1]) >= sum(row["exact"][1])
    ]
    source, video = (statistics.median(row[name] for row in rows) for name in ("source_s", "video_s"))
    ends = [f"not below the exact video: {'; '.join(passed) or 'none'}"]
    ends += [f"{source:.1f} CPU-s a source, {video:.1f} a video, located with both depths; {len(rows)} groups"]
    return "\n".join([*markdown_table(head, lines), "", *ends])


def main(words: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file of one JSON object a group")
    parser.add_argument("--size", type=image_size, default=(240, 416), help="rows x columns")
    parser.add_argument("--frames", type=int, default=21, help="of a video (%(default)s)")
    parser.add_argument("--groups", type=int, default=8, help="of each preset and source (%(default)s)")
    args = parser.parse_args(words)
    rows = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    known = {(row["preset"], row["source"], row["group"]) for row in rows}
    for number, preset, kind in itertools.product(range(args.groups), PRESETS, SOURCES):
        if (preset, kind, number) not in known:
            rows.append(measure(preset, kind, number, args.size, args.frames))
            with args.out.open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
