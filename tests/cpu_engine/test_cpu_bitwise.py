"""Bit for bit: a text's logits do not depend on chunks, company, blocks, the cache or the number of threads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config

from pronk import _native
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run

CONFIG = tiny_config(vocab_size=80, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024)
FORMATS = ("f32", "f16", "bf16", "int8", "llm-int8", "q8", "q4", "q4_0")
# What only files have (parts of 16 and of 32, with minima and without, wide codes), in sizes of whole blocks of 256.
KEPT = {"q6_k": "Q6_K", "q5_k": "Q5_K", "q2_k": "Q2_K", "q5_0": "Q5_0", "iq4_xs": "IQ4_XS"}
WIDE = replace(CONFIG, hidden_size=256, intermediate_size=256, num_attention_heads=4, head_dim=64)
KV = ("f32", "f16", "bf16", "int8", "q4")
BLOCK = 64
LONGEST = 290  # more than a span of 256 keys, and more than the 264 tokens of a block


def checkpoint(format: str) -> Checkpoint:
    if format in KEPT:
        return in_blocks(in_memory(WIDE, random_weights(WIDE)), KEPT[format])
    plain = in_memory(CONFIG, random_weights(CONFIG))
    return plain if format != "q4_0" else in_q4_0(plain)


def in_q4_0(plain: Checkpoint) -> Checkpoint:
    """Nothing but a file's own blocks becomes q4_0."""
    tensors = dict(plain.tensors)
    for name, tensor in plain.tensors.items():
        if len(tensor.shape) == 2 and tensor.shape[1] % 32 == 0:
            blocks = quants.quantize(tensor.read(), GGMLQuantizationType.Q4_0)
            tensors[name] = LazyTensor(
                name, tensor.shape, "Q4_0", blocks.nbytes,
                lambda blocks=blocks: gguf_blocks.decode("Q4_0", blocks), lambda blocks=blocks: blocks,
            )  # fmt: skip
    return Checkpoint(plain.path, "memory", CONFIG, tensors)


def in_blocks(plain: Checkpoint, stored: str) -> Checkpoint:
    """Random codes, of weights that are as large as they were."""
    tensors = dict(plain.tensors)
    for seed, (name, tensor) in enumerate(plain.tensors.items()):
        if len(tensor.shape) == 2:
            kind, rng = gguf_blocks.BLOCK_TYPES[stored], np.random.default_rng(seed)
            blocks = rng.integers(0, 256, (tensor.shape[0] * tensor.shape[1] // kind.elements, kind.nbytes), np.uint8)
            for offset in (offset for offset, width in kind.words if width == 2 and offset not in kind.whole):
                blocks[:, offset : offset + 2] = np.array([2.0**-8], np.float16).view(np.uint8)
            size = np.abs(gguf_blocks.decode(stored, blocks)).mean() * tensor.shape[1] ** 0.5
            for offset in (offset for offset, width in kind.words if width == 2 and offset not in kind.whole):
                blocks[:, offset : offset + 2] = np.array([2.0**-8 / size], np.float16).view(np.uint8)
            rows = blocks.reshape(tensor.shape[0], -1)
            tensors[name] = LazyTensor(
                name, tensor.shape, stored, rows.nbytes,
                lambda rows=rows: gguf_blocks.decode(stored, rows), lambda rows=rows: rows,
            )  # fmt: skip
    return Checkpoint(plain.path, "memory", plain.config, tensors)


@cache
def backend(format: str, kv: str, isa: str, threads: int) -> CpuBackend:
    quantize = "auto" if format == "q4_0" or format in KEPT else format
    return CpuBackend.from_checkpoint(checkpoint(format), quantize=quantize, kv_dtype=kv, isa=isa, threads=threads)


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


def free(engine: CpuBackend, text: list[int]) -> np.ndarray:
    return engine.forward(Batch.of([Run(text, logits="all")]), None)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kv_dtype", KV)
@pytest.mark.parametrize("format", [*FORMATS, *KEPT])
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_any_chunks_in_any_company_in_any_blocks(format: str, kv_dtype: str, isa: str, data: st.DataObject) -> None:
    one, two = (backend(format, kv_dtype, isa, threads) for threads in (1, 2))
    lengths = data.draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=4), label="lengths")
    texts = [ids(length, seed) for seed, length in enumerate(lengths)]
    need = [-(-length // BLOCK) for length in lengths]
    order = data.draw(st.permutations(range(sum(need))), label="blocks")
    tables = [order[sum(need[:n]) : sum(need[: n + 1])] for n in range(len(texts))]
    kv = two.new_kv(sum(need), BLOCK)
    # What was there before must not matter.
    two.forward(Batch.of([Run(ids(sum(need) * BLOCK, 99), 0, range(sum(need)), "none")]), kv)
    done, rows = [0] * len(texts), [[] for _ in texts]
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        steps = [(n, data.draw(st.integers(1, LONGEST))) for n in range(len(texts)) if done[n] < lengths[n]]
        runs = [Run(texts[n][done[n] : done[n] + s], done[n], tables[n], "all") for n, s in steps]
        logits = two.forward(Batch.of(runs), kv)
        for (n, _), run in zip(steps, runs, strict=True):
            rows[n].append(logits[: len(run.token_ids)])
            logits = logits[len(run.token_ids) :]
            done[n] += len(run.token_ids)
    for n, text in enumerate(texts):
        assert np.array_equal(np.concatenate(rows[n]), free(one, text))


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("format", [*FORMATS, *KEPT])
def test_token_by_token_equals_one_piece(format: str, isa: str) -> None:
    """As decoding has it: a text of one token a pass, and sixteen of them at once."""
    engine, text = backend(format, "bf16", isa, 2), ids(70, 0)
    expected = free(backend(format, "bf16", isa, 1), text)
    kv = engine.new_kv(2 * 17, BLOCK)
    for at, token in enumerate(text):
        alone = engine.forward(Batch.of([Run([token], at, (32, 33))]), kv)
        together = engine.forward(Batch.of([Run([token], at, (n, 16 + n)) for n in range(16)]), kv)
        assert np.array_equal(alone[0], expected[at])
        assert (together == expected[at]).all()


def test_a_shared_prefix_equals_a_computed_one() -> None:
    """Whole blocks named by two texts, and one copied before it is written to."""
    engine, text = backend("q8", "int8", _native.isa(), 2), ids(150, 0)
    a, b = [*text, 1, 2, 3], [*text, 7, 8]
    kv = engine.new_kv(4, BLOCK)
    engine.forward(Batch.of([Run(text, 0, (2, 0, 1), "none")]), kv)
    kv.resize(9)
    kv.copy([(1, 5)])
    logits = engine.forward(Batch.of([Run(a[150:], 150, (2, 0, 1), "all"), Run(b[150:], 150, (2, 0, 5), "all")]), kv)
    assert np.array_equal(logits, np.concatenate([free(engine, a)[150:], free(engine, b)[150:]]))


@pytest.mark.parametrize("isa", _native.isas())
def test_another_order_of_the_same_sums_is_seen(isa: str) -> None:
    """The hidden size's channels in another order: the same model on paper, and no longer the same bits."""
    order = np.random.default_rng(0).permutation(CONFIG.hidden_size)
    weights = random_weights(CONFIG)
    turned = {}
    for name, array in weights.items():
        if array.ndim == 1 or name.endswith(("o_proj.weight", "down_proj.weight")):
            turned[name] = array[order]  # what is written to the residual stream
        else:
            turned[name] = array[:, order]  # what is read from it
    text = ids(100, 0)
    a, b = (free(CpuBackend.from_checkpoint(in_memory(CONFIG, w), isa=isa, threads=1), text) for w in (weights, turned))
    assert np.abs(a - b).max() < 1e-4
    assert not np.array_equal(a, b)


def test_sixteen_bits_as_stored_equal_sixteen_bits_asked_for() -> None:
    for dtype, format in ((ml_dtypes.bfloat16, "bf16"), (np.float16, "f16")):
        rounded = {name: w.astype(dtype) for name, w in random_weights(CONFIG).items()}
        stored = CpuBackend.from_checkpoint(in_memory(CONFIG, rounded), threads=1)
        wide = {name: w.astype(np.float32) for name, w in rounded.items()}
        asked = CpuBackend.from_checkpoint(in_memory(CONFIG, wide), quantize=format, threads=2)
        assert stored.dtype == asked.dtype == format
        assert np.array_equal(free(stored, ids(40, 0)), free(asked, ids(40, 0)))
