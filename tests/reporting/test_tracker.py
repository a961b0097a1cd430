"""The tracker writes files always, to the configured libraries, and on rank 0 only."""

import inspect
import io
import json
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from flow_grpo.reporting import tracker as tracker_module
from flow_grpo.reporting.sinks.gif import as_gif
from flow_grpo.reporting.sinks.tensorboard import Tensorboard
from flow_grpo.reporting.tracker import Tracker
from flow_grpo.runtime.ranks.process_group import Group, World
from flow_grpo.runtime.video_file import write_video

ALONE = World()
CONFIG = {"seed": 1, "sample": {"k": 4, "sde_steps": (1, 2)}}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def video() -> torch.Tensor:
    return torch.tensor([0, 120, 240], dtype=torch.uint8).view(1, 3, 1, 1).expand(3, 3, 16, 32)


def log_video(tracker: Tracker, name: str, path: Path, video: torch.Tensor, step: int) -> None:
    tracker.log_file(name, path, lambda: write_video(path, video), "reward 0.7", step)


def test_files_are_written_without_any_tracker_and_curves_at_each_evaluation(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path / "run", CONFIG, (), ALONE)
    tracker.log({"reward/mean": torch.tensor(0.5), "train/steps": 3}, 1)  # type: ignore[dict-item]
    tracker._making.finish(60.0)
    assert names(tmp_path / "run") == ["metrics.csv", "metrics.jsonl"]
    assert json.loads((tmp_path / "run/metrics.jsonl").read_text()) == {"step": 1, "reward/mean": 0.5, "train/steps": 3}
    tracker.log({"eval/trans_err_m": 0.5}, 1)
    tracker._making.finish(60.0)
    assert names(tmp_path / "run") == ["curves.png", "metrics.csv", "metrics.jsonl"]
    tracker.close()
    with Image.open(tmp_path / "run/curves.png") as picture:
        assert picture.format == "PNG"


@pytest.mark.parametrize("name", ["loss", "reward", "reward/", "rewards/mean", "/mean"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_outside_the_groups_is_refused_on_every_rank(name: str, rank: int, tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, CONFIG, (), World.of(Group(rank, 2)))
    said = f"'{name}' has no known group.*<group>/<name>.*reward, reward_by_camera, policy"
    with pytest.raises(ValueError, match=said):
        tracker.log({"train/fine": 1.0, name: 1.0}, 1)
    with pytest.raises(ValueError, match="has no known group"):
        tracker.log_file(name, tmp_path, print, "", 1)


def test_ranks_other_than_zero_write_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    tracker = Tracker(folder, CONFIG, ("tensorboard",), World.of(Group(1, 2)))
    tracker.log({"eval/x": 1.0}, 1)
    tracker.log_file("eval/v", folder / "video.mp4", print, "", 1)
    tracker.log_table("eval/t", [{"a": 1}], 1)
    tracker.write_summary({})
    tracker.close()
    assert not folder.exists()


def test_a_tracker_that_is_not_installed_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ValueError, match="trackers='wandb' is not installed; pip install wandb"):
        Tracker(tmp_path, CONFIG, ("wandb",), ALONE)


def test_the_summary_is_what_it_was_given_and_is_deleted_when_the_run_is_extended(tmp_path: Path) -> None:
    given = {"before": {"eval/a": 1.0}, "split": "tune", "train_seconds": 12.5}
    tracker = Tracker(tmp_path, CONFIG, (), ALONE)
    tracker.begin()
    tracker.write_summary(given)
    assert json.loads((tmp_path / "summary.json").read_text()) == given
    tracker.begin()
    assert not (tmp_path / "summary.json").exists()


def test_a_long_high_video_becomes_a_small_gif_of_the_same_duration(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    write_video(film, torch.rand(3, 81, 240, 416), 15)
    with Image.open(io.BytesIO(as_gif(film))) as gif:
        assert (gif.size, gif.n_frames) == ((208, 120), 21)
        assert gif.n_frames * gif.info["duration"] == pytest.approx(1000 * 81 / 15, rel=0.05)


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_gets_scalars_videos_and_tables(tmp_path: Path, video: torch.Tensor) -> None:
    tracker = Tracker(tmp_path / "run", CONFIG, ("tensorboard",), ALONE)
    tracker.log({"reward/mean": 0.5, "eval/trans_err_m": 0.25}, 3)
    log_video(tracker, "eval/room", tmp_path / "room.mp4", video, 3)
    tracker.log_table("eval/worst", [{"scene": "a", "error": 1.5}, {"scene": "b"}], 3)
    tracker.log_table("eval/nothing", [], 3)
    tracker.close()
    seen = events(tmp_path / "run")
    assert [(event.step, event.value) for event in seen.Scalars("eval/trans_err_m")] == [(3, 0.25)]
    assert seen.Tags()["scalars"] == ["reward/mean", "eval/trans_err_m"]
    assert seen.Images("eval/curves")[0].encoded_image_string == (tmp_path / "run/curves.png").read_bytes()
    event = seen.Images("eval/room")[0]
    (tmp_path / "room.gif").write_bytes(event.encoded_image_string)
    with Image.open(tmp_path / "room.gif") as gif:
        assert (event.width, event.height, gif.n_frames) == (32, 16, 3)
        assert gif.info["duration"] == 60  # 15 a second, in steps of 10 ms
        brightness = [float(np.asarray(frame.convert("L")).mean()) for frame in ImageSequence.Iterator(gif)]
    assert brightness == pytest.approx([0, 120, 240], abs=6)
    texts = {tag: seen.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in seen.Tags()["tensors"]}
    assert texts["eval/worst/text_summary"] == "scene|error\n---|---\na|1.5\nb|"
    assert texts["eval/room/caption/text_summary"] == "reward 0.7"
    assert '"k": 4' in texts["config/text_summary"]


def test_a_resumed_tensorboard_shows_nothing_past_the_resumed_step(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, CONFIG, ("tensorboard",), ALONE)
    for step in (1, 2, 3):
        tracker.log({"reward/mean": float(step)}, step)
    tracker.close()
    tracker = Tracker(tmp_path, CONFIG, ("tensorboard",), ALONE, resumed_step=2)
    tracker.log({"reward/mean": 30.0}, 3)
    tracker.close()
    assert [(event.step, event.value) for event in events(tmp_path).Scalars("reward/mean")] == [(1, 1), (2, 2), (3, 30)]


def checked(real: Callable[..., Any], answer: Callable[..., Any]) -> mock.Mock:
    """Return a stand-in that refuses calls which the installed library would refuse."""
    signature = inspect.signature(real)

    def call(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return answer(*args, **kwargs)

    return mock.Mock(side_effect=call)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    real = pytest.importorskip("wandb")
    methods = ("define_metric", "log", "finish")
    calls = {name: checked(partial(getattr(real.Run, name), None), lambda *_args, **_kwargs: None) for name in methods}
    run = SimpleNamespace(**calls)
    image = checked(real.Image, lambda *args, **kwargs: (args, kwargs))
    fake = SimpleNamespace(run=run, init=checked(real.init, lambda **_kwargs: run), Settings=real.Settings, Image=image)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_PROJECT", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(variable, raising=False)
    return fake


def test_wandb_gets_every_group_with_its_step_axis(tmp_path: Path, wandb: Any, caplog: Any) -> None:
    tracker = Tracker(tmp_path / "run", CONFIG, ("wandb",), ALONE, direction={"eval/x": -1}.get)  # type: ignore[arg-type]
    tracker.log({"reward/mean": 0.5}, 3)
    tracker.log({"time/epoch": 0.5, "eval/x": 1.0}, 4)
    tracker.close()
    arguments = wandb.init.call_args.kwargs
    assert (arguments["name"], arguments["dir"], arguments["config"]) == ("run", str(tmp_path / "run"), CONFIG)
    axes = {call.args[0]: call.kwargs.get("step_metric") for call in wandb.run.define_metric.call_args_list}
    epoch_groups = ("reward", "reward_by_camera", "policy", "dyn", "train", "tail", "time", "system", "server")
    assert axes == {
        "train/epoch": None,
        "eval/epoch": None,
        **{f"{group}/*": "eval/epoch" for group in ("eval", "eval_by_camera", "eval_change", "eval_floor", "fixed")},
        **{f"{group}/*": "train/epoch" for group in epoch_groups},
        "eval/x": "eval/epoch",
    }
    summaries = {call.args[0]: call.kwargs.get("summary") for call in wandb.run.define_metric.call_args_list}
    assert {name: summary for name, summary in summaries.items() if summary} == {"eval/x": "last,min"}
    logged = [call.args[0] for call in wandb.run.log.call_args_list]
    assert logged[:2] == [
        {"reward/mean": 0.5, "train/epoch": 3},
        {"time/epoch": 0.5, "eval/x": 1.0, "train/epoch": 4, "eval/epoch": 4},
    ]
    assert [set(row) for row in logged[2:]] == [{"eval/curves", "eval/epoch"}] * 2
    wandb.run.finish.assert_called_once()
    # After closing metrics still reach the files, and no tracker.
    tracker.log({"time/close_s": 2.0}, 4)
    tracker._serving.finish(10.0)
    assert wandb.run.log.call_count == len(logged) and not caplog.records
    assert '"time/close_s": 2.0' in (tmp_path / "run" / "metrics.jsonl").read_text()


@pytest.mark.parametrize(
    ("environment", "mode", "resume"),
    [
        ({}, "offline", None),
        ({"WANDB_API_KEY": "0" * 40}, None, "allow"),
        ({"WANDB_MODE": "disabled"}, None, "allow"),
        ({"NETRC_CONTENT": "machine api.wandb.ai login user password x"}, None, "allow"),
        ({"NETRC_CONTENT": "machine api.forge.coreweave.com login user password x"}, None, "allow"),
        ({"NETRC_CONTENT": "machine own.org login a password x", "WANDB_BASE_URL": "http://own.org"}, None, "allow"),
        ({"NETRC_CONTENT": "machine api.wandb.ai login a password x", "WANDB_BASE_URL": "http://a.b"}, "offline", None),
        ({"NETRC_CONTENT": "machine example.org login user password x"}, "offline", None),
    ],
)
def test_wandb_is_offline_unless_a_key_or_a_mode_is_set(environment, mode, resume, tmp_path, monkeypatch, wandb):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.netrc").write_text(environment.pop("NETRC_CONTENT", ""))
    (tmp_path / "home/.netrc").chmod(0o600)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    Tracker(tmp_path / "run", CONFIG, ("wandb",), ALONE).close()
    arguments = wandb.init.call_args.kwargs
    assert (arguments["mode"], arguments["resume"]) == (mode, resume)


def test_a_resumed_wandb_run_keeps_its_id_and_a_fresh_one_gets_another(tmp_path: Path, wandb: Any) -> None:
    ids = []
    for resumed_step in (None, 2, None):
        Tracker(tmp_path, CONFIG, ("wandb",), ALONE, resumed_step=resumed_step).close()
        ids.append(wandb.init.call_args.kwargs["id"])
    assert ids[0] == ids[1] != ids[2]


class Failing(Tensorboard):
    def scalars(self, metrics: Any, step: int) -> None:
        raise ConnectionError("no route to host")


SINK = "flow_grpo.reporting.sinks.tensorboard.Tensorboard"


@pytest.mark.parametrize(
    ("stand_in", "why"),
    [(mock.Mock(side_effect=OSError("no such host")), "OSError: no such host"), (Failing, "no route to host")],
    ids=["when it is opened", "when it is used"],
)
def test_a_tracker_that_fails_is_warned_of_once_and_stops_nothing(stand_in, why, tmp_path, video, caplog, monkeypatch):
    monkeypatch.setattr(SINK, stand_in)
    tracker = Tracker(tmp_path, CONFIG, ("tensorboard",), ALONE)
    for step in (1, 2, 3):
        tracker.log({"reward/mean": 0.5}, step)
    log_video(tracker, "eval/room", tmp_path / "room.mp4", video, 3)
    tracker.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert {"room.mp4", "curves.png"} <= set(names(tmp_path))
    [warning] = caplog.messages
    assert "tensorboard does not get everything" in warning and why in warning


def test_a_tracker_that_hangs_delays_neither_an_epoch_nor_a_file_nor_the_end(tmp_path, video, caplog, monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(SINK, lambda _opening: answered.wait())
    tracker = Tracker(tmp_path, CONFIG, ("tensorboard",), ALONE)
    tracker.log({"eval/x": 0.5}, 1)
    log_video(tracker, "eval/room", tmp_path / "room.mp4", video, 1)
    tracker._making.finish(60.0)
    assert names(tmp_path) == ["curves.png", "metrics.csv", "metrics.jsonl", "room.mp4"]
    monkeypatch.setattr(tracker_module, "CLOSING_S", 0.2)
    tracker.close()
    assert "reports are not done after 0.2 seconds" in caplog.text
    answered.set()
    tracker._making.finish(60.0)
    tracker._serving.finish(60.0)
