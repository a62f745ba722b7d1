"""Stop strings, found in streamed text wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache


class StopStrings:
    """Passes text on as soon as it cannot be the beginning of a stop string any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self._prefixes = [_Prefix(stop) for stop in self.stops]
        self.held = ""
        self.found: str | None = None  # the one that ended the text

    def feed(self, text: str) -> str:
        """The text that is now certain. Once `found`, everything from the stop string on is gone."""
        if not self.stops:
            return text
        if self.found:
            return ""
        keep = max(prefix.after(text) for prefix in self._prefixes)
        text = self.held + text
        hits = {stop: at for stop in self.stops if (at := text.find(stop)) >= 0}
        if hits:
            self.found, self.held = min(hits, key=hits.__getitem__), ""
            return text[: hits[self.found]]
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self.held = self.held, ""
        return held


class _Prefix:
    """How much of a stop string's beginning a text ends with, in a step or two a letter whatever the string is
    (Knuth, Morris and Pratt, https://doi.org/10.1137/0206024)."""

    def __init__(self, stop: str) -> None:
        self._stop, self._shorter, self._length = stop, _shorter(stop), 0

    def after(self, text: str) -> int:
        """Letters of the longest beginning that all the text so far ends with; whole, it is looked for elsewhere."""
        for letter in text:
            self._length = self._longest(self._length, letter)
            if self._length == len(self._stop):
                self._length = self._shorter[-1]
        return self._length

    def _longest(self, length: int, letter: str) -> int:
        return _longest(self._stop, self._shorter, length, letter)


def _longest(stop: str, shorter: Sequence[int], length: int, letter: str) -> int:
    while length and stop[length] != letter:
        length = shorter[length - 1]
    return length + (stop[length] == letter)


@lru_cache(maxsize=256)  # samples have the same
def _shorter(stop: str) -> Sequence[int]:
    """Of each beginning: the longest shorter one that it ends with."""
    found = [0] * len(stop)
    for at in range(1, len(stop)):
        found[at] = _longest(stop, found, found[at - 1], stop[at])
    return found
