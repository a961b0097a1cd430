"""The video models a run can train: a new one is one file in this folder and one line in `VIDEO_MODELS`.

Or, outside of this package, what `model.kind` names by its place, `my_models.py:NAME`: a `VideoModel`, which is served
like those here, or a class or function that makes a `Policy` of its own from the sections `model` and `sample` of the
configuration and the device; only a `VideoModel` can be planned, traced and sampled from by the tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from flow_grpo.models.policy import Policy
from flow_grpo.models.recam import RECAM
from flow_grpo.models.redirector import REDIRECTOR
from flow_grpo.models.video_model import VideoModel
from flow_grpo.models.wan_policy import WanPolicy, check_folder
from flow_grpo.models.wan_t2v import WAN_T2V
from flow_grpo.settings.errors import refusal
from flow_grpo.settings.own_code import check_call, is_own, load_own, why_it_fails
from flow_grpo.settings.schema import Config, ModelConfig, SampleConfig

VIDEO_MODELS: dict[str, VideoModel] = {
    "recam": RECAM,
    "redirector": REDIRECTOR,
    "wan_t2v": WAN_T2V,
}
METHODS = sorted(name for name, value in vars(Policy).items() if callable(value) and not name.startswith("_"))


def video_model(kind: str) -> VideoModel:
    """Return the `VideoModel` of a `model.kind`; ConfigError if there is none, or it makes a policy of its own."""
    found = _find(kind)
    if not isinstance(found, VideoModel):
        text = "makes a policy of its own, which can be trained; planned, traced and sampled from is only a VideoModel"
        raise refusal("model.kind", kind, f"{text}, see docs/add_a_model.md")
    return found


def is_video_model(kind: str) -> bool:
    """Return whether a `model.kind` names a `VideoModel`, and not a policy of its own; ConfigError as `video_model`."""
    return isinstance(_find(kind), VideoModel)


def check_model(config: Config) -> None:
    """Raise ValueError for a `model.path` without the parts of its model; loads none."""
    found = _find(config.model.kind)
    if isinstance(found, VideoModel):
        check_folder(found, config.model.path)


def build_policy(config: Config, device: torch.device) -> Policy:
    """Load the policy `model.kind` from `model.path` on a device; what `model.trained` names is trainable.

    Raises:
        ConfigError: there is no policy of that name, or an own one cannot be loaded or lacks methods of a policy.
        ValueError: the model folder is missing or damaged, or a model setting does not fit the model or the device.
    """
    found = _find(config.model.kind)
    if isinstance(found, VideoModel):
        return WanPolicy.from_config(found, config.model, config.sample, device)
    return _make_own(config.model.kind, found, config.model, config.sample, device)


def _find(kind: str) -> Any:
    if is_own(kind):
        return load_own("model.kind", kind, VideoModel)
    if kind not in VIDEO_MODELS:
        known = f"must be one of {', '.join(VIDEO_MODELS)} or FILE.py:NAME"
        raise refusal("model.kind", kind, f"{known}; add a model in models/registry.py")
    return VIDEO_MODELS[kind]


def _make_own(kind: str, make: Any, model: ModelConfig, sample: SampleConfig, device: torch.device) -> Policy:
    check_call("model.kind", kind, make, "model", "sample", "device")
    try:
        policy: Policy = make(model, sample, device)
    except ValueError:  # says in one line what is wrong with an input
        raise
    except Exception as error:
        why = why_it_fails(kind, Path(kind.partition(":")[0]), error)
        raise refusal("model.kind", kind, f"must make a policy, {why}; correct it") from error
    if missing := ", ".join(name for name in (*METHODS, "module") if not hasattr(policy, name)):
        text = f"must make a policy, {type(policy).__name__} has no {missing}; see flow_grpo/models/policy.py"
        raise refusal("model.kind", kind, text)
    for knob, asked, neutral, attribute in (
        ("model.boundary_ratio", model.boundary_ratio, 0, "boundary_ratio"),
        ("sample.ode_calls", sample.ode_calls, "exact", "approximate"),
        ("model.reward_decoder", model.reward_decoder, "", "decode_for_rewards"),
    ):
        if asked != neutral and not hasattr(policy, attribute):
            text = f"must be {neutral!r} for {type(policy).__name__}, a policy of one's own without {attribute}"
            raise refusal(knob, asked, f"{text}; see docs/add_a_model.md")
    trained = policy.trained_parameters()
    if not isinstance(trained, list) or not trained or not all(isinstance(one, nn.Parameter) for one in trained):
        got = f"{len(trained)} entries" if isinstance(trained, list) else type(trained).__name__
        text = f"must return a list of the parameters to train from trained_parameters(), got {got}"
        raise refusal("model.kind", kind, f"{text}; correct it")
    if frozen := [number for number, one in enumerate(trained) if not one.requires_grad]:
        text = f"trains parameters of which {len(frozen)} of {len(trained)} have requires_grad=False"
        raise refusal("model.kind", kind, f"{text}; leave them out of trained_parameters(), or let them require it")
    own = set(map(id, trained))
    if any(id(one) not in own for one in policy.camera_parameters()):
        text = "returns other parameters from camera_parameters() than are in trained_parameters()"
        raise refusal("model.kind", kind, f"{text}; return some of those")
    return policy
