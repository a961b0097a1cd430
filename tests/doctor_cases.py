"""A small recipe for the doctor's tests, and faults to plant into the code that it examines."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from unittest import mock

import torch
from torch import nn

from flow_grpo.algorithm.rollout import collector, denoise
from flow_grpo.algorithm.update import updater
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.models.adapters import trained_parameters
from flow_grpo.models.wan_policy import WanPolicy
from flow_grpo.preflight.doctor import probe
from flow_grpo.preflight.doctor.findings import Finding
from flow_grpo.run import assemble as assemble_module
from flow_grpo.run.assemble import assemble
from flow_grpo.run.command_line import read_command_line
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import averaging_gradients
from flow_grpo.settings.sampling import Sampling
from tests.command import command
from tests.tiny_models import make_tiny_folder
from tests.untuned import UNTUNED

ROOT = Path(__file__).parents[1]
SMALL = UNTUNED | {
    "device": "cpu",
    "trackers": "",
    "data.tiny_world": "unit_test",
    "data.tune_scenes": 0,
    "data.num_frames": 5,
    "sample.k": 2,
    "sample.train_batch_size": 2,
    "sample.num_batches_per_epoch": 1,
    "sample.num_steps": 6,
    "sample.sde_steps": "0,1,2,3",
    "train.batch_size": 2,
    # An untrained model's views are too alike for target_view: exposure tells the copies apart.
    "reward.weights": "target_view=1,exposure=0.01",
    "eval.num_conditions": 4,
    "eval.num_steps": 2,
    "eval.gold": "",
    "eval.videos": 1,
    "log_videos_every": 0,
}


def make_places(folder: Path) -> dict[str, str]:
    """Make a model folder and a data folder."""
    ensure_tiny_world(folder / "world", "unit_test")
    return {"model.path": make_tiny_folder(folder / "model"), "data.root": str(folder / "world")}


def words(places: dict[str, str], **changes: object) -> list[str]:
    """Return a command line of the small recipe."""
    return command({**SMALL, **places}, **changes)


def build_trainer(given: list[str], world: World | None = None) -> Trainer:
    """Return a run with this command line, on the CPU."""
    config, recipe = read_command_line(given)
    return assemble(config, recipe, torch.device("cpu"), world or World())


def statuses(findings: Iterable[Finding]) -> dict[str, str]:
    """Return the status of every check that is not ok, by name; the evaluation's scenes are too few in every case."""
    return {found.name: found.status for found in findings if found.status != "ok" and found.name != "evaluation"}


def status(found: Finding) -> str:
    """Return a finding's status; a way out must come with every status but ok."""
    assert bool(found.way_out) == (found.status != "ok")
    return found.status


@contextlib.contextmanager
def another_gaussian() -> Iterator[None]:
    """Noise is drawn with another std than it is scored under."""
    draw = denoise.sample
    with mock.patch.object(denoise, "sample", lambda step, noise: draw(step, 1.2 * noise)):
        yield


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Gradients are not averaged over ranks."""
    with mock.patch.object(updater, "averaging_gradients", lambda module, now: averaging_gradients(module, now=False)):
        yield


@contextlib.contextmanager
def guidance_in_the_rollout_only() -> Iterator[None]:
    """With gradients, the velocity has no guidance."""
    guided = WanPolicy.velocity

    def velocity(self, latents, sigma, conditioning):
        if torch.is_grad_enabled():
            conditioning = dataclasses.replace(conditioning, guidance_scale=1.0)
        return guided(self, latents, sigma, conditioning)

    with mock.patch.object(WanPolicy, "velocity", velocity):
        yield


@contextlib.contextmanager
def rounded_latents(*modules) -> Iterator[None]:
    """Stored latents are rounded after they were scored, in what these modules roll out; by default everywhere."""
    roll = denoise.rollout

    def rounded(*given):
        samples = roll(*given)
        states = samples.trajectory.states.bfloat16().float()
        return dataclasses.replace(samples, trajectory=dataclasses.replace(samples.trajectory, states=states))

    with contextlib.ExitStack() as stack:
        for module in modules or (probe, collector):
            stack.enter_context(mock.patch.object(module, "rollout", rounded))
        yield


@contextlib.contextmanager
def one_seed_for_every_rank() -> Iterator[None]:
    """Noise depends on the position in a rank's batch only."""

    def draw(conditions, shape, steps, settings):
        return torch.randn((len(conditions), steps, *shape), generator=torch.Generator().manual_seed(settings.seed))

    def initial(_, shape, settings):
        return torch.randn(shape, generator=torch.Generator().manual_seed(settings.seed + 1))

    with mock.patch.multiple(denoise, step_noise=draw, initial_noise=initial):
        yield


@contextlib.contextmanager
def other_steps_on_every_rank() -> Iterator[None]:
    """The stochastic steps depend on the rank."""
    window_of = Sampling.window_of

    def by_rank(self, gid):
        return window_of(self, gid + int(os.environ["RANK"]))

    with mock.patch.object(Sampling, "window_of", by_rank):
        yield


@contextlib.contextmanager
def once_distributed(change: Callable[[nn.Module], None]) -> Iterator[None]:
    """The network is changed after it was distributed."""
    distribute = assemble_module.distribute

    def changed(*given):
        state = distribute(*given)
        change(state.module)
        return state

    with mock.patch.object(assemble_module, "distribute", changed):
        yield


def other_weights_on_every_rank() -> AbstractContextManager[None]:
    """Training starts from weights that differ between ranks."""

    @torch.no_grad()
    def move(module):
        for weight in trained_parameters(module).values():
            weight += 0.01 * int(os.environ["RANK"])

    return once_distributed(move)


def an_adapter_without_gradient() -> AbstractContextManager[None]:
    """The output of one adapter is cut off from the graph."""

    def cut(network):
        name, second = next((n, m) for n, m in network.named_modules() if n.endswith(".lora_B.default"))
        second.register_forward_hook(lambda module, inputs, output: output.detach())
        assert "blocks.0" in name

    return once_distributed(cut)
