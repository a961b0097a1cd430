"""Every knob of a run: default, unit, one line of meaning. `flow_grpo/settings/checks.py` holds the bounds.

Letters: W ranks, k copies of a condition, S denoising steps.
"""

from __future__ import annotations

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config() -> ConfigDict:
    """Return all knobs at their defaults; a knob that is not here cannot be set."""
    config = ConfigDict()
    config.run_name = ""  # folder below output_root; "" makes one from recipe and time
    config.output_root = "outputs"  # folder of all runs
    config.seed = 0  # of every random draw of the run
    config.device = "auto"  # auto | npu | cuda | cpu; auto takes the first of npu, cuda, cpu that works
    config.deterministic = False  # ask for bit-equal kernels, at some speed
    config.num_threads = 0  # CPU threads per rank; 0 leaves torch's choice
    config.num_epochs = 200  # epochs: one sampling round and its updates each; 0 only evaluates
    config.max_minutes = 0.0  # minutes of training after which the run ends as if complete; 0 no limit
    config.debug = False  # print the group structure of every epoch
    config.resume = ""  # "" starts anew | auto goes on from the run folder's newest checkpoint | a checkpoint folder
    config.doctor = "fast"  # fast | off: look for what would spoil the run before its first epoch, see tools/doctor.py
    config.dry_run = False  # walk the recipe in shapes without weights or memory, print its plan and stop
    config.trackers = ("tensorboard",)  # of wandb, tensorboard; files and console are always written
    config.log_videos_every = 10  # epochs between videos of training samples; 0 never
    config.data = _data()
    config.model = _model()
    config.sample = _sample()
    config.reward = _reward()
    config.dynamic_sampling = _dynamic_sampling()
    config.train = _train()
    config.eval = _eval()
    config.checkpoint = _checkpoint()
    config.distributed = _distributed()
    config.lock()
    for table in ("weights", "schedules", "gates", "remote"):
        config.reward[table].unlock()  # a recipe may add names
    return config


def _data() -> ConfigDict:
    """Which videos."""
    data = ConfigDict()
    data.root = "data/MultiCamVideo-Dataset"  # folder in MultiCamVideo layout
    data.tiny_world = ""  # name of a tiny world to film into `root` when that is missing; "" never
    data.train_split = "train"  # folder below root whose scenes are trained on
    data.eval_split = "val"  # folder below root whose scenes are held out
    data.num_frames = 81  # video frames, 4n+1
    data.height = 480  # pixels, after resize and centre crop
    data.width = 832  # pixels
    # Several sizes such as ("81x480x832", "49x832x480"): a scene comes in the longest that its first video fills, of
    # those in the one nearest in shape; () is the one size above
    data.buckets = ()
    data.prompt = "a scene filmed by a moving camera"  # where no metadata.csv gives a caption
    data.reference = "source"  # source | target: whose first frame is the origin of the camera poses
    data.exclude = ""  # file of tools/check_sources.py: items that pose rewards cannot measure by are not drawn
    data.num_workers = 2  # loader processes per rank; they touch CPU tensors only
    return data


def _model() -> ConfigDict:
    """Which policy, and which of its weights move."""
    model = ConfigDict()
    model.path = "models/recammaster-wan2.1-1.3b"  # folder in diffusers layout
    model.dtype = "bf16"  # fp32 | bf16: frozen weights and autocast; trained weights stay fp32
    model.trained = "lora"  # lora | camera (cam_encoder) | attention (attn1, cam_encoder, projector) | full
    model.lora_rank = 64  # of every adapter
    model.lora_alpha = 64  # adapters are scaled by lora_alpha / lora_rank
    model.lora_targets = r"blocks\.\d+\.attn1\.(to_q|to_k|to_v|to_out\.0)"  # self-attention: must match whole names
    model.lora_full_modules = ("cam_encoder",)  # last names of modules trained in full beside the adapters
    model.gradient_checkpointing = True  # recompute activations in the backward pass: memory for time
    model.max_prompt_tokens = 512  # tokens; longer prompts are cut
    model.encodings = ""  # folder where encoded prompts and source videos are kept over runs; "" memory only
    model.vae_tiling = False  # encode and decode in overlapping tiles: less memory, slightly other pictures
    model.vae_slicing = True  # encode and decode one video at a time: less memory
    model.offload = False  # keep codec, text encoder and reference weights in CPU memory while they are not in use
    model.attention_backend = "native"  # native | flash | ... of diffusers, alike in rollout and update
    model.compile = False  # torch.compile of the repeated blocks, where the device can; needs old_log_prob="detach"
    return model


def _sample() -> ConfigDict:
    """How the k copies of a condition are tried."""
    sample = ConfigDict()
    sample.k = 4  # videos made from one condition: the group whose rewards are compared
    # Follows k; a value of its own is possible only so that old command lines meet a clear error.
    sample.num_image_per_prompt = sample.get_oneway_ref("k")
    sample.train_batch_size = 2  # samples per rank and batch; W times this must be a multiple of k
    sample.num_batches_per_epoch = 2  # batches per rank and epoch
    sample.num_steps = 16  # S, denoising steps of a rollout
    sample.shift = 5.0  # of the noise levels towards 1; ReCamMaster was trained and is sampled with 5
    sample.sde = "constant"  # flow | constant | linear | cps: form of the noise in a stochastic step
    sample.noise_level = 0.3  # its strength, in the unit of `sde`
    sample.max_step_std = placeholder(float)  # bound of one step's standard deviation; none leaves it free
    sample.sde_steps = (1, 2, 3, 4, 5, 6, 7)  # steps of 0..S-2 that may be stochastic
    sample.sde_window = 2  # neighbouring entries of sde_steps drawn each epoch and trained; 0 takes all
    sample.guidance_scale = 1.0  # text guidance, in rollout and update alike; 1 makes no second call
    sample.negative_prompt = ""  # what guidance leads away from
    sample.layout = "spread"  # spread (copies on different ranks) | shuffled | contiguous (a group on one rank)
    sample.offload = False  # keep remembered steps in CPU memory until the update; dynamic sampling always does
    sample.same_initial_noise = False  # copies of a group share their first noise and differ by step noise only
    return sample


def _reward() -> ConfigDict:
    """Which rewards, and how they become advantages."""
    reward = ConfigDict()
    reward.weights = ConfigDict({"target_view": 1.0})  # reward -> weight; 0 measures without training on it
    # Reward -> ((epoch, weight), ...) in place of its weight above: linear between, constant outside; from epoch 0
    reward.schedules = ConfigDict()
    # Reward -> (reward that holds the gate, least value): copies whose holder is below it fall behind all that pass, so
    # that for example a camera path counts only where the source is preserved
    reward.gates = ConfigDict()
    # Name -> http://HOST:PORT of a server that scores it: such a reward has the weight `remote:<name>`. A token for the
    # servers comes from the environment, FLOW_GRPO_REWARD_TOKEN
    reward.remote = ConfigDict()
    reward.remote_timeout = 120.0  # seconds a server has for one attempt: twice the slowest request measured
    # Share of a step's samples that a reward of weight may fail to measure (an exception, a timeout, a dead server)
    # before the run saves and stops; those samples are masked in any case. 1 never stops
    reward.most_faults = 0.1
    reward.overlap = True  # measure a batch while the next one is sampled; the numbers are the same
    reward.adv_norm = "group"  # group | batch | batch_centered | max_group | none: whose std divides
    reward.adv_eps = 1e-4  # added to that std, in reward units
    reward.adv_ddof = 0  # 0 | 1: degrees of freedom taken off that std
    reward.flat_eps = 1e-4  # a group whose rewards span no more than this teaches nothing
    return reward


def _dynamic_sampling() -> ConfigDict:
    """Sampling fresh conditions until every group carries a signal; README, "When groups are flat"."""
    dynamic = ConfigDict()
    dynamic.enabled = False  # look at reward/*_group_range_p50 first: without a floor hardly any group is flat
    dynamic.max_resample_times = 3  # rounds after an epoch's first; the last one counts
    # fallback_original | fill_flat | pad | rebalance | raise: what an epoch trains on when still too few groups differ
    dynamic.policy = "fallback_original"
    dynamic.metric = ""  # the one reward that says which groups are flat; "" asks all that have a weight
    dynamic.skip_step_if_all_flat = False  # take no optimizer step when no group of the epoch carries a signal
    return dynamic


def _train() -> ConfigDict:
    """How the policy is moved."""
    train = ConfigDict()
    train.batch_size = 2  # samples per rank and micro-batch of the update; gradients are accumulated over them
    train.sharding = "ddp"  # ddp (all whole) | zero2 (DeepSpeed: gradients, moments in parts) | fsdp2 (all in shards)
    train.updates_per_epoch = 1  # optimizer steps per epoch
    train.learning_rate = 1e-4  # of AdamW, constant
    train.adam_beta1 = 0.9  # AdamW
    train.adam_beta2 = 0.999  # AdamW
    train.adam_eps = 1e-8  # AdamW
    train.weight_decay = 1e-4  # AdamW
    train.max_grad_norm = 1.0  # bound of the gradient's norm over all trained weights
    # Optimizer steps in a row that are left out for a NaN or an infinity before the run stops; zero2 stops at the first
    train.max_bad_steps = 2
    train.clip_range = 1e-3  # of the ratio round 1; the ratio is a mean over latent elements, hence the small numbers
    train.adv_clip = 5.0  # bound of an advantage's size
    train.kl_coef = 0.0  # weight of the KL to the starting policy; 0 makes no reference call
    train.step_weight = "none"  # none | inverse_gain: how steps of unequal gain are weighed
    train.guard = False  # GRPO-Guard: ratio without bias, steps weighed by their inverse length
    train.old_log_prob = "auto"  # auto | rollout | recompute | detach: what the ratio divides by
    train.ema_decay = 0.0  # per optimizer step, of the averaged weights that evaluation uses; 0 none
    return train


def _eval() -> ConfigDict:
    """Held-out evaluation: fixed conditions and noise, deterministic sampling."""
    evaluation = ConfigDict()
    evaluation.every = 20  # epochs between evaluations; 0 only before and after
    evaluation.num_conditions = 10  # over all ranks; MultiCamVideo's own held-out scene has 10
    evaluation.batch_size = 2  # samples per rank and call
    evaluation.num_steps = 50  # denoising steps
    evaluation.gold = ""  # "" | room_pose: an estimator of the camera that no reward uses; tiny world only
    evaluation.videos = 4  # videos written per evaluation, at most as many as rank 0 samples
    return evaluation


def _checkpoint() -> ConfigDict:
    """When to save."""
    checkpoint = ConfigDict()
    checkpoint.every = 10  # epochs between checkpoints; the last epoch is always saved
    checkpoint.keep = 3  # newest checkpoints kept
    # Held-out metric such as eval/target_view, whose best checkpoint is kept too: of those saved in an epoch that was
    # evaluated. A "-" before one where less is better, such as -eval/rot_err_deg
    checkpoint.best = ""
    return checkpoint


def _distributed() -> ConfigDict:
    """How long ranks wait for each other, in seconds; docs/overnight.md."""
    distributed = ConfigDict()
    distributed.control_s = 3600.0  # in an exchange between CPUs: 1.5 silent_s or more, which tells who is late
    distributed.device_s = 7200.0  # in one between devices: more than the vendor's library allows, which tells more
    distributed.collective_s = 0.0  # what that library allows (NPU: HCCL_EXEC_TIMEOUT); 0 leaves its own, about 1800
    distributed.dead_s = 60.0  # without a sign of life before a rank counts as gone and all end; 0 never
    distributed.silent_s = 1800.0  # without progress before it counts as hanging: more than a call of the network takes
    return distributed
