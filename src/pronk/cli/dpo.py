"""`pronk dpo`: a model taught which of two answers people like better, by direct preference optimization."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import options, training, training_options
from pronk.cli.parameter_types import Number
from pronk.cli.verb import verb

_own = options.together(
    click.option("--beta", type=Number(min=0, min_open=True), default=0.1, show_default=True, metavar="X",
                 help="Set the strength of the pull towards MODEL (KL): the larger, the less it changes. simpo: the "
                 "scale of rewards; orpo: the weight of the preference beside the likelihood of the chosen answer."),
    click.option("--loss", "--loss-type", "loss_type", type=click.Choice(["sigmoid", "hinge", "ipo", "simpo", "orpo"]),
                 default="sigmoid", show_default=True,
                 help="Use this preference loss; sigmoid is standard DPO. simpo and orpo need no reference."),
    click.option("--simpo-gamma", type=Number(min=0), default=0.5, show_default=True, metavar="X",
                 help="simpo: want the chosen answer to be better by X; 0.3 to 1.6 is usual, with --beta 2 to 2.5."),
    click.option("--label-smoothing", type=Number(0, 0.5, max_open=True), default=0.0, show_default=True,
                 metavar="P", help="sigmoid, simpo: assume that this fraction of the records has its answers swapped."),
    heading="Objective",
)  # fmt: skip


@verb(
    epilog="""\b
Examples:
  pronk dpo smollm2:135m --data preferences.jsonl --out mine --show-batch
  pronk dpo smollm2:135m --data preferences.jsonl --out mine
  pronk dpo smollm2:135m --data preferences.jsonl --out mine --resume
  pronk generate -m smollm2:135m --adapter mine --chat "..."

A record is {"prompt", "chosen", "rejected"}, texts or lists of messages; or {"chosen", "rejected"}, whole
conversations that begin with the same messages.
Ctrl-C and SIGTERM finish the step and save a checkpoint; --resume then gives the same result as a run that
was never stopped. Training needs torch."""
)
@training_options.of_records(_own, "dpo")
def command(**given: Any) -> None:
    """Train a model on preference pairs with DPO.

    Direct preference optimization teaches MODEL which of two answers people prefer, by LoRA or in all weights.
    """
    from pronk.train.runs import dpo

    training.perform(dpo, given)
