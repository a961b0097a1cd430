"""Train the tiny world's video codec: a small `AutoencoderKLWan`, 8x in space, each frame by itself. Resumable.

    torchrun --nproc_per_node=2 tools/dev/pretrain_codec.py --work .work/codec --out assets/tiny_recam

It starts as the best linear codec of 8x8-pixel patches and then learns to use their surroundings. Training clips show
rooms that no dataset contains. The loss compares pixels and their differences in time at four scales; a small penalty
on the latents' size and noise on the latents take the place of the KL term.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from einops import rearrange
from torch import Tensor

from flow_grpo.data.tiny_world import WorldSpec, render_views, make_scene
from flow_grpo.maths.keys import generator
from flow_grpo.rewards.target_view import psnr_db
from tools.common import make_parser
from tools.dev.tiny.training import Resumable, processes

WORLD = WorldSpec(seed=11, scenes={}, translation=(0.03, 0.65), rotation=(0.1, 1.0))
PATCH = 8  # pixels; a PATCH x PATCH square becomes one latent position
LATENT_NOISE = 0.1  # keeps the decoder smooth around the encoder's latents
SETTINGS = ("steps", "scenes", "batch", "base_dim", "latent_channels", "learning_rate")  # in the record


def build_codec(base_dim: int, latent_channels: int) -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=base_dim,
        in_channels=3 * PATCH**2,
        out_channels=3 * PATCH**2,
        patch_size=PATCH,  # all compression is pixel unshuffling: cheap, and no levels to train through
        z_dim=latent_channels,
        dim_mult=[1],
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[],  # one latent frame per frame, see docs/tiny_recam.md
        latents_mean=[0.0] * latent_channels,
        latents_std=[1.0] * latent_channels,
        scale_factor_spatial=PATCH,
        scale_factor_temporal=1,
    )


def make_clips(split: str, scenes: int, cameras: int = 10) -> Tensor:
    """Return (scenes * cameras, 3, T, h, w) clips in [-1, 1]."""
    filmed = [render_views(WORLD, [make_scene(WORLD, split, i)], list(range(cameras))) for i in range(scenes)]
    return torch.cat(filmed) * 2 - 1


@torch.no_grad()
def become_linear(codec: AutoencoderKLWan, clips: Tensor) -> None:
    """Initialise the codec, approximately, with the principal components of the clips' patches.

    Each component passes encoder and decoder as a channel and its negative, so that silu(x) - silu(-x) = x; a large
    constant channel keeps the root-mean-square norms almost constant; the residual branches start at zero. A latent is
    a component divided by the square root of its standard deviation, so coarse components stay larger than fine ones.
    """
    patches = rearrange(clips, "b c t (h q) (w r) -> (b t h w) (c r q)", q=PATCH, r=PATCH)
    mean = patches.mean(dim=0)
    count = codec.config.z_dim
    basis = torch.linalg.eigh((patches - mean).T @ (patches - mean)).eigenvectors.T.flip(0)[:count]
    deviation = ((patches - mean) @ basis.T).std(dim=0)
    down = basis / deviation.sqrt()[:, None]
    up = basis * deviation.sqrt()[:, None]
    constant = 3.0 * math.sqrt(float(deviation.sum()))  # the channels' mean energy is about 2 * deviation.sum()

    for branch in (*codec.encoder.down_blocks, *codec.encoder.mid_block.resnets, *codec.decoder.mid_block.resnets):
        branch.conv2.weight.zero_()
    for block in codec.decoder.up_blocks:
        for branch in block.resnets:
            branch.conv2.weight.zero_()
    for middle in (codec.encoder.mid_block, codec.decoder.mid_block):
        middle.attentions[0].proj.weight.zero_()
        middle.attentions[0].proj.bias.zero_()
    norm = math.sqrt(constant**2 + 2 * float(deviation.sum()))
    undo = norm / math.sqrt(codec.encoder.conv_in.out_channels)  # undoes the norm before the last convolution
    _open_pairs(codec.encoder.conv_in, down, -(down @ mean), constant)
    _close_pairs(codec.encoder.conv_out, torch.cat([torch.eye(count), torch.zeros(count, count)]) * undo, None)
    codec.quant_conv.weight.copy_(torch.eye(2 * count)[..., None, None, None])
    codec.post_quant_conv.weight.copy_(torch.eye(count)[..., None, None, None])
    codec.quant_conv.bias.zero_()
    codec.post_quant_conv.bias.zero_()
    _open_pairs(codec.decoder.conv_in, torch.eye(count), torch.zeros(count), constant)
    _close_pairs(codec.decoder.conv_out, up.T * undo, mean)


def _open_pairs(convolution: torch.nn.Conv3d, matrix: Tensor, bias: Tensor, constant: float) -> None:
    """Make the first output channels the rows of `matrix` and their negatives, and the last one a constant."""
    rows = len(matrix)
    convolution.weight.mul_(0.1)  # the remaining channels start small
    convolution.weight[: 2 * rows] = 0
    convolution.weight[: 2 * rows, :, -1, 1, 1] = torch.cat([matrix, -matrix])  # causal: the last tap is now
    convolution.bias[: 2 * rows] = torch.cat([bias, -bias])
    convolution.weight[-1] = 0
    convolution.bias[-1] = constant


def _close_pairs(convolution: torch.nn.Conv3d, matrix: Tensor, bias: Tensor | None) -> None:
    """Make the convolution output `matrix` @ (p - n) + bias of the channel pairs p, n that `_open_pairs` makes."""
    rows = matrix.shape[1]
    convolution.weight.zero_()
    convolution.weight[:, : 2 * rows, -1, 1, 1] = torch.cat([matrix, -matrix], dim=1)
    convolution.bias.zero_()
    if bias is not None:
        convolution.bias.copy_(bias)


def psnr(first: Tensor, second: Tensor) -> float:
    """Return the PSNR in dB of videos in [-1, 1], averaged over frames and clips."""
    return float(psnr_db((first.clamp(-1, 1) + 1) / 2, (second + 1) / 2).mean())


@torch.no_grad()
def restore(codec: AutoencoderKLWan, clips: Tensor) -> Tensor:
    return codec.decode(codec.encode(clips).latent_dist.mode()).sample


def multiscale(error: Tensor) -> Tensor:
    """Return mean absolute plus twice the squared error, summed over box filters of 1, 2, 4 and 8 pixels."""
    # Coarse colour errors hardly show in PSNR, but they mislead a camera estimate that compares colours.
    scales = [torch.nn.functional.avg_pool3d(error, (1, size, size)) for size in (1, 2, 4, 8)]
    return torch.stack([part.abs().mean() + 2 * part.square().mean() for part in scales]).sum()


class CodecTraining(Resumable):
    def __init__(self, args: argparse.Namespace, clips: Tensor) -> None:
        self.args, self.clips = args, clips
        self.codec = build_codec(args.base_dim, args.latent_channels)
        self.optimizer = torch.optim.AdamW(
            self.codec.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        super().__init__(args.work, codec=self.codec, optimizer=self.optimizer)
        if not self.resumed:
            become_linear(self.codec, clips[:2000])

    def advance(self, rank: int, world: int) -> dict[str, float]:
        fall = 0.5 + 0.5 * math.cos(math.pi * self.step / self.args.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * min(1.0, (self.step + 1) / 100) * fall
        draw = generator("codec", self.step, rank)
        video = self.clips[torch.randint(len(self.clips), (self.args.batch // world,), generator=draw)]
        latents = self.codec.encode(video).latent_dist.mode()  # nothing samples the posterior
        noise = LATENT_NOISE * torch.randn(latents.shape, generator=draw)
        error = self.codec.decode(latents + noise).sample - video
        size = latents.square().mean()
        # Differences in time count separately: smeared motion hurts the reference estimator more than blur.
        loss = multiscale(error) + multiscale(error.diff(dim=2)) + 1e-3 * size
        self.codec.zero_grad(set_to_none=True)
        loss.backward()
        if world > 1:  # the mean of the gradients over ranks
            gradients = [parameter.grad for parameter in self.codec.parameters() if parameter.grad is not None]
            flat = torch.nn.utils.parameters_to_vector(gradients)
            dist.all_reduce(flat)
            torch.nn.utils.vector_to_parameters(flat / world, gradients)
        torch.nn.utils.clip_grad_norm_(self.codec.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return {"loss": loss.item(), "latent_size": size.item()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--out", type=Path, required=True, help="diffusers folder that receives vae/")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--scenes", type=int, default=500, help="to train on, with ten cameras each")
    parser.add_argument("--batch", type=int, default=32, help="clips per step, over all ranks")
    parser.add_argument("--base-dim", type=int, default=72)
    parser.add_argument("--latent-channels", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    args = parser.parse_args()
    with processes(args) as (rank, world):
        training, held_out = CodecTraining(args, make_clips("codec", args.scenes)), make_clips("codec-val", 8)
        began = time.time()
        while training.step < args.steps:
            if rank == 0 and training.step == 0:
                training.log({"step": 0, "val_psnr_db": round(psnr(restore(training.codec, held_out), held_out), 4)})
            row = training.advance(rank, world)
            if rank == 0 and training.step % 100 == 0:
                training.seconds, began = training.seconds + time.time() - began, time.time()
                quality = psnr(restore(training.codec, held_out), held_out)
                row = {"step": training.step, **row, "val_psnr_db": quality, "seconds": training.seconds}
                training.log({name: round(value, 4) for name, value in row.items()})
                training.save()
        if rank == 0:
            write_codec(training, args)


@torch.no_grad()
def write_codec(training: CodecTraining, args: argparse.Namespace) -> None:
    """Write the diffusers folder with fp16 weights, and the record.

    All channels share one standard deviation, so that noise hides those that carry most of the picture last.
    """
    codec = training.codec
    latents = codec.encode(training.clips[:500]).latent_dist.mode()
    mean = latents.mean(dim=(0, 2, 3, 4))
    std = float((latents - mean.view(-1, 1, 1, 1)).std())
    codec.register_to_config(latents_mean=mean.tolist(), latents_std=[std] * len(mean))
    codec.half().save_pretrained(args.out / "vae")
    training.write_record(args.out / "vae" / "pretraining.json", "tools/dev/pretrain_codec.py", args, SETTINGS)


if __name__ == "__main__":
    main()
