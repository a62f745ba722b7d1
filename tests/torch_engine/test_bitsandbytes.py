"""LLM.int8() against bitsandbytes, the library of the paper's authors: codes, outliers and results, token by token.

bitsandbytes takes x[k] for an outlier where |x[k]| >= threshold, and pronk where it is greater: pronk is given the
number before. bitsandbytes looks at float16 alone: what goes in here is representable in that.
"""

from __future__ import annotations

import math
from dataclasses import replace

import bitsandbytes
import pytest
import torch
from devices import DEVICES
from torch import Tensor, nn

from pronk.formats.int8 import Outliers
from pronk.torch_engine.quantized import Int8Linear, activation_codes, find_outliers, int_product, weight_codes

THRESHOLD = 6.0
AS_THEIRS = Outliers(THRESHOLD - 2.0**-21, least=0)
ULP = 2.0**-23
# Products are scaled by 1 / 127^2, which bitsandbytes writes 6.200124e-05: 18 parts in a million too much.
THEIR_CONSTANT = abs(6.200124e-05 * 127**2 - 1)

SHAPES = [(1, 8, 8), (5, 33, 7), (6, 576, 192), (3, 1536, 31)]


def tensors(tokens: int, inputs: int, outputs: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Activations with a few outliers, one of them 6.0 itself, and a token that has none; weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, inputs, generator=generator)
    x[:, 2] *= 10
    x[0, 1], x[0, -1], x[-1] = 6.0, -40, x[-1].clamp(-5.9, 5.9)
    w = torch.randn(outputs, inputs, generator=generator) * inputs**-0.5
    return x.half().float().to(device), w.half().float().to(device)


def theirs(w: Tensor, threshold: float = THRESHOLD) -> nn.Module:
    linear = bitsandbytes.nn.Linear8bitLt(
        w.shape[1], w.shape[0], bias=False, has_fp16_weights=False, threshold=threshold
    )
    linear.weight = bitsandbytes.nn.Int8Params(w.cpu().clone(), has_fp16_weights=False, requires_grad=False)
    return linear.to(w.device).eval()


def ours(w: Tensor, outliers: Outliers = AS_THEIRS) -> Int8Linear:
    """With their codes of weights: the first test is about those."""
    codes = weight_codes(w, "llm-int8")
    q, _, _ = bitsandbytes.functional.int8_vectorwise_quant(w.half())
    return Int8Linear(replace(codes, q=q), None, "llm-int8", outliers)


def same_codes(x: Tensor, scale: Tensor, ours: Tensor, theirs: Tensor) -> None:
    """127 / max|x| is rounded otherwise in bitsandbytes than here, on GPUs by two ulps: near a tie codes may be one
    step apart."""
    steps = x.double().abs() / scale.double()
    away_from_ties = (steps - steps.floor() - 0.5).abs() > 127 * (4 if x.is_cuda else 2) * ULP
    assert torch.equal(ours[away_from_ties], theirs[away_from_ties])
    assert away_from_ties.double().mean() > 0.95  # numbers in float16 are near ties more often than others
    assert (ours.int() - theirs.int()).abs().max() <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_weights_get_the_same_codes_and_scales(shape: tuple[int, int, int], device: str) -> None:
    _, w = tensors(*shape, device)
    codes, largest, _ = bitsandbytes.functional.int8_vectorwise_quant(w.half())
    found = weight_codes(w, "llm-int8")
    steps = largest.new_full((), 127)  # instead of dividing by a number of Python, a GPU multiplies with its inverse
    assert torch.equal(found.scale[:, 0], largest / steps)
    same_codes(w, found.scale, found.q, codes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_gets_the_same_codes_scale_and_outliers(shape: tuple[int, int, int], device: str) -> None:
    for token in tensors(*shape, device)[0].split(1):
        codes, largest, columns = bitsandbytes.functional.int8_vectorwise_quant(token.half(), threshold=THRESHOLD)
        apart = find_outliers(token, AS_THEIRS)
        assert apart.columns.tolist() == columns.tolist()
        rest = token.masked_fill(apart.mask, 0)
        found = activation_codes(rest, "llm-int8")
        assert torch.equal(found.scale[:, 0], largest / largest.new_full((), 127))
        same_codes(rest, found.scale, found.q, codes)


@pytest.mark.parametrize("device", DEVICES)
def test_sums_of_products_are_the_same(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (5, 700), generator=generator, dtype=torch.int8)
    b = torch.randint(-127, 128, (9, 700), generator=generator, dtype=torch.int8)
    a, b = a.to(device), b.to(device)
    assert torch.equal(int_product(a, b), torch.ops.bitsandbytes.int8_linear_matmul(a, b))


def allowed(x: Tensor, w: Tensor) -> Tensor:
    """Of one token's result: their constant, and float32's roundings: six of the part in 8 bits, and of the part in
    floats two more than there are terms, on either side. On GPUs theirs rounds the part in 8 bits to float16."""
    apart, weights = find_outliers(x, AS_THEIRS), ours(w).dequantized().double().abs()
    in_floats = x.masked_fill(~apart.mask, 0).double().abs() @ weights.T
    in_8_bits = x.masked_fill(apart.mask, 0).double().abs() @ weights.T
    to_half = 2.0**-11 if x.is_cuda else 0.0
    least = 2.0**-24 if x.is_cuda else 1e-30
    return in_8_bits * (THEIR_CONSTANT + 6 * ULP + to_half) + in_floats * 2 * (len(apart.columns) + 2) * ULP + least


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_gets_the_same_result(shape: tuple[int, int, int], device: str) -> None:
    x, w = tensors(*shape, device)
    mine, other = ours(w), theirs(w)
    for token in x.split(1):
        off = (mine(token).double() - other(token).double()).abs()
        assert (off <= allowed(token, w)).all(), f"worst: {(off / allowed(token, w)).max()} times what is allowed"


def test_the_comparison_fails_where_outliers_stay_in() -> None:
    x, w = tensors(6, 576, 192)
    token = x[:1]
    wrong = (ours(w, Outliers(math.inf, 0))(token) - theirs(w)(token)).double().abs()
    assert (wrong > 10 * allowed(token, w)).double().mean() > 0.9


@pytest.mark.parametrize("device", DEVICES)
def test_without_a_threshold_a_batch_gets_the_same_result(device: str) -> None:
    """Then tokens are quantized one by one in bitsandbytes, too."""
    x, w = tensors(6, 576, 192, device)
    off = (ours(w, Outliers(math.inf, 0))(x) - theirs(w, threshold=0.0)(x)).double().abs()
    products = x.double().abs() @ ours(w).dequantized().double().abs().T
    to_half = 2.0**-11 if x.is_cuda else 0.0
    assert (
        off <= 1.01 * products * (THEIR_CONSTANT + 6 * ULP + to_half) + to_half * 2.0**-13
    ).all()  # codes of x may lie above x


def test_only_there_do_neighbours_change_a_token() -> None:
    """A column with an outlier in any token leaves the codes of all of them; here each token is judged alone."""
    x, w = tensors(6, 576, 192)
    quiet = x[-1:]  # has no outliers of its own
    mine, other = ours(w), theirs(w)
    rounding = 2 * ULP * (quiet.double().abs() @ w.double().abs().T)
    assert ((mine(x)[-1:] - mine(quiet)).double().abs() <= rounding).all()
    assert ((other(x)[-1:] - other(quiet)).double().abs() > rounding).double().mean() > 0.9
