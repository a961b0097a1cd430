r"""Lay a folder of videos out as data to train on: every clip along the same camera paths, without true views.

    python tools/prepare_clips.py clips --camera arc_left pan_right:0.5 zoom_in --focal-px 840 --out data/clips
    python tools/check_sources.py --config config/grpo.py:my_recam_8npu --config.data.root=data/clips --out usable.json

Of the clips a share (--val) is held out, by a hash of their names. Clips are linked, not copied. What is known of a
clip may stand beside it: the poses of its camera in CLIP.json, CLIP.npz (MegaSaM), CLIP.txt (TUM), pose/CLIP.npz
(ViPE) or CLIP/ (COLMAP as text), docs/camera_paths.md, with its focal length where the file has one; and CLIP.depth.npz
with its depths (docs/your_videos.md); --depth gives one number of metres for all that have no file.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import add_clip_options, command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("clips", type=Path, help="folder of videos")
PARSER.add_argument("--camera", nargs="+", required=True, metavar="PATH", help="presets, or files of poses")
PARSER.add_argument("--out", type=Path, required=True, help="folder to write; must not exist")
add_clip_options(PARSER)
PARSER.add_argument("--frames", type=int, default=81, help="that will be trained on, 4n+1 (default: 81)")
PARSER.add_argument("--val", type=float, default=0.2, metavar="SHARE", help="of the clips (default: 0.2)")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

from flow_grpo.data.trajectories import find_videos
from tools.footage.layout import lay_out


@command
def main(words: list[str] | None = None) -> int:
    args = PARSER.parse_args(words)
    clips = find_videos(args.clips)
    held_out, unknown = lay_out(clips, args)
    print(f"{len(clips)} clips along {len(args.camera)} camera paths, {len(held_out)} of them held out: {args.out}")
    if unknown:
        names = ", ".join(clip.name for clip in unknown)
        print(f"focal length unknown, so no reward can measure the cameras of {names}: pass --focal-px")
    return 0


if __name__ == "__main__":
    sys.exit(main())
