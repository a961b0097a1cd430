"""What every tracker leaves in the run's folder can be read back: curves and media; nobody asks the network."""

import dataclasses
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from flow_grpo.reporting.sinks import trackio as trackio_sink
from flow_grpo.reporting.sinks.sink import Opening
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.schema import KNOBS
from tests.some import some

ROOT = Path(__file__).parents[2]
CURVE = [(1, 1.0), (2, 2.0), (3, 3.0)]
AGAIN = [(3, 30.0), (4, 40.0)]  # of the run resumed at step 2, which had logged 3 before it was interrupted
START = """
import socket, sys, torch
from pathlib import Path
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.runtime.video_file import write_video

asked, real = [], socket.getaddrinfo
def no_network(host, *arguments, **options):
    if host in ("localhost", "127.0.0.1", b"localhost", b"127.0.0.1", None):
        return real(host, *arguments, **options)
    asked.append(host)
    raise socket.gaierror("there is no network")
socket.getaddrinfo = no_network

name, folder = sys.argv[1], Path(sys.argv[2])
config = {"seed": 1, "sample": {"k": 4, "sde_steps": (1, 2)}}
for resumed, steps, factor in ((None, (1, 2, 3), 1.0), (2, (3, 4), 10.0)):
    tracker = Tracker(folder, config, (name,), World(), resumed_step=resumed, direction=lambda _: -1)
    for step in steps:
        tracker.log({"train/loss": factor * step, "eval/trans_err_m": 1.0 / step}, step)
    if resumed is None:
        video = torch.linspace(0, 1, 5).view(1, 5, 1, 1).expand(3, 5, 16, 32)
        file = folder / "room.mp4"
        tracker.log_file("eval/room", file, lambda: write_video(file, video), "reward 0.7", 2)
        tracker.log_table("eval/presets", [{"preset": "arc_left", "error": 1.5}, {"preset": "pan_left"}], 2)
    tracker.close()
sys.exit(f"asked for {asked}" if asked else 0)
"""


@dataclasses.dataclass
class Found:
    """What a tracker has: the scalar `train/loss`, and the captions of media or the text of tables by name."""

    curve: list[tuple[int, float]]
    media: dict[str, str]
    files: list[Path]  # of the media
    ids: set[str]


def records(file: Path, magic: bytes, kind: Callable[[], Any]) -> Iterator[Any]:
    """Yield the records of a LevelDB log: blocks of 32 KiB, 7 bytes before every piece."""
    content, place, piece = file.read_bytes(), 7, b""
    assert content[:4] == magic
    while place < len(content):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, length, part = struct.unpack("<IHB", content[place : place + 7])
        piece += content[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # whole, or the last piece
            record = kind()
            record.ParseFromString(piece)
            yield record
            piece = b""


def of_wandb(run: Path) -> Found:
    from wandb.proto import wandb_internal_pb2

    found, summaries = Found([], {}, [], set()), {}
    for file in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in records(file, b":W&B", wandb_internal_pb2.Record):
            found.ids |= {record.run.run_id} if record.HasField("run") else set()
            if record.HasField("metric") and record.metric.name == "eval/trans_err_m":
                summaries[record.metric.step_metric] = (record.metric.summary.last, record.metric.summary.min)
            row: dict[str, Any] = {}
            for item in record.history.item:  # of a medium one for each of its properties
                name, *inside = item.nested_key
                value = json.loads(item.value_json)
                row[name] = row.get(name, {}) | {inside[0]: value} if inside else value
            if "train/loss" in row:
                found.curve.append((row["train/epoch"], row["train/loss"]))
                assert row["eval/epoch"] == row["train/epoch"]
            for name, value in row.items():
                if isinstance(value, dict) and "path" in value:
                    found.files.append(file.parent / "files" / value["path"])
                    found.media[name] = value.get("caption") or found.files[-1].read_text()
    assert summaries == {"eval/epoch": (True, True)}
    return found


def of_tensorboard(run: Path) -> Found:
    seen = EventAccumulator(str(run / "tensorboard"), size_guidance={"images": 0})
    seen.Reload()
    texts = {tag: seen.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in seen.Tags()["tensors"]}
    media = {name.removesuffix("/text_summary").removesuffix("/caption"): text for name, text in texts.items()}
    assert seen.Images("eval/room")[0].encoded_image_string.startswith(b"GIF")
    assert seen.Images("eval/curves")[0].encoded_image_string.startswith(b"\x89PNG")
    return Found([(event.step, event.value) for event in seen.Scalars("train/loss")], media, [], set())


def of_swanlab(run: Path) -> Found:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record  # type: ignore[import-not-found,unused-ignore]

    found = Found([], {}, [], set())
    for file in sorted(run.glob("swanlab/run-*/*.swanlab")):
        for record in records(file, b":SWL", Record):
            found.ids |= {record.start.id} if record.HasField("start") else set()
            if record.scalar.key == "train/loss":
                found.curve.append((record.scalar.step, record.scalar.value.number))
            for item in record.media.value.items if record.HasField("media") else ():
                [path] = file.parent.glob(f"media/*/{item.filename}")
                found.files.append(path)
                found.media[record.media.key] = item.caption or path.read_text()
    return found


def of_trackio(run: Path) -> Found:
    found = Found([], {}, [], set())
    database = sqlite3.connect(run / "trackio" / "flow_grpo.db")
    for run_id, step, content in database.execute("select run_id, step, metrics from metrics order by id"):
        found.ids.add(run_id)
        row = json.loads(content)
        if "train/loss" in row:
            found.curve.append((step, row["train/loss"]))
        for name, value in row.items():
            if isinstance(value, dict):
                found.media[name] = value.get("caption") or json.dumps(value)
                found.files += [run / "trackio" / "media" / value["file_path"]] if "file_path" in value else []
    database.close()
    return found


READERS = {"wandb": of_wandb, "tensorboard": of_tensorboard, "swanlab": of_swanlab, "trackio": of_trackio}
# Past the step that a run resumes from tensorboard forgets; the others keep both.
CURVES = dict.fromkeys(READERS, CURVE + AGAIN) | {"tensorboard": CURVE[:2] + AGAIN}
VIDEOS = {"wandb": b"ftyp", "swanlab": b"GIF89a", "trackio": b"ftyp"}


@pytest.mark.parametrize("name", some(get_args(get_args(KNOBS["trackers"].kind)[0]), "wandb"))
def test_a_tracker_keeps_curves_and_media_in_the_run_s_folder_and_needs_no_network(name: str, tmp_path: Path) -> None:
    run, home = tmp_path / "run", tmp_path / "home"
    home.mkdir()
    theirs = ("WANDB_", "SWANLAB_", "TRACKIO_", "HF_")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(theirs)}
    environment = {**kept, "HOME": str(home), "HF_TOKEN": "hf_none", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", START, name, str(run)]
    done = subprocess.run(command, check=False, env=environment, cwd=home, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "does not get everything" not in done.stderr
    found = READERS[name](run)
    assert found.curve == CURVES[name]
    assert found.media["eval/room"] == "reward 0.7"
    assert found.media["eval/curves"] == "rewards and held-out metrics"
    assert "arc_left" in found.media["eval/presets"] and "1.5" in found.media["eval/presets"]
    assert all(file.is_file() and run in file.parents for file in found.files)
    if name in VIDEOS:
        assert any(VIDEOS[name] in file.read_bytes()[:16] for file in found.files)
        assert len(found.ids) == 1


def test_trackio_never_meets_matplotlib_while_another_thread_is_importing_it_to_draw(tmp_path: Path) -> None:
    """It would drop the metrics of a log then, which happened on loaded machines."""
    code = (
        "import sys, pathlib; from flow_grpo.reporting.sinks import trackio; "
        "trackio._load(pathlib.Path(sys.argv[1])); print(sys.modules['matplotlib.figure'].Figure.__name__)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path / "trackio")]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True)
    assert done.stdout == "Figure\n", done.stderr


@pytest.mark.parametrize(
    ("environment", "mode"),
    [({}, "offline"), ({"SWANLAB_API_KEY": "x"}, "online"), ({"SWANLAB_MODE": "local", "SWANLAB_API_KEY": "x"}, None)],
)
def test_swanlab_is_offline_unless_a_key_or_a_mode_is_set(environment, mode, tmp_path, monkeypatch):
    import swanlab  # type: ignore[import-not-found,unused-ignore]

    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("SWANLAB_API_KEY", "SWANLAB_MODE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    given: dict[str, Any] = {}
    monkeypatch.setattr(swanlab, "init", lambda **arguments: given.update(arguments))
    Tracker(tmp_path / "run", {}, ("swanlab",), World())._serving.finish(60.0)
    assert given["mode"] == mode
    assert given["log_dir"] == str(tmp_path / "run" / "swanlab")


def test_trackio_writes_one_folder_a_process_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    of_another_run = SimpleNamespace(TRACKIO_DIR=Path("/another/run/trackio"))
    monkeypatch.setattr(trackio_sink.importlib, "import_module", lambda _: of_another_run)
    with pytest.raises(RuntimeError, match="one folder for Trackio, and this one writes to /another/run"):
        trackio_sink.Trackio(Opening(tmp_path, {}))
    assert "TRACKIO_DIR" not in os.environ
