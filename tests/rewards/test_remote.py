"""A remote reward gives the server's scores, or samples without a value and with a cause; never anything between."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import pickle
import time

import pytest
import torch

from flow_grpo.rewards.base import RewardSet
from flow_grpo.rewards.remote import protocol
from flow_grpo.rewards.remote import reward as remote
from flow_grpo.rewards.remote.reward import Breaker, Latency, Patience, RemoteReward
from tests.room_films import conditions, film
from tests.scripted_server import HEALTH, ScriptedServer, answer, cut, dripping, reset, scores, silent

FILM = film(["pan_left", "zoom_in", "arc_right"])
VIDEOS = (FILM.videos * 255).round() / 255
CONDITIONS = conditions(dataclasses.replace(FILM, videos=VIDEOS))
PATIENCE = Patience(timeout_s=10.0, delays_s=(0.0, 0.0), failures=3, cool_down_s=60.0)
SHORT = dataclasses.replace(PATIENCE, timeout_s=0.3)  # only against servers that are slow on purpose
SLOW = (silent, dripping)
FINE = answer(scores(1.0, -2.0, 0.5))


def reward(server: ScriptedServer, patience: Patience = PATIENCE) -> RemoteReward:
    return RemoteReward("beauty", server.url, patience)


def unknown(result, cause: str) -> bool:
    """Say whether nothing is known of any sample, for this cause."""
    assert not result.valid.any() and result.values.isnan().all() and result.info == {}
    assert all(text.startswith("remote:beauty ") and cause in text for text in result.causes), result.causes
    return all("\n" not in text for text in result.causes)


def test_scores_come_back_in_order():
    with ScriptedServer(FINE) as server:
        judge = reward(server)
        result = judge(VIDEOS, CONDITIONS)
        assert result.values.tolist() == [1, -2, 0.5] and result.valid.all() and result.causes == ("",) * 3
        assert judge.identity == ("judge", "v1") and judge.name == "remote:beauty"
        assert judge(VIDEOS, CONDITIONS).valid.all()
        assert [line.split()[1] for line, _, _ in server.asked] == ["/health", "/score", "/score"]


def test_a_request_holds_all_that_is_agreed():
    with ScriptedServer(FINE, health=answer(HEALTH | {"needs": ["target"]})) as server:
        reward(server)(VIDEOS, CONDITIONS)
        _, headers, body = server.asked[1]
    meta, arrays = protocol.decode(headers["Content-Type"], bytearray(body))
    assert (meta["protocol"], meta["reward"], meta["fps"]) == (1, "beauty", 15.0)
    assert meta["samples"] == [protocol.describe(condition) for condition in CONDITIONS]
    assert set(arrays) == {"videos", "target.0", "target.1", "target.2"}
    assert torch.equal(protocol.from_pixels(arrays["videos"]), VIDEOS)


def test_a_target_that_is_missing_is_not_sent():
    some = [dataclasses.replace(CONDITIONS[0], target_video=None), *CONDITIONS[1:]]
    with ScriptedServer(FINE, health=answer(HEALTH | {"needs": ["target", "source"]})) as server:
        reward(server)(VIDEOS, some)
        _, headers, body = server.asked[1]
    sent = set(protocol.decode(headers["Content-Type"], bytearray(body))[1])
    assert sent == {"videos", "target.1", "target.2", "source.0", "source.1", "source.2"}


@pytest.mark.parametrize(
    ("bad", "cause", "attempts"),
    [
        (silent, "failed 3 attempts, the last: no answer within 0.3 s", 3),
        (dripping, "failed 3 attempts, the last: no answer within 0.3 s", 3),
        (cut, "failed 3 attempts, the last: ConnectionError: connection ended within the answer", 3),
        (reset, "failed 3 attempts, the last: ConnectionResetError", 3),
        (answer({"error": "out of memory"}, 500), "failed 3 attempts, the last: status 500: out of memory", 3),
        (answer({}, 401), "refused, status 401", 1),
        (answer({}, 413), "refused, status 413", 1),
        (answer(scores(1.0, 2.0)), "cannot be believed: reply's valid is 2 entries, must be a list of 3", 1),
        (answer(scores(1.0, 2.0, valid=[True] * 3)), "cannot be believed: reply's scores.beauty is 2 entries", 1),
        (answer(scores(1.0, 2.0, 3.0, scores={"beauty": [[1.0]] * 3})), "must hold numbers and null only", 1),
        (answer(scores(1.0, 2.0, 3.0, scores={"truth": [1.0] * 3})), "reply holds no score 'beauty'", 1),
        (answer(b"<html>all is well</html>"), "cannot be believed: reply is no JSON", 1),
        (answer(b"\x80\x04\x95" + pickle.dumps({"scores": [1, 2, 3]})), "cannot be believed: reply is no JSON", 1),
        (answer(scores(1.0, 2.0, 3.0, version="v2")), "is now judge v2, the run began with judge v1", 1),
    ],
)
def test_a_server_that_fails_or_lies_leaves_no_score(bad, cause, attempts):
    begin = time.monotonic()
    with ScriptedServer(bad) as server:
        judge = reward(server, SHORT if bad in SLOW else PATIENCE)
        assert unknown(judge(VIDEOS, CONDITIONS), cause)
        assert server.scored == attempts
        assert (judge.latency.count, judge.latency.failed) == (1, 1)
    assert time.monotonic() - begin < 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, None])
def test_a_score_that_is_no_number_is_no_score_and_takes_no_other_along(bad):
    with ScriptedServer(answer(scores(1.0, bad, 3.0, valid=[True] * 3))) as server:
        result = reward(server)(VIDEOS, CONDITIONS)
    assert result.valid.tolist() == [True, False, True]
    assert result.values[1].isnan() and result.causes[1].startswith("value is")


def test_what_the_server_calls_not_valid_is_masked_with_its_cause():
    with ScriptedServer(answer(scores(1.0, 7.0, 3.0, valid=[True, False, True], causes=["", "dark", ""]))) as server:
        result = reward(server)(VIDEOS, CONDITIONS)
    assert result.valid.tolist() == [True, False, True]
    assert result.values[1].isnan() and result.causes == ("", "dark", "")
    assert result.faulty.tolist() == [False, True, False]


def test_what_the_server_has_nothing_to_measure_by_is_no_fault():
    said = scores(1.0, None, None, causes=["", "no true view", "timeout"], faulty=[False, False, True])
    with ScriptedServer(answer(said)) as server:
        result = reward(server)(VIDEOS, CONDITIONS)
    assert result.valid.tolist() == [True, False, False] and result.faulty.tolist() == [False, False, True]


@pytest.mark.parametrize("bad", [answer({}, 500), answer({}, 429, {"Retry-After": "0"}), cut, reset, silent])
def test_a_passing_failure_costs_no_sample(bad):
    with ScriptedServer(bad, FINE) as server:
        result = reward(server, SHORT if bad in SLOW else PATIENCE)(VIDEOS, CONDITIONS)
        assert result.valid.all() and server.scored == 2


def test_a_server_asked_to_wait_for_is_waited_for():
    begin = time.monotonic()
    with ScriptedServer(answer({}, 429, {"Retry-After": "1"}), FINE) as server:
        assert reward(server)(VIDEOS, CONDITIONS).valid.all()
    assert time.monotonic() - begin >= 1


def test_nobody_there_is_a_cause():
    with ScriptedServer(FINE) as server:
        pass
    assert unknown(reward(server)(VIDEOS, CONDITIONS), "remote:beauty failed 3 attempts, the last: ConnectionRefused")


@pytest.mark.parametrize(
    ("health", "cause"),
    [
        (answer({"error": "wrong token"}, 401), "refused, status 401: wrong token"),
        (answer(HEALTH | {"rewards": ["truth"]}), "cannot be believed: server scores truth, not beauty"),
        (answer(HEALTH | {"protocol": 2}), "cannot be believed: server speaks protocol 2"),
        (silent, "no answer within 0.3 s"),
    ],
)
def test_a_server_that_is_not_the_one_asked_for_gets_no_videos(health, cause):
    with ScriptedServer(FINE, health=health) as server:
        assert unknown(reward(server, SHORT if health in SLOW else PATIENCE)(VIDEOS, CONDITIONS), cause)
        assert server.scored == 0


def test_a_batch_is_sent_in_parts_that_the_server_takes():
    room = remote.MARGIN + 2 * VIDEOS[0].numel()
    pair, one = answer(scores(1.0, 2.0)), answer(scores(3.0))
    with ScriptedServer(pair, one, health=answer(HEALTH | {"max_bytes": room})) as server:
        assert reward(server)(VIDEOS, CONDITIONS).values.tolist() == [1, 2, 3]
        assert all(len(body) <= room for _, _, body in server.asked)
    with ScriptedServer(one, health=answer(HEALTH | {"max_bytes": 1})) as server:
        assert reward(server)(VIDEOS, CONDITIONS).values.tolist() == [3, 3, 3]


def test_what_was_scored_before_a_failure_is_kept_and_the_rest_is_not_sent():
    room = remote.MARGIN + VIDEOS[0].numel()
    with ScriptedServer(answer(scores(1.0)), answer({}, 400), health=answer(HEALTH | {"max_bytes": room})) as server:
        result = reward(server)(VIDEOS, CONDITIONS)
        assert result.valid.tolist() == [True, False, False] and result.values[0] == 1
        assert server.scored == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.01, -0.01])
def test_a_video_outside_the_colours_is_not_sent(bad):
    videos = VIDEOS.clone()
    videos[1, 0, 0, 0, 0] = bad
    with ScriptedServer(answer(scores(1.0, 3.0))) as server:
        result = reward(server)(videos, CONDITIONS)
        assert result.valid.tolist() == [True, False, True] and result.values[2] == 3
        assert "outside [0, 1]" in result.causes[1] and not result.faulty.any()
        assert len(json_part(server.asked[1])["samples"]) == 2


def json_part(asked) -> dict:
    return protocol.decode(asked[1]["Content-Type"], bytearray(asked[2]))[0]


def test_a_condition_that_json_cannot_hold_is_a_cause():
    bad = [dataclasses.replace(CONDITIONS[0], target_poses=CONDITIONS[0].target_poses * math.nan), *CONDITIONS[1:]]
    with ScriptedServer(FINE) as server:
        assert unknown(reward(server)(VIDEOS, bad), "not asked: a condition holds what JSON does not know")


def test_a_server_that_keeps_failing_is_left_alone_and_then_tried_again(caplog):
    patience = dataclasses.replace(PATIENCE, delays_s=(), failures=2, cool_down_s=1.0)
    with caplog.at_level(logging.WARNING), ScriptedServer(*[answer({}, 500)] * 3, FINE) as server:
        judge = reward(server, patience)
        for _ in range(2):
            assert unknown(judge(VIDEOS, CONDITIONS), "status 500")
        assert unknown(judge(VIDEOS, CONDITIONS), "not asked: it failed 2 calls, next in 1 s")
        assert server.scored == 2  # the third call cost nothing
        time.sleep(1.05)
        assert unknown(judge(VIDEOS, CONDITIONS), "status 500")
        assert unknown(judge(VIDEOS, CONDITIONS), "not asked")  # one failure is enough now
        assert server.scored == 3
        time.sleep(1.05)
        assert judge(VIDEOS, CONDITIONS).valid.all()
        assert judge(VIDEOS, CONDITIONS).valid.all()  # closed again
    assert "is left alone for 1 s (2 requests, 2 failed" in caplog.text


def test_failures_with_a_success_between_them_do_not_add_up():
    breaker = Breaker(Patience(failures=2))
    assert [breaker.note(failed=failed) for failed in (True, False, True, True)] == [False, False, False, True]
    assert breaker.rest_s() > 50


def test_another_model_is_refused_until_the_first_is_back():
    changed = answer(scores(1.0, 1.0, 1.0, model="other"))
    with ScriptedServer(FINE, changed, FINE) as server:
        judge = reward(server)
        assert judge(VIDEOS, CONDITIONS).valid.all()
        assert unknown(judge(VIDEOS, CONDITIONS), "is now other v1, the run began with judge v1; host that again")
        assert judge(VIDEOS, CONDITIONS).valid.all()


def test_one_call_is_bounded_however_the_server_fails():
    patience = dataclasses.replace(PATIENCE, timeout_s=0.2, delays_s=(0.1, 0.1))
    room = remote.MARGIN + VIDEOS[0].numel()
    with ScriptedServer(dripping, health=answer(HEALTH | {"max_bytes": room})) as server:
        begin = time.monotonic()
        reward(server, patience)(VIDEOS, CONDITIONS)
        assert time.monotonic() - begin < 3 * 0.2 + 2 * 0.1 + 0.5  # one of three requests was tried


def test_a_remote_reward_is_one_of_a_set():
    with ScriptedServer(FINE) as server:
        both = RewardSet([reward(server)], {"remote:beauty": 1.0})
        assert both(VIDEOS, CONDITIONS)["remote:beauty"].values.tolist() == [1, -2, 0.5]
        assert pickle.loads(pickle.dumps(both))(VIDEOS, CONDITIONS)["remote:beauty"].valid.all()


def test_what_a_server_did_is_told_once_and_the_whole_run_is_remembered():
    with ScriptedServer(FINE, FINE, answer({}, 400), FINE) as server:
        judge = reward(server)
        assert [(name, math.isnan(value)) for name, value in judge.stats().items()] == [
            ("calls", False),
            ("failures", False),
            ("p50_s", True),
            ("p95_s", True),
        ]
        for _ in range(3):
            judge(VIDEOS, CONDITIONS)
        first, second = judge.stats(), judge.stats()
        assert (first["calls"], first["failures"]) == (3, 1)
        assert 0 < first["p50_s"] <= first["p95_s"] < 3
        assert (second["calls"], second["failures"]) == (0, 0)
        judge(VIDEOS, CONDITIONS)
        assert judge.stats()["calls"] == 1
        assert (judge.latency.count, judge.latency.failed) == (4, 1)
        assert RewardSet([judge], {judge.name: 1.0}).stats()[judge.name]["calls"] == 0


def test_percentiles_are_known_to_a_quarter_and_the_longest_exactly():
    latency = Latency()
    assert math.isnan(latency.percentile(0.5)) and str(latency) == "no requests"
    for number in range(1, 101):
        latency.record(number / 100, failed=number > 98)
    for share in (0.5, 0.9, 0.99):
        assert share <= latency.percentile(share) <= 1.25 * share
    assert latency.percentile(1.0) == latency.longest == 1.0
    metrics = latency.metrics()
    assert (metrics["requests"], metrics["failed"], metrics["max_s"]) == (100, 2, 1)
    assert str(latency).startswith("100 requests, 2 failed, p50 0.")
    latency.record(1e9)
    assert latency.percentile(1.0) == 1e9
    assert json.dumps(metrics)
