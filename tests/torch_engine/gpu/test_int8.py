"""Products in 8 bits by kernels, against Int8Linear and formats.int8 in float64: by the interpreter, and on a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pronk.formats import int8
from pronk.formats.int8 import Outliers, Scheme
from pronk.torch_engine.functions import rms_norm, swiglu
from pronk.torch_engine.gpu import activation_codes as kernels
from pronk.torch_engine.gpu import int8 as products
from pronk.torch_engine.gpu import int8_many
from pronk.torch_engine.gpu.activation_codes import COMMON
from pronk.torch_engine.gpu.int8 import FEW, Int8Product
from pronk.torch_engine.quantized import (
    Int8Codes,
    Int8Linear,
    activation_codes,
    find_outliers,
    turn,
    weight_codes,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter: a GPU has none
ULP = 2.0**-23
# A row, a few, many; odd columns, less than a tile, more than one; blocks of a turn of 1, 2, 64, 256.
SHAPES = [(1, 33, 7), (1, 4352, 24), (2, 576, 50), (7, 130, 31), (FEW + 1, 1, 5), (FEW + 3, 320, 70)]
RULES = [
    Outliers(),
    Outliers(6.0, 0),
    Outliers(math.inf, 3),
    Outliers(0.0, 0),
    Outliers(math.inf, 0),
    Outliers(1.0, 40),
]
KINDS: list[tuple[Scheme, bool]] = [("llm-int8", False), ("int8", True), ("int8", False), ("absmax-row", False)]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> torch.device:
    found = torch.cuda.is_available()
    if (request.param == "cuda") != found:
        pytest.skip("no CUDA GPU" if not found else "kernels run on the GPU here")
    return torch.device("cuda" if found else "cpu")


def hostile(tokens: int, inputs: int) -> Tensor:
    """Rows of normal numbers, and beside them such as kernels may stumble over."""
    x = torch.from_numpy(np.random.default_rng(tokens).standard_normal((tokens, inputs)).astype(np.float32))
    x[:, inputs // 2] *= 20
    x[:, inputs // 3] *= 1e4
    for row, value in ((1, 0.0), (2, 1e-40), (3, 2.5), (4, -7.0)):
        x[row : row + 1] = value
    x[5:6] *= 1e-30
    return x


def weights(outputs: int, inputs: int, scheme: Scheme, turned: bool, where: torch.device) -> Int8Codes:
    w = torch.from_numpy(np.random.default_rng(outputs).standard_normal((outputs, inputs)).astype(np.float32))
    w[3:4] = 0
    codes = weight_codes(w, "llm-int8" if scheme == "int8" and not turned else scheme)
    return Int8Codes(codes.q.to(where), codes.scale.to(where), turned=turned)


def both(
    weight: Int8Codes, scheme: Scheme, outliers: Outliers, bias: Tensor | None = None
) -> tuple[Int8Product, Int8Linear]:
    linear = Int8Linear(weight, None if bias is None else nn.Parameter(bias), scheme, outliers)
    return Int8Product(weight.q, weight.scale, bias, scheme, outliers, weight.turned), linear


def allowed(x: Tensor, linear: Int8Linear) -> Tensor:
    """float32 sums of a row's terms in another order: roundings grow as a root of how many."""
    given = turn(x.float()) if linear.turned else x.float()
    sizes = given.double().abs() @ (linear.scale.double() * linear.q.double().abs()).T
    return sizes * (4 + x.shape[1] ** 0.5) * ULP + 1e-37


def near(found: Tensor, wanted: Tensor, bound: Tensor) -> None:
    off = (found.double() - wanted.double()).abs()
    assert (off <= bound).all(), f"worst: {(off / bound).max()} times what is allowed"


# -- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 4352, 1), (6, 1, 1), (6, 130, 1), (6, 320, 1)])
def test_codes_and_outliers_are_those_of_the_plain_layer(
    shape: tuple[int, int, int], dtype: torch.dtype, where: torch.device
) -> None:
    tokens, inputs, _ = shape
    x = hostile(tokens, inputs).clamp(-6e4, 6e4).to(where, dtype)
    if dtype == torch.bfloat16 and where.type == "cpu":
        x[2:3] = 2e-38  # the interpreter takes a bfloat16 below the normal ones for zero
    for outliers, turned in [*((rule, False) for rule in RULES), (None, False), (None, True)]:
        given = turn(x.float()) if turned else x.float()
        apart = find_outliers(given, outliers).mask if outliers else torch.zeros_like(given, dtype=torch.bool)
        wanted = activation_codes(given.masked_fill(apart, 0), "llm-int8")
        many = kernels.of_many(x, outliers, turned)
        assert torch.equal(many.q, wanted.q)
        assert torch.equal(many.scale, wanted.scale[:, 0])
        if outliers:
            assert many.count.tolist() == apart.sum(1).tolist()
            for token in range(tokens):
                columns = apart[token].nonzero()[:, 0]
                if len(columns) > kernels.LISTED:  # nobody reads such a list
                    continue
                listed, order = many.column[token, : len(columns)].sort()
                assert listed.tolist() == columns.tolist()
                assert torch.equal(many.value[token, : len(columns)][order], given[token, columns])
                assert not many.value[token, len(columns) :].any()
        few, scale = kernels.of_few(x, None, outliers, turned)
        assert torch.equal(few[:tokens], wanted.q.to(dtype))
        assert torch.equal(scale, wanted.scale[:, 0])
        assert outliers is None or torch.equal(few[tokens:], x.masked_fill(~apart, 0))
        row = kernels.of_a_row(x[:1], None, outliers, turned)
        assert torch.equal(row, torch.where(apart, given, wanted.scale * wanted.q)[:1])


# -- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_is_the_plain_layers(
    shape: tuple[int, int, int], kind: tuple[Scheme, bool], where: torch.device
) -> None:
    tokens, inputs, outputs = shape
    x = hostile(tokens, inputs).to(where)
    for rule in RULES if kind[0] == "llm-int8" else RULES[:1]:
        product, linear = both(weights(outputs, inputs, *kind, where), kind[0], rule)
        near(product(x), linear(x), allowed(x, linear))


@pytest.mark.parametrize("tokens", [1, 3, FEW + 1])
def test_a_product_is_numpys(tokens: int, where: torch.device) -> None:
    w = np.random.default_rng(0).standard_normal((40, 192)).astype(np.float32)
    x = hostile(tokens, 192)
    product, linear = both(weight_codes(torch.from_numpy(w).to(where), "llm-int8"), "llm-int8", Outliers())
    wanted = torch.from_numpy(int8.int8_linear(x.numpy(), w, "llm-int8", 6.0, 6)).to(where)
    near(product(x.to(where)), wanted, allowed(x.to(where), linear))
    with pytest.raises(AssertionError, match="worst"):
        near(product(x.to(where)).roll(1, 1), wanted, allowed(x.to(where), linear))


@pytest.mark.parametrize("way", ["columns", "dense", "cublas"])
def test_many_rows_have_several_ways(way: str, where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of outliers where they hold them, all as a matrix where not; sums of our own, or torch's."""
    monkeypatch.setattr(int8_many, "COPIED_FROM", 10_000 if way == "dense" else 1)
    monkeypatch.setattr(int8_many, "OWN_KERNEL", way != "cublas")
    x = hostile(FEW + 8, 320).to(where)
    for rule in (Outliers(6.0, 6), Outliers(0.0, 0)):
        product, linear = both(weights(72, 320, "llm-int8", False, where), "llm-int8", rule)
        near(product(x), linear(x), allowed(x, linear))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("copied_from", [1, 10_000])
@pytest.mark.parametrize(("columns", "least"), [(0, 0), (3, 0), (6, 6), (COMMON, 0), (COMMON + 1, 0), (COMMON + 1, 6)])
def test_outliers_in_a_few_columns_are_a_product_of_their_own(
    columns: int, least: int, copied_from: int, dtype: torch.dtype, where: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models have them that are trained: up to so many columns; and beyond, and where there are none."""
    monkeypatch.setattr(int8_many, "COPIED_FROM", copied_from)
    monkeypatch.setattr(products, "SOME", 1)  # so that 16-bit types come here, too
    k, large = 1024, [3 + 9 * n for n in range(columns)]  # of an aligned eight some have two
    x = torch.from_numpy(np.random.default_rng(1).uniform(-5, 5, (FEW + 8, k)).astype(np.float32))
    x[:, large] = x[:, large].abs() * 40 + 7  # larger than all others
    x = x.to(where, dtype)
    rule = Outliers(6.0, least)
    common = kernels.of_many(x, rule, False).common
    assert common is not None
    assert int(common[COMMON]) == columns
    assert sorted(common[: min(columns, COMMON)].tolist()) == large[:COMMON]
    product, linear = both(weights(72, k, "llm-int8", False, where), "llm-int8", rule)
    rounding = torch.finfo(dtype).eps * linear(x.float()).double().abs() if dtype != torch.float32 else 0
    near(product(x), linear(x.float()), allowed(x, linear) + rounding)


@pytest.mark.parametrize("places", [(8, 9, 100, 300, 500, 700), (8, 90, 100, 300, 500, 700), range(1024)])
def test_the_largest_of_a_row_wherever_they_lie(places: Sequence[int], where: torch.device) -> None:
    """Each eight numbers are first asked for their largest: two of a row's largest may lie in one, or all numbers be
    wanted."""
    x = torch.from_numpy(np.random.default_rng(2).uniform(0.1, 1, (4, 1024)).astype(np.float32)).to(where)
    x[:, list(places)] = torch.arange(2.0, 2 + len(places), device=where)
    x = x.half()
    codes = kernels.of_many(x, Outliers(math.inf, len(places)), False)
    assert codes.count.tolist() == [len(places)] * 4
    assert codes.common is not None
    assert int(codes.common[COMMON]) == len(places)
    if len(places) <= kernels.LISTED:
        assert codes.column[:, : len(places)].sort().values.tolist() == [sorted(places)] * 4
        assert torch.equal(codes.value[:, : len(places)], x.float().gather(1, codes.column[:, : len(places)].long()))
    assert torch.equal(codes.least, x[:, list(places)].float().amin(1))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, FEW + 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_stands_before_and_behind(dtype: torch.dtype, tokens: int, gated: bool, where: torch.device) -> None:
    if dtype == torch.bfloat16 and where.type == "cpu" and tokens > 1:
        pytest.skip("Triton's interpreter takes bfloat16 for whole numbers in a product")
    generator = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(where, dtype)

    x, norm, bias, residual = some(tokens, 192), some(192), some(36).float(), some(tokens, 36)
    for kind in KINDS[:2]:
        product, linear = both(weights(36, 192, *kind, where), kind[0], Outliers(2.0, 3), bias)
        with torch.no_grad():
            y = linear(rms_norm(x, norm, 1e-5)).to(dtype)
            wanted = swiglu(*y.chunk(2, 1)) if gated else y + residual
            found = product(x, norm=(norm, 1e-5), **({"gated": True} if gated else {"residual": residual}))
        assert found.dtype == dtype
        # Kernels sum a norm's squares up in another order: in its last place it differs, and so may a code, by one.
        code = float(linear.scale.max()) * 127 * 4 / 127
        bound = torch.finfo(dtype).eps * 4 * wanted.double().abs() + code * (1 + wanted.double().abs()) * 0.03
        shared = tokens > FEW and dtype != torch.float32  # outliers have eleven bits there
        near(found, wanted, bound * (16 if shared else 1) * (8 if where.type == "cpu" else 1))  # which cuts off


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("tokens", [1, 6, FEW + 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_wrong_number_shows_in_its_row_alone(
    bad: float, tokens: int, kind: tuple[Scheme, bool], where: torch.device
) -> None:
    x = hostile(tokens, 96).to(where)
    for rule in (Outliers(), Outliers(math.inf, 0)):
        product, _ = both(weights(20, 96, *kind, where), kind[0], rule)
        right = product(x)
        spoilt = x.clone()
        spoilt[0, 5] = bad
        found = product(spoilt)
        assert not found[0].isfinite().any()
        assert torch.equal(found[1:], right[1:])


def test_a_row_does_not_depend_on_the_others(where: torch.device) -> None:
    x = hostile(FEW + 9, 320).to(where)
    product, _ = both(weights(40, 320, "llm-int8", False, where), "llm-int8", Outliers())
    for rows in (FEW, FEW + 9):
        together = product(x[:rows])
        rolled = product(x[:rows].roll(3, 0))
        if where.type == "cuda":
            assert torch.equal(rolled, together.roll(3, 0))
        else:  # numpy multiplies a row by what stands beside it
            torch.testing.assert_close(rolled, together.roll(3, 0))


def test_no_rows_and_a_scheme_without_kernels(where: torch.device) -> None:
    weight = weights(6, 32, "llm-int8", False, where)
    product, _ = both(weight, "llm-int8", Outliers())
    assert product(torch.zeros(0, 32, device=where)).shape == (0, 6)
    assert product(torch.zeros(0, 32, device=where), gated=True).shape == (0, 3)
    with pytest.raises(ValueError, match="no kernel has absmax"):
        both(weight, "absmax", Outliers())


@pytest.mark.gpu
def test_codes_and_products_are_those_of_bitsandbytes_on_the_card() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    theirs = pytest.importorskip("bitsandbytes")
    w = (torch.randn(192, 576, generator=torch.Generator().manual_seed(0)) / 24).half().float().cuda()
    x = hostile(6, 576)[:1].clamp(-6e4, 6e4).half().cuda()
    q, largest, _ = theirs.functional.int8_vectorwise_quant(w.half())
    codes = weight_codes(w, "llm-int8")
    assert (codes.q.int() - q.int()).abs().max() <= 1  # 127 / max|w| is rounded otherwise there: a tie may go its way
    assert torch.equal(codes.scale[:, 0], largest / largest.new_full((), 127))
    linear = theirs.nn.Linear8bitLt(576, 192, bias=False, has_fp16_weights=False, threshold=6.0)
    linear.weight = theirs.nn.Int8Params(w.half().cpu(), has_fp16_weights=False, requires_grad=False)
    wanted = linear.cuda().eval()(x)
    product = Int8Product(q, codes.scale, None, "llm-int8", Outliers(6.0, 0), False)
    bound = 4 * 2.0**-11 * (x.double().abs() @ w.double().abs().T)
    near(product(x), wanted, bound)
