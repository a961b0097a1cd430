"""One HTTP call that ends: within its time, with a body that was answered 200, or with a cause in one line.

A socket's own timeout begins anew with every byte, so a server that drips would never be late; here a timer shuts the
connection down. Only looking up a host's name is outside it: give an address, or a name that resolves.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import os
import socket
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from flow_grpo.rewards.remote import protocol

# Read at every call and kept nowhere: what is in a configuration or an object ends in logs and checkpoints.
TOKEN = "FLOW_GRPO_REWARD_TOKEN"
CONNECT_S = 5.0
LONGEST_DELAY_S = 10.0  # however long a server asks to wait
MAX_REPLY = 16 * 2**20  # bytes
STARS = "***"
AGAIN = (408, 429)  # and all of 5xx


class ServiceError(Exception):
    """Why there is no answer: one line, without the token that a server may have sent back."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause.replace(_token() or STARS, STARS))


class _AgainError(Exception):
    """An attempt that may be repeated, after some seconds if the server asked for them."""

    def __init__(self, cause: str, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.after_s = after_s


@dataclasses.dataclass(frozen=True)
class Caller:
    """Asks one server.

    Attributes:
        url: http://HOST:PORT, perhaps with a path before those of the calls; https as well.
        delays_s: seconds before each further attempt, at most 10.
    """

    url: str
    delays_s: tuple[float, ...] = (0.5, 2.0)

    def ask(self, path: str, timeout_s: float, request: protocol.Message | None = None) -> bytes:
        """Return the body of an answer 200, after several attempts if need be: POST with a request, GET without.

        Attempts are repeated after connection errors, timeouts, 408, 429 and 5xx, not after other refusals.

        Raises:
            ServiceError: there is none.
        """
        for number, delay in enumerate((*self.delays_s, 0.0), start=1):
            try:
                return self._attempt(path, timeout_s, request)
            except _AgainError as error:
                if number > len(self.delays_s):
                    raise ServiceError(f"failed {number} attempts, the last: {error}") from None
                time.sleep(min(max(delay, error.after_s), LONGEST_DELAY_S))
        raise AssertionError("the last attempt returns or raises")

    def _attempt(self, path: str, timeout_s: float, request: protocol.Message | None) -> bytes:
        url = urlsplit(self.url)
        connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = connect(url.hostname or "", url.port, timeout=CONNECT_S)
        with contextlib.closing(connection):
            try:
                connection.connect()
                with _deadline(connection.sock, timeout_s):
                    return _exchange(connection, url.path.rstrip("/") + path, request)
            except TimeoutError as error:
                raise _AgainError(str(error)) from None
            except (OSError, http.client.HTTPException) as error:
                raise _AgainError(protocol.one_line(f"{type(error).__name__}: {error}")) from None


def _exchange(connection: http.client.HTTPConnection, path: str, request: protocol.Message | None) -> bytes:
    headers = _authorization()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        # A server may refuse and close before it has read everything: its answer is then there all the same.
        if request is None:
            connection.request("GET", path, headers=headers)
        else:
            headers |= {"Content-Type": request.content_type, "Content-Length": str(len(request))}
            connection.request("POST", path, request.chunks, headers)
    response = connection.getresponse()
    body = response.read(MAX_REPLY + 1).replace(_token().encode() or STARS.encode(), STARS.encode())
    if len(body) > MAX_REPLY:
        raise ServiceError(f"answered more than {MAX_REPLY >> 20} MiB")
    if response.length:
        raise ConnectionError("connection ended within the answer")
    if response.status == 200:
        return body
    cause = f"status {response.status}: {_error_text(body) or protocol.one_line(response.reason)}"
    if response.status in AGAIN or response.status >= 500:
        raise _AgainError(cause, _seconds(response.getheader("Retry-After")))
    raise ServiceError(f"refused, {cause}")


def _token() -> str:
    return os.environ.get(TOKEN, "").strip()


def _authorization() -> dict[str, str]:
    token = _token()
    # http.client would quote a token it cannot send in its error, and that would end in the log.
    if not (token.isascii() and token.isprintable()):
        raise ServiceError(f"not asked: {TOKEN} is no printable ASCII text")
    return {"Authorization": f"Bearer {token}"} if token else {}


@contextlib.contextmanager
def _deadline(sock: socket.socket, seconds: float) -> Iterator[None]:
    """Shut a connection down after `seconds`, whatever it is doing."""
    late = threading.Event()

    def end() -> None:
        late.set()
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    sock.settimeout(seconds + 1)  # should the shutdown not wake it
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except (OSError, http.client.HTTPException):
        if late.is_set():
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        raise
    finally:
        timer.cancel()
    if late.is_set():  # an answer of unknown length looks complete when it is cut
        raise TimeoutError(f"no answer within {seconds:g} s")


def _error_text(body: bytes) -> str:
    with contextlib.suppress(ValueError):
        return protocol.one_line(protocol.read_object(body, "error").get("error", ""))
    return ""


def _seconds(header: str | None) -> float:
    """Return the seconds of Retry-After; a date is not worth a clock that both sides agree on."""
    return float(header) if header and header.isascii() and header.isdigit() else 0.0
