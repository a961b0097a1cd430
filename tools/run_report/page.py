"""One HTML page of one or several runs: style, script, plots and videos are inside it, nothing is fetched."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flow_grpo.reporting.drawing.plots import BETTER
from flow_grpo.reporting.drawing.style import BLUE, CYCLE, GREY, ORANGE
from flow_grpo.reporting.metric_names import HEALTH
from flow_grpo.settings.loading import differences
from tools.run_folder import Run
from tools.run_report import words
from tools.run_report.clips import MOST_BYTES, choose
from tools.run_report.configuration import changes, knobs, settings
from tools.run_report.figures import by_camera, camera_path, curves
from tools.run_report.health import findings
from tools.run_report.held_out import camera_changes, direction, held_out, judged, sentences, side_by_side, verdict_word
from tools.run_report.work import device, figures, phases, versions

HERE = Path(__file__).resolve().parent
MOST_PAGE_BYTES = 30_000_000
FIRST_KNOBS = 12  # of those in which runs differ; the others stand behind a fold


def render(runs: Sequence[Run], asked: str = "") -> str:
    """Return the page of at least one run; `asked` as in `configuration.knobs`. ValueError if it would not be small."""
    compared = side_by_side(runs) if len(runs) > 1 else None
    drawn = curves(runs, compared["alike"] if compared else runs)
    # Names and places of the runs are no difference.
    different = differences(*(settings(run) | changes(run) for run in runs)) if len(runs) > 1 else {}
    page = fill(
        "page.html.j2",
        (HERE / "script.js").read_text(encoding="utf-8"),
        parts=[part(run, f"run {place}", MOST_BYTES // len(runs), asked) for place, run in enumerate(runs)],
        compared=compared,
        different=[(knob, [value or words.NOTHING for value in values]) for knob, values in different.items()],
        first_knobs=FIRST_KNOBS,
        curves=drawn,
        ends=[
            (name, run, ends)
            for panel, _ in drawn
            for name in panel.names
            for run in (runs if name in HEALTH or not compared else compared["alike"])
            if (ends := run.series(name))
        ],
        colours={"before": GREY, "after": BLUE, "commanded": BLUE, "estimated": ORANGE},
        colour_of=lambda place: CYCLE[place % len(CYCLE)],
    )
    if len(page.encode()) > MOST_PAGE_BYTES:
        raise ValueError(f"the page has {len(page.encode())} bytes, must stay below {MOST_PAGE_BYTES}; give fewer runs")
    return page


def fill(template: str, script: str, **facts: object) -> str:
    """Return the page of a template in this folder, with the style of all pages, a script and facts."""
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    of_words = (words.number, words.signed, words.span, words.percent, words.duration, words.tidy)
    environment.filters |= {write.__name__: write for write in (*of_words, rich, breaking)}
    return environment.get_template(template).render(
        facts,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        written=time.strftime("%Y-%m-%d %H:%M"),
    )


def part(run: Run, name: str, most_bytes: int, asked: str) -> dict[str, Any]:
    """Return what the page says about one run, with at most that many bytes of video, for the template."""
    clips, left_out = choose(run, most_bytes)
    found, bounded = findings(run)
    particular, note = knobs(run, asked)
    by_kind = [(metric, own) for metric in judged(run) if (own := camera_changes(run, metric))]
    return {
        "run": run,
        "word": verdict_word(run),
        "sentences": sentences(run),
        "device": device(run),
        "groups": [(title, list(own)) for title, own in itertools.groupby(held_out(run), lambda change: change.group)],
        "clips": clips,
        "paths": [
            camera_path(clip["video"].paths, f"{name} path {place}") if clip["video"].paths else ""
            for place, clip in enumerate(clips)
        ],
        "without": [*run.without, *left_out],
        "cameras": by_kind,
        "bars": [
            (metric, BETTER[direction(run, metric)], by_camera(own, f"{name} by camera {metric}"))
            for metric, own in by_kind
        ],
        "findings": found,
        "bounded": bounded,
        "phases": phases(run),
        "figures": figures(run),
        "knobs": particular,
        "changes": changes(run),
        "knob_note": note,
        "versions": versions(run),
    }


def rich(text: str) -> Markup:
    """Return text with `code` as code, and Markdown links as their text."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(plain))))


def breaking(name: str) -> Markup:
    """Return a name that may go on in the next line after each of its parts."""
    return Markup(re.sub(r"([_./])", r"\1<wbr>", str(escape(name))))
