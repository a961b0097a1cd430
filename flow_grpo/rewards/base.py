"""The interface of rewards, and `RewardSet`, which runs several.

A new reward is one file with a class like `Reward`, and one line in `REWARDS` of `rewards/__init__.py`; or, outside of
this package, a function or class that a run names by its place, see `rewards/own.py`.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import importlib
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards import REWARDS
from flow_grpo.rewards.own import KNOB, build_own, find_own
from flow_grpo.rewards.process_pool import Outcome
from flow_grpo.rewards.remote.reward import RemoteReward
from flow_grpo.rewards.results import from_outcomes
from flow_grpo.rewards.room.room_fit import ROOM_FILE
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.own_code import is_own, why_it_fails

logger = logging.getLogger(__name__)

MOST_PREPARED = 12  # conditions: the features of 12 true views are kept, those of more push each other out


class Reward(Protocol):
    """Scores videos: more is better.

    A class attribute `needs` names the fields of `Condition` without which it can score nothing; by default none.
    """

    name: str  # key of its weight and prefix of its metrics
    floor: float  # noise in the unit of the reward: videos whose scores differ by less are equally good

    @property
    def measures(self) -> tuple[str, ...]:
        """Return the names in `RewardResult.info`, identical for every batch and rank, since ranks gather them."""
        ...

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score CPU fp32 videos (B, 3, T, h, w) in [0, 1]; rows that cannot be scored are not valid."""
        ...


# File in a scene's folder that a reward reads in addition to the videos; such a class is built with the data folder.
SCENE_FILES: Mapping[str, str] = dict.fromkeys((name for name in REWARDS if name.startswith("room_")), ROOM_FILE)


def check_name(name: str, servers: Mapping[str, str]) -> None:
    """Raise ConfigError unless it is in `REWARDS`, "remote:<name>" with a name of `servers`, or FILE.py:NAME."""
    known = [*REWARDS, *(f"remote:{served}" for served in servers)]
    if is_own(name):
        find_own(name)
    if is_own(name) or name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    way_out = f"did you mean {close[0]!r}?" if close else "pass --config.reward.weights.NAME=1 with one of them"
    if name.startswith("remote:"):
        way_out = f"say where: --config.reward.remote.{name[7:]}=http://127.0.0.1:8000"
    raise refusal(KNOB, name, f"must be one of {', '.join(map(repr, known))} or FILE.py:NAME; {way_out}")


class RewardSet:
    """Several independent rewards: one that fails affects no other and never becomes a score.

    Raises:
        ValueError: names differ, or a reward is malformed, which would otherwise fail hours into a run.
    """

    def __init__(self, rewards: Sequence[Reward], weights: Mapping[str, float]) -> None:
        for reward in rewards:
            _check_parts(reward)
        names = [reward.name for reward in rewards]
        if len(set(names)) != len(names) or set(names) != set(weights):
            raise ValueError(f"rewards {names} and weights {sorted(weights)} must name the same rewards, each once")
        self.rewards = tuple(rewards)
        self.weights = dict(weights)
        # Called with a reward's name before it measures a batch, and with "" afterwards.
        self.on_call: Callable[[str], object] = str  # which does nothing, and unlike a lambda can be pickled

    @property
    def floors(self) -> dict[str, float]:
        """Return reward name -> noise floor, in the unit of the reward."""
        return {reward.name: reward.floor for reward in self.rewards}

    def stats(self) -> dict[str, dict[str, float]]:
        """Return reward name -> statistics of its requests since the last call, for rewards computed by a server."""
        asked = {reward.name: getattr(reward, "stats", None) for reward in self.rewards}
        return {name: stats() for name, stats in asked.items() if stats is not None}

    def served(self) -> dict[str, str]:
        """Return reward name -> model and version, for rewards computed by a server that has answered."""
        servers = [reward for reward in self.rewards if isinstance(reward, RemoteReward)]
        return {reward.name: " ".join(reward.identity) for reward in servers if reward.identity is not None}

    def prepare(self, conditions: Sequence[Condition]) -> None:
        """Measure now what depends on conditions alone, where a reward of this package keeps it.

        Nothing is raised: what fails here is tried again, and said, when videos are scored.
        """
        known = {(one.scene, one.source_camera, one.target_camera): one for one in conditions}
        for reward in self.rewards:
            if hasattr(reward, "prepare") and not is_own(reward.name):
                self.on_call(reward.name)
                with contextlib.suppress(Exception):
                    reward.prepare([*known.values()][:MOST_PREPARED])
                self.on_call("")

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> dict[str, RewardResult]:
        """Return reward name -> result of B rows for CPU fp32 videos (B, 3, T, h, w) in [0, 1]."""
        return {reward.name: self._measure(reward, videos, conditions) for reward in self.rewards}

    def _measure(self, reward: Reward, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        try:
            return self.call(reward, videos, conditions)
        except Exception as error:
            logger.exception("reward %s failed on %d samples", reward.name, len(conditions))
            outcome: Outcome[tuple[float, ...]] = Outcome(None, f"{type(error).__name__}: {error}")
            return from_outcomes([outcome] * len(conditions), reward.measures)

    def call(self, reward: Reward, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Return what a reward makes of videos, checked; whatever it raises, `sys.exit` included, is an Exception.

        One that is not of this package gets copies: what it writes, by torch or by numpy, reaches no other reward.
        """
        if not type(reward).__module__.startswith("flow_grpo.") or is_own(reward.name):
            videos, conditions = copy.deepcopy((videos, conditions))
        self.on_call(reward.name)
        try:
            return _checked(reward, reward(videos, conditions), len(conditions))
        except SystemExit as error:
            text = f"it called sys.exit({error.code}), must raise an error that says why"
            raise RuntimeError(text).with_traceback(error.__traceback__) from None
        finally:
            self.on_call("")


def _check_parts(reward: Reward) -> None:
    name, floor, measures = (getattr(reward, part, None) for part in ("name", "floor", "measures"))
    if not isinstance(name, str) or not name:
        raise ValueError(f"reward {type(reward).__name__} has name {name!r}, must be a text: its weight is called so")
    if isinstance(floor, bool) or not isinstance(floor, float | int) or not 0 <= floor < math.inf:
        raise ValueError(f"reward {name} has floor {floor!r}, must be a number in [0, inf); 0 where noise is unknown")
    if not isinstance(measures, tuple) or not all(isinstance(each, str) for each in measures):
        text = "must be a tuple of the names in its info; () for none"
        raise ValueError(f"reward {name} has measures {measures!r}, {text}")


def _checked(reward: Reward, result: RewardResult, count: int) -> RewardResult:
    # Values that are not finite become invalid and faulty, and all invalid values NaN.
    shapes = {tuple(part.shape) for part in (result.values, result.valid, result.faults, *result.info.values())}
    if shapes != {(count,)} or len(result.causes) != count:
        raise ValueError(f"results have shapes {sorted(shapes)} and {len(result.causes)} causes, must be ({count},)")
    if set(result.info) != set(reward.measures):
        raise ValueError(f"info holds {sorted(result.info)}, must hold {sorted(reward.measures)} as declared")
    unusable = result.valid & ~result.values.isfinite()
    valid, causes = result.valid & ~unusable, list(result.causes)
    for row in unusable.nonzero().flatten().tolist():
        causes[row] = f"value is {result.values[row].item()}"
    values = result.values.masked_fill(~valid, torch.nan)
    info = {name: value.clone() for name, value in result.info.items()}  # a reward may use its tensors again
    return RewardResult(values, valid, tuple(causes), info, result.faults | unusable)


def try_rewards(rewards: RewardSet, condition: Condition, *, whole_groups: bool = True) -> None:
    """Refuse rewards that would fail all samples of a run, tried on one condition of its data.

    Those of the user's own score a video twice, servers are asked who they are. `whole_groups`: every call in training
    has all copies of its groups.

    Raises:
        ConfigError: one needs what the data lacks, fails, or does not return what a reward returns.
        ValueError: a server does not answer, or needs whole groups where there are none.
    """
    asked = {reward.name: getattr(reward, "needs", ()) for reward in rewards.rewards}
    lacking = {name: [f for f in fields if getattr(condition, f) is None] for name, fields in asked.items()}
    if useless := {name: fields for name, fields in lacking.items() if fields}:
        kept = ",".join(f"{name}={weight:g}" for name, weight in rewards.weights.items() if name not in useless)
        fields = " and ".join(dict.fromkeys(itertools.chain(*useless.values())))
        text = f"need{'s' * (len(useless) == 1)} the {fields} of every condition, which this data lacks"
        way_out = f"pass --config.reward.weights={kept}" if kept else "choose others"
        raise refusal(KNOB, ", ".join(useless), f"{text}; {way_out}, docs/rewards.md says what each needs")
    video = torch.full((3, *condition.size), 0.5) if condition.source_video is None else condition.source_video
    videos, conditions = torch.stack([video] * 2), (condition, condition)
    for reward in rewards.rewards:
        if isinstance(reward, RemoteReward):
            reward.try_server(whole_groups)
        if not is_own(reward.name):
            continue
        try:
            rewards.call(reward, videos, conditions)
        except Exception as error:
            file = Path(reward.name.partition(":")[0])
            text = f"must score videos of shape {tuple(videos.shape)}, {why_it_fails(str(file), file, error)}"
            raise refusal(KNOB, reward.name, f"{text}; correct it") from error


def build_reward(
    name: str, *, data_root: str | Path, servers: Mapping[str, str] | None = None, timeout_s: float = 120.0
) -> Reward:
    """Return a reward by name, as of `check_name`, which may read scene files in the dataset folder `data_root`.

    `servers` are name -> http://HOST:PORT of rewards that other processes compute, each asked for `timeout_s` at most.

    Raises:
        ConfigError: for an unknown name, or an own reward that cannot be loaded.
    """
    check_name(name, servers or {})
    if is_own(name):
        own: Reward = build_own(name)
        return own
    if name.startswith("remote:"):
        served = name.removeprefix("remote:")
        return RemoteReward(served, (servers or {})[served], timeout_s)
    module, _, kind = REWARDS[name].partition(":")
    made: Callable[..., Reward] = getattr(importlib.import_module(f"flow_grpo.rewards.{module}"), kind)
    return made(Path(data_root)) if name in SCENE_FILES else made()


def build_reward_set(
    weights: Mapping[str, float],
    *,
    data_root: str | Path,
    servers: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
) -> RewardSet:
    """Return the rewards that `weights` names, see `build_reward`; a weight of 0 measures without training on it."""
    rewards = [build_reward(name, data_root=data_root, servers=servers, timeout_s=timeout_s) for name in weights]
    return RewardSet(rewards, weights)
