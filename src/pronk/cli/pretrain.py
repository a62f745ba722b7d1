"""`pronk pretrain`: a small LLaMA and its tokenizer, from nothing but a text."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, options, progress, training, training_options, training_report
from pronk.errors import BadRequest, ModelNotFound

if TYPE_CHECKING:
    from pronk.tokenizer import Tokenizer
    from pronk.train.pretrain import Ready, Shape
    from pronk.train.settings import Settings

_N = click.IntRange(min=1)
_PROMPT = 12  # tokens of held-out text that a sample goes on from
_LESS = (
    "a smaller model (--hidden, --layers, --vocab-size), --recompute 1, a smaller --batch-size or --ctx, "
    "--precision bf16, --optimizer adamw8bit"
)

_text = options.together(
    click.option("--separator", type=options.NAME, default="<|endoftext|>", show_default=True, metavar="LINE",
                 help="Split TEXT into documents at each LINE like this."),
    click.option("--vocab-size", type=click.IntRange(1, 300_000), metavar="N",
                 help="Train a tokenizer with a vocabulary of N tokens.  [default: 512]"),
    options.tokenizer_option,
    heading="Data",
)  # fmt: skip
_shape = options.together(
    click.option("--hidden", "--hidden-size", "hidden", type=_N, default=128, show_default=True, metavar="N",
                 help="Give the model a hidden size of N."),
    click.option("--layers", "--num-hidden-layers", "layers", type=_N, default=4, show_default=True, metavar="N",
                 help="Give it N transformer blocks."),
    click.option("--heads", "--num-attention-heads", "heads", type=_N, default=4, show_default=True, metavar="N",
                 help="Give it N attention heads, each --hidden / N wide."),
    click.option("--kv-heads", "--num-key-value-heads", "kv_heads", type=_N, metavar="N",
                 help="Give it N key/value heads (grouped-query attention).  [default: as many as --heads]"),
    click.option("--ctx", "--max-position-embeddings", "ctx_size", type=_N, default=256, show_default=True,
                 metavar="N", help="Train on sequences of N tokens, which is also the model's context length."),
    heading="Model",
)  # fmt: skip

# The options that all training verbs share mean something else here, or nothing.
_OTHERWISE: dict[str, dict[str, Any]] = {
    "epochs": {"default": 1.0, "help": "Pass N times over the text."},
    "max_steps": {"opts": ["--max-steps", "--steps"]},
    "batch_size": {
        "default": 4,
        "help": "Put N sequences of --ctx tokens, or as many tokens of shorter ones, into a micro-batch.",
    },
    "accumulate": {"default": 1},
    "warmup": {"default": 0.05},
    "weight_decay": {"default": 0.1},
    "eval_data": {"help": "Evaluate on the held-out text in FILE."},
    "eval_share": {
        "help": "Without --eval-data, hold out this fraction of TEXT, at its end, at most 262,144 characters; 0: none."
    },
    "eval_every": {"help": "Evaluate on held-out text every N optimizer steps.  [default: a tenth of all steps]"},
    "samples": {"help": "After training, continue N held-out beginnings and print the texts."},
    "out": {"help": "Write the model (to FOLDER/model), metrics and checkpoints to FOLDER.  [required]"},
    "seed": {"help": "Seed the initial weights, the order of sequences and the samples."},
}
_WITHOUT = ("pack", "bucket")


@options.verb(
    epilog="""\b
Examples:
  pronk pretrain stories.txt --out tales
  pronk pretrain stories.txt --out tales --resume
  pronk generate -m tales/model --temperature 0.8 "Once upon a time"
  pronk convert tales/model tales.bin --to llama2c

TEXT is UTF-8, or JSON lines, JSON, CSV or Parquet of {"text"} records (by the file's name), or a dataset on the hub.
Ctrl-C and SIGTERM finish the step and save a checkpoint; --resume then gives the same result as a run that
was never stopped. Training needs torch."""
)
@click.argument("text", type=options.NAME)
@_text
@_shape
@training_options.shared("by --hidden: 3e-3 for 128, 4e-4 for 1024")
def command(
    text: str,
    out: str | None,
    separator: str,
    vocab_size: int | None,
    tokenizer: str | None,
    device: str | None,
    threads: int | None,
    resume: bool,
    samples: int,
    log_to: tuple[str, ...],
    as_json: bool,
    **given: Any,
) -> None:
    """Train a small LLaMA and its tokenizer from scratch.

    Both are trained on TEXT. The defaults make a model of about 0.9 million parameters.
    """
    from pronk.torch_engine import import_torch

    import_torch()
    from pronk.tokenizer.export import huggingface_files
    from pronk.train import pretrain
    from pronk.train.folder import MODEL, claimed
    from pronk.train.trainer import Trainer

    if tokenizer and vocab_size:
        raise click.UsageError("--tokenizer names a vocabulary that is made already; leave --vocab-size out")
    folder = training.folder_of(out)
    vocabulary: Tokenizer | int = _tokenizer(tokenizer) if tokenizer else vocab_size or 512
    settings, shape = _settings(text, tokenizer or f"{vocabulary} tokens", device, given)
    with training.joined(device) as group, ExitStack() as held:
        group.lead(lambda _: held.enter_context(claimed(folder, resume=resume)))
        held.enter_context(training.memory_suffices(_LESS))
        with progress.shown("reading", unit=_of_characters, logged=True) as advance:
            ready = pretrain.prepare(settings, shape, vocabulary, separator, advance)
        _note(ready)
        training.note_step(ready.data, ready.settings)
        files = huggingface_files(ready.tokenizer)
        how: dict[str, Any] = {"device": group.device or device, "threads": threads}
        run = Trainer(ready.checkpoint, ready.data, ready.settings, folder, tokenizer_files=files, group=group, **how)
        training.to_its_end(run, resume=resume, log_to=log_to)
        if not group.first:
            return
        report = training_report.of(run) | {"model_folder": str(folder / MODEL)}
        del run  # what it kept best is read back, not what it ended with
        losses = report["held_out_loss"]
        report |= {
            "parameters": sum(math.prod(tensor.shape) for tensor in ready.checkpoint.tensors.values()),
            "vocabulary": ready.tokenizer.vocab_size,
            "bits_a_byte": ready.bits_a_byte(losses["kept"]) if losses else None,
            "samples": _samples(folder / MODEL, ready, samples, **how),
        }
        console.write_json(report) if as_json else console.write(_as_text(report) + "\n")


command.params = [parameter for parameter in command.params if parameter.name not in _WITHOUT]
for _parameter in command.params:
    for _name, _value in _OTHERWISE.get(_parameter.name or "", {}).items():
        setattr(_parameter, _name, _value)


def _settings(text: str, vocabulary: str, device: str | None, given: dict[str, Any]) -> tuple[Settings, Shape]:
    """What contradicts itself is wrong usage."""
    from pronk.train.objectives.pretraining import Pretraining
    from pronk.train.pretrain import Shape
    from pronk.train.settings import Settings

    training_options.settle_computing(given, device)
    try:
        shape = Shape(**{name: given.pop(name) for name in ("hidden", "layers", "heads", "kv_heads", "ctx_size")})
        given["lr"] = given["lr"] or shape.usual_lr
        pack = given["batch_size"] * (shape.ctx_size + 1)
        model = f"{shape} of {vocabulary}"
        return Settings(model, text, lora=None, objective=Pretraining(), pack=pack, **given), shape
    except BadRequest as error:
        raise click.UsageError(str(error)) from None


def _tokenizer(path: str) -> Tokenizer:
    from pronk import tokenizer
    from pronk.loading import find_tokenizer

    source = find_tokenizer(path)
    if source is None:
        raise ModelNotFound(f"{path} carries no tokenizer")
    return tokenizer.load(source)


def _of_characters(done: int, total: int) -> str:
    return f"{done / 1e6:.1f} of {total / 1e6:.1f} million characters"


def _note(ready: Ready) -> None:
    from pronk.train.pretrain import tokens

    learned, held_out = tokens(ready.data.train), tokens(ready.data.held_out)
    console.note(
        f"{learned:,} tokens to learn and {held_out:,} held out; {ready.tokenizer.vocab_size:,} different ones, of "
        f"{ready.train_bytes / learned:.2f} bytes on average"
    )


def _samples(folder: Path, ready: Ready, count: int, **loading: Any) -> list[dict[str, str]]:
    """How held-out texts go on, drawn at a temperature of 0.8: a small model's likeliest text goes in circles."""
    prompts = [one.ids[: _PROMPT + 1].tolist() for one in ready.data.held_out if len(one) > _PROMPT + 1][:count]
    room = min(training.SAMPLE_TOKENS * 2, ready.checkpoint.config.max_position_embeddings - _PROMPT - 1)
    drawn = {"max_new_tokens": room, "temperature": 0.8, "seed": ready.settings.seed}
    texts = training.answered(str(folder), prompts, drawn, **loading)
    return [{"prompt": ready.tokenizer.decode(p), "goes on": text} for p, text in zip(prompts, texts, strict=True)]


def _as_text(report: dict[str, Any]) -> str:
    rows = {
        "trained": f"{report['parameters']:,} parameters, {report['model']}",
        "examples": f"{report['examples']['train']:,} sequences, and {report['examples']['held_out']:,} held out",
    }
    if report["bits_a_byte"] is not None:
        rows["bits a byte"] = f"{report['bits_a_byte']:.3f}, of held-out text"
    return training_report.as_text(report, rows | {"model": report["model_folder"]})
