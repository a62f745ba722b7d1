"""pronk, measured from outside: `LLM.stream` and `LLM.generate`, sampling, scheduler and text included."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from pipe import memory_mb, serve

import pronk
from pronk import checkpoint, tokenizer
from pronk.engine.batch import Batch, Run

PIECE = 512  # tokens of a long text that are read at once


class Pronk:
    def load(
        self, path: str, engine: str, quantize: str, threads: int, adapter: str | None = None, merge: bool = False,
        kv_dtype: str | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        # The same prompt is run again and again: none of it may be known from the time before.
        options: dict[str, Any] = {"engine": engine, "threads": threads, "prefix_cache": 0, "quantize": quantize}
        if engine == "torch":  # it has no block formats: they and f16 run in f32
            options |= {"device": "cpu", "quantize": quantize if quantize in ("bf16", "int8", "llm-int8") else "f32"}
        if kv_dtype:
            options |= {"kv_dtype": kv_dtype}
        if adapter:
            options |= {"adapter": adapter, "merge_adapter": merge}
        self.llm = pronk.load(path, **options)
        config = self.llm.config
        return {
            "name": f"pronk {pronk.__version__}",
            "options": options,
            "load_s": self.llm.load_s,
            "vocab_size": config.vocab_size,
            "kv_elements_a_token": 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim,
            "memory_mb": memory_mb(),
            "weights_mb": self.llm.backend.nbytes / 1e6,
        }

    def answer(self, question: str) -> str:
        """Greedily, through the chat template."""
        answer: str = self.llm.generate(question, chat=True, max_new_tokens=24).text
        return answer

    def prepare(self, ctx: int, sequences: int) -> None:
        """Nothing: every call makes the KV cache it needs, and that is part of what is timed."""

    def prefill(self, ids: list[int]) -> float:
        """Seconds from the call to the first token."""
        begun = time.perf_counter()
        for _ in self.llm.stream(ids, max_new_tokens=1, ignore_eos=True):
            return time.perf_counter() - begun
        raise RuntimeError("no token came")

    def decode(self, ids: list[int], new: int) -> dict[str, Any]:
        """The seconds from the first token to the last, and the tokens."""
        first, last, tokens = 0.0, 0.0, []
        for chunk in self.llm.stream(ids, max_new_tokens=new, ignore_eos=True):
            last = time.perf_counter()
            first = first or last
            tokens.append(chunk.token)
        assert len(tokens) == new
        return {"seconds": last - first, "tokens": tokens}

    def decode_batch(self, prompts: list[list[int]], new: int) -> float:
        """Seconds from the first sequence's first token to the last one's last, when all have `new` tokens."""
        done = self.llm.generate(prompts, max_new_tokens=new, ignore_eos=True)
        assert all(len(one.tokens) == new for one in done)
        stats = [one.stats for one in done]
        ends = [s.ttft_s + (s.new_tokens - 1) / s.decode_tok_s for s in stats]
        return max(ends) - min(s.ttft_s for s in stats)

    def time_batch(self, prompts: list[list[int]], new: int, cache: bool) -> dict[str, float]:
        """Seconds until every sequence has its first token, and until it has all `new` of them, from the call on."""
        done = self.llm.generate(prompts, max_new_tokens=new, ignore_eos=True, cache=cache)
        assert all(len(one.tokens) == new for one in done)
        stats = [one.stats for one in done]
        ends = [s.ttft_s + (s.new_tokens - 1) / s.decode_tok_s if new > 1 else s.ttft_s for s in stats]
        return {"first_s": max(s.ttft_s for s in stats), "all_s": max(ends)}

    def logits(self, ids: list[int], rows: list[int], out: str) -> None:
        """Rows `rows[0]:rows[1]` of the logits, as a .npy file."""
        np.save(out, self.llm.logits(ids)[slice(*rows)])

    def logits_through_cache(self, ids: list[int], rows: list[int], out: str) -> None:
        """The same of a long text, read in pieces, of which only those with such rows have logits."""
        self.remember(ids[: rows[0]])
        found = []
        for begin in range(*rows, PIECE):
            run = Run(ids[begin : min(begin + PIECE, rows[1])], begin, self.blocks, "all")
            found.append(self.llm.backend.forward(Batch.of([run]), self.kv))
        np.save(out, np.concatenate(found))

    def remember(self, ids: list[int], more: int = 2048) -> None:
        """Reads a text into a cache that has room for so many more tokens; what was in it is forgotten."""
        backend = self.llm.backend
        self.length, self.blocks = len(ids), range(-(-(len(ids) + more) // 64))
        self.kv = backend.new_kv(len(self.blocks), 64)
        for begin in range(0, len(ids), PIECE):
            backend.forward(Batch.of([Run(ids[begin : begin + PIECE], begin, self.blocks, "none")]), self.kv)

    def decode_after(self, token: int, new: int) -> float:
        """Seconds for `new` tokens behind what is remembered, greedily, which are then forgotten."""
        begun = time.perf_counter()
        for at in range(self.length, self.length + new):
            run = Run([token], at, self.blocks, "last")
            token = int(self.llm.backend.forward(Batch.of([run]), self.kv)[0].argmax())
        return time.perf_counter() - begun

    def pass_after(self, ids: list[int]) -> float:
        """Seconds for one pass of these tokens behind what is remembered, all of which want logits."""
        batch = Batch.of([Run(ids, self.length, self.blocks, "all")])
        begun = time.perf_counter()
        self.llm.backend.forward(batch, self.kv)
        return time.perf_counter() - begun

    def memory(self) -> dict[str, float]:
        return memory_mb()

    def encode(self, path: str, text: str) -> list[int]:
        """The tokens of a text; needs no loaded model."""
        source = checkpoint.open(path).tokenizer
        assert source, f"{path} has no tokenizer"
        return tokenizer.load(source).encode(text, bos=False)

    def stored_bytes(self, path: str) -> dict[str, int]:
        """Of a file, without loading it: what one decoding step must read of it, and how many weights that is."""
        opened = checkpoint.open(path)
        tensors = dict(opened.tensors)
        if not opened.config.tie_word_embeddings:
            del tensors["model.embed_tokens.weight"]  # one row of it
        return {
            "read_bytes": sum(t.nbytes for t in tensors.values()),
            "weights": sum(math.prod(t.shape) for t in tensors.values()),
            "rows": sum(t.shape[0] for t in tensors.values() if len(t.shape) == 2),
        }


if __name__ == "__main__":
    serve(Pronk())
