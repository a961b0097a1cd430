"""The options of `tools/generate.py`, and what `--run` takes from a run."""

from __future__ import annotations

import argparse
from argparse import BooleanOptionalAction
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.base import get_config
from config.grpo import WAN_NEGATIVE_PROMPT
from tools.common import DTYPES, make_parser


def parse(words: Sequence[str] | None, doc: str | None) -> argparse.Namespace:
    """Return the options; with --run, those that are not given are the run's. ValueError for unusable ones."""
    parser = command_line(doc)
    args = parser.parse_args(words)
    if args.run is not None:
        parser.set_defaults(**of_run(args.run))
        args = parser.parse_args(words)
    if args.model is None:
        raise ValueError("--model FOLDER is needed, or --run outputs/NAME to take the model of a run")
    _check_subject(args)
    if args.before and args.adapter is None:
        raise ValueError("--before shows the model without its --adapter, which is not given; drop --before")
    return args


def _check_subject(args: argparse.Namespace) -> None:
    from flow_grpo.models.registry import video_model  # here and below: help needs no torch

    needs = video_model(args.kind).needs
    wanted, others = ["source", "camera"], ["prompts"]
    if "source_video" not in needs:
        wanted, others = ["prompts", "out"], ["source", "camera", "focal_px"]
    (wanted if "source_poses" in needs else others).append("source_poses")
    for name in wanted:
        if not getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is needed by --kind {args.kind}; see --help")
    for name in others:
        if getattr(args, name):
            raise ValueError(f"--{name.replace('_', '-')} is nothing that --kind {args.kind} takes; see --help")


def of_run(folder: Path) -> dict[str, Any]:
    """Return option -> what the evaluations of a run used, and the run's adapter."""
    from flow_grpo.cost.plan import largest_size
    from flow_grpo.judging.evaluate import eval_guidance
    from flow_grpo.run import starts

    config = starts.configuration_of(folder)
    guidance = eval_guidance(config)
    frames, height, width = largest_size(config)
    return {
        "kind": config.model.kind,
        "model": Path(config.model.path),
        "adapter": folder / "adapter",
        "start_adapter": Path(config.model.adapter) if config.model.adapter else None,
        "default_prompt": config.data.prompt,
        "negative_prompt": guidance.negative_prompt,
        "guidance": guidance.scale,
        "max_prompt_tokens": config.model.max_prompt_tokens,
        "steps": config.eval.num_steps,
        "shift": config.sample.shift,
        "frames": frames,
        "height": height,
        "width": width,
        "fps": config.data.fps,
        "dtype": config.model.dtype,
        "offload": config.model.offload,
        "tiling": config.model.vae_tiles if config.model.vae_tiling else None,
        "round_timestep": config.model.round_timestep,
        "before": True,
        "out": folder / "generated",
    }


def command_line(doc: str | None) -> argparse.ArgumentParser:
    defaults = get_config()
    parser = make_parser(doc)
    add = parser.add_argument
    add("--run", type=Path, help="folder of a run, outputs/NAME: the options below that are not given are its own")
    add("--source", type=Path, nargs="+", action="extend", help="videos, or folders of videos")
    add("--camera", nargs="+", action="extend", help="presets such as arc_left:0.5, or files of poses")
    prompts_help = "for a model without source video: what to show, or a .txt, .csv or .jsonl of prompts"
    path_help = "how the sources' own camera moves, for a model that asks: static, ViPE's output folder, or a file"
    add("--source-poses", help=f"{path_help} of poses, one for each frame")
    add("--prompts", nargs="+", action="extend", help=prompts_help)
    add("--model", type=Path, help="folder in diffusers layout, see tools/convert_recammaster.py")
    add("--kind", default=defaults.model.kind, help="which video model: model.kind of its recipe")
    add("--adapter", type=Path, help="adapter folder of a run, LoRA or a whole transformer; or LoRA of others, a file")
    before_help = "make every video without the adapter, too; on with --run"
    add("--before", action=BooleanOptionalAction, default=False, help=before_help)
    prompt_help = (
        "what the sources show, in a sentence or two; default: each one's text in a metadata.csv (file_name,text)"
    )
    add("--prompt", help=f"{prompt_help} beside it or its folder videos/, else the recipe's data.prompt")
    parser.set_defaults(default_prompt=defaults.data.prompt, start_adapter=None)
    add("--negative-prompt", default=WAN_NEGATIVE_PROMPT, help="unused without guidance")
    add("--max-prompt-tokens", type=int, default=defaults.model.max_prompt_tokens, help="as in training")
    add("--out", type=Path, help="output folder; default: next to each source, with --run its folder generated/")
    add("--overwrite", action="store_true", help="replace existing outputs")
    add("--steps", type=int, default=50, help="denoising steps")
    add("--shift", type=float, default=5.0, help="timestep shift of the noise schedule")
    add("--guidance", type=float, default=5.0, help="classifier-free guidance scale; 1: off, half the compute")
    add("--seed", type=int, default=0, help="of the initial noise")
    add("--first-number", type=int, default=0, help="number of the first video; each next one counts up")
    add("--frames", type=int, default=81, help="per video; 4n+1 for Wan's codec")
    add("--height", type=int, default=480, help="pixels; sources are resized and centre-cropped")
    add("--width", type=int, default=832, help="pixels")
    add("--fps", type=float, default=defaults.data.fps, help="of videos of prompts: 24 for Wan2.2 TI2V-5B")
    focal_help = (
        "focal length of the generated videos in pixels, recorded for tools/evaluate.py; of MultiCamVideo known"
    )
    add("--focal-px", type=float, help=focal_help)
    add("--device", default="auto", help="auto picks the best one available")
    offload_help = "keep text encoder and codec on the CPU while unused, to save memory"
    add("--offload", action=BooleanOptionalAction, default=False, help=offload_help)
    tiles = "run the codec in tiles, to save memory; slightly changes the output; recammaster: the original's tiles"
    add("--tiling", nargs="?", const="diffusers", choices=("diffusers", "recammaster", "off"), help=tiles)
    rounded = "round timesteps to bf16, as ReCamMaster's own code does"
    add("--round-timestep", action=BooleanOptionalAction, default=False, help=rounded)
    add("--dtype", choices=DTYPES, default="bf16", help="compute dtype of the transformer")
    return parser
