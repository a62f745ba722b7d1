"""Kernels of training, by Triton's interpreter where there is no GPU, against the plain formulas and autograd."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="kernels are Triton's")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("there is no GPU, and no interpreter was asked for", allow_module_level=True)

from tiny import tiny_config  # noqa: E402

from pronk.checkpoint.adapter import LoraConfig  # noqa: E402
from pronk.engine.batch import Batch, Run  # noqa: E402
from pronk.torch_engine import attention, functions  # noqa: E402
from pronk.torch_engine.batch import Rows, TorchBatch  # noqa: E402
from pronk.torch_engine.codes import Codes  # noqa: E402
from pronk.torch_engine.codes_linear import CodesLinear  # noqa: E402
from pronk.torch_engine.gpu import gradients, launch  # noqa: E402
from pronk.torch_engine.model import Llama  # noqa: E402
from pronk.train import lora, optimizers  # noqa: E402
from pronk.train.objectives.loss import cross_entropy, log_likelihoods  # noqa: E402

WHERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16]
T = 7


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "INTERPRETED", not torch.cuda.is_available())
    monkeypatch.setattr(gradients, "_PROGRAMS", 3)


def plainly(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(launch, "_TYPES", ())
    return monkeypatch


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(WHERE, dtype)


def rope(heads: int, half: int) -> Tensor:
    angles = draw(T, 1, half)
    return torch.stack((angles.cos(), angles.sin()))


def stream(x: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
    """What a block makes of x, its norm and what is added: all gradients there are."""
    x, normed = functions.added_and_normed(x, None, weight, 1e-5)
    x, again = functions.added_and_normed(x, delta * normed.to(delta.dtype), weight, 1e-5)
    return x * again.float().sin()


EVERY: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "norm": (lambda x, w: functions.rms_norm(x, w, 1e-5), [(T, 48), (48,)]),
    "norm of an odd width": (lambda x, w: functions.rms_norm(x, w, 1e-5), [(T, 1000), (1000,)]),
    "norm of many rows": (lambda x, w: functions.rms_norm(x, w, 1e-5), [(20, 8), (8,)]),
    "sums": (stream, [(T, 48), (T, 48), (48,)]),
    "swiglu": (functions.swiglu, [(T, 300), (T, 300)]),
    "rotate": (lambda x: functions.rotate(x, rope(3, 4)), [(T, 3, 8)]),
    "rotate a part": (lambda x: functions.rotate(x[:, 1:], rope(3, 6)), [(T, 6, 12)]),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", EVERY)
def test_kernels_are_as_good_as_formulas(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients: off float64 by no more than twice what the formulas are, and some ulps."""
    function, shapes = EVERY[name]
    given = [draw(*shape, dtype=dtype) for shape in shapes]

    def found(kind: torch.dtype) -> list[Tensor]:
        inputs = [x.to(kind).requires_grad_() for x in given]
        out = function(*inputs)
        return [out, *torch.autograd.grad(out, inputs, draw(*out.shape, dtype=dtype).to(out.dtype))]

    fused, exact = found(dtype), found(torch.float64)
    plain = [x.detach() for x in found_plainly(found, dtype, monkeypatch)]
    for ours, theirs, right in zip(fused, plain, exact, strict=True):
        assert ours.dtype == theirs.dtype
        ulp = torch.finfo(dtype).eps * right.abs().max()
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + 4 * ulp


def found_plainly(found: Callable[[torch.dtype], Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        plainly(patched)
        return found(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("function", [cross_entropy, log_likelihoods])
def test_losses(function: Callable[..., Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several chunks, with targets that are ignored, of a vocabulary of an odd size."""
    hidden, weight = draw(40, 16, dtype=dtype), draw(1003, 16, dtype=dtype) / 4
    targets = torch.randint(0, 1003, (40,), generator=torch.Generator().manual_seed(0)).to(WHERE)
    targets[::5] = -100
    weighed = draw(40)

    def found(kind: torch.dtype) -> list[Tensor]:
        inputs = [x.to(kind).requires_grad_() for x in (hidden, weight)]
        if function is log_likelihoods:
            inputs[1].requires_grad_(False)
        out = function(*inputs, targets, 4 * 1003 * 16)
        learned = [x for x in inputs if x.requires_grad]
        return [out.detach(), *torch.autograd.grad((out * weighed.to(out.dtype)).sum(), learned)]

    plain, fused, exact = found_plainly(found, dtype, monkeypatch), found(dtype), found(torch.float64)
    for ours, theirs, right in zip(fused, plain, exact, strict=True):
        ulp = torch.finfo(torch.float32 if right.ndim < 2 else dtype).eps * right.abs().max()
        assert (ours - right).abs().max() <= 2 * (theirs - right).abs().max() + 4 * ulp


def test_adamw8bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps beside those of the formula: codes are one apart where a rounding fell the other way."""
    before = draw(70, 100) / 10  # 7000: no whole number of blocks of 256

    def found(_: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
        layer = torch.nn.Linear(100, 70, bias=False, device=WHERE)
        layer.weight.data.copy_(before)
        optimizer = optimizers.make(layer, "adamw8bit", 1e-2, 0.1)
        for step in range(4):
            layer.weight.grad = draw(70, 100 + step)[:, :100].contiguous() * 10.0 ** (-step)
            optimizer.step()
        return layer.weight.detach(), optimizer.state[layer.weight]

    values, state = found(torch.float32)
    theirs, other = found_plainly(found, torch.float32, monkeypatch)
    torch.testing.assert_close(values, theirs, rtol=0, atol=2e-4)
    for name in ("first", "second"):
        apart = (state[name].int() - other[name].int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 0.01
        torch.testing.assert_close(state[name + "_scale"], other[name + "_scale"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["int8", "q8", "q4"])
@pytest.mark.parametrize("columns", [64, 90])
def test_codes(kind: str, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are those of Codes.floats, to the bit; products and gradients follow from them."""
    drawn = torch.Generator().manual_seed(0)
    groups = 1 if kind == "int8" else -(-columns // 32)
    width = columns if kind == "int8" else 32
    shape = (5, groups, width // 2 if kind == "q4" else width)
    low, high, type = (0, 256, torch.uint8) if kind == "q4" else (-128, 128, torch.int8)
    q = torch.randint(low, high, shape, generator=drawn).to(type)
    scale = (torch.rand(5, groups, generator=drawn) / 100).to(torch.float32 if kind == "int8" else torch.float16)
    codes = Codes(columns, q, scale, -scale * 7 if kind == "q4" else None)
    layer = CodesLinear(codes.to(WHERE), None, "q4")
    x = draw(T, columns)

    def found(dtype: torch.dtype) -> list[Tensor]:
        given = x.to(dtype).requires_grad_()
        y = layer(given)
        return [y.detach(), *torch.autograd.grad(y, given, draw(*y.shape, dtype=dtype))]

    from pronk.torch_engine.gpu.dequantize import dequantize

    minimum = None if codes.minimum is None else codes.minimum.to(WHERE)
    made = dequantize(q.to(WHERE), scale.to(WHERE), minimum, codes.origin, columns, torch.float32)
    torch.testing.assert_close(made.cpu(), codes.floats(slice(None)), rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(found(torch.float32), found_plainly(found, torch.float32, monkeypatch), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("bf16", [False, True])
def test_a_whole_model(rank: int | None, bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients of all that learns, LoRA's thin matrices or every weight."""
    torch.manual_seed(0)
    model = Llama(tiny_config()).to(WHERE)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.1)
    if rank:
        lora.add(model, LoraConfig(rank=rank, alpha=8, dropout=0.0))
        for _, layer in lora.layers(model):
            torch.nn.init.normal_(layer.lora_B, 0.0, 0.1)
        if bf16:
            lora.narrow(model, torch.bfloat16)
    vocabulary = model.config.vocab_size
    texts = [list(range(5)), [number % vocabulary for number in range(7, 20)]]
    batch = TorchBatch.of(Batch.of([Run(text, logits="all") for text in texts]), WHERE, None)
    targets = torch.arange(18, device=WHERE) % vocabulary

    def found(dtype: torch.dtype) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast(WHERE.type, torch.bfloat16, enabled=bf16):
            hidden = model.hidden(batch)
            kind = functions.compute_type(hidden)
            loss = cross_entropy(hidden.to(kind), model.lm_head.weight, targets)
        loss.backward()
        learned = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), **learned}

    plain, fused = found_plainly(found, torch.float32, monkeypatch), found(torch.float32)
    assert plain.keys() == fused.keys()
    for name, theirs in plain.items():
        apart = (fused[name] - theirs).abs().max()
        assert apart <= (0.03 if bf16 else 1e-4) * theirs.abs().max(), name


def test_unequal_texts_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FlashAttention is told of them, held against the texts one by one."""
    q, k, v = draw(12, 4, 8), draw(12, 2, 8), draw(12, 2, 8)
    runs = (Rows(0, 5, 0, None), Rows(5, 12, 0, None))
    none = torch.zeros(12, dtype=torch.int64, device=WHERE)
    batch = TorchBatch(none, none, none, runs, None, 7)
    calls: list[Sequence[int]] = []

    def flash(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int]) -> Tensor:
        assert longest == (7, 7)
        queries, keys = (bound.tolist() for bound in bounds)
        assert queries == keys
        calls.append(queries)
        ends = pairwise(queries)
        return torch.cat([attention.math(q[a:b], k[a:b], v[a:b], Rows(a, b, 0, None)) for a, b in ends])

    expected = attention.attention(q, k, v, batch, None, "flash")
    monkeypatch.setattr(attention, "_has_flash", lambda q: True)
    monkeypatch.setattr(attention, "_flash", flash)
    torch.testing.assert_close(attention.attention(q, k, v, batch, None, "flash"), expected)
    assert calls == [[0, 5, 12]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="attention in 16 bits is a GPU's")
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("which", ["alike", "unlike", "behind a prefix"])
def test_attention_in_16_bits(which: str, size: int) -> None:
    """Values and gradients of each way to it, against attention written out in float32."""
    none = torch.zeros(300, dtype=torch.int64, device=WHERE)
    runs = {
        "alike": (Rows(0, 128, 0, None), Rows(128, 256, 0, None)),
        "unlike": (Rows(0, 5, 0, None), Rows(5, 105, 0, None), Rows(105, 300, 0, None)),
        "behind a prefix": (
            Rows(0, 100, 0, None),
            Rows(100, 180, 100, None, (0, 100)),
            Rows(180, 260, 100, None, (0, 100)),
            Rows(260, 300, 100, None, (0, 100)),
        ),
    }[which]
    batch = TorchBatch(none, none, none, runs, None, 300)
    tokens = runs[-1].end
    given = [draw(tokens, heads, size, dtype=torch.bfloat16) for heads in (8, 2, 2)]
    wanted = draw(tokens, 8, size)

    def found(mode: str, kind: torch.dtype) -> list[Tensor]:
        inputs = [x.to(kind).requires_grad_() for x in given]
        out = attention.attention(*inputs, batch, None, mode)
        return [out, *torch.autograd.grad(out, inputs, wanted.to(kind))]

    for ours, right in zip(found("flash", torch.bfloat16), found("math", torch.float32), strict=True):
        assert (ours - right).abs().max() <= 0.02 * right.abs().max()
    for ours, right in zip(found("flash", torch.float32), found("math", torch.float32), strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-4)
