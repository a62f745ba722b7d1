"""Options of the training verbs; what they are, pronk.train.runs checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, get_args

import click

from pronk.cli import options, typed
from pronk.cli.parameter_types import NAME, Number
from pronk.errors import BadRequest
from pronk.formats import FLOATS, TRAINED
from pronk.train.runs.duration import seconds
from pronk.train.runs.options import LOGS, RATES, TIMES
from pronk.train.runs.shared import Optimizer

F = TypeVar("F", bound=Callable[..., Any])

_N = click.IntRange(min=1)
_POSITIVE = Number(min=0, min_open=True)


def _installed(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    if names:  # an import that takes a moment
        from pronk.train import logs

        logs.check(names)
    return names


def _fields(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


class Duration(click.types.StringParamType):
    """As it was typed."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            seconds(value)
        except ValueError:
            self.fail(f"{value!r} is no duration over 0, as 90m, 2h, 1h30m, or a number of seconds", param, ctx)
        return value


too_long_option = click.option(
    "--too-long", type=click.Choice(["error", "cut", "skip", "split"]), default="error", show_default=True,
    help="Of examples that are longer than the context, or than --max-length where a verb has that: refuse them, cut "
    "their end off, leave them out, or split them (bare texts alone; others are refused).",
)  # fmt: skip
skip_option = click.option("--skip-bad-records", is_flag=True, help="Leave malformed records out, and report how many.")
fields_option = click.option(
    "--fields", metavar="KEY=NAME,...", callback=_fields, default="",
    help='Read the key KEY of your records as pronk\'s NAME: reply=answer reads your "reply" as "answer". KEY= ignores '
    "KEY.",
)  # fmt: skip
template_option = click.option(
    "--chat-template", type=NAME, metavar="FILE|NAME",
    help="Use this chat template, not the model's: a Jinja file, llama2 or llama3.",
)  # fmt: skip
data = options.together(
    click.option("--data", required=True, multiple=True, type=NAME, metavar="FILE",
                 help="Train on the records in FILE: JSON lines, JSON, CSV or Parquet; on a folder of texts (of "
                 "finetune alone); or on a dataset on the hub (owner/name). Repeatable; FILE=0.5 takes half of its "
                 "examples each epoch, FILE=2 each twice."),
    click.option("--max-length", type=_N, metavar="N",
                 help="Allow examples of at most N tokens.  [default: the context length]"),
    too_long_option,
    skip_option,
    fields_option,
    template_option,
    options.tokenizer_option,
    click.option("--no-token-cache", "token_cache", is_flag=True, flag_value=False, default=True,
                 help="Neither write nor read the cache of token ids (the folder tokens of the user's cache, or of "
                 "$PRONK_HOME), by which data of 1 MB and more is encoded once."),
    heading="Data",
)  # fmt: skip
lora = options.together(
    click.option("--full", is_flag=True,
                 help="Train all weights, without LoRA; their gradients and AdamW's moments take three times "
                 "the memory of the weights."),
    click.option("--lora-rank", "--lora-r", type=_N, metavar="R",
                 help="Train LoRA matrices of rank R.  [default: 16]"),
    click.option("--lora-alpha", type=_POSITIVE, metavar="X",
                 help="Scale the LoRA update by X / rank.  [default: 32]"),
    click.option("--lora-dropout", type=Number(0, 1, max_open=True), metavar="P",
                 help="Drop inputs of the LoRA matrices with probability P.  [default: 0]"),
    click.option("--rslora", is_flag=True, help="Scale the LoRA update by alpha / sqrt(rank) (rsLoRA)."),
    click.option("--dora", is_flag=True,
                 help="Learn the lengths of the weights' rows apart (DoRA); answers need the adapter merged: "
                 "--merge-adapter."),
    click.option("--lora-plus-ratio", "--loraplus-lr-ratio", "lora_plus_ratio", type=_POSITIVE, metavar="X",
                 help="Train LoRA's B with X times the learning rate (LoRA+).  [default: 1]"),
    click.option("--target-modules", type=NAME, metavar="A,B,...",
                 help="Put LoRA beside these: q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.  "
                 "[default: all-linear, which is all seven]"),
    click.option("--from-adapter", type=NAME, metavar="FOLDER",
                 help="Begin from the LoRA adapter in FOLDER, with its rank, alpha, kind and modules."),
    click.option("--quantize", type=click.Choice(["auto", *TRAINED]), metavar="FORMAT",
                 help=f"Keep the frozen weights in {', '.join(TRAINED)}, or auto: as the file has them.  [default: "
                 "f32; 16 bits with --precision bf16 or f16]"),
    heading="LoRA",
)  # fmt: skip


def shared(lr: str, writes: bool = True) -> Callable[[F], F]:
    """What all training verbs have. `lr`: the learning rate where none is given, in words; `writes`: not so of a reward
    model, whose options of what it would write are for its recipe alone, which names all."""
    steps = options.together(
        click.option("--epochs", "--num-train-epochs", type=_POSITIVE, default=3.0, show_default=True, metavar="N",
                     help="Pass N times over the data."),
        click.option("--max-steps", type=_N, metavar="N", help="Stop after N optimizer steps; overrides --epochs."),
        click.option("--max-time", type=Duration(), metavar="TIME",
                     help="Stop after TIME (90m, 2h, 1h30m, or seconds), counted from this start: the step is finished "
                     "and saved, and --resume goes on, with as much time again."),
        click.option("--batch-size", "--per-device-train-batch-size", type=_N, default=1, show_default=True,
                     metavar="N", help="Put N examples into a micro-batch."),
        click.option("--accumulate", "--gradient-accumulation-steps", type=_N, default=8, show_default=True,
                     metavar="N", help="Accumulate the gradients of N micro-batches for each optimizer step."),
        click.option("--pack", type=_N, metavar="TOKENS",
                     help="Pack whole examples into micro-batches of at most TOKENS tokens, in place of --batch-size. "
                     "Packed examples do not attend to one another."),
        click.option("--bucket", is_flag=True,
                     help="Put examples of similar length into the same micro-batch; the micro-batches stay shuffled."),
        click.option("--lr", "--learning-rate", "lr", type=_POSITIVE, metavar="X",
                     help=f"Set the peak learning rate.  [default: {lr}]"),
        click.option("--warmup", "--warmup-ratio", type=Number(0, 1), default=0.03, show_default=True,
                     metavar="X", help="Raise the learning rate linearly over this fraction of all steps."),
        click.option("--schedule", "--lr-scheduler", "--lr-scheduler-type", default="cosine", show_default=True,
                     type=click.Choice(["cosine", "linear", "constant"]),
                     help="Decay the learning rate like this after the warmup."),
        click.option("--weight-decay", type=Number(min=0), default=0.0, show_default=True, metavar="X",
                     help="Decay weight matrices by X times the learning rate per step; norms do not decay."),
        click.option("--clip", "--max-grad-norm", type=Number(min=0), default=1.0, show_default=True,
                     metavar="X", help="Clip the gradient to an L2 norm of X; 0: no clipping."),
        click.option("--optimizer", "--optim", default="adamw", show_default=True,
                     type=click.Choice(get_args(Optimizer)),
                     help="Use this optimizer. adamw8bit keeps its moments in 8 bits; adafactor keeps means of rows "
                     "and columns in their place. muon is for the matrices of blocks, LoRA's too: embeddings, head, "
                     "norms and whatever else is no such matrix learn by AdamW beside it."),
        click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
                     help="Seed the order of examples, the choice of held-out ones, the LoRA matrices and dropout."),
        heading="Optimizer",
    )  # fmt: skip
    cost = options.together(
        click.option("--precision", type=click.Choice(FLOATS),
                     help="Compute the forward and backward pass in this data type (mixed precision); trained weights "
                     "stay f32.  [default: f32; on a GPU bf16]"),
        click.option("--recompute", type=click.IntRange(min=0), default=0, show_default=True, metavar="K",
                     help="Gradient checkpointing: recompute the activations of every K-th block in the backward pass, "
                     "which takes less memory and more time; 1: every block, 0: none."),
        click.option("--gradient-checkpointing", is_flag=True, help="Recompute every block, as --recompute 1 does."),
        options.threads_option,
        click.option("--device", type=NAME, metavar="NAME",
                     help="Train on cpu, cuda or cuda:N.  [default: cuda if torch finds a GPU, else cpu]"),
        heading="Memory and speed",
    )  # fmt: skip
    held_out = options.together(
        click.option("--eval-data", type=NAME, metavar="FILE", help="Evaluate on the held-out data in FILE."),
        click.option("--eval-share", type=Number(0, 1, max_open=True), default=0.1, show_default=True,
                     metavar="X",
                     help="Without --eval-data, hold out this fraction of --data, chosen at random; 0: none. Of fewer "
                     "than 10 examples none is held out."),
        click.option("--eval-every", "--eval-steps", type=_N, metavar="N",
                     help="Evaluate on held-out data every N optimizer steps.  [default: once per epoch]"),
        click.option("--patience", type=_N, metavar="N",
                     help="Stop early after N evaluations without a lower held-out loss.  [default: never]"),
        click.option("--early-stop-task", type=NAME, metavar="TASK", hidden=not writes,
                     help="Judge each evaluation by the score on TASK (of lm-evaluation-harness, or a task file), not "
                     "by held-out loss: what does best is kept, and --patience counts those that are no better."),
        click.option("--early-stop-limit", type=_N, metavar="N", hidden=not writes,
                     help="Ask the first N questions of --early-stop-task.  [default: all]"),
        click.option("--samples", type=click.IntRange(min=0), default=2, show_default=True, metavar="N",
                     help="Answer N held-out prompts before and after training, and print both answers." if writes else
                     "Score the answers of N held-out pairs after training, and print them."),
        click.option("--samples-at", type=click.Choice(["ends", "looks"]), default="ends", show_default=True,
                     hidden=not writes,
                     help="looks: answer them after each evaluation as well, into samples.jsonl and curves.html; each "
                     "evaluation then takes N answers longer."),
        heading="Evaluation",
    )  # fmt: skip
    output = options.together(
        click.option("-o", "--out", "--output-dir", type=NAME, metavar="FOLDER",
                     help="Write the adapter (with --full: the model), metrics and checkpoints to FOLDER.  [required, "
                     "except with --show-batch or --plan]"),
        click.option("--save-every", "--save-steps", type=_N, default=50, show_default=True, metavar="N",
                     help="Save a checkpoint to resume from every N optimizer steps."),
        click.option("--resume", is_flag=True,
                     help="Continue from the newest checkpoint in --out; more --epochs or --max-steps go on longer."),
        click.option("--log-to", "--report-to", type=click.Choice(LOGS), multiple=True,
                     callback=_installed, metavar="LOG",
                     help="Also log the metrics of each step to tensorboard or wandb. Repeatable."),
        click.option("--push-to-hub", type=NAME, metavar="REPO",
                     help="When the run is finished, upload the adapter or the model with its README.md to REPO "
                     "(owner/name) on the Hugging Face hub, as pronk push does."),
        click.option("--private/--public", default=True, show_default=True,
                     help="Let --push-to-hub make a new repository private, or public."),
        options.json_option,
        heading=options.OUTPUT,
    )  # fmt: skip
    return options.together(steps, cost, held_out, output)


_noise = options.together(
    click.option("--neftune-alpha", "--neftune-noise-alpha", "neftune_alpha", type=_POSITIVE, metavar="X",
                 help="Add noise of strength X to embeddings in training (NEFTune; 5 is usual).  [default: none]"),
    heading="Optimizer",
)  # fmt: skip
_looking = options.together(
    click.option("--show-batch", is_flag=True,
                 help="Print the first two micro-batches with the trained tokens marked, and exit."),
    click.option("--plan", is_flag=True,
                 help="Print how much memory training needs, and whether that is free, and exit."),
    heading=options.OUTPUT,
)  # fmt: skip


def of_records(own: Callable[[F], F], objective: str) -> Callable[[F], F]:
    """All options of a verb that trains MODEL on records; `own` are those that it alone has."""
    lr, full = (f"{number:.0e}".replace("e-0", "e-") for number in RATES[objective])
    steps = shared(
        f"{lr}; with --full {full}; of adafactor {TIMES['adafactor']:.0f} times as much", writes=objective != "reward"
    )
    return options.together(options.model_argument, data, own, lora, steps, _noise, _looking)


VIEWS = ("show_batch", "show_rollouts", "plan", "as_json")  # of all these, what Python has no use for


@contextmanager
def refused() -> Iterator[None]:
    """What is wrong with options, or contradicts itself, is wrong usage."""
    from pronk.train.runs.options import Contradiction

    try:
        yield
    except Contradiction as error:
        raise click.UsageError(error.said(lambda name: "--" + name.replace("_", "-"))) from None
    except BadRequest as error:
        raise click.UsageError(typed.in_words(click.get_current_context(), str(error))[0]) from None
