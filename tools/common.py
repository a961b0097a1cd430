"""What the commands share: argument parsers, the launcher, one-line errors, Markdown tables."""

from __future__ import annotations

import argparse
import difflib
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, get_args

from flow_grpo.settings.schema import KNOBS  # flow_grpo before torch, which else loads any accelerator plug-in

DTYPES = sorted(get_args(KNOBS["model.dtype"].kind))  # the names of flow_grpo/runtime/device.py, which needs torch


class Parser(argparse.ArgumentParser):
    """A parser that names the options which those that it does not know are most like."""

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with code 2."""
        unknown = message.partition("unrecognized arguments: ")[2].split()
        known = [name for name in self._option_string_actions if name.startswith("--")]
        close = [difflib.get_close_matches(word.partition("=")[0], known, n=1) for word in unknown]
        meant = ", ".join(name for names in close for name in names)
        super().error(f"{message} (did you mean {meant}?)" if meant else message)


def make_parser(doc: str | None, *, recipe: bool = False) -> argparse.ArgumentParser:
    """Return a parser whose help is the command's module docstring, unwrapped.

    With `recipe` it has a required --config FILE:RECIPE, whose overrides are what `parse_known_args` leaves over.
    """
    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if recipe:
        help_text = "recipe, such as config/grpo.py:tiny_recam; --config.section.knob=value overrides may follow"
        parser.add_argument("--config", required=True, metavar="FILE:RECIPE", help=help_text)
    return parser


def add_conversion_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--back", type=Path, metavar="FOLDER", help="convert back: a model folder, or its transformer folder")
    add("--out", type=Path, required=True, help="folder to write, or with --back a .safetensors file; must not exist")
    add("--dtype", choices=("keep", *DTYPES), default="keep", help="of the written weights (default: unchanged)")
    add("--link", action="store_true", help="symlink the other components instead of copying")


def add_clip_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--focal-px", type=float, help="focal length of all clips in pixels of their files; else unknown")
    add("--unit", type=float, metavar="METRES", help="of poses by COLMAP, MegaSaM and TUM, which know none")
    add("--depth", type=float, help="metres to what the clips show, roughly")


def launcher(ranks: int) -> list[str]:
    """Return the words of torchrun, for this interpreter and that many processes of this machine."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]


def fail(error: Exception | str) -> int:
    """Print an error as one line on stderr and return exit code 2."""
    print("error:", " ".join(str(error).split()), file=sys.stderr, flush=True)
    return 2


def command(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Let a command answer a ValueError or an OSError, wherever it occurs, as `fail` does."""

    @functools.wraps(main)
    def run(words: Sequence[str] | None = None) -> int:
        try:
            return main(words)
        except (ValueError, OSError) as error:
            return fail(error)

    return run


def image_size(text: str) -> tuple[int, int]:
    """Return (rows, columns) of "480x832"; an argparse type."""
    rows, _, columns = text.partition("x")
    return int(rows), int(columns)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_markdown_row(head), "|---" * len(head) + "|", *map(_markdown_row, rows)]


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
