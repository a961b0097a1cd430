"""Whatever a file or an answer holds, it is refused in one clear line or accepted by a rule: no traceback, no silence.

Every class of input has a valid example, a generator that damages it from a seed, the one place that opens it, and the
rule that an accepted input meets.
"""

import contextlib
import json
import os
import random
import shutil
import types
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from flow_grpo.data.camera_files import read_cameras
from flow_grpo.data.dataset import file_id
from flow_grpo.data.depth_files import read_depth
from flow_grpo.data.exclude import read_verdicts, write_verdicts
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.prompts import read_prompts
from flow_grpo.data.trajectories import read_path
from flow_grpo.data.video_io import read_video, video_size
from flow_grpo.maths.poses import check_poses
from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.encoders.texts import TextEncoder
from flow_grpo.models.files.adapter_files import CAMERA_FILE, LORA_FILE, load_adapter, save_adapter
from flow_grpo.models.files.model_files import read_tensors, stored_shapes
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.records import Condition
from flow_grpo.reporting.metric_files import MetricFiles
from flow_grpo.rewards.base import RewardSet, build_reward
from flow_grpo.rewards.remote import protocol
from flow_grpo.rewards.remote.reward import RemoteReward
from flow_grpo.run import starts
from flow_grpo.runtime.checkpoints import resume
from flow_grpo.runtime.json_files import read_json
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config
from tests import scripted_server
from tests.damage import damaged_bytes, damaged_json, damaged_text, ends
from tests.data.test_multicam import FRAMES, extrinsics, write_scene
from tests.data.test_video_io import encode, with_matrix
from tests.models.test_adapters import move, output, trained_model
from tests.run.test_run_state import a_run
from tests.scripted_server import HEALTH, ScriptedServer, scores, silent
from tests.tiny_models import CPU, make_tiny_folder, tiny_settings, tiny_transformer
from tests.tools.run_files import make_run
from tools.run_folder import read_run
from tools.serving.scoring_service import LocalScorer, RefusedError, ScoringService

TOKEN = "t0ken-of-the-judge"
ROOT = Path(__file__).parents[2]

Attempt = Callable[[random.Random], object]
"""Damages an input, opens it and asserts the rule of what is accepted; ValueError for a refusal."""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with a scene in val/, a model in model/ and a checkpoint in saved/."""
    folder = tmp_path_factory.mktemp("damage")
    write_scene(folder / "val" / "f18_aperture10" / "scene1", captions="metadata.csv")
    make_tiny_folder(folder / "model")
    a_run(folder)[0].save(folder / "saved", keep=1, world=World()).wait()
    return folder


@contextlib.contextmanager
def changed(file: Path, content: bytes) -> Iterator[None]:
    kept = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(kept)


# --- data


def damaged(file: Path, draw: random.Random) -> bytes:
    content = file.read_bytes()
    return damaged_text(json.loads(content), draw) if file.suffix == ".json" else damaged_bytes(content, draw)


def cameras(place: Path) -> Attempt:
    file = place / "camera_extrinsics.json"

    def attempt(draw: random.Random) -> None:
        file.write_bytes(damaged_text(extrinsics(), draw))
        poses = read_cameras(file, ("cam01", "cam10"), FRAMES)
        assert poses.shape == (2, FRAMES, 4, 4)
        check_poses(poses)

    return attempt


def depths(place: Path) -> Attempt:
    file = place / "clip.depth.npz"
    np.savez(file, depth=np.random.default_rng(0).uniform(1, 5, (3, 8, 12)), frames=[0, 2, 4])
    content = file.read_bytes()

    def attempt(draw: random.Random) -> None:
        file.write_bytes(damaged_bytes(content, draw))
        found = read_depth(place / "clip.mp4", 16, 24)
        assert found is not None and found.maps.shape == (len(found.frames), 16, 24)
        assert found.maps.isfinite().all() and (found.maps > 0).all()

    return attempt


def scene(place: Path) -> Attempt:
    folder = place / "val" / "f18_aperture10" / "scene1"
    presets = {"cam01": "zoom_in", "cam02": "pan_left"}

    def attempt(draw: random.Random) -> None:
        if draw.random() < 0.5:
            file, content = folder / "cameras" / "presets.json", damaged_text(presets, draw)
        else:
            file = folder / "metadata.csv"
            content = damaged_bytes(file.read_bytes(), draw)
        file.touch()
        with changed(file, content):
            data = MultiCamDataset(place, "val", (FRAMES, 16, 24), prompt="a room")
            found = [data.condition(index) for index in range(len(data))]
        for one in found:
            assert one.prompt.strip() and (one.preset is None or one.preset.strip())

    (folder / "cameras" / "presets.json").write_text(json.dumps(presets))
    return attempt


def video(place: Path) -> Attempt:
    original = next((place / "val").rglob("cam01.mp4")).read_bytes()

    def attempt(draw: random.Random) -> None:
        file = place / f"film{draw.choice(['.mp4', '.mkv', '.avi'])}"
        file.write_bytes(damaged_bytes(original, draw))
        video_size(file)
        pixels = read_video(file, FRAMES)
        assert pixels.shape[:2] == (3, FRAMES) and pixels.dtype == torch.uint8

    return attempt


def how_it_is_shown(place: Path) -> Attempt:
    """A display matrix, oblong pixels, a transfer function: a bright corner is where players show it, or a refusal."""
    numbers, film = [0.0, 1.0, -1.0, 0.5, 2.0, 1e-3], torch.zeros(3, FRAMES, 32, 48, dtype=torch.uint8)
    film[:, :, :16, :24] = 255
    turns = [(0, 1, -1, 0), (0, -1, 1, 0), (-1, 0, 0, -1), (-1, 0, 0, 1), (1, 0, 0, -1), (0, 1, 1, 0)]

    def attempt(draw: random.Random) -> None:
        file, transfer, aspect = place / "shown.mp4", draw.choice([1, 6, 13, 16, 18]), draw.choice(["1", "1", "4/3"])
        encode(file, film, color_trc=transfer, sample_aspect_ratio=Fraction(aspect))
        a, b, c, d = draw.choice([*turns, tuple(draw.choice(numbers) for _ in range(4))])
        with_matrix(file, (a, b, c, d))
        size, shown = video_size(file), read_video(file, FRAMES).float().mean(dim=(0, 1))
        assert size == (FRAMES, *shown.shape) and transfer < 16 and aspect == "1"
        upper, left = (b + d > 0, a + c > 0)  # where the corner at (-1, -1) is shown
        rows, columns = (side // 2 for side in shown.shape)
        corner = shown[:rows] if upper else shown[rows:]
        assert (corner[:, :columns] if left else corner[:, columns:]).mean() > 200 > 100 > shown.mean()

    return attempt


def prompts(place: Path) -> Attempt:
    whole = {
        ".txt": "a red kite\na dog \u2028 barks\n",
        ".csv": 'id,prompt\n1,"a cat, asleep"\n2,a dog\n',
        ".jsonl": '{"prompt": "a red kite", "id": 1}\n{"prompt": "a dog"}\n',
    }

    def attempt(draw: random.Random) -> None:
        ending = draw.choice([*whole])
        file = place / f"prompts{ending}"
        file.write_bytes(damaged_bytes(whole[ending].encode(), draw))
        if draw.random() < 0.2:
            file = file.rename(file.with_suffix(draw.choice([".tsv", "", ".json"])))
        found = read_prompts(file)
        assert found and len({*found}) == len(found) and file.suffix == ending
        assert all(prompt.strip() and "\n" not in prompt for prompt in found)
        assert ending != ".jsonl" or not any(prompt.startswith("{") for prompt in found)

    return attempt


def trajectory(place: Path) -> Attempt:
    poses = [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0.1 * step], [0, 0, 0, 1]] for step in range(4)]

    def attempt(draw: random.Random) -> None:
        file = place / "path.json"
        file.write_bytes(damaged_text({"poses": poses, "fps": 15, "relative": True}, draw))
        found = read_path(file, 3)
        assert found.shape == (3, 4, 4)
        check_poses(found)

    return attempt


def verdicts(place: Path) -> Attempt:
    file = place / "verdicts.json"
    files = {"val/scene1": "a hash"}
    write_verdicts({"val/scene1": {"cam01": "", "cam02": "blurred"}}, {"height": 16}, files, file)
    content = json.loads(file.read_text())

    def attempt(draw: random.Random) -> None:
        file.write_bytes(damaged_text(content, draw))
        for row in read_verdicts(file, {"height": 16}, files).values():
            assert all(isinstance(text, str) for text in row.values())

    return attempt


def metrics(place: Path) -> Attempt:
    """What is no record is dropped with a warning, so nothing is refused."""

    def attempt(draw: random.Random) -> None:
        folder = place / "metrics"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = MetricFiles(folder)
        for step in range(3):
            files.append({"a": float(step)}, step)
        lines = folder / "metrics.jsonl"
        lines.write_bytes(damaged_bytes(lines.read_bytes(), draw) + damaged_text({"step": 1, "a": 2.0}, draw))
        for row in MetricFiles(folder, resumed_step=2).rows.values():
            assert all(isinstance(value, int | float) for value in row.values())

    return attempt


# --- models


def model(place: Path) -> Attempt:
    def text_encoder(folder: Path) -> None:
        TextEncoder.from_folder(folder, torch.float32, device=CPU).embed("a room", 4)

    def codec(folder: Path) -> None:
        made = Codec.from_folder(folder / "vae", tiny_settings(), CPU)
        assert made.decode(made.encode(torch.rand(3, 5, 16, 24))[None]).shape == (1, 3, 5, 16, 24)

    def transformer(folder: Path) -> None:
        load_transformer(ReCamTransformer3DModel, folder / "transformer")

    parts = {"text_encoder": text_encoder, "tokenizer": text_encoder, "vae": codec, "transformer": transformer}

    def attempt(draw: random.Random) -> None:
        part = draw.choice(list(parts))
        file = draw.choice(sorted(file for file in (place / "model" / part).iterdir() if file.is_file()))
        with changed(file, damaged(file, draw)):
            parts[part](place / "model")

    return attempt


def adapter(place: Path) -> Attempt:
    """A header, names or whole tensors change; what loads has the effect of all of them at their scale."""
    model = trained_model()
    move(model)
    wanted = output(model)
    save_adapter(types.SimpleNamespace(module=model), place / "adapter")
    files = [place / "adapter" / name for name in (LORA_FILE, CAMERA_FILE)]

    def attempt(draw: random.Random) -> None:
        file, way = draw.choice(files), draw.randrange(4)
        tensors, header = read_tensors(file)
        names = sorted(tensors)
        if way == 0:
            tensors = {name: tensor for name, tensor in tensors.items() if draw.random() < 0.7}
        elif way == 1:
            tensors[draw.choice(["x", "", names[0] + "x", names[0].replace(".", "_")])] = tensors.pop(names[0])
        elif way == 2:
            name = draw.choice([*header])
            header[name] = damaged_text(header[name], draw).decode("utf-8", "replace").strip('"')
        content = file.read_bytes() if way == 3 else save(tensors, header)
        with changed(file, content[: draw.randrange(len(content))] if way == 3 else content):
            got = output(load_adapter(tiny_transformer(), place / "adapter"))
        assert torch.equal(got, wanted), f"{file.name}, {way}: another effect"

    return attempt


# --- runs


def run_folder(place: Path) -> Attempt:
    make_run(place / "finished", videos=False)
    files = [place / "finished" / name for name in ("config.json", "starts/001.json", "summary.json", "metrics.jsonl")]

    def attempt(draw: random.Random) -> None:
        with changed(file := draw.choice(files), damaged(file, draw)):
            assert isinstance(starts.configuration_of(place / "finished"), Config)
            found = read_run(place / "finished")
            assert found.finished >= 0 and found.starts
            starts.other_parts(place / "finished", {"vae": "x"})
            starts.next_commands(place / "finished")

    return attempt


# --- checkpoints


def checkpoint(place: Path) -> Attempt:
    original = place / "saved" / "checkpoint_000000"

    def attempt(draw: random.Random) -> None:
        run = place / "run"
        shutil.rmtree(run, ignore_errors=True)
        folder = Path(shutil.copytree(original, run / original.name))
        file = draw.choice(sorted(folder.iterdir()))
        file.write_bytes(damaged(file, draw))
        state, _ = a_run(run)
        found = resume.find(draw.choice(["auto", str(folder)]), run, world=World())
        assert found is not None
        state.restore(found, world=World())
        assert state.finished == 0 and state.train_seconds >= 0
        assert all(weight.is_floating_point() for weight in state.module.parameters())

    return attempt


# --- the network


ONE = Condition(
    index=0, gid=0, slot=0, prompt="a room", source_video=torch.zeros(3, 2, 8, 8), scene="val/scene1",
    target_poses=torch.eye(4, dtype=torch.float64).expand(2, 4, 4), source_camera="cam01", target_camera="cam02",
)  # fmt: skip
VIDEO = torch.zeros(1, 3, 2, 8, 8)


def damaged_file(content: bytes, draw: random.Random) -> bytes:
    meta, tensors = protocol.decode(content)
    if draw.random() < 0.7:
        content = save(tensors, {"json": json.dumps(damaged_json(meta, draw))})
    return damaged_bytes(content, draw) if draw.random() < 0.5 else content


def judge(server: ScriptedServer) -> RemoteReward:
    return RemoteReward("beauty", server.url, timeout_s=20.0, delays_s=())


def answer(place: Path) -> Attempt:
    server = ScriptedServer(silent).__enter__()

    def attempt(draw: random.Random) -> None:
        content = damaged_file(scores([ONE], 0.5, model=f"judge {TOKEN}"), draw)
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content
        whole = whole if draw.random() < 0.6 else damaged_bytes(whole, draw)
        server.health = scripted_server.answer(HEALTH | {"model": f"judge {TOKEN}"})
        server.acts = [lambda connection, _: connection.sendall(whole)]
        reward = judge(server)
        result = RewardSet([reward], {reward.name: 1.0})(VIDEO, [ONE])[reward.name]
        assert TOKEN not in str(reward.identity)
        if not result.valid.all():
            raise ValueError(result.causes[0])
        assert result.values.isfinite().all() and result.values.dtype == torch.float32

    return attempt


def health(place: Path) -> Attempt:
    server = ScriptedServer(silent).__enter__()

    def attempt(draw: random.Random) -> None:
        server.health = scripted_server.answer(damaged_text(HEALTH, draw))
        reward = judge(server)
        reward.try_server()
        assert reward.identity

    return attempt


def request(place: Path) -> Attempt:
    service = ScoringService(LocalScorer(build_reward("motion_mag", data_root=place)), 2**20)

    def attempt(draw: random.Random) -> None:
        try:
            found = service.read(damaged_file(protocol.encode_request("motion_mag", VIDEO, [ONE], ("source",)), draw))
        except RefusedError as error:
            raise ValueError(str(error)) from error
        assert len(found.videos) == len(found.conditions) == 1 and found.videos.dtype == torch.float32

    return attempt


# --- recipes


def recipe(place: Path) -> Attempt:
    sections = ["sample", "reward.weights", "data", "train", "eval", "data.prompt", "reward"]
    sections += ["num_epochs", "model.path"]
    values = ["None", "3", "-1", "10**400", "'x'", "[]", "{}", "float('nan')", "object()", "lambda: 0", "ConfigDict()"]
    ways = ["config.{} = {}", "with config.unlocked(), config.ignore_type(): config.{} = {}"]

    def attempt(draw: random.Random) -> None:
        lines = [draw.choice(ways).format(draw.choice(sections), draw.choice(values))]
        if draw.random() < 0.3:
            lines += [draw.choice(["sys.exit(0)", "raise OSError", "return", "return 5", "1 / 0", "del config", "def"])]
        text = "\n    ".join(["def run():", "config = toy()", *lines, "return config"])
        text = f"import sys\nfrom ml_collections import ConfigDict\nfrom tests.toy_recipe import toy\n\n\n{text}\n"
        file = place / "recipe.py"
        file.write_bytes(damaged_bytes(text.encode(), draw) if draw.random() < 0.1 else text.encode())
        words = draw.choice([[], ["--config.sample.k=8"], ["--config.reward.weights.source_match=0.5"]])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert isinstance(load_config(f"{file}:run", words), Config)

    return attempt


# A class of input -> how an attempt is made, and of how many cases the suite tries.
KINDS = {
    "camera file": (cameras, 60),
    "depth file": (depths, 30),
    "captions and presets": (scene, 20),
    "video": (video, 30),
    "how a video is shown": (how_it_is_shown, 30),
    "prompts": (prompts, 40),
    "trajectory": (trajectory, 40),
    "verdicts": (verdicts, 30),
    "metrics": (metrics, 10),
    "model part": (model, 30),
    "adapter": (adapter, 40),
    "run folder": (run_folder, 60),
    "checkpoint": (checkpoint, 60),
    "answer": (answer, 60),
    "health": (health, 30),
    "request": (request, 60),
    "recipe": (recipe, 40),
}


def tally(name: str, place: Path, numbers: range, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Return how many cases were refused and how many accepted; AssertionError listing all that were neither."""
    monkeypatch.setenv("FLOW_GRPO_REWARD_TOKEN", TOKEN)
    attempt, refused, accepted, wrong = KINDS[name][0](place), 0, 0, []
    for number in numbers:
        said = ""
        try:
            with ends():
                attempt(random.Random(f"{name} {number}"))
            accepted += 1
            continue
        except ValueError as error:
            said = str(error)
        except Exception as error:  # noqa: BLE001 - listed below
            wrong.append(f"{name} {number}: {type(error).__name__}: {error!s:.300}")
            continue
        refused += 1
        if not said or len(said.splitlines()) != 1 or TOKEN in said or len(said) > 2000:
            wrong.append(f"{name} {number}: said {said!r:.300}")
    assert not wrong, "\n".join(wrong)
    return refused, accepted


@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_input_is_refused_in_one_line_or_accepted_by_rule(name, place, monkeypatch):
    refused, _ = tally(name, place, range(KINDS[name][1]), monkeypatch)
    assert refused >= KINDS[name][1] // 4 or name == "metrics", f"only {refused} cases did damage"


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_ten_times_as_many_damaged_inputs_are_refused_or_accepted_by_rule(name, place, monkeypatch):
    tally(name, place, range(1000, 1000 + 10 * KINDS[name][1]), monkeypatch)


def test_a_pipe_is_refused_where_a_file_is_opened_and_never_waited_for(place, tmp_path):
    pipe = tmp_path / "model.safetensors"
    os.mkfifo(pipe)
    shutil.copytree(place / "saved" / "checkpoint_000000", tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").unlink()
    os.mkfifo(tmp_path / "saved" / "manifest.json")
    for opens in (
        lambda: read_json(pipe, "write it again"),
        lambda: read_tensors(pipe),
        lambda: stored_shapes(tmp_path),
        lambda: file_id(pipe),
        lambda: read_video(pipe, FRAMES),
        lambda: video_size(pipe),
        lambda: resume.resolve(str(tmp_path / "saved"), tmp_path, world=World()),
    ):
        with ends(), pytest.raises(ValueError, match=r"no regular file|does not exist"):
            opens()
