"""`pronk finetune`: a model adapted to one's own data, by LoRA or in all of its weights."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import options, training, training_options
from pronk.cli.verb import verb

_own = options.together(
    click.option("--train-on-prompt", is_flag=True, help="Compute the loss on prompt tokens too."),
    click.option("--instructions", type=click.Choice(["auto", "chat", "alpaca"]), default="auto", show_default=True,
                 help="Write instruction records with the chat template, or as Alpaca does; auto: with the template "
                 "where the model has one."),
    heading="Data",
)  # fmt: skip


@verb(
    epilog="""\b
Examples:
  pronk finetune smollm2:135m --data mine.jsonl --out mine --show-batch
  pronk finetune smollm2:135m --data mine.jsonl --out mine
  pronk finetune smollm2:135m --data mine.jsonl --out mine --resume
  pronk generate -m smollm2:135m --adapter mine --chat "..."

A record is {"messages": [...]}, {"conversations": [...]} as ShareGPT has them, {"prompt", "completion"},
{"instruction", "input", "output"}, {"question", "answer"} or {"text"}; --fields reads records whose keys have
other names. A folder is read as texts.
Ctrl-C and SIGTERM finish the step and save a checkpoint; --resume then gives the same result as a run that
was never stopped. Training needs torch."""
)
@training_options.of_records(_own, "sft")
def command(**given: Any) -> None:
    """Fine-tune a model on your data, with LoRA or in full.

    LoRA trains two low-rank matrices beside each linear layer of MODEL and writes them as an adapter; MODEL's own
    weights stay as they are.
    """
    from pronk.train.runs import finetune

    training.perform(finetune, given)
