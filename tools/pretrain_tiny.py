"""Pre-train the tiny ReCam model by flow matching, on camera labels of ambiguous unit. Resumable.

    torchrun --nproc_per_node=2 tools/pretrain_tiny.py --work .work/base --out assets/tiny_recam

Two data sources are mixed, as when labels come from different pipelines: one moves its camera by tenths of metres to
metres and labels it in metres, the other by centimetres and labels it in decimetres, so that the same numbers mean ten
times less motion. For large labels nothing in label or source video tells which, so a good model must choose; what a
metric reward can teach it later is which unit the user means. Latents of all clips are encoded once.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

import flow_grpo  # noqa: F401, I001 - before torch, which otherwise loads any accelerator plug-in, unguarded

import torch
import torch.distributed as dist
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
from tools.tiny.probe import MOVING, SHIFT, SURE, UNSURE, Probe, encode, in_unit, predict, scene_cameras
from tools.tiny.text import CAPTIONS, build_text_encoder, encode_captions
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedTokenizerBase

from flow_grpo.data.dynamic_batch import DistributedWeightedSampler, DynamicBatchSampler
from flow_grpo.data.tiny_world import WorldSpec, caption, film, make_scene
from flow_grpo.maths.keys import generator
from flow_grpo.maths.poses import PRESETS, preset_path
from flow_grpo.models.recam_transformer import ReCamTransformer3DModel

DECIMETRES = 10.0  # in a metre: the factor on the labels of the second source
WIDE = WorldSpec(seed=12, scenes={}, translation=(0.12, 0.65), rotation=(0.3, 1.0))  # labelled in metres
NARROW = dataclasses.replace(WIDE, translation=(0.035, 0.065))  # labelled in decimetres: 0.35 to 0.65 again
# Of the targets: rotation only; narrow; wide with labels that narrow clips have, too; wide with smaller labels.
SHARES = {"still": 0.2, "narrow": 0.3, "wide": 0.3, "sure": 0.2}
SETTINGS = ("steps", "scenes", "batch", "learning_rate", "width", "ffn", "layers", "patch", "ema")  # for the record


class Pool:
    """Encoded clips of many scenes: ten wide cameras each, and six narrow ones for the moving presets.

    Attributes:
        latents: (scenes, 16, C, F, H, W) fp16 to save memory.
        cameras: (scenes, 16, F, 12) fp32 labels relative to the common start, each in its source's unit.
        captions: (scenes,) index into CAPTIONS.
    """

    def __init__(self, latents: Tensor, cameras: Tensor, captions: Tensor) -> None:
        self.latents, self.cameras, self.captions = latents, cameras, captions
        self._weights = self._draw_weights()

    @classmethod
    def encode(cls, codec: AutoencoderKLWan, split: str, scenes: range) -> Pool:
        """Film and encode scenes of these numbers."""
        latents, cameras, captions = [], [], []
        for number in scenes:
            wide, narrow = make_scene(WIDE, split, number), make_scene(NARROW, split, number)
            videos = torch.cat([film(WIDE, [wide], list(range(10))), film(NARROW, [narrow], list(MOVING))])
            latents.append(encode(codec, videos).half())
            labels = in_unit(scene_cameras(narrow, codec)[list(MOVING)], DECIMETRES)
            cameras.append(torch.cat([scene_cameras(wide, codec), labels]))
            captions.append(CAPTIONS.index(caption(videos[0])))
        return cls(torch.stack(latents), torch.stack(cameras), torch.tensor(captions))

    @classmethod
    def load(cls, files: list[Path]) -> Pool:
        """Read the pools of several files as one."""
        parts = [torch.load(file, weights_only=True) for file in files]
        return cls(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def save(self, file: Path) -> None:
        """Write the tensors; the file appears whole."""
        partial = file.with_suffix(".tmp")
        torch.save({"latents": self.latents, "cameras": self.cameras, "captions": self.captions}, partial)
        partial.rename(file)

    def _draw_weights(self) -> Tensor:
        """Return (scenes * 16,) how often each clip is drawn as a target, so that `SHARES` come out."""
        travel = self.cameras.unflatten(-1, (3, 4))[:, :, -1, :, 3].norm(dim=-1)  # (scenes, 16) as labelled
        full = [float(preset_path(name, 2)[-1, :3, 3].norm()) for name in PRESETS]
        full = torch.tensor(full + full[MOVING[0] :])
        narrow = (torch.arange(len(full)) >= len(PRESETS)).expand_as(travel)
        still, unsure = (full == 0).expand_as(travel), travel >= UNSURE.translation[0] * full
        kinds = {"still": still, "narrow": narrow, "wide": unsure & ~still & ~narrow, "sure": ~unsure & ~narrow}
        shares = [SHARES[name] * kind / kind.sum().clamp_min(1) for name, kind in kinds.items()]
        return torch.stack(shares).sum(0).flatten()

    def targets(self, size: int, rank: int, world: int, step: int = 0) -> Iterator[list[int]]:
        """Yield this rank's targets of every step from `step` on, drawn by weight from one list over all ranks.

        Args:
            size: targets of a step over all ranks.
            rank: this rank.
            world: number of ranks.
            step: the first.
        """
        clips = range(len(self._weights))
        drawn = DistributedWeightedSampler(clips, self._weights, len(clips) // size * size, True, world, rank)
        # All clips cost the same, so that every epoch has as many rows.
        sampler = DynamicBatchSampler(
            clips, size // world, sampler=drawn, num_replicas=world, rank=rank, cost=lambda _: 1, drop_last=True
        )
        epoch, row = divmod(step, len(sampler))
        while True:
            sampler.set_epoch(epoch)
            yield from itertools.islice(sampler, row, None)
            epoch, row = epoch + 1, 0

    def batch(self, targets: list[int], draw: torch.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return target latents, source latents, cameras as labelled and captions; sources are drawn here."""
        chosen = torch.tensor(targets)
        scene, target = chosen // self.cameras.shape[1], chosen % self.cameras.shape[1]
        preset = torch.where(target < len(PRESETS), target, target - len(MOVING))
        source = (preset + torch.randint(1, 10, (len(chosen),), generator=draw)) % 10
        clips = self.latents[scene, target].float(), self.latents[scene, source].float()
        return *clips, self.cameras[scene, target], self.captions[scene]


def build_model(args: argparse.Namespace, channels: int, text_dim: int) -> ReCamTransformer3DModel:
    """Return an untrained transformer."""
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


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder of the resumable state")
    parser.add_argument(
        "--out", type=Path, required=True, help="diffusers folder; pretrain_codec.py has put vae/ there"
    )
    parser.add_argument("--steps", type=int, default=7500)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop this call after so long; call again to go on")
    parser.add_argument("--scenes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=48, help="samples a step, over all ranks")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--ffn", type=int, default=384)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--patch", type=int, default=1)
    parser.add_argument("--ema", type=float, default=0.999)
    parser.add_argument("--probe-steps", type=int, default=500)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    return parser.parse_args()


class Training:
    """The state of a run: weights, their average, the optimizer, and how far it is."""

    def __init__(self, model: ReCamTransformer3DModel, args: argparse.Namespace) -> None:
        self.args, self.model = args, model
        self.average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(args.ema)
        )
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.9, 0.99))
        self.file, self.step, self.seconds = args.work / "state.pt", 0, 0.0
        if self.file.exists():
            state = torch.load(self.file, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]

    def save(self) -> None:
        """Write the state beside the old one, then replace it."""
        parts = {name: getattr(self, name).state_dict() for name in ("model", "average", "optimizer")}
        partial = self.file.with_suffix(".tmp")
        torch.save({**parts, "step": self.step, "seconds": self.seconds}, partial)
        partial.rename(self.file)

    def advance(self, pool: Pool, targets: list[int], text: Tensor, network: nn.Module, rank: int) -> Tensor:
        """Take one step on this rank's targets and return its loss ()."""
        args = self.args
        rate = min(1.0, (self.step + 1) / 200) * min(1.0, 1.6 * (1 - self.step / args.steps) + 0.01)
        for group in self.optimizer.param_groups:
            group["lr"] = args.learning_rate * rate
        draw = generator("step", self.step, rank)
        loss = flow_matching_loss(network, pool.batch(targets, draw), text, draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.average.update_parameters(self.model)
        self.step += 1
        return loss.detach()


def flow_matching_loss(network: nn.Module, batch: tuple[Tensor, ...], text: Tensor, draw: torch.Generator) -> Tensor:
    """Return the mean squared error of the velocity at random noise levels."""
    target, source, cameras, captions = batch
    uniform = torch.rand(len(target), generator=draw)
    sigma = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
    noise = torch.randn(target.shape, generator=draw)
    level = sigma.view(-1, 1, 1, 1, 1)
    predicted = predict(network, (1 - level) * target + level * noise, sigma, source, cameras, text[captions])
    return (predicted - (noise - target)).square().mean()


def main() -> None:
    """Train, probing the motion the model chooses, and write the diffusers folder."""
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    args.work.mkdir(parents=True, exist_ok=True)
    codec = AutoencoderKLWan.from_pretrained(args.out / "vae").eval()
    text_encoder, tokenizer = build_text_encoder()
    text = encode_captions(text_encoder, tokenizer)
    pool = load_pool(codec, args, rank, world)
    training = Training(build_model(args, codec.config.z_dim, text.shape[-1]), args)
    network = DistributedDataParallel(training.model) if world > 1 else training.model
    probes = {"sure": Probe(codec, SURE), "unsure": Probe(codec, UNSURE)} if rank == 0 else {}
    began, losses, earlier = time.time(), [], training.seconds
    for targets in pool.targets(args.batch, rank, world, training.step):
        if training.step >= args.steps:
            break
        losses.append(training.advance(pool, targets, text, network, rank))
        if training.step % args.probe_steps and training.step < args.steps:
            continue
        if rank == 0:
            spent, began = time.time() - began, time.time()
            training.seconds += spent
            report(training, probes, text, torch.stack(losses).mean())
        losses = []
        late = torch.tensor([float(rank == 0 and training.seconds - earlier > 60 * args.minutes)])
        if world > 1:
            dist.broadcast(late, 0)
        if late:
            break
    if rank == 0:
        parts = {"transformer": training.average.module, "text_encoder": text_encoder}
        write_folder(args, parts, tokenizer)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def load_pool(codec: AutoencoderKLWan, args: argparse.Namespace, rank: int, world: int) -> Pool:
    """Return the encoded clips, from disk when an earlier call made them; every rank makes its share."""
    files = [args.work / f"pool_{args.scenes}_{part}_of_{world}.pt" for part in range(world)]
    if not files[rank].exists():
        began = time.time()
        Pool.encode(codec, "pretrain", range(rank, args.scenes, world)).save(files[rank])
        print(f"rank {rank}: scenes encoded in {time.time() - began:.0f} s", flush=True)
    if world > 1:
        dist.barrier()
    return Pool.load(files)


def report(training: Training, probes: dict[str, Probe], text: Tensor, loss: Tensor) -> None:
    """Log one line and save the state."""
    row = {"step": training.step, "seconds": round(training.seconds), "loss": float(loss)}
    for name, probe in probes.items():
        measured = probe.measure(training.average.module.eval(), text)
        row |= {f"{name}_{key}": round(value, 3) for key, value in measured.items()}
    with (training.args.work / "log.jsonl").open("a") as log:
        log.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)
    training.save()


def write_folder(args: argparse.Namespace, parts: dict[str, nn.Module], tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the diffusers layout, weights in half precision, and the record of how they came about."""
    for name, part in parts.items():
        copy.deepcopy(part).half().save_pretrained(args.out / name)
    tokenizer.save_pretrained(args.out / "tokenizer")
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(args.out / "scheduler")
    record = {
        "tool": "tools/pretrain_tiny.py",
        "torch": torch.__version__,
        "seed": 0,
        "settings": {name: getattr(args, name) for name in SETTINGS},
        "data": {"metres": dataclasses.asdict(WIDE), "decimetres": dataclasses.asdict(NARROW), "shares": SHARES},
        "log": [json.loads(line) for line in (args.work / "log.jsonl").read_text().splitlines()],
    }
    (args.out / "pretraining.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
