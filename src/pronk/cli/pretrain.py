"""`pronk pretrain`: a small LLaMA and its tokenizer, from nothing but a text."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import options, training, training_options
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb

_N = click.IntRange(min=1)

_text = options.together(
    click.option("--separator", type=NAME, default="<|endoftext|>", show_default=True, metavar="LINE",
                 help="Split TEXT into documents at each LINE like this."),
    click.option("--vocab-size", type=click.IntRange(1, 300_000), metavar="N",
                 help="Train a tokenizer with a vocabulary of N tokens.  [default: 512]"),
    click.option("-z", "--tokenizer", type=NAME, metavar="FILE",
                 help="Use this tokenizer instead of training one: a file, a folder, or one of those that are "
                      "downloaded by name (llama2, tok512)."),
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
    click.option("--ctx", "--ctx-size", "--max-position-embeddings", "ctx_size", type=_N, default=256,
                 show_default=True, metavar="N",
                 help="Train on sequences of N tokens, which is also the model's context length."),
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


@verb(
    epilog="""\b
Examples:
  pronk pretrain stories.txt --out tales
  pronk pretrain stories.txt --out tales --resume
  pronk generate -m tales/model --temperature 0.8 "Once upon a time"
  pronk convert tales/model tales.bin --to llama2c

TEXT is UTF-8, a folder of such files, JSON lines, JSON, CSV or Parquet of {"text"} records (by the file's name), or a
dataset on the hub.
Ctrl-C and SIGTERM finish the step and save a checkpoint; --resume then gives the same result as a run that
was never stopped. Training needs torch."""
)
@click.argument("text", type=NAME)
@_text
@_shape
@training_options.shared("depends on --hidden: 3e-3 at 128, 4e-4 at 1024; of adafactor 50 times as much")
def command(**given: Any) -> None:
    """Train a small LLaMA and its tokenizer from scratch.

    Both are trained on TEXT. The defaults make a model of about 0.9 million parameters.
    """
    from pronk.train.runs import pretrain

    training.perform(pretrain, given)


command.params = [parameter for parameter in command.params if parameter.name not in _WITHOUT]
for _parameter in command.params:
    for _name, _value in _OTHERWISE.get(_parameter.name or "", {}).items():
        setattr(_parameter, _name, _value)
