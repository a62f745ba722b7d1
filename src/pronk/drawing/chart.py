"""Charts: axes with their ticks, and panels of them in a drawing, under one legend."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pronk.drawing.svg import DASHED, GRID, INK, SMALL, SOFT, WIDTH, Drawing, fitted, number, of_ten, width_of

# Axes


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high`, and what is written at which of them; `grid`: with lines across the panel."""

    low: float
    high: float
    ticks: Mapping[float, str] = field(default_factory=dict)
    label: str = ""
    log: bool = False
    grid: bool = True

    def part(self, value: float) -> float:
        """Where a value lies: 0 at `low`, 1 at `high`, and never beyond."""
        low, high = self.low, self.high
        if self.log:
            low, value, high = (math.log(max(each, 5e-324)) for each in (low, value, high))
        return min(1.0, max(0.0, (value - low) / (high - low)))


def steps(low: float, high: float, most: int = 6) -> dict[float, str]:
    """Ticks at multiples of 1, 2 or 5 times a power of ten, no more than `most` + 1."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(times * power for times in (1, 2, 5, 10) if times * power >= rough * (1 - 1e-9))
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    plain = step > 1e-4 and max(-low, high) < 1e9
    at = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    if not at:  # between two of them
        return steps(low, high, most + 1)
    return {tick: f"{tick:,.{places}f}" if plain and tick else number(tick) for tick in at}


def linear(values: Iterable[float], label: str = "", *, zero: bool = True, room: float = 0.06, most: int = 6) -> Axis:
    """From 0 (`zero`) or the lowest value to the highest, and a share of `room` beyond."""
    found = [*values, 0.0] if zero else list(values)
    low, high = min(found), max(found)
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # straight on, as far as float32 can tell
        low, high = low - abs(low) / 10, high + abs(high) / 10
    span = max(high - low, 1e-9 * max(abs(low), abs(high)), 1e-290) if high > low or high else 1.0
    low, high = (low if zero and low == 0 else low - room * span), low + span * (1 + room)
    return Axis(low, high, steps(low, high, most), label)


def whole(low: int, high: int) -> dict[float, str]:
    """Ticks of an axis that counts."""
    high = max(high, low + 1)
    return steps(low, high, min(6, high - low))


def beside(values: Iterable[float]) -> float:
    """What part of half a drawing the numbers at the ends of bars take."""
    widest = max((width_of(number(value), SMALL) for value in values), default=0) + 10
    return widest / (270 - widest)


def logarithmic(low: float, high: float, label: str = "") -> Axis:
    """Ticks at powers of ten; where there are few of them at 2 and 5 as well."""
    if high < 1.5 * low:
        low, high = low / 1.25, high * 1.25
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = -(-(last - first + 1) // 10) or 1
    between = (1, 2, 5) if last - first < 2 else (1,)
    said = number if low > 5e-5 and high < 2e6 else of_ten
    powers = (times * 10.0**n for n in range(first - 1, last + 1) if n % every == 0 for times in between)
    ticks = {tick: said(tick) for tick in powers if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)}
    return Axis(low, high, ticks if len(ticks) > 1 else steps(low, high, 4), label, log=True)


def named(names: Sequence[str]) -> Axis:
    """A place for each name: 0, 1, 2, ... downwards; long ones are cut."""
    ticks: dict[float, str] = {n: fitted(name, 0.3 * WIDTH, SMALL) for n, name in enumerate(names)}
    return Axis(len(names) - 0.5, -0.5, ticks, grid=False)


# Panels


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a bar, a pale one, a line, perhaps with a marker, or an upright tick."""

    name: str
    colour: str
    kind: str = "bar"
    marker: int | None = None
    dash: str = ""
    opacity: float = 1


@dataclass(frozen=True)
class Panel:
    """A rectangle of a drawing, with its axes."""

    drawing: Drawing
    left: float
    top: float
    width: float
    height: float
    across: Axis
    up: Axis

    def x(self, value: float) -> float:
        return self.left + self.width * self.across.part(value)

    def y(self, value: float) -> float:
        return self.top + self.height * (1 - self.up.part(value))

    def at(self, points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(self.x(x), self.y(y)) for x, y in points]

    def bar(self, xs: tuple[float, float], ys: tuple[float, float], fill: str, pale: bool = False) -> None:
        (left, right), (top, bottom) = sorted(map(self.x, xs)), sorted(map(self.y, ys))
        self.drawing.rect(left, top, right - left, bottom - top, fill, pale=pale)

    def error(self, a: tuple[float, float], b: tuple[float, float], colour: str = INK, cap: float = 3) -> None:
        """From one point to the other, along an axis, with caps."""
        (x0, y0), (x1, y1) = ends = self.at([a, b])
        dx, dy = (0, cap) if a[1] == b[1] else (cap, 0)
        for points in (ends, [(x0 - dx, y0 - dy), (x0 + dx, y0 + dy)], [(x1 - dx, y1 - dy), (x1 + dx, y1 + dy)]):
            self.drawing.line(points, colour, 1.2, kind="error")

    def label(self, x: float, y: float, said: str) -> None:
        """Right of a point, as at the end of a bar."""
        self.drawing.text(self.x(x) + 7, self.y(y) + 4.2, said, "start", size=SMALL)

    def rule(self, *, x: float | None = None, y: float | None = None, colour: str, dash: str = DASHED) -> None:
        """A line from edge to edge."""
        ends = [(self.x(x), v) for v in (self.top, self.top + self.height)] if x is not None else []
        ends += [(v, self.y(y)) for v in (self.left, self.left + self.width)] if y is not None else []
        self.drawing.line(ends, colour, 1.4, dash=dash, kind="rule")


def chart(
    panels: Sequence[tuple[str, Axis, Axis]], height: float, keys: Sequence[Key] = (), *, stacked: bool = False,
    above: float = 0, right: float = 0, width: float = WIDTH,
) -> tuple[Drawing, list[Panel]]:  # fmt: skip
    """Panels of (title, axis across, axis up), side by side or `stacked`, each `height` high, with one legend above.

    `above`, `right`: kept free above all and right of each.
    """
    lefts: Sequence[float]
    rights: Sequence[float]
    lefts, rights = zip(*(_margins(across, up, right) for _, across, up in panels), strict=True)
    if stacked:
        lefts, rights = [max(lefts)] * len(panels), [max(rights)] * len(panels)
    room = [width - a - b for a, b in zip(lefts, rights, strict=True)] if stacked else [
        (width - sum(lefts) - sum(rights)) / len(panels)] * len(panels)  # fmt: skip
    top = above + _legend(drawing := Drawing(0, width), keys) + (34 if any(title for title, _, _ in panels) else 12)
    left, found, ends = 0.0, [], []
    for (title, across, up), before, after, wide in zip(panels, lefts, rights, room, strict=True):
        found.append(Panel(drawing, left + before, top, wide, height, across, up))
        ends.append(_ground(found[-1], title))
        if stacked:
            top = ends[-1] + (34 if title else 12)
        else:
            left += before + wide + after
    drawing.height = math.ceil(max(ends))
    return drawing, found


def _margins(across: Axis, up: Axis, right: float) -> tuple[float, float]:
    """What is left and right of a panel, so that no label leaves it; 250 pixels are what each is wide at least."""
    beside = 16 + max((width_of(said, SMALL) for said in up.ticks.values()), default=0) + 22 * bool(up.label)
    reach = [(250 * across.part(at), width_of(said, SMALL) / 2) for at, said in across.ticks.items()]
    return (
        max([beside, *(half - at for at, half in reach)]),
        max([14.0 + right, *(half - (250 - at) + 4 for at, half in reach)]),
    )


def _legend(drawing: Drawing, keys: Sequence[Key]) -> float:
    """Its lower end."""
    x, y = 12.0, 22.0
    for key in keys:
        name = fitted(key.name, drawing.width / 3, SMALL)
        if x > 12 and x + 32 + width_of(name, SMALL) > drawing.width - 12:
            x, y = 12.0, y + 22
        if key.kind == "tick":
            drawing.line([(x + 12, y - 11), (x + 12, y + 3)], key.colour, 2, kind="key")
        elif key.kind == "line":
            drawing.line([(x, y - 4), (x + 24, y - 4)], key.colour, 2, dash=key.dash, opacity=key.opacity, kind="key")
            if key.marker is not None:
                drawing.marker(x + 12, y - 4, key.colour, key.marker, kind="key")
        else:
            drawing.rect(x, y - 10, 24, 12, key.colour, pale=key.kind == "pale", kind="key")
        drawing.text(x + 32, y, name, "start", size=SMALL)
        x += 54 + width_of(name, SMALL)
    return y + 8 if keys else 6.0


def _ground(panel: Panel, title: str) -> float:
    """Title, grid, ticks and labels; gives the lower end."""
    drawing, left, base = panel.drawing, panel.left, panel.top + panel.height
    for at in panel.up.ticks if panel.up.grid else ():
        drawing.line([(left, panel.y(at)), (left + panel.width, panel.y(at))], GRID, 1, kind="grid")
    for at in panel.across.ticks if panel.across.grid else ():
        drawing.line([(panel.x(at), panel.top), (panel.x(at), base)], GRID, 1, kind="grid")
    drawing.line([(left, panel.top), (left, base), (left + panel.width, base)], GRID, 1, kind="grid")
    if title:
        drawing.text(left, panel.top - 12, fitted(title, panel.width + 12, bold=True), "start", bold=True)
    for at, said in panel.up.ticks.items():
        drawing.text(left - 8, panel.y(at) + 4.2, said, "end", size=SMALL, fill=SOFT if panel.up.grid else INK)
    free = -math.inf
    for at, said in panel.across.ticks.items():
        half = width_of(said, SMALL) / 2
        if panel.x(at) - half > free:  # one that would meet its neighbour is left out
            drawing.text(panel.x(at), base + 18, said, size=SMALL, fill=SOFT if panel.across.grid else INK)
            free = panel.x(at) + half + 3
    end = base + 27
    if panel.across.label:
        drawing.text(left + panel.width / 2, end + 12, panel.across.label, size=SMALL, fill=SOFT)
    if panel.up.label:
        x = left - 16 - max((width_of(said, SMALL) for said in panel.up.ticks.values()), default=0)
        drawing.text(x, panel.top + panel.height / 2, panel.up.label, size=SMALL, fill=SOFT, turned=True)
    return end + (22 if panel.across.label else 4)
