"""`pronk score`: what a reward model says of texts, or of the answers that people compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from pronk.cli import console, options, progress, training_options
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb
from pronk.errors import BadRequest


@verb(
    epilog="""\b
Examples:
  pronk score ./rm/model "What is 2 + 2? It is 4." "What is 2 + 2? Who knows."
  pronk score smollm2:135m --adapter rm --data held-out.jsonl
  pronk score smollm2:135m --adapter rm --data held-out.jsonl --json

A text is a prompt with its answer. Higher is better, and only differences between answers to the same
prompt mean anything. With --data, a record is one of pronk reward's, and what comes is how often the chosen
answer has the higher score."""
)
@options.model_argument
@click.argument("texts", metavar="[TEXT]...", nargs=-1)
@options.together(
    click.option("--data", type=NAME, metavar="FILE",
                 help="Compare the answers of the preference records in FILE, or of a dataset on the hub, instead."),
    training_options.fields_option,
    training_options.template_option,
    training_options.too_long_option,
    training_options.skip_option,
    heading="Data",
)  # fmt: skip
@options.loading_options
@options.adapter_option
@options.json_option
def command(
    model: str,
    texts: tuple[str, ...],
    data: str | None,
    fields: tuple[str, ...],
    chat_template: str | None,
    too_long: Any,
    skip_bad_records: bool,
    as_json: bool,
    **loading: Any,
) -> None:
    """Score texts with a reward model.

    A reward model is what pronk reward makes, or a folder of transformers' LlamaForSequenceClassification with one
    label; an adapter of one goes beside its base MODEL.
    """
    from pronk.measure.preferences import preferences, read

    if bool(texts) is (data is not None):
        raise click.UsageError("give TEXTs to score, or --data FILE with pairs to compare; one of the two")
    if texts and (fields or chat_template or skip_bad_records or too_long != "error"):
        raise click.UsageError("--fields, --chat-template, --too-long and --skip-bad-records are for --data")
    chosen = options.loading_of(loading)
    llm = options.load_model(model, chosen)
    if not llm.config.num_labels:
        way_out = "pronk reward makes one; one of its adapters goes beside its base with --adapter FOLDER"
        if chosen["adapter"]:
            raise BadRequest(f"{model} is no reward model, nor does its adapter make one of it: pronk reward does")
        raise BadRequest(f"{model} is no reward model: {way_out}")
    with progress.shown("scoring", progress.of_tokens) as advance:
        if data is None:
            scores = llm.score(list(texts), progress=advance)
            assert isinstance(scores, list)
            each = [{"text": text, "score": score} for text, score in zip(texts, scores, strict=True)]
            result: dict[str, Any] = {"model": llm.name, "texts": each}
        else:
            pairs, left_out = read(
                llm, data, fields=fields, chat_template=chat_template, skip_bad=skip_bad_records, too_long=too_long
            )
            result = {"model": llm.name, "data": data, "left_out": left_out, **preferences(llm, pairs, advance)}
    console.write_json(result) if as_json else console.write(_as_text(result) + "\n")


def _as_text(result: Mapping[str, Any]) -> str:
    if "texts" in result:
        return "\n".join(f"{one['score']:+.4f}  {' '.join(one['text'].split())}" for one in result["texts"])
    left_out = [f"{count} {why}" for why, count in result["left_out"].items() if count]
    rows = [
        ("model", result["model"]),
        ("pairs", f"{result['pairs']} of {result['data']}" + (f" ({', '.join(left_out)})" if left_out else "")),
        ("accuracy", f"{result['accuracy']:.1%}{_spread(result['accuracy_error'] or None, '.1%')}"),
        ("margin", f"{result['margin']:.4f}{_spread(result['margin_error'], '.4f')}"),
        ("loss", f"{result['loss']:.4f} (0.6931 where nothing is told apart)"),
    ]
    return console.table(rows)


def _spread(error: float | None, form: str) -> str:
    return "" if error is None else f" ± {error:{form}}"
