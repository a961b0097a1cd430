r"""Pre-train the furnished world's ReCam model by flow matching, on true videos of labelled camera paths. Resumable.

    torchrun --nproc_per_node=2 tools/dev/pretrain_recam.py --work .work/base --out assets/room_recam

The targets go along short paths (`LABELLED` in data/rooms.py), with exact labels; longer ones and others are left to
reinforcement learning. With --unsure there are longer ones, too, but half of the targets stay behind their labels
(`BEHIND`), as where poses were estimated badly: such a model does not know how far to go, its samples differ in that,
and rewards can tell it. Latents of all clips are encoded once. The log has, on rooms that no step sees, the videos'
PSNR to the truth and the errors of their cameras, by whether paths of that kind are labelled.

    torchrun --nproc_per_node=2 tools/dev/pretrain_recam.py --work .work/unsure --unsure --scenes 240 --steps 1000 \
        --batch 32 --learning-rate 1e-3 --ema 0.99 --probe-steps 250 --start-from assets/room_recam \
        --out assets/room_recam_unsure
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import sys
import time
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from flow_grpo.data.rooms import LABELLED, SOURCES, UNLABELLED, Shot
from flow_grpo.data.tiny_world import FURNISHED, TinyScene, caption, make_scene, render_views
from flow_grpo.maths.keys import generator
from flow_grpo.maths.poses import relative
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.recam import RECAM
from flow_grpo.models.wan_policy import TIMESTEPS
from tools.common import make_parser
from tools.dev.tiny.probe import SHIFT, Probe, encode, scene_cameras
from tools.dev.tiny.text import CAPTIONS, build_text_encoder, encode_captions
from tools.dev.tiny.training import Resumable, load_shares, processes
from tools.study.scaled_recam import scaled

SOURCES_A_ROOM, TARGETS_A_ROOM = 2, 5
BEHIND = {"shift": 0.15, "turn": 0.4}  # shares of a label's translation and rotation
SETTINGS = ("steps", "scenes", "batch", "learning_rate", "width", "ffn", "layers", "ema", "unsure")  # in the record


@dataclasses.dataclass(frozen=True)
class Pool:
    """Clips of many rooms: of each first the sources, then the targets.

    Attributes:
        latents: (scenes, clips, C, F, H, W), fp16 to save memory.
        cameras: (scenes, clips, F, 12) fp32, relative to the start pose that all cameras of a room share.
        captions: (scenes,) indices into CAPTIONS.
    """

    latents: Tensor
    cameras: Tensor
    captions: Tensor

    def batch(self, size: int, draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw target latents, source latents, camera labels and captions, `size` of each."""
        scenes, clips = self.latents.shape[:2]
        scene = torch.randint(scenes, (size,), generator=draw)
        target = torch.randint(SOURCES_A_ROOM, clips, (size,), generator=draw)
        source = torch.randint(SOURCES_A_ROOM, (size,), generator=draw)
        pair = self.latents[scene, target].float(), self.latents[scene, source].float()
        return *pair, self.cameras[scene, target], self.captions[scene]


def encode_scenes(codec: AutoencoderKLWan, unsure: bool, scenes: range) -> dict[str, Tensor]:
    latents, cameras, captions = [], [], []
    for number in scenes:
        draw = generator("pretraining shots", number)
        sources, targets = (
            [names[i] for i in torch.randperm(len(names), generator=draw)[:count].tolist()]
            for names, count in (((*SOURCES,), SOURCES_A_ROOM), ((*taught(unsure),), TARGETS_A_ROOM))
        )
        scene = make_scene(FURNISHED, "pretrain", number, (*sources, *targets))
        filmed = stay_behind(scene, draw) if unsure else scene
        videos = render_views(FURNISHED, [filmed], list(range(len(scene.shots))))
        latents.append(encode(codec, videos).half())
        cameras.append(scene_cameras(scene, codec))
        captions.append(CAPTIONS.index(caption(videos[0])))
    return {"latents": torch.stack(latents), "cameras": torch.stack(cameras), "captions": torch.tensor(captions)}


def taught(unsure: bool) -> dict[str, Shot]:
    return LABELLED | UNLABELLED if unsure else LABELLED


def stay_behind(scene: TinyScene, draw: torch.Generator) -> TinyScene:
    """Return the scene with half of its targets, at random, on the shares BEHIND of their paths."""
    poses = scene.poses.clone()
    for target in (SOURCES_A_ROOM + torch.rand(TARGETS_A_ROOM, generator=draw).lt(0.5).nonzero().flatten()).tolist():
        start = poses[target, 0].clone()
        poses[target] = start @ scaled(relative(start, poses[target]), **BEHIND)
    return dataclasses.replace(scene, poses=poses)


def build_model(args: argparse.Namespace, channels: int, text_dim: int) -> ReCamTransformer3DModel:
    return ReCamTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=args.width // 32,
        attention_head_dim=32,
        in_channels=channels,
        out_channels=channels,
        text_dim=text_dim,
        freq_dim=64,
        ffn_dim=args.ffn,
        num_layers=args.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=64,
    )


class ModelTraining(Resumable):
    def __init__(self, model: ReCamTransformer3DModel, args: argparse.Namespace) -> None:
        self.args, self.model = args, model.to(args.device)
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(args.ema)
        )
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.99))
        super().__init__(args.work, model=self.model, average=self.average, optimizer=self.optimizer)

    def advance(self, pool: Pool, text: Tensor, network: nn.Module, rank: int, world: int) -> Tensor:
        """Take one optimizer step on clips and noise seeded by step and rank; return the loss ()."""
        args = self.args
        rate = min(1.0, (self.step + 1) / 200) * min(1.0, 1.6 * (1 - self.step / args.steps) + 0.01)
        for group in self.optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        draw = generator("step", self.step, rank)
        *drawn, captions = pool.batch(args.batch // world, draw)
        uniform = torch.rand(len(captions), generator=draw)
        noise = torch.randn(drawn[0].shape, generator=draw).to(args.device)
        target, source, cameras, sigma = (
            each.to(args.device) for each in (*drawn, SHIFT * uniform / (1 + (SHIFT - 1) * uniform))
        )
        level = sigma.view(-1, 1, 1, 1, 1)
        noisy = (1 - level) * target + level * noise
        inputs = {"source_latents": source, "target_cameras": cameras}
        predicted = RECAM.call(network, noisy, TIMESTEPS * sigma, text[captions], inputs)
        loss = (predicted - (noise - target)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update_parameters(self.model)
        self.step += 1
        return loss.detach()


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument("--out", type=Path, required=True, help="diffusers folder with vae/ of pretrain_codec.py")
    parser.add_argument("--start-from", type=Path, help="a model's folder with its transformer and pretraining.json")
    parser.add_argument("--unsure", action="store_true", help="half of the targets stay behind their labels")
    parser.add_argument("--steps", type=int, default=20000)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of this call; call again to resume")
    parser.add_argument("--scenes", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=48, help="samples per step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=1.5e-3)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--ffn", type=int, default=480)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--probe-steps", type=int, default=1000)
    parser.add_argument("--compile", action="store_true", help="a seventh faster on a CPU; needs a C++ compiler")
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--device", default="cpu", help="of the training; clips are rendered and judged on the CPU")
    args = parser.parse_args()
    with processes(args) as (rank, world):
        codec = AutoencoderKLWan.from_pretrained(args.out / "vae").eval()
        text_encoder, tokenizer = build_text_encoder()
        text = encode_captions(text_encoder, tokenizer)
        name = "unsure_pool" if args.unsure else "pool"
        shares = load_shares(args, name, partial(encode_scenes, codec, args.unsure), rank, world)
        pool = Pool(**{name: torch.cat([share[name] for share in shares]) for name in shares[0]})
        if args.steps == 0:  # render only: on many cores, for a later call in one process on a device
            return
        model = build_model(args, codec.config.z_dim, text.shape[-1])
        if args.start_from:  # the weights alone: a loaded model would write the folder's name into its configuration
            model.load_state_dict(ReCamTransformer3DModel.from_pretrained(args.start_from / "transformer").state_dict())
        training = ModelTraining(model, args)
        train(training, pool, text, Probe(codec) if rank == 0 else None, rank, world)
        if rank == 0:
            parts = {"transformer": training.average.module, "text_encoder": text_encoder}
            write_folder(training, parts, tokenizer)


def train(training: ModelTraining, pool: Pool, text: Tensor, probe: Probe | None, rank: int, world: int) -> None:
    args, began, losses, earlier = training.args, time.time(), [], training.seconds
    network = torch.compile(training.model) if args.compile else training.model
    network = DistributedDataParallel(network) if world > 1 else network
    late, on_device = torch.zeros(1), text.to(args.device)
    while training.step < args.steps and not late:
        losses.append(training.advance(pool, on_device, network, rank, world))
        if training.step % args.probe_steps and training.step < args.steps:
            continue
        if probe is not None:
            spent, began = time.time() - began, time.time()
            training.seconds += spent
            row = {"step": training.step, "seconds": round(training.seconds), "loss": float(torch.stack(losses).mean())}
            row |= probe.measure(copy.deepcopy(training.average.module).cpu().eval(), text)
            training.log({name: round(value, 4) for name, value in row.items()})
            print(json.dumps(row), flush=True)
            training.save()
            late[0] = training.seconds - earlier > 60 * args.minutes
        losses = []
        if world > 1:
            dist.broadcast(late, 0)


def write_folder(training: ModelTraining, parts: dict[str, nn.Module], tokenizer: PreTrainedTokenizerBase) -> None:
    args, out = training.args, training.args.out
    for name, part in parts.items():
        copy.deepcopy(part).cpu().half().save_pretrained(out / name)
    tokenizer.save_pretrained(out / "tokenizer")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(out / "scheduler")
    data = {name: dataclasses.asdict(shot) for name, shot in (SOURCES | taught(args.unsure)).items()}
    more = {"data": data, **({"behind": BEHIND} if args.unsure else {})}
    if args.start_from:
        more["started_from"] = json.loads((args.start_from / "pretraining.json").read_text())
    training.write_record(out / "pretraining.json", "tools/dev/pretrain_recam.py", args, SETTINGS, **more)


if __name__ == "__main__":
    main()
