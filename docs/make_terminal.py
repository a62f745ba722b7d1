"""Runs a few commands and draws what a terminal shows of them: python docs/make_terminal.py [FILE]

The picture is docs/terminal.svg, which README shows. The texts are greedy; speeds are those of the machine that ran it.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from html import escape
from pathlib import Path

PICTURE = Path(__file__).with_name("terminal.svg")
COMMANDS = (
    """pronk generate --echo --stop $'\\n' "Bread is made from\"""",
    """echo "What is the capital of Peru?" | pronk chat --temp 0""",
)
COLUMNS, LINE, CHARACTER, MARGIN = 96, 20, 8.43, 18
PAPER, INK, DIM, PROMPT = "#14171d", "#e6e8ed", "#a0a7b4", "#56d4a0"  # dark on every page, as terminals are


def lines(command: str) -> list[tuple[str, str]]:
    """The colour and the text of each line: the command, what it writes to standard output, and its statistics."""
    ran = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    shown = [(PROMPT, f"$ {command}")]
    for colour, text in ((INK, ran.stdout), (DIM, ran.stderr)):
        for line in text.strip().splitlines():
            shown += [(colour, part) for part in textwrap.wrap(line, COLUMNS) or [""]]
    return shown


def picture(shown: list[tuple[str, str]]) -> str:
    texts = [text_at(n, 0, colour, text) for n, (colour, text) in enumerate(shown)]
    return window(len(shown), "pronk in a terminal", " ".join(text for _, text in shown), texts)


def text_at(row: int, column: int, colour: str, text: str) -> str:
    x, y = MARGIN + column * CHARACTER, MARGIN + 26 + row * LINE
    return f'<text x="{x:.4g}" y="{y}" fill="{colour}" xml:space="preserve">{escape(text)}</text>'


def window(rows: int, title: str, said: str, drawn: list[str]) -> str:
    """A terminal of so many rows, and what is drawn in it; `said`: the same for those who cannot see."""
    width, height = COLUMNS * CHARACTER + 2 * MARGIN, rows * LINE + 2 * MARGIN + 14
    dots = [f'<circle cx="{MARGIN + 6 + 18 * n}" cy="{MARGIN}" r="5" fill="{DIM}"/>' for n in range(3)]
    style = "font: 14px 'DejaVu Sans Mono', Menlo, Consolas, monospace"
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img" '
        'aria-labelledby="title said">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="said">{escape(said)}</desc>',
        f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
        *dots,
        f'<g style="{style}">',
        *drawn,
        "</g>",
        "</svg>\n",
    ])  # fmt: skip


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    every = [line for n, command in enumerate(COMMANDS) for line in [*[("", "")] * bool(n), *lines(command)]]
    file.write_text(picture(every), encoding="utf-8")
