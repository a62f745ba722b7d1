"""Comparison: what is measured on what, once it is settled (settling.py), and the pieces of text that prompts are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk.measure import texts
from pronk.measure.memory import Prediction
from pronk.measure.request import Request

if TYPE_CHECKING:
    from pronk.checkpoint.grid import Grid
    from pronk.checkpoint.tensors import Checkpoint

NOISE_WINDOWS = 4
ROTATION = 0  # the seed of twins


@dataclass(frozen=True)
class Variant:
    """One way to run the model; `options` are pronk.load's."""

    name: str
    original: bool
    options: Mapping[str, Any]
    predicted: Prediction
    twin: bool = False  # whether its quality is a rotated twin's: the model's weights lie on its grid


@dataclass(frozen=True)
class Comparison:
    request: Request
    model: str
    engine: str  # its name
    checkpoint: Checkpoint
    grid: Grid | None  # that the weights lie on
    variants: tuple[Variant, ...]  # the original first
    reference: Variant | None  # of quality; None where it cannot be measured
    ids: Sequence[int]  # of the text, as `pronk perplexity` and `pronk divergence` read it: beginning with `begin`
    begin: tuple[int, ...]  # what the tokenizer puts before a text
    text: str  # its name
    written: str  # the text itself
    ctx_size: int
    rounds: int
    prefill: tuple[int, ...]
    decode_tokens: int
    windows: int
    window: int
    new_tokens: int  # of each text that is written; 0: none is
    compares: bool  # False: techniques alone are measured, of the original
    together: bool  # whether all variants fit into memory side by side
    judged_together: bool  # and whether each does beside the reference, where techniques are judged
    missing: tuple[str, ...]  # what will not be measured, and why

    @property
    def kept_bytes(self) -> int:
        """What the reference predicts, kept on disk while variants are held against it."""
        return 4 * self.windows * ((self.window - 1) // 2) * self.checkpoint.config.vocab_size

    def settings(self) -> dict[str, Any]:
        """As report.json has them: those that something is measured by."""
        compared = {
            "prefill": list(self.prefill),
            "decode": {"contexts": list(self.prefill), "tokens": self.decode_tokens},
            "prompts": len(texts.PROMPTS),
            "new_tokens": self.new_tokens,
            "seed": texts.SEED,
            "sampling": dict(texts.MODES["seeded"]),
        }
        return {
            "rounds": self.rounds,
            **(compared if self.compares else {}),
            "text": self.text,
            "text_tokens": len(self.ids),
            "text_sha256": hashlib.sha256(" ".join(map(str, self.ids)).encode()).hexdigest(),
            "windows": self.windows,
            "window_tokens": self.window,
            "noise_windows": min(self.windows, NOISE_WINDOWS),
            "reference": self.reference.name if self.reference else None,
            "engine": self.engine,
            "asked": self.request.asdict(),
        }

    def about_model(self) -> dict[str, Any]:
        opened = self.checkpoint
        return {
            "name": self.model,
            "path": _without_home(opened.path),
            "format": opened.format,
            "quantization": opened.quantization,
            "parameters": sum(math.prod(t.shape) for t in opened.tensors.values()),
            "stored_bytes": sum(t.nbytes for t in opened.tensors.values()),
            "config": opened.config.to_dict(),
            "grid": self.grid and self.grid.as_dict(),
        }

    def order(self, number: int) -> list[Variant]:
        """Who measures in a round: A B C, then C B A, and so on, so that nobody always goes first."""
        return list(self.variants) if number % 2 == 0 else list(reversed(self.variants))

    def prompts(self, number: int) -> list[list[int]]:
        """Of a round, one a length: pieces of the text, another one each time."""
        return [self.piece(tokens, number * len(self.prefill) + n) for n, tokens in enumerate(self.prefill)]

    def piece(self, tokens: int, number: int) -> list[int]:
        """A prompt of so many tokens. Stepping by a prime spreads the pieces over the text."""
        begin, text = self.begin[:tokens], self.ids[len(self.begin) :]
        own = tokens - len(begin)
        at = 7919 * number % (len(text) - own + 1)
        return [*begin, *text[at : at + own]]


def _without_home(path: Path) -> str:
    """A report is for others to read: whose machine it was made on is not their business."""
    home = Path.home()
    return str(Path("~") / path.relative_to(home)) if path.is_relative_to(home) else str(path)
