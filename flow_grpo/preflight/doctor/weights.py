"""Checks of the trained weights, and of the gradients that move them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from flow_grpo.models.adapters import adapted_modules, trained_parameters
from flow_grpo.preflight.doctor.findings import Finding, equal_on_ranks, finding
from flow_grpo.run.trainer import Trainer
from flow_grpo.runtime.ranks.sharding import is_sharded, local

NOT_AVERAGED = "gradients are not averaged over ranks: see flow_grpo/runtime/ranks/sharding.py"
DIGEST_VALUES = 64  # of every tensor; an optimizer step moves nearly all values of a tensor it moves
EPS_FACTOR, SHARE_NEAR_EPS = 10.0, 0.05  # at 10 x adam_eps the eps makes Adam's step 9 % shorter
LARGE_SHARE, DESTROYING_SHARE = 0.03, 0.2  # of a weight's size that one update moves it; recipes: 0.004 to 0.006


@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients of one optimizer step on this rank."""

    norms: dict[str, float]  # weight -> norm of its gradient
    digest: str  # hash of all gradients
    present: int  # number of elements that are not 0
    below: int  # of these, smaller than 10 x adam_eps


def examine_weights(trainer: Trainer) -> Iterator[Finding]:
    """Check that weights are trained, equal on every rank, and large beside their rate."""
    module, train = trainer.updater.policy.module, trainer.config.train
    count = sum(parameter.numel() for parameter in trained_parameters(module).values())
    yield check_adapters(trainer.config.model.trained, len(adapted_modules(module)), count)
    yield _equal_weights(trainer, "weights", "trained weights")
    shares = []
    for group in trainer.updater.optimizer.param_groups:
        for parameter in group["params"]:
            values = local(parameter).detach().float()
            rms = float(values.square().mean().sqrt()) if values.numel() else 0.0
            shares += [group["lr"] / rms] if rms else []  # zero-initialised: a step of any size begins from nothing
    yield check_rate(shares, train.learning_rate)


def check_adapters(mode: str, adapted: int, trained: int) -> Finding:
    """Check that `model.trained=mode` trains any weight; `adapted` counts modules with a LoRA adapter."""
    message = f"model.trained={mode}: {trained:,} trained weights" + (f", {adapted} adapters" if mode == "lora" else "")
    nothing = trained == 0 or (mode == "lora" and adapted == 0)
    way_out = "set model.lora_targets to names of the network's own Linear layers, such as blocks.0.attn1.to_q"
    return finding("adapters", message, fail=way_out if nothing else "")


def _equal_weights(trainer: Trainer, name: str, what: str) -> Finding:
    module = trainer.updater.policy.module
    if is_sharded(module):
        return finding(name, "sharded: every rank holds another part")
    weights = digest(trained_parameters(module).values())
    return equal_on_ranks(name, weights, what, trainer.world, NOT_AVERAGED)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a hash of some values of every tensor."""
    found = blake2b(digest_size=8)
    for tensor in tensors:
        flat = local(tensor).flatten()
        found.update(flat[:: max(1, flat.numel() // DIGEST_VALUES)].float().cpu().numpy().tobytes())
    return found.hexdigest()


def check_rate(shares: Sequence[float], learning_rate: float) -> Finding:
    """Check that one optimizer step does not replace the weights: Adam's first one moves every weight by its rate.

    `shares` are learning rate / root mean square of every trained tensor that is not zero.
    """
    share = float(torch.tensor(shares).median()) if shares else 0.0
    knob = f"train.learning_rate={learning_rate:g}"
    message = f"{knob} moves a weight by {share:.2g} of its size in one update (median of {len(shares)} tensors)"
    least = learning_rate * LARGE_SHARE / max(share, LARGE_SHARE)
    way_out = f"lower it to --config.train.learning_rate={least:.1g}, {LARGE_SHARE:.0%}, or below"
    destroys = f"that replaces the weights: {way_out}" if share > DESTROYING_SHARE else ""
    return finding("rate", message, fail=destroys, warn=way_out if share > LARGE_SHARE else "")


@contextlib.contextmanager
def logged_gradients(trainer: Trainer) -> Iterator[list[Gradients]]:
    """Inside, the gradients of every optimizer step are appended to the yielded list just before the step."""
    log: list[Gradients] = []
    named = trained_parameters(trainer.updater.policy.module)
    small = EPS_FACTOR * trainer.config.train.adam_eps

    def note(*_: object) -> None:
        own = {name: local(p.grad) for name, p in named.items() if p.grad is not None}
        norms = {name: float(own[name].norm()) if name in own else 0.0 for name in named}
        sizes = [gradient.abs() for gradient in own.values()]
        present = sum(int((size > 0).sum()) for size in sizes)
        below = sum(int(((size > 0) & (size < small)).sum()) for size in sizes)
        log.append(Gradients(norms, digest(own.values()), present, below))

    handle = trainer.updater.optimizer.register_step_pre_hook(note)
    try:
        yield log
    finally:
        handle.remove()


def examine_gradients(trainer: Trainer, log: Sequence[Gradients]) -> Iterator[Finding]:
    """Check weights and gradients after two updates."""
    world, config = trainer.world, trainer.config
    yield _equal_weights(trainer, "weights_after_update", "trained weights after two updates")
    if not is_sharded(trainer.updater.policy.module):
        digests = " ".join(step.digest for step in log)
        yield equal_on_ranks("gradient_sync", digests, "averaged gradients", world, NOT_AVERAGED)
    # The largest norm of any rank: of a small weight in shards some ranks hold nothing.
    peers = [json.loads(text) for text in world.data.gather_text(json.dumps([step.norms for step in log]))]
    norms = [{name: max(one[name] for one in step) for name in step[0]} for step in zip(*peers, strict=True)]
    yield check_gradient_coverage(config.model.trained, norms)
    found = world.data.all_gather_scalars({"present": log[-1].present, "below": log[-1].below})
    present, below = int(found["present"].sum()), int(found["below"].sum())
    yield check_gradient_size(below, present, config.train.adam_eps)


def check_gradient_coverage(mode: str, norms: Sequence[Mapping[str, float]]) -> Finding:
    """Check that every trained tensor receives a gradient in the first two updates: weight -> norm over all ranks.

    Other modes of `model.trained` than "lora" may train weights that the loss does not depend on.
    """
    without = [name for name in norms[0] if not any(row[name] > 0 for row in norms)]
    message = f"{len(norms[0]) - len(without)} of {len(norms[0])} trained tensors received a gradient in two updates"
    message += f"; not {', '.join(without[:2])}" if without else ""
    way_out = "remove from model.lora_targets what the velocity does not depend on" if without else ""
    hard = mode == "lora" or len(without) == len(norms[0])
    return finding("gradient_coverage", message, fail=way_out if hard else "", warn=way_out)


def check_gradient_size(below: int, present: int, adam_eps: float) -> Finding:
    """Check that gradients are large beside Adam's eps, which shortens the step of those that are not.

    `present` elements of the gradient are not 0, `below` of these are smaller than 10 x adam_eps.
    """
    share = below / max(1, present)
    message = f"{share:.1%} of the {present:,} gradients are below {EPS_FACTOR:g} x train.adam_eps={adam_eps:g}"
    way_out = f"Adam hardly moves these weights: pass --config.train.adam_eps={adam_eps * 1e-4:g}"
    return finding("gradient_size", message, warn=way_out if share > SHARE_NEAR_EPS else "")
