"""What a video shows, from a `metadata.csv` wherever the field keeps it.

Columns are `file_name` and `text`. A table lies beside the videos, beside their folder, or above with the paths of many
folders: ReCamMaster trains from one at the data's root with paths below `train/`, and films `FOLDER/videos/*` with
`FOLDER/metadata.csv`. The nearest table above a video counts for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from flow_grpo.runtime.json_files import read_table
from flow_grpo.runtime.lru import LruCache

TABLE = "metadata.csv"
Captions = Mapping[str, list[str]]
_TABLES: LruCache[tuple[object, ...], Captions] = LruCache(16)  # one may have a row for 136,000 videos


def caption_of(video: Path, root: Path) -> str | None:
    """Return a video's caption, None if no table lies on its way up to the folder `root`.

    ValueError if the nearest table cannot be read, or has not one text for the video.
    """
    file = next(tables(video.parent, root), None)
    if file is None:
        return None
    found = captions_of(video, file, read_captions(file))
    if len(found) != 1 or not found[0].strip():
        raise ValueError(
            f"caption file {file} has {len(found)} rows for {video.name}, must have one with a text; "
            "complete the file or remove it"
        )
    return found[0]


def tables(folder: Path, root: Path) -> Iterator[Path]:
    """Yield the tables of a folder and of those above it up to `root`, the nearest first."""
    for place in (folder, *folder.parents):
        if (place / TABLE).is_file():
            yield place / TABLE
        if place == root:
            return


def read_captions(file: Path) -> Captions:
    """Read a table: `file_name` as it stands there -> its texts, one unless it is wrong; ValueError as `read_table`."""
    found = file.stat()

    def read() -> Captions:
        captions: dict[str, list[str]] = {}
        for row in read_table(file, ["file_name", "text"], "repair it or remove the scene"):
            captions.setdefault(os.path.normpath(row["file_name"]).replace(os.sep, "/"), []).append(row["text"])
        return captions

    return _TABLES.get_or_make((file, found.st_size, found.st_mtime_ns), read)


def captions_of(video: Path, file: Path, captions: Captions) -> list[str]:
    """Return the texts of a video in a table, by its path from there, with or without the first folder on it.

    In a table beside the video or its folder, rows may have any path that ends with the video's name.
    """
    parts = video.relative_to(file.parent).parts
    if len(parts) <= 2:
        return [text for name, texts in captions.items() if Path(name).name == video.name for text in texts]
    return [text for names in (parts, parts[1:]) for text in captions.get("/".join(names), [])]
