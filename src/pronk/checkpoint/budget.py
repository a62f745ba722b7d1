"""What the headers of one checkpoint may hold, all of its files together: where one file is cheap, many may not be."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pronk.errors import BadFile
from pronk.tokenizer.vocabulary import MAX_VOCABULARY

Item = Literal[
    "files", "tensors", "zip entries", "bytes of headers", "bytes of JSON headers", "pickle instructions",
    "metadata pairs", "metadata array elements",
]  # fmt: skip

# The largest models have some 200 files; 18,000 tensors, where every one of 16 ranks has a piece of each; 10 MB of
# headers, 1 MB of them JSON; 700,000 pickle instructions. A vocabulary has tokens, scores, types and merges.
_MOST: dict[Item, int] = {
    "files": 1000,
    "tensors": 1 << 15,
    "zip entries": 1 << 15,
    "bytes of headers": 32 << 20,
    "bytes of JSON headers": 4 << 20,
    "pickle instructions": 1_000_000,
    "metadata pairs": 1 << 16,
    "metadata array elements": 4 * MAX_VOCABULARY,
}


class Budget:
    def __init__(self, most: Mapping[Item, int] = _MOST) -> None:
        self._most, self._left = most, dict(most)

    def left(self, item: Item) -> int:
        return self._left[item]

    def spend(self, path: Path, item: Item, count: int, *, field: str | None = None, offset: int | None = None) -> None:
        """Before work on `path` that goes with `count`. Raises BadFile once the checkpoint asks for too much."""
        self._left[item] -= count
        if self._left[item] < 0:
            problem = f"with this file the checkpoint has more than {self._most[item]} {item}; no model does"
            raise BadFile(path, problem, field=field, offset=offset)
