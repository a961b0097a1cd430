"""DAVIS along ReCamMaster's ten presets, the test of ReDirector and Geo-Align: sources, frames and paths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import torch
from torch import Tensor

from flow_grpo.maths.benchmarks import preset_at_own_speed
from flow_grpo.maths.poses import PRESETS
from flow_grpo.runtime.json_files import read_json_object, read_text
from tools.published.plan import CAMERAS, BenchmarkPlan, Item, item_name, write_path, write_source

FRAMES_FOLDER = Path("JPEGImages") / "480p"
LIST_NAME = "DAVIS-2016"
# Training and validation videos of DAVIS 2016, all part of DAVIS-2017's trainval package.
DAVIS_2016 = Path(__file__).with_name("davis_2016.txt")


def prepare_davis(
    root: Path, out: Path, size: tuple[int, int], names: Path, captions: Path | None, at_most: int | None
) -> BenchmarkPlan:
    """Write sources and paths of DAVIS videos along all presets, and return their plan.

    Raises:
        ValueError: a missing or damaged video, frame or caption, or fewer than five frames.
    """
    videos = read_list(names)
    texts = None if captions is None else read_json_object(captions, "write it again")
    frames = {video: list_frames(root, video) for video in videos}  # refuses before anything is written
    prompts = {video: _caption(texts, captions, video) for video in videos}
    items = []
    for video, files in frames.items():
        count = (min(len(files), at_most or len(files)) - 1) // 4 * 4 + 1  # 4n+1
        write_source(out, video, read_frames(files[:count]))
        for preset in PRESETS:
            path = f"{CAMERAS}/{count}/{preset}.json"
            write_path(out, path, preset_at_own_speed(preset, count))
            items.append(Item(item_name(video, preset), video, preset, path, count, prompts[video]))
    chosen = LIST_NAME if set(videos) == set(read_list(DAVIS_2016)) else names.name
    about = {"videos": chosen, "frames_at_most": at_most}
    return BenchmarkPlan("davis", size, about, tuple(items))


def read_list(file: Path) -> list[str]:
    """Return the videos of a list, one a line; ValueError for none or a path."""
    names = read_text(file, "write it again").split()
    if not names or any(Path(name).name != name for name in names):
        raise ValueError(f"--list {file} must hold names of videos such as bear, one a line")
    return names


def list_frames(root: Path, video: str) -> list[Path]:
    """Return the frames of a video in order; ValueError unless they are 00000.jpg, 00001.jpg, ..., at least five."""
    folder = root / FRAMES_FOLDER / video
    files = sorted(folder.glob("*.jpg"))
    if len(files) < 5:
        raise ValueError(
            f"DAVIS video {video} has {len(files)} frames in {folder}, must have at least 5; unpack "
            "DAVIS-2017-trainval-480p there, or name other videos with --list"
        )
    for number, file in enumerate(files):
        if file.name != f"{number:05d}.jpg":
            raise ValueError(f"DAVIS video {video} has no {number:05d}.jpg in {folder}; unpack it again")
    return files


def read_frames(files: Sequence[Path]) -> Tensor:
    """Return pictures as a video (3, T, h, w) uint8 RGB; ValueError for a damaged one or one of another size."""
    frames = []
    for file in files:
        picture = cv2.imread(str(file), cv2.IMREAD_COLOR)
        if picture is None:
            raise ValueError(f"frame {file} cannot be read; unpack it again")
        if frames and picture.shape != frames[0].shape:
            raise ValueError(
                f"frame {file} has size {picture.shape[:2]}, the first {frames[0].shape[:2]}; unpack it again"
            )
        frames.append(picture)
    return torch.stack([torch.from_numpy(frame).flip(-1) for frame in frames]).permute(3, 0, 1, 2)


def _caption(texts: Mapping[str, object] | None, file: Path | None, video: str) -> str | None:
    if texts is None:
        return None
    text = texts.get(video)
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"--captions {file} has {text!r} for {video}, must be a text for every video")
    return " ".join(text.split())
