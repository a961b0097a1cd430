"""HTTP requests to a reward server: the content of a 200 reply, or an error of one line, after retries."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import ssl
import time
from collections.abc import Sequence

import httpx

from flow_grpo.rewards.remote.protocol import TOKEN, one_line, token

CONNECT_S = 5.0
MAX_DELAY_S = 10.0  # whatever Retry-After asks for
MAX_ANSWER = 2**24  # bytes that are read of an answer: scores and causes of thousands of videos
RETRIED = (408, 429)  # and every 5xx

# Their info and debug lines quote addresses and whatever a server sent, which may be the token.
for _name in ("httpx", "httpcore"):
    logging.getLogger(_name).setLevel(logging.WARNING)


class ServiceError(Exception):
    """Why there is no reply: one line without the token."""


class _RetryableError(Exception):
    """A failed attempt that may be repeated, `after_s` seconds later if the server asked for a pause."""

    def __init__(self, cause: str, after_s: float = 0.0) -> None:
        super().__init__(cause)
        self.after_s = after_s


def ask(url: str, timeout_s: float, body: bytes | None = None, delays_s: Sequence[float] = ()) -> bytes:
    """Return the content of a 200 reply to POST `body`, or to GET without one.

    Connection errors, timeouts, 408, 429 and 5xx are retried after `delays_s`; other statuses are final. `timeout_s` is
    the longest wait of an attempt for the server to take or send anything, and for all that it sends.

    Raises:
        ServiceError: no usable reply.
    """
    delays = list(delays_s)
    while True:
        try:
            return _attempt(url, timeout_s, body)
        except _RetryableError as error:
            if not delays:
                raise ServiceError(f"failed {len(delays_s) + 1} attempts, the last: {error}") from None
            time.sleep(min(max(delays.pop(0), error.after_s), MAX_DELAY_S))


def _attempt(url: str, timeout_s: float, body: bytes | None) -> bytes:
    # A library would quote a token that it cannot send in its error, which ends up in the log.
    if not (token().isascii() and token().isprintable()):
        raise ServiceError(f"not asked: {TOKEN} is no printable ASCII text")
    try:
        with httpx.stream(
            "GET" if body is None else "POST",
            url,
            content=None if body is None else io.BytesIO(body),  # httpx sends a file in pieces
            headers={"Authorization": f"Bearer {token()}"} if token() else {},
            timeout=httpx.Timeout(timeout_s, connect=min(CONNECT_S, timeout_s)),
            verify=ssl.create_default_context(),
            trust_env=False,  # no proxy and no .netrc: connect only to the address in the configuration
        ) as response:
            content = _content(response, timeout_s)
    except (httpx.ReadTimeout, httpx.WriteTimeout):
        raise _RetryableError(f"no answer within {timeout_s:g} s") from None
    except httpx.HTTPError as error:
        raise _RetryableError(one_line(f"{type(error).__name__}: {error}")) from None
    status = response.status_code
    if status == 200:
        return content
    cause = response.reason_phrase
    with contextlib.suppress(Exception):  # a proxy between answers anything
        cause = json.loads(content)["error"]
    cause = f"status {status}: {one_line(cause)}"
    if status in RETRIED or status >= 500:
        pause = response.headers.get("Retry-After", "")  # a date would need synchronised clocks
        raise _RetryableError(cause, float(pause) if pause.isascii() and pause.isdigit() else 0.0)
    raise ServiceError(f"refused, {cause}")


def _content(response: httpx.Response, timeout_s: float) -> bytes:
    """Return what a server answers, whose size and duration are bounded here, whatever it sends."""
    content, end = bytearray(), time.monotonic() + timeout_s
    for piece in response.iter_bytes():
        content += piece
        if len(content) > MAX_ANSWER:
            raise ServiceError(f"answers with more than {MAX_ANSWER} bytes, which no reply to it needs")
        if time.monotonic() > end:
            raise _RetryableError(f"no whole answer within {timeout_s:g} s")
    return bytes(content)
