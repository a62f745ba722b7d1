"""What makes a run what it is: one that is resumed must have the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pronk.checkpoint.adapter import LoraConfig
from pronk.errors import BadRequest
from pronk.train import codes
from pronk.train.data import forms
from pronk.train.data.batches import Batches
from pronk.train.data.store import lengths
from pronk.train.loop import Precision
from pronk.train.objectives.objective import Objective
from pronk.train.objectives.sft import SFT

_MOST = 1e15  # of a number, so that products of two are still float32
_RANK = _MICRO_BATCHES = 1 << 20


@dataclass(frozen=True)
class Settings:
    model: str
    data: str | tuple[str, ...]  # a file, a dataset, or several; each perhaps with a weight, "FILE=0.5"
    eval_data: str | None = None
    eval_share: float = 0.1  # of the data, held out where there is no eval_data
    lora: LoraConfig | None = field(default_factory=LoraConfig)  # None: all weights are trained
    from_adapter: str | None = None  # what LoRA begins as, instead of nothing
    quantize: str | None = None  # what LoRA's frozen weights are kept in (codes.Wish); None: f32
    epochs: float = 3.0
    max_steps: int | None = None
    batch_size: int = 1
    accumulate: int = 8
    pack: int | None = None
    bucket: bool = False
    optimizer: str = "adamw"  # before lr, whose default follows from it: what differs first is what is named
    lr: float = 2e-4
    warmup: float = 0.03  # of all steps
    schedule: str = "cosine"
    weight_decay: float = 0.0
    clip: float = 1.0
    lora_plus_ratio: float | None = None  # how many times lr is that of LoRA's B
    neftune_alpha: float | None = None  # noise on embeddings (neftune.py)
    precision: Precision = "f32"
    recompute: int = 0
    max_length: int | None = None
    too_long: str = "error"
    skip_bad: bool = False
    fields: tuple[str, ...] = ()  # what keys of records are to be called, "theirs=ours" (data.forms.fields)
    chat_template: str | None = None
    objective: Objective = field(default_factory=SFT)
    eval_every: int | None = None  # steps; None: once an epoch
    patience: int | None = None
    early_stop_task: str | None = None  # of lm-evaluation-harness, by which looks are judged; None: by held-out loss
    early_stop_limit: int | None = None  # of its questions
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.eval_share < 1:
            raise BadRequest(f"the share that is held out must be from 0 to less than 1, not {self.eval_share!r}")
        if not 0 <= self.warmup <= 1:
            raise BadRequest(f"the warm-up is a share of all steps, from 0 to 1, not {self.warmup!r}")
        forms.fields(self.fields)
        if not self.sources:
            raise BadRequest("there is no data to train on; name some")
        if self.lora is None and self.from_adapter is not None:
            raise BadRequest("an adapter is what LoRA begins from, and all weights are trained; merge it first")
        codes.check(self.quantize)
        if self.lora is None and codes.asks(self.quantize):
            problem = "is for weights that are frozen, and all are trained; leave it out"
            raise BadRequest(f"quantize={self.quantize} {problem}")
        for name in ("lr", "weight_decay", "clip", "epochs", "lora_plus_ratio", "neftune_alpha"):
            if (value := getattr(self, name)) is not None and not 0 <= value <= _MOST:
                raise BadRequest(f"{name} must be a number from 0 to {_MOST:g}, not {value!r}")
        if self.lora and (self.lora.rank > _RANK or self.lora.alpha > _MOST):
            found = f"{self.lora.rank} and {self.lora.alpha:g}"
            raise BadRequest(f"LoRA's rank is at most {_RANK} and its alpha {_MOST:g}, not {found}")
        if self.precision not in ("f32", "bf16", "f16"):
            raise BadRequest(f"precision must be one of f32, bf16, f16, not {self.precision!r}")
        for name in ("batch_size", "accumulate", "save_every", "max_steps", "eval_every", "patience", "max_length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise BadRequest(f"{name} must be a whole number from 1 on, not {value!r}")
        if self.accumulate > _MICRO_BATCHES:
            raise BadRequest(f"a step is of {_MICRO_BATCHES} micro-batches at most, not {self.accumulate}")
        if self.early_stop_task is not None and self.patience is None:
            raise BadRequest("early_stop_task ends a run after patience looks without a better score; give patience")
        if self.early_stop_task is None and self.early_stop_limit is not None:
            raise BadRequest("early_stop_limit is of the questions of early_stop_task; name one")
        if not 0 <= self.seed < 1 << 64:
            raise BadRequest(f"seed must be from 0 to {(1 << 64) - 1}, not {self.seed!r}")
        if not self.epochs > 0:
            raise BadRequest(f"epochs must be more than 0, not {self.epochs!r}")

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.data,) if isinstance(self.data, str) else self.data

    def batches(self, examples: Sequence[Any]) -> Batches:
        return Batches(lengths(examples), self.batch_size, self.pack, self.bucket, self.seed)

    def steps(self, batches: Batches) -> int:
        return self.max_steps or max(1, round(self.epochs * len(batches.epoch(0)) / self.accumulate))
