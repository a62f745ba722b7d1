"""`pronk compare`: what fewer bits cost and buy, measured on one model and written down as a report."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import comparing, console, options

_options = options.together(
    click.option("--to", multiple=True, type=options.NAME, metavar="SCHEME",
                  help="Compare with the model in this. Repeatable.  [default: llm-int8, q8 and q4]"),
    click.option("--against", type=options.NAME, metavar="TYPE",
                  help="The original.  [default: bf16, or f16 where the file is in f16]"),
    comparing.out_option,
    click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="Measure latency N times.  [default: 5]"),
    click.option("--prefill", callback=options.several(options.count, "lengths", "64,512"), metavar="N,N",
                  help="Tokens of the prompts.  [default: 32,128,512]"),
    click.option("--decode-tokens", type=click.IntRange(min=1), metavar="N",
                  help="Decode N tokens after each prompt.  [default: 64]"),
    click.option("--windows", type=click.IntRange(min=1), metavar="N",
                  help="Measure quality on N windows of 512 tokens, spread over the text.  [default: up to 16]"),
    click.option("-f", "--text", type=options.NAME, metavar="FILE",
                  help="Text to measure quality on.  [default: prose that comes with pronk]"),
    click.option("--tasks", callback=options.several(options.name, "tasks", "pronk_endings,mine.yaml"),
                  metavar="NAME,FILE",
                  help="Score all of them on tasks of lm-evaluation-harness, too. With pronk come pronk_last_word, "
                       "pronk_endings and pronk_instructions."),
    click.option("--techniques", is_flag=True,
                  help="Measure switches, on and off: KV cache, flash attention, quantization, prefix reuse and more."),
    comparing.again_options,
)  # fmt: skip


@options.verb(
    epilog="""\b
Examples:
  pronk compare smollm2:135m --to llm-int8 --to q8 --to q4 --out report
  pronk compare ./Llama-2-7b --to llm-int8 --against f16 --rounds 3
  pronk compare --resume --out report            go on after Ctrl-C
  pronk compare --techniques                     each switch on and off, of the default model

Writes REPORT.md, report.html and report.json to FOLDER, and prints the first table. The report says on
what machine, model, text and lengths it was measured: run it where nothing else runs. For techniques of
training there is pronk compare-training."""
)
@click.argument("model", type=options.NAME, required=False)
@_options
@options.variant_options
@options.json_option
def command(out: str, resume: bool, overwrite: bool, as_json: bool, **asked: Any) -> None:
    """Measure a model and smaller variants of it: latency, memory and quality, with a report."""
    from pronk.measure import compare, report
    from pronk.measure.comparison import Request

    folder = comparing.folder(out, resume=resume, overwrite=overwrite)
    fields = {name: asked.pop(name) or None for name in list(asked) if name in Request.__dataclass_fields__}
    asked["ctx_size"] = asked["ctx_size"] or None
    request = Request(**fields, loading={name: value for name, value in asked.items() if value is not None})
    comparison, journal = compare.begin(request, folder, resume=resume, overwrite=overwrite, command=console.command())
    with comparing.shown(journal, compare.about(comparison), "compare", out) as advance:
        found = compare.compare(comparison, journal, progress=advance)
        table = report.render(folder)
    comparing.tell(out, ("REPORT.md", "report.html", "report.json"), found if as_json else table)
