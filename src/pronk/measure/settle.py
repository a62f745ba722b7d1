"""Settle: a request made whole, and checked before any of it begins.

Everything that can be wrong with a request is found here, in the second or two that opening a checkpoint takes: a
scheme that there is not, a text shorter than a window, prompts beyond the context, a model too large for memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pronk import checkpoint as checkpoints
from pronk import engines, loading, system
from pronk.checkpoint import grid
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.tensors import Checkpoint
from pronk.engine.backend import check_predicts
from pronk.errors import BadRequest, NoTokenizer
from pronk.formats import FORMATS
from pronk.measure import tasks, texts
from pronk.measure.comparison import Comparison, Request, Variant
from pronk.measure.mixed import sixteen_bits
from pronk.measure.schema import LENGTHS
from pronk.measure.windows import LOGITS_BYTES, evaluation_text, windows
from pronk.tokenizer import Tokenizer

REFERENCE = "f32"
PREFILL = (32, 128, 512)  # tokens of the prompts
WINDOWS, WINDOW = 16, 512
SHIPPED = "the text that comes with pronk"
_LEAST_TEXT = 8  # tokens: fewer say nothing of how a text goes on
_SPARE = 0.85  # of free memory that several models together may take: the rest of the machine is not asleep


def settle(request: Request) -> Comparison:
    """Raises BadRequest, and PronkError where the model is too large for memory, before anything is measured."""
    model = request.model or hub.DEFAULT_MODEL
    opened = checkpoints.open(hub.resolve(model, revision=request.loading.get("revision")))
    check_predicts(opened.config)
    against = request.against or sixteen_bits(opened)
    engine = _engine(request, against)
    compares = not request.techniques or request.to is not None or bool(request.tasks)
    if request.tasks:
        tasks.check(request.tasks)
    named = (request.to or engines.named(engine).compared) if compares else ()
    names = tuple(dict.fromkeys((against, *named)))
    if compares and names == (against,):
        raise BadRequest(f"{against} is the original itself; name another scheme with --to, or another --against")
    if not compares and (request.prefill or request.decode_tokens):
        raise BadRequest(
            "techniques have lengths of their own, which the report lists; leave out --prefill and --decode-tokens, or "
            "name formats to compare as well (--to)"
        )
    levels = grid.find(opened)
    variants = []
    for name in names:
        options = options_of(name, engine, request.loading)
        twin = levels is not None and name in levels.formats and name != against
        variants.append(Variant(name, name == against, options, engines.named(engine).plan(opened, options), twin))
    codec = loading.tokenizer_of(opened, request.loading.get("tokenizer"))
    if codec is None:
        raise NoTokenizer(f"{opened.path} carries no tokenizer, and quality is measured on text; name one: --tokenizer")
    written = evaluation_text() if request.text is None else _read(request.text)
    ids = codec.encode(written)
    ctx = request.loading.get("ctx_size") or opened.config.max_position_embeddings
    window, count = _windows(request, ctx, ids)
    prefill, decode_tokens = _lengths(request, ctx, len(ids))
    needs = {v.name: v.peak(_baseline(), prefill[-1] + decode_tokens) for v in variants}
    free = engines.named(engine).free_memory(request.loading.get("device"))
    for name, need in needs.items() if free is not None else ():
        way_out = "compare it in fewer bits (--to, --against), or a smaller model"
        system.check_memory(need, f"{model} as {name}", way_out, free)
    missing: list[str] = []
    reference, judged_together = _reference(variants, opened, engine, request, free, missing)
    rounds = 5 if request.rounds is None else request.rounds
    settled = replace(
        request, model=model, against=against, to=names[1:] if compares else None, rounds=rounds,
        prefill=prefill if compares else None, decode_tokens=decode_tokens if compares else None, windows=count,
    )  # fmt: skip
    return Comparison(
        request=settled,
        model=model,
        engine=engine,
        checkpoint=opened,
        grid=levels,
        variants=tuple(variants),
        reference=reference,
        ids=ids,
        begin=(codec.bos_id,) if codec.add_bos and codec.bos_id is not None else (),
        text=SHIPPED if request.text is None else Path(request.text).name,
        written=written,
        ctx_size=ctx,
        rounds=rounds,
        prefill=prefill,
        decode_tokens=decode_tokens,
        windows=count,
        window=window,
        new_tokens=_new_tokens(codec, ctx, missing),
        compares=compares,
        together=free is None or sum(needs.values()) <= _SPARE * free,
        judged_together=judged_together,
        missing=tuple(missing),
    )


def options_of(name: str, engine: str, loading: Mapping[str, Any]) -> dict[str, Any]:
    """What pronk.load is to be told for a variant, less what concerns other formats."""
    concerned = engines.named(engine).options
    own = {key: value for key, value in loading.items() if key != "engine" and name in (concerned.get(key) or [name])}
    return {**own, "quantize": name}


def exact_options(engine: str, loading: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the reference: weights in f32, and keys and values, too."""
    return options_of(REFERENCE, engine, {key: value for key, value in loading.items() if key != "kv_dtype"})


def _engine(request: Request, against: str) -> str:
    """One for all variants. A GPU is used where all of them can be run on it."""
    names = dict.fromkeys((against, *(request.to or ())))
    options = dict.fromkeys(engines.OPTIONS) | dict(request.loading)
    asked = options.pop("engine", None)
    for name in names:
        if name not in engines.FORMATS:
            raise BadRequest(f"{name!r} is no format; there are {', '.join(engines.FORMATS)}")
        if asked and name not in (its := engines.named(asked).formats):
            raise BadRequest(f"the {asked} engine has no {name}; it has {', '.join(its)}")
    if not any(names.keys() <= {*engine.formats} for engine in engines.ENGINES):
        raise BadRequest(f"no engine has all of {', '.join(names)}; compare those of each apart")
    own = options["int8_threshold"] is not None or options["int8_outliers"] is not None
    if own and request.to is not None and not any(FORMATS[n].outliers for n in names & FORMATS.keys()):
        raise BadRequest("--int8-threshold and --int8-outliers are llm-int8's; name it with --to, or leave them out")
    rare = (name for name in names if any(name not in engine.formats for engine in engines.ENGINES))
    return engines.choose(asked, options | {"quantize": next(rare, None)})


def _read(name: str) -> str:
    """Less one newline at its end, as the other verbs read a text."""
    try:
        return Path(name).read_text(encoding="utf-8-sig").removesuffix("\n")
    except OSError as error:
        raise BadRequest(f"{name}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"{name}: not UTF-8 text (byte {error.start}); convert it first") from None


def _lengths(request: Request, ctx: int, text: int) -> tuple[tuple[int, ...], int]:
    """Of the prompts, ascending, and how many tokens are decoded after each; by default what fits into the context."""
    decode = max(1, min(64, ctx // 4)) if request.decode_tokens is None else request.decode_tokens
    most = max(1, min(ctx - 1 - decode, text))
    fitting = tuple(tokens for tokens in PREFILL if tokens <= most) or (most,)
    prefill = fitting if request.prefill is None else tuple(sorted(set(request.prefill)))
    if len(prefill) > LENGTHS:
        raise BadRequest(
            f"{len(prefill)} lengths of prompts are more than a report has room for; name {LENGTHS} at most"
        )
    for tokens in prefill:
        if tokens + decode + 1 > ctx:
            raise BadRequest(
                f"a prompt of {tokens} tokens and {decode + 1} new ones exceed the context of {ctx}; take fewer "
                "(--prefill, --decode-tokens), or a larger context (--ctx-size)"
            )
        if tokens > text:
            raise BadRequest(f"the text has {text} tokens, fewer than a prompt of {tokens}; give a longer one (--text)")
    return prefill, decode


def _windows(request: Request, ctx: int, ids: Sequence[int]) -> tuple[int, int]:
    """Tokens of a window, and how many windows there are."""
    window = min(WINDOW, ctx)
    if len(ids) < window:
        raise BadRequest(f"the text has {len(ids)} tokens, fewer than a window of {window}; give a longer one (--text)")
    there = len(windows(ids, window))
    if request.windows is not None and request.windows > there:
        raise BadRequest(
            f"the text has {len(ids)} tokens, which is {there} windows of {window} and not {request.windows}; give a "
            "longer one (--text), or fewer --windows"
        )
    return window, min(WINDOWS, there) if request.windows is None else request.windows


def _reference(
    variants: Sequence[Variant],
    opened: Checkpoint,
    engine: str,
    request: Request,
    free: int | None,
    missing: list[str],
) -> tuple[Variant | None, bool]:
    """What quality is held against, and whether each variant fits beside it."""
    options = exact_options(engine, request.loading)
    exact = Variant(REFERENCE, False, options, engines.named(engine).plan(opened, options))
    candidates = [exact] + [variant for variant in variants if variant.original]
    ctx = min(WINDOW, opened.config.max_position_embeddings)

    def together(*these: Variant) -> bool:
        weights = sum(v.peak(4 * LOGITS_BYTES, ctx) for v in these)
        return free is None or _baseline() + weights <= (_SPARE if len(these) > 1 else 1) * free

    for reference in candidates:
        if together(reference):
            if reference is not exact:
                missing.append(f"f32 does not fit into memory: quality is held against {reference.name}")
            return reference, all(together(reference, variant) for variant in variants)
    missing.append(f"quality: {candidates[-1].name} does not fit into memory")
    return None, False


def _new_tokens(codec: Tokenizer, ctx: int, missing: list[str]) -> int:
    """How many tokens of text are written to each prompt: what the context has room for."""
    room = ctx - max(len(codec.encode(prompt)) for prompt in texts.PROMPTS)
    if room < _LEAST_TEXT:
        missing.append(f"texts: the prompts leave no room in a context of {ctx} tokens")
        return 0
    return min(texts.NEW_TOKENS, room)


def _baseline() -> int:
    """What a process with everything but a model holds, about: this one does."""
    return system.held_memory() or 150_000_000
