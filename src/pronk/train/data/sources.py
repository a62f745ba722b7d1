"""A run's data: records read and encoded, and some of them held out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, BadRequest, one_line, short
from pronk.tokenizer import Tokenizer
from pronk.train.data import records
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Example, Overlong, content
from pronk.train.data.records import Records
from pronk.train.objectives.objective import Objective
from pronk.train.settings import Settings

_MOST_WEIGHT = 1000
_KEYS = 10  # that nobody reads, and that are named
_LEAST_HELD_OUT = 10  # examples: of fewer none is held out unasked


@dataclass
class Data:
    train: list[Any]  # examples, as the objective makes them
    held_out: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # where each of `train` stands
    skipped: list[str] = field(default_factory=list)  # bad records, of both
    cut: int = 0
    too_long: int = 0  # skipped
    duplicates: int = 0  # exact copies of another, none of which is on both sides
    unused: dict[str, int] = field(default_factory=dict)  # keys that nobody reads: in how many records
    mixture: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each source, examples and those of an epoch
    template: str | None = None  # through which the examples went

    def losses(self) -> Iterator[str]:
        """What of the data is not trained on, in words."""
        if self.skipped:
            yield f"malformed records left out: {len(self.skipped)}; the first: {one_line(self.skipped[0], 300)}"
        for what, count in (("examples cut at their end", self.cut), ("examples left out as too long", self.too_long)):
            if count:
                yield f"{what}: {count}"
        if any(there != seen for there, seen in self.mixture.values()):
            told = (
                f"{seen} of {one_line(name, 60)}, which has {there}" for name, (there, seen) in self.mixture.items()
            )
            yield f"an epoch has {len(self.train)} examples: {'; '.join(told)}"
        if self.duplicates:
            yield f"examples that are exact copies of another: {self.duplicates} (none of them on both sides)"
        if self.unused:
            keys = ", ".join(f"{one_line(key, 60)} ({count})" for key, count in sorted(self.unused.items())[:_KEYS])
            more = f" and {len(self.unused) - _KEYS} more" if len(self.unused) > _KEYS else ""
            yield f"keys that nobody reads, and of how many records: {keys}{more}"
        if not self.held_out:
            yield "no data is held out, so that overfitting will not show"


def prepare(settings: Settings, tokenizer: Tokenizer, ctx_size: int, progress: Progress | None = None) -> Data:
    """Read and encode; `progress` is told of records. Raises BadFile naming file and line."""
    objective = settings.objective
    encoder = Encoder(
        tokenizer,
        min(settings.max_length or ctx_size, ctx_size),
        template=settings.chat_template,
        too_long=settings.too_long,  # type: ignore[arg-type]
        ctx_size=ctx_size,
    )
    sources = [weighed(one) for one in settings.sources]
    named = [name for name, _ in sources] + ([settings.eval_data] if settings.eval_data is not None else [])
    reading: dict[str, Any] = {"skip_bad": settings.skip_bad, "fields": settings.fields}
    found = [records.read(source, objective.kinds, **reading) for source in named]
    records.check_fields(settings.fields, found)
    read = [encoded(objective, encoder, one, skip_bad=settings.skip_bad, progress=progress) for one in found]
    of_data = read[: len(sources)]
    examples, names = ([one for part in of_data for one in part[at]] for at in (0, 1))
    origins = [number for number, (part, _) in enumerate(of_data) for _ in part]
    held_out = read[-1][0]
    same = [_content(example) for example in examples]
    draw = np.random.Generator(np.random.PCG64([settings.seed]))
    if settings.eval_data is None:
        distinct = list(dict.fromkeys(same))
        count = round(settings.eval_share * len(distinct)) if len(distinct) >= _LEAST_HELD_OUT else 0
        chosen = {distinct[i] for i in draw.permutation(len(distinct))[:count].tolist()}
        held_out = [example for example, content in zip(examples, same, strict=True) if content in chosen]
        duplicates = len(same) - len(distinct)
    else:
        chosen = {_content(example) for example in held_out}
        duplicates = len(same) + len(held_out) - len({*same, *chosen})
    kept = [index for index, content in enumerate(same) if content not in chosen]
    if not kept:
        problem = f"has {len(same)} examples, and all would be held out; give a smaller --eval-share, or other data"
        raise BadFile(sources[0][0], problem)
    seen: list[int] = []
    mixture = {}
    for number, (name, weight) in enumerate(sources):
        own = [index for index in kept if origins[index] == number]
        more = draw.permutation(len(own))[: round(len(own) * (weight % 1))].tolist() if weight % 1 else []
        times = own * int(weight) + [own[i] for i in sorted(more)]
        mixture[name] = (len(own), len(times))
        seen += times
    if not seen:
        raise BadFile(sources[0][0], "has no example left of so small a weight")
    train, names = [examples[index] for index in seen], [names[index] for index in seen]
    skipped = [f"{one.source}: {where}: {problem}" for one in found for where, problem in one.skipped]
    unused = sum((one.unused for one in found), encoder.unused)
    left_out = skipped, encoder.cut, encoder.skipped
    return Data(train, held_out, names, *left_out, duplicates, dict(unused), mixture, encoder.through)


def weighed(source: str) -> tuple[str, float]:
    """ "FILE=2": its name, and how often each of its examples is seen in an epoch; once where that is not said.

    Raises BadRequest.
    """
    name, equals, text = source.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        return source, 1.0
    if not equals or Path(source).expanduser().exists():
        return source, 1.0
    if not (name and 0 < weight <= _MOST_WEIGHT):
        raise BadRequest(f"{source}: the weight must be over 0 and at most {_MOST_WEIGHT}, not {short(text)}")
    return name, weight


def _content(example: Any) -> bytes:
    return hashlib.sha256(content(example)).digest()


def encoded(
    objective: Objective, encoder: Encoder, found: Records, *, skip_bad: bool = False, progress: Progress | None = None
) -> tuple[list[Any], list[str]]:
    """The examples of all records, and where each stands.

    Bad ones among them, as whose template refuses them, are errors as well, or skipped; not those too long.
    """
    examples: list[Any] = []
    names: list[str] = []
    bad: list[tuple[str, str]] = []
    for number, record in enumerate(found.items, 1):
        try:
            parts = objective.encode(record, encoder)
        except (BadRecord, BadRequest) as error:
            skips = skip_bad and not isinstance(error, Overlong)
            (found.skipped if skips else bad).append((record.where, str(error)))
            continue
        examples += parts
        where = f"{found.source}: {record.where}"
        names += [where] if len(parts) == 1 else [f"{where}, part {part + 1}" for part in range(len(parts))]
        if progress:
            progress("", number, len(found.items))
    if bad:
        raise found.refused(bad)
    if not examples and not encoder.skipped:
        raise records.nothing_good(found)
    if not examples:
        raise BadFile(found.source, f"no record fits into {encoder.max_length} tokens ({encoder.skipped} were skipped)")
    return examples, names


def shown(examples: Iterable[Example], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """For each example its tokens as text, and whether each is learned."""
    for example in examples:
        yield [(tokenizer.token_text(int(i)), bool(m)) for i, m in zip(example.ids, example.loss_mask, strict=True)]
