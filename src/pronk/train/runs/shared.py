"""Options that every run on records has: their types, for who checks them, and their defaults. Each once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict

Name = str | Path  # of a model, a file or a folder
Duration = str | float  # "90m", "1h30m", or seconds
Log = Literal["tensorboard", "wandb"]
Precision = Literal["f32", "bf16", "f16"]
Optimizer = Literal["adamw", "adamw8bit", "adafactor", "muon", "sgd"]
Schedule = Literal["cosine", "linear", "constant"]
SamplesAt = Literal["ends", "looks"]
TooLong = Literal["error", "cut", "skip", "split"]


class Shared(TypedDict, total=False):
    max_length: int | None
    too_long: TooLong
    skip_bad_records: bool
    fields: Mapping[str, str] | Sequence[str]
    chat_template: Name | None
    tokenizer: Name | None
    token_cache: bool
    full: bool
    lora_rank: int | None
    lora_alpha: float | None
    lora_dropout: float | None
    rslora: bool
    dora: bool
    lora_plus_ratio: float | None
    target_modules: str | Sequence[str] | None
    from_adapter: Name | None
    quantize: str | None
    neftune_alpha: float | None
    epochs: float
    max_steps: int | None
    max_time: Duration | None
    batch_size: int
    accumulate: int
    pack: int | None
    bucket: bool
    lr: float | None
    warmup: float
    schedule: Schedule
    weight_decay: float
    clip: float
    optimizer: Optimizer
    seed: int
    precision: Precision | None
    recompute: int
    gradient_checkpointing: bool
    threads: int | None
    device: str | None
    eval_data: Name | None
    eval_share: float
    eval_every: int | None
    patience: int | None
    early_stop_task: Name | None
    early_stop_limit: int | None
    samples: int
    samples_at: SamplesAt
    save_every: int
    resume: bool
    log_to: Log | Sequence[Log]
    push_to_hub: str | None
    private: bool


DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(Shared.__annotations__),  # None, but for these
    "too_long": "error", "skip_bad_records": False, "fields": (), "full": False, "rslora": False, "dora": False,
    "epochs": 3.0, "batch_size": 1, "token_cache": True, "private": True,
    "accumulate": 8, "bucket": False, "warmup": 0.03, "schedule": "cosine", "weight_decay": 0.0, "clip": 1.0,
    "optimizer": "adamw", "seed": 0, "recompute": 0, "gradient_checkpointing": False, "eval_share": 0.1, "samples": 2,
    "samples_at": "ends",
    "save_every": 50, "resume": False, "log_to": (),
}  # fmt: skip
