"""Packing and unpacking: equal to quantize.py, to GGUF's own decoding and to numpy's casts, to the bit."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pronk import _native
from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES, decode
from pronk.errors import BadRequest
from pronk.formats.quantize import quantize

FLOATS = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
FORMATS = (*PLAIN, "int8", "int8_plain", "q8", "q4", "q4_0")
# Blocks that a format holds as they are.
DIRECT = (("Q8_0", "q8"), ("Q4_0", "q4"), ("Q4_0", "q4_0"), ("Q4_1", "q4"))
# Of those that run as files have them the products, and what comes back, are test_planes.py's.
BLOCKS = tuple(BLOCK_TYPES)


def packed(format: str, rows: np.ndarray, source: str, cols: int, threads: int = 1) -> np.ndarray | None:
    """What comes back of rows as they are stored, or None where they are refused."""
    matrix = _native.Matrix(format, len(rows), cols, threads=threads)
    if not matrix.pack(np.ascontiguousarray(rows).view(np.uint8), source):
        return None
    out = np.full((len(rows), cols), np.nan, np.float32)
    matrix.unpack(out)
    return out


def expected(format: str, rows: np.ndarray) -> np.ndarray | None:
    if format not in PLAIN:
        try:
            return quantize(rows, format).dequantize()
        except BadRequest:
            return None
    with np.errstate(over="ignore"):
        cast = rows.astype(PLAIN[format]).astype(np.float32)
    return cast if np.isfinite(cast).all() else None


def random_blocks(name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Every code random, and every scale a finite float16 of any size, subnormals among them."""
    rng = np.random.default_rng(seed)
    kind = BLOCK_TYPES[name]
    stored = rng.integers(0, 256, (rows * blocks, kind.nbytes), dtype=np.uint8)
    for offset in (offset for offset, width in kind.words if width == 2 and offset not in kind.whole):
        sizes = 10.0 ** rng.uniform(-8, 2, (len(stored), 1))
        scales = (rng.standard_normal((len(stored), 1)) * sizes).astype(np.float16)
        stored[:, offset : offset + 2] = scales.view(np.uint8)
    return stored.reshape(rows, -1)


def q4_0_of(rows: np.ndarray) -> np.ndarray:
    """Rows as ggml's Q4_0 keeps them; K is filled up with zeros."""
    cols = rows.shape[1]
    filled = np.pad(rows, ((0, 0), (0, -cols % 32)))
    return decode("Q4_0", gguf.quants.quantize(filled, gguf.GGMLQuantizationType.Q4_0))[:, :cols]


# -- from floats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("format", [f for f in FORMATS if f != "q4_0"])
@settings(deadline=None)
@given(
    rows=st.integers(1, 150),
    cols=st.integers(1, 600),
    exponent=st.sampled_from([-40, -12, -7, -3, 0, 2, 5, 8]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**32),
)
def test_floats_become_what_quantize_says(
    format: str, source: str, rows: int, cols: int, exponent: int, threads: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_t(4, (rows, cols)) * 10.0**exponent
    values[rng.random(rows) < 0.1] = 0  # flat rows
    values[rng.random(rows) < 0.1] = 0.37 * 10.0**exponent
    if seed % 3 == 0:
        values = np.abs(values) + 1  # all on one side of zero
    with np.errstate(over="ignore"):
        stored = values.astype(np.float32).astype(FLOATS[source])
    want = expected(format, stored.astype(np.float32))
    got = packed(format, stored, source, cols, threads)
    assert (got is None) == (want is None)
    if got is not None:
        assert np.array_equal(got, want)


@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (64, 320), (77, 100)])
def test_floats_become_the_q4_0_that_ggml_makes(shape: tuple[int, int]) -> None:
    rows = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    assert np.array_equal(packed("q4_0", rows, "F32", shape[1]), q4_0_of(rows))


# -- from blocks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "format"), DIRECT)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 9), (70, 8), (129, 19)])
def test_blocks_that_fit_are_kept_exactly(source: str, format: str, rows: int, blocks: int) -> None:
    stored = random_blocks(source, rows, blocks, seed=rows)
    assert np.array_equal(packed(format, stored, source, 32 * blocks), decode(source, stored))


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (70, 3)])
def test_q4_k_is_off_by_the_rounding_of_its_scales(rows: int, blocks: int) -> None:
    stored = random_blocks("Q4_K", rows, blocks, seed=blocks)
    got, want = packed("q4", stored, "Q4_K", 256 * blocks), decode("Q4_K", stored)
    assert got is not None
    # Scale and minimum are off by 2^-11 of themselves, or by half of the least subnormal, 2^-24.
    groups = want.reshape(-1, 32).astype(np.float64)
    scales = stored.reshape(-1, 144)[:, :2].copy().view(np.float16).astype(np.float64)
    minima = stored.reshape(-1, 144)[:, 2:4].copy().view(np.float16).astype(np.float64)
    most = np.repeat(np.abs(scales) * 63 * 15 + np.abs(minima) * 63, 8, axis=0)
    bound = most * 2**-11 + 16 * 2**-25
    assert (np.abs(got.reshape(-1, 32) - groups) <= bound).all()


@pytest.mark.parametrize(
    ("source", "format"), sorted({(s, f) for s in BLOCKS for f in FORMATS} - {*DIRECT, ("Q4_K", "q4")})
)
def test_blocks_that_do_not_fit_go_through_floats(source: str, format: str) -> None:
    blocks = 2 if BLOCK_TYPES[source].elements == 256 else 9
    stored = random_blocks(source, 35, blocks, seed=3)
    rows = decode(source, stored)
    want = q4_0_of(rows) if format == "q4_0" else expected(format, rows)
    assert np.array_equal(packed(format, stored, source, rows.shape[1]), want)


def test_nibbles_in_another_order_would_be_noticed() -> None:
    stored = random_blocks("Q4_1", 4, 2, seed=4)
    flipped = stored.reshape(-1, 20).copy()
    flipped[:, 4:] = flipped[:, 4:] << 4 | flipped[:, 4:] >> 4
    got = packed("q4", flipped.reshape(stored.shape), "Q4_1", 64)
    assert not np.array_equal(got, decode("Q4_1", stored))
    assert np.array_equal(got.reshape(-1, 2, 16)[:, ::-1].reshape(4, 64), decode("Q4_1", stored))


# -- places ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_rows_packed_in_pieces_are_those_packed_at_once(format: str) -> None:
    rows = np.random.default_rng(5).standard_normal((150, 70)).astype(np.float32)
    matrix = _native.Matrix(format, 150, 70)
    for begin, end in ((100, 150), (0, 7), (7, 20), (20, 100)):
        assert matrix.pack(rows[begin:end].view(np.uint8), "F32", begin)
    out = np.empty((150, 70), np.float32)
    matrix.unpack(out)
    assert np.array_equal(out, packed(format, rows, "F32", 70))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 32, 75])
def test_gate_and_up_share_a_matrix(format: str, rows: int) -> None:
    gate, up = np.random.default_rng(6).standard_normal((2, rows, 40)).astype(np.float32)
    matrix = _native.Matrix(format, rows, 40, pairs=True)
    assert matrix.pack(up.view(np.uint8), "F32", 0, "up")
    assert matrix.pack(gate.view(np.uint8), "F32", 0, "gate")
    for part, numbers in (("gate", gate), ("up", up)):
        out = np.empty((rows, 40), np.float32)
        matrix.unpack(out, 0, part)
        assert np.array_equal(out, packed(format, numbers, "F32", 40))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [(0, 0), (3, 299), (20, 256)])
def test_what_is_not_finite_is_refused(format: str, value: float, at: tuple[int, int]) -> None:
    rows = np.ones((21, 300), np.float32)
    assert packed(format, rows, "F32", 300) is not None
    rows[at] = value
    for source, dtype in FLOATS.items():
        assert packed(format, rows.astype(dtype), source, 300) is None


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("source", BLOCKS)
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E00])
def test_a_scale_that_is_not_finite_is_refused(format: str, source: str, scale: int) -> None:
    for offset, width in BLOCK_TYPES[source].words:
        if width != 2 or offset in BLOCK_TYPES[source].whole:
            continue
        stored = random_blocks(source, 3, 2, seed=7)
        stored[2, offset : offset + width] = np.array([scale], np.uint16).view(np.uint8)
        assert packed(format, stored, source, 2 * BLOCK_TYPES[source].elements) is None


# The greatest number that is kept, and the next.
@pytest.mark.parametrize(
    ("format", "largest"),
    [
        ("f16", "0x1.ffdffep15"),
        ("bf16", "0x1.fefffep127"),
        ("q8", "0x1.fbc08p22"),  # 127 times float16's greatest: the scale is rounded up
        ("q4", "0x1.ffdffep15"),
        ("q4_0", "0x1.ffdffep18"),
    ],
)
def test_what_does_not_fit_a_type_is_refused(format: str, largest: str) -> None:
    row = np.full((1, 32), float.fromhex(largest), np.float32)
    assert packed(format, row, "F32", 32) is not None
    assert packed(format, -row, "F32", 32) is not None
    assert packed(format, np.nextafter(row, np.float32(np.inf)), "F32", 32) is None


def test_a_q4_0_block_whose_minimum_is_too_large_for_float16_is_refused() -> None:
    stored = random_blocks("Q4_0", 1, 1, seed=8)
    stored[0, :2] = np.array([8191], np.float16).view(np.uint8)
    assert packed("q4", stored, "Q4_0", 32) is None
    assert np.array_equal(packed("q4_0", stored, "Q4_0", 32), decode("Q4_0", stored))
