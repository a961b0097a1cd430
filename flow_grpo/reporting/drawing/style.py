"""How plots and videos look: colours that the colour-blind can tell apart, fonts, and matplotlib's settings.

The only file of this folder that uses matplotlib, which it imports when something is drawn: training starts without it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import ImageFont

from flow_grpo.runtime.atomic_file import atomic_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

# Okabe and Ito's colours, darkened where they are too light on white.
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, GREY = (
    *("#0072b2", "#c8500a", "#00805f", "#a8568a", "#3d9fd6", "#c98a00", "#6b7280"),
)
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, GREY)
# Of videos and film strips, which have a dark ground of their own.
GROUND, PLATE, TEXT, SOFT, FAINT, MARK = "#16181d", "#2a2e37", "#f5f5f5", "#d0d6e0", "#8b95a5", "#ffb454"

STYLE: dict[Any, Any] = {
    "figure.facecolor": "white",  # a ground of its own, so that a plot can be read on a dark page as well
    "savefig.facecolor": "white",
    "axes.facecolor": "white",
    "axes.edgecolor": "#4b5563",
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.prop_cycle": f"cycler(color={CYCLE})",
    "grid.color": "#d1d5db",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "font.family": "DejaVu Sans",  # which matplotlib brings along
    "lines.linewidth": 1.8,
}


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Context manager and decorator in which matplotlib draws in this project's style."""
    import matplotlib

    with matplotlib.rc_context(STYLE):
        yield


def new_figure(**settings: Any) -> Figure:
    """Return an empty figure; settings are those of matplotlib's `Figure`."""
    from matplotlib.figure import Figure

    return Figure(**settings)


def round_ticks(most: int | None = None, **settings: Any) -> MaxNLocator:
    """Return what places ticks at round numbers; settings are those of matplotlib's `MaxNLocator`."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(most, **settings)


def save_png(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file, replaced atomically."""
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def as_svg(figure: Figure, name: str) -> str:
    """Return a figure as an `<svg>` element for a page: no ground of its own, text as text, the same bytes each time.

    Identifiers within the element depend on `name`, which is unlike that of any other figure of the page.
    """
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    element = text.getvalue().partition("<svg")[2]
    element = re.sub(r"\s*<(defs>\s*<style|metadata).*?</(style>\s*</defs|metadata)>", "", element, flags=re.DOTALL)
    # Names of groups are the same in every figure; a hundredth of a point is enough for whatever stands in a tag.
    element = re.sub(r' id="[A-Za-z0-9.]+_\d+"| transform="rotate\(-0 [^"]*"|\n *(?=<)', "", element)
    return "<svg" + re.sub(r"(?<=\.\d\d)\d+(?=[^<>]*>)", "", element)


@functools.cache
def font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return the plots' font for drawing with Pillow, `size` in pixels."""
    import matplotlib

    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)
