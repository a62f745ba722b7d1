"""Stop strings, found in streamed text wherever token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Passes text on as soon as it cannot be the beginning of a stop string any more."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = [stop for stop in stops if stop]
        self.held = ""
        self.found: str | None = None  # the one that ended the text

    def feed(self, text: str) -> str:
        """The text that is now certain. Once `found`, everything from the stop string on is gone."""
        if not self.stops:
            return text
        if self.found:
            return ""
        text = self.held + text
        hits = {stop: at for stop in self.stops if (at := text.find(stop)) >= 0}
        if hits:
            self.found, self.held = min(hits, key=hits.__getitem__), ""
            return text[: hits[self.found]]
        keep = max(_overlap(text, stop) for stop in self.stops)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self.held = self.held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
