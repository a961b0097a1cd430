"""How plots and videos look: colours that the colour-blind can tell apart, fonts, and matplotlib's settings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from PIL import ImageFont

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
    "axes.prop_cycle": cycler(color=CYCLE),
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
    with matplotlib.rc_context(STYLE):
        yield


@functools.cache
def font(size: int, *, bold: bool = False) -> ImageFont.FreeTypeFont:
    """Return the plots' font for drawing with Pillow, `size` in pixels."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    return ImageFont.truetype(str(Path(matplotlib.get_data_path(), "fonts", "ttf", name)), size)
