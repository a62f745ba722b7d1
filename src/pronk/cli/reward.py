"""`pronk reward`: a reward model, which gives answers a score, made of a model and of what people preferred."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import options, training, training_options
from pronk.cli.parameter_types import Number
from pronk.cli.verb import verb

_own = options.together(
    click.option("--center-rewards", "--center-rewards-coefficient", "center_rewards", type=Number(min=0),
                 default=0.0, show_default=True, metavar="X",
                 help="Keep rewards around 0: add X times the square of the sum of a pair's rewards to its loss."),
    heading="Objective",
)  # fmt: skip


@verb(
    epilog="""\b
Examples:
  pronk reward smollm2:135m --data preferences.jsonl --out rm --show-batch
  pronk reward smollm2:135m --data preferences.jsonl --out rm
  pronk reward smollm2:135m --data preferences.jsonl --out rm --resume
  pronk score smollm2:135m --adapter rm "..."

A record is {"prompt", "chosen", "rejected"}, texts or lists of messages; or {"chosen", "rejected"}, whole
conversations that begin with the same messages. "margin" in it says by how much the chosen answer is better.
Ctrl-C and SIGTERM finish the step and save a checkpoint; --resume then gives the same result as a run that
was never stopped. Training needs torch."""
)
@training_options.of_records(_own, "reward")
def command(**given: Any) -> None:
    """Train a reward model on preference pairs.

    MODEL gets a score head in the place of its lm_head, and learns by LoRA or in all weights to give the answer that
    people prefer the higher score (Bradley-Terry).
    """
    from pronk.train.runs import reward

    training.perform(reward, given)
