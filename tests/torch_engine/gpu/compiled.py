"""Compiles the kernels of passes for a GPU that need not be there: `python compiled.py FORMAT`. Nothing is computed.

Triton's interpreter runs much that its compiler refuses. Prints the names of the kernels, each once.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from tiny import in_memory, random_weights, tiny_config
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from pronk.engine.batch import Batch, Run
from pronk.formats import FLOATS
from pronk.torch_engine import backend as backends
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.gpu import chain
from pronk.torch_engine.gpu.likeliest import likeliest
from pronk.torch_engine.gpu.paged import PagedBatch
from pronk.torch_engine.gpu.step import Step

HOPPER = GPUTarget("cuda", 90, 32)
CPU = torch.device("cpu")


class Absent:
    """A driver of a GPU that kernels are compiled for, and that runs none."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def main(format: str) -> None:
    driver.set_active(Absent())
    run, names = JITFunction.run, set()

    def compile(self: JITFunction, *given: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        names.add(self.fn.__name__)
        return run(self, *given, grid=grid, warmup=True, **options)

    JITFunction.run = compile
    chain._chained = lambda device: {"CHAINED": True, "launch_pdl": True}
    invariant, format = format.endswith("+"), format.rstrip("+")
    config = tiny_config(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=4,
        head_dim=64, max_position_embeddings=1024, vocab_size=512,
    )  # fmt: skip
    backends.pack = lambda model: None  # for CPUs
    backend = TorchBackend.from_checkpoint(
        in_memory(config, random_weights(config)), device="cpu", quantize=format,
        compute_dtype=None if format in FLOATS else "bf16",
    )  # fmt: skip
    step = Step(backend.model, invariant=invariant)
    for texts, tokens in ((1, 1), (5, 1), (40, 1), (1, 100), (1, 600)):
        kv = backend.new_kv(texts * 10, 64)
        runs = [Run([7] * tokens, 0, range(10 * n, 10 * n + 10)) for n in range(texts)]
        batch = PagedBatch.of(Batch.of(runs), 64, 2, CPU, invariant=invariant)
        likeliest(step(backend.model, batch, kv))
    # A long text, whose keys are split.
    batch = PagedBatch.of(Batch.of([Run([7], 600, range(10))]), 64, 2, CPU, invariant=invariant)
    step(backend.model, batch, backend.new_kv(10, 64))
    print(*sorted(names))


if __name__ == "__main__":
    main(sys.argv[1])
