"""A remote reward gives the server's scores, or samples without a value and with a cause; never anything between."""

import dataclasses
import logging
import math
import pickle
from types import SimpleNamespace

import pytest
import torch

from flow_grpo.rewards.base import RewardSet, try_rewards
from flow_grpo.rewards.remote import protocol
from flow_grpo.rewards.remote import reward as remote
from flow_grpo.rewards.remote.reward import RemoteReward
from tests.limits import LIMIT_S
from tests.room_films import conditions, film
from tests.scripted_server import HEALTH, ScriptedServer, answer, scores

FILM = film(["pan_left", "zoom_in", "arc_right"])
VIDEOS = (FILM.videos * 255).round() / 255
CONDITIONS = conditions(dataclasses.replace(FILM, videos=VIDEOS))
FINE = answer(scores(CONDITIONS, 1.0, -2.0, 0.5))


def reward(server: ScriptedServer, delays_s: tuple[float, ...] = (0, 0)) -> RemoteReward:
    return RemoteReward("beauty", server.url, LIMIT_S, delays_s)


def unknown(result, cause: str) -> bool:
    assert not result.valid.any() and result.values.isnan().all() and result.info == {}
    assert all(text.startswith("remote:beauty ") and cause in text for text in result.causes), result.causes
    return all("\n" not in text for text in result.causes)


def test_scores_come_back_in_order_and_through_a_set():
    with ScriptedServer(FINE) as server:
        judge = reward(server)
        result = judge(VIDEOS, CONDITIONS)
        assert result.values.tolist() == [1, -2, 0.5] and result.valid.all() and result.causes == ("",) * 3
        assert judge.identity == ("judge", "v1") and judge.name == "remote:beauty"
        assert judge(VIDEOS, CONDITIONS).valid.all()
        assert [line.split()[1] for line, _, _ in server.asked] == ["/health", "/score", "/score"]
    with ScriptedServer(FINE) as server:
        both = RewardSet([reward(server)], {"remote:beauty": 1.0})
        assert both(VIDEOS, CONDITIONS)["remote:beauty"].values.tolist() == [1, -2, 0.5]
        assert pickle.loads(pickle.dumps(both))(VIDEOS, CONDITIONS)["remote:beauty"].valid.all()


def test_a_request_holds_the_name_the_speed_and_what_the_server_needs():
    some = [dataclasses.replace(CONDITIONS[0], target_video=None), *CONDITIONS[1:]]
    with ScriptedServer(FINE, health=answer(HEALTH | {"needs": ["target"]})) as server:
        reward(server)(VIDEOS, some)
        body = server.asked[1][2]
    meta, tensors = protocol.decode(body)
    assert (meta["rewards"], meta["samples"][0]["fps"]) == (["beauty"], CONDITIONS[0].fps)
    sent = {name for name in tensors if "poses" not in name and "pose." not in name and "intrinsics" not in name}
    assert sent == {"videos", "target.1", "target.2"}


@pytest.mark.parametrize(
    ("bad", "cause", "attempts"),
    [
        (answer({"error": "out of memory"}, 500), "failed 3 attempts, the last: status 500: out of memory", 3),
        (answer(scores(CONDITIONS[::-1], 1.0, 2.0, 3.0)), "cannot be believed: reply is to other samples", 1),
        (answer({"scores": {"beauty": [1, 2, 3]}}), "cannot be believed: SafetensorError: ", 1),
        (answer(b"--b\r\n"), "cannot be believed: the other side speaks protocol 1, this one 3", 1),
        (answer(scores(CONDITIONS, 1.0, 2.0, 3.0, version="v2")), "is now judge v2, the run began with judge v1", 1),
    ],
)
def test_a_server_that_fails_or_lies_leaves_no_score(bad, cause, attempts):
    with ScriptedServer(bad) as server:
        judge = reward(server)
        assert unknown(judge(VIDEOS, CONDITIONS), cause)
        assert server.scored == attempts
        stats = judge.stats()
        assert (stats["calls"], stats["failures"]) == (1, 1)


def test_a_sample_that_cannot_be_measured_is_no_fault():
    said = scores(CONDITIONS, 1.0, 7.0, 7.0, causes=["", "no true view", "timeout"], faulty=[False, False, True])
    with ScriptedServer(answer(said)) as server:
        result = reward(server)(VIDEOS, CONDITIONS)
    assert result.causes == ("", "no true view", "timeout")
    assert result.valid.tolist() == [True, False, False] and result.faulty.tolist() == [False, False, True]


@pytest.mark.parametrize(
    ("health", "cause"),
    [
        (answer({"error": "wrong token"}, 401), "refused, status 401: wrong token"),
        (answer(HEALTH | {"rewards": ["truth"]}), "cannot be believed: server scores truth, not beauty"),
        (answer(HEALTH | {"protocol": 1}), "the other side speaks protocol 1, this one 3: update the older"),
        (answer(b"[" * 100_000), "cannot be believed: RecursionError"),
        (answer([]), "cannot be believed: AttributeError"),
    ],
)
def test_a_server_that_is_not_the_one_asked_for_gets_no_videos(health, cause):
    with ScriptedServer(FINE, health=health) as server:
        assert unknown(reward(server)(VIDEOS, CONDITIONS), cause)
        assert server.scored == 0


def test_a_batch_is_sent_in_parts_that_the_server_takes():
    room = remote.MARGIN + 2 * VIDEOS[0].numel()
    parts = [answer(scores(CONDITIONS[:2], 1.0, 2.0)), answer(scores(CONDITIONS[2:], 3.0))]
    with ScriptedServer(*parts, health=answer(HEALTH | {"max_bytes": room})) as server:
        assert reward(server)(VIDEOS, CONDITIONS).values.tolist() == [1, 2, 3]
        assert all(len(body) <= room for _, _, body in server.asked)
    single = [answer(scores([condition], 3.0)) for condition in CONDITIONS]
    with ScriptedServer(*single, health=answer(HEALTH | {"max_bytes": 1})) as server:
        assert reward(server)(VIDEOS, CONDITIONS).values.tolist() == [3, 3, 3]


def test_a_judge_that_asks_for_21_of_81_frames_is_sent_a_quarter_of_the_bytes():
    whole = torch.zeros(1, 3, 81, 480, 832)
    alone = [dataclasses.replace(CONDITIONS[0], target_poses=None, target_video=None)]
    sent = {}
    for frames in (None, 21):
        with ScriptedServer(answer(scores(alone, 1.0)), health=answer(HEALTH | {"frames": frames})) as server:
            assert reward(server)(whole, alone).valid.all()
            sent[frames] = len(server.asked[1][2])
    assert sent[None] > 81 * 480 * 832 * 3 and sent[21] / sent[None] == pytest.approx(21 / 81, rel=1e-3)


def test_the_copies_of_a_group_come_in_one_request_where_they_are_compared():
    rows = (0, 1, 0, 1, 0)  # as copies lie in a batch
    copies = [dataclasses.replace(CONDITIONS[row], gid=row, slot=slot) for slot, row in enumerate(rows)]
    room = remote.MARGIN + 4 * VIDEOS[0].numel()
    first, second = [copies[0], copies[2], copies[4]], [copies[1], copies[3]]
    parts = [answer(scores(first, 1.0, 2.0, 3.0)), answer(scores(second, 4.0, 5.0))]
    with ScriptedServer(*parts, health=answer(HEALTH | {"max_bytes": room, "groups": True})) as server:
        judge = reward(server)
        assert judge(VIDEOS[[*rows]], copies).values.tolist() == [1, 4, 2, 5, 3]
        sent = [protocol.read_request(body).conditions for _, _, body in server.asked[1:]]
        assert [[(one.gid, one.slot) for one in part] for part in sent] == [[(0, 0), (0, 2), (0, 4)], [(1, 1), (1, 3)]]
        judge.try_server()
        with pytest.raises(ValueError, match=r"copies of a group, which this run scores apart.*layout=contiguous"):
            try_rewards(RewardSet([judge], {judge.name: 1.0}), CONDITIONS[0], whole_groups=False)
    failed = [answer(scores(first, 1.0, 2.0, 3.0)), answer({}, 400)]
    with ScriptedServer(*failed, health=answer(HEALTH | {"max_bytes": room, "groups": True})) as server:
        assert reward(server)(VIDEOS[[*rows]], copies).valid.tolist() == [True, False, True, False, True]


def test_scores_before_a_failure_are_kept_and_the_rest_is_not_sent():
    first, room = answer(scores(CONDITIONS[:1], 1.0)), remote.MARGIN + VIDEOS[0].numel()
    with ScriptedServer(first, answer({}, 400), health=answer(HEALTH | {"max_bytes": room})) as server:
        result = reward(server)(VIDEOS, CONDITIONS)
        assert result.valid.tolist() == [True, False, False] and result.values[0] == 1
        assert server.scored == 2


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.01, -0.01])
def test_a_video_outside_the_colours_is_not_sent(bad):
    videos = VIDEOS.clone()
    videos[1, 0, 0, 0, 0] = bad
    with ScriptedServer(answer(scores(CONDITIONS[::2], 1.0, 3.0))) as server:
        result = reward(server)(videos, CONDITIONS)
        assert result.valid.tolist() == [True, False, True] and result.values[2] == 3
        assert "outside [0, 1]" in result.causes[1] and not result.faulty.any()
        assert torch.equal(protocol.read_request(server.asked[1][2]).videos, VIDEOS[::2])


def test_the_circuit_breaker_opens_after_failures_and_one_call_decides_after_the_cool_down(caplog, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(remote, "FAILURES", 2)
    monkeypatch.setattr(remote, "COOL_DOWN_S", 1.0)
    bad = answer({}, 500)
    with caplog.at_level(logging.WARNING), ScriptedServer(bad, FINE, bad, bad, bad, FINE) as server:
        judge = reward(server, delays_s=())
        assert unknown(judge(VIDEOS, CONDITIONS), "status 500")
        assert judge(VIDEOS, CONDITIONS).valid.all()  # failures with a success between them do not add up
        for _ in range(2):
            assert unknown(judge(VIDEOS, CONDITIONS), "status 500")
        assert unknown(judge(VIDEOS, CONDITIONS), "not asked: it failed 2 calls, next in 1 s")
        assert server.scored == 4  # the last call cost nothing
        now[0] += 1.0
        assert unknown(judge(VIDEOS, CONDITIONS), "status 500")
        assert unknown(judge(VIDEOS, CONDITIONS), "not asked")  # one failure is enough now
        assert server.scored == 5
        now[0] += 1.0
        assert judge(VIDEOS, CONDITIONS).valid.all()
        assert judge(VIDEOS, CONDITIONS).valid.all()  # closed again
    assert "gets no calls for 1 s" in caplog.text


def test_another_model_is_refused_until_the_first_is_back():
    changed = answer(scores(CONDITIONS, 1.0, 1.0, 1.0, model="other"))
    with ScriptedServer(FINE, changed, FINE) as server:
        judge = reward(server)
        assert judge(VIDEOS, CONDITIONS).valid.all()
        assert unknown(judge(VIDEOS, CONDITIONS), "is now other v1, the run began with judge v1; host that again")
        assert judge(VIDEOS, CONDITIONS).valid.all()
        # After a failure the server is asked again who it is.
        assert [line.split()[1] for line, _, _ in server.asked] == ["/health", "/score", "/score", "/health", "/score"]


def test_a_server_that_does_not_answer_is_refused_before_a_run():
    with ScriptedServer(FINE) as server:
        try_rewards(RewardSet([reward(server)], {"remote:beauty": 1.0}), CONDITIONS[0])
        assert server.scored == 0
    gone = RewardSet([reward(server)], {"remote:beauty": 1.0})
    with pytest.raises(ValueError, match=r"remote:beauty failed .* start its server .* mend reward\.remote\.beauty"):
        try_rewards(gone, CONDITIONS[0])


def test_stats_cover_the_requests_since_the_last_call():
    with ScriptedServer(FINE, FINE, answer({}, 400), FINE) as server:
        judge = reward(server)
        idle = judge.stats()
        assert (idle["calls"], idle["failures"]) == (0, 0) and math.isnan(idle["p50_s"]) and math.isnan(idle["p95_s"])
        for _ in range(3):
            judge(VIDEOS, CONDITIONS)
        first, second = judge.stats(), judge.stats()
        assert (first["calls"], first["failures"]) == (3, 1)
        assert 0 < first["p50_s"] <= first["p95_s"] < 3
        assert (second["calls"], second["failures"]) == (0, 0)
        judge(VIDEOS, CONDITIONS)
        assert judge.stats()["calls"] == 1
        assert RewardSet([judge], {judge.name: 1.0}).stats()[judge.name]["calls"] == 0
