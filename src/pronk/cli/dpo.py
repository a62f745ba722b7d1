"""`pronk dpo`: a model taught which of two answers people like better, by direct preference optimization."""

from __future__ import annotations

from typing import Any

from pronk.cli import options, training, training_options

RATES = training_options.Rates(lora=5e-5, full=1e-6)  # TRL's for all weights; docs/training.md has figures for LoRA


@options.verb(
    epilog="""\b
Examples:
  pronk dpo smollm2:135m --data preferences.jsonl --out mine --show-batch
  pronk dpo smollm2:135m --data preferences.jsonl --out mine
  pronk dpo smollm2:135m --data preferences.jsonl --out mine --resume
  pronk generate -m smollm2:135m --adapter mine "..."

A record is {"prompt", "chosen", "rejected"}, texts or lists of messages; or {"chosen", "rejected"}, whole
conversations that begin with the same messages.
Ctrl-C and SIGTERM finish the step and save it; --resume then goes on as if nothing had happened."""
)
@training_options.of_records(training_options.preference, RATES)
def command(model: str, **given: Any) -> None:
    """Teach MODEL which answers are liked better."""
    settings, how = training_options.settings(model, given, RATES)
    training.perform(settings, **how)
