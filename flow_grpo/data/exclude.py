"""Files of verdicts that exclude unusable (scene, target camera) items from training.

Verdicts depend on the videos and on how they are cut and resized: the file records both, and others are refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.json_files import read_json_object
from flow_grpo.settings.schema import DataConfig

Verdicts = dict[str, dict[str, str]]
"""scene -> target camera -> "" if usable, else the reason to exclude it."""

_TOOL = "make it with tools/check_sources.py"


def settings_of(data: DataConfig) -> dict[str, object]:
    """Data settings that verdicts depend on, JSON-able."""
    names = ("num_frames", "height", "width", "buckets", "reference")
    return {name: list(value) if isinstance(value := getattr(data, name), tuple) else value for name in names}


def read_verdicts(
    file: Path, settings: Mapping[str, object], contents: Mapping[str, str], *, forget: bool = False
) -> Verdicts:
    """Read the verdicts of a file written by `write_verdicts` with the same `settings_of` settings.

    `contents` has every scene's hash of its files, see `multicam.contents_by_scene`; a scene without verdicts is not
    judged. With `forget`, scenes whose files have changed are left out instead of refused, to judge them again.

    Raises:
        ValueError: missing file, not a file of verdicts, other settings, or verdicts of another data set.
    """
    content = read_json_object(file, _TOOL)
    verdicts, made_with, made_from = (content.get(part) for part in ("verdicts", "settings", "contents"))
    if not (isinstance(made_with, dict) and isinstance(verdicts, dict) and all(map(_is_row, verdicts.values()))):
        raise ValueError(f"file {file} holds no settings and table scene -> camera -> verdict; {_TOOL}")
    others = [name for name, value in settings.items() if made_with.get(name) != value]
    if others:
        differing = ", ".join(f"data.{name} {made_with.get(name)} there and {settings[name]} here" for name in others)
        raise ValueError(f"file {file} was made with {differing}; {_TOOL} anew, or go back to those settings")
    if not isinstance(made_from, dict):
        raise ValueError(f"file {file} does not say from which files it was made; {_TOOL} anew")
    changed = [scene for scene in verdicts if scene in contents and made_from.get(scene) != contents[scene]]
    if verdicts and (verdicts.keys().isdisjoint(contents) or len(changed) == len(verdicts)):
        raise ValueError(
            f"file {file} holds verdicts of another data set, such as of {next(iter(verdicts))!r}, or every scene has "
            "changed since: delete it or name another file, and run tools/check_sources.py"
        )
    if changed and not forget:
        raise ValueError(
            f"file {file} was made before the files of {len(changed)} scenes changed, such as those of {changed[0]!r}; "
            "run tools/check_sources.py again, which judges only those"
        )
    return {scene: row for scene, row in verdicts.items() if scene not in changed}


def _is_row(row: object) -> bool:
    return isinstance(row, dict) and all(isinstance(text, str) for text in row.values())


def write_verdicts(
    verdicts: Mapping[str, Mapping[str, str]], settings: Mapping[str, object], contents: Mapping[str, str], file: Path
) -> None:
    """Write or replace a file of verdicts atomically; OSError if it cannot be written."""
    made_from = {scene: found for scene, found in contents.items() if scene in verdicts}
    content = {"settings": settings, "contents": made_from, "verdicts": verdicts}
    write_atomically(file, json.dumps(content, indent=1, sort_keys=True) + "\n")
