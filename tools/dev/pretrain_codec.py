"""Train the furnished world's video codec: a small `AutoencoderKLWan`, 8x in space and 4x in time. Resumable.

    torchrun --nproc_per_node=2 tools/dev/pretrain_codec.py --work .work/codec --out assets/room_recam

It starts as a linear codec, made stage by stage from the principal components of small blocks of the clips, and then
learns to use their surroundings. Training clips show rooms that no data set contains. The loss compares pixels and
their differences in time at four scales; a small penalty on the latents' size and noise on the latents take the place
of the KL term.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanAttentionBlock, WanResample, WanResidualBlock, patchify
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional

from flow_grpo.data.rooms import LABELLED, SOURCES, UNLABELLED, UNSEEN
from flow_grpo.data.tiny_world import FURNISHED, make_scene, render_views
from flow_grpo.maths.keys import generator
from flow_grpo.rewards.target_view import psnr_db
from tools.common import make_parser
from tools.dev.tiny.training import Resumable, load_shares, processes

PATCH = 2  # pixels; the codec's two levels halve height, width and frames again
LATENT_NOISE = 0.1  # keeps the decoder smooth around the encoder's latents
CAMERAS = 4  # clips of a room
SETTINGS = ("steps", "scenes", "batch", "base_dim", "widths", "latent_channels", "learning_rate")  # in the record


def build_codec(base_dim: int, widths: list[int], latent_channels: int) -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=base_dim,
        in_channels=3 * PATCH**2,
        out_channels=3 * PATCH**2,
        patch_size=PATCH,
        z_dim=latent_channels,
        dim_mult=widths,
        num_res_blocks=1,
        attn_scales=[],
        temperal_downsample=[True, True],
        latents_mean=[0.0] * latent_channels,
        latents_std=[1.0] * latent_channels,
        scale_factor_spatial=4 * PATCH,
        scale_factor_temporal=4,
    )


def make_clips(split: str, scenes: range) -> Tensor:
    """Return (scenes * CAMERAS, 3, T, h, w) clips as bytes: of each room some of the shots, in turn."""
    shots = (*SOURCES, *LABELLED, *UNLABELLED, *UNSEEN)
    filmed = []
    for number in scenes:
        names = tuple(shots[(CAMERAS * number + camera) % len(shots)] for camera in range(CAMERAS))
        scene = make_scene(FURNISHED, split, number, names)
        filmed.append((255 * render_views(FURNISHED, [scene], list(range(CAMERAS)))).round().byte())
    return torch.cat(filmed)


def to_signed(clips: Tensor) -> Tensor:
    return clips.float() / 127.5 - 1


@torch.no_grad()
def become_linear(codec: AutoencoderKLWan, clips: Tensor) -> None:
    """Initialise the codec, approximately, as a linear one of clips (B, 3, T, h, w) in [-1, 1].

    The residual branches start at zero, so that encoder and decoder are linear up to their last norm. Going down, every
    2x2 square keeps its principal components, as many as there are channels, then every pair of frames its means and
    the largest differences. Going up, each stage is the least-squares way back. A channel passes the last norms as
    itself and its negative, so that silu(x) - silu(-x) = x; a large constant channel keeps the root-mean-square norms
    almost constant. A latent is a component divided by the square root of its standard deviation, so coarse components
    stay larger than fine ones.
    """
    for module in codec.modules():
        if isinstance(module, WanResidualBlock):
            module.conv2.weight.zero_()
            if module.in_dim != module.out_dim:
                set_centre(module.conv_shortcut, torch.eye(module.out_dim, module.in_dim))
        elif isinstance(module, WanAttentionBlock):
            module.proj.weight.zero_()
            module.proj.bias.zero_()
        elif isinstance(module, WanResample):  # what the stages below do not set stays 0
            for convolution in (module.time_conv, module.resample[1]):
                convolution.weight.zero_()
                convolution.bias.zero_()
    encoder, decoder, count = codec.encoder, codec.decoder, codec.config.z_dim
    pixels = patchify(clips, PATCH)
    mean = pixels.mean(dim=(0, 2, 3, 4))
    set_centre(encoder.conv_in, torch.eye(len(mean)), -mean)
    stages, squares = [pixels - mean.view(-1, 1, 1, 1)], []
    for down in (module for module in encoder.down_blocks if isinstance(module, WanResample)):
        squares.append(halve_space(down, stages[-1]))
        stages.append(halve_time(down, squares[-1]))

    basis, deviation = components(stages[-1], count)
    shortcut = encoder.down_blocks[-1].conv_shortcut
    set_centre(shortcut, torch.cat([basis, -basis]) / deviation.sqrt().repeat(2)[:, None])
    constant, undo = steady(deviation.sum(), shortcut.out_channels)
    shortcut.bias[-1] = constant
    set_centre(encoder.conv_out, undo * torch.cat([torch.eye(count), -torch.eye(count)], dim=1))
    set_centre(codec.quant_conv, torch.eye(2 * count))
    set_centre(codec.post_quant_conv, torch.eye(count))
    set_centre(decoder.conv_in, (basis * deviation.sqrt()[:, None]).T)

    # Where the pixels' stage ends, there is room for some components of a square of them, for each twice.
    end = decoder.up_blocks[-2].upsamplers[0].resample[1]
    half = (end.out_channels - 1) // 2
    kept, spread = components(stages[0], half)
    stages[0] = torch.einsum("kc,bcthw->bkthw", kept, stages[0])
    features = torch.einsum("kc,kd,bdthw->bcthw", basis, basis, stages[-1])
    for block, square, stage in zip(decoder.up_blocks, squares[::-1], stages[-2::-1], strict=False):
        features = double(block.upsamplers[0], features, square, stage)
    end.weight[half : 2 * half], end.bias[half : 2 * half] = -end.weight[:half], -end.bias[:half]
    constant, undo = steady(spread.square().sum(), end.out_channels)
    end.weight[-1], end.bias[-1] = 0, constant
    set_centre(decoder.conv_out, undo * torch.cat([kept.T, -kept.T], dim=1), mean)


def components(maps: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the first principal directions (count, C) of maps (B, C, T, h, w) about 0, and deviations along them."""
    rows = rearrange(maps, "b c t h w -> (b t h w) c")
    basis = torch.linalg.eigh(rows.T @ rows).eigenvectors.T.flip(0)[:count]
    return basis, (rows @ basis.T).std(dim=0)


def steady(energy: Tensor, channels: int) -> tuple[float, float]:
    """Return a constant for one of the channels, and what undoes the norm that the constant keeps nearly constant."""
    constant = 3 * math.sqrt(float(energy))
    return constant, math.sqrt(constant**2 + 2 * float(energy)) / math.sqrt(channels)


def set_centre(convolution: nn.Conv2d | nn.Conv3d, matrix: Tensor, bias: Tensor | None = None) -> None:
    """Make the first outputs of a convolution `matrix` (out, in) @ the first inputs at its own place, all else 0."""
    convolution.weight.zero_()
    convolution.bias.zero_()
    rows, columns = matrix.shape
    own = convolution.weight[:, :, -1] if convolution.weight.ndim == 5 else convolution.weight  # causal: now is last
    own[:rows, :columns, own.shape[-2] // 2, own.shape[-1] // 2] = matrix
    if bias is not None:
        convolution.bias[: len(bias)] = bias


def halve_space(down: WanResample, maps: Tensor) -> Tensor:
    """Make the principal components of squares of maps (B, C, T, h, w) a stage's convolution; return them."""
    squares = rearrange(maps, "b c t (h i) (w j) -> b (c i j) t h w", i=2, j=2)
    basis, _ = components(squares, down.dim)
    convolution = down.resample[1]
    convolution.weight[: len(basis), : maps.shape[1], :2, :2] = rearrange(basis, "k (c i j) -> k c i j", i=2, j=2)
    found = torch.einsum("kc,bcthw->bkthw", basis, squares)
    return functional.pad(found, (0, 0, 0, 0, 0, 0, 0, down.dim - len(basis)))


def halve_time(down: WanResample, maps: Tensor) -> Tensor:
    """Make means, and in place of the smallest the largest differences, of pairs of frames a stage; return them.

    The first frame of maps (B, C, T, h, w), T odd, stays as it is.
    """
    count = maps.shape[1]
    pairs = rearrange(maps[:, :, 1:], "b c (t two) h w -> two b c t h w", two=2)
    mean, difference = (pairs[0] + pairs[1]) / 2, (pairs[1] - pairs[0]) / 2
    small, large = (part.square().mean(dim=(0, 2, 3, 4)) for part in (mean, difference))
    differences = int((large > small.flip(0)).long().cumprod(0).sum().clamp(max=count - 1))
    means = count - differences
    own = down.time_conv.weight[..., 1:, 0, 0]  # (out, in, 2): this pair, without the frame before it
    own[:means, :means] = 0.5 * torch.eye(means)[..., None]
    own[means:, :differences] = torch.eye(differences)[..., None] * torch.tensor([-0.5, 0.5])
    return torch.cat([maps[:, :, :1], torch.cat([mean[:, :means], difference[:, :differences]], dim=1)], dim=2)


def double(up: WanResample, maps: Tensor, squares: Tensor, target: Tensor) -> Tensor:
    """Fit an upsampling stage by least squares, its time to `squares` and its space to `target`; return its result."""
    count = squares.shape[1]
    given = rearrange(maps[:, :count, 1:], "b c t h w -> (b t h w) c")
    wanted = rearrange(squares[:, :, 1:], "b c (t two) h w -> (b t h w) (two c)", two=2)
    matrix = ridge(given.T @ given, given.T @ wanted)
    for start, part in zip((0, up.dim), matrix.split(count, dim=1), strict=True):
        up.time_conv.weight[start : start + count, :count, -1, 0, 0] = part.T
    _, _, frames, rows, columns = maps.shape
    pairs = rearrange(given @ matrix, "(b t h w) (two c) -> b c (t two) h w", t=frames - 1, two=2, h=rows, w=columns)
    images = rearrange(torch.cat([maps[:, :count, :1], pairs], dim=2), "b c t h w -> (b t) c h w")
    wide = functional.interpolate(images, scale_factor=2, mode="nearest-exact")
    around = functional.pad(functional.unfold(wide, 3, padding=1), (0, 0, 0, 1), value=1.0)  # 1 for the bias
    truth = rearrange(target, "b c t h w -> (b t) c (h w)")
    products = (torch.einsum("nkp,nlp->kl", around, part) for part in (around, truth))
    solution = ridge(*products)
    convolution = up.resample[1]
    fitted = solution.shape[1]
    convolution.weight[:fitted, :count] = rearrange(solution[:-1], "(c i j) k -> k c i j", i=3, j=3)
    convolution.bias[:fitted] = solution[-1]
    made = functional.conv2d(wide, convolution.weight[:, :count], convolution.bias, padding=1)
    return rearrange(made, "(b t) c h w -> b c t h w", b=len(maps))


def ridge(normal: Tensor, right: Tensor) -> Tensor:
    """Solve (normal + a little) @ x = right."""
    normal = normal.double()
    damped = normal + 1e-4 * normal.diagonal().mean() * torch.eye(len(normal), dtype=torch.float64)
    return torch.linalg.solve(damped, right.double()).float()


@torch.no_grad()
def restore(codec: AutoencoderKLWan, clips: Tensor) -> Tensor:
    return codec.decode(codec.encode(clips).latent_dist.mode()).sample


def quality(codec: AutoencoderKLWan, clips: Tensor) -> float:
    """Return the PSNR in dB of what the codec makes of clips in [-1, 1], averaged over frames and clips."""
    return float(psnr_db((restore(codec, clips).clamp(-1, 1) + 1) / 2, (clips + 1) / 2).mean())


def multiscale(error: Tensor) -> Tensor:
    """Return mean absolute plus twice the squared error, summed over box filters of 1, 2, 4 and 8 pixels."""
    # Coarse colour errors hardly show in PSNR, but they mislead a camera estimate that compares colours.
    scales = [torch.nn.functional.avg_pool3d(error, (1, size, size)) for size in (1, 2, 4, 8)]
    return torch.stack([part.abs().mean() + 2 * part.square().mean() for part in scales]).sum()


class CodecTraining(Resumable):
    def __init__(self, args: argparse.Namespace, clips: Tensor) -> None:
        self.args, self.clips = args, clips
        self.codec = build_codec(args.base_dim, args.widths, args.latent_channels)
        self.optimizer = torch.optim.AdamW(
            self.codec.parameters(), lr=args.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        super().__init__(args.work, codec=self.codec, optimizer=self.optimizer)
        if not self.resumed:
            become_linear(self.codec, to_signed(clips[:120]))

    def advance(self, rank: int, world: int) -> dict[str, float]:
        fall = 0.5 + 0.5 * math.cos(math.pi * self.step / self.args.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.learning_rate * min(1.0, (self.step + 1) / 100) * fall
        draw = generator("codec", self.step, rank)
        video = to_signed(self.clips[torch.randint(len(self.clips), (self.args.batch // world,), generator=draw)])
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
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--scenes", type=int, default=500, help=f"to train on, with {CAMERAS} cameras each")
    parser.add_argument("--batch", type=int, default=8, help="clips per step, over all ranks")
    parser.add_argument("--base-dim", type=int, default=16)
    parser.add_argument("--widths", type=int, nargs=3, default=[1, 2, 5], help="of the levels, times base-dim")
    parser.add_argument("--latent-channels", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    args = parser.parse_args()
    with processes(args) as (rank, world):
        clips = torch.cat(load_shares(args, "clips", partial(make_clips, "codec"), rank, world))
        training = CodecTraining(args, clips)
        held_out = to_signed(make_clips("codec-val", range(8)))
        began = time.time()
        while training.step < args.steps:
            if rank == 0 and training.step == 0:
                training.log({"step": 0, "val_psnr_db": round(quality(training.codec, held_out), 4)})
            row = training.advance(rank, world)
            if rank == 0 and training.step % 100 == 0:
                training.seconds, began = training.seconds + time.time() - began, time.time()
                row |= {"val_psnr_db": quality(training.codec, held_out)}
                row = {"step": training.step, **row, "seconds": training.seconds}
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
    latents = codec.encode(to_signed(training.clips[:200])).latent_dist.mode()
    mean = latents.mean(dim=(0, 2, 3, 4))
    std = float((latents - mean.view(-1, 1, 1, 1)).std())
    codec.register_to_config(latents_mean=mean.tolist(), latents_std=[std] * len(mean))
    codec.half().save_pretrained(args.out / "vae")
    training.write_record(args.out / "vae" / "pretraining.json", "tools/dev/pretrain_codec.py", args, SETTINGS)


if __name__ == "__main__":
    main()
