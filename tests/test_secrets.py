"""Keys, tokens and passwords reach neither console, logs, error messages nor any file of a run."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import train_grpo
from flow_grpo.reporting.drawing import plots
from flow_grpo.rewards.base import build_reward
from flow_grpo.rewards.remote.protocol import TOKEN
from flow_grpo.settings.errors import ConfigError
from tests.bad_input_cases import Setup
from tests.scripted_server import HEALTH, ScriptedServer, answer, serving
from tests.toy import condition
from tools.serving.http_server import RewardServer
from tools.serving.scoring_service import LocalScorer, ScoringService

KEY, SECRET, PASSWORD = "5e47ab1e" * 5, "token-that-nobody-may-see", "hunter2-of-the-judge"
SERVED = {"reward.weights": "remote:motion_mag=1", "data.num_workers": 0}


@pytest.fixture
def setup(valid, tmp_path, monkeypatch, caplog) -> Setup:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.setenv(TOKEN, SECRET)
    picture = Image.new("RGB", (1, 1))  # curves cost more than these runs
    monkeypatch.setattr(plots, "draw_curves", lambda rows, path, **_: picture.save(path))
    caplog.set_level(logging.DEBUG)
    setup = Setup(valid).copy(tmp_path / "setup")
    setup.knobs = {**SERVED, "trackers": "tensorboard", "eval.videos": 1, "debug": "true"}
    return setup


@contextlib.contextmanager
def judge(token: str, data: Path) -> Iterator[str]:
    service = ScoringService(LocalScorer(build_reward("motion_mag", data_root=data)), 2**28)
    with serving(RewardServer(("127.0.0.1", 0), service, timeout_s=10.0, token=token)) as server:
        yield server.url


def nothing_seen(folder: Path, capfd, caplog) -> str:
    """Return what was printed and logged, once no byte of it or of any file is a secret."""
    printed = "".join(capfd.readouterr()) + caplog.text
    places = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    for secret in (KEY, SECRET, PASSWORD):
        assert secret not in printed
        assert not [file for file, content in places.items() if secret.encode() in content]
    return printed


@pytest.mark.parametrize(
    "trackers", ["tensorboard", pytest.param("wandb,tensorboard,swanlab,trackio", marks=pytest.mark.slow)]
)
def test_a_whole_run_with_a_served_reward_writes_no_secret(setup, capfd, caplog, trackers):
    setup.knobs["trackers"] = trackers
    with judge(SECRET, setup.folder / "world") as url:
        assert train_grpo.main([*setup.words, f"--config.reward.remote.motion_mag={url}"]) == 0
    printed = nothing_seen(setup.folder, capfd, caplog)
    assert "remote:motion_mag is" in printed and "POST /score 200" in printed
    run = setup.folder / "runs" / "run"
    for left in ("config.json", "metrics.jsonl", "metrics.csv", "tensorboard", "checkpoints", "videos", "adapter"):
        assert (run / left).exists(), left
    assert ("wandb" in trackers) == (run / "wandb").is_dir()


def test_a_server_that_refuses_the_token_ends_the_run_without_telling_it(setup, capfd, caplog):
    with judge("another", setup.folder / "world") as url:
        assert train_grpo.main([*setup.words, f"--config.reward.remote.motion_mag={url}"]) == 2
    printed = nothing_seen(setup.folder, capfd, caplog)
    assert "refused, status 401: the token is missing or wrong" in printed
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: remote:motion_mag refused, status 401") and "mend reward.remote.motion_mag" in line


@pytest.mark.parametrize(
    "health",
    [
        answer({"error": f"unknown token Bearer {SECRET}"}, 401),
        answer({"error": f"unknown token Bearer {SECRET}"}, 503),
        answer(HEALTH | {"model": SECRET, "rewards": ["motion_mag"]}),
        answer({"protocol": SECRET}),
        answer(f"<html>{SECRET}".encode()),
        lambda connection, _: connection.sendall(f"{SECRET}\r\n\r\n".encode()),
    ],
    ids=["refuses", "is busy", "is named so", "speaks so", "no JSON", "no HTTP"],
)
def test_a_server_that_sends_the_token_back_does_not_get_it_into_a_log(tmp_path, monkeypatch, capfd, caplog, health):
    monkeypatch.setenv(TOKEN, SECRET)
    caplog.set_level(logging.DEBUG)
    with ScriptedServer(answer({"error": SECRET}, 400), health=health) as server:
        reward = build_reward("remote:motion_mag", data_root=".", servers={"motion_mag": server.url}, timeout_s=5.0)
        reward.delays_s = ()
        result = reward(torch.zeros(1, 3, 5, 8, 8), [condition()])
        assert SECRET in server.asked[0][1]["Authorization"]
    assert not result.valid.any() and result.causes[0] and SECRET not in result.causes[0]
    nothing_seen(tmp_path, capfd, caplog)


@pytest.mark.parametrize(
    "address",
    [
        f"http://me:{PASSWORD}@127.0.0.1:1",
        f"http://{PASSWORD}@127.0.0.1:1",
        f"me:{PASSWORD}@127.0.0.1:1",
        f"http://127.0.0.1:1?token={PASSWORD}",
        f"http://127.0.0.1:1/score#{PASSWORD}",
    ],
)
@pytest.mark.parametrize("knob", ["reward.remote.a", "reward.remote", "reward.remotes", "data.num_frames"])
def test_a_password_in_an_address_is_refused_without_quoting_it(tmp_path, capfd, caplog, address, knob):
    value = f"a={address}" if knob == "reward.remote" else address
    assert train_grpo.main([*Setup(tmp_path).words, f"--config.{knob}={value}"]) == 2
    printed = nothing_seen(tmp_path, capfd, caplog)
    assert f"error: config.{knob.removesuffix('.a')}" in printed


def test_a_word_that_is_no_setting_is_refused_without_its_password():
    assert PASSWORD not in str(ConfigError(f"argument '--reward=http://me:{PASSWORD}@h' is not understood"))
    plain = "config.reward.remote: got 'h', must be names; for example --config.reward.remote=a=http://127.0.0.1:8000"
    assert str(ConfigError(plain)) == plain
