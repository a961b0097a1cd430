"""Servers for tests: one that misbehaves as scripted, and the real one in a thread."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from flow_grpo.records import Condition
from flow_grpo.rewards.remote import protocol

if TYPE_CHECKING:
    from tools.serving.http_server import RewardServer

Act = Callable[[socket.socket, threading.Event], None]

HEALTH = {"protocol": 3, "model": "judge", "version": "v1", "rewards": ["beauty"], "needs": [], "max_bytes": 2**28}


def scores(conditions: Sequence[Condition], *values: float, **changes: Any) -> bytes:
    """Return a reply of the agreed form, or with changed metadata."""
    rows = [[condition.index, condition.gid, condition.slot] for condition in conditions]
    meta = {
        "model": "judge",
        "version": "v1",
        "samples": rows,
        "causes": [""] * len(rows),
        "faulty": [False] * len(rows),
    }
    return protocol.encode(meta | changes, {"scores.beauty": torch.tensor(values)})


def answer(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Act:
    """Answer with bytes, or with anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"Content-Length": str(len(content))} | dict(headers or {})
    head = f"HTTP/1.1 {status} Told\r\n" + "".join(f"{name}: {text}\r\n" for name, text in lines.items())
    return lambda connection, _: connection.sendall(head.encode() + b"\r\n" + content)


def silent(connection: socket.socket, over: threading.Event) -> None:
    """Take the request and say nothing."""
    over.wait(30)


def cut(connection: socket.socket, over: threading.Event) -> None:
    """Crash in the middle of the answer."""
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{"scores": ')


class _Handler(http.server.BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_POST(self) -> None:
        server = self.server
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server.asked.append((self.requestline, self.headers, body))
        act = server.health if "/health" in self.path else server.acts[0]
        if act is server.acts[0] and len(server.acts) > 1:
            server.acts.pop(0)
        with contextlib.suppress(OSError):  # the client may have closed
            act(self.connection, server.over)

    do_GET = do_POST

    def log_message(self, *_: object) -> None:
        pass


class ScriptedServer(http.server.ThreadingHTTPServer):
    """Answers requests to /score by `acts` in turn, repeating the last one.

    Attributes:
        url: where it listens.
        asked: (first line, headers, body) of every request, /health included.
        acts: what is still to do.
        health: what GET /health answers.
    """

    def __init__(self, *acts: Act, health: object = HEALTH) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.acts = list(acts)
        self.health: Act = health if callable(health) else answer(health)
        self.asked: list[tuple[str, Mapping[str, str], bytes]] = []
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def __enter__(self) -> ScriptedServer:
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.shutdown()
        self.server_close()

    @property
    def scored(self) -> int:
        """Return how often /score was asked."""
        return sum("/score" in line for line, _, _ in self.asked)


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
