"""How time, memory, work and traffic grow: with tokens, frames, copies, window, steps, samples of a rank, and ranks.

Every axis is measured at a few sizes; the exponent is the slope of a straight line through the logarithms: 1 is linear.
Where the planner has a line for the same axis, its exponent stands beside the measured one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

from flow_grpo.algorithm.groups import compare, metrics, subset
from flow_grpo.cost import traffic
from flow_grpo.cost.footprint import forward_flops, peak_bytes
from flow_grpo.cost.plan import make_plan
from flow_grpo.models.networks.recam_transformer import ReCamTransformer3DModel
from flow_grpo.models.networks.transformers import load_transformer
from flow_grpo.models.recam import RECAM
from flow_grpo.models.video_model import share_tokens
from flow_grpo.records import Conditioning, RewardResult, Samples, ScoredBatch, Trajectory
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.runtime.ranks import process_group
from flow_grpo.runtime.ranks.context import share_samples
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.settings.loading import load_config
from flow_grpo.settings.schema import Config
from tools.dev.bench_cases.exchange import condition, join
from tools.dev.bench_cases.transformer import TINY, call_of

ROOT = Path(__file__).resolve().parents[3]
RECIPE = f"{ROOT}/config/grpo.py:tiny_recam"
REPEATS, K = 5, 4
FRAMES, SIDES = (2, 4, 8, 16), ((4, 4), (8, 8), (12, 12), (16, 16))  # latents: of 8x8, and five frames of each size
SAMPLES, RANKS = (512, 2048, 8192), (1, 2, 4, 8)
KNOBS = {"k": (2, 4, 8), "window": (1, 2, 4), "steps": (6, 12, 24)}


@dataclasses.dataclass(frozen=True)
class Axis:
    """What grows with what.

    Attributes:
        what: is measured, with its unit.
        sizes: along the axis.
        measured: at these.
        planned: the planner's figures in any unit; () where it has none.
    """

    what: str
    sizes: Sequence[float]
    measured: Sequence[float]
    planned: Sequence[float] = ()

    def exponents(self) -> dict[str, float]:
        """Return the slopes by name."""
        return {"": slope(self.sizes, self.measured)} | (
            {"_planned": slope(self.sizes, self.planned)} if self.planned else {}
        )


def measure(plot: Path | None = None) -> dict[str, float]:
    """Return the exponents of all axes by name, and draw them if a file is given."""
    axes = {f"{name}_{part}": axis for name, found in _all().items() for part, axis in found.items()}
    if plot is not None:
        draw(axes, plot)
    return {f"{name}_exponent{kind}": value for name, axis in axes.items() for kind, value in axis.exponents().items()}


def slope(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through the logarithms."""
    x, y = (torch.tensor(row, dtype=torch.float64).log() for row in (sizes, values))
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


def _all() -> dict[str, dict[str, Axis]]:
    return {
        "frames": _calls([(frames, 8, 8) for frames in FRAMES], "tokens, by frames"),
        "tokens": _calls([(5, *side) for side in SIDES], "tokens, by rows and columns"),
        **{knob: _epochs(knob, values) for knob, values in KNOBS.items()},
        "samples": {"round": _rounds()},
        "ranks": {"sent": _sent()},
    }


def _calls(shapes: Sequence[tuple[int, int, int]], along: str) -> dict[str, Axis]:
    """Measure calls of the tiny network on latents of these frames, rows and columns."""
    network = load_transformer(ReCamTransformer3DModel, TINY)
    config, tokens = network.config, [2 * math.prod(shape) for shape in shapes]
    calls = [call_of(network, shape) for shape in shapes]
    flops = [forward_flops(RECAM, config, (config["in_channels"], *shape), 8) for shape in shapes]
    forward, update = (_seconds([functools.partial(call, train=train) for call in calls]) for train in (False, True))
    peaks = []
    for call in calls:
        network.zero_grad()  # so that every peak holds new gradients
        peaks.append(float(peak_bytes(functools.partial(call, train=True), network)))
    return {
        "forward": Axis(f"seconds of a forward against {along}", tokens, forward, flops),
        "update": Axis(f"seconds of an update against {along}", tokens, update, flops),
        "memory": Axis(f"bytes at an update's peak against {along}", tokens, peaks),
    }


def _seconds(calls: Sequence[Callable[[], None]]) -> list[float]:
    """Return the median seconds of each, interleaved because the speed of a shared machine drifts."""
    spent: list[list[float]] = [[] for _ in calls]
    for repeat in range(REPEATS + 1):
        for row, call in zip(spent, calls, strict=True):
            begun = time.perf_counter()
            call()
            row += [time.perf_counter() - begun] if repeat else []  # the first warms up
    return [statistics.median(row) for row in spent]


def _epochs(knob: str, values: Sequence[int]) -> dict[str, Axis]:
    """Measure epochs of the tiny recipe with a knob at these values."""
    seconds, forwards, kept, plans = [], [], [], []
    for value in values:
        k, window, steps = (value if knob == name else usual for name, usual in (("k", 4), ("window", 2), ("steps", 8)))
        last = steps - 2
        words = {
            "sample.k": k,
            "sample.num_image_per_prompt": k,
            "sample.train_batch_size": k,
            "sample.num_batches_per_epoch": 2,
            "train.batch_size": k,
            "train.copies": 0,
            "sample.num_steps": steps,
            "sample.sde_steps": ",".join(map(str, range(last + 1 - window, last + 1))),
            "sample.sde_window": window,
            "eval.num_conditions": 1,
            "data.num_workers": 0,
            "trackers": "",
            "reward.weights": "target_psnr=1",
            "eval.gold": "",
        }
        with tempfile.TemporaryDirectory() as folder:
            given = [f"--config.{name}={text}" for name, text in ({"output_root": folder} | words).items()]
            config, spec = read_command_line(["--config", RECIPE, *given])
            trainer = assemble(config, spec, torch.device("cpu"), World())
            for epoch in range(2):  # the first warms up
                trainer.forwards.mark()
                begun = time.perf_counter()
                samples = trainer.sample()
                batch = trainer.compare(trainer.choose(samples, trainer.gather(samples)))
                trainer.update(batch, epoch)
                trainer.finish_epoch(epoch)
            seconds.append(time.perf_counter() - begun)
            forwards.append(trainer.forwards.since_mark()[0])
            kept.append(float(sum(one.nbytes for part in samples for one in part.samples.tensors().values())))
            trainer.tracker.close()
        plans.append(make_plan(config, 1, 1e12))
    planned = [plan.forward_equivalents_per_sample * plan.samples_per_epoch for plan in plans]
    return {
        "epoch": Axis(f"seconds of an epoch against {knob}", values, seconds, planned),
        "work": Axis(f"forwards of an epoch against {knob}", values, forwards, planned),
        "memory": Axis(f"bytes of a round's samples against {knob}", values, kept, [p.trajectories_gib for p in plans]),
    }


def _rounds() -> Axis:
    """Measure what is done with a round's samples besides calling networks."""
    spent = [statistics.median(_round_s(_batch(count)) for _ in range(REPEATS)) for count in (SAMPLES[0], *SAMPLES)]
    return Axis("seconds of choosing and comparing against samples of a rank", SAMPLES, spent[1:])


def _round_s(batch: ScoredBatch) -> float:
    config = _recipe_for(len(batch))
    world, begun = World(), time.perf_counter()
    gathered = compare.gather([batch], world)
    compare.check(gathered, config.sample, world)
    metrics.reward_metrics(gathered, config.reward.weights)
    metrics.camera_metrics(gathered, ("left", "right") * (len(batch) // 2))
    chosen = compare.everything([batch], gathered, world)
    compared = compare.advantages(gathered, config.reward, k=K, floors={})
    compare.own_rows(chosen, compared, world)
    narrowed, fewer = subset.narrow(chosen, compared, 2, world)
    own = compare.own_rows(narrowed, fewer, world)
    for places in torch.arange(len(own)).split(K):
        own.take(places, "cpu")
    return time.perf_counter() - begun


def _recipe_for(count: int) -> Config:
    config = load_config(RECIPE, [])
    sample = dataclasses.replace(config.sample, k=K, train_batch_size=K, num_batches_per_epoch=count // K)
    reward = dataclasses.replace(config.reward, weights={"reward": 1.0}, schedules={}, gates={})
    return dataclasses.replace(config, sample=sample, reward=reward)


def _batch(count: int) -> ScoredBatch:
    keys = torch.tensor([[row // K, row % K, row // K] for row in range(count)])
    samples = Samples(
        keys=keys,
        places=torch.arange(count),
        noise_ids=torch.arange(2 * count).view(count, 2),
        conditioning=Conditioning(torch.zeros(count, 1, 1)),
        trajectory=Trajectory(torch.zeros(count, 2, 1), torch.zeros(count, 1), torch.ones(count, 1, dtype=torch.int64)),
        final_latents=torch.zeros(count, 1),
    )
    conditions = tuple(condition(gid, slot) for gid, slot, _ in keys.tolist())
    values = torch.rand(count, generator=torch.Generator().manual_seed(count))
    reward = RewardResult(values, torch.ones(count, dtype=torch.bool), ("",) * count)
    return ScoredBatch(conditions, samples, {"reward": reward}, torch.zeros(0))


def _sent() -> Axis:
    """Count what a rank sends in an update when so many share every sample; alone it sends nothing."""
    shape, network = (5, 8, 8), load_transformer(ReCamTransformer3DModel, TINY)
    shared = [count for count in RANKS if count > 1]
    config, planned = load_config(RECIPE, []), []
    for count in shared:
        one = dataclasses.replace(config, train=dataclasses.replace(config.train, context_parallel=count))
        planned.append(traffic.tokens(one, network.config, 2 * math.prod(shape), 2, rows=2, recomputed=0))
    sent = []
    for count in shared:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (count, shape, folder)
            torch.multiprocessing.start_processes(_rank, arguments, nprocs=count, start_method="spawn")
            sent.append(statistics.mean(float(Path(folder, f"{rank}.txt").read_text()) for rank in range(count)))
    return Axis("bytes a rank sends in an update against ranks that share it", shared, sent, planned)


def _rank(rank: int, world: int, shape: tuple[int, int, int], folder: str) -> None:
    world = join(rank, world, folder)
    _, context = share_samples(world, world, torch.device("cpu"))
    network = load_transformer(ReCamTransformer3DModel, TINY)
    share_tokens(network, context)
    call_of(network, shape)(train=True)
    Path(folder, f"{rank}.txt").write_text(str(world.sent["tokens"]))
    process_group.shut_down(world)


def draw(axes: dict[str, Axis], path: Path) -> None:
    """Write a PNG with a panel per axis, measured points and the planner's line through their middle."""
    columns = 4
    figure = Figure(figsize=(4.2 * columns, 3.1 * math.ceil(len(axes) / columns)), dpi=100, layout="constrained")
    for place, axis in enumerate(axes.values(), start=1):
        panel: Any = figure.add_subplot(math.ceil(len(axes) / columns), columns, place)
        found = axis.exponents()
        panel.loglog(axis.sizes, axis.measured, "o-", label=f"measured, exponent {found['']:.2f}")
        if axis.planned:
            scale = math.exp(statistics.mean(math.log(m / p) for m, p in zip(axis.measured, axis.planned, strict=True)))
            line = [scale * value for value in axis.planned]
            panel.loglog(axis.sizes, line, "--", label=f"planned, exponent {found['_planned']:.2f}")
        what, _, against = axis.what.partition(" against ")
        panel.set_title(what, fontsize=10)
        panel.set_xlabel(against)
        panel.set_xticks(list(axis.sizes), [f"{size:g}" for size in axis.sizes])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.yaxis.set_major_formatter(EngFormatter())
        panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))  # few panels span a decade
        panel.yaxis.set_minor_formatter(EngFormatter())
        panel.legend(fontsize=8)
    figure.savefig(path)
