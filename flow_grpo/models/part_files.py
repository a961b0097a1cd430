"""Is a part of a model folder of one piece? Asked at the door, because most parts are loaded much later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flow_grpo.runtime.json_files import read_json_object

WAY_OUT = "download it again"


def check_part(folder: Path) -> dict[str, Any]:
    """Return the configuration of a part with weights, whose other files are fit to be loaded; none is read whole.

    Raises:
        ValueError: config.json is missing or torn, another JSON file is torn, or weights in safetensors, the only ones
            that are ever loaded, are missing or cut off.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder / 'config.json'} is missing; give a model folder in diffusers layout")
    check_json(folder)
    weights = set(folder.glob("*.safetensors"))
    for index in folder.glob("*.safetensors.index.json"):
        weights |= {folder / name for name in listed_shards(index).values()}
    if not weights:
        raise ValueError(f"no weights in {folder}: expected .safetensors files; download the folder again")
    for file in sorted(weights):
        try:
            with safe_open(file, framework="pt"):
                pass  # the header must account for every byte
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is missing or damaged: {error}; {WAY_OUT}") from None
    return read_json_object(folder / "config.json", WAY_OUT)


def check_json(folder: Path) -> None:
    """Refuse a part with a JSON file that holds no object; ValueError names it."""
    for file in sorted(folder.glob("*.json")):
        read_json_object(file, WAY_OUT)


def listed_shards(index: Path) -> dict[str, str]:
    """Return tensor name -> file name of a sharded file's index; ValueError for names that leave its folder."""
    listed = read_json_object(index, WAY_OUT).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
        raise ValueError(f"{index} is no index of shards, must hold a weight_map of texts; {WAY_OUT}")
    for shard in listed.values():
        if Path(shard).name != shard:
            raise ValueError(f"{index} names the shard {shard!r}, must be a file beside it; {WAY_OUT}")
    return listed
