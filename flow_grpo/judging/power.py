"""Which change of a held-out metric an evaluation can see, before a run is paid for.

A change of the mean is seen with 80 % certainty if it is t(0.975) + t(0.8) times its standard error, with one degree of
freedom less than there are scenes (Cohen, Statistical Power Analysis, 1988, section 2.4, for paired differences).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import NormalDist

from flow_grpo.judging.changes import LEAST_SCENES
from flow_grpo.judging.table import Table
from flow_grpo.judging.verdict import ERRORS, deciding
from flow_grpo.maths.bootstrap import LEVEL, t_quantile
from flow_grpo.settings.checks import trained_rewards
from flow_grpo.settings.schema import Config

POWER = 0.8
WANTED = (0.1, 0.05)  # changes, as shares of the metric's value, for which the number of conditions is given
# Measured on the demo, 160 conditions of 16 scenes before and after its training, five seeds: standard deviation of a
# condition's change as a share of the mean before training; the same as a share of the conditions' own standard
# deviation (0.4 to 0.9 by metric); correlation of changes in one scene (-0.09 to 0.03).
OF_GOLD = {"eval/rot_err_deg": 0.5, "eval/trans_err_m": 0.6, "eval/equal_travel_residual": 0.06}
OF_TRUE_VIEW = {"eval/target_view_displacement": 0.65, "eval/target_view_mismatch": 0.2}
CHANGE_OVER_LEVEL = 0.8
SAME_SCENE = 0.05


def usual_spreads(config: Config) -> dict[str, float]:
    """Return `eval/` name -> spread, as on the demo, of the metrics that will decide the verdict of a recipe's run."""
    known = (OF_GOLD if config.eval.gold else {}) | ({} if config.data.prompts else OF_TRUE_VIEW)
    return {name: known[name] for name in deciding(known, (), trained_rewards(config))}


def measured_spreads(first: Table, names: Iterable[str]) -> dict[str, float]:
    """Return `eval/` name -> expected standard deviation of a condition's change, as a share of the mean.

    From the spread of a first evaluation; of errors, since shares of other metrics' means say nothing.
    """
    found = {}
    for name in (name for name in names if name.endswith(ERRORS)):
        column = first.values.get(name.removeprefix("eval/"))
        if column is not None and len(column := column[column.isfinite()]) > 1 and column.mean():
            found[name] = CHANGE_OVER_LEVEL * float(column.std() / column.mean().abs())
    return found


def least_visible(spread: float, conditions: int, scenes: int) -> float:
    """Return the least change of the mean, as a share of it, that is seen with a certainty of `POWER`."""
    by_scene = conditions / scenes
    error = spread * math.sqrt((1 + (by_scene - 1) * SAME_SCENE) / conditions)
    return error * sum(t_quantile(share, scenes - 1) for share in ((1 + LEVEL) / 2, POWER))


def scenes_needed(change: float, spread: float) -> int:
    """Return how many conditions, each of a scene of its own, a change needs to be seen: t for many is normal, + 2."""
    normal = sum(NormalDist().inv_cdf(share) for share in ((1 + LEVEL) / 2, POWER))
    return max(LEAST_SCENES, math.ceil((normal * spread / change) ** 2) + 2)


def in_words(spreads: Mapping[str, float], conditions: int, scenes: int, ranks: int = 1) -> str:
    """Return what an evaluation of so many conditions of so many scenes can see of the metrics, in one line.

    It also says how many conditions `ranks` measure in the same time, where that is a tenth more or above.
    """
    text, free = f"{conditions} conditions of {scenes} scenes", ranks * math.ceil(conditions / ranks)
    if free >= 1.1 * conditions:
        text += f" (on {ranks} ranks {free} take the same time: one rank measures {free // ranks})"
    if scenes < LEAST_SCENES:
        text += f" give no interval, {LEAST_SCENES} scenes are needed"
    elif spreads:
        seen = [
            f"{name.removeprefix('eval/')} by {least_visible(spread, conditions, scenes):.0%}"
            for name, spread in spreads.items()
        ]
        text += f" see with {POWER:.0%} certainty a change of {', '.join(seen)}"
    if not spreads:
        return text
    most = max(spreads.values())
    needs = [f"{change:.0%} needs {scenes_needed(change, most)} conditions" for change in WANTED]
    return f"{text}; {', '.join(needs)}, each of a scene of its own"
