"""Answers on clips as a table, as JSON-able records and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from flow_grpo.maths.poses import PRESETS
from tools.common import markdown_table
from tools.footage.answers import Answer, Score
from tools.run_report.page import fill
from tools.run_report.words import NOTHING, number

ABOUT = (
    "A value is what a perfect retake scores on the clip: its own frames, or the true view's, written and read once, "
    "their own camera path the command; in brackets the error in its unit. A dash: no value. A reward's floor is the "
    "noise that it states itself. A preset is measurable where half of its frames at least would show enough points "
    "of the source; without a scale these are only turned."
)


def table(answers: Sequence[Answer], floors: Mapping[str, float]) -> list[str]:
    """Return lines: a Markdown table with a row a clip, then why values are missing and what would help."""
    head = [
        "clip",
        "camera",
        *(f"{name} (floor {number(floor, 2)})" for name, floor in floors.items()),
        "CPU s",
        "presets",
    ]
    rows = [
        [
            one.clip,
            one.camera or NOTHING,
            *(cell(one.scores.get(name)) for name in floors),
            number(sum(score.cpu_seconds for score in one.scores.values()), 2) if one.scores else NOTHING,
            presets(one),
        ]
        for one in answers
    ]
    lines = [*markdown_table(head, rows), ""]
    whose: dict[str, list[str]] = {}
    for one in answers:
        for cause, which in causes(one).items():
            whose.setdefault(f"{which}: {cause}", []).append(one.clip)
        for text in one.advice:
            whose.setdefault(f"what helps: {text}", []).append(one.clip)
    return lines + [f"- {text} ({', '.join(clips)})" for text, clips in sorted(whose.items())]


def cell(score: Score | None) -> str:
    """Return a value with its measure in brackets."""
    if score is None or score.value is None:
        return NOTHING
    return number(score.value, 2) + f" ({score.measured})" * bool(score.measured)


def presets(one: Answer) -> str:
    """Return how many presets are measurable, and which are not where some are."""
    lost = ", ".join(name for name in PRESETS if name not in one.presets)
    return f"{len(one.presets)}" + f" (not {lost})" * bool(one.presets and lost)


def causes(one: Answer) -> dict[str, str]:
    """Return why values are missing -> the rewards it holds for."""
    found: dict[str, list[str]] = {one.cause: ["all"]} if one.cause else {}
    for name, score in one.scores.items():
        if score.cause:
            found.setdefault(score.cause, []).append(name)
    return {cause: ", ".join(names) for cause, names in found.items()}


def records(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """Return the answers without their pictures."""
    return [{name: value for name, value in dataclasses.asdict(one).items() if name != "thumbnail"} for one in answers]


def page(answers: Sequence[Answer], floors: Mapping[str, float], recipe: str, size: Sequence[int]) -> str:
    """Return a page with a picture of each clip, at a size (T, h, w), that needs no network."""
    shown = [
        (one, [(name, cell(one.scores.get(name))) for name in floors], causes(one), presets(one)) for one in answers
    ]
    return fill("clips.html.j2", "", shown=shown, floors=floors, recipe=recipe, size=size, about=ABOUT)
