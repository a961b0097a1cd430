"""benchmark.md: our means in the papers' words, what they are over, and published figures under the same protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flow_grpo.data.video_io import video_size
from flow_grpo.maths.benchmarks import PRESET_FRAMES
from flow_grpo.maths.path_errors import CONVENTIONS, LEAST_BASELINE_M
from tools.common import markdown_table
from tools.evaluation.inputs import EvaluationTask
from tools.evaluation.tables import baseline_lines
from tools.published import claims
from tools.published.plan import BenchmarkPlan
from tools.published.results import MET3R, mean_of

Row = Mapping[str, Any]


def report(
    plan: BenchmarkPlan,
    tasks: Sequence[EvaluationTask],
    settings: Mapping[str, Any],
    rows: Sequence[Row],
    summary: Mapping[str, Any],
    vbench: Mapping[str, float],
) -> str:
    """Return the text of benchmark.md; `rows` are one a task, `vbench` holds the score of each dimension."""
    failed = len(rows) - summary["registered"]
    lines = [f"# {plan.benchmark}, poses by {settings['estimator']}", ""]
    lines += [
        f"{len(rows)} of the list's {len(plan.items)} videos are there; no poses were found of {failed} of them.",
        "",
    ]
    lines += _means(rows, summary, vbench)
    still = sum(row["baseline_m"] < LEAST_BASELINE_M for row in rows if row["registered"])
    lines += [
        "",
        f"{still} of {summary['registered']} videos are commanded to stay in place; normalised translation "
        "errors (trans_sim3_rel, trans_rel_sum, cam_mc_rel_sum) are undefined there and not in the means.",
    ]
    if "baseline" in summary:
        lines += ["", *baseline_lines(summary["baseline"])]
    return "\n".join([*lines, "", *_beside_published(protocol(plan, tasks, settings, rows), rows)]) + "\n"


def _means(rows: Sequence[Row], summary: Mapping[str, Any], vbench: Mapping[str, float]) -> list[str]:
    table = []
    for name, cell in summary["metrics"].items():
        ends = "–" if cell["low"] is None else f"{cell['low']:.4g} to {cell['high']:.4g}"
        table.append([name, CONVENTIONS.get(name, "ours"), f"{cell['mean']:.4g}", ends, str(cell["rows"])])
    for name, word in MET3R.items():
        mean, count = mean_of(rows, name)
        table += [[name, word, f"{mean:.4g}", "–", str(count)]] if mean is not None else []
    table += [[name, "VBench", f"{score:.4g}", "–", str(len(rows))] for name, score in vbench.items()]
    return markdown_table(["column", "convention", "mean", summary["interval"], "videos"], table)


def protocol(
    plan: BenchmarkPlan, tasks: Sequence[EvaluationTask], settings: Mapping[str, Any], rows: Sequence[Row]
) -> dict[str, Any]:
    """Return what decides our figures, in the words of `claims.REDIRECTOR`."""
    judged = [row for row in rows if row["registered"]]
    at_most = plan.about.get("frames_at_most")
    sizes = sorted({"{1}x{2}".format(*video_size(task.file)) for task in tasks})
    return {
        "set": plan.benchmark,
        "videos": plan.about.get("videos"),
        "sources": len({row["source"] for row in judged}),
        "presets": len({row["camera_type"] for row in judged}),
        "judged": len(judged),
        "frames": "all, 4n+1" if at_most is None else f"at most {at_most}",
        "command": f"speed of {PRESET_FRAMES} frames" if plan.benchmark == "davis" else "trajectory.json",
        "size": ", ".join(sizes),
        "estimator": settings["estimator"],
        "alignment": "Sim(3)",
    }


def _beside_published(ours: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    if ours["set"] != claims.REDIRECTOR["set"]:
        return [f"No published figures of {ours['set']} are in tools/published/claims.py."]
    if differs := claims.difference(ours, claims.REDIRECTOR):
        return [f"Figures of {claims.SOURCE} are not shown, the protocol differs: {differs}."]
    source = f"{claims.SOURCE}, {claims.DATE}"
    shown = [[model, *(f"{figure:.4g}" for figure in figures), source] for model, figures in claims.CLAIMS.items()]
    means = [mean_of(rows, column) for column in claims.NAMES.values()]
    own = [f"{mean:.4g}" if mean is not None and count == len(rows) else "–" for mean, count in means]
    return [
        "Published figures are their papers' claims. Errors are as ReDirector's code prints them: rounded to two "
        "decimals per video, TransErr 0 where the command stays in place. ViPE's files hide its version: use theirs.",
        "",
        *markdown_table(["model", *claims.NAMES, "source"], [["these videos", *own, "measured here"], *shown]),
    ]
