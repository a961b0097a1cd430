"""A small recipe for the doctor's tests, and faults planted into the code that it examines."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import train_grpo
from flow_grpo.algorithm.rollout import collector, denoise
from flow_grpo.algorithm.rollout.collector import SampleSettings
from flow_grpo.algorithm.update import updater
from flow_grpo.data.tiny_world import ensure_tiny_world
from flow_grpo.models.adapters import trained_parameters
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.runtime.ranks.sharding import averaging_gradients
from tests.tiny_models import make_tiny_folder

ROOT = Path(__file__).parents[1]
SMALL = {
    "device": "cpu",
    "trackers": "",
    "data.tiny_world": "unit_test",
    "data.num_frames": 5,
    "sample.k": 2,
    "sample.train_batch_size": 2,
    "sample.num_batches_per_epoch": 1,
    "sample.num_steps": 6,
    "sample.sde_steps": "0,1,2",
    "train.batch_size": 2,
    "reward.weights": "target_view=1",
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
    knobs = {**SMALL, **places} | {name.replace("__", "."): value for name, value in changes.items()}
    return ["--config", f"{ROOT}/config/grpo.py:tiny_recam", *(f"--config.{n}={v}" for n, v in knobs.items())]


@contextlib.contextmanager
def another_gaussian() -> Iterator[None]:
    """Noise is drawn with another std than it is scored under."""
    draw = denoise.sample
    with mock.patch.object(denoise, "sample", lambda step, noise: draw(step, 1.2 * noise)):
        yield


@contextlib.contextmanager
def no_synchronisation() -> Iterator[None]:
    """Gradients stay on the rank that made them."""
    with mock.patch.object(updater, "averaging_gradients", lambda module, now: averaging_gradients(module, now=False)):
        yield


@contextlib.contextmanager
def guidance_in_the_rollout_only() -> Iterator[None]:
    """With gradients, the velocity is the unguided one."""
    guided = RecamPolicy.velocity

    def velocity(self, latents, sigma, conditioning):
        if torch.is_grad_enabled():
            return self._forward(latents, sigma, conditioning, conditioning.prompt_embeds)
        return guided(self, latents, sigma, conditioning)

    with mock.patch.object(RecamPolicy, "velocity", velocity):
        yield


@contextlib.contextmanager
def the_last_step_trained() -> Iterator[None]:
    """The stochastic steps end with the schedule's last."""

    def window(self, collector):
        return (self.sample.num_steps - 2, self.sample.num_steps - 1)

    with mock.patch.object(SampleSettings, "window", window):
        yield


@contextlib.contextmanager
def latents_stored_in_half_precision() -> Iterator[None]:
    """What is remembered was rounded after it was scored."""
    roll = collector.rollout

    def rounded(*given, **named):
        made = roll(*given, **named)
        states = made.trajectory.states.bfloat16().float()
        return dataclasses.replace(made, trajectory=dataclasses.replace(made.trajectory, states=states))

    with mock.patch.object(collector, "rollout", rounded):
        yield


@contextlib.contextmanager
def one_seed_for_every_rank() -> Iterator[None]:
    """Noise depends on the position in a rank's batch only."""

    def draw(conditions, shape, steps, seed, same_initial_noise):
        generator = torch.Generator().manual_seed(seed)
        rows = len(conditions)
        initial = torch.randn((rows, *shape), generator=generator)
        return initial, torch.randn((rows, steps, *shape), generator=generator)

    with mock.patch.object(denoise, "_draw_noise", draw):
        yield


@contextlib.contextmanager
def other_steps_on_every_rank() -> Iterator[None]:
    """The stochastic steps are drawn by rank, too."""
    window = SampleSettings.window

    def by_rank(self, collector):
        return window(self, collector + int(os.environ["RANK"]))

    with mock.patch.object(SampleSettings, "window", by_rank):
        yield


@contextlib.contextmanager
def after_spread(change: Callable[[nn.Module], None]) -> Iterator[None]:
    """The network is changed once it lies on the ranks."""
    spread = train_grpo.spread

    def changed(*given):
        state = spread(*given)
        change(state.module)
        return state

    with mock.patch.object(train_grpo, "spread", changed):
        yield


def other_weights_on_every_rank() -> contextlib.AbstractContextManager[None]:
    """Training starts from weights that differ over ranks."""

    @torch.no_grad()
    def move(module):
        for weight in trained_parameters(module).values():
            weight += 0.01 * int(os.environ["RANK"])

    return after_spread(move)


def an_adapter_without_gradient() -> contextlib.AbstractContextManager[None]:
    """What one adapter adds is cut off from the graph."""

    def cut(network):
        name, second = next((n, m) for n, m in network.named_modules() if n.endswith(".lora_B.default"))
        second.register_forward_hook(lambda module, inputs, output: output.detach())
        assert "blocks.0" in name

    return after_spread(cut)
