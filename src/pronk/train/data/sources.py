"""A run's data: records read and encoded, and some of them held out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from pronk.checkpoint.tensors import Progress
from pronk.errors import BadFile, BadRequest
from pronk.tokenizer import Tokenizer
from pronk.train.data import records
from pronk.train.data.batches import Batches
from pronk.train.data.containers import BadRecord
from pronk.train.data.examples import Encoder, Example, Overlong, Pair
from pronk.train.settings import Settings

_LEAST_HELD_OUT = 10  # examples: of fewer none is held out unasked


@dataclass
class Data:
    train: list[Example | Pair]
    held_out: list[Example | Pair]
    names: list[str]  # where each of `train` stands
    skipped: list[str]  # bad records, of both
    cut: int
    too_long: int  # skipped
    unused: dict[str, int]  # keys of records that nobody reads


def prepare(settings: Settings, tokenizer: Tokenizer, ctx_size: int, progress: Progress | None = None) -> Data:
    """Read and encode; `progress` is told of records. Raises BadFile naming file and line."""
    encoder = Encoder(
        tokenizer,
        min(settings.max_length or ctx_size, ctx_size),
        template=settings.chat_template,
        train_on_prompt=settings.train_on_prompt,
        too_long=settings.too_long,  # type: ignore[arg-type]
        chat_instructions=settings.chat_instructions,
        ctx_size=ctx_size,
    )
    sources = [settings.data] if settings.eval_data is None else [settings.data, settings.eval_data]
    found = [records.read(source, skip_bad=settings.skip_bad) for source in sources]
    for one in found:
        _check_kind(one, preferences=settings.preference is not None)
    examples, names = _encoded(encoder, found[0], settings.skip_bad, progress)
    if settings.eval_data is not None:
        held_out, _ = _encoded(encoder, found[1], settings.skip_bad, progress)
    else:
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


def _check_kind(found: records.Records, *, preferences: bool) -> None:
    """Of all records, which are of one kind in this."""
    if (found.items[0].kind == "preference") is preferences:
        return
    if preferences:
        problem = "holds no preferences: prompt, chosen and rejected make one; pronk finetune learns from other records"
    else:
        problem = "holds preferences (chosen, rejected), from which nothing is imitated; pronk dpo learns from them"
    raise BadFile(found.source, problem)


def _encoded(
    encoder: Encoder, found: records.Records, skip_bad: bool, progress: Progress | None
) -> tuple[list[Example | Pair], list[str]]:
    """Bad ones among them, as whose template refuses them, are errors as well, or skipped; not those too long."""
    examples, names = [], []
    for number, record in enumerate(found.items, 1):
        try:
            example = encoder.encode(record)
        except (BadRecord, BadRequest) as error:
            if not skip_bad or isinstance(error, Overlong):
                raise found.problem(record, str(error)) from None
            found.skipped.append(f"{record.where}: {error}")
            continue
        if example is not None:
            examples.append(example)
            names.append(f"{found.source}: {record.where}")
        if progress:
            progress("", number, len(found.items))
    if not examples and not encoder.skipped:
        raise records.nothing_good(found)
    if not examples:
        raise BadFile(found.source, f"no record fits into {encoder.max_length} tokens ({encoder.skipped} were skipped)")
    return examples, names


def batches_of(data: Data, settings: Settings) -> Batches:
    lengths = [len(example) for example in data.train]
    return Batches(lengths, settings.batch_size, settings.pack, settings.bucket, settings.seed)


def shown(examples: Iterable[Example], tokenizer: Tokenizer) -> Iterator[list[tuple[str, bool]]]:
    """For each example its tokens as text, and whether each is learned."""
    for example in examples:
        yield [(tokenizer.token_text(int(i)), bool(m)) for i, m in zip(example.ids, example.learned, strict=True)]
