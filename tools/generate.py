r"""Re-render videos along new camera paths with a ReCam model and, optionally, a trained adapter.

    python tools/generate.py --model models/recammaster-wan2.1-1.3b --adapter outputs/first/adapter \
        --source holiday.mp4 --camera arc_left:0.5 zoom_in+pan_left orbit.json

Each source (a video or a folder of videos; its first --frames frames are used) is rendered along each camera: a preset
with a scale, or a JSON file of poses, see `flow_grpo/data/trajectories.py`. Outputs, next to the source or in --out:

    holiday_arc_left-0.5.mp4          the generated video (no colon: file names with one read as a host or a drive)
    holiday_arc_left-0.5_beside.mp4   source | generated
    holiday_arc_left-0.5.json         all settings and poses; the arguments in "again" reproduce this video

Sampling is a deterministic ODE; the initial noise depends on --seed and the video's number only.
Exit code: 0, or 2 for invalid arguments or inputs, checked before the first video.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch
from torch import Tensor

from config.base import get_config
from config.grpo import WAN_NEGATIVE_PROMPT
from flow_grpo.algorithm.rollout.denoise import RolloutSettings, SdeSettings, rollout
from flow_grpo.data.trajectories import VIDEO_FPS, UserVideos, find_videos
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.models import codec
from flow_grpo.models.adapter_files import LORA_FILE, load_adapter
from flow_grpo.models.fake_policy import transformer_config
from flow_grpo.models.recam_policy import DTYPES, RecamPolicy, largest_video, load_networks
from flow_grpo.records import Condition
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.reporting.clips import side_by_side
from flow_grpo.runtime.video_file import write_video
from tools.common import fail

TOOL = "tools/generate.py"  # marks records of generated videos, which are never taken as sources
ENDINGS = (".mp4", "_beside.mp4", ".json")


@dataclasses.dataclass(frozen=True)
class Request:
    """One video to generate."""

    index: int  # into the dataset of sources x cameras
    number: int  # seeds the noise, together with --seed
    source: Path
    camera: str  # preset with its scale or path of a pose file, as given
    folder: Path
    name: str  # common prefix of the output files

    def file(self, ending: str) -> Path:
        """Return the output file with one of `ENDINGS`."""
        return self.folder / f"{self.name}{ending}"


class Parser(argparse.ArgumentParser):
    """A parser that raises ValueError instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(message)


def main(words: Sequence[str] | None = None) -> int:
    """Generate all videos and return the exit code."""
    try:
        args = options().parse_args(words)
        sigmas = check_settings(args)
        dataset, requests = plan(args)
        policy = load(args)
    except (ValueError, OSError) as error:
        return fail(error)
    for request in requests:
        begun = time.perf_counter()
        condition = dataset.condition(request.index, gid=request.number)
        video = generate(policy, condition, sigmas, args.seed)
        write(request, condition, video, describe(args, request, condition, policy.device))
        place, seconds = f"{request.index + 1}/{len(requests)}", time.perf_counter() - begun
        output = request.file(".mp4")
        print(f"{place} {request.source.name} along {request.camera}: {output} ({seconds:.1f} s)", flush=True)
    return 0


def options() -> Parser:
    """Return the argument parser."""
    defaults = get_config()
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder in diffusers layout, see tools/convert_recammaster.py")
    add("--source", type=Path, nargs="+", action="extend", required=True, help="videos, or folders of videos")
    add("--camera", nargs="+", action="extend", required=True, help="presets such as arc_left:0.5, or path.json")
    add("--adapter", type=Path, help="adapter folder of a run: LoRA files, or a whole transformer")
    add("--prompt", default=defaults.data.prompt, help="what the source shows, in a sentence or two")
    add("--negative-prompt", default=WAN_NEGATIVE_PROMPT, help="unused without guidance")
    add("--max-prompt-tokens", type=int, default=defaults.model.max_prompt_tokens, help="as in training")
    add("--out", type=Path, help="output folder; default: next to each source")
    add("--overwrite", action="store_true", help="replace existing outputs")
    add("--steps", type=int, default=50, help="denoising steps")
    add("--shift", type=float, default=5.0, help="timestep shift of the noise schedule")
    add("--guidance", type=float, default=5.0, help="classifier-free guidance scale; 1: off, half the compute")
    add("--seed", type=int, default=0, help="of the initial noise")
    add("--first-number", type=int, default=0, help="number of the first video; each next one counts up")
    add("--frames", type=int, default=81, help="per video; 4n+1 for Wan's codec")
    add("--height", type=int, default=480, help="pixels; sources are resized and centre-cropped")
    add("--width", type=int, default=832, help="pixels")
    add("--device", default="auto", help="auto picks the best one available")
    add("--offload", action="store_true", help="keep text encoder and codec on the CPU while unused, to save memory")
    tiles = "run the codec in tiles, to save memory; slightly changes the output; recammaster: the original's tiles"
    add("--tiling", nargs="?", const="diffusers", choices=("diffusers", "recammaster"), help=tiles)
    add("--round-timestep", action="store_true", help="round timesteps to bf16, as ReCamMaster's own code does")
    add("--dtype", choices=sorted(DTYPES), default="bf16", help="compute dtype of the transformer")
    return parser


def check_settings(args: argparse.Namespace) -> Tensor:
    """Return the (steps + 1,) sigmas; ValueError for unusable numbers or folders. Loads no model."""
    if not math.isfinite(args.guidance) or args.max_prompt_tokens < 1:
        raise ValueError(
            f"--guidance is {args.guidance:g} and --max-prompt-tokens {args.max_prompt_tokens}, must be finite and at "
            "least 1"
        )
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file, must be a folder")
    if args.adapter is not None and not any((args.adapter / name).is_file() for name in (LORA_FILE, "config.json")):
        raise ValueError(
            f"--adapter {args.adapter} holds neither {LORA_FILE} nor a transformer's config.json; give the adapter "
            "folder of a run, such as outputs/RUN/adapter"
        )
    for part in ("vae", "transformer"):
        if not (args.model / part / "config.json").is_file():
            raise ValueError(
                f"--model {args.model} has no {part}/config.json, expected a folder in diffusers layout with "
                "transformer, vae, text_encoder and tokenizer; tools/convert_recammaster.py makes one"
            )
    temporal, spatial = codec.scale_factors(codec.read_config(args.model / "vae"))
    transformer = transformer_config(args.model)
    rows, columns = (spatial * patch for patch in transformer["patch_size"][1:])
    if args.frames < 1 or (args.frames - 1) % temporal:
        raise ValueError(f"--frames is {args.frames}, must be {temporal}n+1 for this codec, such as {5 * temporal + 1}")
    if min(args.height, args.width) < 1 or args.height % rows or args.width % columns:
        raise ValueError(
            f"--height is {args.height} and --width {args.width}, must be multiples of {rows} and {columns} (codec "
            f"{spatial}, patches {rows // spatial}x{columns // spatial})"
        )
    largest = largest_video(transformer, (temporal, spatial))
    if any(side > bound for side, bound in zip((args.frames, args.height, args.width), largest, strict=True)):
        raise ValueError(
            f"--frames is {args.frames}, --height {args.height} and --width {args.width}, must be at most "
            f"{largest[0]}, {largest[1]} and {largest[2]}, where the model's rotary positions end"
        )
    return flow_sigmas(args.steps, args.shift)


def plan(args: argparse.Namespace) -> tuple[UserVideos, list[Request]]:
    """Return the dataset of sources x cameras and one request per item.

    Reads every source once, so that an unusable one is reported before sampling starts.

    Raises:
        ValueError: an unusable source or camera, or an output in the way.
        OSError: an output folder that is not writable.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = (args.frames, args.height, args.width)
        dataset = UserVideos(list(find_sources(args.source)), args.camera, size, prompt=args.prompt)
    for warning in caught:
        print("warning:", " ".join(str(warning.message).split()), file=sys.stderr, flush=True)
    requests = []
    for index in range(len(dataset)):
        source, camera = dataset.videos[index // len(args.camera)], args.camera[index % len(args.camera)]
        label = dataset.condition(index).target_camera.replace(":", "-")
        folder, name = args.out or source.parent, f"{source.stem}_{label}"
        requests.append(Request(index, args.first_number + index, source, camera, folder, name))
    check_outputs(requests, args.overwrite)
    for folder in {request.folder for request in requests}:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to; choose another folder with --out")
    return dataset, requests


def find_sources(places: Sequence[Path]) -> Iterator[Path]:
    """Yield the given videos, and those in the given folders that this tool did not generate.

    Raises:
        ValueError: a folder without such videos.
    """
    for place in places:
        if not place.is_dir():
            yield place
            continue
        found = [video for video in find_videos(place) if not is_generated(video)]
        if not found:
            raise ValueError(f"{place} holds only videos that this tool made, must hold sources")
        yield from found


def is_generated(video: Path) -> bool:
    """Return whether the record next to a video says that this tool generated it."""
    try:
        record = json.loads(video.with_name(f"{video.stem.removesuffix('_beside')}.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and record.get("tool") == TOOL


def check_outputs(requests: Sequence[Request], overwrite: bool) -> None:
    """Raise ValueError for outputs that overwrite each other, an input or, without `overwrite`, an existing file."""
    files = [request.file(ending).resolve() for request in requests for ending in ENDINGS]
    inputs = {Path(name).resolve() for request in requests for name in (request.source, request.camera)}
    twice = [file for file, count in Counter(files).items() if count > 1]
    if twice:
        raise ValueError(f"two videos would be written to {twice[0]}; make them in two calls with different --out")
    if used := [file for file in files if file in inputs]:
        raise ValueError(f"{used[0]} is a source or camera and would be replaced; choose another folder with --out")
    if not overwrite and (existing := [file for file in files if file.exists()]):
        raise ValueError(
            f"{len(existing)} of {len(files)} results exist already, such as {existing[0]}; add --overwrite or choose "
            "another folder with --out"
        )


def load(args: argparse.Namespace) -> RecamPolicy:
    """Return the policy on its device; ValueError for an unusable model or adapter."""
    device = device_api.resolve(args.device)
    device_api.setup(device)
    print(device_api.describe(device, args.device), flush=True)
    loading = {"offload": args.offload, "tiles": args.tiling or ""}
    sampling: dict[str, Any] = {"guidance_scale": args.guidance, "negative_prompt": args.negative_prompt}
    sampling |= {"max_prompt_tokens": args.max_prompt_tokens, "round_timestep": args.round_timestep}
    return load_policy(args.model, args.adapter, DTYPES[args.dtype], device, loading, **sampling)


def load_policy(
    model: str | Path,
    adapter: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    loading: Mapping[str, Any],
    **sampling: Any,
) -> RecamPolicy:
    """Return a policy to sample from, with an adapter's weights if one is given.

    Args:
        model: folder in diffusers layout.
        adapter: adapter folder of a run.
        dtype: of transformer and text encoder.
        device: to run on.
        loading: offload, tiles and slicing of `load_networks`.
        **sampling: guidance_scale, negative_prompt, max_prompt_tokens and round_timestep of `RecamPolicy`.
    """
    networks = load_networks(model, dtype, device, **loading)
    if adapter is not None:
        networks = dataclasses.replace(networks, transformer=load_adapter(networks.transformer, adapter, dtype))
    return RecamPolicy(networks, dtype=dtype, device=device, **sampling)


def generate(policy: RecamPolicy, condition: Condition, sigmas: Tensor, seed: int) -> Tensor:
    """Return the video (3, T, h, w) of a condition, CPU fp32 in [0, 1].

    Args:
        policy: the model.
        condition: its gid, together with `seed`, determines the noise.
        sigmas: (S+1,) noise levels, from 1 to 0.
        seed: of the noise.
    """
    conditioning = policy.encode([condition])
    samples = rollout(policy, [condition], conditioning, [()], RolloutSettings(sigmas, SdeSettings("ode", 0.0), seed))
    return policy.decode(samples.final_latents)[0].float().cpu()


def describe(args: argparse.Namespace, request: Request, condition: Condition, device: torch.device) -> dict[str, Any]:
    """Return a video's record: every option resolved, the poses, and the arguments that reproduce the video."""
    own = {
        "model": args.model.resolve(),
        "adapter": args.adapter and args.adapter.resolve(),
        "source": request.source.resolve(),
        "camera": request.camera if condition.preset else Path(request.camera).resolve(),
        "out": request.folder.resolve(),
        "first_number": request.number,
        "device": device.type,
    }
    settings = {name: value for name, value in (vars(args) | own).items() if name != "overwrite"}
    return {
        "tool": TOOL,
        **{name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "fps": VIDEO_FPS,
        "torch": torch.__version__,
        "again": [
            _argument(*setting) for setting in settings.items() if setting[1] is not None and setting[1] is not False
        ],
        "poses": condition.target_poses.tolist(),
    }


def _argument(name: str, value: object) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option}={value}"


def write(request: Request, condition: Condition, video: Tensor, record: dict[str, Any]) -> None:
    """Write a video (3, T, h, w), source and video side by side, and the record as JSON, one entry per line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.items()]
    # The record is written first: a later call would take a video without one for a source.
    request.file(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    write_video(request.file(".mp4"), video, fps=VIDEO_FPS)
    write_video(request.file("_beside.mp4"), side_by_side(condition, video), fps=VIDEO_FPS)


if __name__ == "__main__":
    sys.exit(main())
