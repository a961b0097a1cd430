"""The records that travel through a run, with the shape of every field.

Letters: B rows (samples) of a batch, K stochastic (trained) steps, C F H W latent channels, frames, height, width,
L D prompt tokens and width, T video frames, h w video rows and columns. Latents follow
`latents = (1 - sigma) * clean + sigma * noise`, with `velocity = noise - clean`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

RowsType = TypeVar("RowsType", bound="Rows")
WAN_FPS = 16.0  # frames per second of Wan2.1 (arXiv 2503.20314); of Wan2.2 TI2V-5B 24


class Depth(NamedTuple):
    """Distances along the optical axis in metres, of some frames of a video."""

    maps: Tensor  # (n, h, w) fp32 of the (resized, cropped) video; (1, 1, 1) one number for all of the scene
    frames: Tensor  # (n,) int64 the frame of each

    def at(self, frames: Sequence[int]) -> Tensor:
        """Return the maps (F, h, w) that are nearest to F frames; (1, h, w) where there is one for all."""
        if len(self.maps) == 1:
            return self.maps
        return self.maps[(torch.tensor(frames)[:, None] - self.frames).abs().argmin(1)]


@dataclasses.dataclass(frozen=True)
class Condition:
    """The inputs of one sample, and the ground truth where the data set has it.

    Attributes:
        index: position in the dataset, the condition's id.
        gid: unique id of the draw; the k copies of a draw form one group.
        slot: which of the k copies this is, 0..k-1.
        prompt: text for the video model.
        source_video: (3, T, h, w) fp32 in [0, 1], or None where the video is made from the prompt alone.
        target_poses: (T, 4, 4) float64 CPU OpenCV camera-to-world in metres, relative to the reference camera, or None.
        scene: scene folder relative to the dataset root, e.g. "val/f17_aperture10/scene1"; "" for none.
        source_camera: name of the source camera, e.g. "cam01"; "" for none.
        target_camera: name of the target camera; "" for none.
        source_poses: (T, 4, 4) like target_poses, or None when unknown.
        reference_pose: (4, 4) float64 absolute world pose of the reference camera in metres, or None.
        source_depth: how far away is what the source shows, or None.
        intrinsics: (4,) fp32 fx, fy, cx, cy in pixels of the (resized, cropped) video, or None.
        target_video: (3, T, h, w) fp32 in [0, 1], the synchronised ground truth, or None.
        preset: name of the camera motion when known.
        source_id: names the content of the source video's file, the cache key of its encoding; "" for none.
        wanted_size: (T, h, w) of the video to make where there is no source video, whose size it otherwise has.
        fps: frames per second at which the video plays: those of the source video, or of the video model.
    """

    index: int
    gid: int
    slot: int
    prompt: str
    source_video: Tensor | None = None
    target_poses: Tensor | None = None
    scene: str = ""
    source_camera: str = ""
    target_camera: str = ""
    source_poses: Tensor | None = None
    reference_pose: Tensor | None = None
    source_depth: Depth | None = None
    intrinsics: Tensor | None = None
    target_video: Tensor | None = None
    preset: str | None = None
    source_id: str = ""
    wanted_size: tuple[int, int, int] | None = None
    fps: float = WAN_FPS

    def need_source(self) -> Tensor:
        """Return the source video; ValueError where there is none."""
        if self.source_video is None:
            raise ValueError(f"condition {self.index} ({self.prompt!r:.60}) has no source video")
        return self.source_video

    def need_poses(self) -> Tensor:
        """Return the target poses; ValueError where there are none."""
        if self.target_poses is None:
            raise ValueError(f"condition {self.index} ({self.prompt!r:.60}) has no camera path")
        return self.target_poses

    @property
    def camera(self) -> str:
        """Name of the commanded camera motion: the preset when known, else the target camera."""
        return self.preset or self.target_camera

    @property
    def size(self) -> tuple[int, int, int]:
        """Video frames, rows and columns (T, h, w); conditions of one size can share a call."""
        if self.source_video is None:
            assert self.wanted_size is not None, "a condition without a source video says which size is wanted"
            return self.wanted_size
        frames, height, width = self.source_video.shape[1:]
        return frames, height, width


@dataclasses.dataclass(frozen=True)
class Guidance:
    """Classifier-free guidance on the prompt.

    Attributes:
        scale: factor on the velocity's difference from that of the negative prompt; 1 makes no second call.
        negative_prompt: prompt that guidance leads away from, unused at scale 1.
    """

    scale: float
    negative_prompt: str


@dataclasses.dataclass(frozen=True)
class Rows:
    """A record whose tensors have one row per sample; other fields belong to all samples."""

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Return every tensor by its dotted name; fields that are None are left out."""
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
        """Return a copy with other tensors, by the names and the prefix of `tensors`."""
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

        def picked(tensor: Tensor) -> Tensor:
            if isinstance(selection, slice):
                return tensor[selection]
            return tensor[selection.to(tensor.device, non_blocking=True)]  # indexing by a CPU tensor would wait

        return self.map(picked)

    def to(self: RowsType, device: torch.device | str) -> RowsType:
        """Return a copy on `device`, not waiting for it to arrive; tensors that are there are shared."""
        onto = torch.device(device)
        return self.map(lambda tensor: tensor.to(onto, non_blocking=onto.type != "cpu"))

    @classmethod
    def concatenate(cls: type[RowsType], parts: Sequence[RowsType]) -> RowsType:
        """Join records along the sample dimension; shared fields are those of the first."""
        columns = [part.tensors() for part in parts]
        return parts[0].with_tensors({name: torch.cat([column[name] for column in columns]) for name in columns[0]})


@dataclasses.dataclass(frozen=True)
class Conditioning(Rows):
    """The transformer's inputs other than the latents.

    Attributes:
        prompt_embeds: (B, L, D), zero after the prompt's true length.
        inputs: name -> (B, ...) what else the model reads; of ReCam source_latents (B, C, F, H, W), the clean,
            normalised latents of the source video, and target_cameras (B, F, 12) fp32, row-major 3x4 of the relative
            target poses at every latent frame.
        negative_prompt_embeds: (B, L, D) for guidance, or None at guidance scale 1.
        guidance_scale: guidance of all rows; it travels with them, so that a replay is guided as the rollout was.
    """

    prompt_embeds: Tensor
    inputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    negative_prompt_embeds: Tensor | None = None
    guidance_scale: float = 1.0

    def __len__(self) -> int:
        return self.prompt_embeds.shape[0]


@dataclasses.dataclass(frozen=True)
class Trajectory(Rows):
    """The stochastic steps of a rollout: enough to replay them.

    A row is a sample, or a group of k copies, which all begin with the group's first state; M is K, or k K.

    Attributes:
        states: (B, M+1, C, F, H, W) fp32: the latents before the first stochastic step and after each of them, copy by
            copy.
        log_probs: (B, M) fp32 mean log-density per latent element, in nats.
        steps: (B, K) int64 CPU: the step numbers in the schedule, consecutive; equal within a group.
    """

    states: Tensor
    log_probs: Tensor
    steps: Tensor

    def to(self, device: torch.device | str) -> Trajectory:
        """Return a copy whose latents and log-probabilities are on `device`; `steps` stays on the CPU."""
        return dataclasses.replace(super().to(device), steps=self.steps)


class Replayed(NamedTuple):
    """A stochastic step that an update repeats with one row of the network for each of n rows: their m draws.

    m is n, or n k in the first step of groups, in which their k copies share the latents; row 0's copies come first.
    """

    latents: Tensor  # (n, C, F, H, W) before the step
    steps: Tensor  # (n,) int64 CPU
    drawn: Tensor  # (m, C, F, H, W) after it
    log_probs: Tensor  # (m,) of the draws, under the policy that sampled
    advantages: Tensor | None  # (m,) CPU
    weights: Tensor | None  # (m,) CPU


@dataclasses.dataclass(frozen=True)
class Samples(Rows):
    """n rolled-out samples of one video size on one rank, or n groups: everything an update may learn from.

    A row is a group of k copies where these share their first stochastic step: then the update's first call has a row
    for each group, and all copies learn from it.

    Attributes:
        keys: (n, 3) int64 CPU: gid, slot, index; slot 0 of groups.
        noise_ids: (n, 2) int64 CPU: hashes of the initial noise and of the step noise; where no step is stochastic, of
            the deviation from the command in its place, or twice the first.
        conditioning: n rows.
        trajectory: n rows.
        final_latents: (n, C, F, H, W) fp32 clean latents.
        advantages: (n,) or of groups (n, k) fp32 CPU, normalised within groups; None until `TrainingBatch.take`.
        weights: likewise, sample weights, 0 leaves a sample out of the loss; None until `TrainingBatch.take`.
        copies: samples in a row: 1, or k.
    """

    keys: Tensor
    noise_ids: Tensor
    conditioning: Conditioning
    trajectory: Trajectory
    final_latents: Tensor
    advantages: Tensor | None = None
    weights: Tensor | None = None
    copies: int = 1

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def passes(self) -> int:
        """Replays of the network that repeat all stochastic steps, see `replayed`."""
        return 1 + self.copies * (self.trajectory.steps.shape[1] - 1)

    def replayed(self, number: int) -> Replayed:
        """Return the step of replay `number`: of samples step by step; of groups the first, then copy by copy."""
        recorded, (rows, steps) = self.trajectory, self.trajectory.steps.shape
        copies, column = slice(0, self.copies), 0
        if number:
            copy, column = divmod(number - 1, steps - 1)
            copies, column = slice(copy, copy + 1), column + 1
        draws = recorded.states[:, 1:].unflatten(1, (self.copies, steps))
        own = [None if values is None else values.view(rows, -1) for values in (self.advantages, self.weights)]
        return Replayed(
            latents=draws[:, copies.start, column - 1] if column else recorded.states[:, 0],
            steps=recorded.steps[:, column],
            drawn=draws[:, copies, column].flatten(0, 1),
            log_probs=recorded.log_probs.view(rows, self.copies, steps)[:, copies, column].flatten(),
            advantages=None if own[0] is None else own[0][:, copies].flatten(),
            weights=None if own[1] is None else own[1][:, copies].flatten(),
        )

    def to(self, device: torch.device | str) -> Samples:
        """Return a copy whose conditioning and latents are on `device`; the small columns stay on the CPU."""
        return dataclasses.replace(
            self,
            conditioning=self.conditioning.to(device),
            trajectory=self.trajectory.to(device),
            final_latents=self.final_latents.to(device),
        )


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """A reward's scores of B videos.

    Attributes:
        values: (B,) fp32; meaningless where not valid.
        valid: (B,) bool; a value that could not be computed is masked, never replaced by a default score.
        causes: one text per sample: why there is no value, "" where valid.
        info: name -> (B,) extra measurements for the log, such as PSNR in dB.
        faulty: (B,) bool: not valid because scoring failed (an exception, a timeout, a dead server), not because the
            data to compare with is missing (source poses, target video); None means no sample.
    """

    values: Tensor
    valid: Tensor
    causes: tuple[str, ...]
    info: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    faulty: Tensor | None = None

    @property
    def faults(self) -> Tensor:
        """`faulty` as a (B,) bool tensor; None means no faults."""
        return torch.zeros_like(self.valid) if self.faulty is None else self.faulty

    @property
    def known(self) -> Tensor:
        """`values` as (B,) fp64 on the CPU, NaN where not valid."""
        return self.values.cpu().double().masked_fill(~self.valid.cpu(), torch.nan)


@dataclasses.dataclass(frozen=True)
class ScoredBatch:
    """n samples of one video size on one rank, with their rewards.

    Attributes:
        conditions: the n conditions, in row order.
        samples: n rows.
        rewards: reward name -> result of n rows.
        videos: (b, 3, T, h, w) CPU fp32, the decoded videos of the first b <= n samples, for the log.
        positions: (n,) int64 CPU, rising: each sample's index in the order in which its rank's sampler drew the round.
        groups: the groups that this rank trains on, of this size, where copies share a stochastic step; None where
            samples are trained on, or the rank has no group of this size.
    """

    conditions: tuple[Condition, ...]
    samples: Samples
    rewards: dict[str, RewardResult]
    videos: Tensor
    positions: Tensor
    groups: Samples | None = None

    def __len__(self) -> int:
        return len(self.conditions)


@dataclasses.dataclass(frozen=True)
class TrainingBatch:
    """One rank's n samples or groups for the update of an epoch; every rank holds equally many.

    Parts stay on the device where they were sampled or received; `take` copies one micro-batch at a time.

    Attributes:
        parts: the records that hold the samples. A video size has several when its samples come from several rounds or
            from other ranks. A record may also hold rows that are not trained on.
        table: (2, n) int64 CPU: the part that holds each sample, and its row there.
        advantages: (n,) or of groups (n, k) fp32 CPU, normalised within groups.
        weights: likewise, sample weights, 0 leaves a sample out of the loss.
        as_rolled_out: one part per size, whose rows are the rollout's batches in their order.
    """

    parts: tuple[Samples, ...]
    table: Tensor
    advantages: Tensor
    weights: Tensor
    as_rolled_out: bool = True

    def __post_init__(self) -> None:
        counts = {part.trajectory.steps.shape[1] for part in self.parts}
        assert len(counts) == 1, f"samples of one epoch have equally many stochastic steps, got {sorted(counts)}"

    def __len__(self) -> int:
        return self.table.shape[1]

    def sizes(self) -> Tensor:
        """Return (n,) int64: equal numbers mean equal latent shapes, which may share a call."""
        shapes = [tuple(part.final_latents.shape[1:]) for part in self.parts]
        return torch.tensor([shapes.index(shape) for shape in shapes])[self.table[0]]

    def take(self, positions: Tensor, device: torch.device | str) -> Samples:
        """Return the samples at these (b,) positions, all of one size, on `device`, in this order."""
        owners, rows = self.table[:, positions]
        numbers, counts = owners.unique_consecutive(return_counts=True)
        pieces = zip(numbers.tolist(), rows.split(counts.tolist()), strict=True)
        samples = Samples.concatenate([self.parts[number].rows(own) for number, own in pieces])
        advantages, weights = self.advantages[positions], self.weights[positions]
        return dataclasses.replace(samples, advantages=advantages, weights=weights).to(device)
