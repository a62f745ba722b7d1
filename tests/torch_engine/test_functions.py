"""Gradients by hand, against the plain formulas and autograd: values to the bit, gradients by float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pronk.torch_engine import functions
from pronk.torch_engine.attention import _causal
from pronk.torch_engine.functions import linear, product, rms_norm, rotate, swiglu

T = 7


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


def plain_rotation(x: Tensor, rope: Tensor) -> Tensor:
    (cos, sin), (a, b) = rope, x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


ROPE = torch.stack((draw(T, 1, 4).cos(), draw(T, 1, 4).sin()))
EVERY: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "linear": (linear, F.linear, [(T, 6), (5, 6)]),
    "linear with bias": (linear, F.linear, [(T, 6), (5, 6), (5,)]),
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), plain_norm, [(T, 6), (6,)]),
    "swiglu": (swiglu, lambda gate, up: F.silu(gate) * up, [(T, 6), (T, 6)]),
    "rotate": (lambda x: rotate(x, ROPE.to(x.dtype)), lambda x: plain_rotation(x, ROPE.to(x.dtype)), [(T, 3, 8)]),
    "attention": (_causal, plain_attention, [(2, 6, T, 8), (2, 3, T, 8), (2, 3, T, 8)]),
}


@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_those_of_differences(name: str) -> None:
    ours, plain, shapes = EVERY[name]
    inputs = [draw(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]
    torch.testing.assert_close(ours(*inputs), plain(*inputs))
    assert torch.autograd.gradcheck(ours, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_values_with_a_gradient_are_those_without_to_the_bit(name: str, dtype: torch.dtype) -> None:
    ours, _, shapes = EVERY[name]
    inputs = [draw(*shape, dtype=dtype).requires_grad_() for shape in shapes]
    with torch.no_grad():
        expected = ours(*inputs)
    assert torch.equal(ours(*inputs), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EVERY)
def test_gradients_are_as_good_as_autograd_s(name: str, dtype: torch.dtype) -> None:
    """Both are held against float64: ours may be off by no more than twice what autograd's are, and an ulp."""
    ours, plain, shapes = EVERY[name]
    given = [draw(*shape, dtype=dtype) for shape in shapes]

    def gradients(function: Callable[..., Tensor], kind: torch.dtype) -> list[Tensor]:
        inputs = [x.to(kind).requires_grad_() for x in given]
        out = function(*inputs)
        return list(torch.autograd.grad(out, inputs, draw(*out.shape, dtype=dtype).to(out.dtype)))

    exact = gradients(plain, torch.float64)
    rows = zip(gradients(ours, dtype), gradients(plain, dtype), exact, strict=True)
    for mine, theirs, true in rows:
        assert mine.dtype == dtype
        ulp = torch.finfo(dtype).eps * float(true.abs().max())
        assert (mine - true).abs().max() <= 2 * (theirs - true).abs().max() + ulp


@pytest.mark.parametrize("name", EVERY)
def test_a_wrong_gradient_would_be_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, shapes = EVERY[name]
    inputs = [draw(*shape, dtype=torch.float64).requires_grad_() for shape in shapes]

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 1.01 * grad

    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(lambda *args: Doubled.apply(ours(*args)), inputs)


def test_what_is_kept_for_gradients() -> None:
    """x alone, where the weight is trained; a frozen weight keeps none of it; norms keep a number a row besides, and of
    16 bits no copy in 32."""

    def kept(function: Callable[[], Tensor], *known: Tensor) -> int:
        """Bytes, but those of what is `known`."""
        seen: dict[int, int] = {}
        pointers = {tensor.data_ptr() for tensor in known}

        def pack(x: Tensor) -> Tensor:
            if x.data_ptr() not in pointers:
                seen[x.data_ptr()] = x.nbytes
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            function().sum()
        return sum(seen.values())

    x, weight = draw(T, 6).requires_grad_(), draw(5, 6)
    assert kept(lambda: linear(x, weight), weight) == 0
    assert kept(lambda: linear(x, weight.requires_grad_()), weight) == x.nbytes
    scale = draw(6)
    assert kept(lambda: rms_norm(x, scale, 1e-5), scale) == x.nbytes + 4 * T
    assert kept(lambda: swiglu(x, x.detach() + 1), x) == x.nbytes
    half = draw(T, 6, dtype=torch.bfloat16).requires_grad_()
    assert kept(lambda: rms_norm(half, scale.bfloat16(), 1e-5), scale) == half.nbytes + 4 * T + 2 * 6


def test_the_mean_of_squares_is_taken_in_32_bits() -> None:
    """As exact as if in 64, before it is rounded."""
    x, weight = draw(T, 6, dtype=torch.bfloat16), draw(6, dtype=torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, 1e-5), plain_norm(x, weight))


def test_under_autocast_products_are_in_16_bits_and_norms_hand_them_such() -> None:
    x, weight, scale = draw(T, 6).requires_grad_(), draw(5, 6), draw(6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x, weight), F.linear(x.bfloat16(), weight.bfloat16()))
        normed = rms_norm(x, scale, 1e-5)
        with torch.no_grad():
            assert torch.equal(normed, rms_norm(x, scale, 1e-5).bfloat16())


@pytest.mark.skipif(not functions._ONEDNN, reason="this torch has no such product")
@pytest.mark.parametrize("avx2_alone", [False, True])
def test_who_multiplies_in_float32(avx2_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: the other would be right, too, and slow. Of rows that are longer than what becomes of them,
    with AVX2 alone, it is MKL."""
    monkeypatch.setattr(functions, "_AVX2_ALONE", avx2_alone)
    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    x, weight, bias = draw(T, 6).requires_grad_(), draw(5, 6).requires_grad_(), draw(5).requires_grad_()
    with Watch():
        y = linear(x, weight, bias)
    forward = seen.copy()
    with Watch():
        y.sum().backward()
    back = seen[len(forward) :]
    assert [name for name in forward if "mm" in name or "linear" in name] == [
        "aten.addmm.default" if avx2_alone else "mkldnn._linear_pointwise.default"  # 5 of 6
    ]
    # Of x 6 of 5; of the weight 6 of T.
    assert [name for name in back if "mm" in name or "linear" in name] == [
        "mkldnn._linear_pointwise.default",
        "aten.mm.default" if avx2_alone else "mkldnn._linear_pointwise.default",
    ]


@pytest.mark.parametrize("avx2_alone", [False, True])
def test_products_are_products(avx2_alone: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_AVX2_ALONE", avx2_alone)
    a, b = draw(T, 6), draw(6, 5)
    error = (product(a, b) - a.double() @ b.double()).abs().max()
    assert error <= 6 * torch.finfo(torch.float32).eps * float((a.double().abs() @ b.double().abs()).max())
    assert torch.equal(product(a.bfloat16(), b.bfloat16()), a.bfloat16() @ b.bfloat16())
    assert product(a[:0], b).shape == (0, 5)
