"""The HTTP side of a reward server: an ASGI application under uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import socket
import time

import anyio
import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from flow_grpo.rewards.remote import protocol
from tools.serving.scoring_service import RefusedError, ScoringService

BACKLOG = 64  # connections not yet accepted: the ranks of a node ask at the same moment
MAX_CONNECTIONS = 256  # further ones get 503
ADMITTED = 4  # requests whose bodies are in memory at a time: one is scored, the others arrive
LINGER_S = 2.0  # for which the rest of a refused body is discarded
RETRY_AFTER_S = 5


class RewardServer:
    """A scoring service at an address; ValueError for one that other machines reach without a token.

    Port 0 takes a free one. A request has `timeout_s` to arrive, and again to wait for its turn.
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
            http="h11",
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
        return "http://{}:{}".format(*self.address)

    def run(self) -> None:
        with self._socket:
            self._uvicorn.run(sockets=[self._socket])

    def stop(self) -> None:
        """Make `run` return soon; called from another thread."""
        self._uvicorn.should_exit = True

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin, request, cause = time.monotonic(), Request(scope, receive), ""
        try:
            response = await self._response(request)
        except RefusedError as error:
            cause, headers = str(error), {"Retry-After": str(RETRY_AFTER_S)} if error.status == 503 else None
            response = JSONResponse({"error": cause}, error.status, headers)
            # Closing a connection with unread bytes would reset it, and the sender might never read the refusal.
            # RuntimeError says that all of them have been read.
            with anyio.move_on_after(LINGER_S), contextlib.suppress(ClientDisconnect, RuntimeError):
                async for _ in request.stream():
                    pass
        line = f"{request.method} {protocol.one_line(scope['path'])} {response.status_code} {cause}"
        print(f"{line} {time.monotonic() - begin:.3f} s", flush=True)
        await response(scope, receive, send)

    async def _response(self, request: Request) -> Response:
        given = request.headers.get("Authorization", "").encode("latin-1")
        if self._token and not hmac.compare_digest(given, f"Bearer {self._token}".encode()):
            raise RefusedError(401, "the token is missing or wrong")
        call = (request.method, request.scope["path"])
        if call in (("GET", "/health"), ("HEAD", "/health")):  # the second as monitors ask
            return JSONResponse(self.service.health())
        if call != ("POST", "/score"):
            raise RefusedError(404, "here are GET /health and POST /score")
        try:
            return Response(await self._scores(request), media_type="application/octet-stream")
        except TimeoutError:
            raise RefusedError(503, f"not arrived, or not at its turn, within {self._timeout_s:g} s") from None
        except ClientDisconnect:
            raise RefusedError(400, "request ends early") from None

    async def _scores(self, request: Request) -> bytes:
        async with contextlib.AsyncExitStack() as held:
            with anyio.fail_after(self._timeout_s):
                await held.enter_async_context(self._admitted)
                body = await self._body(request)
                asked = await asyncio.to_thread(self.service.read, body)
            with anyio.fail_after(self._timeout_s):
                await held.enter_async_context(self._scoring)
            return await asyncio.to_thread(self.service.score, asked)

    async def _body(self, request: Request) -> bytes:
        pieces, size, limit = [], 0, self.service.max_bytes
        async for piece in request.stream():
            size += len(piece)
            if size > limit:
                raise RefusedError(413, f"request of more than {limit} bytes: see --max-mb")
            pieces.append(piece)
        return b"".join(pieces)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
