"""A run's data: records read and encoded, and some of them held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, BadRequest, one_line, short
from pronk.tokenizer import Tokenizer
from pronk.train.data import records, store
from pronk.train.data.encoded import Reading, through
from pronk.train.data.examples import Encoder, Example
from pronk.train.data.token_cache import TokenCache
from pronk.train.settings import Settings

_MOST_WEIGHT = 1000
_KEYS = 10  # that nobody reads, and that are named
_LEAST_HELD_OUT = 10  # examples: of fewer none is held out unasked


@dataclass
class Data:
    train: Sequence[Any]  # examples, as the objective makes them
    held_out: Sequence[Any] = ()
    names: Sequence[str] = ()  # where each of `train` stands
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


def prepare(
    settings: Settings,
    tokenizer: Tokenizer,
    ctx_size: int,
    progress: Progress | None = None,
    cache: TokenCache | None = None,
) -> Data:
    """Read and encode; `progress` is told of records. Raises BadFile naming file and line.

    `cache`: keeps what large files are encoded as. The data are the same with and without.
    """
    encoder = Encoder(
        tokenizer,
        min(settings.max_length or ctx_size, ctx_size),
        template=settings.chat_template,
        too_long=settings.too_long,  # type: ignore[arg-type]
        ctx_size=ctx_size,
    )
    settings.objective.check(encoder.max_length)
    sources = [weighed(one) for one in settings.sources]
    named = [name for name, _ in sources] + ([settings.eval_data] if settings.eval_data is not None else [])
    reading = Reading(settings.objective, encoder, settings.skip_bad, settings.fields, cache, progress)
    read = [reading.of(source) for source in named]
    records.check_fields(settings.fields, [one.records for one in read])
    for one in read:
        if one.problem:
            raise one.problem
    of_data = read[: len(sources)]
    parts = [one.examples for one in of_data]
    draw = np.random.Generator(np.random.PCG64([settings.seed]))
    same = _numbered([store.digests(one.examples) for one in read])
    first = sum(map(len, parts))
    if settings.eval_data is None:
        together = _numbered([store.prompts(part) for part in parts]) if settings.objective.by_prompt else same
        distinct = _distinct(together)
        count = round(settings.eval_share * len(distinct)) if len(distinct) >= _LEAST_HELD_OUT else 0
        chosen = np.isin(together, distinct[draw.permutation(len(distinct))[:count]])
        held_out = store.Picked(parts, np.flatnonzero(chosen))
    else:
        chosen = np.isin(same[:first], same[first:])
        held_out = store.Picked([read[-1].examples])
    duplicates = len(same) - len(_distinct(same))
    kept = np.flatnonzero(~chosen)
    if not len(kept):
        problem = f"has {first} examples, and all would be held out; give a smaller --eval-share, or other data"
        raise BadFile(sources[0][0], problem)
    seen: list[NDArray[np.int64]] = []
    mixture = {}
    begins = np.cumsum([0, *map(len, parts)])
    for number, (name, weight) in enumerate(sources):
        own = kept[(begins[number] <= kept) & (kept < begins[number + 1])]
        more = draw.permutation(len(own))[: round(len(own) * (weight % 1))] if weight % 1 else kept[:0]
        times = np.concatenate([np.tile(own, int(weight)), own[np.sort(more)]])
        mixture[name] = (len(own), len(times))
        seen.append(times)
    order = np.concatenate(seen)
    if not len(order):
        raise BadFile(sources[0][0], "has no example left of so small a weight")
    names = store.Picked([one.places for one in of_data], order, lambda part, place: f"{sources[part][0]}: {place}")
    accounts, encoders = [one.records for one in read], [one.encoder for one in read]
    return Data(
        train=store.Picked(parts, order),
        held_out=held_out,
        names=names,
        skipped=[f"{one.source}: {where}: {problem}" for one in accounts for where, problem in one.skipped],
        cut=sum(one.cut for one in encoders),
        too_long=sum(one.skipped for one in encoders),
        duplicates=duplicates,
        unused=dict(sum((one.records.unused + one.encoder.unused for one in read), Counter[str]())),
        mixture=mixture,
        template=through(encoders),
    )


def weighed(source: str) -> tuple[str, float]:
    """ "FILE=2": its name, and how often each of its examples is seen in an epoch; once where that is not said.

    Raises BadRequest.
    """
    name, equals, text = source.rpartition("=")
    try:
        weight = float(text)
    except ValueError:
        if equals and Path(name).expanduser().exists() and not Path(source).expanduser().exists():
            raise BadRequest(f"data {source}: {short(text)} is no weight; give a number behind the =") from None
        return source, 1.0
    if not equals or Path(source).expanduser().exists():
        return source, 1.0
    if not (name and 0 < weight <= _MOST_WEIGHT):
        raise BadRequest(f"data {source}: the weight must be over 0 and at most {_MOST_WEIGHT}, not {short(text)}")
    return name, weight


def _numbered(digests: Sequence[NDArray[np.void]]) -> NDArray[np.int64]:
    """[N]: a number for each, the same of the same, the lower the earlier it is met first."""
    every = np.concatenate(digests)
    _, firsts, numbers = np.unique(every, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(firsts))[numbers.reshape(-1)]


def _distinct(same: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.unique(same)


def shown(examples: Iterable[Example], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """For each example its tokens as text, and whether each is learned."""
    for example in examples:
        yield [(tokenizer.token_text(int(i)), bool(m)) for i, m in zip(example.ids, example.loss_mask, strict=True)]
