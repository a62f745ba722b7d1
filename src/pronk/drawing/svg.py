"""A drawing written as SVG by hand, for what draws elsewhere weighs more than all of pronk. Charts: chart.py.

The same values give the same bytes. Text stays text, so that it can be searched, read aloud, and follow the page's
font; how wide it will be is estimated, on the wide side. A file brings its colours for light and dark pages; `element`
has those of the page that it stands in, which defines --paper, --ink, --soft and --grid. Lengths are pixels from the
upper left corner.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape

WIDTH, SIZE, SMALL = 860, 13, 12
LIGHT = {"paper": "#ffffff", "ink": "#1f2430", "soft": "#5c6473", "grid": "#d9dce3"}
DARK = {"paper": "#14171d", "ink": "#e6e8ed", "soft": "#a0a7b4", "grid": "#363c48"}
INK, SOFT, GRID = "var(--ink)", "var(--soft)", "var(--grid)"
DASHED, DOTTED = "6 4", "1.5 3"
FONT = "font-family: 'DejaVu Sans', Verdana, sans-serif"
# Corners, the turn of the first in degrees, and how far in the corners between them lie; none: a circle.
MARKERS = ((0, 0, 1.0), (4, 45, 1.0), (4, 0, 1.0), (3, -90, 1.0), (3, 90, 1.0), (4, 0, 0.45), (4, 45, 0.45),
           (5, -90, 0.5))  # fmt: skip

_WIDTHS = {"ijlI.,:;'|! ": 0.36, 'frt()[]/-"·': 0.46, "mwMW%@+=<>~#×": 1.0, "⁻⁰¹²³⁴⁵⁶⁷⁸⁹": 0.5}
_EMS = {letter: width for letters, width in _WIDTHS.items() for letter in letters}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# Text


def number(value: float) -> str:
    """Three digits that count, as labels have them: 1,230, 45.6, 0.00289, 2.1×10⁻⁶."""
    if value and not 1e-4 <= abs(value) < 1e9:
        return of_ten(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{float(f'{value:.3g}'):.8f}".rstrip("0").rstrip(".")


def of_ten(value: float) -> str:
    """10⁻⁶, or 2.1×10⁻⁶."""
    digits, exponent = f"{value:.2e}".split("e")
    power = "10" + str(int(exponent)).translate(_SUPERSCRIPTS)
    digits = digits.rstrip("0").rstrip(".")
    return power if digits == "1" else f"{digits}×{power}"


def width_of(text: str, size: float = SIZE, bold: bool = False) -> float:
    """Pixels, of a wide font."""
    return sum(map(_em, text)) * size * (1.13 if bold else 1)


def _em(letter: str) -> float:
    if unicodedata.combining(letter):
        return 0.0
    if not letter.isprintable() or ord(letter) > 0x24F:
        return _EMS.get(letter, 1.1)
    return _EMS.get(letter, 0.65 if letter.isascii() and not letter.isupper() else 0.8)


def fitted(text: str, width: float, size: float = SIZE, bold: bool = False) -> str:
    """Cut where it is too long, and said so by an ellipsis."""
    if width_of(text, size, bold) <= width:
        return text
    kept, free = 0, width - width_of("…", size, bold)
    while (free := free - width_of(text[kept], size, bold)) >= 0:
        kept += 1
    return text[:kept].rstrip() + "…"


# The drawing


class Drawing:
    """What is added later lies on top."""

    def __init__(self, height: float, width: float = WIDTH) -> None:
        self.height, self.width = math.ceil(height), width
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, fill: str, *, pale: bool = False, kind: str = "bar") -> None:
        style = f"fill: {fill}; fill-opacity: 0.22; stroke: {fill}" if pale else f"fill: {fill}"
        self._add("rect", kind, style, x=x, y=y, width=w, height=h)

    def line(
        self, points: Sequence[tuple[float, float]], stroke: str, width: float = 2, *, dash: str = "",
        opacity: float = 1, kind: str = "line",
    ) -> None:  # fmt: skip
        style = f"fill: none; stroke: {stroke}; stroke-width: {width:g}; stroke-linejoin: round"
        style += f"; stroke-dasharray: {dash}" * bool(dash) + f"; stroke-opacity: {opacity:g}" * (opacity < 1)
        self._add("polyline", kind, style, points=_path(points))

    def area(self, points: Sequence[tuple[float, float]], fill: str, opacity: float = 1, kind: str = "area") -> None:
        style = f"fill: {fill}" + f"; fill-opacity: {opacity:g}" * (opacity < 1)
        self._add("polygon", kind, style, points=_path(points))

    def marker(self, x: float, y: float, colour: str, which: int = 0, size: float = 5, kind: str = "point") -> None:
        corners, turn, inner = MARKERS[which % len(MARKERS)]
        if not corners:
            return self._add("circle", kind, f"fill: {colour}", cx=x, cy=y, r=size)
        points = []
        for n in range(corners * (1 if inner == 1 else 2)):
            reach = 1.2 * size * (inner if n % 2 else 1)
            angle = math.radians(turn + n * 360 / corners / (1 if inner == 1 else 2))
            points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
        self.area(points, colour, kind=kind)

    def text(
        self, x: float, y: float, said: str, anchor: str = "middle", *, size: float = SIZE, fill: str = INK,
        bold: bool = False, turned: bool = False,
    ) -> None:  # fmt: skip
        """`y` is its base."""
        style = f"fill: {fill}; font-size: {size:g}px; text-anchor: {anchor}" + "; font-weight: bold" * bold
        place = f'x="{_short(x)}" y="{_short(y)}"' + f' transform="rotate(-90 {_short(x)} {_short(y)})"' * turned
        self.parts.append(f'<text {place} style="{style}">{_escaped(said)}</text>')

    def element(self, said: str) -> str:
        """For a page: `said` is what is read aloud."""
        head = f'<svg role="img" aria-label="{_escaped(said)}" viewBox="0 0 {self.width} {self.height}" style="{FONT}">'
        return "\n".join([head, *self.parts, "</svg>"])

    def file(self, title: str, said: str) -> str:
        light, dark = ("; ".join(f"--{name}: {value}" for name, value in theme.items()) for theme in (LIGHT, DARK))
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-labelledby="title said">',
            f'<title id="title">{_escaped(title)}</title>',
            f'<desc id="said">{_escaped(said)}</desc>',
            f"<style>svg {{ {light}; {FONT} }}",
            f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}</style>",
            f'<rect width="{self.width}" height="{self.height}" rx="6" style="fill: var(--paper)"/>',
            *self.parts,
            "</svg>\n",
        ])  # fmt: skip

    def _add(self, tag: str, kind: str, style: str, **fields: float | str) -> None:
        said = " ".join(f'{name}="{_short(value)}"' for name, value in fields.items())
        self.parts.append(f'<{tag} class="{kind}" {said} style="{style}"/>')


def _escaped(text: str) -> str:
    return escape(_NO_XML.sub("�", text))


def _path(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(value: float | str) -> str:
    return value if isinstance(value, str) else f"{round(value, 1) + 0.0:.10g}"
