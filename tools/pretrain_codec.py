"""Train the tiny world's video codec: a small `AutoencoderKLWan`, 8x in space, every frame by itself. Resumable.

    python tools/pretrain_codec.py --work .work/codec --out assets/tiny_recam

Clips are filmed on the fly in rooms that no data set uses. The loss compares pixels and their changes in
time at four scales; a faint penalty on the size of the latents and noise on them stand for the KL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from torch import Tensor

from flow_grpo.data.tiny_world import WorldSpec, film, make_scene

WORLD = WorldSpec(seed=11, scenes={}, translation=(0.03, 0.65), rotation=(0.1, 1.0))
SCENES_PER_STEP, CAMERAS_PER_SCENE = 4, 2
LATENT_NOISE = 0.1  # keeps the decoder smooth around what the encoder gives


def build_codec(base_dim: int, latent_channels: int) -> AutoencoderKLWan:
    """Return an untrained codec; latent statistics are filled in after training."""
    return AutoencoderKLWan(
        base_dim=base_dim,
        in_channels=12,
        out_channels=12,
        patch_size=2,  # pixels are folded 2x2 before the first convolution: a quarter of the cost
        z_dim=latent_channels,
        dim_mult=[1, 2, 4],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[False, False],  # one latent frame a picture: see docs/tiny_recam.md
        latents_mean=[0.0] * latent_channels,
        latents_std=[1.0] * latent_channels,
        scale_factor_spatial=8,
        scale_factor_temporal=1,
    )


def clips(step: int, split: str = "codec") -> Tensor:
    """Return (B, 3, T, h, w) clips in [-1, 1], a function of the step."""
    scenes = [make_scene(WORLD, split, SCENES_PER_STEP * step + i) for i in range(SCENES_PER_STEP)]
    cameras = [(step * CAMERAS_PER_SCENE + i) % 10 for i in range(CAMERAS_PER_SCENE)]
    return film(WORLD, scenes, cameras) * 2 - 1


def psnr(first: Tensor, second: Tensor) -> float:
    """Return dB between videos in [-1, 1], averaged per clip."""
    error = (first.clamp(-1, 1) - second).square().mean(dim=(1, 2, 3, 4)) / 4
    return float((-10 * error.log10()).mean())


@torch.no_grad()
def held_out_psnr(codec: AutoencoderKLWan) -> float:
    """Return the codec's ceiling in dB on clips of rooms it was not trained on."""
    scores = [
        psnr(codec.decode(codec.encode(x).latent_dist.mode()).sample, x)
        for x in (clips(s, "codec-val") for s in range(8))
    ]
    return sum(scores) / len(scores)


@torch.no_grad()
def latent_statistics(codec: AutoencoderKLWan) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per latent channel."""
    latents = torch.cat([codec.encode(clips(s, "codec-stat")).latent_dist.mode() for s in range(16)])
    return latents.mean(dim=(0, 2, 3, 4)).tolist(), latents.std(dim=(0, 2, 3, 4)).tolist()


def multiscale(error: Tensor) -> Tensor:
    """Return mean absolute plus twice the squared error, summed over box filters of 1, 2, 4 and 8 pixels.

    Coarse errors of colour hardly show in PSNR, but a camera found by comparing colours is misled by them.
    """
    scales = [torch.nn.functional.avg_pool3d(error, (1, size, size)) for size in (1, 2, 4, 8)]
    return torch.stack([part.abs().mean() + 2 * part.square().mean() for part in scales]).sum()


def take_over(codec: AutoencoderKLWan, file: Path) -> None:
    """Copy the weights of another codec wherever name and shape agree."""
    own = codec.state_dict()
    other = torch.load(file, weights_only=True)["codec"]
    fit = {name: value for name, value in other.items() if name in own and value.shape == own[name].shape}
    codec.load_state_dict(own | fit)


def average_gradients(codec: AutoencoderKLWan, world: int) -> None:
    """Replace the gradients by their mean over ranks."""
    gradients = [parameter.grad for parameter in codec.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, mean in zip(gradients, (flat / world).split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(mean.view_as(gradient))


class Training:
    """The state of a run, kept in `work/state.pt`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.codec = build_codec(args.base_dim, args.latent_channels)
        self.optimizer = torch.optim.AdamW(
            self.codec.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.args, self.step, self.seconds = args, 0, 0.0
        self.file = args.work / "state.pt"
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)
            self.codec.load_state_dict(state["codec"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
        elif args.warm_from:
            take_over(self.codec, args.warm_from)

    def advance(self, rank: int, world: int) -> dict[str, float]:
        """Take one step; the rate falls along a half cosine."""
        fall = 0.5 + 0.5 * math.cos(math.pi * self.step / self.args.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * min(1.0, (self.step + 1) / 100) * fall
        video = clips(self.step * world + rank)
        latents = self.codec.encode(video).latent_dist.mode()  # the mode is all that is ever used
        restored = self.codec.decode(latents + LATENT_NOISE * torch.randn_like(latents)).sample
        size = latents.square().mean()
        error = restored - video
        # What is wrong with the motion counts by itself: smeared time costs the gold metric more than blur.
        loss = multiscale(error) + multiscale(error.diff(dim=2)) + 1e-3 * size
        self.codec.zero_grad(set_to_none=True)
        loss.backward()
        if world > 1:
            average_gradients(self.codec, world)
        torch.nn.utils.clip_grad_norm_(self.codec.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return {"loss": loss.item(), "latent_size": size.item()}

    def save(self) -> None:
        """Write the state beside the old one, then replace it."""
        partial = self.file.with_suffix(".tmp")
        state = {"codec": self.codec.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**state, "step": self.step, "seconds": self.seconds}, partial)
        partial.rename(self.file)


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--out", type=Path, required=True, help="diffusers folder that receives vae/")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--warm-from", type=Path, help="begin with the layers that fit of another codec's state.pt")
    parser.add_argument("--base-dim", type=int, default=16)
    parser.add_argument("--latent-channels", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=4e-3)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    return parser.parse_args()


def main() -> None:
    """Train to the last step, over any number of calls, and write the codec."""
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    args.work.mkdir(parents=True, exist_ok=True)
    training, began = Training(args), time.time()
    while training.step < args.steps:
        row = training.advance(rank, world)
        if rank == 0 and training.step % 100 == 0:
            training.seconds, began = training.seconds + time.time() - began, time.time()
            row |= {"val_psnr_db": held_out_psnr(training.codec), "seconds": training.seconds}
            with (args.work / "log.jsonl").open("a") as log:
                log.write(json.dumps({"step": training.step, **row}) + "\n")
            training.save()
    if world > 1:
        dist.destroy_process_group()
    if rank == 0:
        mean, std = latent_statistics(training.codec)
        training.codec.register_to_config(latents_mean=mean, latents_std=std)
        training.codec.half().save_pretrained(args.out / "vae")  # half the size on disk; loaded back to fp32


if __name__ == "__main__":
    main()
