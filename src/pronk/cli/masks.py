"""Which tokens are learned, made visible: micro-batches as the model will read them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from pronk import terminal
from pronk.cli import console

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer
    from pronk.train.data.sources import Data
    from pronk.train.settings import Settings

_SHOWN = 2  # micro-batches


def show(data: Data, settings: Settings, tokenizer: Tokenizer) -> None:
    """The first micro-batches on stdout: what is learned in green, or in brackets where there is no colour."""
    from pronk.train.data.sources import batches_of, shown

    chosen = batches_of(data, settings).epoch(0)[:_SHOWN]
    on_terminal = sys.stdout.isatty()
    coloured = on_terminal and not console.is_dumb() and not os.environ.get("NO_COLOR")
    lines = []
    for number, indices in enumerate(chosen, 1):
        examples = [data.train[index] for index in indices]
        tokens, learned = sum(map(len, examples)), sum(example.targets for example in examples)
        amount = f"{len(examples)} example{'s' * (len(examples) != 1)}"
        lines.append(f"micro-batch {number}: {amount}, {tokens} tokens, {learned} of them learned")
        for example in examples:
            named = len(example.answers) > 1
            for name, text in zip(example.answers, shown(example.answers.values(), tokenizer), strict=True):
                spans = [(terminal.shown(part) if on_terminal else part, marked) for part, marked in _spans(text)]
                lines += ["", *([f"{name}:"] if named else [])]
                lines.append("".join(_marked(part, marked, coloured) for part, marked in spans))
        lines.append("")
    console.write_styled("\n".join(lines))


def _spans(tokens: Sequence[tuple[str, bool]]) -> Iterator[tuple[str, bool]]:
    """Neighbours that are alike, joined."""
    text, kind = "", False
    for piece, learned in tokens:
        if learned != kind and text:
            yield text, kind
            text = ""
        text, kind = text + piece, learned
    yield text, kind


def _marked(text: str, learned: bool, coloured: bool) -> str:
    if not learned:
        return text
    return click.style(text, fg="green", bold=True) if coloured else f"⟦{text}⟧"
