"""`--show-batch`: micro-batches as the model will read them, and which of their tokens are learned."""

from __future__ import annotations

import sys
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

import click

from pronk import terminal
from pronk.cli import console

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer
    from pronk.train.data.sources import Data
    from pronk.train.settings import Settings

_SHOWN = 2  # micro-batches
_ALONE = {"data", "prompt"}  # names of texts that nothing has to be told apart from


def show(data: Data, settings: Settings, tokenizer: Tokenizer) -> None:
    """The first micro-batches on stdout: what is learned in green, or in brackets where there is no colour."""
    from pronk.train.data.sources import shown

    chosen = settings.batches(data.train).epoch(0)[:_SHOWN]
    on_terminal = sys.stdout.isatty()
    coloured = on_terminal and not console.is_plain()
    lines = []
    for number, indices in enumerate(chosen, 1):
        examples = [data.train[index] for index in indices]
        amount = f"{len(examples)} example{'s' * (len(examples) != 1)}, {sum(map(len, examples))} tokens"
        targets = sum(example.targets for example in examples)
        lines.append(f"micro-batch {number}: {amount}, {targets} of them {settings.objective.marked}")
        for example in examples:
            named = not _ALONE.issuperset(example.answers)
            for name, text in zip(example.answers, shown(example.answers.values(), tokenizer), strict=True):
                lines += ["", *([f"{name}:"] if named else [])]
                line = ""
                for learned, tokens in groupby(text, itemgetter(1)):
                    part = "".join(piece for piece, _ in tokens)
                    line += _marked(terminal.shown(part) if on_terminal else part, bool(learned and part), coloured)
                lines.append(line)
        lines.append("")
    console.write_styled("\n".join(lines))


def _marked(text: str, learned: bool, coloured: bool) -> str:
    if not learned:
        return text
    return click.style(text, fg="green", bold=True) if coloured else f"⟦{text}⟧"
