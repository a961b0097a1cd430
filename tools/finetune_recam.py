r"""Fine-tune a ReCam model by flow matching on a MultiCamVideo folder, in batches of bounded token count. Resumable.

    torchrun --nproc_per_node=8 tools/finetune_recam.py --config config/grpo.py:my_recam_8npu --run-name first \
        --epochs 2 --max-points 500000 --config.data.root=/data/MultiCamVideo-Dataset

Of the recipe, device, output_root, data, model, sample.shift, checkpoint.keep and train's AdamW and gradient-norm
settings apply; the rest concerns GRPO. The loss of an item is the mean squared velocity error at one noise level,
sigma = shift * u / (1 + (shift - 1) * u) with u uniform in [0, 1): as in ReCamMaster (train_recammaster.py of
KwaiVGI/ReCamMaster, a uniform step of the shifted grid), without its weights, which favour middle levels. Sigma and
noise depend on (seed, epoch, item, how often the epoch drew it before) only, not on batch, rank or restart.

--weights FILE draws items by weight, with replacement: JSON of item or folder below the split -> weight, such as
{"train/f18_aperture10": 2, "train/f24_aperture5/scene1/cam03": 0.5}; the longest name that fits an item counts, items
without one weigh 1. With --no-use-dynamic-batch a batch has --batch-size items, and those that would take it above
--max-points are dropped from it (`train/dropped`).

<output_root>/<run name>/ receives metrics, checkpoints/, adapter/ under LoRA, and finally model/, a complete folder to
start GRPO from: --config.model.path=<output_root>/<run name>/model. Its frozen parts are links to the base model's.
Exit code: 0, or 2 for unusable settings or an unreadable item.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.data import STRATEGIES
from flow_grpo.run.at_once import answer_at_once
from tools.common import make_parser

PARSER = make_parser(__doc__, recipe=True)
add, flag = PARSER.add_argument, argparse.BooleanOptionalAction
add("--run-name", default="", help="folder below output_root; default: the recipe's, or recipe and time")
add("--epochs", type=int, default=1, help="passes over data.train_split")
add("--max-steps", type=int, default=0, help="total optimizer steps; 0: no limit")
add("--use-dynamic-batch", action=flag, default=True, help="bound a batch by tokens instead of items")
add("--max-points", type=int, default=500_000, help="target tokens per batch; source tokens come on top")
add("--batch-size", type=int, default=4, help="items per batch; ignored with dynamic batches")
add("--weights", type=Path, help="JSON file: weights of items or folders, see above; without, each item once")
add("--num-samples", type=int, default=0, help="draws per epoch with --weights; 0: as many as there are items")
add("--drop-strategy", choices=STRATEGIES, default=STRATEGIES[0], help="which items a batch of fixed size drops")
add("--num-workers", type=int, default=4, help="loader processes per rank")
add("--prefetch-factor", type=int, default=2, help="batches of videos that each loader process holds ready")
add("--drop-last", action="store_true", help="drop the last batches if there is not one for every rank")
add("--seed", type=int, default=42, help="of order, noise levels and noise; replaces the recipe's")
add("--checkpoint-every", type=int, default=100, help="steps; the last step is always saved")
add("--log-every", type=int, default=10, help="steps")
add("--eval-items", type=int, default=64, help="items of data.eval_split to evaluate before and after; 0: none")
add("--resume", action="store_true", help="resume from the run's newest checkpoint")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

import torch
from einops import rearrange
from torch import Tensor

from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.algorithm.update.updater import set_learning_rates
from flow_grpo.data.dataset import make_loader, next_batch
from flow_grpo.data.dynamic_batch import DistributedWeightedSampler, DynamicBatchSampler, LimitedPointsCollateFn
from flow_grpo.data.multicam import MultiCamDataset
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.maths.keys import generator
from flow_grpo.models import adapters
from flow_grpo.models.files.adapter_files import save_adapter
from flow_grpo.models.registry import video_model
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.records import Condition
from flow_grpo.reporting.metric_files import MetricFiles
from flow_grpo.run.assemble import check_sizes, run_name, share_tokens, splits
from flow_grpo.run.parts import build_optimizer
from flow_grpo.run.run_state import common_identity
from flow_grpo.runtime.checkpoints import checkpoint, resume, saving
from flow_grpo.runtime.checkpoints.moments import load_moments, moments_by_place
from flow_grpo.runtime.checkpoints.run_lock import RunLock
from flow_grpo.runtime.processes import start_program
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.context_parallel import share_samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import parallelize, unwrap
from flow_grpo.runtime.ranks.start_up import raise_on_all_ranks, refuse, set_up_rank
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.loading import ConfigError, load_config
from flow_grpo.settings.schema import Config
from tools.finetuning.items import Items, item_tokens, item_weights

POSITIVE = ("epochs", "max_points", "batch_size", "prefetch_factor", "checkpoint_every", "log_every")


class ItemError(ValueError):
    """An item cannot be read; raised on every rank."""


def main(words: Sequence[str] | None = None) -> int:
    world = run = None
    try:
        args, config = read_command_line(words)
        device, world = set_up_rank(config)
        run = build(args, config, device, world)
        run.train()
        run.finish()
    except ValueError as error:
        if run is not None and not isinstance(error, ItemError):
            raise  # on this rank alone: the others would hang in `refuse`, which stops the process group
        return refuse(error, world)
    process_group.shut_down(world)
    return 0


def read_command_line(words: Sequence[str] | None) -> tuple[argparse.Namespace, Config]:
    """Return the options and the checked configuration; ConfigError, the same on every rank, for invalid values."""
    args, overrides = PARSER.parse_known_args(words)
    for name, value in vars(args).items():
        if isinstance(value, int) and value < (least := int(name in POSITIVE)):
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}, must be at least {least}")
    if args.num_samples and args.weights is None:
        raise ConfigError(f"--num-samples: got {args.num_samples} without --weights, which draws; give --weights FILE")
    overrides += [f"--config.run_name={args.run_name}"] if args.run_name else []
    overrides += ["--config.resume=auto"] if args.resume else []
    return args, load_config(args.config, overrides)


@dataclasses.dataclass
class Batches:
    """This rank's batches of a split: one video size each, at most --max-points target tokens or --batch-size items.

    Training batches are drawn anew every epoch. With `held_out`, the batches cover exactly these items in this order.
    Raises ValueError if an item exceeds the token limit, or if there are fewer batches than ranks.
    """

    args: argparse.Namespace
    dataset: MultiCamDataset
    policy: WanPolicy
    world: World
    held_out: Sequence[int] | None = None

    def __post_init__(self) -> None:
        args, dataset, world, training = self.args, self.dataset, self.world, self.held_out is None
        tokens = self.policy.tokens if args.use_dynamic_batch else lambda _: 1
        weighted = None
        if training and args.weights is not None:
            weights, draws = item_weights(args.weights, dataset), args.num_samples or len(dataset)
            weighted = DistributedWeightedSampler(
                dataset, weights, draws, num_replicas=world.data.size, rank=world.data.rank, seed=args.seed
            )
        self.plan = DynamicBatchSampler(
            dataset,
            args.max_points if args.use_dynamic_batch else args.batch_size,
            shuffle=training,
            drop_last=args.drop_last and training,
            sampler=weighted if training else self.held_out,
            num_replicas=world.data.size,
            rank=world.data.rank,
            seed=args.seed,
            cost=lambda index: tokens(dataset.size_of(index)),
        )
        collate: Callable[[list[Condition | str]], Any] = list
        if training and not args.use_dynamic_batch:
            by_size = {size: self.policy.tokens(size) for size in map(dataset.size_of, range(len(dataset)))}
            cost = functools.partial(item_tokens, by_size)  # goes to loader processes by pickle, without the policy
            collate = LimitedPointsCollateFn(args.max_points, args.drop_strategy, cost=cost)
        self.loader = make_loader(
            Items(dataset),
            self.plan,
            args.num_workers,
            persistent=training,
            prefetch_factor=args.prefetch_factor,
            collate=collate,
        )

    def __iter__(self) -> Iterator[list[Condition]]:
        """Yield the epoch's remaining batches. Collective call; an error on one rank is raised on all."""
        batches = iter(self.loader)
        for _ in range(len(self.plan)):
            with self.world.sync_errors("loading a batch"):
                batch = next_batch(batches)
            problems = self.world.all.gather_text("; ".join(item for item in batch if isinstance(item, str)))
            if any(problems):
                raise ItemError("; ".join(dict.fromkeys(filter(None, problems))))
            yield batch


def build(args: argparse.Namespace, config: Config, device: torch.device, world: World) -> FineTuning:
    """Load all parts; raises ValueError on every rank for anything missing or unusable on any."""
    with raise_on_all_ranks(world):
        if world.is_main and config.data.tiny_world:
            ensure_tiny_world(config.data.root, config.data.tiny_world)
    world, context = share_samples(world, config.train.context_parallel, device)
    folder = Path(config.output_root) / run_name(config, args.config.rpartition(":")[2], world)
    with raise_on_all_ranks(world):
        if config.data.prompts:
            raise refusal(
                "data.prompts", config.data.prompts, "must be empty: there is no true video of a prompt alone"
            )
        # At every noise level, whatever RL leaves to its starting weights, and without guidance.
        model = dataclasses.replace(config.model, boundary_ratio=0.0)
        sample = dataclasses.replace(config.sample, guidance_scale=1.0)
        policy = WanPolicy.from_config(video_model(config.model.kind), model, sample, device)
        data, measured = splits(config, world)
        check_sizes(policy, data, measured)
        batches = Batches(args, data, policy, world)
        spread = [n * len(measured) // args.eval_items for n in range(args.eval_items)]  # evenly over the scenes
        held_out = Batches(args, measured, policy, world, sorted(set(spread))) if spread else None
    identity = common_identity(policy, config.model.trained, data, world)
    world.data.check_equal("; ".join(each.plan.fingerprint() for each in (batches, held_out) if each), "batch plan")
    share_tokens(policy, context)
    policy.module = parallelize(policy.module, "ddp", device, world)
    optimizer = build_optimizer(config, policy)
    return FineTuning(args, config, policy, optimizer, batches, held_out, identity, world, folder)


def numbered(conditions: Sequence[Condition], before: Mapping[int, int]) -> list[Condition]:
    """Return the conditions with their draw of the epoch as slot: 0, or for one drawn `before` how often it was."""
    draws = Counter(before)
    found = []
    for condition in conditions:
        found.append(dataclasses.replace(condition, slot=draws[condition.index]))
        draws[condition.index] += 1
    return found


def flow_losses(policy: WanPolicy, conditions: Sequence[Condition], shift: float, *seeds: object) -> Tensor:
    """Return (B,) fp32 mean squared velocity errors.

    `seeds`, an item's index and, for one drawn again in the same epoch, its `slot` determine its sigma and noise.
    """
    clean = policy.encode_targets(conditions)
    sources = [generator("fine-tuning", *seeds, c.index, *([c.slot] if c.slot else [])) for c in conditions]
    uniform = torch.stack([torch.rand((), generator=source) for source in sources])
    noise = torch.stack([torch.randn(clean.shape[1:], generator=source) for source in sources]).to(clean)
    sigma = (shift * uniform / (1 + (shift - 1) * uniform)).to(clean)
    level = rearrange(sigma, "b -> b 1 1 1 1")
    predicted = policy.velocity((1 - level) * clean + level * noise, sigma, policy.encode(conditions))
    return (predicted - (noise - clean)).square().flatten(1).mean(dim=1)


@dataclasses.dataclass
class FineTuning:
    """A run; resumes from its newest checkpoint if the configuration says so. Its folder is locked until `finish`.

    Collective: every rank constructs it and calls its methods, and an error on one is raised on all: ValueError for a
    folder in use or an unusable or conflicting checkpoint, ItemError for an unreadable item, RuntimeError for a
    non-finite loss or gradient, in which case the weights are those before the step.
    """

    args: argparse.Namespace
    config: Config
    policy: WanPolicy
    optimizer: torch.optim.Optimizer
    batches: Batches
    held_out: Batches | None
    identity: dict[str, str]  # hashes of model and data, stored in checkpoints
    world: World
    folder: Path
    step: int = 0  # optimizer steps taken
    consumed: int = 0  # rows of the epoch's batch plan already trained

    def __post_init__(self) -> None:
        folder, plan = self.folder / "checkpoints", self.batches.plan
        self.lock = RunLock(self.folder)
        with raise_on_all_ranks(self.world):
            if self.world.is_main:
                self.lock.take()
        path = resume.find(self.config.resume, folder, world=self.world)
        if path is not None:
            found = checkpoint.load(path, identity=self.identity, world=self.world)
            plan.load_state_dict(found.state["plan"])
            self.step, self.consumed = found.step, found.state["plan"]["consumed"]
            adapters.load_trained_state(self.policy.module, found.state["trained"])
            load_moments(self.optimizer, self.policy.trained_parameters(), found.state["moments"])
        resume.commit(self.config.resume, path, folder, world=self.world)
        # Since the last report.
        self._sums, self._dropped, self._norm, self._begun = torch.zeros(2, dtype=torch.float64), 0, 0.0, 0.0
        self._files: MetricFiles | None = None
        if self.world.is_main:
            self._files = MetricFiles(self.folder, None if path is None else self.step)

    def train(self) -> None:
        if not self.step:
            self.evaluate()
        self._begun, plan = time.perf_counter(), self.batches.plan
        for epoch in range(plan.epoch, self.args.epochs):
            self.consumed = self.consumed if epoch == plan.epoch else 0
            plan.set_epoch(epoch)
            for conditions in self.batches:
                if 0 < self.args.max_steps <= self.step:
                    return
                self.take_step(conditions)

    def take_step(self, conditions: Sequence[Condition]) -> None:
        plan = self.batches.plan
        conditions = numbered(conditions, plan.drawn_before(self.consumed))
        losses = flow_losses(self.policy, conditions, self.config.sample.shift, self.args.seed, plan.epoch)
        bad = [item.index for item, fine in zip(conditions, losses.isfinite().tolist(), strict=True) if not fine]
        error = RuntimeError(f"loss of items {bad} is not finite") if bad else None
        self.world.raise_if_any_failed(error, f"step {self.step + 1}")
        weight = plan.batch_weight(self.consumed)  # 0 for filler, which only keeps the collectives in step
        items = int(self.world.data.all_gather(torch.tensor([weight * len(conditions)])).sum())  # less what was dropped
        (weight * losses.sum() * self.world.data.size / items).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.trained_parameters(), self.config.train.max_grad_norm)
        if not norm.isfinite():  # the same on every rank: gradients are averaged already
            raise RuntimeError(f"gradient norm is {norm:g} in step {self.step + 1}: weights were left as they are")
        set_learning_rates(self.optimizer, UpdateHistory(taken=self.step).warm_up(self.config.train.warmup_steps))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._dropped += plan.real_items(self.consumed) - items
        self.step, self.consumed, self._norm = self.step + 1, self.consumed + 1, float(norm)
        self._sums += weight * torch.tensor([float(losses.detach().sum()), len(losses)])
        if self.step % self.args.log_every == 0:
            self.log()
        if self.step % self.args.checkpoint_every == 0:
            self.save()

    def log(self) -> None:
        total, items = self.world.data.all_gather(self._sums[None]).sum(dim=0).tolist()
        if items:
            speed = items / (time.perf_counter() - self._begun)
            found = {"train/loss": total / items, "train/grad_norm": self._norm, "train/items_per_s": speed}
            self._report(found | ({} if self.args.use_dynamic_batch else {"train/dropped": float(self._dropped)}))
        self._sums, self._dropped, self._begun = torch.zeros_like(self._sums), 0, time.perf_counter()

    def save(self) -> None:
        state = {
            "trained": adapters.trained_parameters(self.policy.module),
            "moments": moments_by_place(self.optimizer, self.policy.trained_parameters()),
            "plan": self.batches.plan.state_dict(self.consumed),
        }
        folder, keep, world = self.folder / "checkpoints", self.config.checkpoint.keep, self.world
        begun = saving.begin(
            folder, self.step, state=state, per_rank={}, identity=self.identity, world=world, keep=keep
        )
        begun.wait()

    @torch.no_grad()
    def evaluate(self) -> None:
        """Log the mean loss of the held-out items, with the same noise every time."""
        if self.held_out is None:
            return
        sums = torch.zeros(2, dtype=torch.float64)
        for number, conditions in enumerate(self.held_out):
            losses = flow_losses(self.policy, conditions, self.config.sample.shift, "held out")
            sums += self.held_out.plan.batch_weight(number) * torch.tensor([float(losses.sum()), len(losses)])
        total, items = self.world.data.all_gather(sums[None]).sum(dim=0).tolist()
        self._report({"eval/loss": total / items})

    def finish(self) -> None:
        self.log()
        if self.step % self.args.checkpoint_every:
            self.save()
        self.evaluate()
        with self.world.sync_errors("writing the model"):
            if self.world.is_main:
                write_model(self.policy, Path(self.config.model.path), self.folder)
                knob = shlex.quote(f"--config.model.path={self.folder / 'model'}")
                print(f"start GRPO from it: train_grpo.py ... {knob}", flush=True)
        self.lock.release()

    def _report(self, metrics: dict[str, float]) -> None:
        if self._files is not None:
            self._files.append(metrics, self.step)
            print(f"step {self.step}:", *(f"{name} {value:.4g}" for name, value in metrics.items()), flush=True)


def write_model(policy: WanPolicy, start: Path, folder: Path) -> None:
    """Write `model/` with LoRA merged (in place: the run is over) and links to the base model's frozen parts."""
    network: Any = unwrap(policy.module)
    if adapters.has_lora(network):
        save_adapter(policy, folder / "adapter")
        adapters.merge_adapters(network)
    network.save_pretrained(str(folder / "model" / "transformer"))
    for part in ("vae", "text_encoder", "tokenizer"):
        link = folder / "model" / part
        link.unlink(missing_ok=True)
        link.symlink_to((start / part).resolve())


if __name__ == "__main__":
    start_program()
    sys.exit(main())
