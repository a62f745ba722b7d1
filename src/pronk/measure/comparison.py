"""Comparison: what was asked for, as a Request, and what is measured on what, once that is settled (settle.py)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pronk.checkpoint.grid import Grid
from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.declaration import Plan
from pronk.engine.prefix_cache import BLOCK_SIZE, FIRST_BLOCKS
from pronk.measure import recording, texts
from pronk.measure.journal import check_said
from pronk.measure.operations import Loading

NOISE_WINDOWS = 4
ROTATION = 0  # the seed of twins


@dataclass(frozen=True)
class Request:
    """What was asked for. None: not said; the default holds, or what the report that is gone on with began with."""

    model: str | None = None
    to: tuple[str, ...] | None = None
    against: str | None = None
    rounds: int | None = None
    prefill: tuple[int, ...] | None = None
    decode_tokens: int | None = None
    windows: int | None = None
    text: str | None = None  # a file
    techniques: bool | None = None
    tasks: tuple[str, ...] | None = None  # of lm-evaluation-harness
    loading: Mapping[str, Any] = field(default_factory=dict)  # options of pronk.load, those given alone

    def asdict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**asdict(self), "loading": as_json(self.loading)}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Request:
        """The inverse of `asdict`. Raises KeyError or TypeError where it is none."""
        loading = dict(saved["loading"])
        if "int8_threshold" in loading:  # a number, or "inf"
            loading["int8_threshold"] = float(loading["int8_threshold"])
        every: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in saved.items()
        }
        return cls(**every | {"loading": loading})

    def going_on_with(self, saved: Request) -> Request:
        """The saved one. Raises BadRequest where something that is said now contradicts it; techniques may be added."""
        now, then = ({**vars(asked), **asked.loading, "loading": None, "techniques": None} for asked in (self, saved))
        check_said(now, then)
        return replace(saved, techniques=self.techniques or saved.techniques)


def as_json(given: Any) -> Any:
    """The same, with infinity, for which JSON has no number, as a word."""
    if isinstance(given, Mapping):
        return {key: as_json(value) for key, value in given.items()}
    if isinstance(given, list):
        return [as_json(value) for value in given]
    return str(given) if given == math.inf else given


@dataclass(frozen=True)
class Variant:
    """One way to run the model; `options` are pronk.load's."""

    name: str
    original: bool
    options: Mapping[str, Any]
    predicted: Plan
    twin: bool = False  # whether its quality is a rotated twin's: the model's weights lie on its grid

    def peak(self, baseline: int, tokens: int) -> int:
        """Bytes of a process that held `baseline`, its libraries and its tokenizer, before loading, and then runs one
        text of `tokens` tokens: predicted before anything is loaded."""
        cache = kv_blocks(tokens) * BLOCK_SIZE * self.predicted.kv_a_token
        return baseline + self.predicted.weights + cache + self.predicted.besides


def kv_blocks(tokens: int, texts: int = 1) -> int:
    """The most blocks of keys and values that `texts` hold side by side on their way to so many tokens each.

    A cache doubles as it fills (PrefixCache.make_room), and the smaller one stays until it is copied.
    """
    needed, size, most = texts * -(-tokens // BLOCK_SIZE), FIRST_BLOCKS, 0
    while size < needed:
        most = 2 * size
        size *= 2
    return max(needed, most)


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
    def original(self) -> Variant:
        return self.variants[0]

    @property
    def noise_windows(self) -> int:
        return min(self.windows, NOISE_WINDOWS)

    @property
    def kept_bytes(self) -> int:
        """What the reference predicts, kept on disk while variants are held against it."""
        return 4 * self.windows * ((self.window - 1) // 2) * self.checkpoint.config.vocab_size + recording.END

    def loading(self, variant: Variant) -> Loading:
        return Loading(self.model, self.engine, variant.options)

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
            "noise_windows": self.noise_windows,
            "reference": self.reference.name if self.reference else None,
            "engine": self.engine,
            "asked": self.request.asdict(),
        }

    def about_model(self) -> dict[str, Any]:
        opened, home = self.checkpoint, Path.home()
        inside = opened.path.is_relative_to(home)  # a report is for others to read: whose home it was is not said
        return {
            "name": self.model,
            "path": str(Path("~") / opened.path.relative_to(home) if inside else opened.path),
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
        begin, first = self.begin[:tokens], len(self.begin)
        own = tokens - len(begin)
        at = first + 7919 * number % (len(self.ids) - first - own + 1)
        return [*begin, *self.ids[at : at + own]]
