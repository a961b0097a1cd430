"""What a run has achieved, in one word a metric and one for the run: better, worse or unclear, by paired intervals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from flow_grpo.judging.changes import LEAST_SCENES
from flow_grpo.judging.table import Table, common_rows
from flow_grpo.maths.bootstrap import Interval

LESS_IS_BETTER = ("_deg", "_m", "_px")  # endings of measurements that are errors: degrees, metres, pixels
TRUE_VIEW = "target_view"  # to the true view: measured in every evaluation that has one
MORE_IS_BETTER = ("_db", "_ssim", "_valid", "located")  # and of those that are not: similarity, shares
TOO_FEW = f"fewer than {LEAST_SCENES} held-out scenes give no intervals, see the table"
SMALL = 0.02  # of an error, or of a squared one in decibels: a change below, however clear, is hardly seen in a video
SHOWN_WORSE = 3  # of what got worse for a kind of camera, where people read it
DO_NOT_USE = "held-out metrics got worse: do not use this adapter"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a run."""

    # "better" or "worse" where the metrics that count agree, "mixed" where they do not, else "unclear". Those that no
    # reward of the training measures count; where there is a gold estimator, of these only its own and the similarity
    # to the true view; where there are none, all.
    overall: str
    metrics: dict[str, str]  # `eval/` name -> "better", "worse" or "unclear"
    measurable: bool = True  # whether there are intervals at all: too few scenes give none
    small: bool = False  # every change of a measurement that decides is small, see `is_small`, and there is one

    def __str__(self) -> str:
        """Return the verdict in one line."""
        clear = []
        for word in ("better", "worse"):
            names = [name.removeprefix("eval/") for name, found in self.metrics.items() if found == word]
            clear += [f"{word}: {', '.join(names)}"] if names else []
        words = "; ".join(clear) or ("no interval excludes 0" if self.measurable else TOO_FEW)
        size = f", but by less than {SMALL:.0%}" if self.small else ""
        text = f"{self.overall}{size} ({words})"
        return f"{text}; {DO_NOT_USE}" if self.overall == "worse" else text


def direction(name: str, rewards: Sequence[str]) -> int:
    """Return 1 where more of a held-out metric `eval/...` is better, -1 where less is, 0 where that is not known."""
    short = name.removeprefix("eval/")
    if short in rewards or short.endswith(MORE_IS_BETTER):
        return 1
    return -1 if short.endswith(LESS_IS_BETTER) else 0


def judge(
    changes: Mapping[str, Interval],
    rewards: Sequence[str],
    weights: Mapping[str, float],
    *,
    before: Mapping[str, float],
    gold: bool = False,
) -> Verdict:
    """Return the verdict on paired changes, of which one without an interval is unclear.

    Args:
        changes: `eval/` name -> change.
        rewards: names of all that was measured, the gold estimator's included.
        weights: reward -> its largest weight in training.
        before: `eval/` name -> value before training.
        gold: an estimator that no reward uses is among what was measured. A reward of weight 0 then does not count: it
            may be the trained one under another name.
    """
    found = {}
    for name, change in changes.items():
        sign = direction(name, rewards)
        if sign:
            found[name] = word_of(sign, change.low, change.high)
    clear = [name for name in deciding(found, rewards, weights, gold=gold) if found[name] != "unclear"]
    words = {found[name] for name in clear}
    overall = "mixed" if len(words) > 1 else next(iter(words), "unclear")
    sizes = [is_small(name, changes[name].mean, before.get(name), rewards) for name in clear]
    small = False not in sizes and True in sizes
    return Verdict(overall, found, any(math.isfinite(change.low) for change in changes.values()), small)


def is_small(name: str, change: float, before: float | None, rewards: Sequence[str]) -> bool | None:
    """Return whether a change is small beside the value before training; None for rewards, whose zero lies anywhere."""
    if before is None or name.removeprefix("eval/") in rewards:
        return None
    bound = 10 * math.log10(1 + SMALL) if name.endswith("_db") else SMALL * abs(before)
    return abs(change) < bound


def word_of(sign: int, low: float, high: float) -> str:
    """Return "better", "worse" or "unclear" for a change in the interval [low, high]; sign as of `direction`."""
    low, high = sorted((sign * low, sign * high))
    return "better" if low > 0 else "worse" if high < 0 else "unclear"


def deciding(names: Iterable[str], rewards: Sequence[str], weights: Mapping[str, float], *, gold: bool) -> list[str]:
    """Return those of the held-out metrics `eval/...` that decide the verdict; the rest as in `judge`."""
    names = [name for name in names if direction(name, rewards)]
    known = [f"eval/{name}" for name, weight in weights.items() if weight or (gold and name != TRUE_VIEW)]
    return [name for name in names if not any(f"{name}_".startswith(f"{own}_") for own in known)] or names


def worse_by_camera(
    by_camera: Mapping[str, Mapping[str, Sequence[float]]],
    names: Sequence[str],
    rewards: Sequence[str],
    before: Mapping[str, float],
) -> list[str]:
    """Return what got worse for a kind of camera, in words, such as "zoom_in rot_err_deg +0.69 [+0.29, +1.08]".

    A run that is better in the mean may be worse for one of them. The clearest stand first: those whose change is the
    largest beside its interval. Small changes are left out.

    Args:
        by_camera: as of `changes_by_camera`.
        names: the metrics to look at, such as those of `deciding`.
        rewards: as in `direction`.
        before: `eval_by_camera/<kind>/<metric>` -> value before training.
    """
    found = []
    for kind, changes in by_camera.items():
        for name in (name for name in names if name in changes):
            (mean, low, high), short = changes[name], name.removeprefix("eval/")
            small = is_small(name, mean, before.get(f"eval_by_camera/{kind}/{short}"), rewards)
            if not small and word_of(direction(name, rewards), low, high) == "worse":
                text = f"{kind} {short} {mean:+.4g} [{low:+.4g}, {high:+.4g}]"
                found.append((abs(mean) / (high - low) if high > low else math.inf, text))
    return [text for _, text in sorted(found, key=lambda one: -one[0])]


def abridged(worse: Sequence[str]) -> list[str]:
    """Return the first of what `worse_by_camera` has found, and how many more there are, for people to read."""
    more = len(worse) - SHOWN_WORSE
    return [*worse[:SHOWN_WORSE], *([f"{more} more, see change_by_camera in summary.json"] if more > 0 else [])]


def best_and_worst(before: Table, after: Table, name: str, sign: int, count: int) -> tuple[list[int], list[int]]:
    """Return the rows of `after` that a metric (without `eval/`) improved most on, and least; `sign` as of `direction`.

    At most `count` of each, fewer where there are not twice as many rows whose value has changed.
    """
    if name not in before.values or name not in after.values:
        return [], []
    then, now = common_rows(before, after)
    gains = (sign * (after.values[name][now] - before.values[name][then])).tolist()
    moved = [(gain, row) for gain, row in zip(gains, now, strict=True) if math.isfinite(gain) and gain]
    order = [row for _, row in sorted(moved, key=lambda one: -one[0])]
    count = min(count, len(order) // 2)
    return order[:count], order[len(order) - count :][::-1]
