"""`pronk generate`: a prompt in, text out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, options, progress

if TYPE_CHECKING:
    from pronk.engine.params import SamplingParams
    from pronk.generation import Chunk, Generation, Stats, TokenLogprob
    from pronk.llm import LLM


def _token_ids(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(word) for word in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers") from None


@options.verb(
    epilog="""\b
Examples:
  pronk generate "The capital of France is"
  pronk generate -n 50 --temp 0.8 --top-p 0.95 -s 1 "Once upon a time"
  pronk generate -f prompt.txt --stop $'\\n\\n' --json
  echo "Dear Sir or Madam," | pronk generate -m ./my-model --dtype bf16
  pronk generate --num-beams 4 --num-return-sequences 2 "It was"

The prompt is PROMPT, -p, a file, or standard input where that is not a terminal; less one newline at
its end. Without a prompt, or with an empty one, the text begins at the beginning-of-text token. A model
without a tokenizer takes and gives token ids.

Several sequences are printed one after the other when all are done; --json keeps them apart. On a
terminal, control characters in the text are shown as signs; files and pipes get them as they are."""
)
@click.argument("prompt", required=False)
@click.option("-p", "--prompt", "prompt_option", metavar="TEXT", help="The prompt, as PROMPT.")
@click.option("-f", "--file", type=options.NAME, metavar="FILE", help="Read the prompt from FILE; - is standard input.")
@click.option("--prompt-ids", metavar="IDS", callback=_token_ids, help="The prompt as token ids: 1,403,407.")
@options.model_option
@options.adapter_option
@options.loading_options
@options.sampling_options
@click.option("--num-samples", "n", type=int, default=1, show_default=True, help="Independent samples of the prompt.")
@click.option("--num-beams", type=int, default=1, show_default=True, help="Beam search, this wide; 1: none.")
@click.option("--length-penalty", type=float, default=1.0, show_default=True,
              help="Beam search: scores are divided by length to this power.")  # fmt: skip
@click.option(
    "--early-stopping",
    type=click.Choice(["false", "true", "never"]),
    default="false",
    show_default=True,
    callback=lambda ctx, param, value: {"false": False, "true": True}.get(value, value),
    help="Beam search: stop once num-beams sequences are finished; never: once no better one can come.",
)
@click.option(
    "--num-return-sequences",
    type=int,
    default=1,
    show_default=True,
    help="How many of the beams, or else samples, to give.",
)
@click.option("--logprobs", type=int, metavar="N",
              help="Log-probability of each token and of the N likeliest; to stderr, or into the JSON.")  # fmt: skip
@options.generation_options
@click.option("--echo", is_flag=True, help="Print the prompt before the text.")
@options.json_option
def command(
    prompt: str | None,
    prompt_option: str | None,
    file: str | None,
    model: str,
    prompt_ids: list[int] | None,
    no_cache: bool,
    truncate: str | None,
    echo: bool,
    as_json: bool,
    **rest: Any,
) -> None:
    """Continue a text; it streams to stdout, statistics go to stderr."""
    if echo and as_json:
        raise click.UsageError("--echo and --json exclude each other; the JSON object holds the prompt")
    text = _prompt(prompt, prompt_option, file, prompt_ids)
    llm, params = options.prepare(model, rest)
    how: dict[str, Any] = {"params": params, "truncate": truncate, "cache": not no_cache}
    shown = "" if not echo else text if isinstance(text, str) else llm.tokenizer.decode(text)
    if not as_json and params.num_beams == 1 and params.samples == 1:
        _stream(text, shown, how, llm)
        return
    with progress.shown(unit=progress.of_tokens) as advance:
        found = llm.generate(text, progress=advance, **how)
    several = found if isinstance(found, list) else [found]
    if as_json:
        console.write_json(_as_json(model, text, several))
    else:
        _print_several(shown, several, params, llm)


def _prompt(argument: str | None, option: str | None, file: str | None, ids: list[int] | None) -> str | list[int]:
    if sum(source is not None for source in (argument, option, file, ids)) > 1:
        raise click.UsageError("give one prompt: PROMPT, -p, -f or --prompt-ids")
    if ids is not None:
        return ids
    if argument is not None or option is not None:
        return argument if argument is not None else str(option)
    if file is not None:
        return options.read_file(file)
    return "" if sys.stdin.isatty() else options.read_file("-")


def _stream(prompt: str | list[int], shown: str, how: dict[str, Any], llm: LLM) -> None:
    from pronk.generation import TokenLogprob

    params, logprobs = how["params"], []
    chunk = None
    try:
        with progress.shown(unit=progress.of_tokens) as advance:
            for chunk in llm.stream(prompt, progress=advance, **how):
                console.write(shown + (chunk.text if llm.has_tokenizer or chunk.token is None else f"{chunk.token} "))
                shown = ""
                if params.logprobs is not None and chunk.token is not None and chunk.logprob is not None:
                    logprobs.append(TokenLogprob(chunk.token, chunk.logprob, chunk.top))
    finally:
        if chunk is not None:  # an error before the first token leaves stdout empty
            console.write("\n")
    if logprobs:
        _print_logprobs(logprobs, llm)
    if chunk and chunk.stats:
        console.note(_statistics(chunk.stats, chunk.truncated_tokens) + "; " + options.describe(params, chunk.seed))
        _note_cut(llm, [chunk])


def _note_cut(llm: LLM, ends: Sequence[Chunk | Generation]) -> None:
    if why := options.why_stopped(llm, ends):
        console.note(why)


def _print_several(prompt: str, generations: Sequence[Generation], params: SamplingParams, llm: LLM) -> None:
    for number, generation in enumerate(generations, 1):
        score = "" if generation.score is None else f", score {generation.score:.4f}"
        if len(generations) > 1:
            console.note(f"-- {number} of {len(generations)}: {len(generation.tokens)} tokens{score}")
        console.write(prompt + (generation.text if llm.has_tokenizer else _spaced(generation.tokens)) + "\n")
        if generation.logprobs is not None:
            _print_logprobs(generation.logprobs, llm)
    last = generations[-1]
    console.note(_statistics(last.stats, last.truncated_tokens) + "; " + options.describe(params, last.seed))
    _note_cut(llm, generations)


def _spaced(tokens: Sequence[int]) -> str:
    """What stands for a text where there is no tokenizer."""
    return " ".join(map(str, tokens))


def _statistics(stats: Stats, cut: int) -> str:
    def rate(value: float | None) -> str:
        return "" if value is None else f" at {value:.1f} tok/s"

    return "; ".join(
        [
            f"{stats.prompt_tokens} prompt tokens" + (f" ({cut} cut)" if cut else "") + rate(stats.prefill_tok_s),
            f"{stats.new_tokens} new" + rate(stats.decode_tok_s),
            *(
                [f"{stats.accepted_tokens} of {stats.drafted_tokens} guessed tokens were right"]
                if stats.drafted_tokens
                else []
            ),
            f"first after {stats.ttft_s:.2f} s, loaded in {stats.load_s:.2f} s",
            *([] if stats.peak_rss_mb is None else [f"peak {stats.peak_rss_mb:.0f} MB"]),
        ]
    )


def _print_logprobs(logprobs: Sequence[TokenLogprob], llm: LLM) -> None:
    """A line a token: its log-probability and text, then the likeliest ones."""

    def spelled(token: int) -> str:
        return json.dumps(llm.tokenizer.token_text(token)) if llm.has_tokenizer else str(token)

    for entry in logprobs:
        others = "  ".join(f"{spelled(token)} {logprob:.3f}" for token, logprob in entry.top)
        console.note(f"{entry.logprob:9.4f}  {spelled(entry.token)}" + (f"   of  {others}" if others else ""))


def _as_json(model: str, prompt: str | list[int], generations: Sequence[Generation]) -> dict[str, Any]:
    first = generations[0]
    timed = ("load_s", "ttft_s", "prefill_tok_s", "decode_tok_s", "peak_rss_mb")
    saved = ("cached_tokens", "drafted_tokens", "accepted_tokens")
    result = {
        "model": model,
        "prompt": prompt,
        "prompt_tokens": first.prompt_tokens,
        **_sequence(first),
        "stats": {name: getattr(first.stats, name) for name in timed + saved},
    }
    if first.truncated_tokens:
        result["truncated_tokens"] = first.truncated_tokens
    if len(generations) > 1:
        result["sequences"] = [_sequence(generation) for generation in generations]
    return result


def _sequence(generation: Generation) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": generation.text,
        "tokens": list(generation.tokens),
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
    }
    if generation.score is not None:
        result["score"] = generation.score
    if generation.logprobs is not None:
        result["logprobs"] = [
            {
                "token": entry.token,
                "logprob": entry.logprob,
                "top": [{"token": token, "logprob": logprob} for token, logprob in entry.top],
            }
            for entry in generation.logprobs
        ]
    return result
