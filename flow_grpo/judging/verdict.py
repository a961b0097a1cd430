"""What a run has achieved: one word for its camera, one for its picture and one for the run, by paired intervals.

A reward that rises on held-out conditions proves nothing, and a camera that comes closer hides a spoiled picture in
every comparison with the true view. So nothing decides that was trained or equals what was, and both aspects count.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from flow_grpo.judging.changes import LEAST_SCENES
from flow_grpo.judging.table import EQUAL, Table, common_rows
from flow_grpo.maths.bootstrap import Interval

TRUE_VIEW = "target_view"  # to the true view: measured in every evaluation that has one
CAMERA, PICTURE, AGREEMENT, OTHER = "camera", "picture", "true view", "other rewards"  # aspects of a video
NOT_JUDGED = {CAMERA: "not judged by an independent estimator", PICTURE: "not judged by an untrained measure"}
# Endings of measurements, without units where the name says the unit.
ERRORS = ("_deg", "_m", "_px", "_displacement", "residual", "_mismatch")  # less is better
MORE_IS_BETTER = ("_db", "_ssim", "_valid", "located")  # similarity, shares
OF_CAMERA = ("rot_err_deg", "trans_err_m", "_rot_deg", "_trans_m", "_disp_px", "_displacement", "located")
OF_PICTURE = ("residual", "_mismatch", "found_path_psnr_db", "source_texture")  # which no camera explains
TOO_FEW = f"fewer than {LEAST_SCENES} held-out scenes give no intervals, see the table"
# A change below these is unclear, however narrow its interval: hardly seen in a video.
LEAST_OF_FLOOR = 0.1  # of what the estimator finds on perfect videos, or of a reward's own noise
LEAST_OF_VALUE = 0.02  # where there is no floor, of the value before training; in decibels of the squared error
FIGURES = 2  # of an aspect, in words
# As a person would say it.
SAID = {CAMERA: "the camera path", AGREEMENT: "the likeness to the true view", OTHER: "what was not trained"}
AS_SAID = {"mixed": "better by one measure and worse by another", "unclear": "neither clearly better nor worse"}
SHOWN = 3  # of what got worse for a kind of camera, where people read it
DO_NOT_USE = "held-out metrics got worse: do not use this adapter"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The verdict on a run."""

    # "better" or "worse" where the aspects agree, "mixed" where they do not, else "unclear": also where an aspect got
    # better and another is not judged, and where only the true view is nearer.
    overall: str
    in_words: str  # the verdict in one line
    aspects: dict[str, str]  # aspect -> such a word, or why it is not judged
    metrics: dict[str, str]  # `eval/` name -> "better", "worse" or "unclear"
    deciding: list[str]  # those of them that decide


def direction(name: str, rewards: Sequence[str]) -> int:
    """Return 1 where more of a held-out metric `eval/...` is better, -1 where less is, 0 where that is not known."""
    short = name.removeprefix("eval/")
    if short in rewards or short.endswith(MORE_IS_BETTER):
        return 1
    return -1 if short.endswith(ERRORS) else 0


def aspect(name: str) -> str:
    """Return what a held-out metric `eval/...` is a measure of, as a share `_valid` is of what it counts."""
    short = name.removeprefix("eval/").removesuffix("_valid")
    if short.endswith(OF_PICTURE):
        return PICTURE
    if short.endswith(OF_CAMERA):
        return CAMERA
    return AGREEMENT if short.startswith(TRUE_VIEW) else OTHER


def judge(
    changes: Mapping[str, Interval],
    rewards: Sequence[str],
    trained: Sequence[str],
    *,
    before: Mapping[str, float],
    floors: Mapping[str, float],
    twins: Collection[str] = (),
    filmed: bool = True,
) -> Verdict:
    """Return the verdict on paired changes, of which one without an interval is unclear.

    Metrics have their `eval/` names. `rewards` are all that was measured, the gold estimator included, `trained` those
    that shaped what was learned, `twins` the metrics that equal one, see `Table.twins`. A floor is what is found on
    perfect videos, or a reward's noise. Where videos are `filmed`, both aspects must be judged for "better".
    """
    found = {
        name: word_of(name, (change.mean, change.low, change.high), rewards, before.get(name), floors.get(name))
        for name, change in changes.items()
        if direction(name, rewards)
    }
    names = deciding(found, rewards, trained, twins)
    parts = {part: [name for name in names if aspect(name) == part] for part in (CAMERA, PICTURE, AGREEMENT, OTHER)}
    aspects = {part: _common([found[name] for name in own]) for part, own in parts.items() if own}
    overall = _common(list(aspects.values()))
    missing = {part: why for part, why in NOT_JUDGED.items() if filmed and part not in aspects}
    if filmed and overall == "better" and (missing or "better" not in (aspects[CAMERA], aspects[PICTURE])):
        overall = "unclear"
    words = []
    for part, word in aspects.items():
        clear = [name for name in parts[part] if found[name] != "unclear"]
        clear = sorted(clear, key=lambda name: name.startswith(f"eval/{TRUE_VIEW}"))[:FIGURES]  # physical units first
        figures = [f"{name.removeprefix('eval/')} {_moved(before.get(name), changes[name].mean)}" for name in clear]
        words.append(f"{part} {word}" + (f" ({', '.join(figures)})" if figures else ""))
    if not any(math.isfinite(change.low) for change in changes.values()):
        words = [TOO_FEW]
    elif not names and not filmed:
        words = ["all that is measured was trained"]
    lines = [f"{overall}: {', '.join(words)}" if words else overall]
    lines += [f"{part}: {why}" for part, why in missing.items()]
    lines += [DO_NOT_USE] if overall == "worse" else []
    return Verdict(overall, "; ".join(lines), aspects | missing, found, names)


def plainly(aspects: Mapping[str, str]) -> str:
    """Return what became of the aspects of a verdict in a sentence; "" without any."""
    parts = []
    for word in dict.fromkeys(aspects.values()):
        own = [SAID.get(part, f"the {part}") for part, found in aspects.items() if found == word]
        parts.append(f"{' and '.join(own)} {'is' if len(own) == 1 else 'are'} {AS_SAID.get(word, word)}")
    text = ", but ".join(parts)
    return text and f"{text[0].upper()}{text[1:]}."


def _common(words: Sequence[str]) -> str:
    """Return the word that all clear ones of `words` share, "mixed" where they differ, "unclear" without any."""
    clear = set(words) - {"unclear"}
    return "mixed" if len(clear) > 1 else next(iter(clear), "unclear")


def _moved(before: float | None, change: float) -> str:
    return f"{change:+.4g}" if before is None else f"{before:.4g} → {before + change:.4g}"


def word_of(
    name: str, change: Sequence[float], rewards: Sequence[str], before: float | None = None, floor: float | None = None
) -> str:
    """Return "better" or "worse" for a change (mean, low, high) of a held-out metric, or "unclear".

    It is unclear where the interval holds 0 or the change is below the least effect: of rewards, whose zero lies
    anywhere, that is known with their floor only.
    """
    sign = direction(name, rewards)
    mean, low, high = (sign * value for value in change)
    low, high = sorted((low, high))
    least = 0.0
    if name.endswith(("_db", "_psnr")):
        least = 10 * math.log10(1 + LEAST_OF_VALUE)
    elif floor is not None and math.isfinite(floor) and not name.endswith(MORE_IS_BETTER):
        least = LEAST_OF_FLOOR * abs(floor)
    elif before is not None and name.removeprefix("eval/") not in rewards:
        least = LEAST_OF_VALUE * abs(before)
    if abs(mean) < least:
        return "unclear"
    return "better" if low > 0 else "worse" if high < 0 else "unclear"


def deciding(
    names: Iterable[str], rewards: Sequence[str], trained: Iterable[str], twins: Collection[str] = ()
) -> list[str]:
    """Return those of the held-out metrics `eval/...` that decide the verdict.

    These measure camera, picture or agreement with the true view; where there are none, such as for prompts, the
    rewards that were measured only. What a trained reward measures never decides, nor do `twins`, nor what is measured
    at equal travel as well.
    """
    taken = tuple(f"eval/{name}_" for name in trained)
    free = [name for name in names if direction(name, rewards) and not f"{name}_".startswith(taken)]
    free = [name for name in free if name.removesuffix("_valid") not in twins]
    free = [name for name in free if name.replace("eval/", f"eval/{EQUAL}", 1) not in names]
    return [name for name in free if aspect(name) != OTHER] or free


def worse_by_camera(
    by_camera: Mapping[str, Mapping[str, Sequence[float]]],
    names: Sequence[str],
    rewards: Sequence[str],
    before: Mapping[str, float],
    floors: Mapping[str, float],
) -> list[str]:
    """Return what got worse for a kind of camera, in words, such as "zoom_in rot_err_deg +0.69 [+0.29, +1.08]".

    A run that is better in the mean may be worse for one of them. The clearest stand first: those whose change is the
    largest beside its interval. Changes below the least effect are left out.

    The changes are as of `changes_by_camera`, the metrics `names` are looked at; values before training are by
    `eval_by_camera/<kind>/<metric>`, rewards and floors as in `judge`.
    """
    found = []
    for kind, changes in by_camera.items():
        for name in (name for name in names if name in changes):
            (mean, low, high), short = changes[name], name.removeprefix("eval/")
            value = before.get(f"eval_by_camera/{kind}/{short.removeprefix(EQUAL)}")
            if word_of(name, (mean, low, high), rewards, value, floors.get(name)) == "worse":
                text = f"{kind} {short} {mean:+.4g} [{low:+.4g}, {high:+.4g}]"
                found.append((abs(mean) / (high - low) if high > low else math.inf, text))
    return [text for _, text in sorted(found, key=lambda one: -one[0])]


def abridged(worse: Sequence[str]) -> list[str]:
    """Return the first of what `worse_by_camera` has found, and how many more there are, for people to read."""
    more = len(worse) - SHOWN
    return [*worse[:SHOWN], *([f"{more} more, see change_by_camera in summary.json"] if more > 0 else [])]


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
