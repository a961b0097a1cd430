"""The state of a run: what a checkpoint holds, which model and data it belongs to, how it is restored."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flow_grpo.algorithm.update.history import UpdateHistory
from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler
from flow_grpo.data.splits import Split
from flow_grpo.judging.table import Table
from flow_grpo.models.adapters import Ema, has_lora, load_trained_state, trained_parameters
from flow_grpo.models.policy import Policy
from flow_grpo.run.tail_check import TailRecord
from flow_grpo.runtime import device as device_api
from flow_grpo.runtime.checkpoints import checkpoint, saving
from flow_grpo.runtime.checkpoints.moments import load_moments, moments_by_place
from flow_grpo.runtime.checkpoints.saving import Saving
from flow_grpo.runtime.checkpoints.state_files import join_shards, map_tensors
from flow_grpo.runtime.ranks.process_group import World
from flow_grpo.runtime.ranks.sharding import is_sharded, local, part_like
from flow_grpo.runtime.tensor_store import weights_key
from flow_grpo.settings.errors import refusal

# Fields of `RunState` that are saved as they are, under their names.
PLAIN = (
    *("finished", "train_seconds", "forward_equivalents", "before", "floor", "measured_on", "fixed", "fixed_on"),
    *("broken", "shortages"),
)


@dataclasses.dataclass
class RunState:
    """The mutable state of a run, which checkpoints save."""

    module: nn.Module  # the network, of which the trained weights are saved
    optimizer: torch.optim.Optimizer  # its moments are saved; its settings always come from the configuration
    sampler: DistributedKRepeatSampler  # its position is saved
    ema: Ema | None
    device: torch.device  # whose random state is saved
    identity: dict[str, str]  # fingerprints of the model and data that a checkpoint belongs to
    finished: int = 0  # epochs
    train_seconds: float = 0.0  # for `max_minutes`: epochs and the evaluations between them, of all starts
    counted_until: float = dataclasses.field(default=0.0, compare=False)  # where these end, in this process
    forward_equivalents: float = 0.0  # work of the finished epochs over all ranks, see `ForwardCount`
    before: dict[str, float] | None = None  # held-out metrics before training, None until measured
    table_before: Table | None = None  # the same by condition; also None from an earlier version's checkpoint
    # `eval_floor/` name -> what the gold estimator finds on perfect videos; empty where not measured.
    floor: dict[str, float] = dataclasses.field(default_factory=dict)
    measured_on: dict[str, str | float] = dataclasses.field(default_factory=dict)  # see `Evaluator`; {} until measured
    # Reward -> mean on the fixed training conditions when these were first sampled as they are now, see `fixed_on`.
    fixed: dict[str, float] = dataclasses.field(default_factory=dict)
    fixed_on: str = ""  # fingerprint of what they and their samples depend on besides the weights
    tail: TailRecord = dataclasses.field(default_factory=TailRecord)
    broken: str = ""  # the rule of `train.stop_if` that holds after the last epoch, in words
    # One number for each of the last epochs with dynamic sampling, 1 where the pool fell short.
    shortages: list[int] = dataclasses.field(default_factory=list)
    history: UpdateHistory = dataclasses.field(default_factory=UpdateHistory)  # of the optimizer steps

    def start_training(self) -> None:
        """Count what follows as training, and what came since the last count as none."""
        self.counted_until = time.perf_counter()

    def count_training(self) -> None:
        """Add the seconds since the last count to those of training."""
        now = time.perf_counter()
        self.train_seconds, self.counted_until = self.train_seconds + now - self.counted_until, now

    def save(self, folder: Path, *, keep: int, world: World, score: float | None = None) -> Saving:
        """Begin to write a checkpoint of the finished epochs (collective call). `score` as for `saving.begin`."""
        state: dict[str, Any] = {
            **{name: getattr(self, name) for name in PLAIN},
            "sampler": self.sampler.state_dict(),  # the same on every rank
            "before_rows": None if self.table_before is None else self.table_before.rows(),
            "tail": vars(self.tail),
            "bad_steps": self.history.bad_steps,
            "grad_norms": self.history.norms,
            "steps_taken": self.history.taken,
        }
        per_rank: dict[str, Any] = {"random": device_api.rng_state(self.device)}
        learned = {
            "trained": dict(trained_parameters(self.module)),
            "moments": moments_by_place(self.optimizer, list(trained_parameters(self.module).values())),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }
        if is_sharded(self.module):
            per_rank["learned"] = map_tensors(learned, lambda _, tensor: local(tensor))
        else:
            state["learned"] = learned
        return saving.begin(
            folder,
            self.finished,
            state=state,
            per_rank=per_rank,
            identity=self.identity,
            world=world,
            keep=keep,
            score=score,
        )

    def restore(self, path: Path, *, world: World) -> None:
        """Restore a checkpoint; ValueError for one that is damaged or of another run (collective call)."""
        found = checkpoint.load(path, identity=self.identity, world=world)
        state = found.state
        if "learned" in state:
            learned = map_tensors(state["learned"], self._own)
        else:
            stems = [path / f"rank_{rank}" for rank in range(found.world_size)]
            learned = join_shards(stems, "learned", self._own)
        if (learned["ema"] is None) != (self.ema is None):
            raise ValueError(
                f"{path} was saved {'without' if learned['ema'] is None else 'with'} a weight average; set "
                "train.ema_decay as it was, or start afresh under another run_name"
            )
        self.sampler.load_state_dict(state["sampler"])
        load_trained_state(self.module, learned["trained"])
        load_moments(self.optimizer, list(trained_parameters(self.module).values()), learned["moments"])
        if self.ema is not None:
            self.ema.load_state_dict(learned["ema"])
        if found.per_rank is not None:
            device_api.set_rng_state(self.device, found.per_rank["random"])
        # Not all are in checkpoints of earlier versions.
        for name in PLAIN:
            setattr(self, name, state.get(name, getattr(self, name)))
        rows = state.get("before_rows")
        self.table_before = None if rows is None else Table.of_rows(rows)
        self.tail = TailRecord(**state.get("tail", {}))
        self.history = UpdateHistory(
            taken=state.get("steps_taken", 0),
            norms=list(state.get("grad_norms", ())),
            bad_steps=list(state.get("bad_steps", ())),
        )

    def match_evaluation(self, now: Mapping[str, str | float], *, own: bool) -> None:
        """Keep the held-out metrics "before" only where those "after", measured on `now`, will be measured alike.

        A new run that begins from another's state is measured again. Knobs that only one of them names do not count.

        Raises:
            ValueError: the state is the run's own, and they differ.
        """
        others = [knob for knob in now if self.measured_on.get(knob, now[knob]) != now[knob]]
        if others and own:
            text = f"must be {self.measured_on[others[0]]!r}, as when this run's held-out metrics before training were "
            text += "measured, or they could not be compared with those after; go on with that, and measure otherwise "
            raise refusal(others[0], now[others[0]], f"{text}with tools/evaluate.py --checkpoint")
        if others:
            self.before, self.table_before, self.floor, self.measured_on = None, None, {}, {}

    def _own(self, path: str, values: Tensor) -> Tensor:
        """Return this rank's part of a whole tensor under "trained", "moments" or "ema"."""
        parameters = trained_parameters(self.module)
        kind, _, name = path.partition("/")
        if kind == "trained":
            template = parameters.get(name)
        else:
            place = int(name.split("/")[0])
            template = list(parameters.values())[place] if place < len(parameters) else None
        # A tensor without a matching parameter is refused by name when it is loaded.
        return values if template is None or template.shape != values.shape else part_like(values, template)


@torch.no_grad()
def load_weights(path: Path, policy: Policy, trained: str) -> None:
    """Load a checkpoint's weights into an unsharded network: the moving average where there is one.

    ValueError for a checkpoint of another model or mode `trained`; the data that it was trained on is not checked.
    """
    module = policy.module
    found = checkpoint.load(path, identity=model_identity(policy, trained), world=World(), partly=True)
    stems = [path / f"rank_{rank}" for rank in range(found.world_size)]
    learned = found.state.get("learned") or join_shards(stems, "learned", lambda _, values: values)
    load_trained_state(module, learned["trained"])
    if learned["ema"] is not None:
        for place, parameter in enumerate(trained_parameters(module).values()):
            parameter.copy_(learned["ema"][str(place)])


def common_identity(policy: Policy, trained: str, data: Split, world: World) -> dict[str, str]:
    """Return the fingerprints of model and data, which every rank must share (collective call)."""
    identity = model_identity(policy, trained) | {"data": data.fingerprint(), checkpoint.FILES: data.contents()}
    world.all.check_equal(str(identity), "model and data")
    return identity


def model_identity(policy: Policy, trained: str) -> dict[str, str]:
    """Return what trained weights of the mode `trained` belong to: network, scale of adapters, every part's files."""
    network: Any = policy.module
    identity = {"model": weights_key(network.named_parameters()), "trained": trained, **getattr(policy, "identity", {})}
    if has_lora(network):  # no tensor holds it
        identity["lora_alpha"] = str(network.peft_config["default"].lora_alpha)
    return identity
