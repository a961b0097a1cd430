"""What travels through a run, with the shape of every field.

Letters: B rows (samples) of a batch, K stochastic (trained) steps, C F H W latent channels, frames, height, width,
L D prompt tokens and width, T video frames, h w video rows and columns. Latents follow
`latents = (1 - sigma) * clean + sigma * noise`, with `velocity = noise - clean`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Condition:
    """Everything one sample is asked to do, and what is known of the right answer.

    Attributes:
        index: position in the dataset, the condition's id.
        gid: unique id of the draw; the k copies of a draw form one group.
        slot: which of the k copies this is, 0..k-1.
        prompt: text for the video model.
        source_video: (3, T, h, w) fp32 in [0, 1].
        target_poses: (T, 4, 4) float64 CPU OpenCV camera-to-world in metres, relative to the reference camera.
        scene: scene folder relative to the dataset root, e.g. "val/f17_aperture10/scene1".
        source_camera: name of the source camera, e.g. "cam01".
        target_camera: name of the target camera.
        source_poses: (T, 4, 4) like target_poses, or None when unknown.
        reference_pose: (4, 4) float64 absolute world pose of the reference camera in metres, or None.
        intrinsics: (4,) fp32 fx, fy, cx, cy in pixels of the (resized, cropped) video, or None.
        target_video: (3, T, h, w) fp32 in [0, 1], the synchronised ground truth, or None.
        preset: name of the camera motion when known.
    """

    index: int
    gid: int
    slot: int
    prompt: str
    source_video: Tensor
    target_poses: Tensor
    scene: str
    source_camera: str
    target_camera: str
    source_poses: Tensor | None = None
    reference_pose: Tensor | None = None
    intrinsics: Tensor | None = None
    target_video: Tensor | None = None
    preset: str | None = None


@dataclasses.dataclass(frozen=True)
class Conditioning:
    """What the transformer is given beside latents; every tensor's first dimension is the sample.

    Attributes:
        prompt_embeds: (B, L, D), zero after the prompt's true length.
        source_latents: (B, C, F, H, W) clean, normalised latents of the source video.
        target_cameras: (B, F, 12) fp32, row-major 3x4 of the relative target poses at every latent frame.
        negative_prompt_embeds: (B, L, D) for guidance, or None at guidance scale 1.
    """

    prompt_embeds: Tensor
    source_latents: Tensor
    target_cameras: Tensor
    negative_prompt_embeds: Tensor | None = None

    def __len__(self) -> int:
        return self.target_cameras.shape[0]

    def rows(self, selection: slice | Tensor) -> Conditioning:
        """Return the selected samples."""
        return self._map(lambda tensor: tensor[selection])

    def to(self, device: torch.device | str) -> Conditioning:
        """Return a copy on `device`; free when already there."""
        return self._map(lambda tensor: tensor.to(device))

    def _map(self, function: Callable[[Tensor], Tensor]) -> Conditioning:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        mapped: dict[str, Any] = {name: None if v is None else function(v) for name, v in values.items()}
        return Conditioning(**mapped)

    @staticmethod
    def concatenate(parts: Sequence[Conditioning]) -> Conditioning:
        """Join batches of one structure along the sample dimension."""
        joined: dict[str, Any] = {}
        for field in dataclasses.fields(Conditioning):
            values = [getattr(part, field.name) for part in parts]
            joined[field.name] = None if values[0] is None else torch.cat(values)
        return Conditioning(**joined)


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """The remembered part of a rollout.

    Attributes:
        states: (B, M, C, F, H, W) fp32: the latents before and after every stochastic step, each stored once
            (M = K + 1 for a contiguous window).
        positions: for each of the K stochastic steps, where its `latents` stand in `states`; its `next_latents` are
            the following entry.
        steps: the K step numbers in the schedule.
        log_probs: (B, K) fp32 mean log-density per latent element, in nats.
        final_latents: (B, C, F, H, W) fp32 clean latents at the end of the rollout.
        noise_ids: (B, 2) int64 hashes of each sample's initial noise and step noise, to find copies that are not.
    """

    states: Tensor
    positions: tuple[int, ...]
    steps: tuple[int, ...]
    log_probs: Tensor
    final_latents: Tensor
    noise_ids: Tensor

    @property
    def latents(self) -> Tensor:
        """(B, K, C, F, H, W) before each stochastic step."""
        return self.states[:, list(self.positions)]

    @property
    def next_latents(self) -> Tensor:
        """(B, K, C, F, H, W) after each stochastic step."""
        return self.states[:, [position + 1 for position in self.positions]]


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """What a reward says of B videos.

    Attributes:
        values: (B,) fp32; meaningless where not valid.
        valid: (B,) bool; a value that could not be computed is masked, never replaced by a default score.
        causes: one text per sample, "" where valid, else why there is no value.
        info: name -> (B,) extra measurements for the log, such as PSNR in dB.
    """

    values: Tensor
    valid: Tensor
    causes: tuple[str, ...]
    info: dict[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """B rolled-out and scored samples of one rank.

    Attributes:
        conditions: the B conditions, in row order.
        conditioning: what the transformer was given, B rows.
        trajectory: the remembered steps.
        rewards: reward name -> result of B rows.
    """

    conditions: tuple[Condition, ...]
    conditioning: Conditioning
    trajectory: Trajectory
    rewards: dict[str, RewardResult]


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """What the update replays: one rank's rows of an epoch.

    Attributes:
        conditioning: N rows.
        trajectory: N rows.
        advantages: (N,) fp32, group-normalised.
        weights: (N,) fp32 sample weights; 0 leaves a sample out of the loss.
        gids: (N,) int64 group of every row, for messages.
    """

    conditioning: Conditioning
    trajectory: Trajectory
    advantages: Tensor
    weights: Tensor
    gids: Tensor
