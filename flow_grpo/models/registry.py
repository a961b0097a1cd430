"""The video models a run can train: a new policy is one file in this folder and one line in `POLICIES`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flow_grpo.models.policy import Policy
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.settings.schema import Config, ModelConfig, SampleConfig

POLICIES: dict[str, Callable[[ModelConfig, SampleConfig, torch.device], Policy]] = {
    "recam": RecamPolicy.from_config,
}


def build_policy(config: Config, device: torch.device) -> Policy:
    """Load the policy of `model.path` on a device, with the parameters that `model.trained` names trainable.

    Raises:
        ValueError: the model folder is missing or damaged, or a model setting does not fit the model or the device.
    """
    return POLICIES["recam"](config.model, config.sample, device)
