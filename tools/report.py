r"""Write what a run has achieved as one HTML page that opens anywhere: verdict, videos, curves, health, cost.

    python tools/report.py outputs/first                      # writes outputs/first/report.html
    python tools/report.py outputs/first outputs/second       # several runs: outputs/first/comparison.html
    python tools/report.py outputs/first --acceptance         # one row for a hardware team, in Markdown
    python tools/report.py --config config/grpo.py:tiny_recam # the run that `train_grpo.py --config ...` started last

The page holds its videos, plots and script, and fetches nothing. A run that is still training, or broke off, gets a
page of what there is. Exit code: 0, or 2 for a folder that is no run's or is damaged.
"""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script from anywhere

from flow_grpo.run.at_once import answer_at_once
from tools.common import command, make_parser

PARSER = make_parser(__doc__)
PARSER.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs")
PARSER.add_argument("--config", metavar="FILE:RECIPE", help="in place of RUN, with the overrides of that command")
PARSER.add_argument("--out", type=Path, metavar="FILE", help="the page, by default in the first run's folder")
PARSER.add_argument("--acceptance", action="store_true", help="print one row a run instead of writing a page")
PARSER.add_argument("--json", action="store_true", help="with --acceptance: as JSON")
if __name__ == "__main__":
    answer_at_once(PARSER)  # now: what follows takes seconds to import

from flow_grpo.runtime.atomic_file import write_atomically
from flow_grpo.settings.loading import load_config
from tools.run_folder import STARTS, Start, read_as, read_run
from tools.run_report import acceptance
from tools.run_report.page import render


@command
def main(words: Sequence[str] | None = None) -> int:
    asked, overrides = PARSER.parse_known_args(words)
    if bool(asked.runs) == bool(asked.config) or (overrides and not asked.config):
        got = " ".join(overrides) or "neither RUN nor --config" * (not asked.runs) or "RUN and --config"
        raise ValueError(f"got {got}, must be folders of runs, or --config and its overrides; see --help")
    if asked.config and load_config(asked.config, overrides).dry_run:
        return 0  # nothing was trained
    runs = [read_run(folder) for folder in asked.runs or [started_by(asked.config, overrides)]]
    if asked.acceptance:
        rows = [acceptance.record(run) for run in runs]
        print(json.dumps(rows, indent=1, ensure_ascii=False) if asked.json else acceptance.as_markdown(rows))
        return 0
    out = asked.out or runs[0].folder / ("report.html" if len(runs) == 1 else "comparison.html")
    write_atomically(out, render(runs, asked.config or ""))
    print(f"report: {out}")
    return 0


def started_by(spec: str, overrides: Sequence[str]) -> Path:
    """Return the folder of the run that `--config SPEC OVERRIDES` started last; ValueError where there is none."""
    root = Path(load_config(spec, overrides).output_root)
    words = ["--config", spec, *overrides]
    found = []
    for file in root.glob(f"*/{STARTS}/[0-9]*.json"):
        start = read_as(Start, file)
        if shlex.split(start.command)[1:] == words:
            found.append((time.strptime(start.time, "%Y-%m-%d %H:%M:%S %z"), file))
    if not found:
        raise ValueError(f"no run in {root} was started with {shlex.join(words)}; give the folder of a run instead")
    return max(found)[1].parent.parent


if __name__ == "__main__":
    sys.exit(main())
