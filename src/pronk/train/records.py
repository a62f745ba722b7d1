"""Records: what training data is made of, and where each of them stands.

A file of JSON lines, of one JSON list, of comma-separated values or of Parquet, told apart by content; or a dataset on
the Hugging Face hub. What a record is, is told by its keys, which are those of TRL and of Stanford's Alpaca:

    {"messages": [{"role": ..., "content": ...}, ...]}
    {"prompt": ..., "completion": ...}
    {"instruction": ..., "input": ... (or absent), "output": ...}
    {"prompt": ..., "chosen": ..., "rejected": ...}     texts, or messages
    {"chosen": ..., "rejected": ...}                    messages, which begin with the same
    {"text": ...}

A bad record is an error that names its line, or is skipped and counted where that was asked for.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pronk.errors import BadFile, BadRequest, ModelNotFound, PronkError, short

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


class BadRecord(ValueError):
    """What is wrong with a record, without where it stands."""


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


def read(source: str | Path, *, skip_bad: bool = False, limit: int | None = None) -> Records:
    """`limit`: take the first so many. Raises BadFile, ModelNotFound, and PronkError where a library is missing."""
    records = Records(str(source))
    for where, raw in _raw(source):
        if limit is not None and len(records.items) >= limit:
            break
        try:
            record = parse(raw, where)
        except BadRecord as error:
            if not skip_bad:
                raise BadFile(source, str(error), field=where) from None
            records.skipped.append(f"{where}: {error}")
            continue
        known = {key for keys in _KEYS[record.kind] for key in keys}
        records.unused.update(key for key in raw if key not in known)
        records.items.append(record)
    if not records.items:
        raise nothing_good(records) if records.skipped else BadFile(source, "it holds no records")
    if len({record.kind == "preference" for record in records.items}) > 1:
        raise BadFile(source, "mixes preferences (chosen, rejected) with records of other kinds; split it")
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
        raise BadRecord(f"has the keys {short(sorted(map(str, raw)))}, which make no record; {_ways()} do")
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


def _ways() -> str:
    return "; ".join(" ".join(["+".join(needed), *(f"(+{key})" for key in may)]) for needed, may in _KEYS.values())


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


# -- containers: where one cannot read a record, a BadRecord stands in its place --

# What compressed files begin with.
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


def _raw(source: str | Path) -> Iterator[tuple[str, Any]]:
    """Where each record stands, and what stands there."""
    path = Path(source).expanduser()
    try:
        if not path.exists():
            yield from _dataset(str(source))
            return
        if path.is_dir():
            raise BadFile(path, "is a folder; give the path of a file: JSON lines, JSON, CSV or Parquet")
        if not path.is_file():
            raise BadFile(path, "is a pipe or a device, and it is read more than once; write it to a file first")
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
            while not start and (more := file.read(4096)):
                start = more.lstrip()
        if packed := next((name for begin, name in _PACKED.items() if start.startswith(begin)), None):
            raise BadFile(path, f"is compressed ({packed}); unpack it first")
        if start[:4] == b"PAR1":
            yield from _parquet(path)
        elif start[:1] == b"[":
            yield from _json(path)
        elif start[:1] == b"{":
            yield from _lines(path)
        elif not start:
            raise BadFile(path, "is empty")
        else:
            yield from _csv(path)
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadFile(path, f"not UTF-8 text (byte {error.start}); convert it first") from None


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line, object_pairs_hook=_members)
                except (ValueError, RecursionError) as error:
                    record = BadRecord(f"is not JSON ({error}); each line must be a record of its own")
                yield f"line {number}", record


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRecord:
    """An object. Of two members of a name one would be lost."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
    return BadRecord(f"has the key {short(twice)} more than once")


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        records = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_members)
    except (ValueError, RecursionError) as error:
        raise BadFile(path, f"is not JSON: {error}") from None
    yield from ((f"record {number}", record) for number, record in enumerate(records, 1))


def _csv(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        delimiter = "\t" if "\t" in file.readline() else ","
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        limit = csv.field_size_limit(sys.maxsize >> 32)  # characters of a text; 131,072 else
        try:
            _check_columns(path, reader.fieldnames or ())
            for record in reader:
                whole = None not in record and None not in record.values()
                problem = f"has another number of fields than the header's {len(reader.fieldnames or ())}"
                yield f"line {reader.line_num}", record if whole else BadRecord(problem)
        except csv.Error as error:
            problem = f"is neither JSON, Parquet nor well-formed CSV: {error}"
            raise BadFile(path, problem, field=f"line {reader.reader.line_num}") from None
        finally:
            csv.field_size_limit(limit)


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Of two columns of a name one would be lost."""
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise BadFile(path, f"has the column {short(twice[0])} more than once; rename or drop one")


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise PronkError(f"{path}: reading Parquet needs pyarrow; install it with: pip install 'pronk[data]'") from None
    number = 0
    try:
        file = parquet.ParquetFile(path)
        _check_columns(path, file.schema_arrow.names)
        for batch in file.iter_batches():
            for record in batch.to_pylist():
                number += 1
                yield f"record {number}", record
    except arrow.ArrowException as error:
        raise BadFile(path, f"broken Parquet: {error}", field=f"after record {number}") from None


# A name that ends so and leads to no file is mistyped.
_FILES = frozenset(".jsonl .ndjson .json .csv .tsv .parquet .txt .gz .zip".split())


def _dataset(name: str) -> Iterator[tuple[str, Any]]:
    """`owner/name`, or `owner/name:split`; the split is "train" unless said otherwise."""
    name, _, split = name.partition(":")
    of_hub = name.count("/") == 1 and not name.startswith((".", "/", "~")) and all(name.split("/"))
    if not of_hub or Path(name).suffix.lower() in _FILES:
        raise ModelNotFound(f"{name}: no such file, and no dataset's name either (owner/name, or owner/name:split)")
    try:
        datasets = import_module("datasets")
    except ModuleNotFoundError:
        raise PronkError(
            f"{name}: no such file; for a dataset of that name on the hub install: pip install 'pronk[data]'"
        ) from None
    try:
        loaded = datasets.load_dataset(name, split=split or "train")
    except Exception as error:  # its own kinds, huggingface_hub's, the network's
        raise BadRequest(f"dataset {name}: {' '.join(str(error).split()) or type(error).__name__}") from None
    yield from ((f"record {number}", record) for number, record in enumerate(loaded, 1))
