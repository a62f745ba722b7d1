"""llama.cpp through its C interface: `llama_decode` in a loop, and the likeliest token of the logits asked for."""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
import time
from typing import Any

import llama_cpp as c
import numpy as np
from numpy.typing import NDArray
from pipe import memory_mb, serve

UBATCH = 512
FILE_TYPES = {
    "F32": c.LLAMA_FTYPE_ALL_F32,
    "BF16": c.LLAMA_FTYPE_MOSTLY_BF16,
    "F16": c.LLAMA_FTYPE_MOSTLY_F16,
    "Q8_0": c.LLAMA_FTYPE_MOSTLY_Q8_0,
    "Q4_0": c.LLAMA_FTYPE_MOSTLY_Q4_0,
    "Q4_K_M": c.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "Q5_K_M": c.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "Q6_K": c.LLAMA_FTYPE_MOSTLY_Q6_K,
    "Q3_K_M": c.LLAMA_FTYPE_MOSTLY_Q3_K_M,
    "Q2_K": c.LLAMA_FTYPE_MOSTLY_Q2_K,
}


@c.llama_log_callback
def errors_only(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    if level == 4:
        sys.stderr.buffer.write(text)


@c.llama_log_callback
def nothing(level: int, text: bytes, user_data: ctypes.c_void_p) -> None: ...


class LlamaCpp:
    def __init__(self) -> None:
        c.llama_log_set(errors_only, ctypes.c_void_p(0))
        c.llama_backend_init()
        self.context: Any = None
        self.batch: Any = None

    def quantize(self, source: str, destination: str, dtype: str, threads: int) -> None:
        """llama.cpp's own quantizer, with its defaults."""
        options = c.llama_model_quantize_default_params()
        options.ftype, options.nthread = FILE_TYPES[dtype], threads
        if c.llama_model_quantize(source.encode(), destination.encode(), ctypes.byref(options)):
            raise RuntimeError(f"llama.cpp did not quantize {source} to {dtype}")

    def load(self, path: str, threads: int) -> dict[str, Any]:
        begun = time.perf_counter()
        self.threads = threads
        self.model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp did not load {path}")
        self.vocab_size = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        return {
            "name": f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}",
            "system": c.llama_print_system_info().decode(),
            "load_s": time.perf_counter() - begun,
            "memory_mb": memory_mb(),
        }

    def prepare(self, ctx: int, sequences: int, kv: str = "F16") -> None:
        """A context for `sequences` texts of `ctx` tokens each, keys and values in one of its types."""
        if self.context:
            c.llama_batch_free(self.batch)
            c.llama_free(self.context)
        options = c.llama_context_default_params()  # f16 KV, flash attention where it can
        options.n_ctx, options.n_seq_max = ctx * sequences, sequences
        options.n_batch = max(UBATCH, min(ctx, 2048))
        options.n_ubatch = UBATCH
        options.n_threads = options.n_threads_batch = self.threads
        options.type_k = options.type_v = getattr(c, f"GGML_TYPE_{kv}")
        if kv not in ("F16", "F32"):
            options.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED  # without it values cannot be quantized
        self.n_batch = options.n_batch
        self.context = c.llama_init_from_model(self.model, options)
        if not self.context:
            raise RuntimeError("llama.cpp made no context")
        self.batch = c.llama_batch_init(self.n_batch, 0, 1)

    def prefill(self, ids: list[int]) -> float:
        """Seconds until the first token is known."""
        self._forget()
        begun = time.perf_counter()
        self._read(ids)
        self._likeliest(-1)
        return time.perf_counter() - begun

    def check_last_only(self, ids: list[int]) -> None:
        """That a prompt's logits are computed for its last token alone: any other row must be refused."""
        self._forget()
        self._read(ids)
        c.llama_log_set(nothing, ctypes.c_void_p(0))
        refused = not c.llama_get_logits_ith(self.context, 0)
        c.llama_log_set(errors_only, ctypes.c_void_p(0))
        if not refused:
            raise RuntimeError("llama.cpp computed logits nobody asked for")

    def decode(self, ids: list[int], new: int) -> dict[str, Any]:
        """The seconds from the first token to the last, and the tokens."""
        self._forget()
        self._read(ids)
        tokens = [self._likeliest(-1)]
        first = time.perf_counter()
        for at in range(len(ids), len(ids) + new - 1):
            self._put(0, tokens[-1], at, 0, True)
            self._run(1)
            tokens.append(self._likeliest(-1))
        return {"seconds": time.perf_counter() - first, "tokens": tokens}

    def decode_batch(self, prompts: list[list[int]], new: int) -> float:
        """Seconds from the first tokens to the last, when every sequence has `new` of them."""
        taken = self.time_batch(prompts, new, cache=True)
        return taken["all_s"] - taken["first_s"]

    def time_batch(self, prompts: list[list[int]], new: int, cache: bool) -> dict[str, float]:
        """Seconds until every sequence has its first token, and until it has all `new` of them."""
        assert cache, "llama.cpp has no other way"
        self._forget()
        tokens = []
        begun = time.perf_counter()
        for sequence, ids in enumerate(prompts):
            self._read(ids, sequence)
            tokens.append(self._likeliest(-1))
        first = time.perf_counter()
        for step in range(new - 1):
            for sequence, ids in enumerate(prompts):
                self._put(sequence, tokens[sequence], len(ids) + step, sequence, True)
            self._run(len(prompts))
            tokens = [self._likeliest(row) for row in range(len(prompts))]
        return {"first_s": first - begun, "all_s": time.perf_counter() - begun}

    def logits(self, ids: list[int], rows: list[int], out: str) -> None:
        """Rows `rows[0]:rows[1]` of the logits, as a .npy file. The text must fit into one batch."""
        self._forget()
        wanted = range(*rows)
        for at, token in enumerate(ids):
            self._put(at, token, at, 0, at in wanted)
        self._run(len(ids))
        np.save(out, np.stack([self._logits(row) for row in wanted]))

    def logits_through_cache(self, ids: list[int], rows: list[int], out: str) -> None:
        """The same of a long text, read in pieces."""
        self.remember(ids[: rows[0]])
        found = []
        for begin in range(*rows, UBATCH):
            piece = ids[begin : min(begin + UBATCH, rows[1])]
            for at, token in enumerate(piece):
                self._put(at, token, begin + at, 0, True)
            self._run(len(piece))
            found.append(np.stack([self._logits(row) for row in range(len(piece))]))
        np.save(out, np.concatenate(found))

    def remember(self, ids: list[int]) -> None:
        self._forget()
        self.length = len(ids)
        self._read(ids)

    def decode_after(self, token: int, new: int) -> float:
        """Seconds for `new` tokens behind what is remembered, greedily, which are then forgotten."""
        begun = time.perf_counter()
        for at in range(self.length, self.length + new):
            self._put(0, token, at, 0, True)
            self._run(1)
            token = self._likeliest(-1)
        taken = time.perf_counter() - begun
        c.llama_memory_seq_rm(c.llama_get_memory(self.context), 0, self.length, -1)
        return taken

    def memory(self) -> dict[str, float]:
        return memory_mb()

    def _forget(self) -> None:
        c.llama_memory_clear(c.llama_get_memory(self.context), False)

    def _read(self, ids: list[int], sequence: int = 0) -> None:
        for begin in range(0, len(ids), self.n_batch):
            piece = ids[begin : begin + self.n_batch]
            for at, token in enumerate(piece):
                self._put(at, token, begin + at, sequence, begin + at == len(ids) - 1)
            self._run(len(piece))

    def _put(self, at: int, token: int, position: int, sequence: int, wants_logits: bool) -> None:
        batch = self.batch
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, wants_logits
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, sequence

    def _run(self, tokens: int) -> None:
        self.batch.n_tokens = tokens
        if code := c.llama_decode(self.context, self.batch):
            raise RuntimeError(f"llama_decode: {code}")

    def _logits(self, row: int) -> NDArray[np.float32]:
        return np.ctypeslib.as_array(c.llama_get_logits_ith(self.context, row), (self.vocab_size,))

    def _likeliest(self, row: int) -> int:
        return int(self._logits(row).argmax())


if __name__ == "__main__":
    serve(LlamaCpp())
