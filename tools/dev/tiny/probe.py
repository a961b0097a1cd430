"""Measures the tiny model during pre-training: video quality, and whose labels it takes a command for.

Held-out conditions with labels that only the first data source has ("sure") or that both have ("unsure"); each sample
is compared with the true videos of both sources and with what lies between and beyond them.
"""

from __future__ import annotations

import dataclasses

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from flow_grpo.data.tiny_world import TinyScene, WorldSpec, caption, make_scene, render_views
from flow_grpo.maths.keys import generator
from flow_grpo.maths.poses import PRESETS, camera_tokens
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.rewards.target_view import psnr_db
from tools.dev.tiny.text import CAPTIONS

UNSURE = WorldSpec(seed=13, scenes={}, translation=(0.35, 0.65), rotation=(0.3, 1.0))  # labels that both sources have
SURE = dataclasses.replace(UNSURE, translation=(0.15, 0.3))  # labels that only the first source has
LADDER = torch.linspace(0.0, 1.4, 15)  # motions: 0 as the second source means a label, 1 as the first
WEAKEST = (0.1, 0.5)  # translation and rotation of the second source, over those of its labels
SHIFT = 3.0  # timestep shift, in pre-training and sampling


@torch.no_grad()
def encode(codec: AutoencoderKLWan, videos: Tensor) -> Tensor:
    """Return normalised latents (B, C, F, H, W) of videos in [0, 1]."""
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (codec.config.latents_mean, codec.config.latents_std))
    return (codec.encode(videos * 2 - 1).latent_dist.mode() - mean) / std


@torch.no_grad()
def decode(codec: AutoencoderKLWan, latents: Tensor) -> Tensor:
    mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (codec.config.latents_mean, codec.config.latents_std))
    return (codec.decode(latents * std + mean).sample.clamp(-1, 1) + 1) / 2


def scene_cameras(scene: TinyScene, codec: AutoencoderKLWan) -> Tensor:
    """Return (cameras, F, 12) poses in metres relative to the scene's start, one per latent frame of the codec."""
    relative = torch.linalg.inv(scene.poses[:, :1]) @ scene.poses
    return torch.stack([camera_tokens(path, codec.config.scale_factor_temporal) for path in relative])


def moved_less(world: WorldSpec, shift: float, turn: float) -> WorldSpec:
    """Return a world of the same draws whose translations and rotations are scaled by `shift` and `turn`."""
    (near, far), (little, much) = world.translation, world.rotation
    return dataclasses.replace(world, translation=(shift * near, shift * far), rotation=(turn * little, turn * much))


class Probe:
    """Held-out conditions, and their true videos at every motion of LADDER."""

    def __init__(self, codec: AutoencoderKLWan, world: WorldSpec, conditions: int = 24) -> None:
        self.codec = codec
        pairs = [(make_scene(world, "probe", n), n % len(PRESETS)) for n in range(conditions)]
        self.cameras = torch.stack([scene_cameras(scene, codec)[c] for scene, c in pairs])
        self.truth = torch.cat([render_views(world, [scene], [c]) for scene, c in pairs])
        sources = torch.cat(
            [render_views(world, [scene], [(c + 1 + n % 9) % 10]) for n, (scene, c) in enumerate(pairs)]
        )
        self.source = encode(codec, sources)
        self.captions = torch.tensor([CAPTIONS.index(caption(video)) for video in self.truth])
        self.ladder = torch.stack([self._motions(world, n, c) for n, (_, c) in enumerate(pairs)])
        self.ceiling_db = float(psnr_db(decode(codec, encode(codec, self.truth)), self.truth).mean())

    @staticmethod
    def _motions(world: WorldSpec, number: int, camera: int) -> Tensor:
        """Return (motions, 3, T, h, w): the scene along its path at every motion of LADDER."""
        scenes = []
        for place in LADDER.tolist():
            shift, turn = (low + (1 - low) * place for low in WEAKEST)
            scenes.append(make_scene(moved_less(world, shift, turn), "probe", number))
        return render_views(world, scenes, [camera])

    @torch.no_grad()
    def measure(self, model: nn.Module, text: Tensor, copies: int = 4, steps: int = 12) -> dict[str, float]:
        """Sample `copies` videos per condition by ODE and compare them with the videos of LADDER.

        Returns PSNR against the truth, its ceiling (the codec's own) and against the closest video; and of the closest
        videos' places on LADDER their mean, mean standard deviation within a condition, and the shares above 0.7 and
        below 0.3.
        """
        rows = torch.arange(len(self.truth)).repeat_interleave(copies)
        noise = torch.randn(len(rows), *self.source.shape[1:], generator=generator("probe"))
        conditioning = self.source[rows], self.cameras[rows], text[self.captions[rows]]
        videos = decode(self.codec, ode(model, noise, *conditioning, steps))
        error = (videos[:, None, :, -4:] - self.ladder[rows][:, :, :, -4:]).square().mean(dim=(2, 3, 4, 5))
        chosen = LADDER[error.argmin(dim=1)].view(-1, copies)
        return {
            "psnr_db": float(psnr_db(videos, self.truth[rows]).mean()),
            "ceiling_db": self.ceiling_db,
            "best_psnr_db": float((-10 * error.min(dim=1).values.log10()).mean()),
            "motion_mean": float(chosen.mean()),
            "motion_group_std": float(chosen.std(dim=1).mean()),
            "share_as_first": float((chosen > 0.7).float().mean()),
            "share_as_second": float((chosen < 0.3).float().mean()),
        }


def ode(model: nn.Module, latents: Tensor, source: Tensor, cameras: Tensor, text: Tensor, steps: int) -> Tensor:
    sigmas = flow_sigmas(steps, SHIFT)
    for i in range(steps):
        latents = latents + (sigmas[i + 1] - sigmas[i]) * predict(
            model, latents, sigmas[i].expand(len(latents)), source, cameras, text
        )
    return latents


def predict(model: nn.Module, latents: Tensor, sigma: Tensor, source: Tensor, cameras: Tensor, text: Tensor) -> Tensor:
    """Return the velocity (B, C, F, H, W) of the target latents."""
    hidden = torch.cat([latents, source], dim=2)
    return model(hidden, 1000 * sigma, text, cameras)[0][:, :, : latents.shape[2]]
