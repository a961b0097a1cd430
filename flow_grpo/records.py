"""What travels through a run, with the shape of every field.

Letters: B rows (samples) of a batch, K stochastic (trained) steps, C F H W latent channels, frames, height, width,
L D prompt tokens and width, T video frames, h w video rows and columns. Latents follow
`latents = (1 - sigma) * clean + sigma * noise`, with `velocity = noise - clean`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

RowsType = TypeVar("RowsType", bound="Rows")


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
        source_id: names the content of the source video's file, or "" for none: what is encoded of it is kept by this.
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
    source_id: str = ""

    @property
    def camera(self) -> str:
        """The kind of camera it asks for: the motion's name when known, else the target camera's."""
        return self.preset or self.target_camera

    @property
    def size(self) -> tuple[int, int, int]:
        """Video frames, rows and columns (T, h, w); conditions of one size can share a call."""
        frames, height, width = self.source_video.shape[1:]
        return frames, height, width


@dataclasses.dataclass(frozen=True)
class Rows:
    """A record of tensors, or tables of tensors, whose first dimension is the sample; all samples share the rest."""

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return every tensor by its dotted name, those of records inside included; what is None is left out."""
        found: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Rows):
                found |= value.tensors(f"{prefix}{field.name}.")
            elif isinstance(value, dict):
                found |= {f"{prefix}{field.name}.{name}": tensor for name, tensor in value.items()}
            elif isinstance(value, Tensor):
                found[prefix + field.name] = value
        return found

    def with_tensors(self: RowsType, tensors: Mapping[str, Tensor], prefix: str = "") -> RowsType:
        """Return a copy with other tensors, by the names that `tensors` gives."""
        changed: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Rows):
                changed[field.name] = value.with_tensors(tensors, f"{prefix}{field.name}.")
            elif isinstance(value, dict):
                changed[field.name] = {name: tensors[f"{prefix}{field.name}.{name}"] for name in value}
            elif isinstance(value, Tensor):
                changed[field.name] = tensors[prefix + field.name]
        return dataclasses.replace(self, **changed)

    def map(self: RowsType, function: Callable[[Tensor], Tensor]) -> RowsType:
        """Return a copy with every tensor passed through `function`."""
        return self.with_tensors({name: function(tensor) for name, tensor in self.tensors().items()})

    def rows(self: RowsType, selection: slice | Tensor) -> RowsType:
        """Return the selected samples; a slice shares memory, an index tensor copies."""
        return self.map(lambda tensor: tensor[selection])

    def to(self: RowsType, device: torch.device | str) -> RowsType:
        """Return a copy on `device`; free when already there."""
        return self.map(lambda tensor: tensor.to(device))

    @classmethod
    def concatenate(cls: type[RowsType], parts: Sequence[RowsType]) -> RowsType:
        """Join records of one structure along the sample dimension; shared fields are those of the first."""
        columns = [part.tensors() for part in parts]
        return parts[0].with_tensors({name: torch.cat([column[name] for column in columns]) for name in columns[0]})


@dataclasses.dataclass(frozen=True)
class Conditioning(Rows):
    """What the transformer is given beside latents.

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


@dataclasses.dataclass(frozen=True)
class Trajectory(Rows):
    """The remembered part of a rollout: enough to replay it.

    Attributes:
        states: (B, M, C, F, H, W) fp32: the latents before and after every stochastic step, each stored once
            (M = K + 1 for a contiguous window).
        log_probs: (B, K) fp32 mean log-density per latent element, in nats.
        positions: for each of the K stochastic steps, where its `latents` stand in `states`; its `next_latents` are
            the following entry.
        steps: the K step numbers in the schedule.
    """

    states: Tensor
    log_probs: Tensor
    positions: tuple[int, ...]
    steps: tuple[int, ...]

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
        faulty: (B,) bool, not valid because measuring failed (an exception, a timeout, a dead server), and not for lack
            of what it measures by (source poses, a true view); None: nowhere.
    """

    values: Tensor
    valid: Tensor
    causes: tuple[str, ...]
    info: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    faulty: Tensor | None = None

    @property
    def faults(self) -> Tensor:
        """(B,) bool: `faulty`, written out."""
        return torch.zeros_like(self.valid) if self.faulty is None else self.faulty


@dataclasses.dataclass(frozen=True)
class Experience(Rows):
    """What one rank keeps of n samples of one size, enough to replay them.

    Attributes:
        keys: (n, 3) int64 CPU: gid, slot, index.
        conditioning: n rows.
        trajectory: n rows.
    """

    keys: Tensor
    conditioning: Conditioning
    trajectory: Trajectory

    def __len__(self) -> int:
        return len(self.keys)

    def to(self, device: torch.device | str) -> Experience:
        """Return a copy on `device`, its keys on the CPU."""
        return Experience(self.keys, self.conditioning.to(device), self.trajectory.to(device))


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """B rolled-out and scored samples of one size on one rank.

    Attributes:
        conditions: the B conditions, in row order.
        positions: where each stands among the samples of its rank and epoch.
        conditioning: what the transformer was given, B rows.
        trajectory: the remembered steps.
        noise_ids: (B, 2) int64 CPU hashes of each sample's initial noise and step noise, to find copies that are not.
        rewards: reward name -> result of B rows.
    """

    conditions: tuple[Condition, ...]
    positions: tuple[int, ...]
    conditioning: Conditioning
    trajectory: Trajectory
    noise_ids: Tensor
    rewards: dict[str, RewardResult]

    @property
    def size(self) -> tuple[int, int, int]:
        """Video frames, rows and columns of all its samples."""
        return self.conditions[0].size

    @property
    def experience(self) -> Experience:
        """What stays of the samples once they are scored; shares memory."""
        keys = torch.tensor([[c.gid, c.slot, c.index] for c in self.conditions], dtype=torch.int64)
        return Experience(keys, self.conditioning, self.trajectory)


@dataclasses.dataclass(frozen=True)
class TrainingPart(Rows):
    """Samples of one size on one rank, with what an epoch learns from them.

    Attributes:
        positions: (n,) int64 CPU: where each stands among the samples the rank trains on; -1 where it does not.
        conditioning: n rows.
        trajectory: n rows.
        advantages: (n,) fp32 CPU, group-normalised.
        weights: (n,) fp32 CPU sample weights; 0 leaves a sample out of the loss.
        gids: (n,) int64 CPU group of every row, for messages.
    """

    positions: Tensor
    conditioning: Conditioning
    trajectory: Trajectory
    advantages: Tensor
    weights: Tensor
    gids: Tensor

    def __len__(self) -> int:
        return len(self.gids)

    def to(self, device: torch.device | str) -> TrainingPart:
        """Return a copy whose conditioning and trajectory are on `device`."""
        conditioning, trajectory = self.conditioning.to(device), self.trajectory.to(device)
        return dataclasses.replace(self, conditioning=conditioning, trajectory=trajectory)


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """What the update replays: one rank's samples of an epoch, as many on every rank.

    The parts stay where they were made or arrived; nothing is copied before its micro-batch is due.

    Attributes:
        parts: records that hold the samples at positions 0..length-1 between them, several of one size where samples
            were drawn in several rounds or came from other ranks.
        length: how many samples.
        as_rolled_out: one part per size, and the rows of each are those of the rollout's batches, in their order.
    """

    parts: tuple[TrainingPart, ...]
    length: int
    as_rolled_out: bool = True

    def __post_init__(self) -> None:
        steps = {(part.trajectory.steps, part.trajectory.positions) for part in self.parts}
        assert len(steps) == 1, f"samples of one epoch share their stochastic steps, got {sorted(steps)}"

    def __len__(self) -> int:
        return self.length

    def sizes(self) -> Tensor:
        """Return (length,) int64: which samples may share a call; equal numbers mean equal latent shapes."""
        shapes = [tuple(part.trajectory.states.shape[1:]) for part in self.parts]
        numbers = torch.full((self.length,), -1)
        for part, shape in zip(self.parts, shapes, strict=True):
            numbers[part.positions[part.positions >= 0]] = shapes.index(shape)
        assert (numbers >= 0).all(), f"no part holds the samples at {(numbers < 0).nonzero().flatten().tolist()}"
        return numbers

    def take(self, positions: Tensor, device: torch.device | str) -> TrainingPart:
        """Return the samples at some positions, all of one size, as one record on `device`."""
        found = [(part, torch.isin(part.positions, positions).nonzero().flatten()) for part in self.parts]
        return TrainingPart.concatenate([part.rows(rows) for part, rows in found if len(rows)]).to(device)
