"""Encoded data: what the records of one source have become, and an account of them.

Records are read, encoded and forgotten one after another. Their examples go into a store (store.py), in memory or in
the token cache's file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from io import BytesIO
from typing import Any, BinaryIO

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, BadRequest
from pronk.tokenizer import chat
from pronk.train.data import records, store
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Overlong
from pronk.train.data.records import Record, Records
from pronk.train.data.store import Store
from pronk.train.data.token_cache import TokenCache
from pronk.train.objectives.objective import Objective

_ALPACA = chat.ALPACA.removeprefix("{bos}")


@dataclass
class Encoded:
    records: Records  # the account of those that were read
    encoder: Encoder  # with what it cut, skipped and did not read of them
    examples: Sequence[Any]
    places: Sequence[str]  # where each of them stands
    problem: BadFile | None = None  # why there is nothing to be trained on


@dataclass(frozen=True)
class Reading:
    """How sources are read."""

    objective: Objective
    encoder: Encoder
    skip_bad: bool = False
    fields: Sequence[str] = ()
    cache: TokenCache | None = None
    progress: Progress | None = None

    def of(self, source: str) -> Encoded:
        """Raises BadFile where it cannot be read, or records are bad before they are encoded."""
        if not self.objective.stored:
            found = self._begun(source)
            both = list(self._each(found))
            found.examples, found.places = [one for one, _ in both], [place for _, place in both]
            return found
        found = self._begun(source)

        def write(file: BinaryIO) -> bool:
            nonlocal found
            found = self._begun(source)
            writer = store.Writer(file, self.encoder.tokenizer.vocab_size)
            for example, place in self._each(found):
                writer.add(example, place)
            writer.end(_told(found))
            return found.problem is None

        kept = self.cache.opened_or_made(source, self._asked(), write) if self.cache else None
        if kept is None and found.problem is None:
            file = BytesIO()
            write(file)
            kept = Store(file.getbuffer())
        if kept is not None:
            _tell(found, kept.told)
            found.places, found.examples = kept.places, list(kept) if kept.by_identity else kept
        return found

    def _begun(self, source: str) -> Encoded:
        encoder = replace(self.encoder, cut=0, skipped=0, unused=Counter(), through=None)
        return Encoded(Records(source), encoder, [], [])

    def _each(self, found: Encoded) -> Iterator[tuple[Any, str]]:
        """Examples, and where they stand; a bad record is a problem of the whole, or skipped."""
        bad: list[tuple[str, str]] = []
        stream = records.stream(found.records, self.objective.kinds, self.fields)
        good = stream if self.skip_bad else (one for one in stream if not found.records.skipped)
        count = 0
        for example in each(self.objective, found.encoder, found.records, good, bad, self.skip_bad, self.progress):
            yield example
            count += 1
        records.check(found.records, skip_bad=self.skip_bad)
        found.problem = _problem(found.records, found.encoder, count, bad)

    def _asked(self) -> Mapping[str, Any]:
        """What an encoding follows from, besides the tokenizer and the data."""
        own, objective = self.encoder, self.objective
        given = own.template and chat.choose(own.tokenizer, own.template).source
        return {
            "objective": [objective.name, *objective.encoding],
            "length": [own.max_length, own.too_long],
            "template": given,
            "day": str(date.today()) if "strftime_now" in (given or own.tokenizer.chat_template or "") else None,
            "last id": own.tokenizer.last_id,
            "skip": self.skip_bad,
            "fields": list(self.fields),
        }


def each(
    objective: Objective,
    encoder: Encoder,
    found: Records,
    stream: Iterable[Record],
    bad: list[tuple[str, str]],
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Iterator[tuple[Any, str]]:
    """The examples of `stream`, and where each stands. Bad ones among them, as whose template refuses them, are put
    into `bad`, or into the account of those that are skipped; not those too long."""
    for number, record in enumerate(stream, 1):
        try:
            parts = objective.encode(record, encoder)
        except (BadRecord, BadRequest) as error:
            skips = skip_bad and not isinstance(error, Overlong)
            (found.skipped if skips else bad).append((record.where, str(error)))
            continue
        for part, example in enumerate(parts, 1):
            yield example, record.where if len(parts) == 1 else f"{record.where}, part {part}"
        if progress:
            progress("", number, max(number, found.total))


def encoded(objective: Objective, encoder: Encoder, found: Records) -> tuple[list[Any], list[str]]:
    """The examples of records that are there already, and where each stands. Raises BadFile."""
    bad: list[tuple[str, str]] = []
    both = list(each(objective, encoder, found, found.items, bad))
    if problem := _problem(found, encoder, len(both), bad):
        raise problem
    return [example for example, _ in both], [f"{found.source}: {place}" for _, place in both]


def through(encoders: Iterable[Encoder]) -> str | None:
    """The template that the result is to be asked through: a conversation's comes before Alpaca's."""
    found = [encoder.through for encoder in encoders if encoder.through is not None]
    return next((one for one in found if not one.endswith(_ALPACA)), found[0] if found else None)


def _problem(found: Records, encoder: Encoder, count: int, bad: Sequence[tuple[str, str]]) -> BadFile | None:
    if bad:
        return found.refused(bad)
    if not count and not encoder.skipped:
        return records.nothing_good(found)
    if not count:
        return BadFile(
            found.source, f"no record fits into {encoder.max_length} tokens ({encoder.skipped} were skipped)"
        )
    return None


def _told(found: Encoded) -> dict[str, Any]:
    """The account, for a store."""
    account, encoder = found.records, found.encoder
    return {
        "skipped": account.skipped,
        "unread": account.unused,
        "met": sorted(account.met),
        "good": account.good,
        "cut": encoder.cut,
        "too long": encoder.skipped,
        "unused": encoder.unused,
        "through": encoder.through,
    }


def _tell(found: Encoded, told: Mapping[str, Any]) -> None:
    """The account that a store has."""
    account, encoder = found.records, found.encoder
    account.skipped = [(where, problem) for where, problem in told["skipped"]]
    account.unused, account.met, account.good = Counter(told["unread"]), set(told["met"]), told["good"]
    encoder.cut, encoder.skipped, encoder.unused = told["cut"], told["too long"], Counter(told["unused"])
    encoder.through = told["through"]
