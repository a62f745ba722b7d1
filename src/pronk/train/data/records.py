"""Records: what training data is made of, and where each of them stands. forms.py knows how they may be written.

A bad record is an error that names its line, or is skipped and counted where that was asked for. All of them are told
at once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pronk.errors import BadFile, BadRequest, one_line, short
from pronk.train.data import containers, forms
from pronk.train.data.containers import BadRecord
from pronk.train.data.forms import KINDS, Kind

_LEARNS = {"preference": "pronk dpo, kto and reward learn", "judged": "pronk kto learns"}
_TOLD = 10  # bad records
_MESSAGE = re.compile(r"\bmessage \d+")


@dataclass(frozen=True)
class Record:
    kind: Kind
    values: Mapping[str, Any]  # texts, lists of messages; see forms.values_of
    where: str  # "line 12", "record 3"
    unread: tuple[str, ...] = ()  # keys that no record of its form has


@dataclass
class Records:
    """All records of one source, and an account of what is not among them."""

    source: str
    items: list[Record] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)  # of bad ones where, and what is wrong
    unused: Counter[str] = field(default_factory=Counter)  # keys that no record of its form has: in how many
    met: set[str] = field(default_factory=set)  # keys that were renamed
    total: int = 0  # records that there are, good or bad, as far as that is known before they are read
    good: int = 0  # that were read

    def problem(self, record: Record, problem: str) -> BadFile:
        return BadFile(self.source, problem, field=record.where)

    def refused(self, bad: Sequence[tuple[str, str]]) -> BadFile:
        """In one line, of those that are bad: the first ten, and how many there are."""
        (first, problem), *_ = bad
        alike: dict[str, list[tuple[str, str]]] = {}  # what is wrong with several is said once
        for one in bad:
            alike.setdefault(_MESSAGE.sub("message", one[1]), []).append(one)
        if len(alike) == 1:
            same = f"; it is the same with all {len(bad)} bad records, to {bad[-1][0]}" if len(bad) > 1 else ""
            return BadFile(self.source, one_line(problem, 450) + same, field=first)
        parts = [(_places([where for where, _ in one]), *one[0][1].partition("; ")) for one in alike.values()]
        common = len({advice for *_, advice in parts}) == 1  # said once, whole: cut short, it helps nobody
        most = max(110, 1100 // len(parts))
        told = [
            f"{where}: {one_line(what if common else what + semi + advice, most)}"
            for where, what, semi, advice in parts[:_TOLD]
        ]
        rest = sum(map(len, [*alike.values()][_TOLD:]))
        more = [f"and {rest} more"] if rest else []
        once = [one_line(parts[0][-1], 600)] if common and parts[0][-1] else []
        text = "; ".join([*told, *more, *once])
        return BadFile(self.source, text, field=f"{len(bad)} bad records", most=1850)


def _places(where: Sequence[str]) -> str:
    return where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more, to {where[-1]}"


def read(
    source: str | Path,
    kinds: Sequence[Kind] = KINDS,
    *,
    skip_bad: bool = False,
    fields: Iterable[str] = (),
) -> Records:
    """Of these kinds. `fields`: what keys are to be called ("answer=output"), or which are left out ("id=").

    Raises BadFile, ModelNotFound, and PronkError where a library is missing.
    """
    records = Records(str(source))
    records.items.extend(stream(records, kinds, fields))
    check(records, skip_bad=skip_bad)
    return records


def stream(records: Records, kinds: Sequence[Kind] = KINDS, fields: Iterable[str] = ()) -> Iterator[Record]:
    """The good ones of its source, one after another, none of which is kept; the account is of all that were read.

    Raises BadFile, ModelNotFound, and PronkError where a library is missing.
    """
    names = forms.fields(fields)

    def counted(total: int) -> None:
        records.total = total

    for where, raw in containers.read(records.source, counted):
        records.met.update(names.keys() & (raw.keys() if isinstance(raw, Mapping) else ()))
        try:
            record = parse(forms.renamed(raw, names), where, kinds)
            records.unused.update(record.unread)
        except BadRecord as error:
            records.skipped.append((where, str(error)))
            continue
        records.good += 1
        yield record


def check(records: Records, *, skip_bad: bool) -> None:
    """When all were read. Raises BadFile."""
    if records.skipped and not skip_bad:
        raise records.refused(records.skipped)
    if not records.good:
        raise nothing_good(records) if records.skipped else BadFile(records.source, "it holds no records")


def check_fields(fields: Iterable[str], read: Sequence[Records]) -> None:
    """Raises BadRequest for one that no record has."""
    if absent := forms.fields(fields).keys() - {key for records in read for key in records.met}:
        raise BadRequest(f"{read[0].source}: no record has the key {short(min(absent))}, which --fields renames")


def nothing_good(records: Records) -> BadFile:
    where, problem = records.skipped[0]
    return BadFile(records.source, f"all of its {len(records.skipped)} records are bad; the first: {where}: {problem}")


def parse(raw: object, where: str, kinds: Sequence[Kind] = KINDS) -> Record:
    """Raises BadRecord."""
    if isinstance(raw, BadRecord):
        raise raw
    if not isinstance(raw, Mapping):
        raise BadRecord(f"must be an object, not {short(raw)}")
    form = forms.form_of(raw, kinds)
    if form.kind not in kinds:
        verb = _LEARNS.get(form.kind, "pronk finetune learns")
        renamed = "" if kinds == ("text",) else " (--fields answer=output gives a key its name)"
        raise BadRecord(f"{'+'.join(form.needed)} is what {verb} from; here it is {forms.ways(kinds)}{renamed}")
    values = forms.values_of(raw, form)
    read = {*form.needed, *form.optional, *(values if form.kind == "prompt" else ())}
    unread = tuple(key for key, value in raw.items() if key not in read and value is not None)
    return Record(
        "messages" if "messages" in values and form.kind not in ("prompt", "judged") else form.kind,
        values,
        where,
        unread,
    )
