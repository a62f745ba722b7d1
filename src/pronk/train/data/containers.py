"""Containers: the files and datasets that records come in, one raw record after the other.

A file of JSON lines, of one JSON list, of comma-separated values or of Parquet, told apart by content; a text, in a
file whose name ends in .txt; a folder, whose files are texts; or a dataset on the Hugging Face hub.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from pronk.errors import BadFile, BadRequest, ModelNotFound, PronkError, short
from pronk.strict_json import half_character
from pronk.train.data import plain


class BadRecord(ValueError):
    """What is wrong with a record, without where it stands."""


_PIECE = 1 << 18  # bytes
_ROWS = 1024  # of Parquet, at a time

_COLUMNS = re.compile(rb'"?[\w.-]+"?(,"?[\w.-]+"?)+\r?\n')
_RECORDS = re.compile(rb'\{\s*"|\[\s*\{')  # what JSON of records begins with, whatever the file is called

# What compressed files begin with.
_PACKED = {b"\x1f\x8b": "gzip", b"PK\x03\x04": "zip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


Counted = Callable[[int], None]  # is told how many records there are, or lines, where that is soon known


def read(source: str | Path, counted: Counted = lambda total: None) -> Iterator[tuple[str, Any]]:
    """Where each record stands ("line 12", "record 3"), and what stands there: a BadRecord where one cannot be read.

    Of JSON lines, CSV, Parquet, a folder and a dataset no more than some are held at a time; of a JSON list all.
    Raises BadFile, ModelNotFound, BadRequest for what the hub refuses, and PronkError where a library is missing.
    """
    path = Path(source).expanduser()
    try:
        if not path.exists():
            yield from _dataset(str(source), counted)
            return
        if path.is_dir():
            yield from _folder(path, counted)
            return
        if not path.is_file():
            raise BadFile(path, "is a pipe or a device, and it is read more than once; write it to a file first")
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
            while not start and (more := file.read(4096)):
                start = more.lstrip()
        if packed := next((name for begin, name in _PACKED.items() if start.startswith(begin)), None):
            raise BadFile(path, f"is compressed ({packed}); unpack it first")
        if start and plain.is_text(path) and not (_RECORDS.match(start) or _is_table(start)):
            counted(1)
            yield "the text", {"text": plain.read(path)}
        elif start[:4] == b"PAR1":
            yield from _parquet(path, counted)
        elif start[:1] == b"[":
            yield from _json(path, counted)
        elif start[:1] == b"{":
            yield from _lines(path, counted)
        elif not start:
            raise BadFile(path, "is empty")
        else:
            yield from _csv(path, counted)
    except OSError as error:
        raise BadFile(path, f"cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:  # of a library's
        raise BadFile(path, "holds text that is not UTF-8; convert it first") from None


def _is_table(start: bytes) -> bool:
    """Whether it is one whatever the file is called: of Parquet, or its first line is words between commas alone, which
    no text begins with."""
    return start[:4] == b"PAR1" or bool(_COLUMNS.match(start))


def _folder(path: Path, counted: Counted) -> Iterator[tuple[str, Any]]:
    """A record of each file that is not empty."""
    there, files = False, plain.files(path)
    counted(len(files))
    for one in files:
        text: Any
        try:
            text = plain.read(one)
        except BadFile as error:
            text = BadRecord(f"{error.problem} (a folder is read as texts)")
        if isinstance(text, BadRecord) or text.strip():
            there = True
            yield one.relative_to(path).as_posix(), text if isinstance(text, BadRecord) else {"text": text}
    if not there:
        raise BadFile(path, "is a folder without texts; give that of texts, or a file: JSON lines, JSON, CSV, Parquet")


@contextmanager
def _text(path: Path, newline: str | None = None) -> Iterator[TextIO]:
    """The file, to be read; BadFile names the line that is not UTF-8."""
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        try:
            yield file
        except UnicodeDecodeError:
            raise BadFile(path, "not UTF-8 text; convert it first", field=_not_text(path)) from None


def _not_text(path: Path) -> str | None:
    """Where: the error itself counts from the beginning of the piece that was decoded."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                return f"line {number}, byte {error.start}"
    return None


def _count_lines(path: Path) -> int:
    lines, last = 0, b"\n"
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            lines, last = lines + piece.count(b"\n"), piece[-1:]
    return lines + (last != b"\n")


def _lines(path: Path, counted: Counted) -> Iterator[tuple[str, Any]]:
    counted(_count_lines(path))
    with _text(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                if line.strip() == "{" and (problem := _is_one_object(path)):
                    raise BadFile(path, problem)
                try:
                    record = json.loads(line, object_pairs_hook=_members)
                    if problem := half_character(record, line):
                        record = BadRecord(f"holds {problem}")
                except (ValueError, RecursionError) as error:
                    record = BadRecord(f"is not JSON ({error}); each line must be a record of its own")
                yield f"line {number}", record


def _is_one_object(path: Path) -> str | None:
    """What to say of a file in which one object goes over several lines; None where it is none."""
    with _text(path) as file, suppress(ValueError, RecursionError):
        found = json.load(file)
        return f"is one JSON object (with the keys {short(list(found))}), not a record a line{listed(found)}"
    return None


def listed(found: Mapping[str, Any]) -> str:
    """The way out where records are what one key of an object holds."""
    lists = [key for key, value in found.items() if isinstance(value, list) and value and isinstance(value[0], dict)]
    return f"; if records are what {short(lists[0])} lists, give a file of that list alone" if lists else ""


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any] | BadRecord:
    """An object. Of two members of a name one would be lost."""
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    (twice, _), *_ = Counter(key for key, _ in pairs).most_common(1)
    return BadRecord(f"has the key {short(twice)} more than once")


def _json(path: Path, counted: Counted) -> Iterator[tuple[str, Any]]:
    with _text(path) as file:
        text = file.read()
    try:
        records = json.loads(text, object_pairs_hook=_members)
        if half_character(records, text):
            records = [BadRecord(f"holds {why}") if (why := half_character(each)) else each for each in records]
    except (ValueError, RecursionError) as error:
        with suppress(ValueError, RecursionError):
            first = json.loads(text.partition("\n")[0])
            raise BadFile(path, f"has a list on each line, as {short(first)}; a record is an object") from None
        raise BadFile(path, f"is not JSON: {error}") from None
    counted(len(records))
    yield from ((f"record {number}", record) for number, record in enumerate(records, 1))


def _csv(path: Path, counted: Counted) -> Iterator[tuple[str, Any]]:
    counted(_count_lines(path))
    with _text(path, newline="") as file:
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


def _parquet(path: Path, counted: Counted) -> Iterator[tuple[str, Any]]:
    try:
        arrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise PronkError(f"{path}: reading Parquet needs pyarrow; install it with: pip install 'pronk[data]'") from None
    number = 0
    try:
        file = parquet.ParquetFile(path)
        _check_columns(path, file.schema_arrow.names)
        counted(file.metadata.num_rows)
        for batch in file.iter_batches(_ROWS):
            for record in batch.to_pylist():
                number += 1
                yield f"record {number}", record
    except arrow.ArrowException as error:
        raise BadFile(path, f"broken Parquet: {error}", field=f"after record {number}") from None


# A name that ends so and leads to no file is mistyped.
_FILES = frozenset(".jsonl .ndjson .json .csv .tsv .parquet .txt .gz .zip".split())


def _dataset(name: str, counted: Counted) -> Iterator[tuple[str, Any]]:
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
    counted(len(loaded))
    yield from ((f"record {number}", record) for number, record in enumerate(loaded, 1))
