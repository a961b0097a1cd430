r"""Re-render videos along new camera paths with a model and, optionally, a trained adapter.

    python tools/generate.py --run outputs/first --source holiday.mp4 --camera arc_left:0.5 zoom_in+pan_left orbit.json
    python tools/evaluate.py outputs/first/generated --focal-px 1225.6

With --run, model, adapter, video size, steps, guidance, prompts and dtype are those of the run's evaluations, and every
video is made without the adapter, too (--no-before leaves that out). Without a run:

    python tools/generate.py --model models/recammaster-wan2.1-1.3b --source holiday.mp4 --camera arc_left

A model that makes videos of prompts alone takes --prompts instead of --source and --camera:

    python tools/generate.py --run outputs/t2v --prompts "a fox crosses a snowy meadow" more_prompts.txt

Each source (a video or a folder of videos; its first --frames frames are used) is rendered along each camera: a preset
with a scale, or a JSON file of poses, see `flow_grpo/data/trajectories.py`. Outputs in --out, in the run's folder
generated/, or next to the source; tools/evaluate.py FOLDER reads them:

    holiday_arc_left-0.5.mp4          the generated video (no colon: file names with one read as a host or a drive)
    holiday_arc_left-0.5_before.mp4   the same without the adapter
    holiday_arc_left-0.5_beside.mp4   source | before | generated
    holiday_arc_left-0.5.json         all settings and poses; the arguments in "again" reproduce this video

Sampling is a deterministic ODE; the initial noise depends on --seed and the video's number only.
Exit code: 0, or 2 for invalid arguments or inputs, checked before the first video.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import shlex
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from tools.common import command
from tools.generation.options import command_line, parse

if __name__ == "__main__":
    command_line(__doc__).parse_args()  # now: what follows takes seconds to import

import torch
from torch import Tensor
from tqdm import tqdm

from flow_grpo.algorithm.rollout.denoise import rollout
from flow_grpo.data.captions import caption_of
from flow_grpo.data.dataset import ConditionDataset
from flow_grpo.data.multicam import LENS_FOLDER, fitted_intrinsics
from flow_grpo.data.pose_files import names_pose_file
from flow_grpo.data.prompts import ENDINGS, PromptDataset, read_prompts
from flow_grpo.data.trajectories import UserVideos, find_videos, read_source_path
from flow_grpo.data.video_io import video_size
from flow_grpo.maths.poses import relative
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.models.encoders import codec
from flow_grpo.models.fake_policy import transformer_config
from flow_grpo.models.files.adapter_files import adapted_policy
from flow_grpo.models.files.lora_files import lora_file
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.models.registry import video_model
from flow_grpo.models.wan_policy import WanPolicy, load_networks
from flow_grpo.records import Condition, Guidance
from flow_grpo.reporting.labelled_video import Panel, draw_labelled, rate
from flow_grpo.run.starts import LEAST_ROWS, other_parts
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.device import DTYPES
from flow_grpo.runtime.ranks.sharding import on_every_call
from flow_grpo.runtime.video_file import levels, write_video
from flow_grpo.settings.sampling import ODE, Sampling
from flow_grpo.settings.schema import ModelConfig
from tools.generation.records import AFTER, BEFORE, BESIDE, RECORD, TOOL, record_of
from tools.published.results import vipe_files, vipe_poses

# By the ending of its files: a policy, and the context in which it is the model before or after training.
Versions: TypeAlias = dict[str, tuple[WanPolicy, Callable[[], AbstractContextManager[None]]]]


@dataclasses.dataclass(frozen=True)
class VideoRequest:
    index: int  # into the dataset of sources x cameras, or of prompts
    number: int  # seeds the noise, together with --seed
    source: Path | None
    camera: str  # preset with its scale or path of a pose file, as given; "" for none
    folder: Path
    name: str  # common prefix of the output files

    def file(self, ending: str) -> Path:
        return self.folder / f"{self.name}{ending}"

    def subject(self, condition: Condition) -> str:
        return f"{self.source.name} along {self.camera}" if self.source else f"{condition.prompt:.60}"


@command
def main(words: Sequence[str] | None = None) -> int:
    args = parse(words, __doc__)
    sigmas = check_settings(args)
    dataset, requests = plan(args)
    given = source_cameras(args, requests)
    print(in_words(args, len(requests)), flush=True)
    versions = load(args)
    for request in requests:
        begun = time.perf_counter()
        condition = dataclasses.replace(dataset.condition(request.index, gid=request.number), **given[request])
        place = f"{request.index + 1}/{len(requests)} {request.subject(condition)}"
        videos = {}
        with steps_shown(versions, args.steps, place):
            for ending, (policy, inside) in versions.items():
                with inside():
                    videos[ending] = generate(policy, condition, sigmas, args.seed)
        record = describe(args, request, condition, policy.device)
        write(request, condition, videos, record)
        print(f"{place}: {request.file(AFTER)} ({time.perf_counter() - begun:.1f} s)", flush=True)
    focal = "" if record["focal_px"] else " --focal-px PIXELS"
    for folder in sorted({shlex.quote(str(request.folder)) for request in requests if request.source}):
        if args.height >= LEAST_ROWS:
            print(f"measure the cameras: python tools/evaluate.py {folder}{focal}", flush=True)
        else:
            print(f"too small to measure their cameras: look at {folder}/*{BESIDE}", flush=True)
    return 0


def in_words(args: argparse.Namespace, count: int) -> str:
    size, guidance = f"{args.frames}x{args.height}x{args.width}", f"guidance {args.guidance:g}"
    adapter = f"adapter {args.adapter}" if args.adapter else "no adapter"
    twice = ", before and after training" if args.before else ""
    taken = f" of each source's first {args.frames} frames" if args.source else ""
    settings = f"{args.model}, {adapter}, {args.steps} steps, shift {args.shift:g}, {guidance}, {args.dtype}"
    return f"{count} video(s) of {size}{taken}{twice}: {settings}" + (f" (settings of {args.run})" if args.run else "")


@contextlib.contextmanager
def steps_shown(versions: Versions, steps: int, text: str) -> Iterator[None]:
    """Context with a bar on a terminal that counts the network's calls, one a denoising step."""
    networks = {id(policy.module): policy.module for policy, _ in versions.values()}
    with contextlib.ExitStack() as held:
        bar = held.enter_context(tqdm(total=steps * len(versions), desc=text, unit="step", leave=False, disable=None))
        for network in networks.values():
            held.enter_context(on_every_call(network, bar.update))
        yield


def check_settings(args: argparse.Namespace) -> Tensor:
    """Return the (steps + 1,) sigmas; ValueError for unusable numbers or folders. Loads no model."""
    if not 1 <= args.guidance < math.inf or args.max_prompt_tokens < 1:
        raise ValueError(
            f"--guidance is {args.guidance:g} and --max-prompt-tokens {args.max_prompt_tokens}, must be finite and at "
            "least 1; at 1 there is no guidance"
        )
    if args.focal_px is not None and not 0 < args.focal_px < math.inf:
        raise ValueError(f"--focal-px is {args.focal_px:g}, must be the focal length in pixels, above 0, such as 630.3")
    if not 1 <= args.steps <= 1000 or not 0 < args.shift < math.inf:
        raise ValueError(f"--steps is {args.steps} and --shift {args.shift:g}, must be within 1..1000 and above 0")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file, must be a folder")
    if args.adapter is not None and not args.adapter.is_dir() and not lora_file(args.adapter).is_file():
        raise ValueError(
            f"--adapter {args.adapter} is no folder, must be the adapter folder of a run, such as outputs/RUN/adapter, "
            "or a .safetensors file; tools/export_adapter.py makes one of a checkpoint"
        )
    check_size(args)
    return flow_sigmas(args.steps, args.shift)


def check_size(args: argparse.Namespace) -> None:
    for part in ("vae", "transformer"):
        if not (args.model / part / "config.json").is_file():
            raise ValueError(
                f"--model {args.model} has no {part}/config.json, expected a folder in diffusers layout with "
                "transformer, vae, text_encoder and tokenizer; tools/convert_recammaster.py makes one"
            )
    model, compression = video_model(args.kind), codec.scale_factors(codec.read_config(args.model / "vae"))
    model.check_size((args.frames, args.height, args.width), transformer_config(model, args.model), compression)


def plan(args: argparse.Namespace) -> tuple[ConditionDataset, list[VideoRequest]]:
    """Return the dataset of sources x cameras, or of prompts, and one request per item."""
    dataset, requests = plan_prompts(args) if args.prompts else plan_films(args)
    check_outputs(requests, args.overwrite)
    for folder in {request.folder for request in requests}:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to; choose another folder with --out")
    return dataset, requests


def plan_prompts(args: argparse.Namespace) -> tuple[ConditionDataset, list[VideoRequest]]:
    prompts = [prompt for text in args.prompts for prompt in (read_prompts(Path(text)) if names_file(text) else [text])]
    dataset = PromptDataset(prompts, (args.frames, args.height, args.width), args.fps, "--prompts")
    numbers = range(args.first_number, args.first_number + len(prompts))
    return dataset, [
        VideoRequest(i, number, None, "", args.out, f"prompt-{number:05d}") for i, number in enumerate(numbers)
    ]


def names_file(text: str) -> bool:
    """Return whether a word of the command line looks like a file's name: as a prompt it would be filmed unnoticed."""
    return text.lower().endswith(ENDINGS) or re.fullmatch(r"\S*\.[A-Za-z]\w{1,5}", text) is not None


def plan_films(args: argparse.Namespace) -> tuple[ConditionDataset, list[VideoRequest]]:
    """Return the dataset of sources x cameras and its requests; every source is read once, and refused here."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        size = (args.frames, args.height, args.width)
        sources, prompts = list(find_sources(args.source)), []
        for source in sources:
            if not source.is_file():
                raise ValueError(f"--source {source} does not exist; give a video or a folder of videos")
            if (count := video_size(source)[0]) < size[0]:
                got = f"got {count} of {size[0]} frames"
                raise ValueError(f"--source {source} is too short, {got}; pass fewer --frames")
            highest = source.parent.parent if source.parent.name == "videos" else source.parent  # that has its caption
            prompts.append(args.prompt or caption_of(source, highest) or args.default_prompt)
        dataset = UserVideos(sources, args.camera, size, prompts=prompts)
    for warning in caught:
        print("warning:", " ".join(str(warning.message).split()), file=sys.stderr, flush=True)
    requests = []
    for index in range(len(dataset)):
        source, camera = dataset.videos[index // len(args.camera)], args.camera[index % len(args.camera)]
        label = dataset.condition(index).target_camera.replace(":", "-")
        folder, name = args.out or source.parent, f"{source.stem}_{label}"
        requests.append(VideoRequest(index, args.first_number + index, source, camera, folder, name))
    return dataset, requests


def source_cameras(args: argparse.Namespace, requests: Sequence[VideoRequest]) -> dict[VideoRequest, dict[str, Any]]:
    """Return request -> the fields of its condition on the source's own camera, for a model that needs them."""
    found: dict[VideoRequest, dict[str, Any]] = {request: {} for request in requests}
    if "source_poses" not in video_model(args.kind).needs:
        return found
    size = (args.frames, args.height, args.width)
    for request in requests:
        assert request.source is not None
        focal = args.focal_px or lens_px(request.source, size)
        if focal is None:
            raise ValueError(f"--focal-px is needed by --kind {args.kind}: nothing tells that of {request.source}")
        found[request] = {
            "source_poses": source_path(args.source_poses, request.source, args.frames),
            "intrinsics": torch.tensor([focal, focal, args.width / 2, args.height / 2]),
        }
    return found


def source_path(given: str, source: Path, frames: int) -> Tensor:
    """Return the poses (frames, 4, 4) of a source's camera: "static", those of a file, or of ViPE's folder."""
    if given == "static":
        return torch.eye(4, dtype=torch.float64).repeat(frames, 1, 1)
    if names_pose_file(given):
        return read_source_path(given, frames)
    if not Path(given).is_dir():
        raise ValueError(
            f"--source-poses {given} does not exist, must be static, a file of poses or ViPE's output folder"
        )
    poses = vipe_poses(vipe_files(Path(given)), [source.stem], video_size(source)[0])
    if poses is None:
        raise ValueError(f"--source-poses {given} has no pose/{source.stem}.npz; let ViPE run on {source}")
    return relative(poses[0], poses[:frames])


def find_sources(places: Sequence[Path]) -> Iterator[Path]:
    """Yield the given videos, and those in the given folders that this tool did not generate."""
    for place in places:
        if not place.is_dir():
            yield place
            continue
        found = [video for video in find_videos(place) if record_of(video) is None]
        if not found:
            raise ValueError(f"{place} holds only videos that this tool made, must hold sources")
        yield from found


def check_outputs(requests: Sequence[VideoRequest], overwrite: bool) -> None:
    """Raise ValueError for outputs that overwrite each other, an input or, without `overwrite`, an existing file."""
    files = [request.file(end).resolve() for request in requests for end in (AFTER, BEFORE, BESIDE, RECORD)]
    named = [name for request in requests for name in (request.source, request.camera) if name]
    inputs = {Path(name).resolve() for name in named}
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


def load(args: argparse.Namespace) -> Versions:
    """Return the versions to sample from on their device; ValueError for an unusable model or adapter."""
    device = device_api.resolve(args.device)
    device_api.setup(device)
    print(device_api.describe(device, args.device), flush=True)
    print(f"loading {args.model}", flush=True)
    same = ("dtype", "offload", "max_prompt_tokens", "round_timestep")
    settings = ModelConfig(path=str(args.model), vae_slicing=False, **{name: getattr(args, name) for name in same})
    if args.tiling not in (None, "off"):
        settings = dataclasses.replace(settings, vae_tiling=True, vae_tiles=args.tiling)
    kind, guidance = video_model(args.kind), Guidance(args.guidance, args.negative_prompt)
    networks = load_networks(kind, settings, device)
    if args.run and (text := other_parts(args.run, networks.identity)):
        print(text, file=sys.stderr, flush=True)
    after = adapted_policy(networks, args.adapter, settings, guidance, device)
    if not args.before:
        return {AFTER: (after, contextlib.nullcontext)}
    if args.start_adapter:  # before training another adapter was in place
        again = load_transformer(kind.network, args.model / "transformer", DTYPES[args.dtype])
        start = dataclasses.replace(networks, transformer=again)
        before = adapted_policy(start, args.start_adapter, settings, guidance, device)
        return {BEFORE: (before, contextlib.nullcontext), AFTER: (after, contextlib.nullcontext)}
    after.keep_reference(start=networks.transformer)
    return {BEFORE: (after, after.reference), AFTER: (after, contextlib.nullcontext)}


def generate(policy: WanPolicy, condition: Condition, sigmas: Tensor, seed: int) -> Tensor:
    """Return the video (3, T, h, w) of a condition, CPU fp32 in [0, 1], by (S+1,) sigmas from 1 to 0.

    The condition's gid and `seed` determine the noise.
    """
    conditioning = policy.encode([condition])
    samples = rollout(policy, [condition], conditioning, [()], Sampling(sigmas, ODE, seed))
    return policy.decode(samples.final_latents)[0].float().cpu()


def describe(
    args: argparse.Namespace, request: VideoRequest, condition: Condition, device: torch.device
) -> dict[str, Any]:
    own: dict[str, Any] = {
        "model": args.model.resolve(),
        "adapter": args.adapter and args.adapter.resolve(),
        "out": request.folder.resolve(),
        "first_number": request.number,
        "device": device.type,
    }
    if request.source is None:
        own["prompts"] = condition.prompt
    else:
        own["prompt"] = condition.prompt
        own["source"] = request.source.resolve()
        own["camera"] = request.camera if condition.preset else Path(request.camera).resolve()
        own["focal_px"] = args.focal_px or lens_px(request.source, condition.size)
    others = ("overwrite", "run", "default_prompt")
    settings = {name: value for name, value in (vars(args) | own).items() if name not in others}
    return {
        "tool": TOOL,
        **{name: str(value) if isinstance(value, Path) else value for name, value in settings.items()},
        "run": str(args.run or ""),
        "camera_name": condition.camera,
        "fps": condition.fps,
        "torch": torch.__version__,
        "again": [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in settings.items()
            if value is not None and value is not False
        ],
        "poses": None if condition.target_poses is None else condition.target_poses.tolist(),
    }


def lens_px(source: Path, size: tuple[int, int, int]) -> float | None:
    """Return the focal length in pixels of a video of `size` made from a source in MultiCamVideo's folders, or None."""
    lenses = [match for part in source.resolve().parts if (match := LENS_FOLDER.fullmatch(part))]
    if not lenses:
        return None
    return float(fitted_intrinsics(float(lenses[-1].group(1)), video_size(source)[1:], *size[1:])[0])


def write(request: VideoRequest, condition: Condition, videos: Mapping[str, Tensor], record: dict[str, Any]) -> None:
    """Write videos (3, T, h, w) by their ending, all beside the source, and the record, one entry per line."""
    lines = [f" {json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in record.items()]
    # The record is written first: a later call would take a video without one for a source.
    request.file(RECORD).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    if BEFORE not in videos:  # of an earlier call with other settings
        request.file(BEFORE).unlink(missing_ok=True)
    for ending, video in videos.items():
        write_video(request.file(ending), video, condition.fps)
    if request.source is not None or len(videos) > 1:
        beside = side_by_side(condition, videos)
        write_video(request.file(BESIDE), beside, rate(beside.shape[1], condition.fps))


def side_by_side(condition: Condition, videos: Mapping[str, Tensor]) -> Tensor:
    """Return (3, T, rows, columns) uint8 with a condition's source and the videos made of it, labelled."""
    names = {BEFORE: "before training", AFTER: "after training" if BEFORE in videos else "generated"}
    shown = {} if condition.source_video is None else {"source": condition.source_video}
    shown |= {names[ending]: video for ending, video in videos.items()}
    title = " ".join(part for part in (condition.scene, condition.camera) if part) or condition.prompt
    panels = [Panel(name, levels(video)) for name, video in shown.items()]
    return draw_labelled(panels, [title], condition.target_poses)[0]


if __name__ == "__main__":
    sys.exit(main())
