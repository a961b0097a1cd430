"""Rewards of the user's own, named in `reward.weights` by their place: `my_rewards.py:warmth`, see docs/rewards.md."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from torch import Tensor

from flow_grpo.records import Condition, RewardResult
from flow_grpo.rewards.results import all_valid
from flow_grpo.settings.own_code import check_call, load_own

KNOB = "reward.weights"


@dataclasses.dataclass
class FunctionReward:
    """A plain function as a reward, without measures and without a noise floor of its own."""

    name: str  # key of its weight
    # Takes videos (B, 3, T, h, w) in [0, 1] and B conditions, returns (B,) scores.
    function: Callable[[Tensor, Sequence[Condition]], Tensor]
    floor: ClassVar[float] = 0.0
    measures: ClassVar[tuple[str, ...]] = ()

    def __call__(self, videos: Tensor, conditions: Sequence[Condition]) -> RewardResult:
        """Score videos (B, 3, T, h, w); ValueError unless the function returns (B,) scores."""
        values = self.function(videos, conditions)
        if not isinstance(values, Tensor) or values.shape != (len(conditions),):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise ValueError(
                f"{self.name} returned {got}, must return a tensor of shape ({len(conditions)},), one score a video; "
                "a class can return more (docs/rewards.md)"
            )
        return all_valid(conditions, values.detach().float().cpu(), {})


def find_own(name: str) -> Callable[..., Any]:
    """Return the function or class of a reward `FILE.py:NAME`.

    Raises:
        ConfigError: it cannot be loaded, or does not take what a reward takes.
    """
    found: Callable[..., Any] = load_own(KNOB, name)
    if not inspect.isclass(found):
        check_call(KNOB, name, found, "videos", "conditions")
        return found
    check_call(KNOB, name, found)
    check_call(KNOB, name, found.__call__, "self", "videos", "conditions")
    return found


def build_own(name: str) -> Any:
    """Return a reward `FILE.py:NAME` under that name; ConfigError as in `find_own`."""
    found = find_own(name)
    if inspect.isclass(found):
        reward: Any = found()
        reward.name = name  # the class cannot know how the run names it
        return reward
    reward = FunctionReward(name, found)
    if hasattr(found, "needs"):
        reward.needs = found.needs
    return reward
