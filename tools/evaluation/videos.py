"""Generates the videos that `tools/evaluate.py` measures with --config or --run: a recipe's held-out conditions."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from flow_grpo.data.splits import held_out_data
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.judging.evaluate import eval_guidance, held_out_indices
from flow_grpo.maths.keys import key
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.models.files.adapter_files import adapted_policy, boundary_of
from flow_grpo.models.files.lora_files import lora_file
from flow_grpo.models.registry import video_model
from flow_grpo.models.wan_policy import WanPolicy, load_networks
from flow_grpo.records import Condition
from flow_grpo.run.starts import other_parts
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.runtime.video_file import write_video
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.loading import to_dict
from flow_grpo.settings.schema import Config
from tools.evaluation.inputs import OTHER_TYPE
from tools.generate import generate

VIDEOS, CAMERAS, RECORD = "videos", "cameras.json", "recipe.json"


def make_videos(
    config: Config, adapter: Path | None, out: Path, focal_px: float | None = None, run: Path | None = None
) -> tuple[Path, Path]:
    """Generate a recipe's held-out conditions with the run's evaluation settings, noise included.

    Videos of an earlier, interrupted call are kept; ValueError where `out` holds others, or something is missing.
    Without an adapter the base model makes them; `focal_px` is for scenes whose folder name has no focal length.
    Returned are the folder of videos and the camera file. A model that is not that of `run` is told by a warning.
    """
    if config.data.prompts:
        text = "must be empty: a prompt commands no camera that could be measured; see the run's summary.json"
        raise refusal("data.prompts", config.data.prompts, text)
    _claim(config, adapter, out)
    if config.data.tiny_world:
        ensure_tiny_world(config.data.root, config.data.tiny_world)
    dataset = held_out_data(config.data, config.eval)
    indices = held_out_indices(dataset, config.eval.num_conditions)
    print(f"{len(indices)} held-out conditions in {out / VIDEOS}, {adapter or 'without an adapter'}", flush=True)
    names, cameras = {}, {}
    for index in indices:  # do not hold the conditions: one takes almost a GB at full size
        condition = dataset.condition(index, gid=index)
        shown = f"{condition.scene.replace('/', '-')}_{condition.source_camera}_to_{condition.target_camera}"
        names[index] = f"{index:05d}_{shown}.mp4"
        cameras[names[index]] = _entry(condition, focal_px)
    write_atomically(out / CAMERAS, json.dumps(cameras))
    missing = [index for index, name in names.items() if not (out / VIDEOS / name).is_file()]
    if missing:
        print(f"generating the {len(missing)} that are missing", flush=True)
    policy = _policy(config, adapter) if missing else None
    if policy and run and (text := other_parts(run, policy.identity)):
        print(text, file=sys.stderr, flush=True)
    sigmas = flow_sigmas(config.eval.num_steps, config.sample.shift)
    for index in tqdm(missing, desc="generating", unit="video", disable=None):
        assert policy is not None
        condition = dataset.condition(index, gid=index)
        video = generate(policy, condition, sigmas, key("eval", "noise"))
        write_video(out / VIDEOS / names[index], video, condition.fps)
    return out / VIDEOS, out / CAMERAS


def _claim(config: Config, adapter: Path | None, out: Path) -> None:
    """Record the settings of a folder's videos; ValueError if its videos have others, or for a missing adapter."""
    if adapter is not None and not adapter.is_dir() and not lora_file(adapter).is_file():
        raise ValueError(f"--adapter {adapter} is no folder, must be the adapter folder of a run: outputs/RUN/adapter")
    files = [] if adapter is None else sorted(adapter.glob("*.*")) or [adapter]
    content = {file.name: hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest() for file in files}
    settings = {name: to_dict(config)[name] for name in ("model", "data", "sample", "eval")}
    record: dict[str, Any] = {"settings": settings, "adapter": content, "torch": torch.__version__}
    file = out / RECORD
    if (out / VIDEOS).exists() and not (file.is_file() and json.loads(file.read_text(encoding="utf-8")) == record):
        raise ValueError(f"--out {out} holds videos of another recipe, adapter or origin; choose another folder")
    write_atomically(file, json.dumps(record))


def _entry(condition: Condition, focal_px: float | None) -> dict[str, Any]:
    """Return a condition's entry for the camera file; without source poses rewards use the judging estimator, too."""
    focal = focal_px if condition.intrinsics is None else float(condition.intrinsics[0])
    if focal is None:
        raise ValueError(f"scene {condition.scene} has no known focal length: give that of the videos with --focal-px")
    return {
        "poses": condition.target_poses.tolist(),
        "camera_type": condition.preset or OTHER_TYPE,
        "source": f"{condition.scene}/{condition.source_camera}",
        "focal_px": focal,
        "shares_estimator": condition.source_poses is None,
    }


def _policy(config: Config, adapter: Path | None) -> WanPolicy:
    model = config.model
    device = device_api.resolve(config.device)
    device_api.setup(device, config.deterministic, config.num_threads)
    networks = load_networks(video_model(model.kind), model, device)
    policy = adapted_policy(networks, adapter, model, eval_guidance(config), device)
    if adapter and model.boundary_ratio != (own := boundary_of(adapter)):
        text = f"model.boundary_ratio is {model.boundary_ratio:g}, the adapter's {own:g}"
        print(f"{text}: below {policy.boundary_ratio:g} the weights before training answer", flush=True)
    return policy
