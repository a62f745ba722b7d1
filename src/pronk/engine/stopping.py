"""Stop strings, found in streamed text wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence


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
        self._stop, self._length = stop, 0
        self._shorter = [0] * len(stop)  # of each beginning: the longest shorter one that it ends with
        for at in range(1, len(stop)):
            self._shorter[at] = self._longest(self._shorter[at - 1], stop[at])

    def after(self, text: str) -> int:
        """Letters of the longest beginning that all the text so far ends with; whole, it is looked for elsewhere."""
        for letter in text:
            self._length = self._longest(self._length, letter)
            if self._length == len(self._stop):
                self._length = self._shorter[-1]
        return self._length

    def _longest(self, length: int, letter: str) -> int:
        while length and self._stop[length] != letter:
            length = self._shorter[length - 1]
        return length + (self._stop[length] == letter)
