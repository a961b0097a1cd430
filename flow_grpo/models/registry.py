"""The video models a run can train: a new policy is one file in this folder and one line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flow_grpo.models.policy import Policy
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.schema import Config, ModelConfig, SampleConfig

POLICIES: dict[str, Callable[[ModelConfig, SampleConfig, torch.device], Policy]] = {
    "recam": RecamPolicy.from_config,
}


def build_policy(config: Config, device: torch.device) -> Policy:
    """Load the policy `model.kind` from `model.path` on a device; what `model.trained` names is trainable.

    Raises:
        ConfigError: there is no policy of that name.
        ValueError: the model folder is missing or damaged, or a model setting does not fit the model or the device.
    """
    kind = config.model.kind
    if kind not in POLICIES:
        raise refusal("model.kind", kind, f"must be one of {', '.join(POLICIES)}; add a policy in models/registry.py")
    return POLICIES[kind](config.model, config.sample, device)
