"""Files of a generated video and its record, by which other commands know what it is; loads no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOOL = "tools/generate.py"  # marks records of generated videos, which are never taken as sources
AFTER, BEFORE, BESIDE, RECORD = ".mp4", "_before.mp4", "_beside.mp4", ".json"
VIDEO_NAMES = (BEFORE, BESIDE, AFTER)  # the longer ones first


def record_of(video: Path) -> dict[str, Any] | None:
    """Return the record of which a video is the result, the result before training, or both beside the source."""
    for ending in VIDEO_NAMES:
        if video.name.endswith(ending):
            record = read_record(video.with_name(video.name.removesuffix(ending) + RECORD))
            if record is not None:
                return record
    return None


def read_record(file: Path) -> dict[str, Any] | None:
    """Return the content of a record, or None for any other file or none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and content.get("tool") == TOOL else None
