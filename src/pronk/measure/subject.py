"""Subject: what a worker does with the models that it holds. Plain JSON in, plain JSON out (see worker.py).

A worker holds one model; measuring techniques, which are of small differences, the reference beside it.
"""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pronk import system
from pronk.measure import latency

if TYPE_CHECKING:
    from pronk.checkpoint import Checkpoint
    from pronk.checkpoint.tensors import Progress
    from pronk.llm import LLM


class Subject:
    progress: Progress | None = None

    def __init__(self) -> None:
        self._models: dict[str, LLM] = {}

    def load(
        self,
        name: str,
        model: str,
        engine: str,
        options: dict[str, Any],
        prefix_cache: int | None = 0,
        rotate: int | None = None,
    ) -> dict[str, Any]:
        """Load `model` under `name`, or with `rotate` its rotated twin. Says what it became, and what the process held
        before it and after it.

        Before it the process has its libraries and the tokenizer, which are there whatever the weights are made. The
        tokenizer is let go again, and its memory used by the one that comes with the model.
        """
        import pronk
        from pronk import checkpoint
        from pronk.checkpoint.containers import mapped
        from pronk.checkpoint.hub import resolve as hub
        from pronk.checkpoint.rotation import rotated

        kept = _before_the_weights(model, engine, options)
        baseline = system.held_memory()
        del kept
        options = {**options, "engine": engine, "prefix_cache": prefix_cache}
        source: str | Checkpoint = model
        if rotate is not None:
            source = rotated(checkpoint.open(hub.resolve(model, revision=options.pop("revision", None))), rotate)
        llm = self._models[name] = pronk.load(source, **options, progress=self.progress)
        mapped.let_go()  # what was read of the file is no part of the model
        return {"load_s": llm.load_s, "baseline": baseline, "loaded_rss": system.held_memory(), **_what(llm)}

    def latency(self, name: str, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """latency.one_round, and the peaks of memory since the process began."""
        llm = self._models[name]
        measured = latency.one_round(llm, prompts, new)
        on_device = llm.backend.device_memory
        return {**measured, "peak_rss": system.peak_memory(), "peak_device": on_device and on_device.peak()}

    def divergences(
        self, reference: str, names: list[str], ids: list[int], ctx: int, count: int
    ) -> dict[str, dict[str, Any]]:
        from pronk.measure.divergence import divergences

        others = {name: self._models[name] for name in names}
        return divergences(self._models[reference], others, ids, ctx=ctx, count=count, progress=self.progress)

    def record(self, name: str, path: str, ids: list[int], ctx: int, count: int) -> None:
        """Keep what the model predicts in a file, for `divergence` of others from it."""
        from pronk.measure.replay import record

        record(self._models[name], Path(path), ids, ctx, count, self.progress)

    def divergence(self, name: str, path: str, ids: list[int], ctx: int, count: int) -> dict[str, Any]:
        from pronk.measure.replay import divergence_from

        return divergence_from(Path(path), self._models[name], ids, ctx, count, self.progress)

    def noise_floor(self, name: str, ids: list[int], ctx: int, count: int) -> dict[str, Any]:
        from pronk.measure.divergence import noise_floor

        return noise_floor(self._models[name], ids, ctx=ctx, count=count, progress=self.progress)

    def perplexity(self, name: str, ids: list[int], ctx: int, count: int) -> dict[str, Any]:
        from pronk.measure.perplexity import perplexity

        return perplexity(self._models[name], ids, ctx=ctx, count=count, progress=self.progress)

    def tasks(self, name: str, tasks: list[str]) -> dict[str, Any]:
        from pronk.measure.tasks import evaluate

        return evaluate(self._models[name], tasks, progress=self.progress)

    def texts(self, name: str, prompts: list[str], new_tokens: int, seed: int) -> dict[str, Any]:
        from pronk.measure.texts import write

        return write(self._models[name], prompts, new_tokens=new_tokens, seed=seed, progress=self.progress)

    def timed(
        self,
        name: str,
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
        llm, how = self._models[name], how or {}
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
    from pronk import checkpoint, engines, loading, tokenizer
    from pronk.checkpoint.hub import resolve as hub

    engines.named(engine).prepare()
    if named := options.get("tokenizer"):
        source = loading.find_tokenizer(named)
    else:
        source = checkpoint.open(hub.resolve(model, revision=options.get("revision"), progress=False)).tokenizer
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
