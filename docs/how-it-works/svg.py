"""Drawing: an SVG put together by hand, which is as readable on a dark page as on a light one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

# The colours of the reports (report.html.jinja), and those of their plots (measure/plots.py).
LIGHT = {"paper": "#ffffff", "raised": "#f6f7f9", "ink": "#1f2430", "soft": "#5c6473", "grid": "#d9dce3"}
DARK = {"paper": "#14171d", "raised": "#1c2028", "ink": "#e6e8ed", "soft": "#a0a7b4", "grid": "#363c48"}
BLUE, ORANGE, GREEN, PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
FONT = "font-family: 'DejaVu Sans', Verdana, sans-serif; font-size: 13px"


class Drawing:
    """What is added later lies on top. `said` is what is read aloud; lengths are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str, said: str) -> None:
        self.width, self.height, self.title, self.said = width, height, title, said
        self.parts: list[str] = []

    def rect(self, x: float, y: float, w: float, h: float, fill: str = "raised", stroke: str = "grid") -> None:
        self._add("rect", x=x, y=y, width=w, height=h, rx=3, style=f"fill: {_ink(fill)}; stroke: {_ink(stroke)}")

    def circle(self, x: float, y: float, radius: float, fill: str = "raised", stroke: str = "ink") -> None:
        self._add("circle", cx=x, cy=y, r=radius, style=f"fill: {_ink(fill)}; stroke: {_ink(stroke)}")

    def line(self, points: Sequence[tuple[float, float]], stroke: str = "ink", width: float = 1.5) -> None:
        self._add("polyline", points=_path(points), style=f"fill: none; stroke: {_ink(stroke)}; stroke-width: {width}")

    def arrow(self, points: Sequence[tuple[float, float]], stroke: str = "ink", width: float = 1.5) -> None:
        """A line with a head at its end."""
        self.line(points, stroke, width)
        (x0, y0), (x1, y1) = points[-2:]
        angle = math.atan2(y1 - y0, x1 - x0)
        size = 6 + 2 * width
        ends = [(x1 - size * math.cos(angle + turn), y1 - size * math.sin(angle + turn)) for turn in (0.4, -0.4)]
        self.area([(x1, y1), *ends], stroke)

    def area(self, points: Sequence[tuple[float, float]], fill: str) -> None:
        self._add("polygon", points=_path(points), style=f"fill: {_ink(fill)}")

    def text(
        self, x: float, y: float, said: str, at: str = "middle", fill: str = "ink", size: int = 13, bold: bool = False
    ) -> None:
        style = f"fill: {_ink(fill)}; font-size: {size}px; text-anchor: {at}" + "; font-weight: bold" * bold
        fields = f'x="{_short(x)}" y="{_short(y)}" style="{style}"'
        self.parts.append(f"<text {fields}>{escape(said)}</text>")

    def box(self, x: float, y: float, w: float, h: float, said: str, fill: str = "raised", stroke: str = "ink") -> None:
        """A rectangle with lines of text in its middle."""
        self.rect(x, y, w, h, fill, stroke)
        lines = said.split("\n")
        for n, line in enumerate(lines):
            self.text(x + w / 2, y + h / 2 + 4.5 + 16 * (n - (len(lines) - 1) / 2), line)

    def axes(
        self, at: tuple[float, float, float, float], xs: dict[str, float], ys: dict[str, float], across: str, up: str
    ) -> None:
        """A chart's ground in x, y, width, height: ticks from 0 to 1 by what is written at them."""
        x, y, w, h = at
        for said, part in ys.items():
            self.line([(x, y + h * (1 - part)), (x + w, y + h * (1 - part))], "grid", 1)
            self.text(x - 8, y + h * (1 - part) + 4, said, "end", "soft", 12)
        for said, part in xs.items():
            self.text(x + w * part, y + h + 20, said, "middle", "soft", 12)
        self.text(x + w / 2, y + h + 42, across, "middle", "soft", 12)
        self.text(x - 44, y - 14, up, "start", "soft", 12)

    def svg(self) -> str:
        colours = ["; ".join(f"--{name}: {value}" for name, value in theme.items()) for theme in (LIGHT, DARK)]
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" aria-labelledby="title said">',
            f'<title id="title">{escape(self.title)}</title>',
            f'<desc id="said">{escape(self.said)}</desc>',
            f"<style>svg {{ {colours[0]}; {FONT} }}",
            f"@media (prefers-color-scheme: dark) {{ svg {{ {colours[1]} }} }}</style>",
            f'<rect width="{self.width}" height="{self.height}" rx="6" style="fill: var(--paper)"/>',
            *self.parts,
            "</svg>\n",
        ])  # fmt: skip

    def _add(self, tag: str, **fields: object) -> None:
        said = " ".join(f'{name}="{_short(value)}"' for name, value in fields.items())
        self.parts.append(f"<{tag} {said}/>")


def _ink(colour: str) -> str:
    """A colour of its own, or one of the page's."""
    return colour if colour.startswith("#") or colour == "none" else f"var(--{colour})"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(value: object) -> str:
    return f"{round(value, 1):g}" if isinstance(value, float) else str(value)
