"""Say what a recipe costs on given devices, before anything is bought, loaded or waited for.

    python tools/plan.py --config config/grpo.py:my_recam_8npu --devices 8 --memory 64GiB --tflops 300

Nothing is allocated: the transformer is counted with fake tensors (`flow_grpo/models/footprint.py`), the rest is
arithmetic. A device's speed is what you state with --tflops, its sustained rate at this model, not its data sheet's.
Without a model folder, network and codec are those of Wan2.1-T2V-1.3B.
What the allocator wastes, the codec's own activations and other processes are not in it: leave a tenth free.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import torch

from flow_grpo.config import Config, ConfigError, load_config
from flow_grpo.config_checks import check_world, parse_bucket
from flow_grpo.models.footprint import WAN_1_3B, Footprint, footprint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WAN_CODEC = {"scale_factor_temporal": 4, "scale_factor_spatial": 8, "z_dim": 16}
FROZEN_BYTES = {"text_encoder": 11_361_920_418, "vae": 507_609_880}  # Wan 2.1's files: UMT5-XXL in bf16, codec in fp32
GIB = 2**30


def main(words: Sequence[str] | None = None) -> int:
    """Print the plan and return 0 if it fits, 1 if not, 2 for a setting that cannot work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, metavar="FILE:RECIPE", help="its knobs may follow")
    parser.add_argument("--devices", type=int, default=8, help="ranks")
    parser.add_argument("--memory", default="64GiB", help="of one device, such as 64GiB")
    parser.add_argument(
        "--tflops", type=float, default=200.0, help="what a device sustains, in 1e12 operations a second"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    known, overrides = parser.parse_known_args(words)
    try:
        config = load_config(known.config, overrides)
        check_world(config, known.devices)
        limit = parse_memory(known.memory)
        plan = make_plan(config, known.devices, known.tflops * 1e12)
    except ConfigError as error:
        print("error:", error, file=sys.stderr)
        return 2
    fits = plan["memory_update_gib"] <= limit and plan["memory_rollout_gib"] <= limit
    print(json.dumps(plan | {"fits": fits}) if known.json else table(plan, limit, config))
    return 0 if fits else 1


def parse_memory(text: str) -> float:
    """Return GiB of "64GiB", "64" or "65536MiB".

    Raises:
        ConfigError: another form.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|MiB)?", text)
    if match is None:
        raise ConfigError(f"--memory: got {text!r}, must be a number of GiB; for example --memory 64GiB")
    return float(match[1]) / (1024 if match[2] == "MiB" else 1)


def make_plan(config: Config, devices: int, rate: float) -> dict[str, float]:
    """Return counts, GiB and seconds of one rank and one epoch without resampling.

    Args:
        config: the recipe; of several buckets the largest is planned.
        devices: ranks.
        rate: operations a second that a device sustains.
    """
    sample, train, model = config.sample, config.train, config.model
    transformer, codec = _model_config(config, "transformer", WAN_1_3B), _model_config(config, "vae", WAN_CODEC)
    latents = latent_shape(config, codec)
    dtype = DTYPES[model.dtype]
    copies = 1 if sample.guidance_scale == 1.0 else 2
    rows = {sample.train_batch_size, train.batch_size}
    counted = {n: footprint(transformer, latents, model, rows=n * copies, dtype=dtype) for n in rows}
    rollout, update = counted[sample.train_batch_size], counted[train.batch_size]
    steps = sample.sde_window or len(sample.sde_steps)
    calls = sample.num_batches_per_epoch * sample.num_steps
    replays = steps * sample.expanded_batch_size / train.batch_size
    backward = 3 + model.gradient_checkpointing  # a backward costs two forwards, recomputing one more
    reference = 1 if train.kl_coef > 0 else 0
    seconds = {
        "rollout_s": calls * rollout.forward_flops / rate,
        "update_s": replays * (backward + reference) * update.forward_flops / rate,
    }
    return {
        "tokens": update.tokens,
        "samples_per_epoch": sample.expanded_batch_size * devices,
        "rollout_calls": calls,
        "update_calls": replays,
        "forward_tflop": rollout.forward_flops / sample.train_batch_size / 1e12,
        "trained_parameters": update.trained,
        **seconds,
        "epoch_s": sum(seconds.values()),
        **_memory(config, update, rollout, latents, transformer["text_dim"]),
        "gradient_bytes": 4.0 * update.trained,
    }


def latent_shape(config: Config, codec: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return (C, F, H, W) of the largest video size."""
    data = config.data
    sizes = [parse_bucket(text) for text in data.buckets] or [(data.num_frames, data.height, data.width)]
    frames, height, width = max(sizes, key=lambda size: size[0] * size[1] * size[2])
    temporal, spatial = codec["scale_factor_temporal"], codec["scale_factor_spatial"]
    return codec["z_dim"], (frames - 1) // temporal + 1, height // spatial, width // spatial


def _memory(
    config: Config, update: Footprint, rollout: Footprint, latents: tuple[int, int, int, int], text_dim: int
) -> dict[str, float]:
    """Return GiB by what holds them; kept at the peaks of update and rollout."""
    sample, model, train = config.sample, config.model, config.train
    width = DTYPES[model.dtype].itemsize
    frozen = sum(_stored_bytes(config, part) for part in FROZEN_BYTES)
    weights = update.parameters * width + update.trained * (4 - width if model.trained != "lora" else 4)
    states = (4 + 8 + (4 if train.ema_decay else 0)) * update.trained  # gradient, two moments, average
    elements = latents[0] * latents[1] * latents[2] * latents[3]
    steps = sample.sde_window or len(sample.sde_steps)
    prompt = model.max_prompt_tokens * text_dim
    trajectories = sample.expanded_batch_size * 4 * (elements * (steps + 2) + prompt)
    # A call without gradients holds about what one block keeps, since nothing outlives its block.
    call = rollout.block_bytes or rollout.kept_bytes // 10
    fixed = weights + frozen + states
    return {
        "memory_weights_gib": (weights + frozen) / GIB,
        "memory_optimizer_gib": states / GIB,
        "memory_activations_gib": (update.kept_bytes + update.block_bytes) / GIB,
        "memory_trajectories_gib": trajectories / GIB,
        "memory_update_gib": (fixed + trajectories + update.kept_bytes + update.block_bytes) / GIB,
        "memory_rollout_gib": (fixed + trajectories + call) / GIB,
    }


def _stored_bytes(config: Config, part: str) -> int:
    files = list(Path(config.model.path, part).glob("*.safetensors"))
    return sum(file.stat().st_size for file in files) or FROZEN_BYTES[part]


def _model_config(config: Config, part: str, default: Mapping[str, Any]) -> dict[str, Any]:
    file = Path(config.model.path, part, "config.json")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else dict(default)
    return found


def table(plan: dict[str, float], limit: float, config: Config) -> str:
    """Return the plan in words."""
    lines = [
        f"{name:26s} {value:>18,.4g}" if value < 1e5 else f"{name:26s} {value:>18,.0f}" for name, value in plan.items()
    ]
    most = max(plan["memory_update_gib"], plan["memory_rollout_gib"])
    if most <= limit:
        return "\n".join([*lines, f"fits: {most:.1f} of {limit:g} GiB at the peak"])
    advice = []
    if not config.model.gradient_checkpointing:
        advice.append("--config.model.gradient_checkpointing=true")
    if config.train.batch_size > 1:
        advice.append("--config.train.batch_size=1")
    if config.model.dtype == "fp32":
        advice.append("--config.model.dtype=bf16")
    if config.model.trained != "lora":
        advice.append("--config.model.trained=lora")
    if len(advice) < 2:
        advice.append("fewer frames or a smaller size")
    return "\n".join([*lines, f"does not fit: {most:.1f} of {limit:g} GiB at the peak; try {', '.join(advice)}"])


if __name__ == "__main__":
    sys.exit(main())
