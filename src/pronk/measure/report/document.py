"""What a report consists of, before it is HTML or Markdown: sections of blocks of plain text, none of it escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

Row = tuple[str, Sequence["Cell"]]  # its label; an empty sequence of cells makes it a heading of the rows below


@dataclass(frozen=True)
class Cell:
    """A value, and beneath it in small type what belongs to it: its spread, its ratio, what was predicted."""

    value: str
    notes: tuple[str, ...] = ()

    @staticmethod
    def of(value: str, *notes: str) -> Cell:
        return Cell(value, tuple(note for note in notes if note))


@dataclass(frozen=True)
class Table:
    """A column for each name of `head`; `variants` says that these are names of variants, which have colours."""

    caption: str
    corner: str
    head: Sequence[str]
    rows: Sequence[Row]
    variants: bool = True


@dataclass(frozen=True)
class Paragraph:
    """`variant` and `badge`: whose verdict it is and that in a few words, with a tone to colour it by."""

    text: str
    variant: str = ""
    badge: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Heading:
    text: str


@dataclass(frozen=True)
class Points:
    items: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """What the figures were measured under; values that are code (a command) are shown as such."""

    caption: str
    pairs: Sequence[tuple[str, str]]
    code: Sequence[str] = ()


@dataclass(frozen=True)
class Plot:
    """A picture by its name; `alt` says in words what it shows."""

    name: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Output:
    """A generated text: what it shares with the original's from its beginning, the word that differs, and the rest."""

    variant: str
    shared: str
    first: str = ""
    rest: str = ""


@dataclass(frozen=True)
class Texts:
    prompt: str
    mode: str
    outputs: Sequence[Output]


Block = Table | Heading | Paragraph | Points | Facts | Plot | Texts


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]

    @property
    def id(self) -> str:
        return "-".join("".join(c if c.isalnum() else " " for c in self.title.lower()).split())


@dataclass(frozen=True)
class Document:
    title: str
    subtitle: str
    warning: str  # empty for a report that is whole
    sections: Sequence[Section]
    original: str = ""
    names: Sequence[str] = field(default_factory=list)
