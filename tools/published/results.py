"""What other programs have measured, read from their files: ViPE's poses, ReDirector's MEt3R, VBench's scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from flow_grpo.data.pose_files import read_poses
from flow_grpo.maths.poses import check_poses
from flow_grpo.runtime.json_files import read_json_object, read_text

AGAIN = "run it again"
MET3R = {"dyn_met3r": "Dyn-MEt3R", "met3r": "MEt3R"}  # column -> word of the file
VBENCH = "*_eval_results.json"


def vipe_files(folder: Path) -> dict[str, list[Path]]:
    """Return video name -> its files of poses below ViPE's output folder, or one that holds those of many videos."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("pose/*.npz")):
        found.setdefault(file.stem, []).append(file)
    return found


def vipe_poses(files: Mapping[str, Sequence[Path]], names: Sequence[str], frames: int) -> Tensor | None:
    """Return the poses (frames, 4, 4) float64, camera-to-world, that ViPE found in a video; None without its file.

    `names` are those of the video in any spelling. ValueError for several files, or an unusable one.
    """
    found = [file for name in names for file in files.get(name, ())]
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(f"ViPE's poses of {names[0]} are in both {found[0]} and {found[1]}; remove one of them")
    poses = read_poses(found[0]).poses
    name = f"ViPE's {found[0]}"
    if tuple(poses.shape) != (frames, 4, 4):
        raise ValueError(
            f"{name} has shape {tuple(poses.shape)}, must be ({frames}, 4, 4), one pose a frame of the video; {AGAIN}"
        )
    check_poses(poses, name)
    return poses


def met3r_values(folder: Path, name: str) -> dict[str, float | None]:
    """Return a video's MEt3R figures from FOLDER/NAME/results.txt, None for what is not there or failed."""
    file = folder / name / "results.txt"
    if not file.is_file():
        return dict.fromkeys(MET3R)
    pairs = (line.split(":", 1) for line in read_text(file, AGAIN).splitlines() if ":" in line)
    lines = {word.strip(): value.strip() for word, value in pairs}
    found: dict[str, float | None] = {}
    for column, word in MET3R.items():
        text = lines.get(word, "None")
        try:
            found[column] = None if text == "None" else float(text)
        except ValueError:
            raise ValueError(f"{file}: {word} is {text!r}, must be a number or None; {AGAIN}") from None
    return found


def vbench_scores(folder: Path, names: Sequence[str]) -> dict[str, float]:
    """Return VBench's score of each dimension in a folder's result files, which must be about exactly these videos."""
    files = sorted(folder.rglob(VBENCH))
    if not files:
        raise ValueError(f"--vbench {folder} has no file {VBENCH}; give VBench's output folder")
    scores: dict[str, float] = {}
    for file in files:
        for dimension, entry in read_json_object(file, AGAIN).items():
            if dimension in scores:
                raise ValueError(f"--vbench {folder} has {dimension} twice, again in {file.name}; remove one")
            scores[dimension] = _vbench_score(entry, names, f"{file}: {dimension}")
    return scores


def _vbench_score(entry: Any, names: Sequence[str], place: str) -> float:
    try:
        overall, videos = entry  # some dimensions scale it differently from the scores of videos
        stems = sorted(Path(video["video_path"]).stem for video in videos)
        score = float(overall)
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{place} is not [score, [videos]] as VBench writes it; {AGAIN}") from error
    if stems != sorted(names):
        differ = sorted(set(stems) ^ set(names))
        which = f", such as {differ[0]}" if differ else ""
        raise ValueError(f"{place} is about {len(stems)} videos, must be about the {len(names)} scored ones{which}")
    return score


def mean_of(values: Sequence[Mapping[str, Any]], column: str) -> tuple[float | None, int]:
    """Return the mean of a column over the rows that have it, None without any, and how many these are."""
    found = [row[column] for row in values if row.get(column) is not None]
    return (sum(found) / len(found) if found else None), len(found)
