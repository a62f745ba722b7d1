"""SVG files as a reader takes them, for tests."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from pronk.drawing.svg import WIDTH, width_of

SVG = "{http://www.w3.org/2000/svg}"
_ABOUT = 1.0  # pixels


def contained(text: str) -> ElementTree.Element:
    """The root of a picture that parses, with numbers in it that are some, all texts and shapes inside, and a title."""
    root = ElementTree.fromstring(text)
    assert root.get("viewBox") == f"0 0 {WIDTH} {root.get('height')}"
    height = float(root.get("height", "nan"))
    assert [len((root.find(SVG + name).text or "").strip()) > 0 for name in ("title", "desc")] == [True, True]  # type: ignore[union-attr]
    for element in root.iter():
        for name, value in element.attrib.items():
            assert not re.search(r"\b(nan|inf)\b", value), (element.tag, name, value)
        if element.tag == SVG + "text":
            left, top, right, bottom = box(element)
            inside = left > -_ABOUT and right < WIDTH + _ABOUT and top > -_ABOUT and bottom < height + _ABOUT
            assert inside, (element.text, left, top, right, bottom, height)
        elif element.tag in (SVG + "polyline", SVG + "polygon"):
            places = [tuple(map(float, pair.split(","))) for pair in element.get("points", "").split()]
            assert all(-_ABOUT < x < WIDTH + _ABOUT and -_ABOUT < y < height + _ABOUT for x, y in places)
        elif element.tag == SVG + "rect":
            x, y, w, h = (float(element.get(name, "0")) for name in ("x", "y", "width", "height"))
            assert min(x, y, w, h) >= 0
            assert x + w < WIDTH + _ABOUT
            assert y + h < height + _ABOUT
    return root


def box(text: ElementTree.Element) -> tuple[float, float, float, float]:
    """What a text takes, by the estimate of widths: left, top, right, bottom."""
    style = dict(part.split(": ") for part in text.get("style", "").split("; "))
    size, x, y = float(style["font-size"][:-2]), float(text.get("x", "nan")), float(text.get("y", "nan"))
    width = width_of(text.text or "", size, "font-weight" in style)
    before = {"start": 0.0, "middle": width / 2, "end": width}[style["text-anchor"]]
    if "rotate" in text.get("transform", ""):
        return x - size, y - width + before, x, y + before
    return x - before, y - 0.8 * size, x - before + width, y + 0.2 * size


def drawn(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    """The marks of a kind: bar, point, error, line, rule, cells."""
    return [element for element in root.iter() if element.get("class") == kind]
