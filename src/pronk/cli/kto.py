"""`pronk kto`: a model taught by answers that people called good or bad, each by itself (KTO)."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import options, training, training_options
from pronk.cli.parameter_types import Number
from pronk.cli.verb import verb

_own = options.together(
    click.option("--beta", type=Number(min=0, min_open=True), default=0.1, show_default=True, metavar="X",
                 help="Set the strength of the pull towards MODEL (KL): the larger, the less it changes."),
    click.option("--desirable-weight", type=Number(min=0), default=1.0, show_default=True, metavar="X",
                 help="Count good answers X times. Where they are fewer, a usual X is how many bad ones there are for "
                 "each good one."),
    click.option("--undesirable-weight", type=Number(min=0), default=1.0, show_default=True, metavar="X",
                 help="Count bad answers X times."),
    heading="Objective",
)  # fmt: skip


@verb(
    epilog="""\b
Examples:
  pronk kto smollm2:135m --data judged.jsonl --out mine --show-batch
  pronk kto smollm2:135m --data judged.jsonl --out mine
  pronk kto smollm2:135m --data judged.jsonl --out mine --resume
  pronk generate -m smollm2:135m --adapter mine --chat "..."

A record is {"prompt", "completion", "label"}, texts or lists of messages, its label true or false. Records of
pronk dpo are read as two: their chosen answer is good, and the rejected one bad.
Ctrl-C and SIGTERM finish the step and save a checkpoint; --resume then gives the same result as a run that
was never stopped. Training needs torch."""
)
@training_options.of_records(_own, "kto")
def command(**given: Any) -> None:
    """Train a model on answers called good or bad with KTO.

    Kahneman-Tversky optimization teaches MODEL to answer as people liked and not as they disliked, without pairs, by
    LoRA or in all weights.
    """
    from pronk.train.runs import kto

    training.perform(kto, given)
