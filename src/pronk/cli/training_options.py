"""Options of the training verbs, and the way from them to Settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from pronk.cli import options
from pronk.errors import BadRequest
from pronk.formats import FLOATS, TRAINED

if TYPE_CHECKING:
    from pronk.train.objectives.objective import Objective
    from pronk.train.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

_N = click.IntRange(min=1)
_POSITIVE = options.Number(min=0, min_open=True)


class Rates(NamedTuple):
    """Learning rates where none is given."""

    lora: float
    full: float


def lr(usual: Rates) -> Callable[[F], F]:
    shown = [f"{number:.0e}".replace("e-0", "e-") for number in usual]
    return click.option(
        "--lr", "--learning-rate", "lr", type=_POSITIVE, metavar="X",
        help=f"Learning rate.  [default: {shown[0]}; with --full {shown[1]}]",
    )  # fmt: skip


def _installed(ctx: click.Context, param: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    if names:  # an import that takes a moment
        from pronk.train import logs

        logs.check(names)
    return names


def _fields(ctx: click.Context, param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


data = options.together(
    click.option("--data", required=True, multiple=True, type=options.NAME, metavar="FILE",
                 help="JSON lines, JSON, CSV or Parquet; or a dataset on the hub (owner/name). Repeatable; FILE=0.5 "
                      "sees half of its examples an epoch, FILE=2 each twice."),
    click.option("-o", "--out", "--output-dir", type=options.NAME, metavar="FOLDER",
                 help="Where the adapter (with --full: the model), metrics and checkpoints go."),
    click.option("--max-length", type=_N, metavar="N", help="Tokens of the longest example.  [default: the context]"),
    click.option("--too-long", type=click.Choice(["error", "cut", "skip"]), default="error", show_default=True,
                 help="What becomes of longer ones."),
    click.option("--skip-bad-records", is_flag=True, help="Leave out, and count, records that are wrong."),
    click.option("--fields", metavar="KEY=NAME,...", callback=_fields, default="",
                 help="What keys of records are to be called: answer=output; id= leaves one out."),
    click.option("--chat-template", type=options.NAME, metavar="FILE|NAME", help="Instead of the model's own."),
    click.option("--eval-data", type=options.NAME, metavar="FILE", help="Held-out data of its own."),
    click.option("--eval-share", type=options.Number(0, 1, max_open=True), default=0.1, show_default=True,
                 metavar="X", help="Else: the share of --data that is held out."),
    click.option("--show-batch", is_flag=True, help="Print the first micro-batches, what is learned marked, and stop."),
    click.option("--plan", is_flag=True, help="Print what memory it will take, and whether that is free, and stop."),
)  # fmt: skip
lora = options.together(
    click.option("--full", is_flag=True, help="Train all weights instead of LoRA."),
    click.option("--lora-rank", "--lora-r", type=_N, metavar="R", help="Rank of the two thin matrices.  [default: 16]"),
    click.option("--lora-alpha", type=_POSITIVE, metavar="X", help="Their product counts X / R times.  [default: 32]"),
    click.option("--lora-dropout", type=options.Number(0, 1, max_open=True), metavar="P",
                 help="Of what they are given.  [default: 0]"),
    click.option("--target-modules", type=options.NAME, metavar="A,B,...",
                 help="q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.  [default: all-linear: these]"),
    click.option("--from-adapter", type=options.NAME, metavar="FOLDER",
                 help="Go on from a LoRA adapter, with its rank, alpha and modules."),
    click.option("--quantize", type=click.Choice(["auto", *TRAINED]), metavar="FORMAT",
                 help="Keep frozen weights in int8, llm-int8, q8, q4, or auto: as the file has them.  [default: f32]"),
)  # fmt: skip
steps = options.together(
    click.option("--epochs", "--num-train-epochs", type=_POSITIVE, default=3.0, show_default=True, metavar="N",
                 help="Passes over the data."),
    click.option("--max-steps", type=_N, metavar="N", help="Stop after N steps instead."),
    click.option("--batch-size", "--per-device-train-batch-size", type=_N, default=1, show_default=True, metavar="N",
                 help="Examples of a micro-batch."),
    click.option("--accumulate", "--gradient-accumulation-steps", type=_N, default=8, show_default=True, metavar="N",
                 help="Micro-batches of a step."),
    click.option("--pack", type=_N, metavar="TOKENS", help="Instead of --batch-size: as many examples as fit."),
    click.option("--bucket", is_flag=True, help="Put examples of like length together."),
    click.option("--warmup", "--warmup-ratio", type=options.Number(0, 1), default=0.03, show_default=True,
                 metavar="X", help="The share of all steps in which it rises."),
    click.option("--schedule", "--lr-scheduler", "--lr-scheduler-type", default="cosine", show_default=True,
                 type=click.Choice(["cosine", "linear", "constant"]), help="How it falls."),
    click.option("--weight-decay", type=options.Number(min=0), default=0.0, show_default=True, metavar="X",
                 help="Of matrices."),
    click.option("--clip", "--max-grad-norm", type=options.Number(min=0), default=1.0, show_default=True,
                 metavar="X", help="The longest gradient; 0: any."),
    click.option("--optimizer", "--optim", default="adamw", show_default=True,
                 type=click.Choice(["adamw", "adamw8bit", "sgd"]), help="adamw8bit keeps moments in 8 bits."),
    click.option("--precision", type=click.Choice(FLOATS),
                 help="What is computed in; weights stay f32.  [default: f32; on a GPU bf16]"),
    click.option("--recompute", type=click.IntRange(min=0), default=0, show_default=True, metavar="K",
                 help="Forget activations of every K-th block and compute them again: less memory."),
    click.option("--gradient-checkpointing", is_flag=True, help="The same as --recompute 1."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N"),
    options.threads_option,
    click.option("--device", type=options.NAME, metavar="NAME", help="cpu, cuda or cuda:N.  [default: a GPU's]"),
)  # fmt: skip
course = options.together(
    click.option("--eval-every", "--eval-steps", type=_N, metavar="N",
                 help="Steps between two looks at held-out data.  [default: an epoch]"),
    click.option("--patience", type=_N, metavar="N", help="Stop after N looks without a better one."),
    click.option("--save-every", "--save-steps", type=_N, default=50, show_default=True, metavar="N",
                 help="Steps between two checkpoints."),
    click.option("--resume", is_flag=True,
                 help="Go on from the newest checkpoint in --out; for longer with more epochs or steps."),
    click.option("--samples", type=click.IntRange(min=0), default=2, show_default=True, metavar="N",
                 help="Held-out prompts to answer before and after."),
    click.option("--log-to", "--report-to", type=click.Choice(["tensorboard", "wandb"]), multiple=True,
                 callback=_installed, metavar="LOG",
                 help="Tell each step to tensorboard or wandb as well. Repeatable."),
)  # fmt: skip


def of_records(own: Callable[[F], F], usual: Rates) -> Callable[[F], F]:
    """All options of a verb that trains MODEL on records; `own` are those that it alone has."""
    return options.together(
        options.model_argument, data, own, lora, lr(usual), steps, course, options.tokenizer_option,
        options.json_option,
    )  # fmt: skip


# Of all these, what a run is not made of: how it is done and shown.
HOW = ("out", "device", "threads", "resume", "show_batch", "plan", "samples", "log_to", "tokenizer", "as_json")


def settings(
    model: str, given: dict[str, Any], usual: Rates, objective: Callable[[], type[Objective]]
) -> tuple[Settings, dict[str, Any]]:
    """What makes the run, and HOW it is done. What contradicts itself is wrong usage.

    `objective` imports its class, whose fields are options of the verb.
    """
    from pronk.torch_engine import import_torch

    import_torch()
    from pronk.checkpoint.adapter import TARGETS, LoraConfig, read_config
    from pronk.system import expanded
    from pronk.train.settings import Settings

    how = {name: given.pop(name) for name in HOW}
    full = given.pop("full")
    lora = {name: given.pop(f"lora_{name}") for name in ("rank", "alpha", "dropout")}
    lora["target_modules"] = targets = given.pop("target_modules")
    lora = {name: value for name, value in lora.items() if value is not None}
    if full and lora:
        raise click.UsageError("--full trains all weights; leave the options of LoRA out")
    if targets:
        names = tuple(name.strip() for name in targets.split(","))
        lora["target_modules"] = TARGETS if names == ("all-linear",) else names
    if given["from_adapter"] and not full:
        if lora.keys() - {"dropout"}:
            raise click.UsageError("--from-adapter has a rank, an alpha and modules of its own; leave these out")
        own_config, _ = read_config(expanded(given["from_adapter"]))
        lora = {**asdict(own_config), "dropout": lora.get("dropout", 0.0)}
    settle_computing(given, how["device"])
    given["data"] = given["data"][0] if len(given["data"]) == 1 else given["data"]
    given["skip_bad"] = given.pop("skip_bad_records")
    given["lr"] = given["lr"] or (usual.full if full else usual.lora)
    kind = objective()
    own = {field.name: given.pop(field.name) for field in fields(kind)}
    try:
        return Settings(model, **given, objective=kind(**own), lora=None if full else LoraConfig(**lora)), how
    except BadRequest as error:
        raise click.UsageError(str(error)) from None


def settle_computing(given: dict[str, Any], device: str | None) -> None:
    """Options that stand for others, and the precision that fits the device, in place."""
    from pronk.torch_engine.backend import pick_device

    if given.pop("gradient_checkpointing"):
        if given["recompute"] > 1:
            raise click.UsageError("--gradient-checkpointing is --recompute 1; give one of them")
        given["recompute"] = 1
    given["precision"] = given["precision"] or ("f32" if pick_device(device).type == "cpu" else "bf16")
