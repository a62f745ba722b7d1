"""LLM.int8() on the CPU engine: against its formula in numpy, against int8, and packed from rows as they are stored."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config

from pronk import _native
from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.cpu_engine.backend import CpuBackend
from pronk.cpu_engine.plan import plan
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest
from pronk.formats.int8 import Outliers, activation_codes, int8_linear, weight_codes
from pronk.formats.quantize import quantize

EPS = 2.0**-24
CONFIG = tiny_config(vocab_size=80, num_attention_heads=6, num_key_value_heads=2)
IDS = np.random.default_rng(1).integers(0, 80, 60).tolist()
each_isa = pytest.mark.parametrize("isa", _native.isas())
rules = st.tuples(st.sampled_from([0.0, 0.7, 2.0, 6.0, math.inf]), st.sampled_from([0, 1, 8, 15, 16, 100]))


def product(x: np.ndarray, w: np.ndarray, threshold: float, outliers: int, isa: str) -> np.ndarray:
    matrix = _native.Matrix("llm-int8", *w.shape)
    assert matrix.pack(w.view(np.uint8), "F32")
    out = np.empty((len(x), len(w)), np.float32)
    _native.matmul(matrix, x, out, isa=isa, int8_threshold=threshold, int8_outliers=outliers)
    return out


def bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """Each number of x meets at most 255 steps of its row in float32, and is summed up with K others."""
    steps = np.abs(w).max(-1) / 127 * 255
    return (x.shape[1] + 8) * EPS * np.abs(x).sum(-1, keepdims=True) * steps


@each_isa
@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 150), cols=st.integers(1, 300), tokens=st.integers(1, 15), rule=rules, seed=st.integers(0, 9)
)
def test_products_are_those_of_the_formula(
    rows: int, cols: int, tokens: int, rule: tuple[float, int], seed: int, isa: str
) -> None:
    rng = np.random.default_rng(seed)
    w = rng.normal(size=(rows, cols)).astype(np.float32)
    x = (rng.normal(size=(tokens, cols)) * np.where(rng.random(cols) < 0.05, 15, 1)).astype(np.float32)
    expected = int8_linear(x, w, "llm-int8", *rule)
    assert (np.abs(product(x, w, *rule, isa) - expected) <= bound(x, w)).all()


@each_isa
def test_the_check_can_fail(isa: str) -> None:
    """A part left out, a part not taken out, and a neighbouring column are far outside of the bound."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(70, 96)).astype(np.float32), rng.normal(size=(3, 96)).astype(np.float32)
    y, limit = product(x, w, 6.0, 8, isa), bound(x, w)
    apart = Outliers(6.0, 8).find(x)
    rest, codes = (
        activation_codes(np.where(apart, np.float32(0), x), "llm-int8").dequantize(),
        weight_codes(w, "llm-int8"),
    )
    weights = codes.dequantize()
    only_rest, both = rest @ weights.T, (rest + np.where(apart, x, 0)) @ weights.T
    assert (np.abs(y - both) <= 2 * limit).all()
    assert (np.abs(y - only_rest) > 100 * limit).any()
    assert (np.abs(y - activation_codes(x, "llm-int8").dequantize() @ weights.T) > 3 * limit).any()
    assert (np.abs(y - (rest + np.where(apart, x, 0)) @ np.roll(weights, 1, axis=1).T) > 100 * limit).any()


@each_isa
def test_rows_that_share_a_pass_do_not_meet(isa: str) -> None:
    """Where the paper's columns are taken out of all tokens, one token's outliers change its neighbours'."""
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(130, 95)).astype(np.float32), rng.normal(size=(40, 95)).astype(np.float32)
    x[3] *= 100
    whole = product(x, w, 6.0, 0, isa)
    for first, count in ((0, 1), (3, 2), (7, 5), (11, 6), (20, 13)):
        assert np.array_equal(product(x[first : first + count], w, 6.0, 0, isa), whole[first : first + count])


def backend(checkpoint: Checkpoint | None = None, **options: object) -> CpuBackend:
    checkpoint = checkpoint or in_memory(CONFIG, random_weights(CONFIG))
    return CpuBackend.from_checkpoint(checkpoint, threads=1, **options)


def logits(engine: CpuBackend) -> np.ndarray:
    return engine.forward(Batch.of([Run(IDS, logits="all")]), None)


def mean_divergence(engine: CpuBackend, reference: np.ndarray) -> float:
    p, q = (z - np.logaddexp.reduce(z, axis=-1, keepdims=True) for z in (reference.astype(np.float64), logits(engine)))
    return float((np.exp(p) * (p - q)).sum(-1).mean())


def test_without_outliers_it_is_int8_that_is_not_turned() -> None:
    """To the bit, of the same stored codes."""
    stored = stored_as("INT8")
    without = backend(stored, quantize="llm-int8", int8_threshold=math.inf, int8_outliers=0)
    assert without.dtype == "llm-int8"
    assert np.array_equal(logits(without), logits(backend(stored, quantize="int8")))
    assert not np.array_equal(logits(without), logits(backend(stored, quantize="llm-int8")))
    assert not np.array_equal(logits(without), logits(backend(quantize="int8")))


def test_it_diverges_less_than_int8() -> None:
    reference = logits(backend(quantize="f32"))
    llm_int8 = mean_divergence(backend(quantize="llm-int8"), reference)
    int8 = mean_divergence(backend(quantize="llm-int8", int8_threshold=math.inf, int8_outliers=0), reference)
    everything = mean_divergence(backend(quantize="llm-int8", int8_threshold=0.0), reference)
    assert everything <= llm_int8 < int8


def test_the_threshold_is_the_checkpoints_where_none_is_given() -> None:
    stored = replace(in_memory(CONFIG, random_weights(CONFIG)), int8_threshold=0.5)
    found = logits(backend(stored, quantize="llm-int8", int8_outliers=0))
    assert np.array_equal(found, logits(backend(quantize="llm-int8", int8_threshold=0.5, int8_outliers=0)))
    assert not np.array_equal(found, logits(backend(quantize="llm-int8", int8_outliers=0)))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"quantize": "int8", "int8_threshold": 6.0}, r"int8_threshold=6.0 is for llm-int8, and nothing is packed so"),
        ({"int8_outliers": 0}, r"int8_outliers=0 is for llm-int8"),
        ({"quantize": "llm-int8", "int8_threshold": math.nan}, "int8_threshold must be .*, not nan"),
        ({"quantize": "llm-int8", "int8_threshold": -1}, "int8_threshold must be .*, not -1"),
        ({"quantize": "llm-int8", "int8_outliers": -1}, "int8_outliers must be .*, not -1"),
        ({"quantize": "llm-int8", "int8_outliers": 2.0}, "int8_outliers must be .*, not 2.0"),
    ],
)
def test_what_says_nothing_is_refused(options: dict[str, object], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        backend(**options)


def stored_as(dtype: str, spoil: float | None = None) -> Checkpoint:
    """Matrices of layers as rows of int8, never to be read as floats; embedding and head as they were."""
    plain = in_memory(CONFIG, random_weights(CONFIG))
    tensors = dict(plain.tensors)
    for name, tensor in plain.tensors.items():
        if len(tensor.shape) == 2 and "layers" in name:
            codes = quantize(tensor.read(), "int8" if dtype == "TURNED_INT8" else "llm-int8")
            scale = codes.scale.copy()
            if spoil is not None:
                scale[-1] = spoil
            blocks = int8_rows.join(scale, codes.q)
            tensors[name] = LazyTensor(name, tensor.shape, dtype, blocks.nbytes, codes.dequantize, lambda b=blocks: b)
    return replace(plain, tensors=tensors)


@pytest.mark.parametrize(("dtype", "format"), [("INT8", None), ("TURNED_INT8", "int8"), ("LLM_INT8", "llm-int8")])
def test_stored_rows_are_packed_as_they_are(dtype: str, format: str | None) -> None:
    def never() -> np.ndarray:
        raise AssertionError("made floats of")

    stored = stored_as(dtype)
    sealed = {n: replace(t, read=never) if t.read_blocks else t for n, t in stored.tensors.items()}
    engine = backend(replace(stored, tensors=sealed))
    assert engine.dtype == (format or "int8")
    for name, tensor in engine.dequantized(stored).tensors.items():
        assert np.array_equal(tensor.read(), stored.tensors[name].read()), name
    if format:
        asked = backend(quantize={"": "f32", "model.layers.": format})
        assert np.array_equal(logits(engine), logits(asked))
    for other in ("int8", "llm-int8", "bf16", "q4"):  # and what no longer is as stored is packed from its floats
        assert backend(stored, quantize=other).dtype == other


@pytest.mark.parametrize("scale", [np.inf, np.nan])
def test_a_scale_that_is_not_finite_is_refused(scale: float) -> None:
    with pytest.raises(BadFile, match="holds a number that is not finite"):
        backend(stored_as("LLM_INT8", spoil=scale))


def test_a_plan_counts_the_lists_of_outliers() -> None:
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    int8, llm_int8 = plan(checkpoint, "int8"), plan(checkpoint, "llm-int8")
    assert llm_int8.dtype == "llm-int8"
    assert llm_int8.besides - int8.besides == 512 * 8 * max(CONFIG.hidden_size, CONFIG.intermediate_size)
