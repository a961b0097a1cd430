"""Every knob of a run, in one place: type, default, bounds or choices, and meaning with its unit.

`Config` is the checked, read-only configuration of a run. A knob is one field: pydantic enforces its type and bounds
when a recipe is loaded, `config/base.py` takes its default, `--help` and docs/config.md its meaning. Rules between
knobs are in checks.py. Letters: W ranks, k copies of a condition, S denoising steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_type_hints

import pydantic

from flow_grpo.settings.values import (
    MOST,
    MOST_FRAMES,
    MOST_PIXELS,
    SIZE_UNIT,
    Address,
    Bool,
    Bucket,
    Float,
    Frames,
    Gate,
    Int,
    Pattern,
    Place,
    Rule,
    RunName,
    Schedule,
    ServerName,
    Split,
    Steps,
    Text,
    Trackers,
    Weight,
)

LONGEST = 10**7  # seconds that a process can be told to wait: four months
SIDE = {"ge": 8, "le": MOST_PIXELS, "multiple_of": SIZE_UNIT}  # of a video


def knob(default: Any, meaning: str, **bounds: Any) -> Any:
    """Declare a knob; `bounds` are pydantic's: ge, gt, le, lt, multiple_of, min_length."""
    metadata = {"description": meaning, **bounds}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Section:
    """Settings that belong together. Built by hand, as in tests, it is not checked; `load_config` checks all."""

    __pydantic_config__ = pydantic.ConfigDict(allow_inf_nan=False)


@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """Which videos are trained and evaluated on."""

    root: Place = knob("data/MultiCamVideo-Dataset", "data set folder in MultiCamVideo layout", min_length=1)
    tiny_world: Text = knob("", "name of a synthetic world to render into root where that is missing; '' never")
    train_split: Split = knob("train", "folder below root with the training scenes", min_length=1)
    eval_split: Split = knob("val", "folder below root with the held-out scenes", min_length=1)
    prompts: Place = knob(
        "",
        "for a model that needs no source video: prompts to train on, a .txt with one a line, a .csv with a column "
        "prompt or a .jsonl with a field prompt; '' trains on the videos of root",
    )
    eval_prompts: Place = knob("", "held-out prompts, a file likewise")
    tune_scenes: Int = knob(
        0,
        "scenes of train_split, or of the prompts, that are never trained on, chosen by a hash of their names: "
        "eval.split='tune' measures them, so that knobs are not chosen on the scenes that are reported",
        ge=0,
    )
    report_scenes: Int = knob(
        0, "others likewise, which eval.split='report' measures; 0 measures eval_split or eval_prompts", ge=0
    )
    num_frames: Frames = knob(81, "frames of a video, 4n+1", ge=5, le=MOST_FRAMES)
    height: Int = knob(480, "height in pixels after resizing and centre cropping", **SIDE)
    width: Int = knob(832, "width in pixels after resizing and centre cropping", **SIDE)
    fps: Float = knob(
        16.0,
        "frames per second of videos made of prompts alone: 16 for Wan2.1, 24 for Wan2.2 TI2V-5B; others play at their "
        "source's",
        gt=0,
        le=240,
    )
    buckets: tuple[Bucket, ...] = knob(
        (),
        "several video sizes FRAMESxHEIGHTxWIDTH instead of the one above: a scene gets the longest that its first "
        "video fills, among those the closest aspect ratio",
    )
    prompt: Text = knob("a scene filmed by a moving camera", "caption of videos that no metadata.csv gives one")
    reference: Literal["source", "target"] = knob("source", "video whose first camera is the origin of all poses")
    exclude: Place = knob("", "verdicts file of tools/check_sources.py: scenes whose poses cannot be measured; '' none")
    num_workers: Int = knob(2, "data loader processes per rank; they touch CPU tensors only", ge=0, le=1024)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Section):
    """Which policy, and which of its weights are trained."""

    kind: Text = knob(
        "recam", "video model: a name in models/registry.py's VIDEO_MODELS, or FILE.py:NAME", min_length=1
    )
    path: Place = knob("models/recammaster-wan2.1-1.3b", "model folder in diffusers layout", min_length=1)
    dtype: Literal["fp32", "bf16"] = knob("bf16", "of frozen weights and autocast; trained weights stay fp32")
    trained: Literal["lora", "camera", "attention", "full"] = knob(
        "lora", "trained weights: adapters | cam_encoder | attn1, cam_encoder and projector | all"
    )
    lora_rank: Int = knob(64, "rank of every LoRA adapter", ge=1, le=65536)
    lora_alpha: Int = knob(64, "adapters are scaled by lora_alpha / lora_rank", ge=1, le=MOST)
    lora_targets: Pattern = knob(
        r"blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)",
        "regular expression that matches the whole names of the modules to adapt; the default is self-attention",
    )
    lora_full_modules: tuple[Text, ...] = knob(("cam_encoder",), "last names of further modules, trained in full")
    adapter: Place = knob("", "adapter to start from: a run's folder adapter/, or LoRA of others, a .safetensors file")
    boundary_ratio: Float = knob(
        0.0,
        "noise level below which the starting weights answer, as in diffusers' WanPipeline; 0 nowhere",
        ge=0,
        le=1,
    )
    checkpointing: Literal["none", "blocks", "keep_attention", "auto"] = knob(
        "blocks",
        "what the backward pass recomputes, for less memory: nothing | every block | every block without its "
        "attention, for long videos | what the planner finds fastest of these that fits the device",
    )
    round_timestep: Bool = knob(False, "round timesteps to bf16, by up to 2 of 1000, as ReCamMaster's code always does")
    max_prompt_tokens: Int = knob(512, "tokens at which a prompt is truncated", ge=1, le=MOST)
    encodings: Place = knob("", "folder that caches encoded prompts and source videos across runs; '' in memory only")
    vae_tiling: Bool = knob(False, "encode and decode in overlapping tiles: less memory, slightly different pixels")
    vae_tiles: Literal["diffusers", "recammaster"] = knob(
        "diffusers",
        "pixels of those tiles, with an 8x codec: 256x256, a new one every 192 | 240x416, a new one every 120x208, in "
        "which ReCamMaster's own code always samples",
    )
    vae_slicing: Bool = knob(True, "encode and decode one video at a time: less memory")
    vae_dtype: Literal["fp32", "tf32", "bf16"] = knob(
        "fp32",
        "the codec's numbers: fp32 | fp32 with rounded convolutions on CUDA (TF32) and NPU (HF32), on an H100 three "
        "times as fast and 0.1 % off | bf16, five times as fast and 2 % off",
    )
    reward_decoder: Place = knob(
        "",
        "file of a small decoder (taehv's layout, such as taew2_1.safetensors) for the videos that training scores; "
        "evaluation decodes in full, and so does a run that finds it to rank copies otherwise",
    )
    offload: Bool = knob(False, "keep codec, text encoder and reference weights in CPU memory while they are unused")
    attention_backend: Text = knob("native", "attention kernel by its name in diffusers, in rollout and update")
    compile: Bool = knob(False, "torch.compile the blocks where possible; in bf16 needs train.old_log_prob='detach'")


@dataclasses.dataclass(frozen=True)
class SampleConfig(Section):
    """How videos are sampled: groups of k copies of a condition, noise and guidance."""

    # k >= 2: every normalisation subtracts the group's mean, which is the reward itself for a group of one.
    k: Int = knob(4, "group size: videos sampled from one condition, whose rewards are compared", ge=2, le=MOST)
    num_image_per_prompt: Int = knob(4, "follows k; exists so that command lines of other projects get a clear error")
    train_batch_size: Int = knob(2, "samples per rank and batch; W times this must be a multiple of k", ge=1, le=MOST)
    num_batches_per_epoch: Int = knob(2, "batches per rank and epoch", ge=1, le=MOST)
    num_steps: Int = knob(16, "S, denoising steps of a rollout", ge=2, le=1000)  # the model's time has 1000 ticks
    shift: Float = knob(5.0, "time shift of the schedule; ReCamMaster was trained and is sampled with 5", gt=0, le=MOST)
    sde: Literal["flow", "constant", "linear", "cps", "ode"] = knob(
        "constant", "noise form of a stochastic step (maths/sde); ode has none, for train.objective='forward'"
    )
    noise_level: Float = knob(0.3, "strength of that noise, in the unit of sde", gt=0)
    max_step_std: Float | None = knob(None, "bound on a step's standard deviation; none for no bound", gt=0, le=MOST)
    sde_steps: Steps = knob((1, 2, 3, 4, 5, 6), "denoising steps out of 0..S-2 that may be stochastic")
    sde_window: Int = knob(
        2,
        "stochastic, trained steps of a sample: one of the blocks of so many consecutive steps that sde_steps is cut "
        "into, drawn per group; 0 takes all",
        ge=0,
    )
    window_groups: Int = knob(
        1, "neighbouring groups that share a window: with as many as ranks, none waits for another's later window", ge=1
    )
    tail_steps: Int = knob(
        0,
        "second-order steps after the last stochastic one; 0 follows the schedule, as a run does that finds these to "
        "rank copies otherwise",
        ge=0,
        le=1000,
    )
    ode_calls: Literal["exact", "sparse"] = knob(
        "exact",
        "network calls of a rollout's steps without noise, which no update repeats: exact | sparse: the source is "
        "computed in every second one, attention reads half of the blocks of keys and means of the others; a run that "
        "finds them to rank copies otherwise goes on with exact ones",
    )
    guidance_scale: Float = knob(
        1.0, "classifier-free guidance of rollout and update; at 1 no second call", ge=1, le=MOST
    )
    negative_prompt: Text = knob("", "prompt that guidance leads away from")
    layout: Literal["spread", "shuffled", "contiguous"] = knob(
        "spread", "placement of a group's copies: on different ranks | random | all on one rank"
    )
    offload: Bool = knob(
        False, "keep trajectories in CPU memory; dynamic sampling always does, train.copies without share_prefix"
    )
    same_initial_noise: Bool = knob(False, "the copies of a group share their initial noise; step noise differs")
    share_prefix: Bool = knob(
        False,
        "compute the steps before a group's window and its first stochastic step once for all copies, in rollout and "
        "update; needs same_initial_noise",
    )

    @property
    def expanded_batch_size(self) -> int:
        """Samples of a rank per epoch: with whole groups on a rank, its conditions times the k copies of each."""
        return self.train_batch_size * self.num_batches_per_epoch


@dataclasses.dataclass(frozen=True)
class RewardConfig(Section):
    """Which rewards, and how they become advantages."""

    weights: dict[Text, Weight] = knob(
        {"target_view": 1.0}, "reward, or FILE.py:NAME of an own one -> weight; 0 measures it without training on it"
    )
    schedules: dict[Text, Schedule] = knob(
        {}, "reward -> (epoch, weight) points that replace its weight: linear in between, constant outside"
    )
    gates: dict[Text, Gate] = knob(
        {},
        "reward -> (deciding reward, threshold): copies whose deciding reward is below the threshold rank behind all "
        "that pass",
    )
    remote: dict[ServerName, Address] = knob(
        {},
        "NAME -> http://HOST:PORT of a server that scores the reward remote:NAME; its token comes from the environment "
        "variable FLOW_GRPO_REWARD_TOKEN",
    )
    remote_timeout: Float = knob(120.0, "seconds a server has for one try: twice the slowest request", gt=0, le=86400)
    most_faults: Float = knob(
        0.1,
        "share of an epoch's samples that a weighted reward may fail on (exception, timeout) before the run saves and "
        "stops; failed samples are masked in any case; 1 never stops",
        ge=0,
        le=1,
    )
    overlap: Bool = knob(True, "score a batch, on a CPU decode it too, while the next is sampled; same numbers")
    adv_norm: Literal["group", "batch", "batch_centered", "max_group", "none"] = knob(
        "group",
        "standard deviation that divides an advantage: of its group | of all rewards | of all rewards minus their "
        "group's mean | the largest of any group | none",
    )
    adv_eps: Float = knob(1e-4, "added to that standard deviation, in reward units", gt=0, le=MOST)
    adv_ddof: Int = knob(0, "degrees of freedom subtracted in that standard deviation", ge=0, le=1)
    flat_eps: Float = knob(
        1e-4, "reward units; groups with rewards no further apart are flat: advantages 0", ge=0, le=MOST
    )


@dataclasses.dataclass(frozen=True)
class DynamicSamplingConfig(Section):
    """Sampling fresh conditions until enough groups carry a signal."""

    enabled: Bool = knob(False, "resample flat groups; look at the metrics reward/*_group_range_p50 first")
    max_resample_times: Int = knob(3, "rounds of resampling after an epoch's first; the last one counts", ge=0, le=MOST)
    policy: Literal["fallback_original", "fill_flat", "pad", "rebalance", "raise"] = knob(
        "fallback_original",
        "if still too few groups carry a signal, train on: the first round | valid groups topped up with flat ones | "
        "valid groups repeated | valid groups only | stop the run",
    )
    metric: Text = knob("", "the one reward that decides which groups are flat; '' asks all that have a weight")
    skip_step_if_all_flat: Bool = knob(
        False, "no optimizer step in an epoch without a signal, with or without `enabled`"
    )


@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """How the policy is updated."""

    objective: Text = knob(
        "grpo",
        "what an update minimises: grpo, clipped ratios of stochastic steps; forward, advantage-weighted flow matching",
    )
    forward_levels: Int = knob(2, "noise levels at which objective 'forward' trains a sample", ge=1, le=MOST)
    forward_range: Float = knob(0.3, "first share of the schedule that 'forward' draws noise levels from", gt=0, le=1)
    trust_coef: Float = knob(
        0.1, "in objective 'forward', weight of the squared distance to the averaged weights' velocity", ge=0, le=MOST
    )
    batch_size: Int = knob(
        2, "samples, or with sample.share_prefix groups, per rank and micro-batch of the update", ge=1, le=MOST
    )
    sharding: Literal["ddp", "fsdp2"] = knob("ddp", "replicated | FSDP2: weights, gradients and moments sharded")
    context_parallel: Int = knob(1, "ranks in a row that share a sample's tokens (sequence parallelism)", ge=1, le=1024)
    copies: Int = knob(
        0,
        "trained copies of a group: its best and worst, half as many each; 0 all, which with sample.share_prefix costs "
        "no more",
        ge=0,
        multiple_of=2,
    )
    updates_per_epoch: Int = knob(1, "optimizer steps per epoch", ge=1)
    learning_rate: Float = knob(1e-4, "of AdamW, constant after the warm-up", gt=0, le=MOST)
    camera_learning_rate: Float = knob(
        0.0, "of the weights that read the camera (ReCam: cam_encoder, projector); 0 as learning_rate", ge=0, le=MOST
    )
    warmup_steps: Int = knob(0, "optimizer steps over which the learning rates rise linearly; 0 none", ge=0)
    adam_beta1: Float = knob(0.9, "of AdamW", ge=0, lt=1)
    adam_beta2: Float = knob(0.999, "of AdamW", ge=0, lt=1)
    adam_eps: Float = knob(1e-8, "of AdamW", gt=0, le=MOST)
    weight_decay: Float = knob(1e-4, "of AdamW", ge=0, le=MOST)
    max_grad_norm: Float = knob(10.0, "the gradient is clipped to this norm over all trained weights", gt=0, le=MOST)
    max_grad_ratio: Float = knob(
        5.0, "and to this multiple of the median norm of the latest 20 optimizer steps, from the sixth on; 0 off", ge=0
    )
    max_bad_steps: Int = knob(2, "consecutive optimizer steps skipped for a NaN or infinity before the run stops", ge=0)
    stop_if: tuple[Rule, ...] = knob(
        (
            "eval/hacked>0",
            "eval_change/target_view_psnr_db<-3",
            "eval/trans_err_m_valid<0.5",
            "policy/ratio_first_max_abs_log>0.001",
        ),
        "rules METRIC<BOUND or METRIC>BOUND: an epoch in which one holds that did not before training has broken the "
        "policy, and the run saves and stops; '' never",
    )
    clip_range: Float = knob(
        1e-3, "clip range of the ratio around 1; small, as that is a mean over elements", gt=0, lt=1
    )
    adv_clip: Float = knob(5.0, "largest absolute advantage; a group beyond it is scaled down as one", gt=0, le=MOST)
    kl_coef: Float = knob(0.0, "weight of the KL to the initial policy; 0 makes no reference call", ge=0, le=MOST)
    step_weight: Literal["none", "inverse_gain"] = knob("none", "weight of a step's loss: 1 | std / kappa (maths/sde)")
    guard: Bool = knob(False, "GRPO-Guard: ratio without bias, steps weighted by 1 / their length in sigma")
    old_log_prob: Literal["auto", "rollout", "recompute", "detach"] = knob(
        "auto",
        "denominator of the ratio: chosen (the rollout's if batches are the same, else with one update the current "
        "one, with several recomputed) | of the rollout | recomputed before the update | the current one",
    )
    ema_decay: Float = knob(0.0, "per optimizer step, of the averaged weights that evaluation uses; 0 none", ge=0, lt=1)


@dataclasses.dataclass(frozen=True)
class EvalConfig(Section):
    """Held-out evaluation: fixed conditions and noise, deterministic sampling."""

    split: Literal["report", "tune"] = knob(
        "report", "which conditions: to report | of the data.tune_scenes, while knobs are being chosen"
    )
    every: Int = knob(20, "epochs between evaluations; 0 only before and after training", ge=0)
    num_conditions: Int = knob(10, "over all ranks, of as many scenes as there are", ge=1)
    batch_size: Int = knob(2, "samples per rank and call", ge=1, le=MOST)
    num_steps: Int = knob(50, "denoising steps", ge=1, le=1000)
    guidance_scale: Float | None = knob(None, "evaluation's guidance; none takes sample.guidance_scale", ge=1, le=MOST)
    negative_prompt: Text | None = knob(None, "its negative prompt; none takes sample.negative_prompt")
    gold: Literal["", "room_pose", "room_tracks"] = knob(
        "", "camera estimator that no reward uses; room_tracks: furnished tiny world only, room_pose: any tiny world"
    )
    signal_groups: Int = knob(1, "groups per rank that an evaluation samples for policy/credit_share; 0 none", ge=0)
    fixed_conditions: Int = knob(
        24, "training conditions that an evaluation samples as training does, always the same: fixed/; 0 none", ge=0
    )
    videos: Int = knob(4, "videos written per evaluation, at most as many as rank 0 samples", ge=0)


@dataclasses.dataclass(frozen=True)
class CheckpointConfig(Section):
    """When to save, and how much to keep."""

    every: Int = knob(10, "epochs between checkpoints; the last epoch is always saved", ge=1)
    keep: Int = knob(3, "newest checkpoints kept", ge=1)
    best: Text = knob(
        "",
        "held-out metric whose best checkpoint is kept as well, such as eval/target_view, or -eval/rot_err_deg where "
        "less is better; considered in epochs that are both evaluated and saved; '' none",
    )


@dataclasses.dataclass(frozen=True)
class DistributedConfig(Section):
    """How long ranks wait for each other, in seconds; see docs/overnight.md."""

    control_s: Float = knob(3600.0, "seconds for a collective between CPUs: at least 1.5 silent_s", ge=1, le=LONGEST)
    device_s: Float = knob(7200.0, "seconds for one between devices: above the vendor library's", ge=1, le=LONGEST)
    collective_s: Float = knob(
        0.0, "seconds the vendor library allows one (NPU: HCCL_EXEC_TIMEOUT); 0 its own, about 1800", ge=0, le=LONGEST
    )
    dead_s: Float = knob(60.0, "seconds without heartbeat until a rank is dead and all end; 0 never", ge=0, le=LONGEST)
    silent_s: Float = knob(
        1800.0, "seconds without progress before a rank hangs: more than one call of the network", ge=1, le=LONGEST
    )


@dataclasses.dataclass(frozen=True)
class Config(Section):
    """A run as a whole."""

    run_name: RunName = knob("", "folder below output_root; '' makes one from recipe and time")
    output_root: Place = knob("outputs", "folder of all runs", min_length=1)
    seed: Int = knob(0, "seed of every random draw of the run", ge=0)
    device: Literal["auto", "npu", "cuda", "cpu"] = knob("auto", "auto takes the first of npu, cuda, cpu that works")
    deterministic: Bool = knob(False, "use bitwise reproducible kernels, at some cost in speed")
    num_threads: Int = knob(0, "CPU threads per rank; 0 leaves torch's choice", ge=0, le=1024)
    device_tflops: Float = knob(
        0.0, "1e12 operations a second of a device's matrix products, for system/mfu; 0 measures it", ge=0, le=MOST
    )
    num_epochs: Int = knob(200, "epochs, each one round of sampling and its updates; 0 only evaluates", ge=0)
    max_minutes: Float = knob(
        0.0, "minutes of training after which a run ends as if complete; 0 none", ge=0, le=LONGEST
    )
    debug: Bool = knob(False, "print the group structure of every epoch")
    resume: Place = knob("", "'' starts afresh | auto: the run folder's newest checkpoint | a checkpoint folder")
    doctor: Literal["fast", "off"] = knob("fast", "check the run for faults before its first epoch; tools/doctor.py")
    dry_run: Bool = knob(False, "trace shapes through the recipe without weights or memory, print the plan and stop")
    trackers: Trackers = knob(("tensorboard",), "where metrics go in addition to files and console; docs/trackers.md")
    log_videos_every: Int = knob(10, "epochs between videos of training samples; 0 never", ge=0)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)
    reward: RewardConfig = dataclasses.field(default_factory=RewardConfig)
    dynamic_sampling: DynamicSamplingConfig = dataclasses.field(default_factory=DynamicSamplingConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    eval: EvalConfig = dataclasses.field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)

    @property
    def asks_reference(self) -> bool:
        """Whether the starting weights answer as well, of which a policy without adapters keeps a copy."""
        return self.train.kl_coef > 0 or self.model.boundary_ratio > 0


class Knob(NamedTuple):
    """A field of the schema: type without validators, default, one line of meaning with the unit, pydantic's bounds."""

    kind: Any
    default: Any
    meaning: str
    bounds: Mapping[str, Any]


def sections() -> dict[str, Any]:
    """Return the class of every section by its name; first, under "", the one of the knobs outside of sections."""
    hints = get_type_hints(Config)
    return {"": Config} | {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}


def _knobs() -> dict[str, Knob]:
    found = {}
    for section, cls in sections().items():
        kinds, defaults = get_type_hints(cls), cls()
        for field in dataclasses.fields(cls):
            if field.metadata:  # a knob and not a section
                bounds = dict(field.metadata)
                path = f"{section}.{field.name}".lstrip(".")
                found[path] = Knob(kinds[field.name], getattr(defaults, field.name), bounds.pop("description"), bounds)
    return found


KNOBS: Mapping[str, Knob] = _knobs()  # by dotted path
