"""`pronk compare`: what fewer bits cost and buy, measured on one model and written down as a report."""

from __future__ import annotations

from typing import Any

import click

from pronk.cli import compare_training, console, measuring, options


def _lengths(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        lengths = tuple(int(part) for part in value.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise click.BadParameter(f"{value!r} is no list of lengths, as in 64,512")
    return lengths


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not all(names := tuple(part.strip() for part in value.split(","))):
        raise click.BadParameter(f"{value!r} is no list of tasks, as in pronk_endings,mine.yaml")
    return tuple(dict.fromkeys(names))


_options = options.together(
    click.option("--to", multiple=True, type=options.NAME, metavar="SCHEME",
                  help="Compare with the model in this. Repeatable.  [default: llm-int8, q8 and q4]"),
    click.option("--against", type=options.NAME, metavar="TYPE",
                  help="The original.  [default: bf16, or f16 where the file is in f16]"),
    click.option("-o", "--out", type=options.NAME, default="report", show_default=True, metavar="FOLDER",
                  help="Where the report goes."),
    click.option("--rounds", type=click.IntRange(min=1), metavar="N", help="Measure latency N times.  [default: 5]"),
    click.option("--prefill", callback=_lengths, metavar="N,N", help="Tokens of the prompts.  [default: 32,128,512]"),
    click.option("--decode-tokens", type=click.IntRange(min=1), metavar="N",
                  help="Decode N tokens after each prompt.  [default: 64]"),
    click.option("--windows", type=click.IntRange(min=1), metavar="N",
                  help="Measure quality on N windows of 512 tokens, spread over the text.  [default: up to 16]"),
    click.option("-f", "--text", type=options.NAME, metavar="FILE",
                  help="Text to measure quality on.  [default: prose that comes with pronk]"),
    click.option("--tasks", callback=_names, metavar="NAME,FILE",
                  help="Score all of them on tasks of lm-evaluation-harness, too. With pronk come pronk_last_word, "
                       "pronk_endings and pronk_instructions."),
    click.option("--techniques", is_flag=True,
                  help="Measure switches, on and off: KV cache, flash attention, quantization, prefix reuse and more."),
    click.option("--training", is_flag=True,
                 help="Instead: measure training: all weights or LoRA, f32 or bf16, recomputed, accumulated."),
    click.option("--data", type=options.NAME, metavar="FILE",
                 help="--training: records, as for finetune.  [default: prose that comes with pronk]"),
    click.option("--tokens", type=click.IntRange(min=8), metavar="N",
                 help="--training: tokens of an example.  [default: 256]"),
    click.option("--resume", is_flag=True, help="Go on with the report in FOLDER: nothing is measured twice."),
    click.option("--overwrite", is_flag=True, help="Replace the report in FOLDER."),
)  # fmt: skip


@options.verb(
    epilog="""\b
Examples:
  pronk compare smollm2:135m --to llm-int8 --to q8 --to q4 --out report
  pronk compare ./Llama-2-7b --to llm-int8 --against f16 --rounds 3
  pronk compare --resume --out report            go on after Ctrl-C
  pronk compare --techniques                     each switch on and off, of the default model
  pronk compare --training smollm2:135m          what techniques of training cost and buy

Writes REPORT.md, report.html and report.json to FOLDER (--training: TRAINING.md, training.svg and
training.json), and prints the first table. The report says on what machine, model, text and
lengths it was measured: run it where nothing else runs."""
)
@click.argument("model", type=options.NAME, required=False)
@_options
@options.variant_options
@options.json_option
def command(
    model: str | None,
    to: tuple[str, ...],
    against: str | None,
    out: str,
    techniques: bool,
    tasks: tuple[str, ...] | None,
    resume: bool,
    overwrite: bool,
    as_json: bool,
    rounds: int | None,
    prefill: tuple[int, ...] | None,
    decode_tokens: int | None,
    windows: int | None,
    text: str | None,
    training: bool,
    data: str | None,
    tokens: int | None,
    **loading: Any,
) -> None:
    """Measure a model and smaller variants of it: latency, memory and quality, with a report."""
    if training:
        others = {
            "to": to,
            "against": against,
            "techniques": techniques,
            "prefill": prefill,
            "windows": windows,
            "tasks": tasks,
        }
        others |= {"decode_tokens": decode_tokens, "text": text, **loading, "threads": None, "device": None}
        asked = {"model": model, "data": data, "tokens": tokens, "rounds": rounds}
        asked |= {name: loading[name] for name in ("threads", "device")}
        compare_training.perform(asked, others, out, resume=resume, overwrite=overwrite, as_json=as_json)
        return
    if data is not None or tokens is not None:
        raise click.UsageError("--data and --tokens are for --training; give that, or leave them out")
    from pronk.measure import compare, report
    from pronk.measure.request import Request
    from pronk.system import expanded

    if resume and overwrite:
        raise click.UsageError("--resume goes on with a report and --overwrite replaces it; choose one")
    loading["ctx_size"] = loading["ctx_size"] or None
    request = Request(
        model=model, to=to or None, against=against, rounds=rounds, prefill=prefill, decode_tokens=decode_tokens,
        windows=windows, text=text, techniques=techniques or None, tasks=tasks,
        loading={name: value for name, value in loading.items() if value is not None},
    )  # fmt: skip
    folder = expanded(out)
    comparison, journal = compare.begin(request, folder, resume=resume, overwrite=overwrite, command=console.command())
    for line in [*compare.about(comparison), *compare.warnings()]:
        console.note(line)
    with measuring.shown(journal, "pronk", "compare", "--resume", "--out", out) as advance:
        found = compare.compare(comparison, journal, progress=advance)
        table = report.render(folder)
    console.note(f"written to {out}: REPORT.md, report.html, report.json")
    if as_json:
        console.write_json(found)
    else:
        console.write(table + "\n")
