r"""Write how far away is what each clip shows: CLIP.depth.npz beside CLIP.mp4, by a depth model from a local folder.

    python tools/estimate_depth.py clips --model Depth-Anything-V2-Metric-Indoor-Small-hf
    python tools/prepare_clips.py clips --camera arc_left zoom_in --focal-px 840 --out data/clips

The model is one of `transformers`' that knows metres: Depth Anything V2 Metric (2406.09414), indoors to 20 m, outdoors
to 80 m. A few frames of a clip get a map each; a clip that has a file keeps it. Such depths are a prior: `pose_trans`
takes them to be right to some 30 % (docs/camera_rewards.md), and a path is longer by what they are too large.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("clips", type=Path, help="folder of videos")
PARSER.add_argument("--model", type=Path, required=True, help="local folder of the model; nothing is downloaded")
PARSER.add_argument("--frames", type=int, default=81, help="of a clip that will be used (%(default)s)")
PARSER.add_argument("--maps", type=int, default=5, help="of a clip, evenly spread (%(default)s)")
PARSER.add_argument("--device", default="auto", help="to run on (%(default)s)")
if __name__ == "__main__":
    PARSER.parse_args()  # now: what follows takes seconds to import

import numpy as np
import torch
from PIL import Image

from flow_grpo.data.depth_files import depth_file
from flow_grpo.data.trajectories import find_videos
from flow_grpo.data.video_io import read_video, video_size
from flow_grpo.models.encoders.frozen import load_frozen
from flow_grpo.rewards.frames import frame_numbers
from flow_grpo.runtime import device
from flow_grpo.runtime.atomic_file import atomic_path
from tools.serving.preprocessor import Preprocessor


@command
def main(words: Sequence[str] | None = None) -> int:
    args = PARSER.parse_args(words)
    for name in ("frames", "maps"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}, must be at least 1")
    clips = [clip for clip in find_videos(args.clips) if not depth_file(clip).exists()]
    config = args.model / "config.json"
    kind = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    if kind.get("model_type") != "depth_anything" or kind.get("depth_estimation_type") != "metric":
        got = f"a {kind.get('depth_estimation_type', 'relative')} {kind['model_type']}" if kind else "no model"
        raise ValueError(f"--model {args.model} holds {got}, must be a folder of Depth Anything V2 Metric (-hf)")
    prepare = Preprocessor(args.model / "preprocessor_config.json")
    from transformers import DepthAnythingForDepthEstimation

    place = device.resolve(args.device)
    device.select(place)
    model: Any = load_frozen(DepthAnythingForDepthEstimation, args.model, torch.float32).to(place)
    for clip in clips:
        frames = frame_numbers(min(args.frames, video_size(clip)[0]), args.maps)
        maps = []
        for frame in frames:
            picture = Image.fromarray(read_video(clip, 1, frame)[:, 0].permute(1, 2, 0).contiguous().numpy())
            with torch.no_grad():
                maps.append(model(pixel_values=prepare(picture)[None].to(place)).predicted_depth[0].cpu().numpy())
        with atomic_path(depth_file(clip)) as partial, partial.open("wb") as file:
            np.savez_compressed(file, depth=np.stack(maps), frames=np.array(frames))
        print(f"{clip.name}: {np.median(maps):.1f} m in the middle of {len(maps)} maps", flush=True)
    print(f"{len(clips)} clips measured; those that had a {depth_file(Path('CLIP.mp4')).name} kept it")
    return 0


if __name__ == "__main__":
    sys.exit(main())
