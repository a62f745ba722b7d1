"""Examples: texts as token ids, and which of the tokens are to be learned.

Only answers are in the loss mask: what a user says is there to be read. A text is encoded whole, and the part of it
before a place is what it shares with that part encoded alone, which is what the model sees when it is used. Of
conversations turns.py finds the places.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pronk.errors import BadRequest, NoTokenizer, Unsupported, short
from pronk.tokenizer import chat
from pronk.train.data.containers import BadRecord
from pronk.train.data.messages import learned
from pronk.train.data.turns import Rendered

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer

_ROLES = ("system", "user", "assistant")

TooLong = Literal["error", "cut", "skip", "split"]


class Overlong(BadRecord):
    """A record that takes more tokens than an example may have."""


@dataclass(frozen=True)
class Example:
    ids: NDArray[np.int32]  # [S]
    loss_mask: NDArray[np.bool_]  # [S]: whether the loss counts how well token i is foretold; never of the first

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        return int(self.loss_mask.sum())

    @property
    def answers(self) -> dict[str, Example]:
        """By name: as of a Pair, of which there is more to tell apart."""
        return {"data": self}


@dataclass(frozen=True, eq=False)
class Pair:
    """One prompt and two answers to it, each an example with the prompt. Compared by identity."""

    chosen: Example
    rejected: Example
    margin: float = 0.0  # by how much the chosen one is better, where a record says so

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def targets(self) -> int:
        return self.chosen.targets + self.rejected.targets

    @property
    def answers(self) -> dict[str, Example]:
        return {"chosen": self.chosen, "rejected": self.rejected}


@dataclass(frozen=True, eq=False)
class Judged:
    """A prompt with an answer that people called good, or bad. Compared by identity."""

    example: Example
    good: bool

    def __len__(self) -> int:
        return len(self.example)

    @property
    def targets(self) -> int:
        return self.example.targets

    @property
    def answers(self) -> dict[str, Example]:
        return {"good" if self.good else "bad": self.example}


@dataclass(frozen=True, eq=False)
class Prompt:
    """A text that the model is to go on with by itself, so many times. Compared by identity."""

    ids: NDArray[np.int32]  # [S]
    said: str | Sequence[Mapping[str, Any]]  # as the record has it
    record: Mapping[str, Any]
    generations: int
    room: int  # the most tokens that a completion may have

    def __len__(self) -> int:
        """Of all completions with their prompts, at most."""
        return self.generations * (len(self.ids) + self.room)

    @property
    def targets(self) -> int:
        return self.generations * self.room

    @property
    def answers(self) -> dict[str, Example]:
        return {"prompt": Example(self.ids, np.zeros(len(self.ids), np.bool_))}


def content(example: Example | Pair | Judged | Prompt) -> bytes:
    """The same of exact copies, and of nothing else."""
    found = b"".join(
        b"%d " % len(text) + text.ids.tobytes() + text.loss_mask.tobytes() for text in example.answers.values()
    )
    if isinstance(example, Prompt):
        return found + json.dumps(example.record, sort_keys=True).encode()
    if isinstance(example, Judged):
        return found + bytes([example.good])
    margin = example.margin if isinstance(example, Pair) else 0.0
    return found + (np.float64(margin).tobytes() if margin else b"")


@dataclass
class Encoder:
    """Makes examples of texts, answers and conversations, for objectives that say which records hold what.

    `template`: a chat template's file or name, instead of the model's own. `max_length`: tokens of the longest example;
    what is longer is an error, or cut at its end, or skipped, and counted; or a text is split, and all else an error.
    `ctx_size`: what it can be raised to.
    """

    tokenizer: Tokenizer
    max_length: int
    template: str | None = None
    too_long: TooLong = "error"
    ctx_size: int | None = None
    cut: int = 0
    skipped: int = 0
    unused: Counter[str] = field(default_factory=Counter)  # keys that a template does not write: of how many texts
    through: str | None = None  # the chat template that a record went through: what the result is to be asked through
    heard: Callable[[int], None] = lambda characters: None  # of long texts, when so many more have been encoded

    def __post_init__(self) -> None:
        if self.too_long not in get_args(TooLong):
            raise BadRequest(f"too_long must be one of {', '.join(get_args(TooLong))}, not {self.too_long!r}")
        if not self.tokenizer.eos_ids:
            raise NoTokenizer("this tokenizer has no token that ends a text; without one no answer learns to stop")
        # One that was asked for is looked at even where no record needs it; a model may have none of its own.
        self._chat = chat.choose(self.tokenizer, self.template) if self.template is not None else None

    @cached_property
    def talks(self) -> bool:
        """Whether there is a chat template."""
        try:
            self._chat = self._chat or chat.choose(self.tokenizer)
        except Unsupported:
            return False
        return True

    def text(self, text: str) -> Example:
        """All of it is learned."""
        ids = self._ended(self.tokenizer.encode(text))
        return _example(ids, [(0, len(ids))])

    def parts(self, text: Example) -> list[Example]:
        """A text, or where it is too long, and is to be split, its pieces: each begins as the text does, or else with
        the token before it, so that all but the first is learned, and once."""
        ids, most = text.ids, self.max_length
        if self.too_long != "split" or len(ids) <= most or most < 2:
            return [text]
        begins = ids[0] == self.tokenizer.bos_id
        found = []
        for at in range(1, len(ids), most - 1):
            first = ids[:1] if begins else ids[at - 1 : at]
            piece = np.concatenate([first, ids[at : at + most - 1]])
            found.append(Example(piece, np.arange(len(piece)) > 0))
        return found

    def answer(self, prompt: str, answer: str) -> Example:
        alone = self.tokenizer.encode(prompt)
        ids = self._ended(self.tokenizer.encode(prompt + answer))
        return _example(ids, [(_common(alone, ids), len(ids))])

    def instruction(self, prompt: str, answer: str) -> Example:
        """The same, of Alpaca's prompts."""
        begins = self.tokenizer.bos_id is not None and self.tokenizer.encode("a")[0] == self.tokenizer.bos_id
        self.through = self.through or chat.ALPACA.replace("{bos}", "{{- bos_token -}}" if begins else "")
        return self.answer(prompt, answer)

    def conversation(self, values: Mapping[str, Any]) -> Example:
        """Of a record's "messages", "tools" and "first". Learned: what the template makes of the assistant's messages,
        from number `first` on and unless their weight is 0, and ends of turns. What the template does not write is
        refused where it is a message, and counted as unused where it is anything else."""
        self._chat = self._chat or chat.choose(self.tokenizer)
        messages = [{key: it for key, it in raw.items() if key != "weight"} for raw in values["messages"]]
        _check_roles(messages, self._chat)
        given = {"tools": values["tools"]} if "tools" in values else {}
        rendered = Rendered(self._chat, messages, given)
        self.through = self._chat.source
        self.unused.update(rendered.unread())
        ids = self.tokenizer.encode(rendered.text, bos=False)
        spans = []
        for number, message in enumerate(values["messages"]):
            if number < values.get("first", 0) or not learned(message):
                rendered.check(number)
                continue
            begin, end = (self._tokens(rendered.text[:at], ids) for at in rendered.answer(number))
            spans.append((begin, self._end_of_turn(ids, begin, end)))
        return _example(ids, spans)

    def preference(self, values: Mapping[str, Any]) -> list[Pair]:
        """Of a record's prompt and its two answers, texts or messages; none where `fitted` leaves none."""
        prompt, answers = values["prompt"], (values["chosen"], values["rejected"])
        if isinstance(prompt, str):
            both = [self.answer(prompt, answer) for answer in answers]
        else:
            talks = [{**values, "messages": [*prompt, *answer], "first": len(prompt)} for answer in answers]
            both = [self.conversation(talk) for talk in talks]
        if _alike(both):
            raise BadRecord("chosen and rejected are the same tokens: nothing is preferred")
        fitted = self.fitted(*both)
        return [Pair(fitted[0], fitted[1])] if fitted else []

    def prompt(self, values: Mapping[str, Any], generations: int, room: int) -> list[Prompt]:
        """Of a record's "prompt", a text or messages, up to where the model goes on; nothing where it is to be skipped
        because it leaves no room for so many tokens. All of the record comes along, and has to be what JSON has."""
        said, given = values["prompt"], {"tools": values["tools"]} if "tools" in values else {}
        if isinstance(said, str):
            ids = self.tokenizer.encode(said)
        else:
            self._chat = self._chat or chat.choose(self.tokenizer)
            _check_roles(said, self._chat)
            self.through = self._chat.source
            ids = self.tokenizer.encode(self._chat.render(said, **given), bos=False)
        if not ids:
            raise BadRecord("its prompt is empty, and this model has no token to begin a text with")
        if len(ids) + room > self.max_length:
            if self.too_long in ("error", "split"):
                most = f"takes {len(ids)} tokens, and beside {room} new ones {self.max_length - room} is the most"
                raise Overlong(f"{most}; write fewer, or say with --too-long that such records are to be skipped")
            self.skipped += 1
            return []
        try:
            json.dumps(values)
        except (TypeError, ValueError) as error:
            raise BadRecord(f"holds what JSON does not have: {error}") from None
        return [Prompt(np.array(ids, np.int32), said, values, generations, room)]

    def fitted(self, *examples: Example) -> list[Example]:
        """Those of one record, none longer than may be; no one where the record is to be skipped for its length, or a
        cut leaves nothing to learn of one, or two the same."""
        fitting = [fitted for example in examples if (fitted := self._fit(example))]
        if len(fitting) < len(examples) or _alike(fitting):
            self.skipped += 1
            return []
        self.cut += any(len(fitted) < len(example) for fitted, example in zip(fitting, examples, strict=True))
        return fitting

    def _ended(self, ids: list[int]) -> list[int]:
        """With a token that ends a text behind it, unless one is there."""
        return ids if ids and ids[-1] in self.tokenizer.eos_ids else [*ids, self.tokenizer.eos_ids[0]]

    def _tokens(self, beginning: str, ids: Sequence[int]) -> int:
        """How many of `ids` the beginning of their text is."""
        return _common(self.tokenizer.encode(beginning, bos=False), ids)

    def _end_of_turn(self, ids: Sequence[int], begin: int, end: int) -> int:
        """Templates put a line's end behind the token at which generation stops: nobody will be asked for it."""
        last = next((at for at in reversed(range(begin, end)) if ids[at] in self.tokenizer.eos_ids), None)
        return end if last is None else last + 1

    def _fit(self, example: Example) -> Example | None:
        if (length := len(example)) > self.max_length:
            if self.too_long in ("error", "split"):
                ways = "say with --too-long that such records are to be cut or skipped, or texts split"
                if self.ctx_size is not None and length > self.ctx_size:
                    raise Overlong(f"takes {length} tokens, and the model's context has {self.ctx_size}; {ways}")
                most = f"{self.max_length} is the most; raise --max-length, or {ways}"
                raise Overlong(f"takes {length} tokens, and {most}")
            cut = Example(example.ids[: self.max_length], example.loss_mask[: self.max_length])
            gone = self.too_long == "skip" or not cut.targets  # the cut would take all of the answer
            return None if gone else cut
        if not example.targets:
            raise BadRecord("has no token to be learned")
        return example


def _example(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Example:
    loss_mask = np.zeros(len(ids), np.bool_)
    for begin, end in spans:
        loss_mask[begin:end] = True
    loss_mask[:1] = False  # nothing foretells it
    return Example(np.array(ids, np.int32), loss_mask)


def _check_roles(messages: Sequence[Mapping[str, Any]], template: chat.ChatTemplate) -> None:
    """A template that writes any role would have made one of a slip of the pen, too."""
    for number, message in enumerate(messages):
        role = message["role"]
        if role not in _ROLES and not re.search(rf"""['"]{re.escape(role)}['"]""", template.source):
            problem = f"message {number} is of {short(role)}, a role that the chat template does not name"
            raise BadRecord(f"{problem}; give a template that does: --chat-template FILE")


def _alike(examples: Sequence[Example]) -> bool:
    """Whether these are two, and one could not be told from the other."""
    return len(examples) == 2 and np.array_equal(examples[0].ids, examples[1].ids)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the beginnings of two texts share."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
