"""Block types against the `gguf` package's own decoder, which follows ggml's, to the bit."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest

from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES, decode, encode_q8_0, to_little_endian


def oracle(dtype: str, blocks: np.ndarray) -> np.ndarray:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it multiplies infinities by zero, as it should
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[dtype])


def random_blocks(dtype: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Every bit random, so that scales are subnormal, infinite and NaN too, as likely as float16 makes them."""
    return np.random.default_rng(seed).integers(0, 256, (rows, blocks * BLOCK_TYPES[dtype].nbytes), dtype=np.uint8)


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_the_oracle_knows_the_same_sizes(dtype: str) -> None:
    block = BLOCK_TYPES[dtype]
    assert (block.elements, block.nbytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (7, 3), (300, 5)])
def test_every_bit_equals_the_oracle(dtype: str, rows: int, blocks: int) -> None:
    stored = random_blocks(dtype, rows, blocks, seed=rows)
    ours, theirs = decode(dtype, stored), oracle(dtype, stored)
    assert ours.shape == theirs.shape == (rows, blocks * BLOCK_TYPES[dtype].elements)
    assert ours.dtype == np.float32
    same = ours.view(np.uint32) == theirs.view(np.uint32)
    both_nan = np.isnan(ours) & np.isnan(theirs)  # a NaN's payload is the processor's choice
    assert (same | both_nan).all()
    assert not both_nan.all()


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00])
def test_odd_scales(dtype: str, scale: int) -> None:
    """Zero, negative zero, subnormals, the largest, infinities and NaN in every float16 of the block."""
    stored = random_blocks(dtype, 5, 2, seed=scale).reshape(-1, BLOCK_TYPES[dtype].nbytes)
    for offset, width in BLOCK_TYPES[dtype].words:
        if width == 2:
            stored[:, offset : offset + 2] = np.array([scale], "<u2").view(np.uint8)
    ours, theirs = decode(dtype, stored), oracle(dtype, stored)
    same = ours.view(np.uint32) == theirs.view(np.uint32)
    assert (same | (np.isnan(ours) & np.isnan(theirs))).all()


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_pieces_do_not_show(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_blocks(dtype, 9, 4, seed=1)
    whole = decode(dtype, stored)
    monkeypatch.setattr(gguf_blocks, "_CHUNK", BLOCK_TYPES[dtype].elements * 5)
    assert np.array_equal(decode(dtype, stored), whole, equal_nan=True)


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_a_view_of_permuted_rows_decodes_like_its_copy(dtype: str) -> None:
    stored = random_blocks(dtype, 8, 2, seed=2)
    assert np.array_equal(decode(dtype, stored[::-2]), decode(dtype, stored)[::-2], equal_nan=True)


@pytest.mark.parametrize("dtype", BLOCK_TYPES)
def test_byte_order(dtype: str) -> None:
    """Only the numbers wider than a byte turn round, and turning twice changes nothing."""
    stored = random_blocks(dtype, 3, 2, seed=3)
    turned = to_little_endian(dtype, stored)
    assert turned.shape == stored.shape
    assert np.array_equal(to_little_endian(dtype, turned), stored)
    nbytes = BLOCK_TYPES[dtype].nbytes
    expected = stored.reshape(-1, nbytes).copy()
    for offset, width in BLOCK_TYPES[dtype].words:
        for byte in range(width):
            expected[:, offset + byte] = stored.reshape(-1, nbytes)[:, offset + width - 1 - byte]
    assert np.array_equal(turned.reshape(-1, nbytes), expected)


def test_q8_0_is_written_as_ggml_writes_it() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(0, 1, (64, 96)).astype(np.float32) * np.float32(10.0) ** rng.integers(-12, 4, (64, 1))
    rows[3] = 0
    rows[4, :32] = -0.0
    rows[5, :32] = np.arange(32) - 15.5  # 127 / 16.5 apart: many land on a half
    rows[6, :32] = np.where(np.arange(32) % 2, 127, 2.5)  # a scale of 1: 2.5 rounds away from zero
    assert np.array_equal(encode_q8_0(rows), gguf.quants.quantize(rows, gguf.GGMLQuantizationType.Q8_0))
    assert decode("Q8_0", encode_q8_0(rows))[6, 0] == 3


def test_q8_0_comes_back_within_half_a_step() -> None:
    rows = np.random.default_rng(1).normal(0, 1, (32, 64)).astype(np.float32)
    back = decode("Q8_0", encode_q8_0(rows))
    step = np.abs(rows.reshape(-1, 32)).max(axis=1) / 127
    # Half a step of rounding, and the float16 scale's 2**-11 on up to 127 steps.
    worst = np.abs(back - rows).reshape(-1, 32).max(axis=1) / step
    assert worst.max() <= 0.5 + 127 * 2.0**-11, worst.max()
