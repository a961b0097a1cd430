"""A hosted reward gives the very scores of the local one, and every request that is not as agreed is refused."""

import contextlib
import dataclasses
import math
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from flow_grpo import rewards
from flow_grpo.records import RewardResult
from flow_grpo.rewards.base import build_reward
from flow_grpo.rewards.remote import protocol
from flow_grpo.rewards.remote.protocol import TOKEN
from flow_grpo.rewards.remote.reward import RemoteReward
from tests.limits import LIMIT_S
from tests.room_films import conditions, film, like_a_codec
from tests.scripted_server import serving
from tools import reward_server
from tools.reward_server import build, parse
from tools.serving import http_server
from tools.serving.http_server import RewardServer, is_loopback
from tools.serving.scoring_service import NEEDS, LocalScorer, ScoringService

ROOT = Path(__file__).resolve().parents[2]
FILM = film(["pan_left", "zoom_in"])
TRUE = (FILM.videos * 255).round() / 255
VIDEOS = (like_a_codec(TRUE) * 255).round() / 255


def judged_conditions(root: Path | None = None):
    return conditions(dataclasses.replace(FILM, videos=TRUE), source=VIDEOS.flip(0), root=root)


class Fake:
    """A judge of two scores: `answer` says what it makes of the videos."""

    model, version, scores, needs = "fake", "v1", ("first", "second"), ()
    device, wants = torch.device("cpu"), {}

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
def hosting(scorer, *, max_bytes: int = 2**26, timeout_s: float = LIMIT_S, token: str = "") -> Iterator[RewardServer]:
    service = ScoringService(scorer, max_bytes)
    with serving(RewardServer(("127.0.0.1", 0), service, timeout_s=timeout_s, token=token)) as server:
        yield server


def ask(server: RewardServer, name: str = "first"):
    return RemoteReward(name, server.url, LIMIT_S, ())(VIDEOS, judged_conditions())


def request(reward: str = "first", **changes) -> bytes:
    meta, tensors = protocol.decode(protocol.encode_request(reward, VIDEOS, judged_conditions(), ()))
    return protocol.encode(meta | changes, tensors)


def post(server: RewardServer, body: bytes, path: str = "/score", **headers: str) -> tuple[int, str]:
    said = httpx.post(server.url + path, content=body, headers=headers, timeout=LIMIT_S, trust_env=False)
    error = "" if said.status_code == 200 else said.json()["error"]
    assert "\n" not in error
    return said.status_code, error


@pytest.mark.parametrize("name", ["target_view", "target_psnr", "source_match", "motion_mag", "room_pose"])
def test_a_hosted_reward_gives_the_scores_of_the_local_one_bit_for_bit(name, tmp_path):
    asked = judged_conditions(tmp_path)
    local = build_reward(name, data_root=tmp_path)(VIDEOS, asked)
    with serving(build(parse(["--reward", name, "--port", "0", "--data-root", str(tmp_path)]))) as server:
        far = RemoteReward(name, server.url, LIMIT_S, ())(VIDEOS, asked)
    assert local.valid.all() and far.valid.all(), far.causes
    assert torch.equal(far.values, local.values)


def test_a_function_of_one_s_own_that_exits_is_a_fault_and_the_server_stays(tmp_path):
    file = tmp_path / "my_rewards.py"
    file.write_text("import sys\ndef warmth(videos, conditions):\n    sys.exit(0)\n")
    with serving(build(parse(["--reward", f"{file}:warmth", "--port", "0"]))) as server:
        for _ in range(2):
            assert "status 500: RuntimeError: it called sys.exit(0)" in ask(server, "warmth").causes[0]


@pytest.mark.parametrize(("words", "seen"), [([], 5), (["--frames=3", "--size=12x16", "--fps=12", "--groups"], 3)])
def test_a_server_asks_for_frames_size_rate_and_groups_and_scores_what_it_asked_for(words, seen, tmp_path):
    file = tmp_path / "my_rewards.py"
    code = (
        "def height(videos, conditions):\n    return videos.new_tensor([100 * videos.shape[2] + videos.shape[3]] * 2)\n"
    )
    file.write_text(code)
    with serving(build(parse(["--reward", f"{file}:height", "--port", "0", *words]))) as server:
        health = httpx.get(f"{server.url}/health", trust_env=False).json()
        far = RemoteReward("height", server.url, LIMIT_S, ())(VIDEOS, judged_conditions())
    asked = {"frames": 3, "size": [12, 16], "fps": 12.0, "groups": True} if words else {}
    assert {name: health[name] for name in ("frames", "size", "fps", "groups") if name in health} == asked
    assert far.values.tolist() == [100 * seen + (12 if words else 24)] * 2 and health["peak_gib"]["cpu"] > 0


def test_health_holds_what_a_judge_reads_and_what_it_asks_for_unless_the_server_was_told_otherwise(tmp_path):
    assert LocalScorer(build_reward("pose_rot", data_root=".")).needs == ("source", "target", "camera")
    own = tmp_path / "own.py"
    own.write_text("def warm(videos, conditions): ...\ndef plain(videos, conditions): ...\nplain.needs = ()\n")
    assert LocalScorer(build_reward(f"{own}:warm", data_root=".")).needs == ("source", "target")  # it may read both
    assert LocalScorer(build_reward(f"{own}:plain", data_root=".")).needs == ()
    judge = Fake()
    judge.wants = {"frames": 3, "fps": 8.0}
    assert ScoringService(judge, 2**26, {"frames": 9}).health().items() >= {"frames": 9, "fps": 8.0}.items()


@pytest.mark.parametrize("kind", ["Multipart/Form-Data; boundary=b", "application/octet-stream; charset=utf-8"])
def test_any_content_type_is_read_and_health_may_be_asked_by_its_head(kind):
    with hosting(Fake()) as server:
        assert post(server, request(), **{"Content-Type": kind}) == (200, "")
        said = httpx.head(f"{server.url}/health", trust_env=False)
        assert said.status_code == 200 and not said.content


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
        assert server.service.scorer.calls == 2  # a failure is not what an equal request gets again


@pytest.mark.parametrize("name", NEEDS)
def test_a_local_reward_needs_no_video_that_it_does_not_ask_for(name, tmp_path):
    asked, needs = judged_conditions(tmp_path), LocalScorer(build_reward(name, data_root=tmp_path)).needs
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
    before = LocalScorer(build_reward("pose_rot", data_root=".")).version
    monkeypatch.setattr(rewards, "__file__", str(copy / "__init__.py"))
    assert LocalScorer(build_reward("pose_rot", data_root=".")).version == before
    (copy / "camera" / "pnp.py").write_text("# other\n")
    assert LocalScorer(build_reward("pose_rot", data_root=".")).version != before


def test_the_program_says_where_it_listens_and_serves():
    words = [sys.executable, "tools/reward_server.py", "--reward", "motion_mag", "--port", "0"]
    program = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        line = program.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert url, line
        far = RemoteReward("motion_mag", url[0], LIMIT_S, ())(VIDEOS, judged_conditions())
        assert torch.equal(far.values, build_reward("motion_mag", data_root=".")(VIDEOS, judged_conditions()).values)
    finally:
        program.kill()
        program.communicate()


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--reward", "target_view", "--host", "0.0.0.0"], "error: --host is 0.0.0.0, which other machines reach"),
        (["--reward", "target_view", "--token-env", "NO_SUCH_NAME"], "error: --token-env names NO_SUCH_NAME"),
        (["--reward", "target_vew"], "error: --reward is 'target_vew', must be a name that --help lists, such as "),
        (["--reward", "motion_mag", "--frames", "0"], "error: server asks for frames 0 of size None, must be a number"),
        (["--reward", "hpsv3"], "error: --weights is None, must be the file HPSv3.safetensors"),
        (["--reward", "hpsv3", "--weights", "tests"], "error: --weights is tests, must be the file HPSv3.safetensors"),
    ],
)
def test_the_program_refuses_to_start_in_one_line(words, error, monkeypatch):
    monkeypatch.setattr(reward_server, "refuse_downloads", lambda: None)  # for good, which is meant for a process
    with pytest.raises(SystemExit) as caught:
        reward_server.main([*words, "--port", "0"])
    assert str(caught.value).startswith(error) and "\n" not in str(caught.value)


def test_only_loopback_needs_no_token():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "localhost", "::1")))
    assert not any(map(is_loopback, ("", "0.0.0.0", "10.0.0.1", "example.org", "::", "localhost.evil")))


def test_only_the_token_opens(monkeypatch, capfd):
    monkeypatch.delenv(TOKEN, raising=False)
    with hosting(Fake(), token="secret") as server:
        assert "refused, status 401: the token is missing or wrong" in ask(server).causes[0]
        assert post(server, request())[0] == 401
        for wrong in ("Bearer secre", "Bearer secret2", "secret"):
            assert post(server, request(), Authorization=wrong)[0] == 401
        assert server.service.scorer.calls == 0
        monkeypatch.setenv(TOKEN, "secret")
        assert ask(server).valid.all()
    out = capfd.readouterr()
    assert "secret" not in out.out + out.err and "POST /score 200" in out.out


def test_too_large_a_request_and_other_paths_and_methods_are_refused():
    with hosting(Fake(), max_bytes=10_000) as server:
        assert post(server, request(), "/elsewhere") == (404, "here are GET /health and POST /score")
        assert post(server, request(), "/health")[0] == 404
        large = ask(server)  # every video alone is still too large
        assert "refused, status 413: request of more than 10000 bytes" in large.causes[0] and not large.valid.any()
        assert post(server, b"x" * 2**24)[0] == 413
        assert server.service.scorer.calls == 0


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", "request cannot be read: SafetensorError: "),
        (request(samples=[1, 2]), "request cannot be read: TypeError: "),
        (request("third"), "request cannot be read: it asks for third, hosted here: first, second"),
    ],
)
def test_a_request_of_another_form_is_a_400(body, error):
    with hosting(Fake()) as server:
        status, said = post(server, body)
        assert status == 400 and error in said
        assert server.service.scorer.calls == 0


def test_a_sender_that_stalls_is_given_up_and_one_that_leaves_is_forgotten():
    head = b"POST /score HTTP/1.1\r\nHost: here\r\nContent-Length: 1000\r\n\r\n"
    with hosting(Fake(), timeout_s=0.3) as server:
        with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
            connection.sendall(head)
            assert b" 503 " in connection.recv(65536)
        with socket.create_connection(server.address, timeout=LIMIT_S) as connection:
            connection.sendall(head)
        assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


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
        assert server.service.scorer.calls == 1
        assert torch.equal(first.values, again.values) and torch.equal(second.values, -first.values)
        other = RemoteReward("first", server.url, LIMIT_S, ())(VIDEOS.flip(0), judged_conditions())
        assert server.service.scorer.calls == 2 and torch.equal(other.values, first.values.flip(0))


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
        assert httpx.get(f"{server.url}/health", trust_env=False).json()["rewards"] == ["first", "second"]
        for _ in range(4):
            status, said = post(server, request(extra=1))
        assert status == 503 and said == "not arrived, or not at its turn, within 0.3 s"
        go_on.set()
        thread.join(LIMIT_S)
        assert held == [200]
        assert [post(server, request(extra=number))[0] for number in range(6)] == [200] * 6  # no turn was lost
