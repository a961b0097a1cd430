"""A request ends in time, with the content of a 200 reply or with a cause in one line."""

import json
import socket
import threading

import pytest

from flow_grpo.rewards.remote import http_client
from flow_grpo.rewards.remote.http_client import ServiceError
from flow_grpo.rewards.remote.protocol import TOKEN
from tests.limits import LIMIT_S
from tests.scripted_server import ScriptedServer, answer, cut, silent

FINE = answer(b"fine")


def ask(server: ScriptedServer, timeout_s: float = LIMIT_S, delays_s=(0.0, 0.0), body: bytes = b"asked") -> bytes:
    return http_client.ask(f"{server.url}/score", timeout_s, body, delays_s)


def refusal(server: ScriptedServer, timeout_s: float = LIMIT_S) -> str:
    with pytest.raises(ServiceError) as caught:
        ask(server, timeout_s)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_request_and_reply_arrive_and_proxies_of_the_environment_are_ignored(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    large = bytes(range(256)) * 2**13
    with ScriptedServer(answer(large)) as server:
        assert ask(server, body=large) == large
        line, headers, body = server.asked[0]
        assert line == "POST /score HTTP/1.1" and headers["Content-Length"] == str(len(large)) and body == large
        assert http_client.ask(f"{server.url}/behind/health", LIMIT_S)
        assert server.asked[1][0] == "GET /behind/health HTTP/1.1"


@pytest.mark.parametrize("bad", [answer({}, 500), answer({}, 503), answer({}, 429), answer({}, 408), cut])
def test_a_temporary_failure_is_retried(bad):
    with ScriptedServer(bad, bad, FINE) as server:
        assert ask(server) == b"fine"
        assert server.scored == 3


@pytest.mark.parametrize(
    ("bad", "cause"),
    [
        (answer({"error": "out of\nmemory"}, 500), "status 500: out of memory"),
        (answer(b"<html>", 502), "status 502: Told"),
        (answer([1], 429), "status 429: Told"),
        (cut, "peer closed connection without sending complete message body"),
        (lambda *_: None, "RemoteProtocolError: Server disconnected"),
        (lambda connection, _: connection.sendall(b"nonsense\r\n\r\n"), "ProtocolError"),
    ],
)
def test_a_lasting_failure_ends_after_three_attempts(bad, cause):
    with ScriptedServer(bad) as server:
        text = refusal(server)
        assert text.startswith("failed 3 attempts, the last: ") and cause in text
        assert server.scored == 3


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 413, 422])
def test_another_refusal_is_final_and_redirects_are_not_followed(status):
    headers = {"Location": "http://127.0.0.1:9/"} if status == 301 else {}
    with ScriptedServer(answer({"error": "no"}, status, headers), FINE) as server:
        assert refusal(server) == f"refused, status {status}: no"
        assert server.scored == 1


def test_a_silent_server_and_a_refused_connection_are_given_up():
    with ScriptedServer(silent) as server:
        assert refusal(server, 0.2) == "failed 3 attempts, the last: no answer within 0.2 s"
    with ScriptedServer(FINE) as server:
        pass
    assert "failed 3 attempts, the last: ConnectError: " in refusal(server)


def test_an_answer_without_end_or_without_hurry_is_given_up():
    def endless(connection: socket.socket, _: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + bytes(2 * http_client.MAX_ANSWER))

    def dripping(connection: socket.socket, over: threading.Event) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n")
        while not over.wait(0.05):
            connection.sendall(b"x")

    with ScriptedServer(endless) as server:
        assert refusal(server) == "answers with more than 16777216 bytes, which no reply to it needs"
    with ScriptedServer(dripping) as server:
        assert refusal(server, 0.3) == "failed 3 attempts, the last: no whole answer within 0.3 s"


def test_a_server_that_reads_nothing_is_given_up():
    """Sending blocks once the socket buffers are full."""
    late = pytest.raises(ServiceError, match=r"no answer within 0\.3 s")
    with socket.create_server(("127.0.0.1", 0)) as deaf, late:
        http_client.ask(f"http://127.0.0.1:{deaf.getsockname()[1]}/score", 0.3, bytes(2**26))


def test_retry_after_lengthens_a_delay_within_a_limit(monkeypatch):
    slept: list[float] = []
    monkeypatch.setattr(http_client.time, "sleep", slept.append)
    waits = [answer({}, 429, {"Retry-After": text}) for text in ("4", "100000", "Wed, 21 Oct 2026 07:28:00 GMT")]
    with ScriptedServer(*waits, answer({}, 500)) as server, pytest.raises(ServiceError):
        ask(server, delays_s=(0.5, 2.0, 3.0))
    assert slept == [4.0, 10.0, 3.0]


def test_the_token_travels_in_its_header_and_nowhere_else_and_one_that_no_header_can_hold_is_refused(monkeypatch):
    monkeypatch.setenv(TOKEN, " s-t\n")
    escaped = json.dumps({"error": "wrong s-t"}).replace("-", "\\u002d").encode()
    with ScriptedServer(answer(escaped, 401)) as server:
        assert refusal(server) == "refused, status 401: wrong ***"
        line, headers, body = server.asked[0]
    assert headers["Authorization"] == "Bearer s-t"
    assert "s-t" not in line and b"s-t" not in body
    monkeypatch.delenv(TOKEN)
    with ScriptedServer(FINE) as server:
        ask(server)
        assert "Authorization" not in server.asked[0][1]
        monkeypatch.setenv(TOKEN, "sec\nret")
        text = refusal(server)
        assert TOKEN in text and "ret" not in text.replace("refused", "") and len(server.asked) == 1


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
            http_client.ask(f"https://127.0.0.1:{listener.getsockname()[1]}/health", LIMIT_S)
        thread.join()
    assert first == [b"\x16"]  # a TLS handshake
