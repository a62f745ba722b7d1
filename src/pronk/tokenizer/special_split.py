"""SpecialSplit: the special tokens that a text spells, found in time that does not grow with how many there are."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Iterator


class SpecialSplit:
    def __init__(self, spellings: Collection[str]) -> None:
        """`spellings`: none of them empty."""
        self._sorted = sorted(spellings)
        # The longest other spelling that each begins with, by its place in the sorted list; -1 if none.
        self._shorter: list[int] = []
        open_ones: list[int] = []
        for i, spelling in enumerate(self._sorted):
            while open_ones and not spelling.startswith(self._sorted[open_ones[-1]]):
                open_ones.pop()
            self._shorter.append(open_ones[-1] if open_ones else -1)
            open_ones.append(i)
        self._longest = max(map(len, spellings), default=0)
        first = "".join(sorted({spelling[0] for spelling in spellings}))
        self._start = re.compile(f"[{re.escape(first)}]") if first else None

    def split(self, text: str) -> Iterator[tuple[bool, str]]:
        """(whether it is a special token, part) in order: the leftmost ones, the longest of those that begin there."""
        begun = at = 0
        while self._start and (start := self._start.search(text, at)):
            at = start.start()
            if found := self._at(text, at):
                if begun < at:
                    yield False, text[begun:at]
                yield True, found
                begun = at = at + len(found)
            else:
                at += 1
        if begun < len(text):
            yield False, text[begun:]

    def _at(self, text: str, at: int) -> str | None:
        """A spelling that `rest` begins with is the last one sorted before it, or one that this one begins with."""
        rest = text[at : at + self._longest]
        place = bisect_right(self._sorted, rest) - 1
        while place >= 0:
            if rest.startswith(self._sorted[place]):
                return self._sorted[place]
            place = self._shorter[place]
        return None
