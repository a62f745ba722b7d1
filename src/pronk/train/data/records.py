"""Records: what training data is made of, and where each of them stands.

What a record is, is told by its keys, which are those of TRL and of Stanford's Alpaca:

    {"messages": [{"role": ..., "content": ...}, ...]}
    {"prompt": ..., "completion": ...}
    {"instruction": ..., "input": ... (or absent), "output": ...}
    {"prompt": ..., "chosen": ..., "rejected": ...}     texts, or messages
    {"chosen": ..., "rejected": ...}                    messages, which begin with the same
    {"text": ...}

A bad record is an error that names its line, or is skipped and counted where that was asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pronk.errors import BadFile, short
from pronk.train.data import containers
from pronk.train.data.containers import BadRecord

Kind = Literal["preference", "messages", "completion", "instruction", "text"]

# The keys that make a kind, and those it may have; the first kind that fits is it: Alpaca on the hub has "text", too.
_KEYS: dict[Kind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("chosen", "rejected"), ("prompt",)),
    "messages": (("messages",), ()),
    "completion": (("prompt", "completion"), ()),
    "instruction": (("instruction", "output"), ("input",)),
    "text": (("text",), ()),
}
_ANSWERS = {"completion": ("completion",), "instruction": ("output",), "text": ("text",)}
_PREFERENCE = ("chosen", "rejected")


@dataclass(frozen=True)
class Record:
    kind: Kind
    values: Mapping[str, Any]  # texts, or lists of messages
    where: str  # "line 12", "record 3"


@dataclass
class Records:
    """All records of one source, and an account of what is not among them."""

    source: str
    items: list[Record] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # "line 12: ...", of bad ones, where skipping was asked for
    unused: Counter[str] = field(default_factory=Counter)  # keys that no record of its kind has, and how often

    def problem(self, record: Record, problem: str) -> BadFile:
        return BadFile(self.source, problem, field=record.where)


def read(source: str | Path, kinds: Sequence[Kind] = tuple(_KEYS), *, skip_bad: bool = False) -> Records:
    """Of these kinds. Raises BadFile, ModelNotFound, and PronkError where a library is missing."""
    records = Records(str(source))
    for where, raw in containers.read(source):
        try:
            record = parse(raw, where)
        except BadRecord as error:
            if not skip_bad:
                raise BadFile(source, str(error), field=where) from None
            records.skipped.append(f"{where}: {error}")
            continue
        if record.kind not in kinds:
            verb = "pronk dpo" if record.kind == "preference" else "pronk finetune"
            problem = f"{'+'.join(_KEYS[record.kind][0])} is what {verb} learns from; here it is {_ways(kinds)}"
            raise records.problem(record, problem)
        known = {key for keys in _KEYS[record.kind] for key in keys}
        records.unused.update(key for key in raw if key not in known)
        records.items.append(record)
    if not records.items:
        raise nothing_good(records) if records.skipped else BadFile(source, "it holds no records")
    return records


def nothing_good(records: Records) -> BadFile:
    problem = f"all of its {len(records.skipped)} records are bad; the first: {records.skipped[0]}"
    return BadFile(records.source, problem)


def parse(raw: object, where: str) -> Record:
    """Raises BadRecord."""
    if isinstance(raw, BadRecord):
        raise raw
    if not isinstance(raw, Mapping):
        raise BadRecord(f"must be an object, not {short(raw)}")
    kind = next((kind for kind, (needed, _) in _KEYS.items() if all(key in raw for key in needed)), None)
    if kind is None:
        raise BadRecord(f"has the keys {short(sorted(map(str, raw)))}, which make no record; these do: {_ways(_KEYS)}")
    needed, optional = _KEYS[kind]
    values = {key: raw[key] for key in (*needed, *optional) if raw.get(key) is not None}
    for key in needed:
        if key not in values:
            raise BadRecord(f"{key} is null")
    for key, value in values.items():
        talk = kind == "messages" or (kind == "preference" and not isinstance(value, str))
        _check_messages(key, value) if talk else _check_text(key, value)
    for key in _ANSWERS.get(kind, ()):
        if not values[key].strip():
            raise BadRecord(f"has no answer: {key} is empty")
    if kind == "messages" and not any(message["role"] == "assistant" for message in values["messages"]):
        raise BadRecord("has no answer: none of the messages is the assistant's")
    if kind == "preference":
        values = _with_prompt(values)
        _check_preference(values)
    return Record(kind, values, where)


def _ways(kinds: Iterable[Kind]) -> str:
    each = (_KEYS[kind] for kind in kinds)
    return "; ".join(" ".join(["+".join(needed), *(f"(+{key})" for key in may)]) for needed, may in each)


def _check_text(key: str, value: object) -> None:
    if not isinstance(value, str):
        raise BadRecord(f"{key} must be text, not {short(value)}")


def _check_messages(key: str, value: object) -> None:
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{key} must be a list of messages, not {short(value)}")
    for number, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRecord(f'{key}: message {number} must be {{"role": ..., "content": ...}}, not {short(message)}')
        if not isinstance(message.get("content"), str):
            raise BadRecord(f"{key}: the content of message {number} must be text, not {short(message.get('content'))}")
        if message["role"] == "assistant" and not message["content"].strip():
            raise BadRecord(f"has no answer: message {number} of {key} is the assistant's and empty")


def _with_prompt(values: dict[str, Any]) -> dict[str, Any]:
    """Of two conversations the prompt is what both begin with, as in TRL; it may stand beside them as text, too."""
    conversations = [values[key] for key in _PREFERENCE]
    if any(isinstance(value, str) for value in conversations):
        if "prompt" not in values:
            raise BadRecord("has no prompt, and chosen and rejected are not conversations that begin with one")
        return values
    chosen, rejected = conversations
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    begun = chosen[:shared]
    if "prompt" in values and values["prompt"] not in [message["content"] for message in begun]:
        return values
    if chosen == rejected:
        raise BadRecord("chosen and rejected are the same: nothing is preferred")
    if shared is None:
        raise BadRecord(f"has no answer: {'chosen' if len(chosen) < len(rejected) else 'rejected'} is only a beginning")
    if not begun:
        raise BadRecord("has no prompt: chosen and rejected begin with different messages")
    return {"prompt": begun, "chosen": chosen[shared:], "rejected": rejected[shared:]}


def _check_preference(values: Mapping[str, Any]) -> None:
    prompt_talks = not isinstance(values["prompt"], str)
    for key in _PREFERENCE:
        if isinstance(values[key], str) is prompt_talks:
            raise BadRecord(f"prompt, chosen and rejected must be all texts or all messages; {key} is not as prompt is")
        if isinstance(values[key], str) and not values[key].strip():
            raise BadRecord(f"has no answer: {key} is empty")
    if values["chosen"] == values["rejected"]:
        raise BadRecord("chosen and rejected are the same: nothing is preferred")
