"""Write a tiny world, rooms rendered from known cameras, in MultiCamVideo layout.

python tools/make_tiny_world.py --root data/my_world --train-scenes 200 --frames 9 --height 32 --width 48
python tools/make_tiny_world.py --root data/large_rooms --furnished --frames 9 --height 96 --width 144
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("--root", type=Path, required=True, help="folder to write; must not exist")
PARSER.add_argument("--seed", type=int, default=1)
PARSER.add_argument("--train-scenes", type=int, default=48)
PARSER.add_argument("--val-scenes", type=int, default=16)
PARSER.add_argument("--frames", type=int, default=5, help="4n+1")
PARSER.add_argument("--height", type=int, default=24, help="pixels, a multiple of 8")
PARSER.add_argument("--width", type=int, default=32, help="pixels, a multiple of 8")
PARSER.add_argument("--translation", type=float, nargs=2, default=(0.35, 0.65), metavar=("LOW", "HIGH"))
PARSER.add_argument("--rotation", type=float, nargs=2, default=(0.3, 1.0), metavar=("LOW", "HIGH"))
PARSER.add_argument("--furnished", action="store_true", help="rooms and roles as in flow_grpo/data/tiny_world.py")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

from flow_grpo.data.tiny_world import WorldSpec, write_tiny_world


@command
def main(words: Sequence[str] | None = None) -> int:
    given = vars(PARSER.parse_args(words))
    root, scenes = given.pop("root"), {split: given.pop(f"{split}_scenes") for split in ("train", "val")}
    given |= {name: tuple(given[name]) for name in ("translation", "rotation")}
    spec = WorldSpec(scenes=scenes, **given)  # the other options have its names
    print(f"rendering {sum(spec.scenes.values())} scenes", flush=True)
    write_tiny_world(root, spec)
    clips = len([*root.rglob("*.mp4")])
    print(f"{clips} clips of {spec.frames} frames, {spec.height}x{spec.width}, in {root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
