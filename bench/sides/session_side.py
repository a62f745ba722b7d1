"""pronk's Session without HTTP, as `pronk serve` makes it: what a server's texts cost where nobody serves them."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from pipe import memory_mb, serve

import pronk
from pronk.engine.params import SamplingParams
from pronk.session import Session


class InProcess:
    def load(self, path: str, quantize: str, threads: int, max_sequences: int, kv_tokens: int) -> dict[str, Any]:
        self.llm = pronk.load(path, quantize=quantize, threads=threads)
        self.session = Session(
            self.llm.backend,
            self.llm.tokenizer,
            eos_ids=self.llm.eos_ids,
            max_sequences=max_sequences,
            max_kv_tokens=kv_tokens,
            prefix_cache=min(kv_tokens, 4 * self.llm.ctx_size),
        )
        return {"name": f"pronk {pronk.__version__}", "vocab_size": self.llm.config.vocab_size}

    def run(self, prompts: list[list[int]], new: int, at_once: int, sampling: dict[str, Any]) -> dict[str, float]:
        """Seconds for all, `at_once` under way, and for the first token of each that came first."""
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, **sampling)
        left, under_way, begun = deque(prompts), 0, time.perf_counter()
        first = 0.0
        while left or self.session.has_work:
            while left and under_way < at_once:
                self.session.submit(left.popleft(), params)
                under_way += 1
            for _, chunk in self.session.step():
                first = first or time.perf_counter() - begun
                under_way -= chunk.finish_reason is not None
        return {"seconds": time.perf_counter() - begun, "first_s": first}

    def stream(self, ids: list[int], new: int, sampling: dict[str, Any]) -> list[float]:
        """Of `LLM.stream`: when each piece came, from the call on."""
        begun, times = time.perf_counter(), []
        for _ in self.llm.stream(ids, max_new_tokens=new, ignore_eos=True, **sampling):
            times.append(time.perf_counter() - begun)
        return times

    def memory(self) -> dict[str, float]:
        return memory_mb()


if __name__ == "__main__":
    serve(InProcess())
