"""`pronk generate`: prompts in, texts out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pronk.cli import console, options, progress, text_files
from pronk.cli.generated_json import as_json as json_of
from pronk.cli.verb import verb

if TYPE_CHECKING:
    from pronk.engine.generation import Chunk, Generation, Stats, TokenLogprob
    from pronk.engine.params import SamplingParams
    from pronk.llm import LLM
    from pronk.prompts import Prompt


def _token_ids(ctx: click.Context, parameter: click.Parameter, value: str | None) -> list[int] | None:
    try:
        return None if value is None else [int(word) for word in value.replace(",", " ").split()]
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers") from None


@verb(
    epilog="""\b
Examples:
  pronk generate "The capital of France is"
  pronk generate -n 50 --temp 0.8 --top-p 0.95 -s 1 "Once upon a time"
  pronk generate -f prompt.txt --stop $'\\n\\n' --json
  echo "Dear Sir or Madam," | pronk generate -m ./my-model --quantize bf16
  pronk generate --chat --system "Be brief." "What is a llama?"
  pronk generate --num-beams 4 --num-return-sequences 2 "It was"
  pronk generate --json-schema person.json "Invent a person. "
  pronk generate "The sea is" "The sky is"
  pronk generate -f prompts.txt --each-line --jsonl > answers.jsonl

The prompt comes from PROMPT, -p, a file, or standard input, where that is not a terminal or PROMPT is -;
one trailing newline is removed from a file's and from standard input's. Without a prompt, or with an empty one, the
text begins at the beginning-of-text token. A model without a tokenizer takes and prints token ids.

Several prompts are computed in one batch, and their texts printed in the prompts' order when all are
done. --jsonl prints an object for each prompt; --json takes one prompt, and prints one object. On a terminal,
control characters in the text are shown as visible symbols; files and pipes get them unchanged."""
)
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@options.together(
    click.option("-p", "--prompt", "prompt_options", multiple=True, metavar="TEXT",
                 help="Generate from this prompt, as from the argument PROMPT. Repeatable."),
    options.file_option("Read the prompt from FILE (UTF-8); - reads standard input."),
    click.option("--each-line", is_flag=True,
                 help="Take each line of the file, blank ones left out, as a prompt of its own."),
    click.option("--chat", is_flag=True, help="Put each prompt through the chat template, as a user's question."),
    click.option("--system", metavar="TEXT", help="With --chat: use this system prompt."),
    click.option("--prompt-ids", metavar="IDS", callback=_token_ids,
                 help="Generate from a prompt of token ids, as in 1,403,407."),
    heading="Prompt",
)  # fmt: skip
@options.model_option
@options.adapter_option
@options.loading_options
@options.sampling_options
@options.together(
    click.option("--num-samples", type=int, default=1, show_default=True, metavar="N",
                 help="Draw N independent samples for each prompt; needs a --temperature above 0."),
    heading=options.DECODING,
)  # fmt: skip
@options.generation_options
@options.structure_options
@options.together(
    click.option("--num-beams", type=int, default=1, show_default=True, metavar="N",
                 help="Search with N beams; 1: no beam search."),
    click.option("--length-penalty", type=float, default=1.0, show_default=True, metavar="X",
                 help="Divide a beam's summed log-probabilities by its length to the power of X."),
    click.option("--early-stopping", type=click.Choice(["false", "true", "never"]), default="false", show_default=True,
                 callback=lambda ctx, param, value: {"false": False, "true": True}.get(value, value),
                 help="Once N beams are finished: stop (true), stop if no running beam scores better at its present "
                 "length (false), or stop if none can at any length (never)."),
    click.option("--num-return-sequences", type=int, default=1, show_default=True, metavar="N",
                 help="Return the N best beams, at most --num-beams; without beam search the same as --num-samples."),
    heading="Beam search",
)  # fmt: skip
@options.together(
    click.option("--logprobs", type=int, metavar="N",
                 help="Report the log-probability of each token and of the N likeliest tokens in its place, on stderr "
                 "or in the JSON.  [default: off]"),
    click.option("--echo", is_flag=True, help="Print the prompt before the text."),
    options.json_option,
    click.option("--jsonl", is_flag=True, help="Print one JSON object per line for each prompt."),
    heading=options.OUTPUT,
)  # fmt: skip
def command(
    prompts: tuple[str, ...],
    prompt_options: tuple[str, ...],
    file: str | None,
    each_line: bool,
    model: str,
    prompt_ids: list[int] | None,
    no_cache: bool,
    truncate: str | None,
    echo: bool,
    as_json: bool,
    jsonl: bool,
    chat: bool,
    system: str | None,
    **rest: Any,
) -> None:
    """Generate text from prompts.

    The text of one prompt streams to stdout; statistics go to stderr.
    """
    if echo and (as_json or jsonl):
        option = "--json" if as_json else "--jsonl"
        raise click.UsageError(f"--echo and {option} exclude each other; the JSON object holds the prompt")
    if system is not None and not chat:
        raise click.UsageError("--system is for --chat")
    if chat and prompt_ids is not None:
        raise click.UsageError("--chat is for texts; --prompt-ids are taken as they are")
    texts = _prompts(prompts, prompt_options, file, each_line, prompt_ids)
    if chat and "" in texts:
        raise click.UsageError("--chat answers a prompt, and there is none; give it in quotes, or -f FILE")
    if as_json and (len(texts) > 1 or jsonl):
        raise click.UsageError("--json is one object, for one prompt; --jsonl is one a line, for several")
    structure, adapter = options.structure_of(rest), rest["adapter"]
    llm, params = options.prepare(model, rest)
    llm.warns_of_bare_text = False  # for it would say so in Python's words
    if not chat and prompt_ids is None:
        _note_bare(adapter)
    if bad := [token for token in prompt_ids or () if not 0 <= token < llm.config.vocab_size]:
        raise click.UsageError(f"--prompt-ids has {bad[0]}, but the model's are from 0 to {llm.config.vocab_size - 1}")
    how: dict[str, Any] = {"params": params, "truncate": truncate, "cache": not no_cache}
    if structure:
        how["structure"] = structure
    if chat:
        how |= {"chat": True, "system": system}
    shown = ["" if not echo else text if isinstance(text, str) else llm.tokenizer.decode(text) for text in texts]
    if not (as_json or jsonl) and params.num_beams == params.samples == len(texts) == 1:
        _stream(texts[0], shown[0], how, llm)
        return
    begun = time.perf_counter()
    with progress.shown(unit=progress.of_tokens) as advance:
        found = llm.generate(texts, progress=advance, **how)
    several = found if isinstance(found, list) else [found]
    each = len(several) // len(texts)
    of_prompts = [several[at : at + each] for at in range(0, len(several), each)]
    if as_json or jsonl:
        for text, generations in zip(texts, of_prompts, strict=True):
            console.write_json(json_of(model, text, generations, llm))
        return
    _print_several([prompt for prompt in shown for _ in range(each)], several, params, llm)
    if len(texts) > 1:
        console.note(_account(of_prompts, time.perf_counter() - begun) + options.describe(params, several[-1].seed))
    else:
        last = several[-1]
        console.note(_statistics(last.stats, last.truncated_tokens) + "; " + options.describe(params, last.seed))
    _note_cut(llm, several)


def _note_bare(adapter: str | None) -> None:
    from pronk.system import expanded
    from pronk.tokenizer.source import chat_template

    if adapter and chat_template(expanded(adapter)) is not None:
        console.note(f"{adapter} was trained through a chat template, and is given bare text; --chat asks through it")


_OF_MODELS = (".gguf", ".safetensors", ".bin", ".pth", ".pt")


def _prompts(
    arguments: Sequence[str], given: Sequence[str], file: str | None, each_line: bool, ids: list[int] | None
) -> list[Prompt]:
    if arguments and arguments[0].endswith(_OF_MODELS) and Path(arguments[0]).is_file():
        raise click.UsageError(f"{arguments[0]} is a file, and stands where a prompt does; a model goes with -m")
    if sum((bool(arguments), bool(given), file is not None, ids is not None)) > 1:
        raise click.UsageError("give prompts in one way: PROMPT, -p, -f or --prompt-ids")
    if each_line and (arguments not in ((), ("-",)) or given or ids is not None):
        raise click.UsageError("--each-line is for the lines of a file, -f FILE, or of standard input")
    if ids is not None:
        return [ids]
    if arguments == ("-",):
        arguments, file = (), "-"
    elif "-" in arguments:
        raise click.UsageError("- is standard input, and stands alone; a prompt that is a dash goes with -p")
    if texts := [*arguments, *given]:
        if len(arguments) > 1 and not any(c.isspace() for c in "".join(arguments)):
            console.note(f"{len(arguments)} prompts of a word each; a prompt of several words goes in quotes")
        return list(texts)
    text = "" if file is None and sys.stdin.isatty() else text_files.read_file(file or "-")
    if not each_line:
        return [text]
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    if not (there := [line for line in lines if line.strip()]):
        raise click.UsageError("--each-line found no line that is not blank")
    if blank := len(lines) - len(there):
        console.note(f"{blank} blank line{'s' if blank > 1 else ''} left out")
    return list(there)


def _stream(prompt: Prompt, shown: str, how: dict[str, Any], llm: LLM) -> None:
    from pronk.engine.generation import TokenLogprob

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


def _print_several(prompts: Sequence[str], generations: Sequence[Generation], params: SamplingParams, llm: LLM) -> None:
    for number, (prompt, generation) in enumerate(zip(prompts, generations, strict=True), 1):
        score = "" if generation.score is None else f", score {generation.score:.4f}"
        if len(generations) > 1:
            console.note(f"-- {number} of {len(generations)}: {len(generation.tokens)} tokens{score}")
        console.write(prompt + (generation.text if llm.has_tokenizer else _spaced(generation.tokens)) + "\n")
        if generation.logprobs is not None:
            _print_logprobs(generation.logprobs, llm)


def _account(of_prompts: Sequence[Sequence[Generation]], seconds: float) -> str:
    read = sum(generations[0].prompt_tokens for generations in of_prompts)
    cut = sum(generations[0].truncated_tokens for generations in of_prompts)
    new = sum(len(generation.tokens) for generations in of_prompts for generation in generations)
    loaded = of_prompts[0][0].stats.load_s
    return (
        f"{len(of_prompts)} prompts, {read} tokens in all" + (f" ({cut} cut)" if cut else "") + f"; {new} new in "
        f"{seconds:.2f} s, {new / seconds:.1f} tok/s; loaded in {loaded:.2f} s; "
    )


def _spaced(tokens: Sequence[int]) -> str:
    """What stands for a text where there is no tokenizer."""
    return " ".join(map(str, tokens))


def _statistics(stats: Stats, cut: int) -> str:
    def rate(value: float | None) -> str:
        return "" if value is None else f" at {value:.1f} tok/s"

    return "; ".join(
        [
            f"{stats.prompt_tokens} prompt token{'s' * (stats.prompt_tokens != 1)}"
            + (f" ({cut} cut)" if cut else "")
            + rate(stats.prefill_tok_s),
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
