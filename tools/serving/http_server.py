"""The HTTP side of a reward server: an ASGI application under uvicorn, one request a connection.

Everything a sender can hold is limited: connections in number, headers, bodies and waiting requests in time and size.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import anyio
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from flow_grpo.rewards.remote import protocol
from tools.serving.scoring_service import RefusedError, ScoringService

BACKLOG = 64  # connections not yet accepted: the ranks of a node ask at the same moment
MAX_CONNECTIONS = 256  # further ones get 503
ADMITTED = 4  # requests whose bodies are in memory at a time: one is scored, the others arrive
LINGER_S = 2.0  # for which the rest of a refused body is discarded
RETRY_AFTER_S = 5


class _Connection(H11Protocol):
    """Closes a connection whose headers do not arrive in time, a limit that uvicorn lacks."""

    def __init__(self, timeout_s: float, **options: Any) -> None:
        super().__init__(**options)
        self._timeout_s = timeout_s

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.loop.call_later(self._timeout_s, self._close_without_request)

    def _close_without_request(self) -> None:
        if self.scope is None:
            self.transport.close()


async def _send_reply(status: int, content: dict[str, Any], retry_after_s: int, receive: Receive, send: Send) -> None:
    """Send a JSON reply that ends its connection; after a refusal discard the body for a moment.

    Closing a connection with unread bytes would reset it, and the sender might never read the refusal.
    """
    refused = status != 200
    headers = {"Connection": "close"} | ({"Retry-After": str(retry_after_s)} if retry_after_s else {})
    reply = Response(json.dumps(content, allow_nan=False), status, headers, "application/json")
    await send({"type": "http.response.start", "status": status, "headers": reply.raw_headers})
    await send({"type": "http.response.body", "body": reply.body, "more_body": refused})
    if refused:
        with anyio.move_on_after(LINGER_S):
            while (await receive())["type"] == "http.request":
                pass
        await send({"type": "http.response.body"})


@contextlib.asynccontextmanager
async def _turn(lock: asyncio.Lock | asyncio.Semaphore, timeout_s: float) -> AsyncIterator[None]:
    """Hold a lock or semaphore inside; RefusedError with status 503 if it is not free in time."""
    try:
        await asyncio.wait_for(lock.acquire(), timeout_s)
    except asyncio.TimeoutError:
        raise RefusedError(503, f"busy for more than {timeout_s:g} s", RETRY_AFTER_S) from None
    try:
        yield
    finally:
        lock.release()


class RewardServer:
    """A scoring service at an address.

    Args:
        address: host and port; port 0 takes a free one.
        service: decodes and scores.
        timeout_s: for headers, for a body, and for a request to wait for its turn.
        token: that requests must carry, or "".

    Raises:
        ValueError: an address that other machines reach, without a token.
        OSError: the address is not available.
    """

    def __init__(
        self, address: tuple[str, int], service: ScoringService, *, timeout_s: float = 120.0, token: str = ""
    ) -> None:
        if not token and not is_loopback(address[0]):
            raise ValueError(
                f"--host is {address[0]}, which other machines reach: pass --token-env, or --host 127.0.0.1"
            )
        self.service = service
        self._timeout_s = timeout_s
        self._token = token
        self._admitted, self._scoring = asyncio.Semaphore(ADMITTED), asyncio.Lock()
        self._socket = socket.create_server(address, backlog=BACKLOG)
        self.address: tuple[str, int] = self._socket.getsockname()
        config = uvicorn.Config(
            self._answer,
            http=functools.partial(_Connection, timeout_s),
            loop="asyncio",
            ws="none",
            interface="asgi3",
            lifespan="off",
            log_config=None,
            log_level="error",
            access_log=False,  # `_answer` prints a line for each request; headers may hold the token
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=1,
        )
        self._uvicorn = uvicorn.Server(config)

    @property
    def url(self) -> str:
        """Return the server's address."""
        return "http://{}:{}".format(*self.address)

    def run(self) -> None:
        """Serve until `stop` or a signal."""
        with self._socket:
            self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `run` return soon; called from another thread."""
        self._uvicorn.should_exit = True

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        begin, request = time.monotonic(), Request(scope, receive)
        try:
            self._check_token(request)
            call = {("GET", "/health"): self._health, ("POST", "/score"): self._score}.get(
                (request.method, scope["path"])
            )
            if call is None:
                raise RefusedError(404, "here are GET /health and POST /score")
            status, content, retry_after_s = 200, await call(request), 0
        except RefusedError as error:
            status, content, retry_after_s = error.status, {"error": str(error)}, error.retry_after_s
        line = f"{request.method} {protocol.one_line(scope['path'])} {status} {content.get('error', '')}"
        print(f"{line} {time.monotonic() - begin:.3f} s", flush=True)
        await _send_reply(status, content, retry_after_s, receive, send)

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("Authorization", "").encode("latin-1")
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise RefusedError(401, "the token is missing or wrong")

    async def _health(self, _: Request) -> dict[str, Any]:
        return self.service.health()

    async def _score(self, request: Request) -> dict[str, Any]:
        length, limit = request.headers.get("Content-Length", ""), self.service.max_bytes
        if not length or "Transfer-Encoding" in request.headers:
            raise RefusedError(411, "a Content-Length is needed, without a Transfer-Encoding")
        if int(length) > limit:  # h11 has checked that it is a number
            raise RefusedError(413, f"request of {int(length)} bytes, at most {limit} are read: see --max-mb")
        async with _turn(self._admitted, self._timeout_s):
            body = await self._body(request, int(length))
            batch = await asyncio.to_thread(self.service.read, request.headers.get("Content-Type", ""), body)
            async with _turn(self._scoring, self._timeout_s):
                return await asyncio.to_thread(self.service.score, batch)

    async def _body(self, request: Request, length: int) -> bytearray:
        """Read a body; one that stalls or drips is given up in time."""
        body = bytearray()
        try:
            with anyio.fail_after(self._timeout_s):
                async for piece in request.stream():
                    body += piece
        except TimeoutError:
            raise RefusedError(408, f"{len(body)} of {length} bytes came within {self._timeout_s:g} s") from None
        except ClientDisconnect:
            raise RefusedError(400, f"request ends after {len(body)} of {length} bytes") from None
        return body


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches a host address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
