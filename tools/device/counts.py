"""FLOPs and planned peak memory of the device report's parts, counted without allocating anything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from torch._subclasses.fake_tensor import FakeTensorMode

from flow_grpo.cost.codec_cost import flops_in_chunks
from flow_grpo.cost.footprint import footprint
from flow_grpo.cost.plan import Plan, make_plan
from flow_grpo.models.recam import RECAM
from flow_grpo.models.video_model import WAN_1_3B
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config
from tools.device.kernels import Records, Setting, Size, VideoSize

RECIPE = f"{Path(__file__).resolve().parents[2]}/config/grpo.py:my_recam_8npu"


def transformer_config(size: Size) -> dict[str, Any]:
    return dict(WAN_1_3B) | {
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_width,
        "num_layers": size.blocks,
        "ffn_dim": size.ffn_width,
        "text_dim": size.text_width,
    }


def recipe(size: Size) -> Config:
    """Return the recipe for 8 devices with this size's rank and prompt."""
    knobs = {"model.lora_rank": size.lora_rank, "model.max_prompt_tokens": size.prompt_tokens}
    return load_config(RECIPE, [f"--config.{name}={value}" for name, value in knobs.items()])


def count(setting: Setting) -> Records:
    """Yield (part of the report, its FLOPs and the planner's peak memory) for every video; allocates nothing."""
    size, model = setting.size, recipe(setting.size).model
    config = transformer_config(size)
    for video in setting.videos:
        forwards = {}
        for kept in ("blocks", "keep_attention", "none"):
            own = dataclasses.replace(model, checkpointing=kept)
            counted = footprint(RECAM, config, video.latent_shape, own, rows=setting.rows)
            one, forwards[kept] = counted.forward_flops, counted.train_flops + counted.recomputed_flops
        whole = decoding_flops(size, video) * setting.rows
        plans = {kept: planned(setting, video, checkpointing=kept) for kept in forwards}
        rollout, updated = plans["blocks"].rollout_gib, plans["blocks"].update_gib
        for name, flops, peak in (
            ("forward", one, rollout),
            ("forward_compiled", one, rollout),
            ("update", forwards["blocks"], updated),
            ("update_keep_attention", forwards["keep_attention"], plans["keep_attention"].update_gib),
            ("update_none", forwards["none"], plans["none"].update_gib),
            ("update_compiled", forwards["blocks"], updated),
            ("decode", whole, plans["blocks"].decode_gib),
            ("decode_tf32", whole, plans["blocks"].decode_gib),
            ("decode_bf16", whole, None),
            ("decode_tiled", whole * tiled_area(video), None),
        ):
            peaks = {"planned_gib": peak} if peak and config == dict(WAN_1_3B) else {}  # it plans for Wan's parts
            yield f"{name}_{video}", {"flops": flops, **peaks}


def planned(setting: Setting, video: VideoSize, *, checkpointing: str) -> Plan:
    config, rows = recipe(setting.size), setting.rows
    size = {"num_frames": video.frames, "height": video.height, "width": video.width}
    config = dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, **size),
        model=dataclasses.replace(config.model, checkpointing=checkpointing),
        sample=dataclasses.replace(config.sample, train_batch_size=rows, num_batches_per_epoch=1),
        train=dataclasses.replace(config.train, batch_size=rows),
    )
    return make_plan(config, config.sample.k, 1e12)  # a group has a copy on each rank


def decoding_flops(size: Size, video: VideoSize) -> float:
    channels, frames, *pixels = video.latent_shape
    with FakeTensorMode(), torch.no_grad():
        codec = AutoencoderKLWan(base_dim=size.codec_width).eval()
        return flops_in_chunks(lambda n: codec.decode(torch.empty(1, channels, n, *pixels)), frames, 1)


def tiled_area(video: VideoSize) -> float:
    """Return the area of all tiles over that of the picture: they overlap, and the codec's work grows with area.

    Decoding in tiles cannot be counted like the rest: it takes minutes even without computing anything.
    """
    codec = AutoencoderKLWan(base_dim=8, num_res_blocks=1)
    sides = (
        (video.height, codec.tile_sample_min_height, codec.tile_sample_stride_height),
        (video.width, codec.tile_sample_min_width, codec.tile_sample_stride_width),
    )
    area = 1.0
    for side, tile, stride in sides:
        # Pictures no larger than a tile are decoded whole, which the formula gives as well.
        starts = range(0, side, stride) if any(other > least for other, least, _ in sides) else (0,)
        area *= sum(min(tile, side - start) for start in starts) / side
    return area
