"""Rounding in view of what a product is fed: what is written decodes, and what is promised of its error holds."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import plain_blocks
import plain_gptq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pronk import _native
from pronk.calibrate import gptq, packing
from pronk.calibrate.grids import RULES
from pronk.checkpoint.containers import gguf_blocks

Floats = NDArray[np.float32]
KINDS = sorted(RULES)


def weights(rows: int, columns: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) / 8


def fed(tokens: int, columns: int, seed: int) -> Floats:
    """Inputs that hang together, as those of a model do: most of them lies in a few directions."""
    mixing = np.random.default_rng(7).standard_normal((columns, columns)) / np.arange(1, columns + 1) ** 0.7
    return (np.random.default_rng(seed).standard_normal((tokens, columns)) @ mixing.T).astype(np.float32)


@cache
def gram(columns: int) -> Floats:
    x = fed(900, columns, 9)
    return x.T @ x


def decoded(made: gptq.Rounded) -> Floats:
    return gguf_blocks.decode(made.kind, packing.blocks(made))


def meant(made: gptq.Rounded) -> Floats:
    """What codes, scales and minima say, without any bytes."""
    rule = RULES[made.kind]
    groups = rule.block // rule.group
    step, low = (np.repeat(of.astype(np.float32), groups, axis=1) for of in (made.d, made.dmin))
    if rule.scales:
        step, low = step * made.n, -(low * made.m)
    return np.repeat(step, rule.group, axis=1) * made.codes + np.repeat(low, rule.group, axis=1)


def error(w: Floats, made: Floats, x: Floats) -> float:
    """Of the product."""
    return float(np.square(x.astype(np.float64) @ (w - made).T).sum())


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.floats(-6, 3), shift=st.sampled_from([0.0, 0.5, -2.0]))
def test_blocks_say_what_codes_and_scales_do(kind: str, seed: int, size: float, shift: float) -> None:
    w = (weights(3, 512, seed) + np.float32(shift)) * np.float32(10**size)
    w[1, :300] = 0
    made = gptq.rounded(w, None, kind)
    found = packing.blocks(made)
    assert found.shape == (3, 512 // RULES[kind].block * gguf_blocks.BLOCK_TYPES[kind].nbytes)
    np.testing.assert_array_equal(gguf_blocks.decode(kind, found), meant(made))
    alone = [plain_blocks.decode(kind, row.tobytes()) for row in found]
    # Three roundings to float32, of a scale, of a product and of a difference, where the other has float64.
    np.testing.assert_allclose(meant(made), alone, rtol=0, atol=3 * 2**-23 * max(1e-30, np.abs(w).max()) * 2)


@pytest.mark.parametrize("kind", KINDS)
def test_plain_rounding_is_nearest_and_no_worse_than_ggml(kind: str) -> None:
    import gguf

    w = weights(64, 512)
    found = decoded(gptq.rounded(w, None, kind))
    own = np.square(w - found).mean()
    type_ = getattr(gguf.GGMLQuantizationType, kind)
    try:
        theirs = gguf.quants.dequantize(gguf.quants.quantize(w, type_), type_)
    except NotImplementedError:  # the K types, which only ggml's C code rounds to
        # A grid of 2^n levels over what a group spans, which is under 6 standard deviations, rounded to nearest.
        assert own < (6 / 8 / (2 ** RULES[kind].bits - 1)) ** 2 / 12
    else:
        assert own <= np.square(w - theirs).mean()


def test_numbers_that_lie_as_weights_do_are_nearer() -> None:
    w = weights(64, 512)
    lost = {kind: np.square(w - decoded(gptq.rounded(w, None, kind))).mean() for kind in KINDS}
    assert lost["IQ4_NL"] < 0.9 * lost["Q4_0"]
    assert lost["IQ4_XS"] < 1.2 * lost["Q4_K"]


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 2**32), size=st.sampled_from([1e-9, 1e-4, 1.0, 900.0]), carried=st.booleans())
def test_every_instruction_set_gives_the_bits_of_numpy(
    kind: str, isa: str, seed: int, size: float, carried: bool
) -> None:
    w = weights(21, 512, seed) * np.float32(size)  # rows that do not fill the last lanes
    w[0], w[1, :40], w[2] = 0, 0, np.abs(w[2])
    upper = gptq.spread(gram(512), 0.05) if carried else None
    expected = plain_gptq.rounded(w, upper, kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "round_rows", partial(_native.round_rows, isa=isa))
        found = gptq.rounded(w, upper, kind)
    for name in ("codes", "d", "dmin", "n", "m"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_that_are_all_alike_make_plain_rounding(kind: str) -> None:
    w = weights(5, 256)
    upper = gptq.spread(np.eye(256, dtype=np.float32) * 3, 0.5)
    plain, found = gptq.rounded(w, None, kind), gptq.rounded(w, upper, kind)
    np.testing.assert_array_equal(decoded(plain), decoded(found))


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_inputs_that_were_not_seen_are_nearer(kind: str) -> None:
    w, x = weights(48, 512), fed(4096, 512, 1)
    upper = gptq.spread(x.T @ x, 0.01)
    unseen = fed(512, 512, 2)
    plain = error(w, decoded(gptq.rounded(w, None, kind)), unseen)
    found = error(w, decoded(gptq.rounded(w, upper, kind)), unseen)
    assert found < 0.6 * plain
    # And the other way round: errors that are carried by what other columns are fed do harm.
    other = gptq.spread(np.roll(x.T @ x, (256, 256), (0, 1)), 0.01)
    wrong = error(w, decoded(gptq.rounded(w, other, kind)), unseen)
    assert wrong > plain


def test_the_triangle_is_the_inverses(monkeypatch: pytest.MonkeyPatch) -> None:
    x = fed(1000, 300, 3)
    h = (x.T @ x).astype(np.float64)
    upper = gptq.spread(h.astype(np.float32), 0.1).astype(np.float64)
    damped = h / (np.trace(h) / 300) + 0.1 * np.eye(300)
    assert not np.tril(upper, -1).any()
    np.testing.assert_allclose(
        upper.T @ upper @ damped, np.eye(300), atol=1e-4
    )  # U is rounded to float32, H's condition 1e3
    for whole in (gptq._WHOLE, 100):
        monkeypatch.setattr(gptq, "_WHOLE", whole)
        assert gptq.left(h.astype(np.float32), 0.1) == pytest.approx(np.mean(np.diag(upper) ** -2), rel=1e-5)


def test_inputs_that_are_nothing_and_rows_that_are_nothing() -> None:
    np.testing.assert_array_equal(gptq.spread(np.zeros((64, 64), np.float32), 0.01), np.eye(64))
    assert gptq.left(np.zeros((64, 64), np.float32), 0.01) == 1
    for kind in KINDS:
        assert not decoded(gptq.rounded(np.zeros((2, 256), np.float32), None, kind)).any()


@pytest.mark.parametrize("kind", KINDS)
def test_each_row_is_rounded_by_itself(kind: str) -> None:
    w, x = weights(1100, 256), fed(600, 256, 4)  # more rows than a piece has
    upper = gptq.spread(x.T @ x, 0.1)
    whole = packing.blocks(gptq.rounded(w, upper, kind))
    w[[5, 1030]] = 1
    changed = packing.blocks(gptq.rounded(w, upper, kind))
    assert np.flatnonzero((whole != changed).any(axis=1)).tolist() == [5, 1030]
