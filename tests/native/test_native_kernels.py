"""Single kernels, in every instruction set that runs here, against numpy in float64 on the numbers as they are stored.

Bounds are derived: a sum of n products in float32 is off by less than n units of 2^-24 of the sum of their magnitudes,
in whichever order. Sums of integers are exact.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import plain_kv
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pronk import _native
from pronk.formats import KV_TYPES
from pronk.formats.int8 import Outliers
from pronk.formats.turn import together, turn

FORMATS = ("f32", "f16", "bf16", "int8", "int8_plain", "llm-int8", "q8", "q4", "q4_0")
EPS = 2.0**-24
each_isa = pytest.mark.parametrize("isa", _native.isas())


def packed(format: str, rows: np.ndarray) -> tuple[_native.Matrix, np.ndarray]:
    """A matrix, and the numbers it holds."""
    matrix = _native.Matrix(format, *rows.shape)
    assert matrix.pack(rows.view(np.uint8), "F32")
    stored = np.empty_like(rows)
    matrix.unpack(stored)
    return matrix, stored


def turned_back(x: np.ndarray) -> np.ndarray:
    """In float64, by the matrix itself."""
    block, hadamard = together(x.shape[1]), np.ones((1, 1))
    while len(hadamard) < block:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    return (x.reshape(-1, block) @ hadamard / np.sqrt(block)).reshape(x.shape)


def as_multiplied(x: np.ndarray, format: str) -> np.ndarray:
    """What a format multiplies its weights with, in float64."""
    if format == "int8":  # turned back, as the weights are
        return turned_back(as_multiplied(turn(x), "int8_plain"))
    if format in ("f32", "f16"):
        return x.astype(np.float64)
    if format == "bf16":
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)
    if format == "llm-int8":
        apart = Outliers().find(x)
        return np.where(apart, x, as_multiplied(np.where(apart, np.float32(0), x), "int8_plain"))
    group = x.shape[1] if format == "int8_plain" else 32
    groups = np.pad(x, ((0, 0), (0, -x.shape[1] % group))).reshape(len(x), -1, group)
    largest = np.abs(groups).max(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
    q = np.rint(groups * inverse).astype(np.float64)
    return (q * (largest / np.float32(127)).astype(np.float64)).reshape(len(x), -1)[:, : x.shape[1]]


def magnitude_of(x: np.ndarray, weights: np.ndarray, format: str) -> np.ndarray:
    """Of what is summed: of what is turned, lengths are what is left of it, and every sum is under their product."""
    if format == "int8":
        return np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(weights, axis=1)
    return np.abs(x) @ np.abs(weights).T


@each_isa
@pytest.mark.parametrize("format", FORMATS)
@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 200), cols=st.integers(1, 300), tokens=st.integers(1, 15), seed=st.integers(0, 9),
    add=st.booleans(),
)  # fmt: skip
@example(rows=200, cols=2, tokens=15, seed=2, add=False)  # orthogonal, but for what was rounded while they were turned
def test_products(format: str, isa: str, rows: int, cols: int, tokens: int, seed: int, add: bool) -> None:
    rng = np.random.default_rng(seed)
    matrix, weights = packed(format, rng.normal(size=(rows, cols)).astype(np.float32))
    x = (rng.normal(size=(tokens, cols)) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    before = rng.normal(size=(tokens, rows)).astype(np.float32)
    out = before.copy()
    _native.matmul(matrix, x, out, add, isa)
    multiplied = as_multiplied(x, format)
    expected = multiplied @ weights.T.astype(np.float64) + (before if add else 0)
    magnitude = magnitude_of(multiplied, weights.astype(np.float64), format) + (np.abs(before) if add else 0)
    # q4 keeps nibbles and minima apart, and llm-int8 the 128 that is added to weights: larger than what they make.
    scale = {"q4": 4, "q4_0": 4, "llm-int8": 16}.get(format, 1)
    assert (np.abs(out - expected) <= scale * (cols + 8) * EPS * magnitude + 1e-30).all()


@each_isa
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_share_a_pass_do_not_meet(format: str, isa: str) -> None:
    rng = np.random.default_rng(0)
    matrix, _ = packed(format, rng.normal(size=(130, 95)).astype(np.float32))
    x = rng.normal(size=(130, 95)).astype(np.float32)  # more than twice what is multiplied at once
    whole = np.empty((130, 130), np.float32)
    _native.matmul(matrix, x, whole, isa=isa)
    for first, count in ((0, 1), (3, 2), (7, 5), (11, 6), (20, 13), (40, 48), (59, 61), (5, 121), (129, 1)):
        part = np.empty((count, 130), np.float32)
        _native.matmul(matrix, x[first : first + count], part, isa=isa)
        assert np.array_equal(part, whole[first : first + count])


@each_isa
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 31, 32, 33, 100])
def test_swiglu(format: str, isa: str, rows: int) -> None:
    """Gate rows beside up rows, 32 and 32, of any number."""
    rng = np.random.default_rng(rows)
    halves = {part: rng.normal(size=(rows, 70)).astype(np.float32) / 4 for part in ("gate", "up")}
    matrix = _native.Matrix(format, rows, 70, pairs=True)
    for part, array in halves.items():
        assert matrix.pack(array.view(np.uint8), "F32", part=part)
        matrix.unpack(array, part=part)
    x = rng.normal(size=(3, 70)).astype(np.float32)
    out = np.empty((3, rows), np.float32)
    _native.matmul(matrix, x, out, isa=isa)
    gate, up = (as_multiplied(x, format) @ halves[part].T.astype(np.float64) for part in ("gate", "up"))
    assert np.abs(out - gate / (1 + np.exp(-gate)) * up).max() < 1e-4


@each_isa
def test_extremes_of_swiglu(isa: str) -> None:
    """silu(x) is 0 far below, x far above, and NaN stays NaN."""
    x = np.array([[-1e4], [-100], [0], [100], [1e4], [np.nan]], np.float32)
    matrix = _native.Matrix("f32", 1, 1, pairs=True)
    for part in ("gate", "up"):
        assert matrix.pack(np.ones((1, 1), np.float32).view(np.uint8), "F32", part=part)
    out = np.empty((6, 1), np.float32)
    _native.matmul(matrix, x, out, isa=isa)
    assert np.array_equal(out[:, 0], np.array([0, 0, 0, 1e4, 1e8, np.nan], np.float32), equal_nan=True)


@each_isa
@pytest.mark.parametrize("format", FORMATS)
def test_a_number_that_is_not_one_is_not_made_into_one(format: str, isa: str) -> None:
    rng = np.random.default_rng(0)
    matrix, _ = packed(format, rng.normal(size=(64, 64)).astype(np.float32))
    for value in (np.nan, np.inf):
        x = rng.normal(size=(2, 64)).astype(np.float32)
        x[0, 5] = value
        out = np.empty((2, 64), np.float32)
        _native.matmul(matrix, x, out, isa=isa)
        assert not np.isfinite(out[0]).any()
        assert np.isfinite(out[1]).all()


@each_isa
@settings(max_examples=20, deadline=None)
@given(size=st.integers(1, 400), seed=st.integers(0, 9))
def test_rmsnorm(isa: str, size: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(2, size)).astype(np.float32), rng.normal(size=size).astype(np.float32)
    out = np.empty_like(x)
    _native.rmsnorm(x, weight, 1e-5, out, isa)
    exact = x.astype(np.float64)
    expected = exact / np.sqrt((exact * exact).mean(-1, keepdims=True) + np.float32(1e-5)) * weight
    assert np.allclose(out, expected, rtol=(size + 8) * EPS, atol=0)


@each_isa
@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (3, 6), (2, 64), (5, 80)])
def test_rope(isa: str, heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    x, angles = rng.normal(size=(heads, dim)).astype(np.float32), rng.normal(size=dim // 2)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turned = (x[:, : dim // 2] + 1j * x[:, dim // 2 :].astype(np.float64)) * (cos + 1j * sin.astype(np.float64))
    _native.rope(x, cos, sin, isa)
    assert np.abs(x - np.concatenate([turned.real, turned.imag], axis=1)).max() < 8 * EPS * 4


def softmax_of(q: np.ndarray, keys: np.ndarray, values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """Of arrays in float64, whose own rounding does not count."""
    out = np.empty(q.shape)
    for i, limit in enumerate(limits):
        scores = keys[:limit] @ q[i] / np.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[i] = weights @ values[:limit] / weights.sum()
    return out


def as_attended(x: np.ndarray, type: str) -> np.ndarray:
    """What keys and values are once stored, in float64."""
    if type == "q4":
        return turned_back(plain_kv.coded(turn(x)))
    return x.astype(np.float16).astype(np.float64) if type == "f16" else as_multiplied(x, type)


def most_off(type: str, q: np.ndarray, keys: np.ndarray, values: np.ndarray, limits: np.ndarray) -> np.ndarray:
    """How far each number may be from softmax_of: what the roundings of float32 come to where all go one way.

    An error of a score moves its key's weight, and with it the output, by its value's distance from that. Sums go on
    from span to span of 256 keys. In bf16 weights are rounded after their sum was taken.
    """
    of_weights = 2.0**-8 if type == "bf16" else 0
    turned = KV_TYPES[type].turned
    out = np.empty(q.shape)
    for i, limit in enumerate(limits):
        k, v, dim = keys[:limit], values[:limit], q.shape[1]
        scores, magnitude = k @ q[i] / np.sqrt(dim), np.abs(k) @ np.abs(q[i]) / np.sqrt(dim)
        if turned:  # of what is turned, lengths are what is left of it; and there is rounding once more
            magnitude = np.linalg.norm(k, axis=1) * np.linalg.norm(q[i]) / np.sqrt(dim) * 2
            v = np.broadcast_to(np.linalg.norm(v, axis=1, keepdims=True), v.shape) * 2
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        off = EPS * ((dim + 3) * magnitude + scores.max() - scores + 4)  # exp is good to two units
        given, steps = weights @ v, min(int(limit), 256) + 8 * -(-int(limit) // 256)
        moved = (weights * np.expm1(off)) @ (2 * v if turned else np.abs(v - given))
        summed = (of_weights + steps * EPS) * (weights @ np.abs(v)) + steps * EPS * np.abs(given)
        out[i] = (moved + summed) * np.exp(2 * off.max())
    return out


@each_isa
@pytest.mark.parametrize("type", _native.kv_types())
@settings(max_examples=12, deadline=None)
@given(dim=st.integers(1, 70).map(lambda d: 2 * d), length=st.integers(1, 600), rows=st.integers(1, 8))
def test_attention(type: str, isa: str, dim: int, length: int, rows: int) -> None:
    rng = np.random.default_rng(dim + length)
    q = rng.normal(size=(rows, dim)).astype(np.float32)
    keys, values = rng.normal(size=(2, length, dim)).astype(np.float32)
    limits = np.sort(rng.integers(1, length + 1, rows)).astype(np.int32)
    blocks = rng.permutation(-(-length // 64)).astype(np.int32)
    out, alone = np.empty_like(q), np.empty_like(q)
    _native.attention(q, keys, values, limits, blocks, type, 1, alone, isa)
    _native.attention(q, keys, values, limits, blocks, type, 0, out, isa)
    assert np.array_equal(out, alone), "rows that share a pass met"
    if type == "bf16":  # then queries are rounded, too
        q = as_attended(q * np.float32(dim**-0.5), type) * dim**0.5
    keys, values = as_attended(keys, type), as_attended(values, type)
    off = np.abs(out - softmax_of(q, keys, values, limits))
    assert (off <= most_off(type, q, keys, values, limits)).all()


def test_the_checks_can_fail() -> None:
    """One weight's place, one key too many, one group's scale: each is far outside its bound."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(64, 96)).astype(np.float32)
    matrix, weights = packed("q8", rows)
    x, out = rng.normal(size=(1, 96)).astype(np.float32), np.empty((1, 64), np.float32)
    _native.matmul(matrix, x, out)
    weights[:, [3, 4]] = weights[:, [4, 3]]
    magnitude = np.abs(x) @ np.abs(weights.T)
    assert (np.abs(out - as_multiplied(x, "q8") @ weights.T) > 100 * 104 * EPS * magnitude).any()
    assert not np.allclose(as_multiplied(x, "q8"), as_multiplied(x, "int8_plain"), atol=1e-4)
    q, keys, values = rng.normal(size=(3, 40, 16))
    q, limits = q[1:], np.arange(2, 41)
    off = np.abs(softmax_of(q, keys, values, limits) - softmax_of(q, keys, values, limits - 1))
    assert (off.max(1) > 100 * most_off("f32", q, keys, values, limits).max(1)).all()
    assert (off.max(1) > 10 * most_off("q4", q, keys, values, limits).max(1)).all()
    assert (off > most_off("bf16", q, keys, values, limits)).any(1).all()
