"""`pronk look`: what a model makes of each token of a text, what a token looks at, what each layer would have said."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, measuring, options, text_files
from pronk.cli.parameter_types import NAME
from pronk.cli.verb import verb

if TYPE_CHECKING:
    from pronk.look import Look


@verb(
    epilog="""\b
Examples:
  pronk look "The capital of France is Paris"
  pronk look -n 20 "The capital of France is"                     the model's own answer, too
  pronk look --chat --answer "Blue." "Which colour is the sky?"
  pronk look "The capital of France is Paris" --token 5 --lens     what each layer would have said
  pronk look "The capital of France is Paris" --token 4 --layer 20 --head 3
  pronk look -f chapter.txt --json
  pronk look -n 20 "Once upon a time" --plot surprise.svg

A line a token: its number, the token, its probability, its surprise and the entropy in its place in bits,
its rank (1: it was the likeliest), and the likeliest tokens there. The first token has no figures, for nothing
precedes it.
--token with --layer shows what a token looks at; with --lens, what the model, and each of its layers
through the last norm and the head, would have said in that token's place."""
)
@click.argument("text", required=False)
@options.together(
    options.file_option("Look at the text in FILE (UTF-8); - reads standard input."),
    click.option("--chat", is_flag=True, help="Put the text through the chat template, as a user's question."),
    click.option("--answer", metavar="TEXT", help="Look at this text after it as well."),
    click.option("-n", "--max-new-tokens", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
                 help="Let the model go on for at most N tokens, greedily, and look at these as well."),
    heading="Text",
)  # fmt: skip
@options.together(
    click.option("--top", type=click.IntRange(1, 100), default=5, show_default=True, metavar="N",
                 help="Show the N likeliest tokens of each place."),
    click.option("--token", type=click.IntRange(min=0), metavar="N", help="Look at token N, counted from 0."),
    click.option("--lens", is_flag=True,
                 help="With --token: show what each layer would have said in its place; the number after the last "
                 "token stands for what comes next."),
    click.option("--layer", type=click.IntRange(min=0), metavar="N",
                 help="With --token: show its attention in layer N, counted from 0."),
    click.option("--head", type=click.IntRange(min=0), metavar="N",
                 help="With --layer: show this head alone.  [default: the mean over heads; in JSON all of them]"),
    heading="What to show",
)  # fmt: skip
@options.model_option
@options.adapter_option
@options.loading_options
@options.together(
    options.json_option,
    click.option(
        "--plot",
        type=NAME,
        callback=measuring.written(".svg"),
        metavar="FILE.svg",
        help="Also draw it to this file.",
    ),
    heading=options.OUTPUT,
)
def command(
    text: str | None,
    file: str | None,
    chat: bool,
    answer: str | None,
    max_new_tokens: int,
    top: int,
    token: int | None,
    lens: bool,
    layer: int | None,
    head: int | None,
    model: str,
    as_json: bool,
    plot: Path | None,
    **loading: Any,
) -> None:
    """Look inside: each token's probability, and its rivals.

    Surprise is -log2 of a token's probability: at 0 bits nothing else could come, at 10 one in a thousand.
    """
    _check(text, file, answer, max_new_tokens, token, lens, layer, head)
    if file is None and (text == "-" or (text is None and not sys.stdin.isatty())):
        file = "-"
    given = text_files.read_file(file) if file is not None else text or ""
    llm = options.load_model(model, options.loading_of(loading))
    asked: Any = [{"role": "user", "content": given}] if chat else given
    behind: Any = answer
    if max_new_tokens:
        behind = llm.generate(given, chat=chat, max_new_tokens=max_new_tokens)
    seen = llm.look(asked, answer=behind, top=top)
    told: dict[str, Any] = {"model": model, **(seen.to_dict() if as_json else {})}
    rows: list[tuple[str, ...]]
    drawn, shown = None, ""
    if token is not None and lens:
        through = seen.lens(token, top)
        told["lens"], drawn = through.to_dict(), through.svg
        rows = [("layer", "came", "rank", "likeliest")]
        for row in reversed(told["lens"]["layers"]):
            came = ("", "") if row["rank"] is None else (f"{row['probability']:.2%}", f"{row['rank']:,}")
            name = "embedding" if row["layer"] < 0 else str(row["layer"])
            rows.append((name, *came, _likeliest((a["piece"], a["probability"]) for a in row["top"])))
        shown = console.table(rows, right=(0, 1, 2))
    elif token is not None and layer is not None:
        weights = seen.attention(token, layer, head)
        told["attention"] = {"token": token, "layer": layer, "head": head, "weights": weights.tolist()}
        one, drawn = weights if head is not None else weights.mean(0), lambda: seen.attention_svg(token, layer, head)
        rows = [("token", "piece", "weight")]
        rows += [(str(n), repr(seen.pieces[n]), f"{one[n]:.2%}") for n in range(token + 1)]
        shown = console.table(rows, right=(0, 2))
    elif not as_json:
        shown = _table(seen)
    if plot:
        measuring.write(plot, (drawn or seen.svg)())
    if as_json:
        console.write_json(told)
    else:
        console.write(shown + "\n")


def _check(
    text: str | None, file: str | None, answer: str | None, new: int, token: int | None, lens: bool,
    layer: int | None, head: int | None,
) -> None:  # fmt: skip
    for wrong, problem in (
        (text is not None and file is not None, "give the text in one way: TEXT or -f"),
        (answer is not None and new, "--answer and -n exclude each other"),
        ((lens or layer is not None) and token is None, "--lens and --layer are of one token: name it with --token N"),
        (token is not None and not lens and layer is None, "--token goes with --lens, or with --layer N"),
        (lens and layer is not None, "--lens shows every layer; leave --layer out"),
        (head is not None and layer is None, "--head goes with --layer"),
    ):
        if wrong:
            raise click.UsageError(problem)


def _table(seen: Look) -> str:
    rows = [("", "token", "probability", "bits", "entropy", "rank", "likeliest in its place")]
    for token in seen:
        others = _likeliest((a.piece, a.probability) for a in token.alternatives)
        told = ("", "", "", "")
        if token.probability is not None:
            told = (f"{token.probability:.2%}", f"{token.bits:.2f}", f"{token.entropy:.2f}", f"{token.rank:,}")
        rows.append((str(token.index), repr(token.piece), *told, others))
    rows.append(("", "next", "", "", "", "", _likeliest((a.piece, a.probability) for a in seen.next)))
    bits = seen.bits[1:]
    mean = f"\n\n{len(bits)} predictions, {bits.mean():.2f} bits a token" if len(bits) else ""
    return console.table(rows, right=(0, 2, 3, 4, 5)) + mean


def _likeliest(pairs: Any) -> str:
    return "  ".join(f"{piece!r} {probability:.1%}" for piece, probability in pairs)
