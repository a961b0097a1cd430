"""`model.checkpointing=auto`: the fastest way to recompute activations that a device has the memory for."""

from __future__ import annotations

import dataclasses
from typing import Literal, TypeAlias

from flow_grpo.cost.plan import make_plan
from flow_grpo.models.registry import is_video_model
from flow_grpo.settings.schema import Config

# Of the device, for what the plan does not count: an H100's allocator reserved 15 % more than the peak of an update.
USABLE = 0.8
# Noting every operation of a block takes time on the host that shorter videos do not give back: on an H100 an update
# with attention kept took twice as long at 7,020 tokens and 0.86 times at 65,520 (docs/devices.md).
LONG_TOKENS = 30_000

ASSUMED_GIB = 64.0  # of a device whose memory is not known

Mode: TypeAlias = Literal["none", "keep_attention", "blocks"]
FASTEST_FIRST: tuple[Mode, ...] = ("none", "keep_attention", "blocks")


def choose_recomputation(config: Config, devices: int, gib: float) -> tuple[Config, str]:
    """Return a configuration whose `model.checkpointing` is decided, and a line that says why; "" where it was.

    `gib` is the memory of one of the devices, or of a rank's share of the machine.
    """
    if config.model.checkpointing != "auto":
        return config, ""

    def choice(mode: Mode) -> Config:
        return dataclasses.replace(config, model=dataclasses.replace(config.model, checkpointing=mode))

    if not is_video_model(config.model.kind):
        return choice("blocks"), "model.checkpointing=auto: blocks, a policy of one's own cannot be planned"
    tried: list[str] = []
    for mode in FASTEST_FIRST:
        plan = make_plan(choice(mode), devices, 1.0)
        if mode != "blocks" and plan.update_gib > USABLE * gib:
            tried.append(f"not {mode}, whose update needs {plan.update_gib:.1f} of {gib:.1f} GiB")
        elif mode == "keep_attention" and plan.tokens < LONG_TOKENS:
            tried.append(f"not {mode}, which {plan.tokens:,} tokens are too few for")
        else:
            tried.append(f"{mode}, planned {plan.update_gib:.1f} of {gib:.1f} GiB in the update")
            return choice(mode), f"model.checkpointing=auto: {'; '.join(tried)}"
    raise AssertionError("the last of them is always taken")
