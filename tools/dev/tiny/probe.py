"""Measures the tiny model during pre-training: its picture, and how far its cameras are from what they were told."""

from __future__ import annotations

import itertools

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor, nn

from flow_grpo.data.rooms import LABELLED, SOURCES, UNLABELLED, UNSEEN
from flow_grpo.data.tiny_world import FURNISHED, TinyScene, caption, make_scene, render_views
from flow_grpo.maths.keys import generator
from flow_grpo.maths.poses import camera_tokens, relative, rot_err, trans_err
from flow_grpo.maths.room import stack_rooms
from flow_grpo.maths.schedule import flow_sigmas
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import TIMESTEPS
from flow_grpo.rewards.room.room_fit import make_viewpoints
from flow_grpo.rewards.room.room_pose import estimate_poses
from flow_grpo.rewards.target_view import psnr_db
from tools.dev.tiny.text import CAPTIONS

KINDS = {"labelled": (*LABELLED,), "unlabelled": (*UNLABELLED,), "unseen": (*UNSEEN,)}
CONDITIONS = 24  # of each kind
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
    paths = relative(scene.poses[:, 0], scene.poses)
    return torch.stack([camera_tokens(path, codec.config.scale_factor_temporal) for path in paths])


class Probe:
    """Conditions in rooms that no training step sees, for each of KINDS."""

    def __init__(self, codec: AutoencoderKLWan) -> None:
        self.codec = codec
        names = [names[n % len(names)] for names in KINDS.values() for n in range(CONDITIONS)]
        sources = [(*SOURCES,)[n % len(SOURCES)] for n in range(len(names))]
        scenes = [make_scene(FURNISHED, "probe", n, pair) for n, pair in enumerate(zip(sources, names, strict=True))]
        films = torch.cat([render_views(FURNISHED, [scene], [0, 1]) for scene in scenes]).unflatten(0, (-1, 2))
        self.source, self.truth = encode(codec, films[:, 0]), films[:, 1]
        self.cameras = torch.stack([scene_cameras(scene, codec)[1] for scene in scenes])
        self.captions = torch.tensor([CAPTIONS.index(caption(film)) for film in films[:, 0]])
        starts = torch.stack([scene.poses[1, 0] for scene in scenes])
        self.viewpoints = make_viewpoints(stack_rooms([s.room for s in scenes]), starts, FURNISHED.intrinsics())
        self.paths = relative(starts, torch.stack([scene.poses[1] for scene in scenes]))
        self.ceiling = self.judge(decode(codec, encode(codec, self.truth)))

    def judge(self, videos: Tensor) -> dict[str, float]:
        """Return the means of PSNR in dB, TransErr in metres, RotErr in degrees and residual of each kind."""
        found = estimate_poses(videos, self.viewpoints)
        columns = {
            "psnr_db": psnr_db(videos, self.truth),
            "trans_err_m": trans_err(self.paths, found.poses).mean(-1),
            "rot_err_deg": rot_err(self.paths, found.poses).rad2deg().mean(-1),
            "residual": found.residual.mean(-1),
        }
        return {
            f"{kind}_{name}": float(values.unflatten(0, (len(KINDS), -1))[row].mean())
            for row, kind in enumerate(KINDS)
            for name, values in columns.items()
        }

    @torch.no_grad()
    def measure(self, model: nn.Module, text: Tensor, steps: int = 8) -> dict[str, float]:
        """Sample a video of each condition by ODE and judge it; beside it stands what the codec alone would do."""
        latents = torch.randn(self.source.shape, generator=generator("probe"))
        inputs = {"source_latents": self.source, "target_cameras": self.cameras}
        for sigma, after in itertools.pairwise(flow_sigmas(steps, SHIFT)):
            timesteps = TIMESTEPS * sigma.expand(len(latents))
            latents = latents + (after - sigma) * RECAM.call(model, latents, timesteps, text[self.captions], inputs)
        videos = decode(self.codec, latents)
        return self.judge(videos) | {f"codec_{name}": value for name, value in self.ceiling.items() if "label" in name}
