"""Types a conversation into `pronk chat` and draws what its terminal shows: python docs/make_chat.py [FILE]

The picture is docs/chat.svg, which the first tutorial shows. Needs pseudo-terminals, prompt_toolkit and pyte
(`pip install -e ".[chat,docs]"`). The answers are greedy; speeds are those of the machine that ran it.
"""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyte
from make_terminal import CHARACTER, COLUMNS, DIM, INK, LINE, MARGIN, PAPER, text_at, window

PICTURE = Path(__file__).with_name("chat.svg")
COMMAND = [sys.executable, "-m", "pronk", "chat", "--temp", "0", "-n", "40"]
ROWS, WIDTH = 34, COLUMNS - 4  # some fonts are wider

PASTE = "\x1b[200~What does this do?\ndef f(x):\n    return x + 1\x1b[201~"
# What is typed, and what is shown when the next can be; None: a moment later.
SESSION: Sequence[tuple[str, str | None]] = (
    (PASTE, None),
    ("\r", "tok/s"),
    ("/undo\r", "taken back"),
    ("What is the capital of Peru?\r", "tok/s"),
    ("/edit\r", None),
    ("\x7f and of Chile?\r", "tok/s"),
    ("/set temperature 0.8\r", "temperature 0.8"),
    ("/tokens\r", "more fit"),
    ("/re\t", None),
)
MOMENT = 0.8  # seconds
COLOURS = {"default": INK, "brightblack": DIM}


class Screen(pyte.Screen):
    def select_graphic_rendition(self, *attributes: int, **how: Any) -> None:
        """Dimmed is grey: pyte has no word for it."""
        super().select_graphic_rendition(*(90 if each == 2 else each for each in attributes), **how)


def record(command: Sequence[str], session: Sequence[tuple[str, str | None]], rows: int = ROWS) -> Screen:
    """The screen after `session` was typed into `command`."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, WIDTH, 0, 0))
    screen = Screen(WIDTH, rows)
    stream = pyte.ByteStream(screen)
    written = b""

    def read_until(text: str | None) -> None:
        """Or until nothing more comes."""
        nonlocal written
        written, last = b"", time.monotonic()
        while time.monotonic() - last < (60 if text and text.encode() not in written else MOMENT):
            if select.select([master], [], [], 0.1)[0]:
                piece, last = os.read(master, 65536), time.monotonic()
                written += piece
                stream.feed(piece)

    with tempfile.TemporaryDirectory() as state:  # a history of its own
        env = {**os.environ, "TERM": "xterm-256color", "XDG_STATE_HOME": state}
        env.pop("NO_COLOR", None)
        process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=env, start_new_session=True)
        os.close(slave)
        try:
            read_until("\x1b[?2004h")  # told to say what is pasted, the terminal is listened to
            for keys, shown in session:
                os.write(master, keys.encode())
                read_until(shown)
        finally:
            process.kill()
            process.wait()
            os.close(master)
    return screen


def picture(screen: Screen) -> str:
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    drawn = [mark for row in range(len(lines)) for mark in _row(screen, row)]
    return window(len(lines), "a conversation with pronk chat", "\n".join(lines), drawn)


def _row(screen: Screen, row: int) -> list[str]:
    """Rectangles behind texts, a pair for each run of cells that look alike."""
    marks, cells = [], [screen.buffer[row][column] for column in range(WIDTH)]
    for (ink, paper), run in groupby(range(WIDTH), lambda column: _look(cells[column])):
        columns = list(run)
        x, y = MARGIN + columns[0] * CHARACTER, MARGIN + 11 + row * LINE
        if paper != PAPER:
            marks.append(
                f'<rect x="{x:.4g}" y="{y}" width="{len(columns) * CHARACTER:.4g}" height="{LINE}" fill="{paper}"/>'
            )
        if text := "".join(cells[column].data for column in columns).rstrip():
            marks.append(text_at(row, columns[0], ink, text))
    return marks


def _look(cell: Any) -> tuple[str, str]:
    ink = COLOURS.get(cell.fg, f"#{cell.fg}")
    paper = PAPER if cell.bg == "default" else COLOURS.get(cell.bg, f"#{cell.bg}")
    return (paper, ink) if cell.reverse else (ink, paper)


if __name__ == "__main__":
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE
    file.write_text(picture(record(COMMAND, SESSION)), encoding="utf-8")
