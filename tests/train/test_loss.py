"""The loss over a large vocabulary, against torch's own, whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pronk.train.objectives.loss import IGNORED, cross_entropy, log_likelihoods

ROWS, WIDTH, VOCABULARY = 37, 24, 101


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, requires_grad=True)
    return hidden, weight, torch.randint(VOCABULARY, (ROWS,), generator=generator)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, targets, reduction="sum")


def in_chunks(rows: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda hidden, weight, targets: cross_entropy(hidden, weight, targets, rows * 4 * VOCABULARY)


def by_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return -log_likelihoods(hidden, weight, targets, 5 * 4 * VOCABULARY).sum()


@pytest.mark.parametrize("way", [in_chunks(1), in_chunks(5), in_chunks(ROWS), in_chunks(1000), by_rows])
def test_loss_and_gradients_are_those_of_the_whole(way: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    hidden, weight, targets = inputs()
    expected = whole(hidden, weight, targets)
    expected_grads = torch.autograd.grad(3 * expected, (hidden, weight))
    loss = way(hidden, weight, targets)
    grads = torch.autograd.grad(3 * loss, (hidden, weight))
    torch.testing.assert_close(loss, expected)
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


def test_what_is_ignored_costs_nothing_and_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    targets[[0, 4, -1]] = IGNORED
    expected = whole(hidden, weight, targets)  # torch ignores the same
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    for way in (in_chunks(5), in_chunks(ROWS), by_rows):
        loss = way(hidden, weight, targets)
        grads = torch.autograd.grad(loss, (hidden, weight))
        torch.testing.assert_close(loss, expected)
        assert not grads[0][[0, 4, -1]].any()
        for grad, expected_grad in zip(grads, expected_grads, strict=True):
            torch.testing.assert_close(grad, expected_grad, rtol=1e-5, atol=1e-5)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = inputs()
    frozen = weight.detach()
    (grad,) = torch.autograd.grad(in_chunks(5)(hidden, frozen, targets), (hidden,))
    expected = torch.autograd.grad(whole(hidden, weight, targets), (hidden,))[0]
    torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(5)(hidden, weight, targets), whole(hidden, weight, targets))


def test_gradients_are_those_of_small_steps() -> None:
    hidden, weight, targets = (t.double() if t.is_floating_point() else t for t in inputs())
    assert torch.autograd.gradcheck(
        lambda x, w: log_likelihoods(x, w, targets[:4]).sum(),
        (hidden[:4].detach().requires_grad_(), weight.detach().requires_grad_()),
        eps=1e-3,
        atol=1e-2,  # log-likelihoods are taken in float32
    )


def test_16_bits_compute_in_16_and_add_up_in_32() -> None:
    hidden, weight, targets = inputs()
    hidden, weight = hidden.detach(), weight.detach()
    loss = in_chunks(5)(hidden.bfloat16(), weight, targets)
    assert loss.dtype == torch.float32
    # Each logit is rounded once to 8 bits, by 2^-9 of its size; their errors are independent.
    logits = hidden @ weight.T
    assert abs(float(loss - whole(hidden, weight, targets))) < 2**-8 * float(logits.abs().max()) * ROWS


def test_never_all_logits_at_once() -> None:
    hidden, weight, targets = inputs()
    seen = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal seen
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.ndim == 2 and out.shape[1] == VOCABULARY and len(out) != WIDTH:
                seen = max(seen, out.shape[0])
            return out

    with Watch():
        in_chunks(5)(hidden, weight, targets)
    assert seen == 5
