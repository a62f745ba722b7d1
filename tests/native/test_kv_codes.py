"""Keys and values of few bits, by what attention makes of them: one key alone gives its value as it is stored."""

from __future__ import annotations

import numpy as np
import pytest
from test_native_kernels import as_attended, each_isa

from pronk import _native


def stored(values: np.ndarray, type: str, isa: str) -> np.ndarray:
    """Each row as the value of an only key."""
    out = np.empty_like(values)
    for i in range(len(values)):
        one, only, key = np.ones(1, np.int32), np.zeros(1, np.int32), np.zeros_like(values[:1])
        _native.attention(key, key, values[i : i + 1], one, only, type, 1, out[i : i + 1], isa)
    return out


def in_ggml_blocks(x: np.ndarray) -> np.ndarray:
    """As Q4_0 has it: 32 numbers, a scale of the largest by -8."""
    groups = x.reshape(len(x), -1, 32)
    far = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1) / -8
    return (np.rint(groups / far).clip(-8, 7) * far).reshape(x.shape)


def rms(x: np.ndarray) -> float:
    return float(np.sqrt((x * x).mean()))


@each_isa
@pytest.mark.parametrize("dim", [2, 6, 50, 64, 80, 96, 128, 300])
def test_codes_are_those_of_numpy(isa: str, dim: int) -> None:
    values = np.random.default_rng(dim).normal(size=(20, dim)).astype(np.float32)
    values[0], values[1], values[2] = 0, 1, np.arange(dim)
    values[3] *= np.float32(1e30)
    values[4] *= np.float32(1e-30)
    values[5, 0] = 1000
    expected = as_attended(values, "q4")
    size = np.abs(values).max(1, keepdims=True)
    assert (np.abs(stored(values, "q4", isa) - expected) <= 1e-5 * size).all()


def test_4_bits_beat_blocks_of_the_same_numbers_untouched() -> None:
    values = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    values[:, 7] *= 8  # as keys have it
    own, plain = stored(values, "q4", _native.isas()[0]) - values, in_ggml_blocks(values) - values
    assert rms(own) < 0.5 * rms(plain)


def test_turning_spreads_what_is_large_in_one_number() -> None:
    values = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    values[:, 7] *= 8
    plain = np.rint(values / np.abs(values).max(1, keepdims=True) * 127) * np.abs(values).max(1, keepdims=True) / 127
    assert rms(stored(values, "int8", _native.isas()[0]) - values) < 0.6 * rms(plain - values)


@each_isa
@pytest.mark.parametrize("type", ["int8", "q4"])
def test_a_key_that_is_no_number_is_no_number_to_who_sees_it(type: str, isa: str) -> None:
    keys = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    keys[1, 5] = np.nan
    out = np.empty_like(keys)
    values = np.ones_like(keys)
    limits = np.array([1, 2, 3], np.int32)
    _native.attention(np.ones_like(keys), keys, values, limits, np.zeros(1, np.int32), type, 0, out, isa)
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1:]).all()


@each_isa
def test_a_slot_is_written_anew(isa: str) -> None:
    """A guess that was wrong leaves its value behind; its neighbour shares a byte with it."""
    rng = np.random.default_rng(1)
    first, second = rng.normal(size=(2, 64)).astype(np.float32)
    keys = np.zeros((2, 64), np.float32)
    for values in (np.stack([first, second]), np.stack([second, first])):
        out = np.empty((1, 64), np.float32)
        _native.attention(keys[:1], keys, values, np.array([2], np.int32), np.zeros(1, np.int32), "q4", 1, out, isa)
        assert np.allclose(out[0], as_attended(values, "q4").mean(0), atol=1e-5)
