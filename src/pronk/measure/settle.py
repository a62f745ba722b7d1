"""Settle: a request made whole, and checked before any of it begins.

Everything that can be wrong with a request is found here, in the second or two that opening a checkpoint takes: a
scheme that there is not, a text shorter than a window, prompts beyond the context, a model too large for memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from pronk import checkpoint as checkpoints
from pronk import engines, loading, system
from pronk.checkpoint import grid
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.tensors import Checkpoint
from pronk.engines import Engine
from pronk.errors import BadRequest, NoTokenizer, PronkError
from pronk.formats.int8 import SCHEMES as INT8_SCHEMES
from pronk.measure import memory, tasks, texts
from pronk.measure.comparison import Comparison, Request, Variant
from pronk.measure.mixed import sixteen_bits
from pronk.measure.schema import LENGTHS
from pronk.measure.windows import LOGITS_BYTES, evaluation_text, windows
from pronk.tokenizer import Tokenizer

TO = {"cpu": ("llm-int8", "q8", "q4"), "torch": ("llm-int8", "int8")}  # what is compared where nothing is named
FLOATS = ("f32", "bf16", "f16")
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
    against = request.against or sixteen_bits(opened)
    engine = _engine(request, against)
    compares = not request.techniques or request.to is not None or bool(request.tasks)
    if request.tasks:
        tasks.check(request.tasks)
    names = tuple(dict.fromkeys((against, *((request.to or TO[engine]) if compares else ()))))
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
        variants.append(Variant(name, name == against, options, memory.predict(opened, engine, options), twin))
    codec = loading.tokenizer_of(opened, request.loading.get("tokenizer"))
    if codec is None:
        raise NoTokenizer(f"{opened.path} carries no tokenizer, and quality is measured on text; name one: --tokenizer")
    written = evaluation_text() if request.text is None else _read(request.text)
    ids = codec.encode(written)
    ctx = request.loading.get("ctx_size") or opened.config.max_position_embeddings
    window, count = _windows(request, ctx, ids)
    prefill, decode_tokens = _lengths(request, ctx, len(ids))
    needs = {v.name: v.predicted.total(_baseline(), prefill[-1] + decode_tokens) for v in variants}
    free = _free(engine, request)
    for name, need in needs.items():
        if free is not None and need > free:
            raise PronkError(
                f"{model} as {name} needs {need / 1e6:,.0f} MB of memory, and {free / 1e6:,.0f} MB are free; compare "
                "it in fewer bits (--to, --against), or a smaller model"
            )
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


def options_of(name: str, engine: Engine, loading: Mapping[str, Any]) -> dict[str, Any]:
    """What pronk.load is to be told for a variant. LLM.int8()'s own options go to it alone."""
    own = {key: value for key, value in loading.items() if key != "engine"}
    if name != "llm-int8":
        own = {key: value for key, value in own.items() if not key.startswith("int8_")}
    return {**own, ("dtype" if engine == "torch" and name in FLOATS else "quantize"): name}


def schemes(engine: Engine) -> tuple[str, ...]:
    if engine == "torch":
        return (*FLOATS, *INT8_SCHEMES)
    from pronk.cpu_engine.formats import Quantize

    return get_args(Quantize)


def _engine(request: Request, against: str) -> Engine:
    """One for all variants. A GPU is used where all of them can be run on it."""
    names = {against, *(request.to or ())}
    options = dict.fromkeys((*_OPTIONS, "quantize")) | dict(request.loading)
    asked = options.pop("engine", None)
    for name in names:
        known = [engine for engine in ("cpu", "torch") if name in schemes(engine)]
        if not known:
            every = dict.fromkeys((*schemes("cpu"), *schemes("torch")))
            raise BadRequest(f"{name!r} is no scheme; there are {', '.join(every)}")
        if asked and asked not in known:
            raise BadRequest(f"the {asked} engine has no {name}; it has {', '.join(schemes(asked))}")
        if name not in schemes("torch"):
            options["quantize"] = name
        elif name not in schemes("cpu"):
            options["quantize"] = name
            asked = asked or "torch"
    own = options["int8_threshold"] is not None or options["int8_outliers"] is not None
    if own and request.to is not None and "llm-int8" not in names:
        raise BadRequest("--int8-threshold and --int8-outliers are llm-int8's; name it with --to, or leave them out")
    return engines.choose(asked, {name: options[name] for name in _OPTIONS} | {"quantize": options["quantize"]})


_OPTIONS = ("int8_threshold", "int8_outliers", "kv_dtype", "device", "dtype", "attn")


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
    engine: Engine,
    request: Request,
    free: int | None,
    missing: list[str],
) -> tuple[Variant | None, bool]:
    """What quality is held against, and whether each variant fits beside it."""
    plain = {key: value for key, value in request.loading.items() if key not in ("kv_dtype", "dtype")}
    options = options_of(REFERENCE, engine, plain)
    exact = Variant(REFERENCE, False, options, memory.predict(opened, engine, options))
    candidates = [exact] + [variant for variant in variants if variant.original]
    ctx = min(WINDOW, opened.config.max_position_embeddings)

    def together(*these: Variant) -> bool:
        weights = sum(v.predicted.total(4 * LOGITS_BYTES, ctx) for v in these)
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


def _free(engine: Engine, request: Request) -> int | None:
    """Of the memory that weights go to; None where that is not known."""
    device = request.loading.get("device")
    if engine == "torch" and device != "cpu" and engines.has_gpu():
        from pronk.torch_engine import device_memory

        return device_memory.free(device)
    return system.free_memory()
