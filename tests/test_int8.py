"""The int8 family: codes worked by hand, bounds on errors, and what LLM.int8()'s paper (arXiv 2208.07339) claims."""

from __future__ import annotations

import contextlib
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pronk import _native
from pronk.errors import BadRequest
from pronk.formats.int8 import SCHEMES, Outliers, activation_codes, int8_linear, weight_codes
from pronk.formats.quantize import INT8_THRESHOLD, quantize
from pronk.formats.turn import together, turn

matrices = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=40),
    elements=st.floats(-1000, 1000, width=32, allow_subnormal=True),
)


def f32(*rows: Any) -> np.ndarray:
    return np.array(rows, np.float32)


# -- worked by hand --------------------------------------------------------------------------------------------------


def test_what_shares_a_scale() -> None:
    x = f32([127, -2.5, 0], [1, 0.5, -254])
    assert activation_codes(x, "absmax").scale.tolist() == [[2]]
    assert activation_codes(x, "absmax").q.tolist() == [[64, -1, 0], [0, 0, -127]]  # 63.5 and -1.25, 0.5 and 0.25
    for scheme in ("absmax-row", "int8", "llm-int8"):  # of rows of three nothing is turned
        assert activation_codes(x, scheme).scale.tolist() == [[1], [2]]
        assert activation_codes(x, scheme).q.tolist() == [[127, -2, 0], [0, 0, -127]]
    for scheme in ("absmax", "absmax-row"):
        assert weight_codes(x, scheme).scale.tolist() == [[2]]
    for scheme in ("int8", "llm-int8"):
        assert weight_codes(x, scheme).scale.tolist() == [[1], [2]]


def test_zeropoint_uses_the_whole_range_of_codes() -> None:
    codes = weight_codes(f32([-27, 0, 100, 227]), "zeropoint")
    assert (codes.scale.tolist(), codes.zero) == ([[1]], 100)
    assert codes.q.tolist() == [[-127, -100, 0, 127]]
    assert codes.dequantize().tolist() == [[-27, 0, 100, 227]]


@pytest.mark.parametrize(("values", "zero"), [([10, 127, 254], 127), ([-254, -127, -1], -127)])
def test_zeropoint_keeps_a_zero_where_all_are_of_one_sign(values: list[float], zero: int) -> None:
    codes = weight_codes(f32(values), "zeropoint")
    assert (codes.scale.tolist(), codes.zero) == ([[1]], zero)
    assert codes.dequantize().tolist() == [values]


def test_outliers_are_those_over_the_threshold_and_the_largest_few() -> None:
    x = f32([7, -6.5, 6, 1, 0], [3, -3, 2, 1, 0], [0, 0, 0, 0, 5])
    found = {rule: Outliers(*rule).find(x).tolist() for rule in ((6.0, 0), (math.inf, 1), (6.0, 3), (0.0, 0))}
    assert found[6.0, 0] == [[True, True, False, False, False], [False] * 5, [False] * 5]
    assert found[math.inf, 1] == [[True] + [False] * 4, [True, True, False, False, False], [False] * 4 + [True]]
    assert found[6.0, 3] == [[True] * 3 + [False] * 2, [True] * 3 + [False] * 2, [False] * 4 + [True]]
    assert found[0.0, 0] == (x != 0).tolist()
    assert Outliers(math.inf, 99).find(x).tolist() == (x != 0).tolist()


def test_a_product_by_hand() -> None:
    """With the outlier among them, small activations share a step of 0.5; without it, one of 0.004."""
    x, w = f32([63.5, 0.25, 0.5, -0.125]), f32([1, 127, 0, 1], [0, 0, 127, 127])
    assert (x @ w.T).tolist() == [[95.125, 47.625]]
    assert activation_codes(x, "absmax-row").q.tolist() == [[127, 0, 1, 0]]
    assert int8_linear(x, w, "llm-int8", threshold=math.inf, outliers=0).tolist() == [[63.5, 63.5]]
    rest = activation_codes(np.where(Outliers(6.0, 0).find(x), np.float32(0), x), "llm-int8")
    assert rest.q.tolist() == [[0, 64, 127, -32]]
    by_hand = [63.5 + (64 * 127 - 32) * 0.5 / 127, 0 + (127 * 127 - 32 * 127) * 0.5 / 127]
    assert int8_linear(x, w, "llm-int8", outliers=0)[0] == pytest.approx(by_hand, rel=1e-7)


def test_a_turned_product_by_hand() -> None:
    """What is large in one of four numbers is half as large in each."""
    x, w = f32([2, 0, 0, 0]), f32([1, 1, 1, 1], [0, 0, 0, -8])
    assert activation_codes(x, "int8").q.tolist() == [[127] * 4]
    assert activation_codes(x, "int8").scale[0, 0] == np.float32(1) / np.float32(127)
    assert weight_codes(w, "int8").q.tolist() == [[127, 0, 0, 0], [-127, 127, 127, -127]]
    assert int8_linear(x, w, "int8").tolist() == [[pytest.approx(2, rel=1e-6), 0]]
    assert np.allclose(weight_codes(w, "int8").dequantize(), w, atol=1e-6)


@given(x=matrices)
def test_what_is_turned_twice_is_itself(x: np.ndarray) -> None:
    """As long as before, and off by a rounding or two a stage of its length."""
    block = together(x.shape[1])
    length = np.sqrt((x.astype(np.float64).reshape(-1, block) ** 2).sum(-1, keepdims=True))
    turned = turn(x)
    assert np.allclose(np.sqrt((turned.astype(np.float64).reshape(-1, block) ** 2).sum(-1, keepdims=True)), length)
    off = np.abs(turn(turned).astype(np.float64) - x).reshape(-1, block)
    assert (off <= 2 * (block.bit_length() + 1) * 2.0**-23 * length + 1e-38).all()


# -- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("codes_of", [weight_codes, activation_codes])
@given(x=matrices)
@settings(max_examples=60, deadline=None)
def test_codes_are_within_half_a_step(codes_of: Any, scheme: Any, x: np.ndarray) -> None:
    """And a zero point, itself rounded, may be half a step off at the ends. Quotients round, by 127 parts in 2^23."""
    codes = codes_of(x, scheme)
    assert codes.q.dtype == np.int8
    assert int(np.abs(codes.q.astype(int)).max()) <= 127
    off = np.abs(replace(codes, turned=False).dequantize().astype(np.float64) - (turn(x) if codes.turned else x))
    steps = (1.0 if scheme == "zeropoint" else 0.5) + 254 * 2.0**-22
    tiny = 127 / float(np.finfo(np.float32).max)  # numbers whose 127th part has no inverse
    assert (off <= np.maximum(steps * codes.scale.astype(np.float64), tiny)).all()


def test_vector_wise_weights_are_the_packed_format() -> None:
    w = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    for scheme in ("int8", "llm-int8"):
        codes, packed = weight_codes(w, scheme), quantize(w, scheme)
        assert np.array_equal(codes.q, packed.q)
        assert np.array_equal(codes.scale[:, 0], packed.scale)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_stay_zeros(scheme: Any) -> None:
    x = np.zeros((3, 8), np.float32)
    assert not int8_linear(x, x, scheme).any()
    assert not weight_codes(x, scheme).dequantize().any()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_are_refused(scheme: Any) -> None:
    with pytest.raises(BadRequest, match="not every weight is finite"):
        weight_codes(f32([1, math.nan]), scheme)


@pytest.mark.parametrize("threshold", [-1.0, math.nan, True, "6"])
def test_thresholds_that_are_none(threshold: Any) -> None:
    with pytest.raises(BadRequest, match="int8_threshold must be a number from 0 on"):
        Outliers(threshold=threshold)


@pytest.mark.parametrize("least", [-1, 1.5, True])
def test_counts_that_are_none(least: Any) -> None:
    with pytest.raises(BadRequest, match="int8_outliers must be a whole number from 0 on"):
        Outliers(least=least)


# -- the paper's claims ----------------------------------------------------------------------------------------------

# Six columns of 8192 are outliers in every token, 20 to 60 times as large as the others are, as in the paper's models.
# Rows of weights and tokens are of several sizes, which is what scales of their own are for.
TOKENS, ROWS, WIDTH, SYSTEMATIC = 32, 64, 8192, 6


def activations_and_weights() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    plain = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32)
    with_outliers, columns = plain.copy(), rng.choice(WIDTH, SYSTEMATIC, replace=False)
    with_outliers[:, columns] = rng.uniform(20, 60, (TOKENS, SYSTEMATIC)) * rng.choice([-1, 1], SYSTEMATIC)
    w = rng.standard_normal((ROWS, WIDTH)) * rng.lognormal(0, 0.5, (ROWS, 1)) * WIDTH**-0.5
    return plain, with_outliers, w.astype(np.float32)


def error(x: np.ndarray, w: np.ndarray, scheme: Any, **rule: Any) -> float:
    """Root mean square, against the product in float64."""
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    return float(np.sqrt(((int8_linear(x, w, scheme, **rule) - exact) ** 2).mean()))


def test_each_scheme_of_the_family_is_better_than_the_one_before() -> None:
    _, x, w = activations_and_weights()
    errors = {scheme: error(x, w, scheme, outliers=0) for scheme in SCHEMES}
    vector_wise = error(x, w, "llm-int8", threshold=math.inf, outliers=0)
    assert errors["absmax"] > errors["absmax-row"] > vector_wise > 5 * errors["llm-int8"], errors
    assert vector_wise > 2 * errors["int8"] > errors["llm-int8"], errors


def test_zeropoint_wins_where_activations_are_of_one_sign() -> None:
    """Then absmax leaves half of its codes unused, and its steps are twice as long."""
    x = np.abs(activations_and_weights()[0])
    steps = {scheme: float(activation_codes(x, scheme).scale[0, 0]) for scheme in ("absmax", "zeropoint")}
    assert steps["zeropoint"] == pytest.approx(steps["absmax"] / 2, rel=1e-3)


def test_taking_outliers_out_restores_what_they_cost() -> None:
    """As good as 8 bits are where there are no outliers, but for the rounding of the weights that those meet. The same
    check fails, by far, where outliers stay in."""
    plain, x, w = activations_and_weights()
    columns = Outliers(6.0, 0).find(x).any(0)
    codes = weight_codes(w, "llm-int8").dequantize()
    of_weights = x[:, columns].astype(np.float64) @ (codes - w)[:, columns].T.astype(np.float64)
    allowed = 1.1 * np.sqrt(error(plain, w, "llm-int8", threshold=math.inf, outliers=0) ** 2 + (of_weights**2).mean())
    assert error(x, w, "llm-int8", outliers=0) < allowed
    assert error(x, w, "llm-int8", threshold=math.inf, outliers=0) > 5 * allowed


def test_nearly_all_products_stay_in_8_bits() -> None:
    """ "More than 99.9% of values", as the abstract has it."""
    _, x, _ = activations_and_weights()
    assert Outliers(6.0, 0).find(x).mean() < 0.001
    assert Outliers(6.0, 8).find(x).mean() == 8 / WIDTH


def test_a_threshold_of_zero_leaves_nothing_but_the_weights_rounding() -> None:
    _, x, w = activations_and_weights()
    expected = x.astype(np.float64) @ weight_codes(w, "llm-int8").dequantize().T.astype(np.float64)
    assert np.abs(int8_linear(x, w, "llm-int8", threshold=0.0) - expected).max() < 1e-5


def test_only_absmax_and_zeropoint_depend_on_other_tokens() -> None:
    _, x, w = activations_and_weights()
    x[-1] *= 10
    for scheme in SCHEMES:
        alone, together = int8_linear(x[:1], w, scheme), int8_linear(x, w, scheme)[:1]
        assert np.allclose(alone, together, rtol=1e-12) == (scheme not in ("absmax", "zeropoint"))


# -- the page about it -----------------------------------------------------------------------------------------------


def test_the_examples_of_the_page_print_what_it_says() -> None:
    page = Path(__file__).resolve().parents[1] / "docs" / "how-it-works" / "eight-bits.md"
    examples = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert len(examples) == 2
    names: dict[str, Any] = {}
    for code, expected in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, names)
        assert printed.getvalue() == expected


def test_the_threshold_that_help_and_kernels_name_is_the_one_that_is_used() -> None:
    """--help is printed without importing numpy, and the kernels have a default of their own."""
    from pronk.cli import options, outliers, quantize

    said = f"default: {INT8_THRESHOLD:.1f}"
    for command in (outliers.command, quantize.command, click.command()(options.loading_options(lambda: None))):
        helps = [option.help or "" for option in command.params if isinstance(option, click.Option)]
        assert any(said in one for one in helps)
    for kernel in (_native.matmul, _native.Model.__init__):
        assert f"int8_threshold: float = {INT8_THRESHOLD:.1f}," in kernel.__doc__
