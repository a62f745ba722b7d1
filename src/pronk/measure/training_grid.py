"""Settings of training that are compared, and the examples that all of them train on.

The grid: all weights or LoRA, float32 or bfloat16, activations kept or recomputed, one micro-batch a step or eight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

from pronk import checkpoint
from pronk.checkpoint import hub
from pronk.errors import BadRequest, NoTokenizer
from pronk.measure.windows import evaluation_text

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint

EXAMPLES = 8  # of a step with accumulation, or of the batch that it stands for
WARM_UP, TIMED = 1, 2  # steps of a process
_START = 12.0  # what starting, loading and one step under a ledger cost, in micro-batches


@dataclass(frozen=True)
class Setting:
    lora: bool = False
    precision: str = "f32"
    recompute: bool = False
    accumulate: int = 1
    batch_size: int = 1

    @property
    def name(self) -> str:
        parts = ["LoRA" if self.lora else "full", self.precision, "recomputed" if self.recompute else "kept"]
        return ", ".join([*parts, f"{self.accumulate} x {self.batch_size}"])

    @property
    def micro_batches(self) -> int:
        return self.accumulate * self.batch_size


PLAIN = Setting()
BATCH = Setting(batch_size=EXAMPLES)  # what accumulation stands for
# Each technique alone, against what it changes.
TECHNIQUES = (
    ("Activation checkpointing", Setting(recompute=True), PLAIN),
    ("Mixed precision (bf16)", Setting(precision="bf16"), PLAIN),
    ("LoRA", Setting(lora=True), PLAIN),
    (f"Accumulation, {EXAMPLES} x 1 for 1 x {EXAMPLES}", Setting(accumulate=EXAMPLES), BATCH),
    ("All of them", Setting(True, "bf16", True, EXAMPLES), BATCH),
)


@dataclass(frozen=True)
class Request:
    """What was asked for. None: not said; the default holds, or what was begun with."""

    model: str | None = None
    data: str | None = None  # a file of records
    tokens: int | None = None  # of an example
    rounds: int | None = None
    rank: int | None = None
    threads: int | None = None
    device: str | None = None


DEFAULTS = Request(model=hub.DEFAULT_MODEL, tokens=256, rounds=3, rank=16)


@dataclass(frozen=True)
class Grid:
    request: Request  # settled
    checkpoint: Checkpoint
    examples: Sequence[tuple[list[int], list[bool]]]  # token ids, what is learned

    @property
    def settings(self) -> list[Setting]:
        axes = product((False, True), ("f32", "bf16"), (False, True), (1, EXAMPLES))
        return [*(Setting(lora, precision, again, count) for lora, precision, again, count in axes), BATCH]

    def steps(self) -> Iterator[tuple[str, Setting, int]]:
        for number in range(self.request.rounds or 1):
            for setting in self.settings if number % 2 == 0 else reversed(self.settings):
                yield f"{setting.name} {number + 1}", setting, number

    def costs(self) -> dict[str, float]:
        return {name: _START + (WARM_UP + TIMED) * setting.micro_batches for name, setting, _ in self.steps()}

    def asked(self) -> dict[str, Any]:
        text = " ".join(str(part) for example in self.examples for part in example)
        return {**asdict(self.request), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def settled(request: Request) -> Grid:
    """With defaults where nothing was said. Raises PronkErrors."""
    given = {name: value for name, value in asdict(request).items() if value is not None}
    asked = Request(**{**asdict(DEFAULTS), **given})
    opened = checkpoint.open(hub.resolve(str(asked.model)))
    length = min(asked.tokens or 0, opened.config.max_position_embeddings - 1) + 1  # the last is not read
    asked = Request(**{**asdict(asked), "tokens": length - 1})
    examples = _of_text(opened, length) if asked.data is None else _of_records(opened, asked.data, length)
    return Grid(asked, opened, examples)


def _of_text(opened: Checkpoint, length: int) -> list[tuple[list[int], list[bool]]]:
    """Windows of the text that comes with pronk, all of it learned."""
    from pronk.loading import tokenizer_of

    codec = tokenizer_of(opened)
    if codec is None:
        raise NoTokenizer(f"{opened.path} carries no tokenizer, and without one no text can be read")
    ids = codec.encode(evaluation_text())
    step = max(1, (len(ids) - length) // EXAMPLES)
    if len(ids) < length:
        raise BadRequest(f"the text has {len(ids)} tokens; take examples of fewer (--tokens)")
    learned = [False] + [True] * (length - 1)
    return [(list(ids[at : at + length]), learned) for at in range(0, step * EXAMPLES, step)]


def _of_records(opened: Checkpoint, data: str, length: int) -> list[tuple[list[int], list[bool]]]:
    """The first records, as pronk finetune reads them, cut where they are longer."""
    from pronk.loading import tokenizer_of
    from pronk.train.data import prepare
    from pronk.train.examples import Example
    from pronk.train.settings import Settings

    codec = tokenizer_of(opened)
    if codec is None:
        raise NoTokenizer(f"{opened.path} carries no tokenizer, and without one no record can be read")
    settings = Settings("", data, eval_share=0.0, max_length=length, too_long="cut")
    found = prepare(settings, codec, opened.config.max_position_embeddings).train[:EXAMPLES]
    if len(found) < EXAMPLES:
        raise BadRequest(f"{data}: holds {len(found)} examples, and {EXAMPLES} are needed")
    return [(one.ids.tolist(), one.learned.tolist()) for one in found if isinstance(one, Example)]
