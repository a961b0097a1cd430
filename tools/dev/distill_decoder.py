"""Distil a small decoder for training rewards (`model.reward_decoder`) from a recipe's own codec. Resumable.

    python tools/dev/distill_decoder.py --config config/grpo.py:tiny_recam --work .work/small --out small.safetensors

It learns to decode the latents of the recipe's training videos, and of samples of its policy before training, as the
codec does: their pixels at four scales, and their differences in time. Beside --out goes a record.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from tools.common import make_parser

PARSER = make_parser(__doc__, recipe=True)
PARSER.add_argument("--work", type=Path, required=True, help="folder of the resumable state")
PARSER.add_argument("--out", type=Path, required=True, help="file to write")
PARSER.add_argument("--steps", type=int, default=3000)
PARSER.add_argument("--batch", type=int, default=16, help="videos a step")
PARSER.add_argument("--groups", type=int, default=32, help="conditions that are sampled; their videos are read as well")
PARSER.add_argument("--widths", type=int, nargs=3, default=[48, 32, 24], help="channels of the three stages")
PARSER.add_argument("--learning-rate", type=float, default=2e-3)
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch
from safetensors.torch import save_file
from torch import Tensor

from flow_grpo.judging.evaluate import held_out_indices, sample
from flow_grpo.maths.keys import generator
from flow_grpo.models.encoders.codec import Codec
from flow_grpo.models.encoders.small_decoder import SmallDecoder
from flow_grpo.rewards.target_view import psnr_db
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.processes import start_program
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.start_up import set_up_rank
from tools.dev.pretrain_codec import multiscale
from tools.dev.tiny.training import Resumable, save_tensors

LATENT_NOISE = 0.03  # of the latents: the decoder must be smooth where copies differ
SETTINGS = ("config", "steps", "batch", "groups", "widths", "learning_rate")  # in the record


def main(words: list[str] | None = None) -> None:
    args, overrides = PARSER.parse_known_args(words)
    fixed = ["--config.run_name=distill", "--config.trackers=()", "--config.resume=", "--config.eval.every=0"]
    config, spec = read_command_line(["--config", args.config, *overrides, *fixed])
    device, world = set_up_rank(config, watched=False)
    args.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = assemble(dataclasses.replace(config, output_root=folder), spec, device, world)
        latents = torch.cat([latents_of(trainer, part, args) for part in ("train", "check")])
        codec = trainer.collector.policy.codec
        distill(codec, latents, args)
        trainer.tracker.close()
    process_group.shut_down(world)


def latents_of(trainer: Trainer, part: str, args: argparse.Namespace) -> Tensor:
    """Return (n, C, F, H, W) latents of a part of the groups: videos as encoded, and samples as in training."""
    file = args.work / f"latents_{part}_{args.groups}.pt"
    if not file.exists():
        collector, data = trainer.collector, trainer.training_data
        order = held_out_indices(data, len(data))
        count = args.groups if part == "train" else max(1, args.groups // 8)
        first = 0 if part == "train" else args.groups
        sampling = dataclasses.replace(collector.sampling, record=False)
        found: dict[object, Tensor] = {}
        for gid in [order[number % len(order)] for number in range(first, first + count)]:
            slots = (data.condition(gid, gid, slot) for slot in range(collector.config.sample.k))
            conditions, sampled = sample(collector.policy, slots, sampling, trainer.world, "sampling")
            found |= {(gid, slot): row for slot, row in enumerate(sampled)}
            one = conditions[0]
            for name, video in (("source", one.source_video), ("target", one.target_video)):
                if video is not None:
                    found[gid, name] = collector.policy.codec.encode(video)
        save_tensors(file, torch.stack(list(found.values())))
    made: Tensor = torch.load(file, weights_only=True)
    return made


def distill(codec: Codec, latents: Tensor, args: argparse.Namespace) -> None:
    """Train to --steps, log what the last ninth of the latents shows, and write file and record."""
    torch.manual_seed(0)
    small = SmallDecoder.for_codec(codec.config["z_dim"], codec.temporal, codec.spatial, tuple(args.widths))
    optimizer = torch.optim.AdamW(small.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0)
    training = Resumable(args.work, small=small, optimizer=optimizer)
    held = max(1, len(latents) // 9)
    pool, check = latents[:-held], latents[-held:]
    truth, began = codec.decode(check), time.time()
    while training.step < args.steps:
        fall = 0.5 + 0.5 * math.cos(math.pi * training.step / args.steps)
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * min(1.0, (training.step + 1) / 100) * fall
        draw = generator("distill", training.step)
        rows = pool[torch.randint(len(pool), (args.batch,), generator=draw)]
        rows = rows + LATENT_NOISE * torch.randn(rows.shape, generator=draw)
        error = small(rows) - codec.decode(rows)
        loss = multiscale(error) + (multiscale(error.diff(dim=2)) if error.shape[2] > 1 else 0.0)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        training.step += 1
        if training.step % 250 == 0:
            training.seconds, began = training.seconds + time.time() - began, time.time()
            with torch.no_grad():
                shown = float(psnr_db(small(check).clamp(0, 1), truth).mean())
            row = {"step": training.step, "loss": loss.item(), "check_psnr_db": shown, "seconds": training.seconds}
            training.log({name: round(value, 4) for name, value in row.items()})
            training.save()
    save_file({name: value.half().contiguous() for name, value in small.state_dict().items()}, args.out)
    training.write_record(args.out.with_suffix(".json"), "tools/dev/distill_decoder.py", args, SETTINGS)


if __name__ == "__main__":
    start_program()
    main()
