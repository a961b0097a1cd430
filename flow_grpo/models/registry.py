"""The video models a run can train: a new policy is one file in this folder and one line in `POLICIES`.

Or, outside of this package, a class or function that `model.kind` names by its place, `my_models.py:MyPolicy`: it is
called with the sections `model` and `sample` of the configuration and the device, and returns a `Policy`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flow_grpo.models.policy import Policy
from flow_grpo.models.recam_policy import RecamPolicy
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.own_code import check_call, is_own, load_own
from flow_grpo.settings.schema import Config, ModelConfig, SampleConfig

POLICIES: dict[str, Callable[[ModelConfig, SampleConfig, torch.device], Policy]] = {
    "recam": RecamPolicy.from_config,
}


METHODS = sorted(name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_"))


def build_policy(config: Config, device: torch.device) -> Policy:
    """Load the policy `model.kind` from `model.path` on a device; what `model.trained` names is trainable.

    Raises:
        ConfigError: there is no policy of that name, or an own one cannot be loaded or lacks methods of a policy.
        ValueError: the model folder is missing or damaged, or a model setting does not fit the model or the device.
    """
    kind = config.model.kind
    if is_own(kind):
        return _build_own(config, device)
    if kind not in POLICIES:
        known = f"must be one of {', '.join(POLICIES)} or FILE.py:NAME"
        raise refusal("model.kind", kind, f"{known}; add a policy in models/registry.py")
    return POLICIES[kind](config.model, config.sample, device)


def _build_own(config: Config, device: torch.device) -> Policy:
    kind = config.model.kind
    make = load_own("model.kind", kind)
    check_call("model.kind", kind, make, "model", "sample", "device")
    policy: Policy = make(config.model, config.sample, device)
    missing = [name for name in (*METHODS, "module") if not hasattr(policy, name)]
    if missing:
        text = (
            f"must make a policy, {type(policy).__name__} has no {', '.join(missing)}; see flow_grpo/models/policy.py"
        )
        raise refusal("model.kind", kind, text)
    return policy
