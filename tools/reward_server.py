"""Host a reward over HTTP, for the weight `remote:<name>` of a run: docs/remote_rewards.md.

python tools/reward_server.py --reward target_view --port 8000
python tools/reward_server.py --reward hpsv3 --weights models/HPSv3/HPSv3.safetensors --port 8001

One request is scored at a time. Nothing that arrives is unpickled, and nothing too large is read.
"""

from __future__ import annotations

import argparse
import hmac
import ipaddress
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.rewards.base import REWARDS, build_reward
from flow_grpo.runtime import device
from tools.serving.adapters import ADAPTERS, Settings, build_adapter, refuse_downloads
from tools.serving.scoring_service import Desk, Judge, Local, RefusedError

PIECE = 2**20  # bytes read at a time, between looks at the clock
LINGER_S = 2.0  # for which a refused body is thrown away, so that its sender gets to read the refusal


class Handler(BaseHTTPRequestHandler):
    """One connection: one request, one JSON answer."""

    server: RewardServer

    def setup(self) -> None:
        """Give a silent sender no longer than a scored request."""
        super().setup()
        self.connection.settimeout(self.server.desk.timeout_s)

    def do_GET(self) -> None:
        """Answer /health."""
        self._answer("/health", self.server.desk.health)

    def do_POST(self) -> None:
        """Answer /score."""
        self._answer("/score", self._score)

    def _answer(self, path: str, act: Callable[[], dict[str, Any]]) -> None:
        begin = time.monotonic()
        headers: dict[str, str] = {}
        try:
            self._check_token()
            if self.path != path:
                raise RefusedError(404, "here are GET /health and POST /score")
            status, said = 200, act()
        except RefusedError as error:
            status, said = error.status, {"error": str(error)}
            headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
        content = json.dumps(said, allow_nan=False).encode()
        self.send_response(status)
        for name, text in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(content)
        print(f"{self.command} {path} {status} {said.get('error', '')} {time.monotonic() - begin:.3f} s", flush=True)
        if status != 200:
            self._throw_away()

    def _check_token(self) -> None:
        if not self.server.token:
            return
        given = self.headers.get("Authorization", "").encode("utf-8", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            raise RefusedError(401, "the token is missing or wrong")

    def _score(self) -> dict[str, Any]:
        desk, text = self.server.desk, self.headers.get("Content-Length", "")
        if not (text.isascii() and text.isdigit() and len(text) < 19):
            raise RefusedError(411, "a Content-Length is needed")
        if int(text) > desk.max_bytes:
            raise RefusedError(413, f"request of {int(text)} bytes, at most {desk.max_bytes} are read: see --max-mb")
        if not desk.admitted.acquire(timeout=desk.timeout_s):
            raise RefusedError(503, f"busy for more than {desk.timeout_s:g} s", retry_after_s=5)
        try:
            return desk.score(self.headers.get("Content-Type", ""), self._body(int(text)))
        finally:
            desk.admitted.release()

    def _body(self, length: int) -> bytearray:
        """Read a request; one that drips is given up after the time a silent one has."""
        body, done = bytearray(length), 0
        view, end = memoryview(body), time.monotonic() + self.server.desk.timeout_s
        try:
            while done < length and time.monotonic() < end:
                piece = self.rfile.read1(min(PIECE, length - done))
                if not piece:
                    raise RefusedError(400, f"request ends after {done} of {length} bytes")
                view[done : done + len(piece)] = piece
                done += len(piece)
        except TimeoutError:
            pass
        if done < length:
            raise RefusedError(408, f"{done} of {length} bytes came within {self.server.desk.timeout_s:g} s")
        return body

    def _throw_away(self) -> None:
        """Read on for a moment: closing with bytes unread would reset the connection, and the answer with it."""
        end = time.monotonic() + LINGER_S
        try:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)  # the answer is complete
            self.connection.settimeout(0.2)
            while time.monotonic() < end and self.rfile.read1(PIECE):
                pass
        except OSError:
            pass

    def log_message(self, *args: object) -> None:
        """Say nothing: `_answer` prints one line per request, and headers may hold the token."""


class RewardServer(ThreadingHTTPServer):
    """A judge at an address.

    Args:
        address: host and port; port 0 takes a free one.
        desk: with the judge.
        token: that requests must carry, or "".

    Raises:
        ValueError: an address that other machines reach, without a token.
    """

    daemon_threads = True
    request_queue_size = 64  # the ranks of a node ask at the same moment

    def __init__(self, address: tuple[str, int], desk: Desk, token: str = "") -> None:
        if not token and not _is_loopback(address[0]):
            raise ValueError(
                f"--host is {address[0]}, which other machines reach: pass --token-env, or --host 127.0.0.1"
            )
        super().__init__(address, Handler)
        self.desk = desk
        self.token = token

    @property
    def url(self) -> str:
        """Return where it listens."""
        return "http://{}:{}".format(*self.server_address[:2])


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse(words: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--reward", required=True, choices=[*REWARDS, *ADAPTERS], help="what to host")
    add("--host", default="127.0.0.1", help="one that other machines reach needs a token (%(default)s)")
    add("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
    add("--token-env", default="", metavar="NAME", help="environment variable that holds the token (no token)")
    add("--max-mb", type=int, default=2048, help="MiB of a request, at most (%(default)s)")
    add(
        "--timeout",
        type=float,
        default=120.0,
        help="seconds for a sender to send, and for a request to wait for its turn (%(default)g); scoring has no limit "
        "here, how long a trainer waits for a score is its reward.remote_timeout",
    )
    add("--data-root", default=".", help="dataset folder, for rewards that read what lies there (%(default)s)")
    add("--weights", type=Path, help="of an adapter: folder or file, see docs/remote_rewards.md")
    add("--code", type=Path, help="of an adapter without a package: the clone of its repository")
    add("--device", default="auto", help="of an adapter (%(default)s); local rewards run on the CPU")
    add("--frames", type=int, default=5, help="of a video that a judge of pictures looks at (%(default)s)")
    return parser.parse_args(words)


def build(args: argparse.Namespace) -> RewardServer:
    """Return the server that a command line asks for.

    Raises:
        ValueError: anything missing, with what to do about it.
    """
    token = os.environ.get(args.token_env, "").strip() if args.token_env else ""
    if args.token_env and not token:
        raise ValueError(f"--token-env names {args.token_env}, which holds nothing: export a token there")
    if args.reward in REWARDS:
        judge: Judge = Local(build_reward(args.reward, data_root=args.data_root))
    else:
        found = device.resolve(args.device)
        judge = build_adapter(args.reward, Settings(args.weights, args.code, found, args.frames))
    return RewardServer((args.host, args.port), Desk(judge, args.max_mb * 2**20, args.timeout), token)


def main(words: Sequence[str] | None = None) -> None:
    """Serve until interrupted; one line says where."""
    args = parse(words)
    refuse_downloads()
    try:
        server = build(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    judge = server.desk.judge
    print(f"{', '.join(judge.scores)} of {judge.model} ({judge.version}) at {server.url}", flush=True)
    with server:
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("stopped")


if __name__ == "__main__":
    main()
