"""Operations: what a worker is asked for of the model that it holds. They take and give numbers and texts."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pronk
from pronk import checkpoint as checkpoints
from pronk import engines, loading, system, tokenizer
from pronk.checkpoint.containers import mapped
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.rotation import rotated
from pronk.llm import LLM
from pronk.measure import latency
from pronk.measure.worker import Held


class Loading(NamedTuple):
    """How a worker loads what it measures: options of pronk.load, and a seed where it is a rotated twin."""

    model: str
    engine: str
    options: Mapping[str, Any]
    prefix_cache: int | None = 0
    rotate: int | None = None


class Loaded(NamedTuple):
    llm: LLM
    about: dict[str, Any]  # what it became, and what the process held before it and after it


def load(how: Loading) -> LLM:
    options = {**how.options, "engine": how.engine, "prefix_cache": how.prefix_cache}
    if how.rotate is None:
        return pronk.load(how.model, **options)
    opened = checkpoints.open(hub.resolve(how.model, revision=options.pop("revision", None)))
    return pronk.load(rotated(opened, how.rotate), **options)


def loaded(held: Held, how: Loading, warm_up: tuple[list[list[int]], int] | None = None) -> Loaded:
    """The model that the worker holds, which it loads first where it holds none yet. `warm_up`: prompts, and how many
    tokens are then written after each.

    Before it the process has its libraries and the tokenizer, which are there whatever the weights are made. The
    tokenizer is let go again, and its memory used by the one that comes with the model.
    """
    if held.model is None:
        kept = _before_the_weights(how)
        baseline = system.held_memory()
        del kept
        llm = load(how)
        mapped.let_go()  # what was read of the file is no part of the model
        memory = {"load_s": llm.load_s, "baseline": baseline, "loaded_rss": system.held_memory()}
        held.model = Loaded(llm, {**memory, **_what(llm)})
        if warm_up:
            latency.one_round(llm, *warm_up)
    found: Loaded = held.model
    return found


def applied(held: Held, how: Loading, apply: Callable[..., Any], **asked: Any) -> Any:
    """`apply`, which can be imported, of the model; it is told of progress."""
    return apply(loaded(held, how).llm, **asked, progress=held.progress)


def one_round(
    held: Held, how: Loading, warm_up: tuple[list[list[int]], int], prompts: list[list[int]], new: int
) -> dict[str, Any]:
    """latency.one_round, what the model is, and the peaks of memory since the process began."""
    llm, about = loaded(held, how, warm_up)
    measured = latency.one_round(llm, prompts, new)
    on_device = llm.backend.device_memory
    return {**about, **measured, "peak_rss": system.peak_memory(), "peak_device": on_device and on_device.peak()}


def timed(
    llm: LLM,
    texts: list[list[list[int]]],
    new: int,
    seconds: float,
    before: list[list[int]] | None,
    called: Mapping[str, Any],
) -> dict[str, Any]:
    """A run for each of `texts`, which are prompts that go on side by side for `new` tokens each: its seconds, its
    rate, a digest of what each prompt went on with, and what all of it took at its peak.

    `before`: of each run, a text that is read first and not timed. As many runs as the `seconds` that they may take
    together allow, but one at least. `called`: with which options of LLM.generate.
    """
    on_device = llm.backend.device_memory
    taken: list[float] = []
    stats: list[Any] = []
    outputs: list[list[str]] = []
    llm.generate([1] * 8, max_new_tokens=2, ignore_eos=True)  # what is cold at first is not to be timed
    system.collect_memory()
    begins_anew = system.reset_peak_memory()
    held = on_device.held() if on_device else system.held_memory()
    if on_device:
        on_device.reset_peak()
    for number, prompts in enumerate(texts):
        if taken and sum(taken) + taken[-1] > seconds:
            break
        if before:
            llm.generate(before[number], max_new_tokens=1, ignore_eos=True)
        begun = time.perf_counter()
        made = llm.generate(prompts, max_new_tokens=new, ignore_eos=True, **called)
        taken.append(time.perf_counter() - begun)
        assert isinstance(made, list)
        stats.append(made[0].stats)
        outputs.append([hashlib.sha256(repr(one.tokens).encode()).hexdigest()[:16] for one in made])
    return {
        "seconds": taken,
        "decode_tok_s": [one.decode_tok_s for one in stats],
        "outputs": outputs,
        "drafted": sum(one.drafted_tokens for one in stats),
        "accepted": sum(one.accepted_tokens for one in stats),
        "cached": stats[-1].cached_tokens,
        "held": held,  # before the first run
        "peak_bytes": on_device.peak() if on_device else system.peak_memory() if begins_anew else None,
    }


def _before_the_weights(how: Loading) -> Any:
    engines.named(how.engine).prepare()
    if named := how.options.get("tokenizer"):
        source = loading.find_tokenizer(named)
    else:
        opened = checkpoints.open(hub.resolve(how.model, revision=how.options.get("revision"), progress=False))
        source = opened.tokenizer
    return tokenizer.load(source) if source else None


def _what(llm: LLM) -> dict[str, Any]:
    backend = llm.backend
    return {
        "engine": backend.engine,
        "device": backend.device,
        "dtype": backend.dtype,
        "kv_dtype": backend.kv_dtype,
        **backend.conditions(),
        "weights_bytes": backend.nbytes,
        "loaded_device": backend.device_memory and backend.device_memory.held(),
    }
