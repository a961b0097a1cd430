"""What a run shows of itself: its videos, their index, the film strip of training, and the cameras' paths.

Everything is drawn and written behind training. What was shown before is read back from the videos themselves, so that
a resumed run goes on with it: where one is missing, its panel is left out.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import av
import torch
from einops import rearrange

from flow_grpo.records import ScoredBatch
from flow_grpo.reporting import video_index
from flow_grpo.reporting.clips import BASE, NOW, Clip, file_name, group_clip, training_clips
from flow_grpo.reporting.drawing import camera_plots
from flow_grpo.reporting.drawing.path_plots import draw_paths
from flow_grpo.reporting.drawing.step_plot import draw_steps
from flow_grpo.reporting.filmstrip import draw_filmstrip
from flow_grpo.reporting.labelled_video import Panel, draw_labelled, enlargement, rate
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.runtime.video_file import read_frames, write_video

FILMSTRIP, CAMERAS, STEPS = "filmstrip.png", "cameras.png", "steps.png"
_log = logging.getLogger(__name__)


class Gallery:
    """The pictures of one run; ranks other than 0 give it no clips and write nothing."""

    def __init__(self, tracker: Tracker, run_folder: Path) -> None:
        self._tracker, self._folder = tracker, run_folder
        self.videos = run_folder / "videos"

    def steps(self, sigmas: Sequence[float], steps: Sequence[Mapping[str, float]]) -> None:
        """Plot `steps.png`, the stochastic steps of the rollout, see `step_plot.draw_steps`; nothing without any."""
        if steps:
            self._tracker.later(STEPS, functools.partial(draw_steps, sigmas, steps, self._folder / STEPS))

    def evaluation(self, clips: Sequence[Clip], step: int, *, before: bool) -> None:
        """Write the videos of an evaluation, and the film strip of all so far; `before` training, they are the base."""
        for number, clip in enumerate(clips):
            renamed = {BASE if before and name == NOW else name: video for name, video in clip.panels.items()}
            shown = dataclasses.replace(clip, panels=renamed)
            self._write("eval", shown, step, f"eval_{step:06d}_{clip.name}", f"eval/video_{number}")
        if clips:
            file = self._folder / FILMSTRIP
            draw = functools.partial(draw_filmstrip, self.videos, file)
            self._tracker.log_file("eval/filmstrip", file, draw, "the last frames of all evaluations", step)

    def training(self, batch: ScoredBatch, step: int, *, count: int, weights: Mapping[str, float], k: int) -> None:
        """Write videos of the first `count` samples of a batch, and one of the copies of a group, see `group_clip`."""
        for number, clip in enumerate(training_clips(batch, count)):
            self._write("train", clip, step, f"train_{step:06d}_{clip.name}", f"train/video_{number}")
        group = group_clip(batch, weights, k) if count else None
        if group is not None:
            self._write("group", group, step, f"group_{step:06d}_{group.name}", "train/group")

    def extremes(self, kind: str, clips: Sequence[Clip], step: int) -> list[str]:
        """Write clips as `videos/best_000130_1_...mp4`, kind "best" or "worst", and return their files."""
        return [
            str(self._write(kind, clip, step, f"{kind}_{step:06d}_{number}_{clip.name}", f"eval/{kind}_{number}"))
            for number, clip in enumerate(clips, start=1)
        ]

    def paths(self, clips: Sequence[Clip]) -> None:
        """Plot commanded and estimated camera paths as `paths/....png`, of the clips that have both."""
        for clip in clips:
            if clip.commanded is not None and clip.estimated is not None:
                file = self._folder / "paths" / f"{file_name('{scene}_{camera}'.format(**clip.of))}.png"
                draw = functools.partial(draw_paths, clip.commanded, clip.estimated, file, clip.title)
                self._tracker.later("paths", draw)

    def cameras(
        self, before: Mapping[str, float], after: Mapping[str, float], changes: camera_plots.Changes, step: int
    ) -> None:
        """Plot `cameras.png`, the held-out metrics of each kind of camera, see `camera_plots.draw_cameras`."""
        file = self._folder / CAMERAS
        shown = camera_plots.shown_metrics(after, self._tracker.deciding)
        if before and shown:
            means = before, after
            draw = functools.partial(camera_plots.draw_cameras, means, changes, shown, file, self._tracker.direction)
            self._tracker.log_file("eval/cameras", file, draw, "before and after training, by camera", step)

    def _write(self, kind: str, clip: Clip, step: int, name: str, shown_as: str) -> Path:
        file = self.videos / f"{name}.mp4"
        write = functools.partial(self._draw, kind, clip, step, file)
        self._tracker.log_file(shown_as, file, write, clip.caption, step)
        return file

    def _draw(self, kind: str, clip: Clip, step: int, file: Path) -> None:
        panels = [Panel(name, video.cpu()) for name, video in clip.panels.items()]
        scores = clip.before
        if NOW in clip.panels and BASE not in clip.panels and kind not in ("train", "group"):
            base, earlier = self._base(clip)
            scores = scores or earlier
            panels = [one for panel in panels for one in ([base, panel] if base and panel.name == NOW else [panel])]
        notes = {BASE: "before training", NOW: f"epoch {step}"}
        notes |= {name: f"{value:+.2f}" for name, value in clip.scores.items() if kind == "group"}
        labelled = [dataclasses.replace(panel, note=notes.get(panel.name, "")) for panel in panels]
        video, boxes = draw_labelled(labelled, clip.lines(scores), clip.commanded)
        write_video(file, video, rate(video.shape[1], clip.fps))
        line = {"file": file.name, "kind": kind, "step": step, **clip.of}
        line |= {"panels": [dataclasses.asdict(box) for box in boxes], "scores": clip.scores}
        line |= {"before": {name: scores[name] for name in clip.scores if name in scores}, "caption": clip.caption}
        if clip.commanded is not None and clip.estimated is not None:
            centres = clip.estimated[:, :3, 3]
            known = centres.isfinite().all(dim=1).tolist()
            found = [row if fine else None for row, fine in zip(centres.tolist(), known, strict=True)]
            line |= {"paths": {"commanded": clip.commanded[:, :3, 3].tolist(), "estimated": found}}
        video_index.add(self.videos, line)

    def _base(self, clip: Clip) -> tuple[Panel | None, dict[str, float]]:
        """Return what the policy made of the same condition before training, read back, and its scores then."""
        for line in video_index.read(self.videos):
            same = line.get("kind") == "eval" and line.get("condition") == clip.of["condition"]
            box = video_index.panel(line, BASE) if same else None
            if box is None:
                continue
            wanted = clip.panels[NOW].shape[1:]
            factor = enlargement(wanted[1])
            middle = slice(factor // 2, None, factor)  # of each pixel's enlargement
            try:
                frames = [torch.from_numpy(box.cut(frame)) for frame in read_frames(self.videos / line["file"])]
                found = rearrange(torch.stack(frames)[:, middle, middle], "t y x c -> c t y x")
            except (OSError, av.FFmpegError) as error:
                _log.warning("%s cannot be read, the base is not shown: %s", line["file"], error)
                return None, {}
            if found.shape[1:] == wanted:
                return Panel(BASE, found), line.get("scores", {})
        return None, {}
