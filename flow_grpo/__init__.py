"""Online RL (GRPO for flow matching) for camera-controlled video-to-video diffusion.

The names below are the library's surface, docs/library.md. Each is imported when it is first used: `import flow_grpo`
alone loads neither torch nor a model library.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

# torch loads any installed accelerator plug-in while it is imported; with torch_npu installed but the vendor
# runtime missing, a plain `import torch` would raise. `runtime/device.py` loads the plug-in itself, guarded.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

if TYPE_CHECKING:  # the same names for type checkers and editors
    from flow_grpo.data.dynamic_batch import DistributedWeightedSampler as DistributedWeightedSampler
    from flow_grpo.data.dynamic_batch import DynamicBatchSampler as DynamicBatchSampler
    from flow_grpo.data.dynamic_batch import LimitedPointsCollateFn as LimitedPointsCollateFn
    from flow_grpo.data.dynamic_batch import video_tokens as video_tokens
    from flow_grpo.data.k_repeat_indices import KRepeatIndices as KRepeatIndices
    from flow_grpo.data.k_repeat_sampler import DistributedKRepeatSampler as DistributedKRepeatSampler
    from flow_grpo.data.k_repeat_sampler import SampleKey as SampleKey
    from flow_grpo.data.k_repeat_sampler import StaleBatchError as StaleBatchError
    from flow_grpo.maths.advantages import combine_rewards as combine_rewards
    from flow_grpo.maths.loss import grpo_loss as grpo_loss
    from flow_grpo.maths.schedule import flow_sigmas as flow_sigmas
    from flow_grpo.maths.schedule import step_weights as step_weights
    from flow_grpo.maths.sde import gaussian_kl as gaussian_kl
    from flow_grpo.maths.sde import log_prob as log_prob
    from flow_grpo.maths.sde import sample as sample
    from flow_grpo.maths.sde import transition as transition
    from flow_grpo.models.policy import Policy as Policy
    from flow_grpo.models.registry import build_policy as build_policy
    from flow_grpo.models.video_model import VideoModel as VideoModel
    from flow_grpo.records import Condition as Condition
    from flow_grpo.records import Conditioning as Conditioning
    from flow_grpo.records import Guidance as Guidance
    from flow_grpo.records import RewardResult as RewardResult
    from flow_grpo.rewards.base import Reward as Reward
    from flow_grpo.rewards.base import RewardSet as RewardSet
    from flow_grpo.rewards.base import build_reward_set as build_reward_set
    from flow_grpo.settings.errors import ConfigError as ConfigError
    from flow_grpo.settings.loading import load_config as load_config
    from flow_grpo.settings.schema import Config as Config

_MODULES = {  # name -> where it is, below this package
    "DistributedWeightedSampler": "data.dynamic_batch",
    "DynamicBatchSampler": "data.dynamic_batch",
    "LimitedPointsCollateFn": "data.dynamic_batch",
    "video_tokens": "data.dynamic_batch",
    "KRepeatIndices": "data.k_repeat_indices",
    "DistributedKRepeatSampler": "data.k_repeat_sampler",
    "SampleKey": "data.k_repeat_sampler",
    "StaleBatchError": "data.k_repeat_sampler",
    "combine_rewards": "maths.advantages",
    "grpo_loss": "maths.loss",
    "flow_sigmas": "maths.schedule",
    "step_weights": "maths.schedule",
    "gaussian_kl": "maths.sde",
    "log_prob": "maths.sde",
    "sample": "maths.sde",
    "transition": "maths.sde",
    "Policy": "models.policy",
    "build_policy": "models.registry",
    "VideoModel": "models.video_model",
    "Condition": "records",
    "Conditioning": "records",
    "Guidance": "records",
    "RewardResult": "records",
    "Reward": "rewards.base",
    "RewardSet": "rewards.base",
    "build_reward_set": "rewards.base",
    "ConfigError": "settings.errors",
    "load_config": "settings.loading",
    "Config": "settings.schema",
}
__all__ = list(_MODULES)


if not TYPE_CHECKING:  # a type checker that saw it would take any name for one of the surface

    def __getattr__(name: str) -> Any:
        """Import a name of the surface when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        globals()[name] = found  # not asked for again
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
