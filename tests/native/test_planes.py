"""Block types that run as files have them, in every instruction set that runs here. What blocks mean is asked of the
`gguf` package; products are held against float64 of that, by a bound that is derived as in test_native_kernels.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_native_kernels import EPS, as_multiplied, each_isa
from test_pack import random_blocks

from pronk import _native
from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES
from pronk.formats import FORMATS, kept

TYPES = [format.stored[0] for format in FORMATS.values() if not format.made]
each_type = pytest.mark.parametrize("stored", TYPES)


def meant(stored: str, blocks: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[stored])


def halves(stored: str) -> list[int]:
    """Where a block has float16."""
    kind = BLOCK_TYPES[stored]
    return [offset for offset, width in kind.words if width == 2 and offset not in kind.whole]


def columns(stored: str, blocks: int) -> int:
    return blocks * BLOCK_TYPES[stored].elements


def matrix(stored: str, blocks: np.ndarray) -> _native.Matrix:
    cols = blocks.shape[1] // BLOCK_TYPES[stored].nbytes * BLOCK_TYPES[stored].elements
    made = _native.Matrix(kept(stored).name, len(blocks), cols)
    assert made.pack(blocks, stored)
    return made


def normal(stored: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Every code and whole number random, and scales of one size."""
    made = random_blocks(stored, rows, blocks, seed).reshape(-1, BLOCK_TYPES[stored].nbytes)
    for offset in halves(stored):
        scales = np.random.default_rng(seed + offset).normal(0, 1e-3, (len(made), 1)).astype(np.float16)
        made[:, offset : offset + 2] = scales.view(np.uint8)
    return made.reshape(rows, -1)


def product(of: _native.Matrix, x: np.ndarray, rows: int, isa: str) -> np.ndarray:
    out = np.empty((len(x), rows), np.float32)
    _native.matmul(of, x, out, isa=isa)
    return out


@each_type
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (16, 2), (70, 3), (129, 9)])
def test_what_is_packed_comes_back_to_the_bit(stored: str, rows: int, blocks: int) -> None:
    given = random_blocks(stored, rows, blocks, seed=rows)
    back = np.empty((rows, columns(stored, blocks)), np.float32)
    matrix(stored, given).unpack(back)
    assert np.array_equal(back, meant(stored, given))


@each_type
def test_memory_is_that_of_the_file(stored: str) -> None:
    kind = BLOCK_TYPES[stored]
    assert _native.packed_bytes(kept(stored).name, 256, 2048) <= 1.04 * 256 * 2048 / kind.elements * kind.nbytes


@each_isa
@each_type
@settings(max_examples=8, deadline=None)
@given(rows=st.integers(1, 140), blocks=st.integers(1, 5), tokens=st.integers(1, 60), seed=st.integers(0, 99))
def test_products(stored: str, isa: str, rows: int, blocks: int, tokens: int, seed: int) -> None:
    given = normal(stored, rows, blocks, seed)
    weights = meant(stored, given).astype(np.float64)
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=(tokens, columns(stored, blocks))) * 10.0 ** rng.integers(-3, 4)).astype(np.float32)
    out = product(matrix(stored, given), x, rows, isa)
    rounded = as_multiplied(x, "q8")
    # Codes around their middle, and what that leaves beside minima, are apart from each other no larger than 4 times
    # what they make; for what IQ4 adds to its numbers, 128 of up to 113, sums are of whole numbers and exact.
    magnitude = np.abs(rounded) @ np.abs(weights).T + np.abs(rounded).sum(1, keepdims=True) * np.abs(weights).max(1)
    assert (np.abs(out - rounded @ weights.T) <= (x.shape[1] // 16 + 8) * EPS * 4 * magnitude + 1e-30).all()


@each_isa
@each_type
def test_a_bit_of_a_code_in_another_place_would_be_noticed(stored: str, isa: str) -> None:
    """Wherever a block's bit stands, turning it over changes one row's product alone, by what the bit means."""
    given = normal(stored, 5, 1, seed=3)
    rng, of = np.random.default_rng(4), matrix(stored, given)
    x = rng.normal(size=(1, columns(stored, 1))).astype(np.float32)
    before, rounded = product(of, x, 5, isa), as_multiplied(x, "q8")
    places = [at for at in range(given.shape[1]) if at not in {h + byte for h in halves(stored) for byte in (0, 1)}]
    for at in rng.choice(places, 12):
        changed = given.copy()
        changed[2, at] ^= np.uint8(1 << rng.integers(0, 8))
        after = product(matrix(stored, changed), x, 5, isa)
        step = rounded @ (meant(stored, changed)[2] - meant(stored, given)[2]).astype(np.float64)
        assert np.array_equal(np.delete(after, 2, axis=1), np.delete(before, 2, axis=1))
        assert after[0, 2] - before[0, 2] == pytest.approx(step[0], rel=1e-3, abs=1e-5)


@each_isa
@each_type
def test_sums_of_the_largest_codes_do_not_overflow(stored: str, isa: str) -> None:
    """All codes at either end, and activations that are all 127 or all -127, by as many tokens as each way takes."""
    for byte in (0x00, 0xFF):
        given = np.full((2, 2 * BLOCK_TYPES[stored].nbytes), byte, np.uint8)
        for offset in halves(stored):
            scales = np.array([2**-10], np.float16).view(np.uint8)
            given.reshape(4, -1)[:, offset : offset + 2] = scales
        of, weights = matrix(stored, given), meant(stored, given).astype(np.float64)
        for x in (sign * np.ones((tokens, weights.shape[1])) for tokens in (1, 3, 8, 14) for sign in (1, -1)):
            out = product(of, x.astype(np.float32), 2, isa)
            want = as_multiplied(x.astype(np.float32), "q8") @ weights.T
            assert np.allclose(out, want, rtol=1e-5, atol=1e-5 * np.abs(weights).max() * weights.shape[1])


@each_isa
@each_type
@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 140), tokens=st.integers(1, 70), seed=st.integers(0, 99), size=st.sampled_from([1e-35, 1, 1e25])
)
def test_scales_and_activations_of_any_size(
    stored: str, isa: str, rows: int, tokens: int, seed: int, size: float
) -> None:
    """Scales subnormal, of either sign and far apart, side by side: errors are of what is largest in a row."""
    given = random_blocks(stored, rows, 3, seed)
    weights, rng = meant(stored, given).astype(np.float64), np.random.default_rng(seed)
    x = (rng.normal(size=(tokens, weights.shape[1])) * size).astype(np.float32)
    out, rounded = product(matrix(stored, given), x, rows, isa), as_multiplied(x, "q8")
    largest = np.maximum(np.abs(weights).max(1), 1e-6)
    bound = (weights.shape[1] // 16 + 8) * EPS * 8 * np.abs(rounded).sum(1, keepdims=True) * largest
    assert (np.abs(out - rounded @ weights.T) <= bound + 1e-37).all()


@each_isa
@each_type
def test_tokens_that_share_a_pass_do_not_meet(stored: str, isa: str) -> None:
    given = normal(stored, 130, 3, seed=1)
    of, x = matrix(stored, given), np.random.default_rng(0).normal(size=(110, columns(stored, 3))).astype(np.float32)
    whole = product(of, x, 130, isa)
    for first, count in ((0, 1), (3, 2), (7, 5), (11, 6), (20, 13), (40, 48), (50, 49), (5, 100)):
        assert np.array_equal(product(of, x[first : first + count], 130, isa), whole[first : first + count])


@each_isa
@each_type
@pytest.mark.parametrize("rows", [1, 33, 100])
def test_swiglu(stored: str, isa: str, rows: int) -> None:
    cols = columns(stored, 2)
    pairs = _native.Matrix(kept(stored).name, rows, cols, pairs=True)
    x = np.random.default_rng(0).normal(size=(3, cols)).astype(np.float32)
    halves = []
    for seed, part in enumerate(("gate", "up")):
        given = normal(stored, rows, 2, seed)
        assert pairs.pack(given, stored, part=part)
        halves.append(as_multiplied(x, "q8") @ meant(stored, given).T.astype(np.float64))
    out = product(pairs, x, rows, isa)
    gate, up = halves
    expected = gate / (1 + np.exp(-gate)) * up
    assert np.allclose(out, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@each_isa
@each_type
def test_a_number_that_is_not_one_is_not_made_into_one(stored: str, isa: str) -> None:
    of, x = matrix(stored, normal(stored, 64, 2, seed=0)), np.ones((7, columns(stored, 2)), np.float32)
    x[2, 5], x[4, 17] = np.nan, np.inf
    finite = np.isfinite(product(of, x, 64, isa))
    assert finite[[0, 1, 3, 5, 6]].all()
    assert not finite[[2, 4]].any()


@each_type
@pytest.mark.parametrize("scale", [0x7C00, 0xFC00, 0x7E00])
def test_a_scale_that_is_not_finite_is_refused(stored: str, scale: int) -> None:
    kind = BLOCK_TYPES[stored]
    for offset in halves(stored):
        given = random_blocks(stored, 20, 2, seed=7)
        given.reshape(-1, kind.nbytes)[-1, offset : offset + 2] = np.array([scale], np.uint16).view(np.uint8)
        assert not _native.Matrix(kept(stored).name, 20, 2 * kind.elements).pack(given, stored)


@each_type
def test_nothing_is_rounded_to_it(stored: str) -> None:
    of = _native.Matrix(kept(stored).name, 3, 256)
    with pytest.raises(ValueError, match=f"rows of F32 cannot be packed in {kept(stored).name}"):
        of.pack(np.zeros((3, 1024), np.uint8), "F32")
