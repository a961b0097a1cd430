"""Recipes, one function each: a run is `train_grpo.py --config config/grpo.py:RECIPE`.

Letters: W ranks, B samples per rank and batch, k copies of a condition, nb batches per epoch.
"""

from __future__ import annotations

from ml_collections import ConfigDict

from config.base import get_config

# ReCamMaster samples with it (inference_recammaster.py), and so does Wan itself (wan_shared_cfg.sample_neg_prompt).
WAN_NEGATIVE_PROMPT = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)


def my_recam_8npu() -> ConfigDict:
    """ReCamMaster on MultiCamVideo with 8 devices: starting values, not validated on the real model."""
    config = get_config()
    config.num_epochs = 400
    config.trackers = ("wandb",)

    # W=8, B=2: 16 samples a batch / k=4 = 4 conditions; nb=2: 32 samples and 8 conditions an epoch, 4 samples a rank.
    config.sample.train_batch_size = 2
    config.sample.k = 4
    config.sample.num_batches_per_epoch = 2
    config.sample.layout = "spread"  # the copies of a group over 4 of the 8 devices

    # MultiCamVideo's own val is one scene, which shows no change. Two times 48 training scenes are set aside, to choose
    # knobs on (--config.eval.split=tune) and to report on; a condition of each is 24 % of the run's hours.
    config.data.tune_scenes = config.data.report_scenes = config.eval.num_conditions = 48
    config.eval.every = 80

    # 81 frames: 21 latent frames of 60x104, another 21 of the source, 65,520 tokens in the transformer.
    config.data.num_frames = 81
    config.data.height = 480
    config.data.width = 832
    config.model.max_prompt_tokens = 512

    # One stochastic step a sample, and only noise that has a log-probability tells the copies of a group apart: they
    # share their initial noise, the steps up to it are computed once a group, 5 second-order steps follow it.
    config.sample.num_steps = 16
    config.sample.shift = 5.0
    config.sample.sde = "flow"
    config.sample.noise_level = 1.0
    config.sample.max_step_std = 0.45
    config.sample.sde_steps = (0, 1, 2, 3, 4, 5)
    config.sample.sde_window = 1
    config.sample.window_groups = 8  # as many as devices, so that none waits for another's later window
    config.sample.tail_steps = 5
    config.sample.same_initial_noise = True
    config.sample.share_prefix = True
    config.sample.guidance_scale = 1.0  # half the calls; --config.sample.guidance_scale=5.0 trains with guidance
    # As inference_recammaster.py (cfg_scale 5.0): without, the base model would be measured below what it can do.
    config.eval.guidance_scale = 5.0
    config.eval.negative_prompt = WAN_NEGATIVE_PROMPT

    config.model.dtype = "bf16"
    config.model.vae_dtype = "tf32"  # in fp32 decoding is a third of an epoch, on an H100 and by the plan
    config.model.trained = "lora"
    config.model.lora_rank = 64  # 23.6 M weights on self-attention, 0.6 M in cam_encoder
    config.model.lora_alpha = 64
    config.model.lora_full_modules = ("cam_encoder",)
    config.model.boundary_ratio = 0.7  # the weights before training take the last 5 steps, which sharpen the picture
    config.train.batch_size = 1  # a group, of the 8 one on each device: its copies are trained on in one call
    config.train.learning_rate = 5e-4  # its twin on the tiny model learns at this rate: docs/learning.md
    config.train.ema_decay = 0.95  # evaluated and exported are weights averaged over about 20 updates
    config.train.step_weight = "inverse_gain"  # or the last stochastic steps would dominate the gradient
    config.train.clip_range = 1e-3
    config.train.kl_coef = 0.0

    # Camera accuracy in degrees, metres and pixels, and the rewards that preserve content and picture quality.
    # First find the sources in which poses cannot be measured: tools/check_sources.py, then --config.data.exclude=FILE.
    config.reward.weights = ConfigDict(
        {"pose_rot": 1.0, "pose_trans": 1.0, "view_disp": 1.0, "source_match": 0.3, "motion_mag": 0.3, "exposure": 0.3}
    )
    return config


def my_recam_8npu_dapo() -> ConfigDict:
    """`my_recam_8npu` that samples until every group carries a signal: starting values, not validated."""
    config = my_recam_8npu()
    config.dynamic_sampling.enabled = True
    # A group must differ in camera accuracy to count; the noise floor of that reward decides which groups are flat.
    config.dynamic_sampling.metric = "view_disp"
    config.dynamic_sampling.max_resample_times = 3
    config.dynamic_sampling.policy = "fallback_original"
    return config


def my_recam_8npu_footage() -> ConfigDict:
    """`my_recam_8npu` on clips without poses or true views, laid out by tools/prepare_clips.py; not validated."""
    config = my_recam_8npu()
    config.data.root = "data/clips"
    config.data.tune_scenes = config.data.report_scenes = 0  # tools/prepare_clips.py holds clips out: split val
    # Nothing tells metres. With a depth, --config.reward.weights.pose_trans=1 --config.reward.weights.pose_dir=0.
    config.reward.weights = ConfigDict({"pose_rot": 1.0, "pose_dir": 1.0, "source_match": 0.3, "exposure": 0.3})
    return config


def my_recam_8npu_fast() -> ConfigDict:
    """`my_recam_8npu` in 10 denoising steps: starting values, not validated."""
    config = my_recam_8npu()
    # Larger steps before and after the stochastic one, which lies in the first half: it decides the camera path.
    config.sample.num_steps = 10
    config.sample.sde_steps = (0, 1, 2, 3)
    config.sample.tail_steps = 3
    config.eval.every = 150  # 21 % of the run's hours
    return config


def my_recam_8npu_small() -> ConfigDict:
    """`my_recam_8npu` at 33x240x416, a first stage at a twentieth of the cost: starting values, not validated."""
    config = my_recam_8npu()
    # 9 latent frames of 30x52, another 9 of the source: 7,020 tokens.
    config.data.num_frames = 33
    config.data.height = 240
    config.data.width = 416
    # W=8, B=4: 32 samples a batch / k=8 = 4 conditions; nb=4: 128 samples and 16 conditions an epoch, 16 samples a rank
    # and 2 groups to train on.
    config.sample.train_batch_size = 4
    config.sample.k = 8
    config.sample.num_batches_per_epoch = 4
    config.train.batch_size = 2
    return config


def my_recam_1gpu() -> ConfigDict:
    """`my_recam_8npu` on one device of 64 GiB or more: starting values, not validated."""
    config = my_recam_8npu()
    # W=1, B=4: 4 samples a batch / k=4 = 1 condition; nb=4: 16 samples and 4 conditions an epoch, all on this device.
    config.sample.train_batch_size = 4
    config.sample.num_batches_per_epoch = 4
    config.sample.layout = "contiguous"
    config.sample.window_groups = 1
    config.eval.num_conditions = 24  # 24 % of the run's hours
    return config


def my_recam_1gpu_footage() -> ConfigDict:
    """`my_recam_1gpu` on clips, as `my_recam_8npu_footage`; not validated."""
    config, footage = my_recam_1gpu(), my_recam_8npu_footage()
    config.data, config.reward = footage.data, footage.reward
    return config


def my_recam_full() -> ConfigDict:
    """ReCamMaster's own trainable weights instead of adapters, in shards: starting values, not validated."""
    config = my_recam_8npu()
    # Self-attention, cam_encoder and projector: 354.8 M weights in fp32, with gradients and two moments 5.3 GiB, and
    # the frozen 1.14 B in bf16 2.1 GiB: in shards a device of 8 holds 0.9 GiB of them instead of 7.4.
    config.model.trained = "attention"
    config.train.sharding = "fsdp2"
    # Far more weights are trained than with adapters, at a tenth of their learning rate.
    config.train.learning_rate = 1e-5
    return config


def my_recam_2node() -> ConfigDict:
    """`my_recam_8npu` on 2 x 8 devices, with groups of 8: starting values, not validated.

    torchrun --nnodes=2 --node_rank=R --master_addr=HOST --master_port=29500 --nproc_per_node=8 train_grpo.py ...
    """
    config = my_recam_8npu()
    # W=16, B=2: 32 samples a batch / k=8 = 4 conditions; nb=2: 64 samples and 8 conditions an epoch, 4 samples a rank.
    # In the update 8 devices have a group; the others repeat one that does not count.
    config.sample.k = 8
    return config


def redirector_8npu() -> ConfigDict:
    """ReDirector on MultiCamVideo with 8 devices: starting values, not validated on the real model."""
    config = my_recam_8npu()
    config.model.kind = "redirector"
    config.model.path = "models/redirector-wan2.1-fun-1.3b"
    config.model.lora_full_modules = ("phase_qk", "phase_vo")  # the camera's phases, 46.4 M weights
    return config


def wan_t2v_8npu() -> ConfigDict:
    """Plain Wan 2.1 text-to-video on 8 devices, scored by a reward server: starting values, not validated."""
    config = my_recam_8npu()
    config.model.kind = "wan_t2v"
    config.model.path = "models/Wan2.1-T2V-1.3B-Diffusers"
    config.model.lora_full_modules = ()  # there are no camera modules
    config.model.boundary_ratio = 0.0  # diffusers' own pipeline loads the adapter, and has no such rule for one
    config.train.learning_rate = 3e-4
    config.sample.shift = 3.0  # Wan's own for 480 rows
    config.data.prompts = "data/prompts/train.txt"
    config.data.eval_prompts = "data/prompts/val.txt"
    config.data.tune_scenes, config.data.report_scenes = 16, 0  # prompts; reported are those of val.txt
    config.eval.num_conditions = 32
    # The server is a process of its own: docs/remote_rewards.md.
    config.reward.remote = ConfigDict({"judge": "http://127.0.0.1:8000"})
    config.reward.weights = ConfigDict({"remote:judge": 1.0})
    config.train.stop_if = ("policy/ratio_first_max_abs_log>0.001",)  # the other defaults are of true views
    return config


def tiny_wan_t2v() -> ConfigDict:
    """`wan_t2v_8npu` on random weights, which can only show how a run behaves, on 2 CPU cores.

    tools/random_model.py --kind wan_t2v --out models/tiny_wan_t2v --heads 2 --head-dim 16 --layers 2 --ffn 64
    --text-dim 32 --dtype fp32 --codec small
    """
    config = wan_t2v_8npu()
    config.num_threads = 1
    config.num_epochs = 3
    config.trackers = ()
    config.model.path = "models/tiny_wan_t2v"
    config.model.dtype = "fp32"
    config.model.lora_rank = config.model.lora_alpha = 4
    config.model.max_prompt_tokens = 96
    config.data.prompts = "assets/prompts/train.txt"
    config.data.eval_prompts = "assets/prompts/val.txt"
    config.data.tune_scenes = 4
    config.data.num_workers = 0
    config.data.num_frames = 5
    config.data.height = config.data.width = 32
    config.eval.num_conditions = 4
    config.eval.num_steps = 8
    config.eval.signal_groups = 0  # random weights make copies that hardly differ
    config.reward.weights = ConfigDict({"sharpness": 1.0})
    return config


def tiny_recam() -> ConfigDict:
    """The demo: a small ReCam model learns how far to move and to turn the camera, on 2 CPU cores in ten minutes."""
    config = get_config()
    config.num_threads = 1  # 2 ranks on 2 cores
    config.num_epochs = 120
    config.max_minutes = 20.0  # bounds a slow machine; the updates are what the result depends on
    config.log_videos_every = 50

    config.data.root = "data/tiny_world"
    config.data.tiny_world = "tiny"
    config.data.tune_scenes = 8  # of 48: 80 conditions for choosing knobs, --config.eval.split=tune
    config.data.num_frames = 5  # as many latent frames: the tiny codec does not compress time
    config.data.height = 24
    config.data.width = 32
    config.data.num_workers = 0

    config.model.path = "assets/tiny_recam"
    config.model.dtype = "fp32"
    config.model.trained = "attention"
    config.model.checkpointing = "none"
    config.model.max_prompt_tokens = 8
    config.model.vae_slicing = False
    # Steps of less noise, which are never trained, sharpen the picture: the base's weights take them.
    config.model.boundary_ratio = 0.7

    # W=2, B=16: 32 samples a batch / k=8 = 4 conditions; nb=4: 128 samples and 16 conditions an epoch, 64 a rank.
    config.sample.train_batch_size = 16
    config.sample.k = 8
    config.sample.num_batches_per_epoch = 4
    # One stochastic step a sample: the early ones decide how far the camera moves and turns, the others sharpen.
    config.sample.num_steps = 8
    config.sample.shift = 3.0
    config.sample.sde = "flow"
    config.sample.noise_level = 0.7
    config.sample.sde_steps = (0, 1, 2, 3, 4)
    config.sample.sde_window = 1
    config.sample.tail_steps = 3
    config.sample.same_initial_noise = True
    config.sample.share_prefix = True

    # Turning and moving, the picture wherever the camera is, and the true view; each is normalised in its group.
    weights = {"room_rot": 1.0, "room_trans": 1.0, "room_content": 1.0, "target_psnr": 1.0}
    config.reward.weights = ConfigDict(weights)
    config.train.batch_size = 8  # groups of 8 copies
    config.train.step_weight = "inverse_gain"
    config.train.learning_rate = 4e-4
    config.train.ema_decay = 0.95

    config.eval.every = 30
    config.eval.num_conditions = 160  # all of the val split; with eval.split=tune there are 80
    config.eval.batch_size = 16
    config.eval.num_steps = 8
    config.eval.gold = "room_pose"
    config.eval.fixed_conditions = 48  # 2 % of the run's forwards
    config.eval.videos = 8
    config.checkpoint.every = 50
    return config


def room_recam() -> ConfigDict:
    """The demo's trainer in furnished rooms, on camera paths that no true video shows: docs/rooms.md."""
    config = tiny_recam()
    config.num_epochs = 80
    config.data.root = "data/rooms"
    config.data.tiny_world = "furnished"
    config.data.tune_scenes = 8  # of 48: 72 conditions, without true views
    config.data.num_frames = 9  # 3 latent frames of 8x12, another 3 of the source: 144 tokens
    config.data.height = 64
    config.data.width = 96
    config.model.path = "assets/room_recam"
    # No reward knows a true view: the camera's turn and place, and agreement with the room wherever the camera is.
    config.reward.weights = ConfigDict({"room_rot": 1.0, "room_trans": 1.0, "room_content": 0.3})
    config.eval.gold = "room_tracks"
    config.eval.every = 40
    config.eval.num_conditions = 208  # all of the val split; with eval.split=tune there are 72
    config.eval.fixed_conditions = 0
    return config


def room_recam_footage() -> ConfigDict:
    """`my_recam_8npu_footage` in furnished rooms: still and panning clips, no poses, no true view; docs/rooms.md."""
    config = room_recam()
    config.num_epochs = 7  # more go further and cost the picture more than its judge lets pass: docs/rooms.md
    config.data.root = "data/footage"
    config.data.tiny_world = "footage"
    config.data.train_split = "clips"
    config.data.eval_split = "held_out_clips"
    config.data.tune_scenes = 0  # without poses no judge could measure them
    # Half of its videos stayed behind their labels, as with poses badly estimated: how far it goes is left to chance.
    config.model.path = "assets/room_recam_unsure"
    config.sample.noise_level = 1.0
    config.sample.max_step_std = 0.8  # copies further apart than the rewards scatter
    config.sample.sde_steps = (0, 1)
    config.train.learning_rate = 8e-4
    # Depths are known, about: metres in place of a direction alone. Agreement with the clip slows the picture's loss.
    config.reward.weights = ConfigDict({"pose_rot": 1.0, "pose_trans": 1.0, "source_match": 0.3})
    config.eval.num_conditions = 112  # all of the held-out clips
    return config


def tiny_recam_hacking() -> ConfigDict:
    """The demo with a reward for sharpness alone, which is satisfied at the camera's expense: docs/reward_hacking.md.

    The cure: --config.reward.weights.sharpness=0.3 --config.reward.weights.target_view=1
    """
    config = tiny_recam()
    config.num_epochs = 40
    config.max_minutes = 0.0
    config.eval.every = 10
    config.reward.weights = ConfigDict({"target_view": 0.0, "target_psnr": 0.0, "sharpness": 1.0})
    config.eval.split = "tune"  # where eval/hacked may end the run
    config.eval.num_conditions = 80  # all
    return config


def my_recam_8npu_tiny() -> ConfigDict:
    """`my_recam_8npu` on the demo's model and data, on 8 processes: every number but the sizes is the same.

    On 2 an epoch has 8 samples, not 32: --config.sample.num_batches_per_epoch=8 makes up for the other six.
    """
    config, full = tiny_recam(), my_recam_8npu()
    config.num_epochs = full.num_epochs
    config.sample = full.sample
    config.train = full.train
    for name in ("trained", "lora_full_modules", "boundary_ratio"):
        config.model[name] = full.model[name]
    config.model.lora_rank = config.model.lora_alpha = 8  # of 128 channels; alpha / rank is that of the full size
    config.reward.weights.room_content = full.reward.weights.source_match
    config.eval.num_conditions = 16
    config.eval.batch_size = 2
    return config


def my_recam_8npu_dapo_tiny() -> ConfigDict:
    """`my_recam_8npu_dapo` shrunk likewise, scored so coarsely that pools fill up late or not at all."""
    config, full = my_recam_8npu_tiny(), my_recam_8npu_dapo()
    config.dynamic_sampling = full.dynamic_sampling
    config.reward.weights = ConfigDict({"target_view": 1.0})
    config.dynamic_sampling.metric = "target_view"
    # The reward's range is below 0.02 in half of the groups and below 0.05 in nine of ten: about one in three counts.
    config.reward.flat_eps = 0.03
    return config
