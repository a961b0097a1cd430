"""Which videos of a run are shown, as data that a page can hold: the best, the worst, and the latest held-out ones."""

from __future__ import annotations

import base64
import dataclasses
import itertools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import av

from flow_grpo.reporting.video_index import Box
from tools.run_folder import VIDEOS, IndexedVideo, Run
from tools.run_report.words import number, pair

KINDS = {"best": "improved most", "worst": "improved least", "eval": "held-out condition"}
_of = operator.attrgetter("condition", "scene", "camera")
MOST_BYTES = 20_000_000  # of all videos of a page: 27 MB in base64


def choose(run: Run, most_bytes: int = MOST_BYTES) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the clips of a run that fit into `most_bytes` of video, and sentences about those left out."""
    wanted = _wanted(run.videos)
    clips, left_out, broken = [], 0, 0
    for video in wanted:
        file = run.folder / VIDEOS / video.file
        size = file.stat().st_size
        if size > most_bytes:
            left_out += 1
            continue
        try:
            clips.append(_clip(video, file))
            most_bytes -= size
        except (OSError, av.FFmpegError, IndexError):
            broken += 1
    without = []
    if left_out:
        without.append(
            f"{left_out} of {len(wanted)} videos are left out, so that this page stays small; see {VIDEOS}/."
        )
    if broken:
        without.append(f"{broken} videos cannot be read and are left out.")
    return clips, without


def _wanted(videos: Sequence[IndexedVideo]) -> list[IndexedVideo]:
    """Return the latest videos of each kind: best and worst in turn, then the held-out ones that are neither."""
    latest: dict[str, list[IndexedVideo]] = {}
    for kind in KINDS:
        own = [video for video in videos if video.kind == kind]
        last = max((video.step for video in own), default=0)
        # A resumed run may have written a step twice: the later line counts.
        latest[kind] = list({video.file: video for video in own if video.step == last}.values())
    in_turn = [video for pair in itertools.zip_longest(latest["best"], latest["worst"]) for video in pair if video]
    shown = {_of(video) for video in in_turn}
    return [*in_turn, *(video for video in latest["eval"] if _of(video) not in shown)]


def _clip(video: IndexedVideo, file: Path) -> dict[str, Any]:
    """Return a video, why it is shown, its scores in words, a data URI, and its form, for the template."""
    with av.open(str(file)) as container:
        stream = container.streams.video[0]
        width, height, frames, rate = stream.width, stream.height, stream.frames, stream.average_rate
    scores = []
    for name, now in video.scores.items():
        before = video.before.get(name)
        scores.append(f"{name} {number(now)}" if before is None else f"{name} {' → '.join(pair(before, now))}")
    estimated = video.paths.estimated if video.paths else []
    return {
        "video": video,
        "title": f"{KINDS[video.kind]}, epoch {video.step}",
        "about": video.prompt or ", ".join(filter(None, (video.scene, video.camera, video.preset.replace("_", " ")))),
        "scores": scores,
        "data": "data:video/mp4;base64," + base64.b64encode(file.read_bytes()).decode("ascii"),
        "width": width,
        "height": height,
        "frames": max(frames, 1),
        "fps": float(rate or 15),
        "located": f"{len(estimated) - estimated.count(None)} of {len(estimated)} frames",
        "compares": {"base", "now"} <= {panel.name for panel in video.panels},
        "panels": [dataclasses.asdict(panel) for panel in video.panels or [Box("", 0, 0, width, height)]],
    }
