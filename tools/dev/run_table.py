r"""Compare kinds of runs, several seeds each, by their evaluations before and after training.

    python tools/dev/run_table.py --metrics eval/sharpness eval/rot_err_deg \
        --runs "sharpness alone=outputs/hack_0,outputs/hack_1" "with target_view=outputs/cure_0,outputs/cure_1"

prints a Markdown table with a row per kind and metric: the value of the first evaluation, those of each run's last
evaluation in the given order, and the mean change. Exit code: 0, or 2 for missing runs or metrics, and for runs that
were measured on other conditions or otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script from anywhere

from tools.common import fail, make_parser, markdown_table


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME=FOLDER,FOLDER", help="run folders by kind")
    parser.add_argument("--metrics", nargs="+", required=True, help="such as eval/rot_err_deg")
    args = parser.parse_args(words)
    try:
        lines = table(dict(kind(text) for text in args.runs), args.metrics)
    except ValueError as error:
        return fail(error)
    print("\n".join(lines))
    return 0


def kind(text: str) -> tuple[str, list[Path]]:
    """Return name and folders of "NAME=FOLDER,FOLDER"; ValueError for anything else."""
    name, _, folders = text.partition("=")
    if not name or not folders:
        raise ValueError(f"--runs: got {text!r}, must be NAME=FOLDER,FOLDER; for example 'alone=outputs/a,outputs/b'")
    return name, [Path(folder) for folder in folders.split(",")]


def table(kinds: dict[str, list[Path]], metrics: Sequence[str]) -> list[str]:
    """Return the Markdown lines: per kind and metric the first value, each run's last value, and the mean change.

    Raises:
        ValueError: a run is missing or lacks a metric, or two were measured otherwise.
    """
    check_same_evaluation([folder for folders in kinds.values() for folder in folders])
    rows = []
    for name, folders in kinds.items():
        for metric in metrics:
            ends = [first_and_last(folder, metric) for folder in folders]
            before = " / ".join(dict.fromkeys(f"{first:.4g}" for first, _ in ends))
            after = " / ".join(f"{last:.4g}" for _, last in ends)
            change = sum(last - first for first, last in ends) / len(ends)
            rows.append([name, f"`{metric}`", before, after, f"{change:+.3g}"])
    return markdown_table(["runs", "metric", "before", "after, by run", "mean change"], rows)


def check_same_evaluation(folders: Sequence[Path]) -> None:
    """Raise a ValueError for two complete runs that were measured on other conditions or otherwise."""
    first, expected = "", {}
    for folder in folders:
        file = folder / "summary.json"
        found = json.loads(file.read_text(encoding="utf-8")).get("measured_on", {}) if file.is_file() else {}
        first, expected = (first, expected) if expected else (str(folder), found)
        for knob in sorted(expected.keys() & found.keys()):
            if found[knob] != expected[knob]:
                raise ValueError(
                    f"{first} and {folder} were measured with {knob} {expected[knob]!r} and {found[knob]!r} and cannot "
                    "be compared; give runs with the same"
                )


def first_and_last(folder: Path, metric: str) -> tuple[float, float]:
    """Return a metric's first and last value in a run; ValueError if it has fewer than two."""
    file = folder / "metrics.jsonl"
    if not file.is_file():
        raise ValueError(f"{folder} holds no metrics.jsonl; give the folder of a run")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    values = [row[metric] for row in sorted(rows, key=lambda row: row["step"]) if metric in row]
    if len(values) < 2:
        known = sorted({name for row in rows for name in row if name.startswith(metric.partition("/")[0])})
        raise ValueError(f"{file} has {len(values)} values of {metric}, needs 2; it knows {', '.join(known)}")
    return values[0], values[-1]


if __name__ == "__main__":
    sys.exit(main())
