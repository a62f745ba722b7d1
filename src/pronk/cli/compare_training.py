"""`pronk compare-training`: what techniques of training cost and buy."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import comparing, console, options


@options.verb(
    epilog="""\b
Examples:
  pronk compare-training smollm2:135m
  pronk compare-training ./my-model --data chats.jsonl --tokens 512 --rank 8
  pronk compare-training --resume --out report    go on after Ctrl-C

Writes TRAINING.md, training.svg and training.json to FOLDER, and prints their tables. It needs torch."""
)
@click.argument("model", type=options.NAME, required=False)
@options.together(
    comparing.out_option,
    click.option("--data", type=options.NAME, metavar="FILE",
                 help="Records to train on, as for finetune.  [default: prose that comes with pronk]"),
    click.option("--tokens", type=click.IntRange(min=8), metavar="N",
                 help="Cut examples to N tokens.  [default: 256]"),
    click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="Measure each N times.  [default: 3]"),
    click.option("--rank", type=click.IntRange(min=1), metavar="N", help="Rank of the LoRA layers.  [default: 16]"),
    comparing.again_options,
    options.device_option,
    options.threads_option,
    options.json_option,
)  # fmt: skip
def command(out: str, resume: bool, overwrite: bool, as_json: bool, **asked: Any) -> None:
    """Measure training: all weights or LoRA, f32 or bf16, activations kept or recomputed, accumulated."""
    from pronk.measure import training, training_report
    from pronk.measure.training_grid import Request
    from pronk.torch_engine import import_torch

    folder = comparing.folder(out, resume=resume, overwrite=overwrite)
    import_torch()
    grid, journal = training.begin(
        Request(**asked), folder, resume=resume, overwrite=overwrite, command=console.command()
    )
    what = (
        f"{grid.request.model}: {len(grid.settings)} settings, {grid.request.rounds} rounds in turns, examples of up "
        f"to {grid.request.tokens} tokens"
    )
    with comparing.shown(journal, [what], "compare-training", out) as advance:
        found = training.measure(grid, journal, progress=advance)
        tables = training_report.render(folder)
    comparing.tell(out, (training_report.PAGE, training_report.PLOT, training.NAME), found if as_json else tables)
