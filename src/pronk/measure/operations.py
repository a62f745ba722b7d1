"""Operations: what a worker does with the models that it holds; all that they take and give is numbers and texts.

A worker holds one model; measuring techniques, which are of small differences, the reference beside it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import pronk
from pronk import checkpoint as checkpoints
from pronk import engines, loading, system, tokenizer
from pronk.checkpoint import Checkpoint
from pronk.checkpoint.containers import mapped
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.rotation import rotated
from pronk.checkpoint.tensors import Progress
from pronk.llm import LLM
from pronk.measure import latency
from pronk.measure.divergence import divergence


class Operations:
    """`name`: of one of the models; all that is done is done with "own" unless another is named."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._models: dict[str, LLM] = {}
        self._loaded: dict[str, dict[str, Any]] = {}

    def load(
        self,
        model: str,
        engine: str,
        options: dict[str, Any],
        name: str = "own",
        prefix_cache: int | None = 0,
        rotate: int | None = None,
        warm_up: tuple[list[list[int]], int] | None = None,
    ) -> dict[str, Any]:
        """Load `model` under `name`, or with `rotate` its rotated twin, unless it is loaded. Says what it became, and
        what the process held before it and after it. `warm_up`: prompts, and how many tokens are written after each.

        Before it the process has its libraries and the tokenizer, which are there whatever the weights are made. The
        tokenizer is let go again, and its memory used by the one that comes with the model.
        """
        if name in self._loaded:
            return self._loaded[name]
        kept = _before_the_weights(model, engine, options)
        baseline = system.held_memory()
        del kept
        options = {**options, "engine": engine, "prefix_cache": prefix_cache}
        source: str | Checkpoint = model
        if rotate is not None:
            source = rotated(checkpoints.open(hub.resolve(model, revision=options.pop("revision", None))), rotate)
        llm = self._models[name] = pronk.load(source, **options, progress=self._progress)
        mapped.let_go()  # what was read of the file is no part of the model
        held = {"load_s": llm.load_s, "baseline": baseline, "loaded_rss": system.held_memory()}
        self._loaded[name] = {**held, **_what(llm)}
        if warm_up:
            latency.one_round(llm, *warm_up)
        return self._loaded[name]

    def latency(self, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """latency.one_round, and the peaks of memory since the process began."""
        llm = self._models["own"]
        measured = latency.one_round(llm, prompts, new)
        on_device = llm.backend.device_memory
        return {**measured, "peak_rss": system.peak_memory(), "peak_device": on_device and on_device.peak()}

    def apply(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """`function`, which can be imported, of the model; it is told of progress."""
        return function(self._models["own"], **arguments, progress=self._progress)

    def divergence(self, reference: str, **text: Any) -> dict[str, Any]:
        return divergence(self._models[reference], self._models["own"], **text, progress=self._progress)

    def timed(
        self,
        texts: list[list[list[int]]],
        new: int,
        seconds: float,
        before: list[list[int]] | None = None,
        how: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """A run for each of `texts`, which are prompts that go on side by side for `new` tokens each: its seconds, its
        rate, a digest of what each prompt went on with, and what all of it took at its peak.

        `before`: of each run, a text that is read first and not timed. As many runs as the `seconds` that they may take
        together allow, but one at least.
        """
        llm, how = self._models["own"], how or {}
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
            made = llm.generate(prompts, max_new_tokens=new, ignore_eos=True, **how)
            taken.append(time.perf_counter() - begun)
            assert isinstance(made, list)
            stats.append(made[0].stats)
            outputs.append([hashlib.sha256(repr(one.tokens).encode()).hexdigest()[:16] for one in made])
        return {
            "seconds": taken,
            "ttft_s": [one.ttft_s for one in stats],
            "decode_tok_s": [one.decode_tok_s for one in stats],
            "outputs": outputs,
            "drafted": sum(one.drafted_tokens for one in stats),
            "accepted": sum(one.accepted_tokens for one in stats),
            "cached": stats[-1].cached_tokens,
            "held": held,  # before the first run
            "peak_bytes": on_device.peak() if on_device else system.peak_memory() if begins_anew else None,
        }


def _before_the_weights(model: str, engine: str, options: dict[str, Any]) -> Any:
    engines.named(engine).prepare()
    if named := options.get("tokenizer"):
        source = loading.find_tokenizer(named)
    else:
        source = checkpoints.open(hub.resolve(model, revision=options.get("revision"), progress=False)).tokenizer
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
