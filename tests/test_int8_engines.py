"""LLM.int8() on both engines: the same codes, outliers and sums, so the same logits but for the rounding of floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk import _native
from pronk.checkpoint.tensors import Checkpoint
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.backend import Backend
from pronk.engine.batch import Batch, Run
from pronk.formats.quantize import quantize
from pronk.formats.turn import turn as formats_turn
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.quantized import turn, weight_codes

TEXTS, LENGTH = 128, 6
# As for floats: about 24 roundings, each of one part in 2^24 of logits of 4, and ten times that.
TOLERANCE = 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5


def logits(engine: Backend) -> np.ndarray:
    """[texts, V x length]: of short texts, which do not see each other."""
    ids = [np.random.default_rng(n).integers(0, engine.config.vocab_size, LENGTH).tolist() for n in range(TEXTS)]
    return engine.forward(Batch.of([Run(text, logits="all") for text in ids]), None).reshape(TEXTS, -1)


def on_the_cpu(checkpoint: Checkpoint, quantize: str = "llm-int8", **rule: Any) -> CpuBackend:
    """With embedding and head in f32, as the torch engine has them; of themselves they are q8 here."""
    formats = {"": quantize, "model.embed_tokens": "f32"}
    if not checkpoint.config.tie_word_embeddings:
        formats["lm_head"] = "f32"
    return CpuBackend.from_checkpoint(checkpoint, quantize=formats, kv_dtype="f32", threads=1, **rule)


@pytest.mark.parametrize(
    "rule", [{}, {"int8_outliers": 0}, {"int8_threshold": 1.0}, {"int8_threshold": 0.0}, {"quantize": "int8"}]
)
@pytest.mark.parametrize("name", ["gqa", "tied", "biases", "odd", "llama3"])
def test_both_engines_give_the_same_logits(name: str, rule: dict[str, Any]) -> None:
    """Where an activation lies so near a tie that floats decide its code, a text is one rounding of 8 bits off: as
    wrong as 8 bits are, and no more. Such texts are few."""
    config = tiny_config(**CONFIGS[name])
    checkpoint = in_memory(config, random_weights(config))
    other = logits(TorchBackend.from_checkpoint(checkpoint, device="cpu", **{"quantize": "llm-int8", **rule}))
    off = np.abs(logits(on_the_cpu(checkpoint, **rule)) - other).max(1)
    of_8_bits = np.abs(logits(TorchBackend.from_checkpoint(checkpoint, device="cpu")) - other).max()
    assert (off < 2 * TOLERANCE).mean() >= 0.75, off
    assert off.max() < of_8_bits


@pytest.mark.parametrize("columns", [1, 33, 64, 96, 576, 1536])
def test_both_engines_turn_rows_alike(columns: int) -> None:
    """Weights, codes and what is turned back, to the bit."""
    x = np.random.default_rng(columns).standard_t(4, (70, columns)).astype(np.float32)
    matrix, ours = _native.Matrix("int8", *x.shape), np.empty_like(x)
    assert matrix.pack(x.view(np.uint8), "F32")
    matrix.unpack(ours)
    theirs = weight_codes(torch.from_numpy(x), "int8")
    assert np.array_equal(turn(torch.from_numpy(x)).numpy(), formats_turn(x))
    assert np.array_equal(theirs.q.numpy(), quantize(x, "int8").q)
    assert np.array_equal(turn(theirs.scale * theirs.q.float()).numpy(), ours)
    assert np.array_equal(quantize(x, "int8").dequantize(), ours)


def test_another_rule_would_be_noticed() -> None:
    config = tiny_config()
    checkpoint = in_memory(config, random_weights(config))
    ours = logits(on_the_cpu(checkpoint))
    for wrong in ({"quantize": "int8"}, {"quantize": "llm-int8", "int8_outliers": 7}):
        off = np.abs(logits(TorchBackend.from_checkpoint(checkpoint, device="cpu", **wrong)) - ours).max(1)
        assert (off > 100 * TOLERANCE).all()
