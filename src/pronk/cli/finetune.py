"""`pronk finetune`: a model adapted to one's own data, by LoRA or in all of its weights."""

from __future__ import annotations

from typing import Any

from pronk.cli import options, training, training_options

RATES = training_options.Rates(lora=2e-4, full=2e-5)  # TRL's for all weights; for LoRA the usual ten times that


@options.verb(
    epilog="""\b
Examples:
  pronk finetune smollm2:135m --data mine.jsonl --out mine --show-batch
  pronk finetune smollm2:135m --data mine.jsonl --out mine
  pronk finetune smollm2:135m --data mine.jsonl --out mine --resume
  pronk generate -m smollm2:135m --adapter mine "..."

A record is {"messages": [...]}, {"prompt", "completion"}, {"instruction", "input", "output"} or {"text"}.
Ctrl-C and SIGTERM finish the step and save it; --resume then goes on as if nothing had happened."""
)
@training_options.of_records(training_options.imitation, RATES)
def command(model: str, **given: Any) -> None:
    """Adapt MODEL to data of one's own."""
    settings, how = training_options.settings(model, given, RATES)
    training.perform(settings, **how)
