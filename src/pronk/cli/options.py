"""What several verbs share: options, and the way from them to a prompt, a loaded model and SamplingParams."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import click

from pronk import engines, formats
from pronk.cli import text_files, typed
from pronk.cli.parameter_types import NAME, THRESHOLD, FormatOnLoad
from pronk.errors import BadRequest
from pronk.system import human_size

if TYPE_CHECKING:
    from pronk.engine.generation import Chunk, Generation
    from pronk.engine.params import SamplingParams
    from pronk.grammar.structure import Structure
    from pronk.llm import LLM

DEFAULT_MODEL = "smollm2:135m"

F = TypeVar("F", bound=Callable[..., Any])


def _biases(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a token id and a number, as in 42=-5.0") from None
    return biases


def together(*options: Callable[[F], F], heading: str | None = None) -> Callable[[F], F]:
    """`heading`: what --help shows those under that have none yet."""

    def decorate(function: F) -> F:
        there = len(getattr(function, "__click_params__", ()))
        for option in reversed(options):
            function = option(function)
        if heading:
            for parameter in vars(function)["__click_params__"][there:]:
                vars(parameter).setdefault("heading", heading)
        return function

    return decorate


LOADED, DECODING, OUTPUT = "Model and engine", "Decoding", "Output"  # headings

model_argument = click.argument("model", type=NAME)
model_option = together(
    click.option("-m", "--model", type=NAME, default=DEFAULT_MODEL, show_default=True, metavar="MODEL",
                 help="Load this model: a name, a Hugging Face repository (owner/name), a file or a folder."),
    heading=LOADED,
)  # fmt: skip
revision_option = click.option(
    "--revision", type=NAME, metavar="REV",
    help="Take this branch, tag or commit of a Hugging Face repository.  [default: main]",
)  # fmt: skip
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")


def file_option(text: str) -> Callable[[F], F]:
    """A text file that a verb reads. `text`: the help."""
    return click.option("-f", "--file", "--text", "file", type=NAME, metavar="FILE", help=text)


text_option = file_option(
    "Measure on the text in FILE (UTF-8); - reads standard input.  [default: prose that comes with pronk]"
)
tokenizer_option = click.option(
    "-z", "--tokenizer", type=NAME, metavar="FILE",
    help="Use this tokenizer, not the model's: a file, a folder, or one of those that are downloaded by name (llama2, "
    "tok512).",
)  # fmt: skip

engine_option = click.option(
    "--engine",
    type=click.Choice(engines.NAMES),
    help="Run the model with pronk's own kernels (cpu) or with PyTorch (torch).  [default: torch if it finds a GPU, "
    "else cpu; where you give an option that one engine alone has, that engine]",
)
device_option = click.option(
    "--device", type=NAME, metavar="NAME",
    help="Torch engine: run on cpu, cuda or cuda:N.  [default: cuda if torch finds a GPU, else cpu]",
)  # fmt: skip
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N",
    help="Use N CPU threads.  [default: one per physical core; torch engine: torch's own]",
)  # fmt: skip

adapter_option = together(
    click.option("--adapter", type=NAME, metavar="FOLDER",
                 help="Apply the LoRA adapter in FOLDER (PEFT's format, which pronk's training verbs write; or a "
                      "GGUF file). It is kept beside the weights, in whichever format these are."),
    click.option("--merge-adapter", is_flag=True,
                 help="Add the adapter to the weights instead. They become f32 unless --quantize names a format, and "
                      "generate somewhat faster; a 4-bit format rounds away part of what was learned."),
    heading=LOADED,
)  # fmt: skip


_whose = together(tokenizer_option, revision_option, engine_option)
_quantize_option = click.option(
    "--quantize", type=FormatOnLoad(engines.FORMATS), metavar="FORMAT",
    help=f"Convert the weights to FORMAT on load: {', '.join(engines.FORMATS[1:])}, or auto, which keeps the file's "
    "formats. q8: 8 bits, a scale per 32 weights; q4: 4 bits, a scale and a minimum per 32; int8: a scale per row, and "
    "activations in 8 bits, too; llm-int8: int8 with outliers in f32; absmax, absmax-row, zeropoint: for study.  "
    "[default: auto; torch engine: f32, on a GPU the file's f16, or bf16; of quantized weights, too]",
)  # fmt: skip
_how = together(
    click.option("--int8-threshold", type=THRESHOLD, metavar="X",
                 help="llm-int8: compute in f32, as outliers, the activations whose magnitude is above X.  "
                 "[default: 6.0, or what the checkpoint says]"),
    click.option("--int8-outliers", type=click.IntRange(min=0), metavar="N",
                 help="llm-int8: compute at least the N largest activations of each token in f32.  [default: 6]"),
    click.option("--kv-dtype", type=click.Choice(get_args(formats.KVName)),
                 help="CPU engine: store the KV cache in this data type; int8 takes about half the memory of 16 bits, "
                 "q4 a third.  "
                 "[default: auto: f32 with f32 and f16 weights, else bf16]"),
    device_option,
    click.option("--compute-dtype", type=click.Choice(formats.FLOATS),
                 help="Torch engine with weights in 8 or 4 bits: use this data type for activations and all other "
                 "weights.  "
                 "[default: f32; on a GPU f16 where the file has f16, else bf16]"),
    click.option("--attn", type=click.Choice(["flash", "math"]),
                 help="Torch engine: compute attention with the fused kernel (flash), or written out step by step "
                 "(math), which is slower and takes more memory.  [default: flash]"),
    click.option("--batch-invariant", is_flag=True, default=None,
                 help="Torch engine on a GPU: give a text the same logits to the bit whatever is computed beside it, "
                 "as the CPU engine always does. Slower; only with weights in f32, bf16 or f16."),
    threads_option,
)  # fmt: skip


def _ctx_size(*names: str) -> Callable[[F], F]:
    return click.option(
        *names, "ctx_size", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
        help="Limit a text to N tokens, prompt and output together; 0: the model's own context length.",
    )  # fmt: skip


_context = _ctx_size("-c", "--ctx-size", "--max-model-len")
_pack_cache_option = click.option(
    "--no-pack-cache", "pack_cache", is_flag=True, flag_value=False, default=True,
    help="CPU engine: neither write nor read the cache on the disk (the folder packed of the user's cache, 32 GiB at "
    "most) from which large models, of 256 MB and more, start sooner.",
)  # fmt: skip
loading_options = together(_whose, _quantize_option, _how, _context, _pack_cache_option, heading=LOADED)
# Of verbs whose -c is the length of a window, as it is in llama.cpp.
window_loading_options = together(
    _whose, _quantize_option, _how, _ctx_size("--max-model-len"), _pack_cache_option, heading=LOADED
)
variant_options = together(
    _whose, _how, _context, heading=LOADED
)  # of a verb that loads a model in several formats, which it names itself
LOADING = (
    "tokenizer", "revision", "engine", "quantize", *engines.OPTIONS, "threads", "ctx_size", "pack_cache",
)  # fmt: skip

# The defaults stand in pronk.engine.params too; a test holds the two together, so that --help need not import it.
sampling_options = together(
    click.option("-n", "--max-new-tokens", "--max-tokens", "--n-predict", type=int, default=256, show_default=True,
                 metavar="N", help="Generate at most N tokens; -1: to the end of the context."),
    click.option("--temperature", "--temp", type=float, default=0.0, show_default=True, metavar="X",
                 help="Divide the logits by X before sampling; 0: greedy decoding, which draws nothing and refuses "
                 "--top-k, --top-p and --min-p."),
    click.option("--top-k", type=int, default=0, show_default=True, metavar="K",
                 help="Keep the K likeliest tokens; 0: all."),
    click.option("--top-p", type=float, default=1.0, show_default=True, metavar="P",
                 help="Nucleus sampling: keep the fewest likeliest tokens whose probabilities sum to P; 1.0: all."),
    click.option("--min-p", type=float, default=0.0, show_default=True, metavar="P",
                 help="Drop tokens less likely than P times the likeliest one; 0: none."),
    click.option("--repetition-penalty", "--repeat-penalty", type=float, default=1.0, show_default=True, metavar="X",
                 help="For tokens that stand in the prompt or the output, divide positive logits by X and multiply "
                 "negative ones by it; 1.0: off."),
    click.option("--presence-penalty", type=float, default=0.0, show_default=True, metavar="X",
                 help="Subtract X from the logit of every token generated before; 0: off."),
    click.option("--frequency-penalty", type=float, default=0.0, show_default=True, metavar="X",
                 help="Subtract X from a token's logit for each time it was generated; 0: off."),
    click.option("--logit-bias", multiple=True, callback=_biases, metavar="ID=BIAS",
                 help="Add BIAS to the logit of token ID. Repeatable."),
    click.option("-s", "--seed", type=int, metavar="N",
                 help="Seed the random numbers: the same seed gives the same text.  [default: a random seed, which is "
                 "reported]"),
    click.option("--rng", type=click.Choice(["philox", "xorshift", "numpy"]), default="philox", show_default=True,
                 help="Draw random numbers as pronk (philox), llama2.c (xorshift) or NumPy's legacy generator does."),
    click.option("--stop", multiple=True, metavar="TEXT",
                 help="Stop when TEXT is generated; TEXT is not printed. Repeatable."),
    click.option("--stop-token-id", "stop_token_ids", type=int, multiple=True, metavar="ID",
                 help="Stop when token ID is generated. Repeatable."),
    click.option("--ignore-eos", is_flag=True, help="Continue past the end-of-text token."),
    click.option("--speculative", type=click.Choice(["ngram"]),
                 help="Speculative decoding: draft tokens by n-gram lookup in the text so far (ngram), and check "
                 "several in one pass. The text stays the same.  [default: off]"),
    heading=DECODING,
)  # fmt: skip


def _structure(make: str) -> Callable[[click.Context, click.Parameter, str | None], Structure | None]:
    """What a callback makes of an option's value by one of Structure's constructors."""

    def callback(ctx: click.Context, parameter: click.Parameter, value: str | None) -> Structure | None:
        if value is None:
            return None
        from pronk.grammar.structure import Structure

        made: Structure = getattr(Structure, make)(value if make == "regex" else text_files.read_file(value))
        return made

    return callback


structure_options = together(
    click.option("--json-schema", metavar="FILE", callback=_structure("json_schema"),
                 help="Write JSON that follows this JSON Schema; - reads it from standard input."),
    click.option("--regex", metavar="PATTERN", callback=_structure("regex"),
                 help="Write a text that this regular expression matches as a whole."),
    click.option("--grammar", metavar="FILE", callback=_structure("grammar"),
                 help="Write a text of this context-free grammar, in Lark's syntax or in GBNF."),
    heading="Structured output",
)  # fmt: skip


def structure_of(options: dict[str, Any]) -> Structure | None:
    """The one that was asked for, taken out of a verb's options."""
    asked = {name: made for name in ("json_schema", "regex", "grammar") if (made := options.pop(name)) is not None}
    if len(asked) > 1:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in asked)
        raise click.UsageError(f"{names} exclude each other")
    return next(iter(asked.values()), None)


generation_options = together(
    click.option("--no-cache", is_flag=True,
                 help="Generate without the KV cache: recompute the whole text for each token. Slow; the same text."),
    click.option("--truncate", type=click.Choice(["left", "right"]),
                 help="Drop tokens from this end of a prompt (in a chat: of a question) that alone is too long.  "
                 "[default: refuse it]"),
    heading=DECODING,
)  # fmt: skip


def prepare(model: str, options: dict[str, Any]) -> tuple[LLM, SamplingParams]:
    """`options` are those of loading and sampling; the wrong ones are found before loading, which may take a while."""
    loading = loading_of(options)
    params = sampling_params(options)
    return load_model(model, loading), params


def loading_of(options: dict[str, Any]) -> dict[str, Any]:
    """Those of loading, taken out of a verb's."""
    loading = {name: options.pop(name) for name in (*LOADING, "adapter")}
    return {**loading, "merge_adapter": True} if options.pop("merge_adapter") else loading


def load_model(model: str, loading: dict[str, Any]) -> LLM:
    import pronk
    from pronk.cli import console, progress

    loading["ctx_size"] = loading["ctx_size"] or None
    threads, cores = loading.get("threads") or 1, os.cpu_count()
    if cores and threads > cores:
        console.note(f"{threads} threads on {cores} processors: more than {cores} are no faster")
    with progress.shown("loading", patience=0) as advance:  # importing torch takes a moment already
        llm = pronk.load(model, **loading, progress=advance)
    if kept := llm.backend.newly_kept:
        size = human_size(kept.stat().st_size)
        console.note(f"kept {size} of packed weights in {kept.parent} for later starts (--no-pack-cache: none)")
    trained, scaling = llm.config.max_position_embeddings, llm.config.rope_scaling
    if llm.ctx_size > trained and not (scaling and scaling.rope_type == "dynamic"):  # which stretches with the context
        console.note(f"a context of {llm.ctx_size} tokens is more than the {trained} the model was trained for")
    return llm


def origin(
    model: str, loading: dict[str, Any], text: str | None, ran: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """pronk.measure.machine.provenance of figures of a model that nobody holds any more."""
    from pronk import checkpoint
    from pronk.checkpoint.hub import resolve as hub
    from pronk.cli import console
    from pronk.measure.machine import provenance

    opened = checkpoint.open(hub.resolve(model, revision=loading.get("revision")))
    return provenance(opened, text, console.command(), ran)


def sampling_params(fields: dict[str, Any]) -> SamplingParams:
    """SamplingParams of its fields; what cannot be is wrong usage."""
    from pronk.engine.params import SamplingParams

    try:
        return SamplingParams(**fields)
    except BadRequest as error:
        raise click.UsageError(typed.in_words(click.get_current_context(), str(error))[0]) from None


def describe(params: SamplingParams, seed: int | None) -> str:
    """The sampling that took place, in a few words: what differs from the defaults, and the seed if any was used. No
    seed: that which is to take place."""
    from pronk.engine.filters import FILTER_NAMES
    from pronk.engine.params import SamplingParams

    plain = SamplingParams()
    words = [f"{params.num_beams} beams" if params.num_beams > 1 else "greedy"] if params.temperature == 0 else []
    penalties = ("repetition_penalty", "presence_penalty", "frequency_penalty", "length_penalty")
    for name in ("temperature", *FILTER_NAMES, *penalties):
        if (value := getattr(params, name)) != getattr(plain, name):
            words.append(f"{name.replace('_', '-')} {value:g}")
    if params.logit_bias:
        words.append(f"{len(params.logit_bias)} logit biases")
    if params.temperature > 0 and seed is not None:
        words.append(f"seed {seed}" + (f" ({params.rng})" if params.rng != plain.rng else ""))
    return ", ".join(words)


def why_stopped(llm: LLM, ends: Sequence[Chunk | Generation], option: str = "-n") -> str | None:
    """What cut sequences short, if anything did: their last chunks or wholes tell. Ends in what may let them go on.
    `option`: what raises the number of new tokens."""
    cut = [end.stats for end in ends if end.finish_reason == "length" and end.stats]
    if not cut:
        return None
    some = f"{len(cut)} of {len(ends)} stopped" if len(ends) > 1 else "stopped"
    if all(stats.prompt_tokens + stats.new_tokens < llm.ctx_size for stats in cut):
        return f"{some} after {cut[0].new_tokens} tokens; {option} allows more"
    trained = llm.config.max_position_embeddings
    more = f"; --ctx-size allows up to {trained}" if llm.ctx_size < trained else ""
    return f"{some}, for the context of {llm.ctx_size} tokens is full{more}"
