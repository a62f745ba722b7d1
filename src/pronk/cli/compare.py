"""`pronk compare`: what fewer bits cost and buy, measured on one model and written down as a report."""

from __future__ import annotations

from typing import Any

import click

from pronk import engines
from pronk.cli import comparing, console, options
from pronk.cli.parameter_types import NAME, non_empty, positive, several
from pronk.cli.verb import verb

_compared = options.together(
    click.option("--to", multiple=True, type=click.Choice(engines.FORMATS), metavar="FORMAT",
                  help="Measure the model in this format, one of `pronk generate --quantize`. Repeatable.  "
                 "[default: llm-int8, q8 and q4; torch engine: llm-int8 and int8]"),
    click.option("--against", type=click.Choice(engines.FORMATS), metavar="FORMAT",
                  help="Measure this format as the baseline.  [default: bf16, or f16 where the file is in f16]"),
    click.option("--techniques", is_flag=True,
                 help="Measure techniques with each off and on: KV cache, flash attention, quantization, prefix reuse "
                 "and more. Formats are then measured only where --to or --tasks asks for them."),
    heading="What is compared",
)  # fmt: skip
_measured = options.together(
    click.option("--rounds", type=click.IntRange(min=1), metavar="N",
                 help="Measure latency N times, and report the median.  [default: 5]"),
    click.option("--prefill", callback=several(positive, "lengths", "64,512"), metavar="N,N",
                  help="Measure prefill on prompts of these lengths, in tokens.  [default: 32,128,512]"),
    click.option("--decode-tokens", type=click.IntRange(min=1), metavar="N",
                  help="Measure decoding on N tokens after each prompt.  [default: 64]"),
    click.option("--windows", type=click.IntRange(min=1), metavar="N",
                  help="Measure quality on N windows of 512 tokens, spread evenly over the text.  [default: up to 16]"),
    options.file_option("Measure quality on the text in FILE (UTF-8).  [default: prose that comes with pronk]"),
    click.option("--tasks", callback=several(non_empty, "tasks", "pronk_endings,mine.yaml"),
                  metavar="TASK,...",
                 help="Also score every format on these tasks of lm-evaluation-harness; pronk_last_word, pronk_endings "
                 "and pronk_instructions come with pronk."),
    heading="How it is measured",
)  # fmt: skip


@verb(
    epilog="""\b
Examples:
  pronk compare smollm2:135m --to llm-int8 --to q8 --to q4 --out report
  pronk compare ./Llama-2-7b --to llm-int8 --against f16 --rounds 3
  pronk compare --resume --out report            continue after Ctrl-C
  pronk compare --techniques                     each technique off and on, on the default model

It writes REPORT.md, report.html and report.json to FOLDER, and prints the first table. Run it while
nothing else runs: other programs distort the times. The default model takes some minutes, larger ones
hours; the progress bar estimates the time left. pronk compare-training measures techniques of training."""
)
@click.argument("model", type=NAME, required=False)
@_compared
@_measured
@options.variant_options
@options.together(comparing.out_option, comparing.again_options, options.json_option, heading=options.OUTPUT)
def command(out: str, resume: bool, overwrite: bool, as_json: bool, file: str | None, **asked: Any) -> None:
    """Compare formats of a model: speed, memory and quality.

    It measures MODEL in the baseline format and in smaller ones, and writes a report.
    """
    from pronk.measure import compare, report
    from pronk.measure.comparison import Request

    asked["text"] = file
    folder = comparing.folder(out, resume=resume, overwrite=overwrite)
    fields = {name: asked.pop(name) or None for name in list(asked) if name in Request.__dataclass_fields__}
    asked["ctx_size"] = asked["ctx_size"] or None
    request = Request(**fields, loading={name: value for name, value in asked.items() if value is not None})
    comparison, journal = compare.begin(request, folder, resume=resume, overwrite=overwrite, command=console.command())
    with comparing.shown(journal, compare.about(comparison), "compare", out) as advance:
        found = compare.compare(comparison, journal, progress=advance)
        table = report.render(folder)
    comparing.tell(out, ("REPORT.md", "report.html", "report.json"), found if as_json else table)
