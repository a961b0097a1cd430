"""One HTML page of one or several runs: style, script, plots and videos are inside it, nothing is fetched."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import re
import time
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from flow_grpo.reporting.metric_names import HEALTH, healthy_text, metric_of
from flow_grpo.reporting.plots import BETTER
from tools.run_report import words
from tools.run_report.charts import CameraPlot, Plot, by_camera, constant, plot
from tools.run_report.clips import MOST_BYTES, Clip, choose
from tools.run_report.comparison import FIRST_KNOBS, compare, differences
from tools.run_report.configuration import Knob, KnobChange, changes, knobs
from tools.run_report.health import Finding, findings
from tools.run_report.held_out import Change, held_out, judged, sentence, verdict_word
from tools.run_report.run_folder import Run
from tools.run_report.work import Phase, device, figures, phases, tiles, versions

HERE = Path(__file__).resolve().parent
MOST_PAGE_BYTES = 30_000_000
MOST_BANDS = 2  # runs; more would hide one another


@dataclasses.dataclass(frozen=True)
class Part:
    """What a page says about one run; see the modules that the types come from."""

    run: Run
    word: str
    sentence: str
    device: str
    groups: list[tuple[str, list[Change]]]
    clips: list[Clip]
    without: list[str]
    cameras: list[CameraPlot]
    findings: list[Finding]
    bounded: int
    phases: list[Phase]
    tiles: list[tuple[str, str, str]]
    figures: list[tuple[str, str, str]]
    knobs: list[Knob]
    changes: list[KnobChange]
    knob_note: str
    versions: dict[str, str]


def render(runs: Sequence[Run], asked: str = "") -> str:
    """Return the page.

    Args:
        runs: at least one; the first gives the page its name.
        asked: "FILE:RECIPE" that the user named on the command line, see `configuration.knobs`.

    Raises:
        ValueError: the page would not stay small.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": words.number,
        "signed": words.signed,
        "span": words.span,
        "percent": words.percent,
        "duration": words.duration,
        "rich": rich,
        "breaking": breaking,
    }
    script = (HERE / "script.js").read_text(encoding="utf-8")
    drawn, flat = curves(runs)
    page = environment.get_template("page.html.j2").render(
        parts=[part(run, MOST_BYTES // len(runs), asked) for run in runs],
        compared=compare(runs) if len(runs) > 1 else None,
        different=differences(runs) if len(runs) > 1 else [],
        first_knobs=FIRST_KNOBS,
        curves=drawn,
        flat=flat,
        most_bands=MOST_BANDS,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    if len(page.encode()) > MOST_PAGE_BYTES:
        raise ValueError(f"the page has {len(page.encode())} bytes, must stay below {MOST_PAGE_BYTES}; give fewer runs")
    return page


def part(run: Run, most_bytes: int, asked: str) -> Part:
    """Return what the page says about one run, with at most that many bytes of video."""
    clips, left_out = choose(run, most_bytes)
    found, bounded = findings(run)
    particular, note = knobs(run, asked)
    cameras = [by_camera(run, name) for name in judged(run)]
    return Part(
        run=run,
        word=verdict_word(run),
        sentence=sentence(run),
        device=device(run),
        groups=[(name, list(own)) for name, own in itertools.groupby(held_out(run), lambda change: change.group)],
        clips=clips,
        without=[*run.without, *left_out],
        cameras=[found for found in cameras if found],
        findings=found,
        bounded=bounded,
        phases=phases(run),
        tiles=tiles(run),
        figures=figures(run),
        knobs=particular,
        changes=list(changes(run).values()),
        knob_note=note,
        versions=versions(run),
    )


def curves(runs: Sequence[Run]) -> tuple[list[Plot], list[tuple[str, float]]]:
    """Return the plots of the few metrics that tell most, and the values of those that never change."""
    rewards = [f"reward/{name}_mean" for run in runs for name in run.rewards]
    names = list(dict.fromkeys([*(name for run in runs for name in judged(run)), *rewards, *HEALTH]))
    flat = [(name, value) for name in names if (value := constant(runs, name)) is not None]
    left = set(names) - {name for name, _ in flat}
    plots = [plot(runs, name, _note(name, runs)) for name in names if name in left]
    return [found for found in plots if found], flat


def _note(name: str, runs: Sequence[Run]) -> str:
    """Return one line below a plot's title."""
    if name.startswith("reward/"):
        return "higher is better" + "; band: ± std within groups" * (len(runs) <= MOST_BANDS)
    if name.startswith("eval/"):
        better = BETTER[runs[0].direction(name)]
        return better + "; band: 95 % interval of the change" * (len(runs) <= MOST_BANDS)
    known = metric_of(name)
    healthy = healthy_text(known) if known else ""
    return f"healthy: {words.tidy(healthy)}" if healthy else "steady is healthy"


def rich(text: str) -> Markup:
    """Return text with `code` as code, and Markdown links as their text."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(plain))))


def breaking(name: str) -> Markup:
    """Return a name that may go on in the next line after each of its parts."""
    return Markup(re.sub(r"([_./])", r"\1<wbr>", str(escape(name))))
