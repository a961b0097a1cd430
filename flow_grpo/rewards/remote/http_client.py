"""HTTP requests to a reward server: the JSON object of a 200 reply, or an error of one line, within a deadline.

httpx restarts its timeouts with every byte, so a server that drips would never be late: a timer shuts the socket down
instead. Only looking up a host name is outside the deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx

from flow_grpo.rewards.remote import protocol

# Read at every request and stored nowhere: what an object or a configuration holds ends up in logs and checkpoints.
TOKEN = "FLOW_GRPO_REWARD_TOKEN"
CONNECT_S = 5.0
MAX_DELAY_S = 10.0  # whatever Retry-After asks for
MAX_REPLY = 16 * 2**20  # bytes
STARS = "***"
RETRIED = (408, 429)  # and every 5xx

# Their info and debug lines quote addresses and whatever a server sent, which may be the token.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class ServiceError(Exception):
    """Why there is no reply: one line, with the token starred in case the server sent it back."""

    def __init__(self, cause: str) -> None:
        super().__init__(starred(cause))


class _RetryableError(Exception):
    """A failed attempt that may be repeated, `after_s` seconds later if the server asked for a pause."""

    def __init__(self, cause: str, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.after_s = after_s


class _Deadline:
    """Shuts a request's connection down `seconds` after entering, whatever it is doing."""

    def __init__(self, seconds: float) -> None:
        self.passed = False
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(seconds, self._end)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Remember a new connection's socket, for the deadline to shut down; httpx's "trace" extension calls this."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.passed:
                self._shut_down()

    def _end(self) -> None:
        self.passed = True
        self._shut_down()

    def _shut_down(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


@dataclasses.dataclass(frozen=True)
class Client:
    """Sends requests to one server.

    Attributes:
        url: http://HOST:PORT or https://HOST:PORT, with or without a path prefix.
        delays_s: seconds before each further attempt, at most 10.
    """

    url: str
    delays_s: tuple[float, ...] = (0.5, 2.0)

    def ask(self, path: str, timeout_s: float, message: protocol.Message | None = None) -> dict[str, Any]:
        """Return the JSON object of a 200 reply to POST `message`, or to GET without one.

        Connection errors, timeouts, 408, 429 and 5xx are retried; other statuses and malformed JSON are final.

        Args:
            path: appended to the server's url.
            timeout_s: total time of one attempt, connecting included.
            message: body of a POST.

        Raises:
            ServiceError: no usable reply.
        """
        for number, delay in enumerate((*self.delays_s, 0.0), start=1):
            try:
                return self._attempt(path, timeout_s, message)
            except _RetryableError as error:
                if number > len(self.delays_s):
                    raise ServiceError(f"failed {number} attempts, the last: {error}") from None
                time.sleep(min(max(delay, error.after_s), MAX_DELAY_S))
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, path: str, timeout_s: float, message: protocol.Message | None) -> dict[str, Any]:
        headers, content = {"Accept-Encoding": "identity"} | _authorization(), None
        if message is not None:
            headers |= {"Content-Type": message.content_type, "Content-Length": str(len(message))}
            content = message.pieces()
        deadline = _Deadline(timeout_s)
        timeout = httpx.Timeout(timeout_s + 1, connect=min(CONNECT_S, timeout_s))
        # Ignore proxies and .netrc from the environment: connect only to the address in the configuration.
        client = httpx.Client(verify=_certificates(), trust_env=False, timeout=timeout)
        request = client.build_request(
            "GET" if message is None else "POST",
            self.url.rstrip("/") + path,
            content=content,
            headers=headers,
            extensions={"trace": deadline.trace},
        )
        try:
            with client, deadline, contextlib.closing(client.send(request, stream=True)) as response:
                body = _read(response)
        except httpx.HTTPError as error:
            if not deadline.passed:
                raise _RetryableError(protocol.one_line(f"{type(error).__name__}: {error}")) from None
        if deadline.passed:  # also after a reply without a length, which looks complete when it is cut
            raise _RetryableError(f"no answer within {timeout_s:g} s")
        return _accepted(response, body)


def _read(response: httpx.Response) -> bytes:
    body = bytearray()
    for piece in response.iter_raw():
        body += piece
        if len(body) > MAX_REPLY:
            raise ServiceError(f"answered more than {MAX_REPLY >> 20} MiB")
    return bytes(body)


def _accepted(response: httpx.Response, body: bytes) -> dict[str, Any]:
    """Return the object of a 200 reply; raise for every other status."""
    status = response.status_code
    if status == 200:
        try:
            reply: dict[str, Any] = starred(protocol.read_object(body, "reply"))
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"cannot be believed: {protocol.one_line(error)}") from None
        return reply
    cause = f"status {status}: {_error_text(body) or protocol.one_line(response.reason_phrase)}"
    if status in RETRIED or status >= 500:
        raise _RetryableError(cause, _seconds(response.headers.get("Retry-After", "")))
    raise ServiceError(f"refused, {cause}")


@functools.cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


def _token() -> str:
    return os.environ.get(TOKEN, "").strip()


def starred(value: Any) -> Any:
    """Return decoded JSON with the token starred in every text; before decoding, unicode escapes could hide it."""
    if isinstance(value, str):
        return value.replace(_token() or STARS, STARS)
    if isinstance(value, list):
        return [starred(entry) for entry in value]
    if isinstance(value, dict):
        return {starred(key): starred(entry) for key, entry in value.items()}
    return value


def _authorization() -> dict[str, str]:
    token = _token()
    # A library would quote a token that it cannot send in its error, which ends up in the log.
    if not (token.isascii() and token.isprintable()):
        raise ServiceError(f"not asked: {TOKEN} is no printable ASCII text")
    return {"Authorization": f"Bearer {token}"} if token else {}


def _error_text(body: bytes) -> str:
    with contextlib.suppress(ValueError):
        return protocol.one_line(protocol.read_object(body, "error").get("error", ""))
    return ""


def _seconds(header: str) -> float:
    """Return the delay in a Retry-After header in seconds, or 0 for a date, which needs synchronised clocks."""
    return float(header) if header.isascii() and header.isdigit() else 0.0
