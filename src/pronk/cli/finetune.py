"""`pronk finetune`: a model adapted to one's own data, by LoRA or in all of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, options, training
from pronk.cli.convert import open_source, tokenizer_for
from pronk.errors import BadRequest, NoTokenizer, one_line, short

if TYPE_CHECKING:
    from pronk.checkpoint.tensors import Checkpoint
    from pronk.tokenizer import Tokenizer
    from pronk.train.data import Data
    from pronk.train.run import Run
    from pronk.train.settings import Settings

_SHOWN = 2  # micro-batches
_STEPS = 10  # whose losses are told as one: each is of few examples
_RATES = {True: 2e-5, False: 2e-4}  # for all weights, for LoRA: TRL's, and the usual ten times that
_N = click.IntRange(min=1)
_POSITIVE = click.FloatRange(min=0, min_open=True)

_data = options.together(
    click.option("--data", required=True, type=options.NAME, metavar="FILE",
                 help="JSON lines, JSON, CSV or Parquet; or a dataset on the hub (owner/name)."),
    click.option("-o", "--out", "--output-dir", type=options.NAME, metavar="FOLDER",
                 help="Where the adapter (with --full: the model), metrics and checkpoints go."),
    click.option("--max-length", type=_N, metavar="N", help="Tokens of the longest example.  [default: the context]"),
    click.option("--too-long", type=click.Choice(["error", "cut", "skip"]), default="error", show_default=True,
                 help="What becomes of longer ones."),
    click.option("--skip-bad-records", is_flag=True, help="Leave out, and count, records that are wrong."),
    click.option("--train-on-prompt", is_flag=True, help="Learn prompts as well, not only answers."),
    click.option("--chat-template", type=options.NAME, metavar="FILE|NAME", help="Instead of the model's own."),
    click.option("--chat-instructions", is_flag=True,
                 help="Put instruction records through the chat template instead of Alpaca's."),
    click.option("--eval-data", type=options.NAME, metavar="FILE", help="Held-out data of its own."),
    click.option("--eval-share", type=click.FloatRange(0, 1, max_open=True), default=0.1, show_default=True,
                 metavar="X", help="Else: the share of --data that is held out."),
    click.option("--show-batch", is_flag=True, help="Print the first micro-batches, what is learned marked, and stop."),
)  # fmt: skip
_what = options.together(
    click.option("--full", is_flag=True, help="Train all weights instead of LoRA."),
    click.option("--lora-rank", "--lora-r", type=_N, metavar="R", help="Rank of the two thin matrices.  [default: 16]"),
    click.option("--lora-alpha", type=_POSITIVE, metavar="X", help="Their product counts X / R times.  [default: 32]"),
    click.option("--lora-dropout", type=click.FloatRange(0, 1, max_open=True), metavar="P",
                 help="Of what they are given.  [default: 0]"),
    click.option("--target-modules", type=options.NAME, metavar="A,B,...",
                 help="q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.  [default: all-linear: these]"),
)  # fmt: skip
_how = options.together(
    click.option("--epochs", "--num-train-epochs", type=_POSITIVE, default=3.0, show_default=True, metavar="N",
                 help="Passes over the data."),
    click.option("--max-steps", type=_N, metavar="N", help="Stop after N steps instead."),
    click.option("--batch-size", "--per-device-train-batch-size", type=_N, default=1, show_default=True, metavar="N",
                 help="Examples of a micro-batch."),
    click.option("--accumulate", "--gradient-accumulation-steps", type=_N, default=8, show_default=True, metavar="N",
                 help="Micro-batches of a step."),
    click.option("--pack", type=_N, metavar="TOKENS", help="Instead of --batch-size: as many examples as fit."),
    click.option("--bucket", is_flag=True, help="Put examples of like length together."),
    click.option("--lr", "--learning-rate", "rate", type=_POSITIVE, metavar="X",
                 help="Learning rate.  [default: 2e-4; with --full 2e-5]"),
    click.option("--warmup", "--warmup-ratio", type=click.FloatRange(0, 1), default=0.03, show_default=True,
                 metavar="X", help="The share of all steps in which it rises."),
    click.option("--schedule", "--lr-scheduler", "--lr-scheduler-type", default="cosine", show_default=True,
                 type=click.Choice(["cosine", "linear", "constant"]), help="How it falls."),
    click.option("--weight-decay", "decay", type=click.FloatRange(min=0), default=0.0, show_default=True, metavar="X",
                 help="Of matrices."),
    click.option("--clip", "--max-grad-norm", type=click.FloatRange(min=0), default=1.0, show_default=True,
                 metavar="X", help="The longest gradient; 0: any."),
    click.option("--optimizer", "--optim", default="adamw", show_default=True,
                 type=click.Choice(["adamw", "adamw8bit", "sgd"]), help="adamw8bit keeps moments in 8 bits."),
    click.option("--precision", type=click.Choice(["f32", "bf16", "f16"]),
                 help="What is computed in; weights stay f32.  [default: f32; on a GPU bf16]"),
    click.option("--recompute", type=click.IntRange(min=0), default=0, show_default=True, metavar="K",
                 help="Forget activations of every K-th block and compute them again: less memory."),
    click.option("--gradient-checkpointing", is_flag=True, help="The same as --recompute 1."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N"),
    click.option("--threads", type=_N, metavar="N", help="CPU threads.  [default: one a core]"),
    click.option("--device", type=options.NAME, metavar="NAME", help="cpu, cuda or cuda:N.  [default: a GPU's]"),
)  # fmt: skip
_when = options.together(
    click.option("--eval-every", "--eval-steps", type=_N, metavar="N",
                 help="Steps between two looks at held-out data.  [default: an epoch]"),
    click.option("--patience", type=_N, metavar="N", help="Stop after N looks without a better one."),
    click.option("--save-every", "--save-steps", type=_N, default=50, show_default=True, metavar="N",
                 help="Steps between two checkpoints."),
    click.option("--resume", is_flag=True, help="Go on from the newest checkpoint in --out."),
    click.option("--samples", type=click.IntRange(min=0), default=2, show_default=True, metavar="N",
                 help="Held-out prompts to answer before and after."),
)  # fmt: skip


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
@options.model_argument
@_data
@_what
@_how
@_when
@options.tokenizer_option
@options.json_option
def command(
    model: str,
    out: str | None,
    threads: int | None,
    device: str | None,
    resume: bool,
    show_batch: bool,
    samples: int,
    tokenizer: str | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Adapt MODEL to data of one's own."""
    from pronk import engines
    from pronk.loading import tokenizer_of

    engines.import_torch()
    from pronk.train.data import prepare
    from pronk.train.folder import MODEL, claimed

    settings = _settings(model, device, given)
    folder = None if show_batch else training.check_out(out)
    checkpoint = open_source(model, tokenizer, None)
    codec = tokenizer_of(checkpoint)
    if codec is None:
        raise NoTokenizer(f"{model} carries no tokenizer; name one with --tokenizer FILE")
    if folder is None:
        data = prepare(settings, codec, checkpoint.config.max_position_embeddings)
        training.show_batches(_first_batches(data, settings), codec)
        return
    with claimed(folder, resume=resume), training.memory_suffices():
        data = prepare(settings, codec, checkpoint.config.max_position_embeddings)
        _note_losses(data)
        prompts, answers = _prompts(data, codec, samples)
        loading: dict[str, Any] = {"device": device, "threads": threads}
        before = training.samples(model, prompts, tokenizer=tokenizer, **loading)
        run = _make(checkpoint, data, settings, folder, threads, device)
        if resume:
            run.resume()
        with training.stopping() as stop:
            done = training.train(run, stop)
        if not done:
            console.note(
                f"stopped after step {run.loop.position.step} of {run.loop.schedule.steps}, and saved; go on with the "
                "same command and --resume"
            )
            raise click.exceptions.Exit(stop.code)
        report = _report(run)
        if (losses := report["held_out_loss"]) and losses["kept"] >= losses["first"]:
            console.note("held-out loss never fell below MODEL's own: take a smaller --lr, fewer --epochs or more data")
        del run  # what it kept best is read back, not what it ended with
        if settings.lora:
            after = training.samples(model, prompts, tokenizer=tokenizer, adapter=folder, **loading)
        else:
            after = training.samples(str(folder / MODEL), prompts, **loading)
    report["samples"] = [
        {"prompt": codec.decode(ids), "before": b, "after": a, "data": answer}
        for ids, b, a, answer in zip(prompts, before, after, answers, strict=True)
    ]
    console.write_json(report) if as_json else console.write(_as_text(report) + "\n")


def _settings(model: str, device: str | None, given: dict[str, Any]) -> Settings:
    from pronk.checkpoint.adapter import TARGETS, LoraConfig
    from pronk.torch_engine.backend import pick_device
    from pronk.train.settings import Settings

    full = given.pop("full")
    lora = {name: given.pop(f"lora_{name}") for name in ("rank", "alpha", "dropout")}
    lora["target_modules"] = targets = given.pop("target_modules")
    lora = {name: value for name, value in lora.items() if value is not None}
    if full and lora:
        raise click.UsageError("--full trains all weights; leave the options of LoRA out")
    if targets:
        names = tuple(name.strip() for name in targets.split(","))
        lora["target_modules"] = TARGETS if names == ("all-linear",) else names
    if given.pop("gradient_checkpointing"):
        if given["recompute"] > 1:
            raise click.UsageError("--gradient-checkpointing is --recompute 1; give one of them")
        given["recompute"] = 1
    given["skip_bad"] = given.pop("skip_bad_records")
    given["rate"] = given["rate"] or _RATES[full]
    given["precision"] = given["precision"] or ("f32" if pick_device(device).type == "cpu" else "bf16")
    try:
        return Settings(model, **given, lora=None if full else LoraConfig(**lora))
    except BadRequest as error:
        raise click.UsageError(str(error)) from None


def _make(
    checkpoint: Checkpoint, data: Data, settings: Settings, folder: Path, threads: int | None, device: str | None
) -> Run:
    from pronk.cli import progress
    from pronk.train.run import Run

    _, files = (None, None) if settings.lora else tokenizer_for(checkpoint, "safetensors")
    with progress.shown("loading", patience=0) as advance:
        how = {"device": device, "threads": threads, "progress": advance}
        return Run(checkpoint, data, settings, folder, tokenizer_files=files, **how)  # type: ignore[arg-type]


def _first_batches(data: Data, settings: Settings) -> list[list[Any]]:
    from pronk.train.data import batches_of

    chosen = batches_of(data, settings).epoch(0)[:_SHOWN]
    return [[data.train[index] for index in indices] for indices in chosen]


def _prompts(data: Data, codec: Tokenizer, count: int) -> tuple[list[list[int]], list[str]]:
    pairs = [training.parts(example, codec) for example in data.held_out[:count]]
    return [ids for ids, _ in pairs], [answer for _, answer in pairs]


def _note_losses(data: Data) -> None:
    """What of the data is not trained on, said before it takes time."""
    if data.skipped:
        console.note(f"bad records left out: {len(data.skipped)}; the first: {one_line(data.skipped[0], 300)}")
    for what, count in (("examples cut at their end", data.cut), ("examples left out as too long", data.too_long)):
        if count:
            console.note(f"{what}: {count}")
    if data.unused:
        console.note(f"keys of records that nobody reads: {short(sorted(data.unused))}")
    if not data.held_out:
        console.note("nothing is held out: whether it learns more than the data by heart will not be known")


def _report(run: Run) -> dict[str, Any]:
    from pronk.train.curve import draw
    from pronk.train.folder import read_metrics

    metrics = read_metrics(run.folder)
    steps = [line for line in metrics if "loss" in line]
    held_out = [line for line in metrics if "held_out_loss" in line]
    kept = min(held_out[1:], key=lambda line: line["held_out_loss"], default=None)
    seconds, tokens = (sum(line[name] for line in steps) for name in ("seconds", "tokens"))
    losses = [line["loss"] for line in steps]
    some = min(_STEPS, len(steps))
    curve = draw(run.folder)
    return {
        "model": run.settings.model,
        "out": str(run.folder),
        "method": "LoRA" if run.settings.lora else "full",
        "trained_share": run.trained_share,
        "examples": {"train": len(run.data.train), "held_out": len(run.data.held_out)},
        "steps": len(steps),
        "planned_steps": run.loop.schedule.steps,
        "epochs": steps[-1]["epoch"],
        "loss": {"first": sum(losses[:some]) / some, "last": sum(losses[-some:]) / some, "steps": some},
        "held_out_loss": {
            "first": held_out[0]["held_out_loss"],
            "last": held_out[-1]["held_out_loss"],
            "kept": kept["held_out_loss"],
            "kept_step": kept["step"],
        } if kept else None,
        "seconds": seconds,
        "tokens": tokens,
        "tokens_a_second": tokens / seconds,
        "peak_bytes": training.peak_bytes(run),
        "curve": str(curve) if curve else None,
    }  # fmt: skip


def _as_text(report: dict[str, Any]) -> str:
    losses, held_out, examples = report["loss"], report["held_out_loss"], report["examples"]
    early = f", of {report['planned_steps']} planned" if report["steps"] < report["planned_steps"] else ""
    rows = [
        ("trained", f"{report['method']}, {report['trained_share']:.2%} of the parameters of {report['model']}"),
        ("examples", f"{examples['train']}, and {examples['held_out']} held out"),
        ("steps", f"{report['steps']}{early}, {report['epochs']:.2f} epochs"),
        (
            "loss",
            f"{losses['first']:.4f} and {losses['last']:.4f}: means of the first and last {losses['steps']} steps",
        ),
    ]
    if held_out:
        at = f"; kept: {held_out['kept']:.4f} of step {held_out['kept_step']}"
        rows.append(("held-out loss", f"{held_out['first']:.4f} at first, {held_out['last']:.4f} at last{at}"))
    rows += [
        ("time", f"{report['seconds']:.0f} s of steps, {report['tokens_a_second']:.0f} tokens/s"),
        ("peak memory", console.size(report["peak_bytes"])),
        ("folder", report["out"] + (f", with {Path(report['curve']).name}" if report["curve"] else "")),
    ]
    lines = [console.table(rows)]
    for sample in report["samples"]:
        lines += ["", sample["prompt"].strip()]
        lines += [f"  {name:<7} {' '.join(sample[name].split())}" for name in ("before", "after", "data")]
    return "\n".join(lines)
