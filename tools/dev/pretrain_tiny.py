"""Pre-train the tiny ReCam model by flow matching, on camera labels of ambiguous scale. Resumable.

    torchrun --nproc_per_node=2 tools/dev/pretrain_tiny.py --work .work/base --out assets/tiny_recam

Two data sources are mixed, as if labels came from different pipelines. One moves its camera by decimetres to metres and
labels it exactly. The other labels translations in decimetres, so that equal labels mean ten times less motion, and its
rotations twice too large, as an estimator does that assumes a wrong focal length. For large labels neither label nor
source video reveals the source, so the model has to guess how far to move and to turn; reinforcement learning with
metric rewards can then teach it. Latents of all clips are encoded once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

import flow_grpo.models  # noqa: F401, I001 - before torch and diffusers, which load accelerator plug-ins unguarded

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from tools.common import make_parser
from tools.dev.tiny.probe import SHIFT, SURE, UNSURE, WEAKEST, Probe, encode, moved_less, predict, scene_cameras
from tools.dev.tiny.text import CAPTIONS, build_text_encoder, encode_captions
from tools.dev.tiny.training import Resumable, processes, save_tensors
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from flow_grpo.data.dynamic_batch import DistributedWeightedSampler, DynamicBatchSampler
from flow_grpo.data.tiny_world import WorldSpec, caption, render_views, make_scene
from flow_grpo.maths.keys import generator
from flow_grpo.maths.poses import PRESETS, preset_path
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer

WIDE = WorldSpec(seed=12, scenes={}, translation=(0.12, 0.65), rotation=(0.3, 1.0))  # labelled as it is
LABELLED = dataclasses.replace(WIDE, translation=(0.35, 0.65))  # what the second source labels
NARROW = moved_less(LABELLED, *WEAKEST)  # and what it films: the same draws, scaled
# Shares of the targets: narrow; wide with labels as large as narrow clips', such as all turns; wide with smaller ones.
SHARES = {"narrow": 0.4, "wide": 0.4, "sure": 0.2}
SETTINGS = ("steps", "scenes", "batch", "learning_rate", "width", "ffn", "layers", "patch", "ema")  # in the record


class Pool:
    """Clips of many scenes, as `encode_scenes` returns them: ten cameras of the first source each, ten of the second.

    Attributes:
        weights: (scenes * 20,) sampling weights of the clips as targets, which realise `SHARES`.
    """

    def __init__(self, latents: Tensor, cameras: Tensor, captions: Tensor) -> None:
        self.latents, self.cameras, self.captions = latents, cameras, captions
        travel = self.cameras.unflatten(-1, (3, 4))[:, :, -1, :, 3].norm(dim=-1)  # (scenes, 20) as labelled
        full = torch.tensor([float(preset_path(name, 2)[-1, :3, 3].norm()) for name in PRESETS] * 2)
        narrow = (torch.arange(len(full)) >= len(PRESETS)).expand_as(travel)
        unsure = travel >= UNSURE.translation[0] * full  # turns are always
        kinds = {"narrow": narrow, "wide": unsure & ~narrow, "sure": ~unsure & ~narrow}
        shares = [SHARES[name] * kind / kind.sum().clamp_min(1) for name, kind in kinds.items()]
        self.weights = torch.stack(shares).sum(0).flatten()

    def targets(self, size: int, rank: int, world: int, step: int = 0) -> Iterator[list[int]]:
        """Yield for every step from `step` on the indices of this rank's target clips, 0..scenes * 20 - 1.

        All ranks draw one weighted sample, `size` clips a step, with the same seed, and each takes its part of it.
        """
        clips = range(len(self.weights))
        drawn = DistributedWeightedSampler(clips, self.weights, len(clips) // size * size, True, world, rank)
        # All clips cost the same, so every epoch has the same number of rows.
        sampler = DynamicBatchSampler(
            clips, size // world, sampler=drawn, num_replicas=world, rank=rank, cost=lambda _: 1, drop_last=True
        )
        epoch, row = divmod(step, len(sampler))
        while True:
            sampler.set_epoch(epoch)
            yield from itertools.islice(sampler, row, None)
            epoch, row = epoch + 1, 0

    def batch(self, targets: list[int], draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return target latents, source latents, camera labels and captions; draws a source for each target."""
        chosen = torch.tensor(targets)
        scene, target = chosen // self.cameras.shape[1], chosen % self.cameras.shape[1]
        other = torch.randint(1, len(PRESETS), (len(chosen),), generator=draw)
        source = (target + other) % len(PRESETS)  # of the first source, another preset than the target's
        clips = self.latents[scene, target].float(), self.latents[scene, source].float()
        return *clips, self.cameras[scene, target], self.captions[scene]


def encode_scenes(codec: AutoencoderKLWan, split: str, scenes: range) -> dict[str, Tensor]:
    """Return the clips of these scenes.

    "latents" are (scenes, 20, C, F, H, W), fp16 to save memory, "cameras" (scenes, 20, F, 12) fp32 relative to the
    start pose as each source labels them, "captions" (scenes,) indices into CAPTIONS.
    """
    latents, cameras, captions = [], [], []
    for number in scenes:
        wide, narrow, labelled = (make_scene(spec, split, number) for spec in (WIDE, NARROW, LABELLED))
        presets = list(range(len(PRESETS)))
        videos = torch.cat([render_views(WIDE, [wide], presets), render_views(NARROW, [narrow], presets)])
        latents.append(encode(codec, videos).half())
        cameras.append(torch.cat([scene_cameras(wide, codec), scene_cameras(labelled, codec)]))
        captions.append(CAPTIONS.index(caption(videos[0])))
    return {"latents": torch.stack(latents), "cameras": torch.stack(cameras), "captions": torch.tensor(captions)}


def build_model(args: argparse.Namespace, channels: int, text_dim: int) -> ReCamTransformer3DModel:
    return ReCamTransformer3DModel(
        patch_size=(1, args.patch, args.patch),
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
        self.args, self.model = args, model
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(args.ema)
        )
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.99))
        super().__init__(args.work, model=self.model, average=self.average, optimizer=self.optimizer)

    def advance(self, pool: Pool, targets: list[int], text: Tensor, network: nn.Module, rank: int) -> Tensor:
        """Take one optimizer step on the clips `targets`, with noise seeded by step and rank; return the loss ()."""
        args = self.args
        rate = min(1.0, (self.step + 1) / 200) * min(1.0, 1.6 * (1 - self.step / args.steps) + 0.01)
        for group in self.optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        draw = generator("step", self.step, rank)
        target, source, cameras, captions = pool.batch(targets, draw)
        uniform = torch.rand(len(target), generator=draw)
        sigma = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
        noise = torch.randn(target.shape, generator=draw)
        level = sigma.view(-1, 1, 1, 1, 1)
        noisy = (1 - level) * target + level * noise
        predicted = predict(network, noisy, sigma, source, cameras, text[captions])
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
    parser.add_argument("--init", type=Path, help="pre-trained folder to start from, with its pretraining.json")
    parser.add_argument("--steps", type=int, default=7500)
    parser.add_argument("--minutes", type=float, default=60.0, help="time limit of this call; call again to resume")
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=48, help="samples per step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--patch", type=int, default=1)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--probe-steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    args = parser.parse_args()
    with processes(args) as (rank, world):
        codec = AutoencoderKLWan.from_pretrained(args.out / "vae").eval()
        text_encoder, tokenizer = build_text_encoder()
        text = encode_captions(text_encoder, tokenizer)
        pool = load_pool(codec, args, rank, world)
        model = build_model(args, codec.config.z_dim, text.shape[-1])
        if args.init is not None:
            loaded = load_transformer(ReCamTransformer3DModel, args.init / "transformer", torch.float32)
            model.load_state_dict(loaded.state_dict())
        training = ModelTraining(model, args)
        probes = {"sure": Probe(codec, SURE), "unsure": Probe(codec, UNSURE)} if rank == 0 else {}
        train(training, pool, text, probes, rank, world)
        if rank == 0:
            parts = {"transformer": training.average.module, "text_encoder": text_encoder}
            write_folder(training, parts, tokenizer)


def train(training: ModelTraining, pool: Pool, text: Tensor, probes: dict[str, Probe], rank: int, world: int) -> None:
    args, began, losses, earlier = training.args, time.time(), [], training.seconds
    network = DistributedDataParallel(training.model) if world > 1 else training.model
    for targets in pool.targets(args.batch, rank, world, training.step):
        if training.step >= args.steps:
            break
        losses.append(training.advance(pool, targets, text, network, rank))
        if training.step % args.probe_steps and training.step < args.steps:
            continue
        if rank == 0:
            spent, began = time.time() - began, time.time()
            training.seconds += spent
            loss = float(torch.stack(losses).mean())
            row = {"step": training.step, "seconds": round(training.seconds), "loss": loss}
            for name, probe in probes.items():
                measured = probe.measure(training.average.module.eval(), text)
                row |= {f"{name}_{key}": round(value, 3) for key, value in measured.items()}
            training.log(row)
            print(json.dumps(row), flush=True)
            training.save()
        losses = []
        late = torch.tensor([float(rank == 0 and training.seconds - earlier > 60 * args.minutes)])
        if world > 1:
            dist.broadcast(late, 0)
        if late:
            break


def load_pool(codec: AutoencoderKLWan, args: argparse.Namespace, rank: int, world: int) -> Pool:
    """Return all encoded clips; each rank encodes its share unless an earlier call did. Collective call."""
    files = [args.work / f"pool_{args.scenes}_{part}_of_{world}.pt" for part in range(world)]
    if not files[rank].exists():
        began = time.time()
        save_tensors(files[rank], encode_scenes(codec, "pretrain", range(rank, args.scenes, world)))
        print(f"rank {rank}: scenes encoded in {time.time() - began:.0f} s", flush=True)
    if world > 1:
        dist.barrier()
    parts = [torch.load(file, weights_only=True) for file in files]
    return Pool(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})


def write_folder(training: ModelTraining, parts: dict[str, nn.Module], tokenizer: PreTrainedTokenizerBase) -> None:
    args, out = training.args, training.args.out
    for name, part in parts.items():
        copy.deepcopy(part).half().save_pretrained(out / name)
    tokenizer.save_pretrained(out / "tokenizer")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(out / "scheduler")
    specs = {"first": WIDE, "second": NARROW, "second_labelled": LABELLED}
    data = {name: dataclasses.asdict(spec) for name, spec in specs.items()} | {"shares": SHARES}
    began = {}
    if args.init is not None:
        began["began_as"] = json.loads((args.init / "pretraining.json").read_text(encoding="utf-8"))
    training.write_record(out / "pretraining.json", "tools/dev/pretrain_tiny.py", args, SETTINGS, data=data, **began)


if __name__ == "__main__":
    main()
