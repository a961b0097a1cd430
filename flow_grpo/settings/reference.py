"""Lists of all knobs made from the schema: the text of `--help`, and docs/config.md.

python -m flow_grpo.settings.reference > docs/config.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping

from flow_grpo.settings.schema import KNOBS, Knob, sections
from flow_grpo.settings.values import notation

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "multiple_of": "multiple of"}
INTRODUCTION = """\
# All knobs

Any of them follows a recipe on the command line as `--config.KNOB=VALUE`, for example
`--config.sample.k=8 --config.sample.sde_steps=1,2,3 --config.reward.weights.sharpness=0.3 --config.debug`.
Letters: W ranks, k copies of a condition, S denoising steps.
Made from `flow_grpo/settings/schema.py`: `python -m flow_grpo.settings.reference > docs/config.md`.
"""


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of train_grpo.py; overrides of knobs are what `parse_known_args` leaves over."""
    parser = argparse.ArgumentParser(
        description=description, epilog=help_text(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True, metavar="FILE:RECIPE", help="such as config/grpo.py:tiny_recam")
    return parser


def help_text() -> str:
    """Return every knob by section with its values, default and meaning, for a terminal."""
    lines = ["all knobs, as --config.KNOB=VALUE:"]
    for title, knobs in _by_section():
        lines += ["", title]
        for path, knob in knobs.items():
            lines += [f"  {path}={_default(knob)}  ({_values(knob)})", f"      {knob.meaning}"]
    return "\n".join(lines)


def page() -> str:
    """Return docs/config.md."""
    lines = [INTRODUCTION]
    for title, knobs in _by_section():
        lines += [f"## {title}", "", "| knob | values | default | meaning |", "|---|---|---|---|"]
        for path, knob in knobs.items():
            default = _default(knob) and f"`{_default(knob)}`"
            cells = [cell.replace("|", r"\|") for cell in (f"`{path}`", f"`{_values(knob)}`", default, knob.meaning)]
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _by_section() -> Iterator[tuple[str, Mapping[str, Knob]]]:
    for section, cls in sections().items():
        knobs = {path: knob for path, knob in KNOBS.items() if path.rpartition(".")[0] == section}
        yield f"{section or 'run'}: {cls.__doc__}", knobs


def _values(knob: Knob) -> str:
    limits = [f"{sign} {knob.bounds[name]}" for name, sign in SIGNS.items() if name in knob.bounds]
    return ", ".join([notation(knob.kind), *limits])


def _default(knob: Knob) -> str:
    if isinstance(knob.default, dict):
        return ",".join(f"{name}={value:g}" for name, value in knob.default.items())
    if isinstance(knob.default, tuple):
        return ",".join(map(str, knob.default))
    return knob.default if isinstance(knob.default, str) else json.dumps(knob.default).replace("null", "none")


if __name__ == "__main__":
    print(page(), end="")  # noqa: T201
