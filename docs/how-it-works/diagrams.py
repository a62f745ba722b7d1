"""Draws the pages' diagrams, out of nothing but measured.json (which measured.py makes).

python docs/how-it-works/diagrams.py [FOLDER]     (default: beside this file)
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from svg import BLUE, GREEN, ORANGE, Drawing

HERE = Path(__file__).parent


def surprise(measured: dict[str, Any]) -> Drawing:
    found = measured["language-model"]
    tokens, values = found["tokens"][1:], found["surprise"]
    said = "; ".join(f"{token.strip()} {value:.2f}" for token, value in zip(tokens, values, strict=True))
    drawing = Drawing(760, 90 + 34 * len(values), "How surprised the model is at each token", f"In nats: {said}.")
    drawing.text(24, 32, f"“{''.join(found['tokens'])}”", "start", bold=True)
    drawing.text(24, 54, "How surprised the model is at each token, in nats (minus log p)", "start", "soft", 12)
    for n, (token, value) in enumerate(zip(tokens, values, strict=True)):
        y = 74 + 34 * n
        drawing.text(120, y + 15, token.strip(), "end")
        drawing.rect(132, y, 36 * value, 22, BLUE, "none")
        drawing.text(140 + 36 * value, y + 15, f"{value:.2f}   p = {math.exp(-value):.2g}", "start", "soft", 12)
    return drawing


def residual_stream(_: dict[str, Any]) -> Drawing:
    drawing = Drawing(
        760, 250, "The residual stream through one block",
        "The stream runs straight from the embedding to the last norm. In each block attention reads a normed copy and "
        "adds its result to the stream; then the feed-forward network does the same.",
    )  # fmt: skip
    y = 190
    drawing.line([(96, y), (230, y), (590, y)], BLUE, 5)
    drawing.arrow([(590, y), (640, y)], BLUE, 5)
    drawing.box(16, y - 24, 82, 48, "embed-\nding")
    drawing.box(644, y - 24, 100, 48, "RMSNorm,\nhead")
    drawing.rect(150, 26, 440, 190, "none", "soft")
    drawing.text(370, 238, "one block; the default model has 30, one after another", fill="soft", size=12)
    for x, name, wide in ((172, "attention", 80), (376, "feed-forward", 100)):
        middle = x + 106 + wide / 2
        drawing.arrow([(x, y), (x, 92), (x + 16, 92)])
        drawing.box(x + 16, 72, 76, 40, "RMSNorm")
        drawing.arrow([(x + 92, 92), (x + 106, 92)])
        drawing.box(x + 106, 72, wide, 40, name)
        drawing.arrow([(middle, 112), (middle, y - 12)])
        drawing.circle(middle, y, 12, "paper")
        drawing.text(middle, y + 5, "+", bold=True)
    drawing.text(120, y - 12, "x", bold=True)
    return drawing


def stream_lengths(measured: dict[str, Any]) -> Drawing:
    found = measured["residual-stream"]
    lines = (("out", "the stream after the block", BLUE), ("mlp", "what feed-forward adds", ORANGE),
             ("attention", "what attention adds", GREEN))  # fmt: skip
    last = len(found["out"]) - 1
    said = "; ".join(f"{name}: {found[key][0]:.0f} to {found[key][-1]:.0f}" for key, name, _ in lines)
    drawing = Drawing(
        760, 400, "Length of the stream, and of what is added to it, by layer", f"From first to last: {said}."
    )
    drawing.text(24, 30, "Length of the stream, and of what each block adds (mean over tokens)", "start", bold=True)
    ground = (78.0, 72.0, 640.0, 240.0)
    ticks = {str(value): math.log10(value) / 3 for value in (1, 3, 10, 30, 100, 300, 1000)}
    drawing.axes(ground, {str(n): n / last for n in range(0, last + 1, 5)}, ticks, "layer", "length (logarithmic)")
    x, y, w, h = ground
    for n, (key, name, colour) in enumerate(lines):
        points = [(x + w * i / last, y + h * (1 - math.log10(value) / 3)) for i, value in enumerate(found[key])]
        drawing.line(points, colour, 2.5)
        drawing.line([(90 + 222 * n, 382), (112 + 222 * n, 382)], colour, 3)
        drawing.text(119 + 222 * n, 386, name, "start", size=12)
    return drawing


S, C, D = 66, 46, 24  # what stands for tokens, hidden size and a head's dimensions


def _product(drawing: Drawing, x: float, y: float, parts: Sequence[tuple[str, int, int]], dims: Sequence[str]) -> None:
    """a times b = c: of each its name, rows and columns; what is written below. A's masked part is grey."""
    for n, ((name, rows, columns), shape) in enumerate(zip(parts, dims, strict=True)):
        top = y - rows / 2
        drawing.rect(x, top, columns, rows, "grid" if name.startswith("W") else "raised", "ink")
        shift = 0
        if name == "A":
            above = parts[0][0] in ("Q", "A")  # where a token is a row
            drawing.area(_steps(x, top, 6, columns / 6, above=above), "grid")
            shift = -14 if above else 14
        drawing.text(x + columns / 2 + shift, y + 5 - shift, name, bold=True)
        drawing.text(x + columns / 2, y + S / 2 + 18, shape, fill="soft", size=11)
        x += columns + 42
        if n < 2:
            drawing.text(x - 21, y + 5, "·" if n == 0 else "=", bold=True)


def _steps(x: float, y: float, count: int, step: float, *, above: bool) -> list[tuple[float, float]]:
    """The corners of all squares above the diagonal of a square, or of all below it."""
    stairs = [(n, n + k - 1) for n in range(1, count) for k in (0, 1)] + [(count, count - 1), (count, 0)]
    return [(x + a * step, y + b * step) if above else (x + b * step, y + a * step) for a, b in stairs]


def attention_shapes(_: dict[str, Any]) -> Drawing:
    drawing = Drawing(
        760, 490, "The shapes of attention, a token a row and a token a column",
        "With a token a row, q is X times the transposed weight, scores are Q times K transposed, and the output is A "
        "times V. With a token a column everything is transposed and the order is reversed: Q is W times X, scores are "
        "K transposed times Q, the output is V times A.",
    )  # fmt: skip
    queries, weights, output = "queries (keys and values likewise)", "weights: softmax along each {}", "output"
    rows = (
        (queries, [("X", S, C), ("Wᵀ", C, D), ("Q", S, D)], ("S × C", "C × D", "S × D")),
        (weights.format("row"), [("Q", S, D), ("Kᵀ", D, S), ("A", S, S)], ("S × D", "D × S", "S × S")),
        (output, [("A", S, S), ("V", S, D), ("O", S, D)], ("S × S", "S × D", "S × D")),
    )
    columns = (
        (queries, [("W", D, C), ("X", C, S), ("Q", D, S)], ("D × C", "C × S", "D × S")),
        (weights.format("column"), [("Kᵀ", S, D), ("Q", D, S), ("A", S, S)], ("S × D", "D × S", "S × S")),
        (output, [("V", D, S), ("A", S, S), ("O", D, S)], ("D × S", "S × S", "D × S")),
    )
    for x, head, steps in ((40, "a token is a row (code)", rows), (420, "a token is a column (many papers)", columns)):
        drawing.text(x, 32, head, "start", bold=True)
        for n, (name, parts, dims) in enumerate(steps):
            y = 112 + 146 * n
            drawing.text(x, y - S / 2 - 16, name, "start", "soft", 12)
            _product(drawing, x, y, parts, dims)
    drawing.line([(388, 20), (388, 470)], "grid", 1)
    return drawing


def shared_heads(_: dict[str, Any]) -> Drawing:
    drawing = Drawing(
        760, 210, "Query heads and the key and value heads that they share",
        "Multi-head: nine query heads, nine key and value heads. Grouped: three query heads share each of three. "
        "Multi-query: nine share one.",
    )  # fmt: skip
    for n, (name, shared) in enumerate((("multi-head", 9), ("grouped (default model)", 3), ("multi-query", 1))):
        left = 24 + 248 * n
        drawing.text(left + 108, 32, name, bold=True)
        for head in range(9):
            x = left + 12 + 24 * head
            group = head * shared // 9
            to = left + 12 + 24 * ((group + 0.5) * 9 / shared - 0.5)
            drawing.line([(x, 88), (to, 142)], "soft", 1)
            drawing.circle(x, 78, 9, BLUE, "none")
        for group in range(shared):
            to = left + 12 + 24 * ((group + 0.5) * 9 / shared - 0.5)
            drawing.rect(to - 9, 142, 18, 18, ORANGE, "none")
        drawing.text(left + 108, 56, "9 query heads", fill="soft", size=12)
        drawing.text(left + 108, 186, f"{shared} key and value head{'s' * (shared > 1)}", fill="soft", size=12)
    return drawing


def masks(_: dict[str, Any]) -> Drawing:
    drawing = Drawing(
        760, 322, "Who sees whom",
        "Encoder: every token sees all. Decoder: every token sees itself and those before it. Encoder and decoder: "
        "source tokens see all source tokens; target tokens see target tokens up to themselves, and all source tokens.",
    )  # fmt: skip
    side = 26

    def grid(
        x: float, y: float, asks: Sequence[str], seen: Sequence[str], sees: Callable[[int, int], bool], colour: str
    ) -> None:
        for t, asking in enumerate(asks):
            drawing.text(x - 8, y + side * t + 18, asking, "end", size=12)
            for s in range(len(seen)):
                drawing.rect(x + side * s, y + side * t, side, side, colour if sees(t, s) else "paper", "soft")
        for s, name in enumerate(seen):
            drawing.text(x + side * (s + 0.5), y - 8, name, size=12)

    source, target = ("a", "b", "c"), ("u", "v", "w")
    drawing.text(110, 32, "encoder", bold=True)
    grid(60, 100, "abcd", "abcd", lambda t, s: True, BLUE)
    drawing.text(300, 32, "decoder", bold=True)
    grid(250, 100, "abcd", "abcd", lambda t, s: s <= t, BLUE)
    drawing.text(565, 32, "encoder and decoder", bold=True)
    grid(470, 84, source, source, lambda t, s: True, BLUE)
    grid(470, 224, target, source, lambda t, s: True, ORANGE)
    grid(620, 224, target, target, lambda t, s: s <= t, BLUE)
    drawing.text(509, 56, "source to source", fill="soft", size=12)
    drawing.text(659, 196, "target to target", fill="soft", size=12)
    drawing.text(509, 196, "target to source", fill="soft", size=12)
    drawing.text(24, 56, "rows ask, columns are looked at", "start", "soft", 12)
    return drawing


def encoder_decoder(_: dict[str, Any]) -> Drawing:
    drawing = Drawing(
        760, 432, "Three ways to build a transformer",
        "Encoder: self-attention without a mask and feed-forward, N times, then vectors. Decoder: masked "
        "self-attention and feed-forward, N times, then the next token. Encoder and decoder: an encoder for the "
        "source; a decoder with cross-attention to its output between masked self-attention and feed-forward.",
    )  # fmt: skip

    past, cross, forward = "self-attention,\ncausal mask", "cross-attention\nto the source", "feed-forward"
    encoder = ("self-attention,\nno mask", forward)

    def stack(x: float, name: str, into: str, parts: Sequence[str], top: str, out: str) -> dict[str, float]:
        """From below: what goes in, what is done N times, what comes out. Where each part has its middle."""
        drawing.text(x + 75, 30, name, bold=True)
        drawing.text(x + 75, 62, out, fill="soft", size=12)
        drawing.arrow([(x + 75, 400), (x + 75, 68 if out else 112)])
        drawing.box(x + 15, 80, 120, 26, top)
        drawing.rect(x, 122, 150, 206, "none", "soft")
        drawing.box(x + 15, 350, 120, 26, "embedding")
        drawing.text(x + 75, 416, into, fill="soft", size=12)
        places = {part: 288.0 - 62 * n for n, part in enumerate(parts)}
        for part, middle in places.items():
            drawing.box(x + 10, middle - 23, 130, 46, part, "raised", ORANGE if part == cross else BLUE)
        drawing.text(x + 146, 344, "N times", "end", "soft", 12)
        return places

    stack(20, "encoder", "text", encoder, "norm", "a vector for each token")
    stack(200, "decoder (LLaMA)", "text so far", (past, forward), "norm, head", "the next token")
    stack(392, "encoder …", "source", encoder, "norm", "")
    y = stack(590, "… and decoder", "target so far", (past, cross, forward), "norm, head", "the next token")[cross]
    drawing.arrow([(527, 93), (566, 93), (566, y), (600, y)], ORANGE, 2)
    return drawing


def rope_scaling(measured: dict[str, Any]) -> Drawing:
    found = measured["llama"]["rope"]
    waves, factors = found["wavelengths"], found["factors"]
    kept = sum(factor == 1 for factor in factors)
    slow = sum(factor == 8 for factor in factors)
    drawing = Drawing(
        760, 380, "By what Llama 3.1 divides each rotary frequency",
        f"Of 64 pairs {kept} keep their frequency, {slow} have it divided by 8, and {64 - kept - slow} lie between. "
        "Wavelengths under 2,048 tokens stay, those over 8,192 become eight times as long.",
    )  # fmt: skip
    drawing.text(24, 30, "By what Llama 3.1 divides the frequency of each of its 64 pairs", "start", bold=True)
    ground = (78.0, 72.0, 640.0, 240.0)
    x, y, w, h = ground

    def across(wavelength: float) -> float:
        return math.log10(wavelength / 5) / math.log10(4e6 / 5)

    marks = {f"{value:,}": across(value) for value in (10, 100, 1_000, 10_000, 100_000, 1_000_000)}
    drawing.axes(
        ground, marks, {str(n): n / 9 for n in (1, 2, 4, 6, 8)}, "wavelength, in tokens (logarithmic)", "divided by"
    )
    for value in (2048, 8192):
        at = x + w * across(value)
        drawing.line([(at, y), (at, y + h)], ORANGE, 1)
        drawing.text(
            at + (-6 if value == 2048 else 6), y + 14, f"{value:,}", "end" if value == 2048 else "start", "soft", 12
        )
    for wave, factor in zip(waves, factors, strict=True):
        drawing.circle(x + w * across(wave), y + h * (1 - factor / 9), 3.5, BLUE, "none")
    return drawing


DRAWINGS: dict[str, Callable[[dict[str, Any]], Drawing]] = {
    "surprise": surprise,
    "residual-stream": residual_stream,
    "stream-lengths": stream_lengths,
    "attention-shapes": attention_shapes,
    "shared-heads": shared_heads,
    "masks": masks,
    "encoder-decoder": encoder_decoder,
    "rope-scaling": rope_scaling,
}


def main(folder: Path) -> None:
    measured = json.loads((HERE / "measured.json").read_text(encoding="utf-8"))
    for name, draw in DRAWINGS.items():
        (folder / f"{name}.svg").write_text(draw(measured).svg(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
