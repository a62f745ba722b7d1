"""A run's data: records read and encoded, and some of them held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, BadRequest
from pronk.tokenizer import Tokenizer
from pronk.train.data import records
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Example, Overlong
from pronk.train.data.records import Records
from pronk.train.objectives.objective import Objective
from pronk.train.settings import Settings

_LEAST_HELD_OUT = 10  # examples: of fewer none is held out unasked


@dataclass
class Data:
    train: list[Any]  # examples, as the objective makes them
    held_out: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # where each of `train` stands
    skipped: list[str] = field(default_factory=list)  # bad records, of both
    cut: int = 0
    too_long: int = 0  # skipped
    unused: dict[str, int] = field(default_factory=dict)  # keys of records that nobody reads


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
    sources = [settings.data] if settings.eval_data is None else [settings.data, settings.eval_data]
    found = [records.read(source, objective.kinds, skip_bad=settings.skip_bad) for source in sources]
    read = [encoded(objective, encoder, one, skip_bad=settings.skip_bad, progress=progress) for one in found]
    (examples, names), held_out = read[0], read[-1][0]
    if settings.eval_data is None:
        count = round(settings.eval_share * len(examples)) if len(examples) >= _LEAST_HELD_OUT else 0
        chosen = set(np.random.Generator(np.random.PCG64([settings.seed])).permutation(len(examples))[:count].tolist())
        held_out = [example for i, example in enumerate(examples) if i in chosen]
        names = [name for i, name in enumerate(names) if i not in chosen]
        examples = [example for i, example in enumerate(examples) if i not in chosen]
        if not examples:
            raise BadFile(
                settings.data, f"has {count} examples, and all would be held out; give a smaller --eval-share"
            )
    skipped = [f"{one.source}: {line}" for one in found for line in one.skipped]
    unused = sum((one.unused for one in found), Counter[str]())
    return Data(examples, held_out, names, skipped, encoder.cut, encoder.skipped, dict(unused))


def encoded(
    objective: Objective, encoder: Encoder, found: Records, *, skip_bad: bool = False, progress: Progress | None = None
) -> tuple[list[Any], list[str]]:
    """The examples of all records, and where each stands.

    Bad ones among them, as whose template refuses them, are errors as well, or skipped; not those too long.
    """
    examples: list[Any] = []
    names: list[str] = []
    for number, record in enumerate(found.items, 1):
        try:
            parts = objective.encode(record, encoder)
        except (BadRecord, BadRequest) as error:
            if not skip_bad or isinstance(error, Overlong):
                raise found.problem(record, str(error)) from None
            found.skipped.append(f"{record.where}: {error}")
            continue
        examples += parts
        where = f"{found.source}: {record.where}"
        names += [where] if len(parts) == 1 else [f"{where}, part {part + 1}" for part in range(len(parts))]
        if progress:
            progress("", number, len(found.items))
    if not examples and not encoder.skipped:
        raise records.nothing_good(found)
    if not examples:
        raise BadFile(found.source, f"no record fits into {encoder.max_length} tokens ({encoder.skipped} were skipped)")
    return examples, names


def shown(examples: Iterable[Example], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """For each example its tokens as text, and whether each is learned."""
    for example in examples:
        yield [(tokenizer.token_text(int(i)), bool(m)) for i, m in zip(example.ids, example.loss_mask, strict=True)]
