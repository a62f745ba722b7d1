"""Settings of training that are compared, and the examples that all of them train on.

The grid: all weights or LoRA, float32 or bfloat16, activations kept or recomputed, one micro-batch a step or eight.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Literal

import numpy as np

from pronk import checkpoint
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.backend import check_predicts
from pronk.errors import BadRequest, NoTokenizer
from pronk.loading import tokenizer_of
from pronk.measure.windows import evaluation_text
from pronk.tokenizer import Tokenizer
from pronk.train.data.examples import Example

EXAMPLES = 8  # of a step with accumulation, or of the batch that it stands for
WARM_UP, TIMED = 1, 2  # steps of a process


@dataclass(frozen=True)
class Setting:
    lora: bool = False
    precision: Literal["f32", "bf16"] = "f32"
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
    model: str = hub.DEFAULT_MODEL
    data: str | None = None  # a file of records
    tokens: int = 256  # of an example
    rounds: int = 3
    rank: int = 16
    threads: int | None = None
    device: str | None = None


@dataclass(frozen=True)
class Grid:
    request: Request
    checkpoint: Checkpoint
    examples: list[Example]

    @property
    def settings(self) -> list[Setting]:
        precisions: tuple[Literal["f32", "bf16"], ...] = ("f32", "bf16")
        axes = product((False, True), precisions, (False, True), (1, EXAMPLES))
        return [*(Setting(lora, precision, again, count) for lora, precision, again, count in axes), BATCH]

    def asked(self) -> dict[str, Any]:
        text = " ".join(str(part.tolist()) for one in self.examples for part in (one.ids, one.loss_mask))
        return {**asdict(self.request), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def settled(said: Mapping[str, Any]) -> Grid:
    """`said`: what was asked for of a Request; for all else the defaults hold. Raises PronkErrors."""
    asked = Request(**said)
    opened = checkpoint.open(hub.resolve(asked.model))
    check_predicts(opened.config)
    codec = tokenizer_of(opened)
    if codec is None:
        raise NoTokenizer(f"{opened.path} carries no tokenizer, and without one nothing can be read to train on")
    most = opened.config.max_position_embeddings
    if "tokens" in said and asked.tokens >= most:
        raise BadRequest(f"{opened.path} has a context of {most} tokens; take examples of fewer than these (--tokens)")
    length = min(asked.tokens, most - 1) + 1  # the last is not read
    examples = _of_text(codec, length) if asked.data is None else _of_records(codec, asked.data, length, most)
    return Grid(replace(asked, tokens=length - 1), opened, examples)


def _of_text(codec: Tokenizer, length: int) -> list[Example]:
    """Windows of the text that comes with pronk, all of it learned."""
    ids = codec.encode(evaluation_text())
    step = max(1, (len(ids) - length) // EXAMPLES)
    if len(ids) < length:
        raise BadRequest(f"the text has {len(ids)} tokens; take examples of fewer (--tokens)")
    learned = np.arange(length) > 0
    return [Example(np.array(ids[at : at + length], np.int32), learned) for at in range(0, step * EXAMPLES, step)]


def _of_records(codec: Tokenizer, data: str, length: int, most: int) -> list[Example]:
    """The first records, as pronk finetune reads them, cut where they are longer. `most`: tokens of the context."""
    from pronk.train.data.sources import prepare
    from pronk.train.settings import Settings

    settings = Settings("", data, eval_share=0.0, max_length=length, too_long="cut")
    found = prepare(settings, codec, most).train[:EXAMPLES]
    if len(found) < EXAMPLES:
        raise BadRequest(f"{data}: holds {len(found)} examples, and {EXAMPLES} are needed")
    return list(found)
