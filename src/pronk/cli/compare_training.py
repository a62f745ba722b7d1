"""`pronk compare-training`: what techniques of training cost and buy."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import comparing, console, options
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb


@verb(
    epilog="""\b
Examples:
  pronk compare-training smollm2:135m
  pronk compare-training ./my-model --data chats.jsonl --tokens 512 --rank 8
  pronk compare-training --resume --out report    continue after Ctrl-C

It writes TRAINING.md, training.svg and training.json to FOLDER, and prints their tables. It needs torch.
Run it while nothing else runs: other programs distort the times."""
)
@click.argument("model", type=NAME, required=False)
@options.together(
    comparing.out_option,
    click.option("--data", type=NAME, metavar="FILE",
                 help="Train on the records in FILE, as pronk finetune does.  [default: prose that comes with pronk]"),
    click.option("--tokens", type=click.IntRange(min=8), metavar="N",
                 help="Cut examples to at most N tokens.  [default: 256]"),
    click.option("--rounds", type=click.IntRange(min=1), metavar="N",
                 help="Measure each setting N times, and report the median.  [default: 3]"),
    click.option("--rank", type=click.IntRange(min=1), metavar="N",
                 help="Train LoRA matrices of rank N.  [default: 16]"),
    comparing.again_options,
    options.device_option,
    options.threads_option,
    options.json_option,
)  # fmt: skip
def command(out: str, resume: bool, overwrite: bool, as_json: bool, **asked: Any) -> None:
    """Compare techniques of training: speed and memory.

    It measures full fine-tuning and LoRA in f32 and bf16, each with and without gradient checkpointing and gradient
    accumulation.
    """
    from pronk.measure import training, training_report
    from pronk.torch_engine import import_torch

    folder = comparing.folder(out, resume=resume, overwrite=overwrite)
    import_torch()
    said = {name: value for name, value in asked.items() if value is not None}
    grid, journal = training.begin(said, folder, resume=resume, overwrite=overwrite, command=console.command())
    what = (
        f"{grid.request.model}: {len(grid.settings)} settings, {grid.request.rounds} rounds in turns, examples of up "
        f"to {grid.request.tokens} tokens"
    )
    with comparing.shown(journal, [what], "compare-training", out) as advance:
        found = journal.run(advance)
        tables = training_report.render(folder)
    comparing.tell(out, (training_report.PAGE, training_report.PLOT, training.NAME), found if as_json else tables)
