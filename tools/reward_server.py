"""Host a reward over HTTP, for the weight `remote:<name>` of a run, or check one: docs/remote_rewards.md.

python tools/reward_server.py --reward target_view --port 8000
python tools/reward_server.py --reward my_rewards.py:warmth --port 8000
python tools/reward_server.py --reward hpsv3 --weights models/HPSv3/HPSv3.safetensors --port 8001
python tools/reward_server.py --check http://127.0.0.1:8001

--check asks a server that runs whether it orders a known-good video above broken ones, as a table, with the seconds
and the memory of a score; exit code 1 where it does not.

Needs requirements-server.txt. One request is scored at a time; /health is answered meanwhile.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.rewards import REWARDS
from tools.common import fail, image_size, make_parser
from tools.serving.names import PUBLISHED

PARSER = make_parser(__doc__)
add = PARSER.add_argument
what = f"what to host: FILE.py:NAME of your own, which is served as NAME, or one of {', '.join([*REWARDS, *PUBLISHED])}"
one = PARSER.add_mutually_exclusive_group(required=True)
one.add_argument("--reward", metavar="NAME", help=what)
one.add_argument("--check", metavar="URL", help="of a server that runs, any that speaks the protocol")
add("--host", default="127.0.0.1", help="one that other machines reach needs a token (%(default)s)")
add("--port", type=int, default=8000, help="0 takes a free one (%(default)s)")
add("--token-env", default="", metavar="NAME", help="environment variable that holds the token (no token)")
add("--max-mb", type=int, default=2048, help="largest request in MiB (%(default)s)")
add(
    "--timeout",
    type=float,
    default=120.0,
    help="seconds for a request to arrive, and to wait for its turn (%(default)g); scoring has no limit here, a "
    "trainer waits for reward.remote_timeout; with --check seconds for an answer",
)
add("--data-root", default=".", help="dataset folder, for rewards that read scene files (%(default)s)")
add("--weights", type=Path, help="of an adapter: folder or file, see docs/remote_rewards.md")
add("--code", type=Path, help="of an adapter without a package: the clone of its repository")
add("--device", default="auto", help="of an adapter (%(default)s); local rewards run on the CPU")
add("--frames", type=int, help="ask for so many frames of a video, evenly spread (all; 5 where pictures are scored)")
add("--size", type=image_size, metavar="ROWSxCOLUMNS", help="ask for videos of this size (their own)")
add("--fps", type=float, help="ask for about so many frames per second (all frames)")
add("--groups", action="store_true", default=None, help="ask for the k copies of a group in one request")
parse = PARSER.parse_args
if __name__ == "__main__":
    parse()  # now: what follows takes seconds to import

from flow_grpo.rewards.base import build_reward
from flow_grpo.rewards.remote.http_client import ServiceError
from flow_grpo.rewards.remote.protocol import read_health, why
from flow_grpo.runtime import device
from flow_grpo.settings.own_code import is_own
from tools.serving.adapters import ADAPTERS, refuse_downloads
from tools.serving.check import check
from tools.serving.scoring_service import LocalScorer, Scorer, ScoringService

if TYPE_CHECKING:
    from tools.serving.http_server import RewardServer


def build(args: argparse.Namespace) -> RewardServer:
    try:
        from tools.serving.http_server import RewardServer
    except ImportError as error:
        raise ValueError(f"package {error.name} is not installed: pip install -r requirements-server.txt") from None
    token = os.environ.get(args.token_env, "").strip() if args.token_env else ""
    if args.token_env and not token:
        raise ValueError(f"--token-env names {args.token_env}, which holds nothing: export a token there")
    if not is_own(args.reward) and args.reward not in (*REWARDS, *ADAPTERS):
        close = difflib.get_close_matches(args.reward, [*REWARDS, *ADAPTERS], n=1) or ["FILE.py:NAME"]
        raise ValueError(f"--reward is {args.reward!r}, must be a name that --help lists, such as {close[0]}")
    scorer: Scorer
    if args.reward not in ADAPTERS:
        scorer = LocalScorer(build_reward(args.reward, data_root=args.data_root))
    else:
        found = device.resolve(args.device)
        device.select(found)
        scorer = ADAPTERS[args.reward](args.weights, args.code, found, args.frames or 5)
    asked = {name: getattr(args, name) for name in ("frames", "size", "fps", "groups")}
    wants = {name: value for name, value in asked.items() if value is not None}
    service = ScoringService(scorer, args.max_mb * 2**20, wants)
    read_health(json.dumps(service.health()).encode(), scorer.scores[0])  # refuses what no video can be
    return RewardServer((args.host, args.port), service, timeout_s=args.timeout, token=token)


def main(words: Sequence[str] | None = None) -> int:
    args = parse(words)
    if args.check:
        try:
            return check(args.check.rstrip("/"), args.timeout)
        except (ServiceError, ValueError, LookupError, TypeError) as error:
            return fail(f"--check {args.check}: {why(error)}; pass the address of a reward server")
    refuse_downloads()
    try:
        server = build(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    scorer = server.service.scorer
    print(f"{', '.join(scorer.scores)} of {scorer.model} ({scorer.version}) at {server.url}", flush=True)
    try:
        server.run()
    except KeyboardInterrupt:
        print("stopped", flush=True)
        os._exit(0)  # without waiting for a request that is being scored
    return 0


if __name__ == "__main__":
    sys.exit(main())
