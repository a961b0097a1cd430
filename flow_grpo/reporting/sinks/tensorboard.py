"""Tensorboard: event files in `<run folder>/tensorboard`; videos are logged as small animated GIFs."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from flow_grpo.reporting.sinks.gif import as_gif
from flow_grpo.reporting.sinks.sink import Opening, as_markdown


class Tensorboard:
    """A `Sink`. A resumed run hides what was logged past the step it resumes from."""

    def __init__(self, opening: Opening) -> None:
        from torch.utils.tensorboard import SummaryWriter

        resumed = opening.resumed_step
        purge_step = None if resumed is None else resumed + 1
        self._writer: Any = SummaryWriter(str(opening.folder / "tensorboard"), purge_step=purge_step)
        if resumed is None:
            self._writer.add_text("config", f"```\n{json.dumps(opening.config, indent=1, default=str)}\n```", 0)

    def scalars(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def show(self, name: str, path: Path, caption: str, step: int) -> None:
        """Show a video as a GIF, a picture as it is, the caption as text of its own."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        encoded = as_gif(path) if path.suffix == ".mp4" else path.read_bytes()
        width, height = Image.open(io.BytesIO(encoded)).size
        picture = Summary.Image(encoded_image_string=encoded, width=width, height=height, colorspace=3)
        self._writer.file_writer.add_summary(Summary(value=[Summary.Value(tag=name, image=picture)]), step)
        self._writer.add_text(f"{name}/caption", caption, step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[object]], step: int) -> None:
        self._writer.add_text(name, as_markdown(columns, rows), step)

    def close(self) -> None:
        self._writer.close()
