"""Which videos of a run are shown, as data that a page can hold: the best, the worst, and the latest held-out ones."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Sequence

import av

from tools.run_report.charts import PathView, path_views
from tools.run_report.run_folder import VIDEOS, Panel, Run, Video
from tools.run_report.words import number, pair

KINDS = {"best": "improved most", "worst": "improved least", "eval": "held-out condition"}
MOST_BYTES = 20_000_000  # of all videos of a page: 27 MB in base64


@dataclasses.dataclass(frozen=True)
class Clip:
    """A video in a page.

    Attributes:
        video: its line of the index.
        title: why it is shown.
        about: scene, camera and preset.
        scores: each in words.
        data: a data URI.
        width: of the picture, in pixels.
        height: likewise.
        frames: how many.
        fps: of them a second.
        views: of the camera's path.
    """

    video: Video
    title: str
    about: str
    scores: list[str]
    data: str
    width: int
    height: int
    frames: int
    fps: float
    views: list[PathView]

    @property
    def compares(self) -> bool:
        """Whether the video shows the policy before training beside that of now."""
        return {"base", "now"} <= {panel.name for panel in self.video.panels}

    @property
    def panels(self) -> list[dict[str, object]]:
        """The panels as plain data; the whole picture where the index names none."""
        whole = Panel("", 0, 0, self.width, self.height)
        return [dataclasses.asdict(panel) for panel in self.video.panels or [whole]]


def choose(run: Run, most_bytes: int = MOST_BYTES) -> tuple[list[Clip], list[str]]:
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
            clips.append(_clip(video, file.read_bytes(), *_form(str(file))))
        except (OSError, av.FFmpegError, IndexError):
            broken += 1
            continue
        most_bytes -= size
    without = []
    if left_out:
        without.append(
            f"{left_out} of {len(wanted)} videos are left out, so that this page stays small; see {VIDEOS}/."
        )
    if broken:
        without.append(f"{broken} videos cannot be read and are left out.")
    return sorted(clips, key=lambda clip: (not clip.compares, list(KINDS).index(clip.video.kind))), without


def _wanted(videos: Sequence[Video]) -> list[Video]:
    """Return the latest videos of each kind, the most telling first: best and worst in turn, then the held-out ones."""
    latest: dict[str, list[Video]] = {}
    for kind in KINDS:
        own = [video for video in videos if video.kind == kind]
        last = max((video.step for video in own), default=0)
        # A resumed run may have written a step twice: the later line counts.
        latest[kind] = list({video.file: video for video in own if video.step == last}.values())
    extremes = max(len(latest["best"]), len(latest["worst"]))
    in_turn = [
        video for rank in range(extremes) for kind in ("best", "worst") for video in latest[kind][rank : rank + 1]
    ]
    return [*in_turn, *latest["eval"]]


def _form(file: str) -> tuple[int, int, int, float]:
    """Return width, height, number of frames and frames a second of a video."""
    with av.open(file) as container:
        stream = container.streams.video[0]
        return stream.width, stream.height, stream.frames, float(stream.average_rate or 15)


def _in_words(video: Video, name: str) -> str:
    """Return a score with its value before training where that is known."""
    now, before = video.scores[name], video.before.get(name)
    return f"{name} {number(now)}" if before is None else f"{name} {' → '.join(pair(before, now))}"


def _clip(video: Video, content: bytes, width: int, height: int, frames: int, fps: float) -> Clip:
    about = ", ".join(part for part in (video.scene, video.camera, video.preset.replace("_", " ")) if part)
    return Clip(
        video=video,
        title=f"{KINDS[video.kind]}, epoch {video.step}",
        about=about,
        scores=[_in_words(video, name) for name in video.scores],
        data="data:video/mp4;base64," + base64.b64encode(content).decode("ascii"),
        width=width,
        height=height,
        frames=max(frames, 1),
        fps=fps,
        views=path_views(video.paths) if video.paths else [],
    )
