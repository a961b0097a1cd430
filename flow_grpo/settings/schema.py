"""Names and types of every knob, read-only; `config/base.py` holds the defaults, `config_checks.py` the bounds."""

from __future__ import annotations

import dataclasses

Schedule = tuple[tuple[int, float], ...]  # (epoch, weight) points by rising epoch
Gate = tuple[str, float]  # the reward that holds the gate, and its least value at which a copy passes


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Which videos: a folder in MultiCamVideo layout."""

    root: str  # dataset folder
    tiny_world: str  # "" or the name of a tiny-world preset that is generated into `root` when missing
    train_split: str
    eval_split: str
    num_frames: int  # 4n+1
    height: int  # pixels
    width: int  # pixels
    buckets: tuple[str, ...]  # "FRAMESxHEIGHTxWIDTH" each; empty delivers the one size above
    prompt: str  # used where no metadata.csv gives a caption
    reference: str  # "source" | "target": whose first frame is the origin of the poses
    exclude: str  # file, or ""
    num_workers: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Which policy."""

    path: str  # diffusers-layout folder
    dtype: str  # "fp32" | "bf16": frozen weights and autocast
    trained: str  # "lora" | "camera" | "attention" | "full"
    lora_rank: int
    lora_alpha: int
    lora_targets: str  # regular expression over module names
    lora_full_modules: tuple[str, ...]  # modules trained in full beside the LoRA
    gradient_checkpointing: bool
    max_prompt_tokens: int
    encodings: str  # "" or the folder where encodings are kept
    vae_tiling: bool
    vae_slicing: bool
    offload: bool  # frozen parts to CPU memory while they are not in use
    attention_backend: str  # "native" | another of diffusers' names
    compile: bool


@dataclasses.dataclass(frozen=True)
class SampleConfig:
    """How the k copies of a condition are tried."""

    k: int
    num_image_per_prompt: int  # == k
    train_batch_size: int  # samples per rank and batch
    num_batches_per_epoch: int
    num_steps: int
    shift: float
    sde: str  # "flow" | "constant" | "linear" | "cps"
    noise_level: float
    max_step_std: float | None
    sde_steps: tuple[int, ...]  # steps that may be stochastic
    sde_window: int  # contiguous steps drawn per epoch out of sde_steps; 0 takes all
    guidance_scale: float
    negative_prompt: str
    layout: str  # "spread" | "shuffled" | "contiguous"
    offload: bool  # remembered steps to CPU memory until the update
    same_initial_noise: bool  # the copies of a group share their first noise

    @property
    def expanded_batch_size(self) -> int:
        """Samples of a rank per epoch: with whole groups on a rank, its conditions times the k copies of each."""
        return self.train_batch_size * self.num_batches_per_epoch


@dataclasses.dataclass(frozen=True)
class RewardConfig:
    """Which rewards, and how they become advantages."""

    weights: dict[str, float]  # reward name -> weight
    schedules: dict[str, Schedule]  # reward name -> its weight over the epochs, in place of the one above
    gates: dict[str, Gate]  # reward name -> what decides whether it counts
    remote: dict[str, str]  # name -> address of the server that scores it, as "remote:<name>"
    remote_timeout: float  # seconds
    most_faults: float  # share of a step's samples
    overlap: bool
    adv_norm: str  # "group" | "batch" | "batch_centered" | "max_group" | "none"
    adv_eps: float
    adv_ddof: int
    flat_eps: float


@dataclasses.dataclass(frozen=True)
class DynamicSamplingConfig:
    """What happens when groups teach nothing."""

    enabled: bool
    max_resample_times: int  # rounds after the first; the last one counts
    policy: str  # "fallback_original" | "fill_flat" | "pad" | "rebalance" | "raise"
    metric: str  # "" or the one reward that says which groups are flat
    skip_step_if_all_flat: bool


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How the policy is moved."""

    batch_size: int  # samples per rank and micro-batch of the update
    sharding: str  # "ddp" | "zero2" | "fsdp2"
    updates_per_epoch: int  # optimizer steps per epoch
    learning_rate: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    weight_decay: float
    max_grad_norm: float
    max_bad_steps: int  # optimizer steps in a row that may be left out
    clip_range: float
    adv_clip: float
    kl_coef: float
    step_weight: str  # "none" | "inverse_gain"
    guard: bool  # GRPO-Guard ratio
    old_log_prob: str  # "auto" | "rollout" | "recompute" | "detach"
    ema_decay: float  # 0 switches EMA off


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation with fixed conditions and noise, deterministic sampling."""

    every: int  # epochs between evaluations; 0 evaluates only before and after
    num_conditions: int  # in all, over all ranks
    batch_size: int  # samples per rank and call
    num_steps: int
    gold: str  # "" | "room_pose": estimator of the camera that no reward uses
    videos: int  # how many evaluation videos are written


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
    """When to save and how much to keep."""

    every: int  # epochs
    keep: int
    best: str  # held-out metric whose best checkpoint is kept as well, "-" before one where less is better; "" none


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """How long ranks wait for each other, in seconds."""

    control_s: float  # in exchanges between CPUs
    device_s: float  # in exchanges between devices
    collective_s: float  # what the vendor's library allows one of those; 0 leaves its own
    dead_s: float  # without a sign of life
    silent_s: float  # without progress


@dataclasses.dataclass(frozen=True)
class Config:
    """One run."""

    run_name: str  # folder under output_root; "" makes one from recipe and time
    output_root: str
    seed: int
    device: str  # "auto" | "npu" | "cuda" | "cpu"
    deterministic: bool
    num_threads: int  # CPU threads per rank; 0 leaves torch's choice
    num_epochs: int
    max_minutes: float  # stop training after this long; 0 means no limit
    debug: bool
    resume: str  # "" | "auto" | a checkpoint folder
    doctor: str  # "fast" | "off": checks before the first epoch
    dry_run: bool
    trackers: tuple[str, ...]  # of "wandb", "tensorboard"
    log_videos_every: int  # epochs between training videos; 0 never
    data: DataConfig
    model: ModelConfig
    sample: SampleConfig
    reward: RewardConfig
    dynamic_sampling: DynamicSamplingConfig
    train: TrainConfig
    eval: EvalConfig
    checkpoint: CheckpointConfig
    distributed: DistributedConfig
