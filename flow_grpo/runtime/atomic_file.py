"""Text files that are there whole or not at all, whatever happens while they are written."""

from __future__ import annotations

from pathlib import Path


def write_whole(file: Path, text: str) -> None:
    """Write or replace a UTF-8 file; missing folders are made. Line ends stay as they are. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.tmp")
    partial.write_text(text, encoding="utf-8", newline="")
    partial.replace(file)
