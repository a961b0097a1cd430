r"""Compare kinds of runs, several seeds of each, by what evaluation found before and after training.

    python tools/run_table.py --metrics eval/sharpness eval/rot_err_deg \
        --runs "sharpness alone=outputs/hack_0,outputs/hack_1" "with target_view=outputs/cure_0,outputs/cure_1"

prints a Markdown table: a row for each kind and metric, the value before training (the first evaluation), the value of
the last evaluation of every run in the order given, and the mean change.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and return 0, or 2 for runs or metrics that are not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="+", required=True, metavar="NAME=FOLDER,FOLDER", help="run folders by kind")
    parser.add_argument("--metrics", nargs="+", required=True, help="such as eval/rot_err_deg")
    args = parser.parse_args(words)
    try:
        lines = table(dict(kind(text) for text in args.runs), args.metrics)
    except ValueError as error:
        print("error:", error, file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


def kind(text: str) -> tuple[str, list[Path]]:
    """Return name and folders of "NAME=FOLDER,FOLDER".

    Raises:
        ValueError: another form.
    """
    name, _, folders = text.partition("=")
    if not name or not folders:
        raise ValueError(f"--runs: got {text!r}, must be NAME=FOLDER,FOLDER; for example 'alone=outputs/a,outputs/b'")
    return name, [Path(folder) for folder in folders.split(",")]


def table(kinds: dict[str, list[Path]], metrics: Sequence[str]) -> list[str]:
    """Return the lines of the table."""
    lines = ["| runs | metric | before | after, by run | mean change |", "|---|---|---|---|---|"]
    for name, folders in kinds.items():
        for metric in metrics:
            ends = [first_and_last(folder, metric) for folder in folders]
            before = " / ".join(dict.fromkeys(f"{first:.4g}" for first, _ in ends))
            after = " / ".join(f"{last:.4g}" for _, last in ends)
            change = sum(last - first for first, last in ends) / len(ends)
            lines.append(f"| {name} | `{metric}` | {before} | {after} | {change:+.3g} |")
    return lines


def first_and_last(folder: Path, metric: str) -> tuple[float, float]:
    """Return the first and the last value of a metric of a run.

    Raises:
        ValueError: there are not two.
    """
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
