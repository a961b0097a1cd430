"""A call ends in time, with the body of an answer 200 or with a cause in one line."""

from __future__ import annotations

import http.client
import socket
import threading
import time

import numpy as np
import pytest

from flow_grpo.rewards.remote import http_client, protocol
from flow_grpo.rewards.remote.http_client import TOKEN, Caller, ServiceError
from tests.scripted_server import ScriptedServer, answer, cut, dripping, reset, silent

REQUEST = protocol.encode({"protocol": 1}, {"videos": np.zeros((2, 3), np.uint8)})
FINE = answer({"fine": True})


def ask(server: ScriptedServer, timeout_s: float = 5.0, delays_s=(0.0, 0.0)) -> bytes:
    return Caller(server.url, delays_s).ask("/score", timeout_s, REQUEST)


def refusal(server: ScriptedServer, timeout_s: float = 5.0) -> str:
    with pytest.raises(ServiceError) as caught:
        ask(server, timeout_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_answer_comes_back_and_the_request_arrives():
    with ScriptedServer(FINE) as server:
        assert ask(server) == b'{"fine": true}'
        line, headers, body = server.asked[0]
        assert line == "POST /score HTTP/1.1"
        assert protocol.decode(headers["Content-Type"], bytearray(body))[1]["videos"].shape == (2, 3)
        assert Caller(f"{server.url}/behind/").ask("/health", 5.0)
        assert server.asked[1][0] == "GET /behind/health HTTP/1.1"


@pytest.mark.parametrize("bad", [answer({}, 500), answer({}, 503), answer({}, 429), answer({}, 408), cut, reset])
def test_a_passing_failure_is_repeated(bad):
    with ScriptedServer(bad, bad, FINE) as server:
        assert ask(server) == b'{"fine": true}'
        assert server.scored == 3


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (answer({"error": "out of\nmemory"}, 500), "status 500: out of memory"),
        (answer(b"<html>", 502), "status 502: Told"),
        (answer({}, 429), "status 429"),
        (cut, "connection ended within the answer"),
        (reset, "ConnectionResetError"),
        (answer(b"", 200, {"Content-Length": "x" * 3, "Transfer-Encoding": "chunked"}), "IncompleteRead"),
        (lambda connection, _: connection.sendall(b"nonsense\r\n\r\n"), "BadStatusLine"),
    ],
)
def test_a_lasting_failure_ends_after_three_attempts(bad, cause):
    with ScriptedServer(bad) as server:
        text = refusal(server)
        assert text.startswith("failed 3 attempts, the last: ") and cause in text
        assert server.scored == 3


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 411, 413, 422])
def test_another_refusal_is_final(status):
    headers = {"Location": "http://127.0.0.1:9/"} if status == 301 else {}
    with ScriptedServer(answer({"error": "no"}, status, headers), FINE) as server:
        assert refusal(server) == f"refused, status {status}: no"
        assert server.scored == 1


@pytest.mark.parametrize("slow", [silent, dripping])
def test_a_slow_server_costs_its_time_and_no_more(slow):
    begin = time.monotonic()
    with ScriptedServer(slow) as server:
        assert refusal(server, 0.2) == "failed 3 attempts, the last: no answer within 0.2 s"
    assert 0.6 <= time.monotonic() - begin < 2


def test_a_server_that_takes_nothing_costs_its_time_and_no_more():
    """It accepts the connection but never reads: sending blocks once the buffers are full."""
    large = protocol.encode({}, {"videos": np.zeros(2**26, np.uint8)})
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        begin = time.monotonic()
        with pytest.raises(ServiceError, match=r"no answer within 0\.3 s"):
            Caller(f"http://127.0.0.1:{deaf.getsockname()[1]}", ()).ask("/score", 0.3, large)
        assert time.monotonic() - begin < 2


def test_a_cut_answer_of_unknown_length_is_late_not_complete():
    def endless(connection, over):
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n{}")
        over.wait(30)

    with ScriptedServer(endless) as server:
        assert "no answer within 0.2 s" in refusal(server, 0.2)


def test_nobody_there_is_a_cause():
    with socket.create_server(("127.0.0.1", 0)) as once:
        url = f"http://127.0.0.1:{once.getsockname()[1]}"
    with pytest.raises(ServiceError, match="failed 3 attempts, the last: ConnectionRefusedError"):
        Caller(url, (0.0, 0.0)).ask("/health", 1.0)


def test_a_refusal_before_the_request_was_read_is_still_heard():
    large = protocol.encode({}, {"videos": np.zeros(2**26, np.uint8)})
    with socket.create_server(("127.0.0.1", 0)) as listener, ScriptedServer(FINE) as server:

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            answer({"error": "too large"}, 413)(connection, server._over)
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
            connection.close()  # with most of the request unread

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(ServiceError, match="refused, status 413: too large"):
            Caller(f"http://127.0.0.1:{listener.getsockname()[1]}", ()).ask("/score", 5.0, large)
        thread.join()


def test_delays_grow_and_a_server_may_ask_for_longer_ones_within_a_limit(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(http_client.time, "sleep", slept.append)
    waits = [answer({}, 429, {"Retry-After": text}) for text in ("4", "100000", "Wed, 21 Oct 2026 07:28:00 GMT")]
    with ScriptedServer(*waits, answer({}, 500)) as server, pytest.raises(ServiceError):
        ask(server, delays_s=(0.5, 2.0, 3.0))
    assert slept == [4.0, 10.0, 3.0]


def test_too_large_an_answer_is_not_kept(monkeypatch):
    monkeypatch.setattr(http_client, "MAX_REPLY", 100)
    with ScriptedServer(answer(b"x" * 101)) as server:
        assert refusal(server).startswith("answered more than")
        assert server.scored == 1


def test_the_token_travels_in_its_header_and_nowhere_else(monkeypatch):
    monkeypatch.setenv(TOKEN, " secret\n")
    with ScriptedServer(answer({"error": "wrong"}, 401)) as server:
        assert "secret" not in refusal(server)
        line, headers, body = server.asked[0]
    assert headers["Authorization"] == "Bearer secret"
    assert "secret" not in line and b"secret" not in body
    assert "secret" not in repr(Caller(server.url))
    monkeypatch.delenv(TOKEN)
    with ScriptedServer(FINE) as server:
        ask(server)
        assert "Authorization" not in server.asked[0][1]


def test_a_token_that_a_server_sends_back_is_starred(monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    with ScriptedServer(answer({"error": "unknown: Bearer secret"}, 401)) as server:
        assert refusal(server) == "refused, status 401: unknown: Bearer ***"
    with ScriptedServer(answer({"model": "secret"})) as server:
        assert ask(server) == b'{"model": "***"}'
    assert str(ServiceError("the secret")) == "the ***"
    monkeypatch.delenv(TOKEN)
    assert str(ServiceError("the secret")) == "the secret"


def test_a_token_that_no_header_holds_is_refused_without_quoting_it(monkeypatch):
    monkeypatch.setenv(TOKEN, "sec\nret")
    with ScriptedServer(FINE) as server:
        text = refusal(server)
    assert TOKEN in text and "ret" not in text.replace("refused", "")
    assert not server.asked


def test_https_is_spoken_where_the_address_says_so(monkeypatch):
    made = []
    monkeypatch.setattr(http.client, "HTTPSConnection", lambda *a, **k: made.append(a) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Caller("https://127.0.0.1:8443").ask("/health", 1.0)
    assert made == [("127.0.0.1", 8443)]
