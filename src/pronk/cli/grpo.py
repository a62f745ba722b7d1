"""`pronk grpo`: a model that learns from what its own completions are worth, by group-relative policy optimization."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import options, training, training_options
from pronk.cli.parameter_types import NAME, Number
from pronk.cli.verb import verb
from pronk.formats import names

_POSITIVE = Number(min=0, min_open=True)


def _numbers(ctx: click.Context, param: click.Parameter, value: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in value.split(",")) if value else ()
    except ValueError:
        raise click.BadParameter("must be numbers with commas between them, as 1,0.5", ctx, param) from None


_own = options.together(
    options.together(
        click.option("--reward", required=True, multiple=True, type=NAME, metavar="REWARD",
                     help="Reward completions by this: file.py:function, called as (prompt, completion, record); a "
                     "reward model's folder; or one of these: exact[:KEY], 1 where it is what the record has under "
                     "KEY (by default answer), but for spaces around it; regex:PATTERN, 1 where PATTERN is found in "
                     "it; schema:FILE, 1 for JSON of that schema; length:TOKENS, 1 for that many tokens, less for more "
                     "or fewer, 0 for twice as many. Repeatable."),
        click.option("--reward-weights", callback=_numbers, default="", metavar="X,Y,...",
                     help="Weigh the rewards, in their order, in the sum.  [default: 1 each]"),
        click.option("--reward-timeout", type=_POSITIVE, default=10.0, show_default=True, metavar="SECONDS",
                     help="Stop the run where a function takes longer over a completion."),
        heading="Rewards",
    ),
    options.together(
        click.option("--num-generations", type=click.IntRange(min=2), default=8, show_default=True, metavar="N",
                     help="Write N completions to each prompt: a group."),
        click.option("--max-new-tokens", "--max-completion-length", "max_new_tokens", type=click.IntRange(min=1),
                     default=128, show_default=True, metavar="N", help="Cut completions off at N tokens."),
        click.option("--dynamic-sampling", is_flag=True,
                     help="Replace groups whose completions are all worth the same by those of other prompts (DAPO)."),
        click.option("--rollout", type=click.Choice(["engine", "exact"]), default="engine", show_default=True,
                     help="Write completions with the CPU engine, wherever the model is trained, or by the very pass "
                     "that is trained on: exact, and slow."),
        click.option("--rollout-quantize", type=click.Choice(["auto", *names(engine="cpu")]), default="auto",
                     show_default=True, metavar="FORMAT",
                     help="Write completions with weights in this format; auto: that of --quantize, or of the file."),
        click.option("--importance-cap", type=Number(min=0), default=2.0, show_default=True, metavar="X",
                     help="Weigh each token's loss by its probability under the trained weights over that under the "
                     "weights that wrote it, X at most (truncated importance sampling); 0: do not."),
        heading="Rollouts",
    ),
    options.together(
        click.option("--loss", "--loss-type", "loss_type", type=click.Choice(["grpo", "dr_grpo", "dapo"]),
                     default="grpo", show_default=True,
                     help="Average the loss over each completion's tokens first (grpo), over all tokens (dapo), or "
                     "divide by --max-new-tokens (dr_grpo)."),
        click.option("--estimator", type=click.Choice(["grpo", "rloo"]), default="grpo", show_default=True,
                     help="Hold a completion against the mean of its group, or of the others in it (rloo)."),
        click.option("--scale-rewards", type=click.Choice(["group", "batch", "none"]),
                     help="Divide advantages by the standard deviation of rewards in the group, in the step, or not at "
                     "all.  [default: group; none with dr_grpo or rloo]"),
        click.option("--epsilon", type=Number(0, 1, min_open=True, max_open=True), default=0.2,
                     show_default=True, metavar="X", help="Clip the policy's ratio at 1 - X and 1 + X."),
        click.option("--epsilon-high", "--clip-high", "epsilon_high", type=_POSITIVE, metavar="X",
                     help="Clip it at 1 + X above: DAPO has 0.28.  [default: --epsilon]"),
        click.option("--kl-coef", type=Number(min=0), default=0.0, show_default=True, metavar="X",
                     help="Add X times the KL divergence from MODEL to the loss; needs LoRA."),
        click.option("--num-iterations", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
                     help="Update the weights N times on the completions of a step."),
        heading="Objective",
    ),
)  # fmt: skip
_look = options.together(
    click.option("--show-rollouts", is_flag=True,
                 help="Print completions and rewards of the newest step in --out, or, before there is one, of what the "
                 "run would begin with, and exit."),
    heading=options.OUTPUT,
)  # fmt: skip


@verb(
    epilog="""\b
Examples:
  pronk grpo smollm2:135m --data prompts.jsonl --reward rewards.py:polite --out mine --show-rollouts
  pronk grpo smollm2:135m --data prompts.jsonl --reward rewards.py:polite --out mine
  pronk grpo smollm2:135m --data sums.jsonl --reward exact --reward length:20 --reward-weights 1,0.1 --out mine
  pronk generate -m smollm2:135m --adapter mine --chat "..."

A record is {"prompt"}, a text or a list of messages, with whatever the reward looks at ("answer").
A step writes to --batch-size times --accumulate prompts. Completions and rewards are kept in rollouts.jsonl.
The held-out loss is minus the mean reward of held-out prompts.
Ctrl-C and SIGTERM finish the step and save a checkpoint; --resume then gives the same result as a run that
was never stopped. Training needs torch."""
)
@training_options.of_records(_own, "grpo")
@_look
def command(**given: Any) -> None:
    """Train a model on rewards of its own completions with GRPO.

    MODEL writes several completions to each prompt, and learns, by LoRA or in all weights, to write those that are
    worth more than the others of their group.
    """
    from pronk.train.runs import grpo

    training.perform(grpo, given)
