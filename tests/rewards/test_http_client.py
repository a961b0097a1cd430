"""A request ends in time, with the JSON of a 200 reply or with a cause in one line."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import numpy as np
import pytest

from flow_grpo.rewards.remote import http_client, protocol
from flow_grpo.rewards.remote.http_client import TOKEN, Client, ServiceError
from tests.limits import LIMIT_S
from tests.scripted_server import ScriptedServer, answer, cut, dripping, reset, silent

MESSAGE = protocol.encode({"protocol": 1}, {"videos": np.zeros((2, 3), np.uint8)})
LARGE = protocol.encode({}, {"videos": np.zeros(2**26, np.uint8)})
FINE = answer({"fine": True})


def ask(server: ScriptedServer, timeout_s: float = LIMIT_S, delays_s=(0.0, 0.0)) -> dict:
    return Client(server.url, delays_s).ask("/score", timeout_s, MESSAGE)


def refusal(server: ScriptedServer, timeout_s: float = LIMIT_S) -> str:
    with pytest.raises(ServiceError) as caught:
        ask(server, timeout_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_request_and_reply_arrive_and_proxies_of_the_environment_are_ignored(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    with ScriptedServer(FINE) as server:
        assert ask(server) == {"fine": True}
        line, headers, body = server.asked[0]
        assert line == "POST /score HTTP/1.1" and headers["Accept-Encoding"] == "identity"
        assert protocol.decode(headers["Content-Type"], bytearray(body))[1]["videos"].shape == (2, 3)
        assert Client(f"{server.url}/behind/").ask("/health", 5.0)
        assert server.asked[1][0] == "GET /behind/health HTTP/1.1"


@pytest.mark.parametrize("bad", [answer({}, 500), answer({}, 503), answer({}, 429), answer({}, 408), cut, reset])
def test_a_temporary_failure_is_retried(bad):
    with ScriptedServer(bad, bad, FINE) as server:
        assert ask(server) == {"fine": True}
        assert server.scored == 3


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (answer({"error": "out of\nmemory"}, 500), "status 500: out of memory"),
        (answer(b"<html>", 502), "status 502: Told"),
        (answer({}, 429), "status 429"),
        (cut, "peer closed connection without sending complete message body"),
        (reset, "Connection reset"),
        (answer(b"-1\r\n", 200, {"Content-Length": "9", "Transfer-Encoding": "chunked"}), "ProtocolError"),
        (answer(b"{}", 200, {"Content-Length": "-2"}), "ProtocolError"),
        (lambda connection, _: connection.sendall(b"nonsense\r\n\r\n"), "ProtocolError"),
    ],
)
def test_a_lasting_failure_ends_after_three_attempts(bad, cause):
    with ScriptedServer(bad) as server:
        text = refusal(server)
        assert text.startswith("failed 3 attempts, the last: ") and cause in text
        assert server.scored == 3


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 411, 413, 422])
def test_another_refusal_is_final_and_redirects_are_not_followed(status):
    headers = {"Location": "http://127.0.0.1:9/"} if status == 301 else {}
    with ScriptedServer(answer({"error": "no"}, status, headers), FINE) as server:
        assert refusal(server) == f"refused, status {status}: no"
        assert server.scored == 1


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"", b"\xff", b'{"a":' * 100_000])
def test_a_reply_that_is_no_json_object_is_final(body):
    with ScriptedServer(answer(body), FINE) as server:
        assert refusal(server).startswith("cannot be believed: reply is ")
        assert server.scored == 1


@pytest.mark.parametrize("depth", [300, 500, 900])
def test_deeply_nested_json_is_read_or_refused(depth):
    with ScriptedServer(answer(b'{"a":' * depth + b"1" + b"}" * depth)) as server, contextlib.suppress(ServiceError):
        assert ask(server)


def endless(connection, over):
    """Send a reply of unknown length, which looks complete when the connection is shut down."""
    connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n{}")
    over.wait(30)


def dripping_body(connection, over):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while not over.wait(0.02):
        connection.sendall(b" ")


@pytest.mark.parametrize("slow", [silent, dripping, dripping_body, endless])
def test_a_slow_server_is_given_up_at_the_deadline(slow):
    begin = time.monotonic()
    with ScriptedServer(slow) as server:
        assert refusal(server, 0.2) == "failed 3 attempts, the last: no answer within 0.2 s"
    assert time.monotonic() - begin >= 0.6


def test_a_server_that_reads_nothing_is_given_up_at_the_deadline():
    """Sending blocks once the socket buffers are full."""
    late = pytest.raises(ServiceError, match=r"no answer within 0\.3 s")
    with socket.create_server(("127.0.0.1", 0)) as deaf, late:
        Client(f"http://127.0.0.1:{deaf.getsockname()[1]}", ()).ask("/score", 0.3, LARGE)


def test_a_refused_connection_is_a_cause():
    with socket.create_server(("127.0.0.1", 0)) as once:
        url = f"http://127.0.0.1:{once.getsockname()[1]}"
    with pytest.raises(ServiceError, match=r"failed 3 attempts, the last: ConnectError: .*refused"):
        Client(url, (0.0, 0.0)).ask("/health", LIMIT_S)


def test_a_refusal_before_the_request_was_read_is_still_heard():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            connection.recv(1000)
            answer({"error": "too large"}, 413)(connection, threading.Event())
            connection.shutdown(socket.SHUT_WR)
            time.sleep(0.3)
            connection.close()  # with most of the request unread

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(ServiceError, match="refused, status 413: too large"):
            Client(f"http://127.0.0.1:{listener.getsockname()[1]}", ()).ask("/score", LIMIT_S, LARGE)
        thread.join()


def test_retry_after_lengthens_a_delay_within_a_limit(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(http_client.time, "sleep", slept.append)
    waits = [answer({}, 429, {"Retry-After": text}) for text in ("4", "100000", "Wed, 21 Oct 2026 07:28:00 GMT")]
    with ScriptedServer(*waits, answer({}, 500)) as server, pytest.raises(ServiceError):
        ask(server, delays_s=(0.5, 2.0, 3.0))
    assert slept == [4.0, 10.0, 3.0]


def test_a_reply_that_is_too_large_is_refused(monkeypatch):
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
    assert "secret" not in line and b"secret" not in body and "secret" not in repr(Client(server.url))
    monkeypatch.delenv(TOKEN)
    with ScriptedServer(FINE) as server:
        ask(server)
        assert "Authorization" not in server.asked[0][1]


def test_a_token_that_a_server_sends_back_is_starred_however_it_is_escaped(monkeypatch):
    monkeypatch.setenv(TOKEN, "s-t")
    escaped = json.dumps({"error": "s-t", "list": [{"s-t": "a s-t"}]}).replace("-", "\\u002d").encode()
    with ScriptedServer(answer(escaped, 401)) as server:
        assert refusal(server) == "refused, status 401: ***"
    with ScriptedServer(answer(escaped)) as server:
        assert ask(server) == {"error": "***", "list": [{"***": "a ***"}]}
    monkeypatch.delenv(TOKEN)
    assert str(ServiceError("the s-t")) == "the s-t"


def test_a_token_that_no_header_can_hold_is_refused_without_quoting_it(monkeypatch):
    monkeypatch.setenv(TOKEN, "sec\nret")
    with ScriptedServer(FINE) as server:
        text = refusal(server)
    assert TOKEN in text and "ret" not in text.replace("refused", "")
    assert not server.asked


def test_https_is_spoken_where_the_address_says_so():
    first: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_in_plain_text() -> None:
            connection, _ = listener.accept()
            first.append(connection.recv(1))
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer_in_plain_text)
        thread.start()
        with pytest.raises(ServiceError, match="ConnectError"):
            Client(f"https://127.0.0.1:{listener.getsockname()[1]}", ()).ask("/health", 5.0)
        thread.join()
    assert first == [b"\x16"]  # a TLS handshake
