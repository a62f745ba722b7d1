"""Examples: records as token ids, and which of the tokens are to be learned.

Only answers are learned, unless asked otherwise: what a user says is there to be read. A text is encoded whole, and
the prompt's part of it is what it shares with the prompt encoded alone, which is what the model sees when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from pronk.errors import BadRequest, NoTokenizer
from pronk.tokenizer import chat
from pronk.train.data.containers import BadRecord
from pronk.train.data.records import Record

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer

TooLong = Literal["error", "cut", "skip"]

# Stanford Alpaca's two, to the letter: github.com/tatsu-lab/stanford_alpaca, train.py.
ALPACA = (
    "Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


class Overlong(BadRecord):
    """A record that takes more tokens than an example may have."""


@dataclass(frozen=True)
class Example:
    ids: NDArray[np.int32]  # [S]
    learned: NDArray[np.bool_]  # [S]: the loss counts how well token i is foretold; never true of the first

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        return int(self.learned.sum())

    @property
    def answers(self) -> dict[str, Example]:
        """By name: as of a Pair, of which there is more to tell apart."""
        return {"data": self}


@dataclass(frozen=True, eq=False)
class Pair:
    """One prompt and two answers to it, each an example with the prompt. Compared by identity."""

    chosen: Example
    rejected: Example

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)

    @property
    def targets(self) -> int:
        return self.chosen.targets + self.rejected.targets

    @property
    def answers(self) -> dict[str, Example]:
        return {"chosen": self.chosen, "rejected": self.rejected}


@dataclass
class Encoder:
    """Makes examples of records.

    `template`: a chat template's file or name, instead of the model's own. `max_length`: tokens of the longest example;
    what is longer is an error, or cut at its end, or skipped, and counted. `ctx_size`: what it can be raised to.
    `chat_instructions`: instruction records go through the chat template as well, instead of Alpaca's.
    """

    tokenizer: Tokenizer
    max_length: int
    template: str | None = None
    train_on_prompt: bool = False
    too_long: TooLong = "error"
    chat_instructions: bool = False
    ctx_size: int | None = None
    cut: int = 0
    skipped: int = 0

    def __post_init__(self) -> None:
        if self.too_long not in get_args(TooLong):
            raise BadRequest(f"too_long must be one of {', '.join(get_args(TooLong))}, not {self.too_long!r}")
        if not self.tokenizer.eos_ids:
            raise NoTokenizer("this tokenizer has no token that ends a text; without one no answer learns to stop")
        # One that was asked for is looked at even where no record needs it; a model may have none of its own.
        self._chat = chat.choose(self.tokenizer, self.template) if self.template is not None else None

    def encode(self, record: Record) -> Example | Pair | None:
        """None where it is too long and to be skipped, or the cut leaves nothing to learn."""
        if record.kind != "preference":
            whole = [self._single(record)]
        else:
            whole = [self._preference(record.values, key) for key in ("chosen", "rejected")]
            if _alike(whole):
                raise BadRecord("chosen and rejected are the same tokens: nothing is preferred")
        fitting = [fitted for example in whole if (fitted := self._fit(example))]
        if len(fitting) < len(whole) or _alike(fitting):
            self.skipped += 1
            return None
        self.cut += any(len(fitted) < len(example) for fitted, example in zip(fitting, whole, strict=True))
        return Pair(*fitting) if record.kind == "preference" else fitting[0]

    def _single(self, record: Record) -> Example:
        values = record.values
        if record.kind == "text":
            ids = [*self.tokenizer.encode(values["text"]), self.tokenizer.eos_ids[0]]
            return self._example(ids, [(0, len(ids))])
        if record.kind == "messages":
            return self._conversation(values["messages"])
        if record.kind == "completion":
            return self._answer(values["prompt"], values["completion"])
        if self.chat_instructions:
            question = "\n\n".join(part for part in (values["instruction"], values.get("input", "")) if part.strip())
            return self._conversation([_message("user", question), _message("assistant", values["output"])])
        return self._answer(alpaca_prompt(values), values["output"])

    def _preference(self, values: Mapping[str, Any], key: str) -> Example:
        if isinstance(values["prompt"], str):
            return self._answer(values["prompt"], values[key])
        before = len(values["prompt"])
        return self._conversation([*values["prompt"], *values[key]], first=before)

    def _answer(self, prompt: str, answer: str) -> Example:
        alone = self.tokenizer.encode(prompt)
        ids = [*self.tokenizer.encode(prompt + answer), self.tokenizer.eos_ids[0]]
        return self._example(ids, [(_common(alone, ids), len(ids))])

    def _conversation(self, messages: Sequence[Mapping[str, Any]], first: int = 0) -> Example:
        """Learned: what the template makes of the assistant's messages, from number `first` on, and ends of turns."""
        self._chat = self._chat or chat.choose(self.tokenizer)
        ids = self._rendered(messages)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or number < first:
                continue
            begin = _common(self._rendered(messages[:number], prompt=True), ids)
            end = _common(self._rendered(messages[: number + 1]), ids)
            if end <= begin:
                raise BadRecord(f"the chat template leaves nothing of message {number}, the assistant's, to be learned")
            spans.append((begin, self._end_of_turn(ids, begin, end)))
        return self._example(ids, spans)

    def _rendered(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> list[int]:
        assert self._chat
        text = self._chat.render(messages, add_generation_prompt=prompt)
        return self.tokenizer.encode(text, bos=False)

    def _end_of_turn(self, ids: Sequence[int], begin: int, end: int) -> int:
        """Templates put a line's end behind the token at which generation stops: nobody will be asked for it."""
        last = next((at for at in reversed(range(begin, end)) if ids[at] in self.tokenizer.eos_ids), None)
        return end if last is None else last + 1

    def _example(self, ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Example:
        learned = np.full(len(ids), self.train_on_prompt)
        for begin, end in spans:
            learned[begin:end] = True
        learned[:1] = False
        return Example(np.array(ids, np.int32), learned)

    def _fit(self, example: Example) -> Example | None:
        if len(example) > self.max_length:
            if self.too_long == "error":
                raise Overlong(self._too_long(len(example)))
            cut = Example(example.ids[: self.max_length], example.learned[: self.max_length])
            gone = self.too_long == "skip" or not cut.targets  # the cut would take all of the answer
            return None if gone else cut
        if not example.targets:
            raise BadRecord("has no token to be learned")
        return example

    def _too_long(self, length: int) -> str:
        ways = "say with --too-long that such records are to be cut or skipped"
        if self.ctx_size is not None and length > self.ctx_size:
            return f"takes {length} tokens, and the model's context has {self.ctx_size}; {ways}"
        return f"takes {length} tokens, and {self.max_length} is the most; raise --max-length, or {ways}"


def alpaca_prompt(values: Mapping[str, str]) -> str:
    """The prompt for an instruction record: one template with an input, one without."""
    with_input = bool(values.get("input", "").strip())
    return (ALPACA_WITH_INPUT if with_input else ALPACA).format_map(values)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _alike(examples: Sequence[Example]) -> bool:
    """Whether these are two, and one could not be told from the other."""
    return len(examples) == 2 and np.array_equal(examples[0].ids, examples[1].ids)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the beginnings of two texts share."""
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
