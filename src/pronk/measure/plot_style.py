"""How pronk's plots look, and how a Figure becomes SVG. What they show is in `plots`.

Nothing here shows a window or touches pyplot: a Figure is made, laid out, written as SVG, and forgotten. The same
values give the same bytes: ids are hashed with a fixed salt, and no date or version is written. Text stays text, so
that it can be searched, read aloud, and follow the page's font. matplotlib (the extra `report`) is imported when a
figure is made.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, cycle
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import quoteattr

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which people with any of the common colour blindnesses tell apart, in an order that keeps
# neighbours far from each other; yellow, which vanishes on paper, is darker, and a wine red is added. The original is
# grey: it is the ground.
ORIGINAL = "#7A8190"
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#B5A642", "#882255")
MARKERS = "osD^vPX*"

# In an SVG these stand for ink and grid, as white does for paper: a page puts its own in their place (`inline`).
INK = "#1F2430"
GRID = "#D9DCE3"
_VARIABLES = {INK: "currentColor", GRID: "var(--grid)", "fill: #ffffff": "fill: var(--paper)"}

_STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "pronk", "text.parse_math": False,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"], "font.size": 9.5,
    "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": GRID,
    "grid.color": GRID, "axes.axisbelow": True, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.titlepad": 10, "axes.labelsize": 9.5, "xtick.major.size": 0,
    "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0, "legend.frameon": False,
    "hatch.linewidth": 0.7,
}  # fmt: skip
_NO_METADATA: Any = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Value:
    """A number and how far it reached: `low` and `high` are None where nothing is known of that."""

    value: float
    low: float | None = None
    high: float | None = None


def available() -> bool:
    return find_spec("matplotlib") is not None


def colours(
    names: Sequence[str], original: str | None = None, known: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """A colour for each name; the original's is the grey one. After eight the palette begins again.

    `known`: the colours that some have elsewhere. They keep these, and no other gets one while there is a free one.
    """
    have = {name: known[name] for name in names if name in known} | ({} if original is None else {original: ORIGINAL})
    others = [name for name in dict.fromkeys(names) if name not in have]
    free = [colour for colour in PALETTE if colour not in have.values()]
    return have | dict(zip(others, cycle(free or PALETTE), strict=False))


# Numbers


def as_value(given: Any) -> Value | None:
    """A Value of a number, or of {"median", "min", "max"}; None of None."""
    if isinstance(given, Mapping):
        return Value(given["median"], given["min"], given["max"])
    return None if given is None else Value(given)


def reach(value: Value) -> list[list[float]] | None:
    """Error bars as matplotlib takes them: how far below and above."""
    if value.low is None or value.high is None:
        return None
    return [[max(0.0, value.value - value.low)], [max(0.0, value.high - value.value)]]


def short(value: float) -> str:
    """Three digits that count, as labels have them: 1230, 45.6, 0.00289, 2.1e-6."""
    if value == 0 or abs(value) >= 1e-4:
        return f"{value:.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):.10f}".rstrip("0").rstrip(".")
    return f"{value:.2g}".replace("e-0", "e-")


# A Figure, and what it is written as


@contextmanager
def figure_of(
    width: float, height: float, rows: int = 1, columns: int = 1, **shared: Any
) -> Iterator[tuple[Figure, list[Axes]]]:
    """A Figure of inches and its axes in reading order; it is laid out at the end."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of glyphs that its font lacks: the reader's may have them
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.12))  # readers' fonts are wider
        FigureCanvasAgg(figure)
        axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
        for axis in axes:
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)
        yield figure, axes
        figure.draw_without_rendering()
        figure.set_layout_engine("none")  # a second layout would move things a little


def line(axis: Axes, name: str, points: Sequence[tuple[float, Value]], colour: str, marker: str) -> None:
    """Points joined by a line, each with its error bar."""
    if known := [(x, value.value, *chain(*ends)) for x, value in points if (ends := reach(value))]:
        across, up, below, above = zip(*known, strict=True)
        axis.errorbar(across, up, yerr=(below, above), fmt="none", ecolor=colour, capsize=3, elinewidth=1)
    xs, ys = [x for x, _ in points], [value.value for _, value in points]
    axis.plot(xs, ys, color=colour, marker=marker, linewidth=2, label=name)


def logarithmic(axis: Axis, *, between: Sequence[float] = ()) -> None:
    """Ticks in plain numbers, for mathematical notation would not survive as text: at powers of ten, and `between`."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, *between)))

    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())


def svg(figure: Figure) -> str:
    """An SVG file of its own: text, on white."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        figure.savefig(file, format="svg", facecolor="white", metadata=_NO_METADATA)
    return file.getvalue()


def inline(picture: str, name: str, label: str) -> str:
    """What `svg` gave as an element of a page, in the page's own ink and on its paper: ids begin with `name`, `label`
    is what is read aloud.

    The page defines --grid and --paper, the colours of grids and of itself, for its light and dark forms.
    """
    text = picture[picture.index("<svg ") :]
    text = re.sub(r'\s+xmlns(:xlink)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = re.sub(colour, variable, text, flags=re.IGNORECASE)
    width, height = re.findall(r'(?:width|height)="([\d.]+)pt"', text)[:2]
    head = f'<svg role="img" aria-label={quoteattr(label)} viewBox="0 0 {width} {height}">'
    return head + text[text.index(">") + 1 :].strip()
