"""Answers on clips as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.common import markdown_table
from tools.footage.answers import Answer
from tools.run_report.words import NOTHING, number

ABOUT = (
    "A value is what a perfect retake scores on the clip: its own frames, or the true view's, written and read once, "
    "their own camera path the command; in brackets the error in its unit. A dash: no value. A reward's floor is the "
    "noise that it states itself. A preset is measurable where half of its frames at least would show enough points "
    "of the source; without a scale these are only turned."
)


def table(answers: Sequence[Answer], floors: Mapping[str, float]) -> list[str]:
    """Return lines: a Markdown table with a row a clip, then why values are missing and what would help."""
    head = [*(f"{name} (floor {number(floor, 2)})" for name, floor in floors.items()), "CPU s", "presets"]
    rows, whose = [], dict[str, list[str]]()
    for one in answers:
        values = [one.scores[name].text if one.scores else NOTHING for name in floors]
        spent = number(sum(score.cpu_seconds for score in one.scores.values()), 2)
        lost = f" (not {one.lost})" * bool(one.lost)
        rows.append([one.clip, one.camera or NOTHING, *values, spent, f"{len(one.presets)}{lost}"])
        causes = [f"{which}: {cause}" for cause, which in one.causes().items()]
        for text in [*causes, *(f"what helps: {text}" for text in one.advice())]:
            whose.setdefault(text, []).append(one.clip)
    below = [f"- {text} ({', '.join(clips)})" for text, clips in sorted(whose.items())]
    return [*markdown_table(["clip", "camera", *head], rows), "", *below]
