"""What files, models and callers say, as a terminal may show it: a terminal obeys control characters, and is to take
its orders from pronk alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from unicodedata import category

# Control characters, those that format, halves of characters, ends of lines and of paragraphs. By category: what
# a later Unicode adds to them is among them.
_ORDERS = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
# Of those that format: what words, numbers and emoji are spelled with. What turns the direction of a line is not.
_SPELLING = (0xAD, *range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x180E, *range(0x200B, 0x200E), 0x2060)
_SPELLING += (0xFEFF, 0x110BD, 0x110CD, *range(0xE0020, 0xE0080))


class _Signs(dict[int, int]):
    """For str.translate: each character itself, or the sign for it; filled as they come."""

    def __missing__(self, c: int) -> int:
        sign = c
        if category(chr(c)) in _ORDERS and c not in _SPELLING:
            sign = 0x2400 + c if c < 0x20 else 0x2421 if c == 0x7F else 0xFFFD
        self[c] = sign
        return sign


_SIGNS = _Signs({ord(c): ord(c) for c in "\t\n"})


def shown(text: str) -> str:
    """`text` with signs in the place of characters that a terminal would obey: one for one, whatever their neighbours.

    Unicode has signs for ESC and its like (␛), and U+FFFD for the rest: C1, what turns the direction of writing (U+202E
    and others), separators of lines, lone surrogates. Tabs and newlines stay.
    """
    return text.translate(_SIGNS)


def shown_in_line(text: str) -> str:
    """The same of what is to stay within its line or column: tabs and newlines are signs as well."""
    return shown(text).replace("\n", "␊").replace("\t", "␉")


def table(rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()) -> str:
    """Columns as wide as their content, two spaces apart; those numbered in `right` are right-aligned.

    Nothing breaks out of its cell.
    """
    cells = [[shown_in_line(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )
