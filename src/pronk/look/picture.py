"""Pictures of a Look and of a Lens: a text whose tokens are coloured, and what each layer would have said."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from pronk.drawing.svg import SMALL, SOFT, WIDTH, Drawing, fitted, number, width_of

if TYPE_CHECKING:
    from pronk.look.lens import Lens
    from pronk.look.look import Look

MOST_TOKENS = 1000  # of a picture, and of a table
MOST_BITS = 12.0  # what is as dark as it gets

_SURPRISE, _ATTENTION, _LENS = "#d9480f", "#2563eb", "#0f8a5f"
_DARKEST = 0.75  # a text is to be read on it
_EDGE, _LINE, _BOX, _LEAD = 12.0, 26.0, 20.0, 34.0
_SIGNS = str.maketrans({"\n": "↵", "\r": "␍", "\t": "⇥"})


def of_surprise(look: Look) -> str:
    bits = np.nan_to_num(look.bits[:MOST_TOKENS], nan=0.0)
    scale = [(f"{b:g}", b / MOST_BITS) for b in (0, 3, 6, 9)] + [(f"{MOST_BITS:g} bits or more", 1.0)]
    drawing = _text(look.pieces[:MOST_TOKENS], bits / MOST_BITS, _SURPRISE, "surprise", scale, len(look))
    told = look.bits[1:]
    mean = f"; {number(float(told.mean()))} bits a token" if len(told) else ""
    return drawing.file("How much each token surprised the model", f"A text of {len(look)} tokens{mean}.")


def of_attention(look: Look, weights: np.ndarray, token: int, layer: int, head: int | None) -> str:
    """`weights` [T]. A colour's depth is the square root of a weight: most are small."""
    whose = f"layer {layer}, " + ("mean over heads" if head is None else f"head {head}")
    scale = [(f"{share:.0%}", share**0.5) for share in (0.01, 0.1, 0.3, 1.0)]
    shades = np.sqrt(weights[:MOST_TOKENS])
    title = f"what token {token} looks at: {whose}"
    drawing = _text(look.pieces[:MOST_TOKENS], shades, _ATTENTION, title, scale, len(look), token)
    return drawing.file(title, f"Attention of token {token} over the text, {whose}.")


def of_lens(lens: Lens) -> str:
    """The last layer on top. Right of a layer is the rank that it gave the token that came."""
    rows, k = lens.ids.shape
    k, beside = min(k, 8), 76.0 if lens.came is not None else 0.0
    drawing, left = Drawing(0), 96.0
    width = (WIDTH - left - beside - _EDGE) / k
    came = "" if lens.came is None else f', where "{_alone(lens.spelling.piece(lens.came))}" came'
    title = fitted(f"in place of token {lens.token}{came}", WIDTH - 2 * _EDGE - 60, bold=True)
    drawing.text(_EDGE, 22, title, "start", bold=True)
    if lens.came is not None:
        drawing.text(WIDTH - _EDGE, 22, "its rank", "end", size=SMALL, fill=SOFT)
    y = _LEAD
    pieces = lens.pieces
    for row in reversed(range(rows)):
        drawing.text(left - 10, y + 14, f"layer {row - 1}" if row else "embedding", "end", size=SMALL, fill=SOFT)
        if lens.came is not None:
            drawing.text(WIDTH - _EDGE, y + 14, f"{lens.came_ranks[row]:,}", "end", size=SMALL, fill=SOFT)
        for place in range(k):
            share, x = float(lens.probabilities[row, place]), left + place * width
            _box(drawing, x + 1, y, width - 2, _LENS, share)
            drawing.text(x + 6, y + 14, fitted(_alone(pieces[row][place]), width - 48, SMALL), "start", size=SMALL)
            drawing.text(x + width - 6, y + 14, f"{share:.0%}", "end", size=SMALL)
            if lens.came == lens.ids[row, place]:
                drawing.line([(x + 2, y + _BOX - 1), (x + width - 2, y + _BOX - 1)], _LENS, 2, kind="came")
        y += _BOX + 2
    drawing.height = int(y + _EDGE)
    said = f"What each of {rows - 1} layers would have said in place of token {lens.token}."
    return drawing.file("The logit lens", said)


def element(svg: str, said: str) -> str:
    """For a notebook: an image of its own, whose colours nobody else's page gets."""
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="{escape(said)}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}">'


def table(look: Look) -> str:
    """The same in numbers, as HTML that is folded away."""
    rows = []
    for index in range(min(len(look), MOST_TOKENS)):
        token = look[index]
        told = [
            "" if value is None else number(value)
            for value in (token.probability, token.bits, token.entropy, token.rank)
        ]
        others = ", ".join(f"{_alone(a.piece)} {a.probability:.1%}" for a in token.alternatives)
        cells = [str(index), _alone(token.piece), *told, others]
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    heads = ("token", "piece", "probability", "bits", "entropy", "rank", "likeliest")
    head = "".join(f"<th>{name}</th>" for name in heads)
    more = f"<p>{len(look) - MOST_TOKENS} more tokens</p>" if len(look) > MOST_TOKENS else ""
    return f"<details><summary>in numbers</summary><table><tr>{head}</tr>{''.join(rows)}</table>{more}</details>"


def _text(
    pieces: Sequence[str], shades: np.ndarray, colour: str, title: str, scale: Sequence[tuple[str, float]], length: int,
    marked: int | None = None,
) -> Drawing:  # fmt: skip
    """Tokens in lines as a text has them, each on a box `shades` deep, from 0 to 1."""
    drawing = Drawing(0)
    _legend(drawing, title, colour, scale)
    x, y = _EDGE, _LEAD
    for index, (piece, shade) in enumerate(zip(pieces, shades.tolist(), strict=True)):
        shown = fitted(_shown(piece), WIDTH - 2 * _EDGE - 8)
        width = max(8.0, width_of(shown) + 3)
        if x + width > WIDTH - _EDGE and x > _EDGE:
            x, y = _EDGE, y + _LINE
        _box(drawing, x, y, width - 1, colour, shade)
        lead = width_of(shown[: len(shown) - len(shown.lstrip(" "))])
        drawing.text(x + 1 + lead, y + 15, shown.strip(" "), "start")
        if index == marked:
            drawing.line([(x, y + _BOX), (x + width - 1, y + _BOX)], colour, 2, kind="marked")
        x += width
        if "\n" in piece:
            x, y = _EDGE, y + _LINE
    if length > len(pieces):
        drawing.text(_EDGE, y + _LINE + 15, f"and {length - len(pieces):,} more tokens", "start", size=SMALL, fill=SOFT)
        y += _LINE
    drawing.height = int(y + _LINE + _EDGE / 2)
    return drawing


def _legend(drawing: Drawing, title: str, colour: str, scale: Sequence[tuple[str, float]]) -> None:
    drawing.text(_EDGE, 20, title, "start", size=SMALL, fill=SOFT)
    x = _EDGE + width_of(title, SMALL) + 18
    for said, shade in scale:
        drawing.line([(x, 9), (x + 18, 9), (x + 18, 23), (x, 23), (x, 9)], SOFT, 0.5, kind="key")
        _box(drawing, x, 9, 18, colour, shade, 14)
        drawing.text(x + 24, 20, said, "start", size=SMALL, fill=SOFT)
        x += 40 + width_of(said, SMALL)


def _box(drawing: Drawing, x: float, y: float, w: float, colour: str, shade: float, h: float = _BOX) -> None:
    opacity = round(_DARKEST * min(1.0, max(0.0, shade)), 2)
    if opacity >= 0.01:
        drawing.area([(x, y), (x + w, y), (x + w, y + h), (x, y + h)], colour, opacity, kind="token")


def _alone(piece: str) -> str:
    """By itself: spaces are seen."""
    shown = _shown(piece)
    return "␣" * (len(shown) - len(shown.lstrip(" "))) + shown.lstrip(" ")


def _shown(piece: str) -> str:
    return piece.translate(_SIGNS)
