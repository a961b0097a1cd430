"""Does what the update can credit make the copies of a group score differently, by more than the rewards' noise?"""

from __future__ import annotations

from collections.abc import Mapping

from flow_grpo.judging.reward_signal import Spread, is_silent, measure_spread
from flow_grpo.preflight.doctor.context import DoctorContext
from flow_grpo.preflight.doctor.findings import Finding, finding
from flow_grpo.settings.checks import largest_weights

LEAST_SHARE = 0.2  # of the variance inside groups: below, most of what is trained on was not caused by the policy
GROUPS = 1  # a rank


def examine_signal(context: DoctorContext) -> Finding:
    """Check credit share and spread of the weighted rewards; collective call: every rank must call it.

    Raises:
        RuntimeError: on every rank, if any failed.
    """
    if context.grpo is None:
        return finding("signal", "train.objective='forward' learns from whole samples: all of the spread counts")
    shared = context.config.sample.same_initial_noise
    spreads = measure_spread(
        context.policy, context.data, context.rewards, context.sampling, context.world, groups=GROUPS, own=not shared
    )
    weights = largest_weights(context.config)
    used = {name: spread for name, spread in spreads.items() if weights.get(name)}
    return check_signal(used, shared=shared)


def check_signal(spreads: Mapping[str, Spread], *, shared: bool) -> Finding:
    """Check the rewards that are trained: at least one above its floor, and enough of the spread credited.

    Args:
        spreads: reward name -> spread.
        shared: the copies of the recipe share their initial noise.
    """
    said, uncredited = [], []
    for name, spread in spreads.items():
        inside = spread.inside(shared=shared)
        line = f"{name} spreads {inside:.3g} inside groups (floor {spread.floor:.3g})"
        if not shared:
            line += f", {spread.credit_share:.0%} of its variance by recorded noise"
            if not spread.credit_share >= LEAST_SHARE:
                uncredited.append(name)
        said.append(line)
    more_noise = "raise sample.noise_level or let earlier steps be stochastic (sample.sde_steps)"
    way_out = f"the copies of a group score the same within measuring noise: {more_noise}"
    warn = f"below {LEAST_SHARE:.0%}: pass --config.sample.same_initial_noise=true, and {more_noise}"
    silent = is_silent(spreads, dict.fromkeys(spreads, 1.0), shared=shared)
    return finding("signal", "; ".join(said), fail=way_out if silent else "", warn=warn if uncredited else "")
