"""Products of codes by kernels, against float64 of the numbers they stand for: by the interpreter, and on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pronk.torch_engine.codes import Codes
from pronk.torch_engine.functions import rms_norm, swiglu
from pronk.torch_engine.gpu.codes import FEW, CodesProduct, joined, prepare

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of the interpreter: a GPU has none
# Rows of x, of the matrix, columns. One row, a few, many; a group filled up, one group, one chunk more than a block;
# rows that are no multiple of a block, nor of a strip.
SHAPES = [(1, 30, 200), (1, 8, 32), (1, 4, 4128), (1, 300, 64), (3, 70, 160), (17, 36, 1056), (FEW + 1, 30, 72)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = ["q8", "q4", "q4_0"]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> torch.device:
    found = torch.cuda.is_available()
    if (request.param == "cuda") != found:
        pytest.skip("no CUDA GPU" if not found else "kernels run on the GPU here")
    return torch.device("cuda" if found else "cpu")


def codes(kind: str, n: int, k: int, seed: int = 0) -> Codes:
    draw, groups = torch.Generator().manual_seed(seed), -(-k // 32)
    scale = (torch.rand(n, groups, generator=draw) * 0.01 + 1e-3).half()
    scale[1::7, ::2] = 0
    if kind == "q8":
        return Codes(k, torch.randint(-127, 128, (n, groups, 32), generator=draw, dtype=torch.int8), scale)
    q = torch.randint(0, 256, (n, groups, 16), generator=draw, dtype=torch.uint8)
    if kind == "q4_0":
        return Codes(k, q, scale, origin=8)
    return Codes(k, q, scale, (-7.3 * scale.float() + 0.01).half())


def skips(x: Tensor) -> None:
    if not x.is_cuda and 1 < len(x) <= FEW and x.dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter takes bfloat16 in products for whole numbers")


def near(found: Tensor, x: Tensor, weight: Tensor, expected: Tensor) -> bool:
    """Terms are rounded to x's type, the weights of a few rows, too; their sums in float32; and the result."""
    eps = torch.finfo(x.dtype).eps
    size = x.double().norm(dim=1, keepdim=True) * weight.abs().amax(1)  # of a sum of terms without order
    more = 4 + x.shape[1] ** 0.5 if x.dtype == torch.float32 else 4
    return bool(((found.double() - expected).abs() <= eps * (more * size + 3 * expected.abs())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", KINDS)
def test_products(kind: str, shape: tuple[int, int, int], dtype: torch.dtype, where: torch.device) -> None:
    t, n, k = shape
    matrix = codes(kind, n, k)
    weight = matrix.floats(slice(None)).double()
    product = CodesProduct(matrix.to(where), None)
    x = torch.randn(t, k).to(where, dtype)
    skips(x)
    expected = x.cpu().double() @ weight.t()
    assert near(product(x).cpu(), x.cpu(), weight, expected)
    broken = replace(matrix, scale=1.5 * matrix.scale)
    assert not near(CodesProduct(broken.to(where), None)(x).cpu(), x.cpu(), weight, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 30, 200), (1, 16, 4128), (3, 72, 160), (17, 36, 1056), (FEW + 1, 30, 72)])
def test_what_stands_before_and_behind(shape: tuple[int, int, int], dtype: torch.dtype, where: torch.device) -> None:
    t, n, k = shape
    matrix = codes("q4", n, k)
    weight, bias = matrix.floats(slice(None)).double(), torch.randn(n)
    product = CodesProduct(matrix.to(where), bias.to(where, dtype))
    x, norm, residual = torch.randn(t, k).to(dtype), (torch.rand(k) + 0.5).to(dtype), torch.randn(t, n).to(dtype)
    skips(x.to(where))
    h = rms_norm(x, norm, 1e-5)
    y = h.double() @ weight.t() + bias.to(dtype).double()
    eps = torch.finfo(dtype).eps
    for gated, added, expected in (
        (False, None, y),
        (False, residual, y + residual),
        (True, None, swiglu(*y.chunk(2, 1))),
    ):
        given = None if added is None else added.to(where)
        found = product(x.to(where), norm=(norm.to(where), 1e-5), residual=given, gated=gated).cpu()
        # h is rounded where it is computed apart, and is not where it is a part of the product.
        allowed = 4 * eps * (y.abs().max() ** (2 if gated else 1) + h.double().abs().max()) + 1e-5
        assert (found.double() - expected).abs().max() <= allowed
    plain = product(x.to(where), norm=(norm.to(where), 1e-5)).cpu()
    assert not torch.equal(plain, product(x.to(where)).cpu())


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_what_they_were(kind: str, where: torch.device) -> None:
    matrix = codes(kind, 21, 200)
    product = CodesProduct(matrix.to(where), None)
    for part in (slice(None), slice(3, 20)):
        found = product.codes(part)
        assert torch.equal(found.q.cpu(), matrix.q[part])
        assert torch.equal(found.scale.cpu(), matrix.scale[part])
        assert (found.minimum is None) == (matrix.minimum is None)
        if found.minimum is not None and matrix.minimum is not None:
            assert torch.equal(found.minimum.cpu(), matrix.minimum[part])
    assert torch.equal(product.floats(slice(3, 20), torch.float32).cpu(), matrix.floats(slice(3, 20)))
    nbytes = 24 * 7 * (2 if kind != "q4" else 4) + 21 * 7 * (32 if kind == "q8" else 16)
    assert sum(tensor.nbytes for tensor in product.tensors) == nbytes
    room = prepare(product.words.device, torch.float32)  # whose name has a number, where a GPU's need not
    assert product.floats(slice(0, 2), torch.float32).data_ptr() == room.data_ptr()


def test_several_matrices_are_one(where: torch.device) -> None:
    parts = [codes("q4", n, 96, seed=n) for n in (16, 8, 5)]
    x = torch.randn(1, 96)
    found = CodesProduct(joined(parts).to(where), None)(x.to(where))
    for part, own in zip(parts, found.cpu().split([16, 8, 5], 1), strict=True):
        assert torch.allclose(own, x @ part.floats(slice(None)).t(), atol=1e-5)
    mixed = [codes("q4", 8, 96), codes("q4_0", 8, 96)]
    expected = torch.cat([part.floats(slice(None)) for part in mixed])
    assert torch.equal(joined(mixed).floats(slice(None)), expected)
    with pytest.raises(ValueError, match="several kinds"):
        joined([codes("q4", 8, 96), codes("q8", 8, 96)])


def test_a_matrix_larger_than_a_piece(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pronk.torch_engine.gpu.codes._PIECE", 7 * 72)
    prepare.cache_clear()
    matrix, x = codes("q4", 30, 72), torch.randn(FEW + 2, 72)
    found = CodesProduct(matrix.to(where), None)(x.to(where))
    prepare.cache_clear()
    assert torch.allclose(found.cpu(), x @ matrix.floats(slice(None)).t(), atol=1e-5)
