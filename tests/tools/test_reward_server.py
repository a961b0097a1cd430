"""A hosted reward gives the very scores of the local one, and every request that is not as agreed is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import io
import json
import math
import pickle
import re
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from flow_grpo import rewards
from flow_grpo.records import RewardResult
from flow_grpo.rewards.base import build_reward
from flow_grpo.rewards.remote.http_client import TOKEN
from flow_grpo.rewards.remote.reward import RemoteReward, RetryPolicy, protocol
from tests.limits import LIMIT_S
from tests.room_films import conditions, film, like_a_codec
from tests.scripted_server import serving
from tools import reward_server
from tools.reward_server import build, parse
from tools.serving import http_server
from tools.serving.http_server import RewardServer, is_loopback
from tools.serving.scoring_service import NEEDS, LocalJudge, ScoringService

ROOT = Path(__file__).resolve().parents[2]
FILM = film(["pan_left", "zoom_in"])
TRUE = (FILM.videos * 255).round() / 255
VIDEOS = (like_a_codec(TRUE) * 255).round() / 255
POLICY = RetryPolicy(timeout_s=LIMIT_S, delays_s=())


def judged_conditions(root: Path | None = None):
    return conditions(dataclasses.replace(FILM, videos=TRUE), source=VIDEOS.flip(0), root=root)


class Fake:
    """A judge of two scores: `answer` says what it makes of the videos."""

    model, version, scores, needs = "fake", "v1", ("first", "second"), ()

    def __init__(self, answer=lambda videos: videos.mean(dim=(1, 2, 3, 4))) -> None:
        self.answer = answer
        self.calls = 0

    def __call__(self, videos, conditions):
        self.calls += 1
        values = self.answer(videos)
        valid = torch.ones(len(values), dtype=torch.bool)
        return {
            name: RewardResult(sign * values, valid, ("",) * len(values))
            for name, sign in (("first", 1), ("second", -1))
        }


@contextlib.contextmanager
def hosting(judge, *, max_bytes: int = 2**26, timeout_s: float = LIMIT_S, token: str = "") -> Iterator[RewardServer]:
    service = ScoringService(judge, max_bytes)
    with serving(RewardServer(("127.0.0.1", 0), service, timeout_s=timeout_s, token=token)) as server:
        yield server


def ask(server: RewardServer, name: str = "first"):
    return RemoteReward(name, server.url, POLICY)(VIDEOS, judged_conditions())


def request(reward: str = "first", samples: int = 2, **changes) -> protocol.Message:
    described = [protocol.describe(condition) for condition in judged_conditions()][:samples]
    meta = {"protocol": 1, "reward": reward, "fps": 15.0, "samples": described}
    return protocol.encode(meta | changes, {"videos": protocol.to_pixels(VIDEOS)})


def post(
    server: RewardServer, message: protocol.Message | bytes, path: str = "/score", **headers: str
) -> tuple[int, str]:
    """Send a request by hand and return status and error."""
    connection = http.client.HTTPConnection(*server.address, timeout=LIMIT_S)
    kind = message.content_type if isinstance(message, protocol.Message) else "multipart/form-data; boundary=x"
    body = b"".join(message.chunks) if isinstance(message, protocol.Message) else message
    connection.request("POST", path, body, {"Content-Type": kind, **headers})
    response = connection.getresponse()
    said = json.loads(response.read())
    connection.close()
    assert "\n" not in said.get("error", "")
    return response.status, said.get("error", "")


@pytest.mark.parametrize("name", ["target_view", "target_psnr", "source_match", "motion_mag", "room_pose"])
def test_a_hosted_reward_gives_the_scores_of_the_local_one_bit_for_bit(name, tmp_path):
    asked = judged_conditions(tmp_path)
    local = build_reward(name, data_root=tmp_path)(VIDEOS, asked)
    with serving(build(parse(["--reward", name, "--port", "0", "--data-root", str(tmp_path)]))) as server:
        far = RemoteReward(name, server.url, POLICY)(VIDEOS, asked)
    assert local.valid.all() and far.valid.all(), far.causes
    assert torch.equal(far.values, local.values)


def test_a_function_of_one_s_own_is_served_under_its_name(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text("def warmth(videos, conditions):\n    return (videos[:, 0] - videos[:, 2]).mean(dim=(1, 2, 3))\n")
    expected = build_reward(f"{file}:warmth", data_root=".")(TRUE, judged_conditions())
    with serving(build(parse(["--reward", f"{file}:warmth", "--port", "0"]))) as server:
        found = RemoteReward("warmth", server.url, POLICY)(TRUE, judged_conditions())
    assert found.valid.all() and torch.equal(found.values, expected.values)


def test_what_the_reward_cannot_score_arrives_as_not_valid_with_its_cause():
    asked = [dataclasses.replace(judged_conditions()[0], target_video=None), judged_conditions()[1]]
    with serving(build(parse(["--reward", "target_view", "--port", "0"]))) as server:
        far = RemoteReward("target_view", server.url, POLICY)(VIDEOS, asked)
    assert far.valid.tolist() == [False, True] and "has no target video" in far.causes[0]
    assert not far.faulty.any()  # nothing failed: there is nothing to measure by


class Unable(Fake):
    """Fails at its first score of the first video, and has nothing to measure the second one by."""

    def __call__(self, videos, conditions):
        neither, faulty = torch.tensor([False, False]), torch.tensor([True, False])
        first = RewardResult(torch.ones(2), neither, ("timeout", "no true view"), faulty=faulty)
        return super().__call__(videos, conditions) | {"first": first}


def test_what_the_judge_failed_at_arrives_as_a_fault():
    with hosting(Unable()) as server:
        for name in ("first", "second"):
            far = ask(server, name)
            assert far.causes == ("timeout", "no true view") and far.faulty.tolist() == [True, False]
        assert server.service.judge.calls == 2  # a failure is not what an equal request gets again


@pytest.mark.parametrize("name", NEEDS)
def test_a_local_reward_needs_no_video_that_it_does_not_ask_for(name, tmp_path):
    asked, needs = judged_conditions(tmp_path), LocalJudge(build_reward(name, data_root=tmp_path)).needs
    bare = [
        dataclasses.replace(
            condition,
            source_video=condition.source_video if "source" in needs else condition.source_video[:, :0],
            target_video=condition.target_video if "target" in needs else None,
        )
        for condition in asked
    ]
    whole, less = (build_reward(name, data_root=tmp_path)(VIDEOS, given) for given in (asked, bare))
    assert whole.causes == less.causes
    assert torch.equal(whole.values.nan_to_num(7.0), less.values.nan_to_num(7.0))


def test_the_version_of_a_local_reward_changes_with_any_code_of_the_rewards(tmp_path, monkeypatch):
    copy = tmp_path / "rewards"
    shutil.copytree(Path(rewards.__file__).parent, copy)
    before = LocalJudge(build_reward("pose_rot", data_root=".")).version
    monkeypatch.setattr(rewards, "__file__", str(copy / "__init__.py"))
    assert LocalJudge(build_reward("pose_rot", data_root=".")).version == before
    (copy / "camera" / "pnp.py").write_text("# other\n")
    assert LocalJudge(build_reward("pose_rot", data_root=".")).version != before


def test_the_program_says_where_it_listens_and_serves():
    words = [sys.executable, "tools/reward_server.py", "--reward", "motion_mag", "--port", "0"]
    program = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = program.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert url, line
        far = RemoteReward("motion_mag", url[0], POLICY)(VIDEOS, judged_conditions())
        assert torch.equal(far.values, build_reward("motion_mag", data_root=".")(VIDEOS, judged_conditions()).values)
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--reward", "target_view", "--host", "0.0.0.0"], "error: --host is 0.0.0.0, which other machines reach"),
        (["--reward", "target_view", "--token-env", "NO_SUCH_NAME"], "error: --token-env names NO_SUCH_NAME"),
        (
            ["--reward", "target_vew"],
            "error: --reward is 'target_vew', must be a name that --help lists, such as target_view",
        ),
        (["--reward", "hpsv3"], "error: --weights is None, must be the file HPSv3.safetensors"),
        (["--reward", "hpsv3", "--weights", "tests"], "error: --weights is tests, must be the file HPSv3.safetensors"),
    ],
)
def test_the_program_refuses_to_start_in_one_line(words, error, monkeypatch):
    monkeypatch.setattr(reward_server, "refuse_downloads", lambda: None)  # for good, which is meant for a process
    with pytest.raises(SystemExit) as caught:
        reward_server.main([*words, "--port", "0"])
    assert str(caught.value).startswith(error) and "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost"])
def test_loopback_needs_no_token_and_other_addresses_do(host):
    assert is_loopback(host)
    assert not any(map(is_loopback, ("", "0.0.0.0", "10.0.0.1", "example.org", "::", "localhost.evil")))
    with serving(RewardServer(("0.0.0.0", 0), ScoringService(Fake(), 1), token="token")) as server:
        assert server.address[1] > 0


def test_only_the_token_opens(monkeypatch, capfd):
    monkeypatch.delenv(TOKEN, raising=False)
    with hosting(Fake(), token="secret") as server:
        assert "refused, status 401: the token is missing or wrong" in ask(server).causes[0]
        assert post(server, request())[0] == 401
        for wrong in ("Bearer secre", "Bearer secret2", "secret", "Bearer \xe4"):
            assert post(server, request(), Authorization=wrong)[0] == 401
        assert server.service.judge.calls == 0
        monkeypatch.setenv(TOKEN, "secret")
        assert ask(server).valid.all()
    out = capfd.readouterr()
    assert "secret" not in out.out + out.err and "POST /score 200" in out.out


def test_too_large_a_request_is_refused_before_it_is_read():
    with hosting(Fake(), max_bytes=10_000) as server:
        head = b"POST /score HTTP/1.1\r\nHost: here\r\nContent-Length: 10001\r\n\r\n"  # and nothing of the body
        assert " 413 " in raw(server, head)
        large = ask(server)  # every video alone is still too large
        assert "refused, status 413: request of" in large.causes[0] and not large.valid.any()
        assert server.service.judge.calls == 0


def test_a_large_body_that_is_refused_does_not_hide_the_refusal():
    with hosting(Fake(), max_bytes=10_000) as server:
        assert post(server, b"x" * 2**24)[0] == 413


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("it was unpickled",))


def npy_of_objects() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.array([Bomb()], dtype=object), allow_pickle=True)
    return stream.getvalue()


def with_videos(content: bytes) -> protocol.Message:
    message = request()
    return dataclasses.replace(message, chunks=(*message.chunks[:-3], content, message.chunks[-1]))


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (pickle.dumps(Bomb()), "multipart body"),
        (with_videos(npy_of_objects()), "holds object"),
        (with_videos(pickle.dumps(Bomb())), "no .npy file"),
        (b"", "multipart body"),
        (request(samples=1), "meta must list as many samples as there are videos, 2"),
        (request("third"), "reward is 'third', hosted here: first, second"),
        (request(samples=None, protocol=7), "protocol is 7, this server speaks 1"),
        (protocol.encode({"protocol": 1, "reward": "first"}, {}), "part 'videos' is missing"),
        (
            protocol.encode({"protocol": 1, "reward": "first"}, {"videos": np.zeros((1, 2, 3), np.uint8)}),
            "not of shape",
        ),
    ],
)
def test_a_request_of_another_form_is_a_400_and_never_unpickled(message, error):
    with hosting(Fake()) as server:
        status, said = post(server, message)
        assert status == 400 and error in said
        assert server.service.judge.calls == 0


def test_a_video_that_belongs_to_no_sample_is_refused():
    message = request()
    meta, arrays = protocol.decode(message.content_type, bytearray(b"".join(message.chunks)))
    for name, shape in (("target.2", (1, 2, 2, 3)), ("extra", (1,)), ("source.0", (2, 2, 3))):
        with hosting(Fake()) as server:
            status, said = post(server, protocol.encode(meta, {**arrays, name: np.zeros(shape, np.uint8)}))
            assert status == 400 and ("belong to no sample" in said or "a source or target has shape" in said)


def raw(server: RewardServer, content: bytes, *, drips: int = 0) -> str:
    """Send bytes by hand, then single ones, and return the first line of the answer; "" if the connection is closed."""
    with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
        connection.sendall(content)
        with contextlib.suppress(ConnectionError):
            for _ in range(drips):
                connection.sendall(b"x")
                if select.select([connection], [], [], 0.05)[0]:
                    break
            return connection.recv(65536).decode().partition("\r\n")[0]
        return ""


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "411"),
        ("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", "411"),
        ("\r\n", "411"),
        ("Content-Length: -1\r\n\r\n", "400"),
        ("Content-Length: 1e3\r\n\r\n", "400"),
        (f"Content-Length: {'9' * 30}\r\n\r\n", "4"),
        ("X: " + "x" * 2**17, "400"),
    ],
)
def test_a_malformed_length_or_header_is_refused(head, status):
    with hosting(Fake()) as server:
        assert f" {status}" in raw(server, f"POST /score HTTP/1.1\r\nHost: here\r\n{head}".encode())
        assert ask(server).valid.all()


def test_other_paths_and_methods_are_refused():
    with hosting(Fake()) as server:
        assert post(server, request(), "/elsewhere") == (404, "here are GET /health and POST /score")
        assert post(server, request(), "/health")[0] == 404


@pytest.mark.parametrize("drips", [0, 100])
def test_a_sender_that_stalls_or_drips_is_given_up(drips):
    with hosting(Fake(), timeout_s=0.3) as server:
        body = b"POST /score HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n"
        assert " 408 " in raw(server, body, drips=drips)
        assert raw(server, b"POST /score HTTP/1.1\r\nX: ", drips=drips) == ""  # its headers never end


def test_connections_are_capped_and_a_freed_one_serves_again(monkeypatch):
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    with hosting(Fake()) as server:
        held = [socket.create_connection(server.address, timeout=LIMIT_S) for _ in range(3)]
        while "status 503" not in ask(server).causes[0]:  # until all are accepted
            time.sleep(0.02)
        for connection in held:
            connection.close()
        while not ask(server).valid.all():
            time.sleep(0.02)


def test_a_missing_server_package_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "tools.serving.http_server")
    with pytest.raises(ValueError, match=r"uvicorn.*pip install -r requirements-server\.txt"):
        build(parse(["--reward", "motion_mag", "--port", "0"]))


def explode(videos):
    raise RuntimeError("out of\nmemory")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (explode, "RuntimeError: out of memory"),
        (lambda videos: torch.ones(3), "gave ['first', 'second'] of shapes [(3,)]"),
        (lambda videos: torch.ones(2, 2), "of shapes [(2,), (2, 2)]"),
    ],
)
def test_a_judge_that_fails_is_a_500_with_its_words(answer, error):
    with hosting(Fake(answer)) as server:
        status, said = post(server, request())
        assert status == 500 and error in said
        assert ask(server).valid.tolist() == [False, False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_judge_s_nan_is_not_passed_off_as_a_score(bad):
    with hosting(Fake(lambda videos: torch.tensor([bad, 1.0]))) as server:
        far = ask(server)
    assert far.valid.tolist() == [False, True] and far.causes[0].startswith("first is ")


def test_a_request_that_comes_again_is_not_scored_again_nor_is_the_second_score():
    with hosting(Fake()) as server:
        first, again, second = ask(server), ask(server), ask(server, "second")
        assert server.service.judge.calls == 1
        assert torch.equal(first.values, again.values) and torch.equal(second.values, -first.values)
        other = RemoteReward("first", server.url, POLICY)(VIDEOS.flip(0), judged_conditions())
        assert server.service.judge.calls == 2 and torch.equal(other.values, first.values.flip(0))


def test_a_busy_server_says_so_and_health_is_answered_meanwhile():
    begun, go_on = threading.Event(), threading.Event()

    def slowly(videos):
        begun.set()
        assert go_on.wait(LIMIT_S)
        return torch.ones(len(videos))

    with hosting(Fake(slowly), timeout_s=0.3) as server:
        held: list[int] = []
        thread = threading.Thread(target=lambda: held.append(post(server, request())[0]))
        thread.start()
        assert begun.wait(LIMIT_S)
        connection = http.client.HTTPConnection(*server.address, timeout=LIMIT_S)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read())["rewards"] == ["first", "second"]
        connection.close()
        status, said = post(server, request(extra=1))
        assert status == 503 and "busy for more than 0.3 s" in said
        go_on.set()
        thread.join(LIMIT_S)
        assert held == [200]
