"""The numerics of int8, q8 and q4: worked examples, error bounds, and GGUF's own types on the same weights."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pronk.checkpoint.containers.gguf_blocks import decode, encode_q8_0
from pronk.errors import BadRequest
from pronk.formats import GROUP
from pronk.formats.quantize import QuantizedTensor, quantize
from pronk.formats.turn import turn

FORMATS = ("int8", "q8", "q4")
weights = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=2, max_side=70),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=True),
)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def spread(groups: np.ndarray, cols: int) -> np.ndarray:
    return np.repeat(groups.astype(np.float32), GROUP, axis=-1)[..., :cols]


def squared_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(((a.astype(np.float64) - b) ** 2).sum())


# -- worked by hand --------------------------------------------------------------------------------------------------


def test_int8_has_one_scale_a_row_and_rounds_ties_to_even() -> None:
    t = quantize(np.array([[127, -127, 2.5, 3.5, -0.5], [0, 0, 0, 0, 254]], np.float32), "int8")
    assert t.scale.tolist() == [1, 2]
    assert t.q.tolist() == [[127, -127, 2, 4, 0], [0, 0, 0, 0, 127]]
    assert t.dequantize().tolist() == [[127, -127, 2, 4, 0], [0, 0, 0, 0, 254]]


def test_q8_has_one_scale_a_group_rounded_up() -> None:
    rows = np.zeros((1, 40), np.float32)
    rows[0, 0], rows[0, 39] = 127, -127 * (1 + 2**-12)  # a quarter of float16's step over 1
    t = quantize(rows, "q8")
    assert t.scale.tolist() == [[1, 1 + 2**-10]]
    assert (t.q[0, 0], t.q[0, 39]) == (127, -127)


def test_q4_is_a_scale_and_a_minimum() -> None:
    codes = np.arange(GROUP) % 16
    t = quantize((codes * 0.5 - 3).astype(np.float32), "q4")
    assert (t.scale.tolist(), t.minimum.tolist()) == ([0.5], [-3])
    assert t.q.tolist() == codes.tolist()


# -- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["int8", "int8_plain"])
@settings(deadline=None)
@given(rows=weights)
def test_int8_is_off_by_half_a_step_at_most(kind: str, rows: np.ndarray) -> None:
    """Of the rows as they are rounded: int8's are turned before."""
    t = quantize(rows, kind)
    assert (t.q.dtype, t.scale.dtype, t.scale.shape) == (np.int8, np.float32, rows.shape[:-1])
    assert np.abs(t.q.astype(int)).max() <= 127
    assert t.turned == (kind == "int8")
    error = np.abs(t.scale[..., None].astype(np.float64) * t.q - (turn(rows) if t.turned else rows))
    assert (error <= t.scale[..., None] * (0.5 + 1e-4) + 1e-43).all()  # scales under 2^-126 are coarse


@settings(deadline=None)
@given(weights)
def test_q8_is_off_by_half_a_step_at_most(rows: np.ndarray) -> None:
    t = quantize(rows, "q8")
    assert (t.q.dtype, t.scale.dtype) == (np.int8, np.float16)
    assert t.scale.shape == (*rows.shape[:-1], -(-rows.shape[-1] // GROUP))
    assert np.abs(t.q.astype(int)).max() <= 127
    error = np.abs(t.dequantize().astype(np.float64) - rows)
    assert (error <= spread(t.scale, rows.shape[-1]) * (0.5 + 1e-4) + 1e-43).all()


@settings(deadline=None)
@given(weights)
def test_q8_takes_the_least_scale_that_reaches_every_weight(rows: np.ndarray) -> None:
    t = quantize(rows, "q8")
    most = np.abs(np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, -rows.shape[-1] % GROUP)]))
    most = most.reshape(*t.scale.shape, GROUP).max(axis=-1) / np.float32(127)
    assert (t.scale >= most).all()
    assert (np.nextafter(t.scale, np.float16(-1)) < most)[most > 0].all()


@settings(deadline=None)
@given(weights)
def test_q4_is_no_worse_than_the_grid_from_minimum_to_maximum(rows: np.ndarray) -> None:
    t = quantize(rows, "q4")
    assert (t.q.dtype, t.scale.dtype, t.minimum.dtype) == (np.uint8, np.float16, np.float16)
    assert t.q.max() <= 15
    got = t.dequantize()
    for index in np.ndindex(*rows.shape[:-1]):
        for at in range(0, rows.shape[-1], GROUP):
            group = rows[index][at : at + GROUP].astype(np.float64)
            step = np.ptp(group) / 15
            plain = group.min() + np.rint((group - group.min()) / (step or 1)) * step
            # Float16 rounds scale and minimum, and the fit weighs the last weight of a short group as often as it pads.
            noise = np.abs(group).max() * 2**-9 + 2**-20
            slack = np.sqrt(len(group)) * noise if len(group) == GROUP else np.sqrt(len(group)) * (step + noise)
            assert np.sqrt(squared_error(got[index][at : at + GROUP], group)) <= np.linalg.norm(plain - group) + slack


@pytest.mark.parametrize("format", FORMATS)
@settings(deadline=None)
@given(rows=weights)
def test_rows_and_groups_know_nothing_of_each_other(format: str, rows: np.ndarray) -> None:
    whole, last = quantize(rows, format), quantize(rows[-1:], format)
    assert np.array_equal(whole.q[-1:], last.q) or rows.ndim == 1
    if format != "int8" and rows.shape[-1] > GROUP:
        assert np.array_equal(quantize(rows[..., GROUP:], format).q, whole.q[..., GROUP:])


def test_a_group_is_fitted_alone_as_among_many() -> None:
    """To the bit: of a single one numpy would take another order of sums."""
    rows = normal(500, GROUP)
    many = quantize(rows, "q4")
    for n, row in enumerate(rows):
        alone = quantize(row, "q4")
        assert np.array_equal(alone.q, many.q[n])
        assert (alone.scale, alone.minimum) == (many.scale[n], many.minimum[n])


# -- beside GGUF's types ---------------------------------------------------------------------------------------------


def test_q8_is_as_good_as_q8_0() -> None:
    rows = normal(64, 256)
    theirs = squared_error(decode("Q8_0", encode_q8_0(rows)), rows)
    assert squared_error(quantize(rows, "q8").dequantize(), rows) <= 1.01 * theirs


def test_q4_is_better_than_q4_1_and_q4_0() -> None:
    rows = normal(64, 256)
    ours = squared_error(quantize(rows, "q4").dequantize(), rows)
    for name, ratio in (("Q4_1", 0.80), ("Q4_0", 0.70)):
        blocks = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[name])
        assert ours <= ratio * squared_error(decode(name, blocks), rows)


def test_what_came_from_q4_1_or_q8_0_comes_back_exactly() -> None:
    """A checkpoint made from a GGUF with dequantized weights loses nothing more."""
    for format, name in (("q4", "Q4_1"), ("q8", "Q8_0")):
        rows = decode(name, gguf.quants.quantize(normal(64, 256), gguf.GGMLQuantizationType[name]))
        assert np.array_equal(quantize(rows, format).dequantize(), rows)


# -- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cols", [1, 31, 32, 33, 100])
def test_zeros_stay_zeros(format: str, cols: int) -> None:
    assert not quantize(np.zeros((3, cols)), format).dequantize().any()


def test_equal_weights_are_a_minimum_alone() -> None:
    t = quantize(np.full(40, 0.375, np.float32), "q4")
    assert (t.q.max(), t.scale.max()) == (0, 0)
    assert (t.dequantize() == 0.375).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_any_type_of_floats_is_taken(format: str, dtype: type) -> None:
    rows = normal(2, 3, 40).astype(dtype)
    same = quantize(rows.astype(np.float32), format)
    t = quantize(rows, format)
    assert t.shape == (2, 3, 40)
    assert np.array_equal(t.dequantize(), same.dequantize())


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 39])
def test_what_is_not_finite_is_refused(format: str, value: float, at: int) -> None:
    rows = normal(3, 40)
    rows[1, at] = value
    with pytest.raises(BadRequest, match=f"to {format}: not every weight is finite"):
        quantize(rows, format)


@pytest.mark.parametrize(("format", "largest"), [("q8", 65504 * 127), ("q4", 65504)])
def test_what_float16_scales_cannot_hold_is_refused(format: str, largest: float) -> None:
    rows = np.full((1, 32), largest, np.float32)
    quantize(rows, format)
    with pytest.raises(BadRequest, match="too large"):
        quantize(rows * np.float32(1.01), format)
    assert quantize(rows * np.float32(1e20), "int8_plain").q.min() == 127
    with pytest.raises(BadRequest, match="not every weight is finite"):
        quantize(np.full(3, 1e300), format)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 32)])
def test_nothing_to_quantize_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match="nothing to quantize"):
        quantize(np.zeros(shape), "q8")


def test_swapped_halves_of_a_group_would_be_noticed() -> None:
    """The bounds above are worth something: codes in another order break them."""
    rows = normal(4, 64)
    t = quantize(rows, "q4")
    swapped = t.q.reshape(4, 2, 2, 16)[:, :, ::-1].reshape(4, 64)
    wrong = QuantizedTensor(t.shape, swapped, t.scale, t.minimum).dequantize()
    assert squared_error(wrong, rows) > 100 * squared_error(t.dequantize(), rows)
