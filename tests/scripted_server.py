"""Servers for tests: one that misbehaves as scripted, and the real one in a thread."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tools.serving.http_server import RewardServer

Act = Callable[[socket.socket, threading.Event], None]

HEALTH = {"protocol": 1, "model": "judge", "version": "v1", "rewards": ["beauty"], "needs": [], "max_bytes": 2**28}


def scores(*values: float | None, **changes: Any) -> dict[str, Any]:
    """Return a reply of the agreed form, or changed."""
    good = {"scores": {"beauty": list(values)}, "valid": [v is not None for v in values]}
    return good | {"model": "judge", "version": "v1"} | changes


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Act:
    """Answer with bytes, or with anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Content-Length": str(len(content))} | dict(headers or {})
    head = f"HTTP/1.1 {status} Told\r\n" + "".join(f"{name}: {text}\r\n" for name, text in lines.items())
    return lambda connection, _: connection.sendall(head.encode() + b"\r\n" + content)


def silent(connection: socket.socket, over: threading.Event) -> None:
    """Take the request and say nothing."""
    over.wait(30)


def dripping(connection: socket.socket, over: threading.Event) -> None:
    """Send a byte of a header every 20 ms: no single read is ever late."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not over.wait(0.02):
        connection.sendall(b"x")


def cut(connection: socket.socket, over: threading.Event) -> None:
    """Crash in the middle of the answer."""
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"scores": ')


def reset(connection: socket.socket, over: threading.Event) -> None:
    """Crash before the answer, as a killed process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class ScriptedServer:
    """Answers requests to /score by `acts` in turn, repeating the last one.

    Attributes:
        url: where it listens.
        asked: (first line, headers, body) of every request, /health included.
        acts: what is still to do.
        health: what GET /health answers.
    """

    def __init__(self, *acts: Act, health: object = HEALTH) -> None:
        self.acts = list(acts)
        self.health: Act = health if callable(health) else answer(health)
        self.asked: list[tuple[str, dict[str, str], bytes]] = []
        self._over = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def scored(self) -> int:
        """Return how often /score was asked."""
        return sum("/score" in line for line, _, _ in self.asked)

    def _accept(self) -> None:
        while not self._over.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):  # the client may have closed
            self._talk(connection)

    def _talk(self, connection: socket.socket) -> None:
        content = b""
        while b"\r\n\r\n" not in content:
            content += connection.recv(65536)
        head, _, body = content.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        while len(body) < int(headers.get("Content-Length", 0)):
            body += connection.recv(2**20)
        self.asked.append((first, headers, body))
        if "/health" in first:
            self.health(connection, self._over)
        else:
            (self.acts.pop(0) if len(self.acts) > 1 else self.acts[0])(connection, self._over)


@contextlib.contextmanager
def serving(server: RewardServer) -> Iterator[RewardServer]:
    """Run a real reward server in a thread."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(20)
