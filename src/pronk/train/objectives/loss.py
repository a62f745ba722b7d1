"""Cross-entropy over a large vocabulary, without the logits of more than a few rows at a time.

Logits of 4096 tokens over 128,256 are 2.1 GB in float32, and their gradient as much again. But the gradient of a row
depends on that row alone, and a training step always wants it: so each chunk's logits give loss and gradients at once
and are forgotten, and only gradients of the size of what the head was given, and of its weight, are kept (as in Liger
Kernel, arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pronk.torch_engine.functions import linear, product
from pronk.torch_engine.gpu.launch import fuses

# Of float32 logits at once. A GPU takes long for few rows of a product, where on a CPU many leave the caches.
CHUNK_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}
IGNORED = -100  # a target that costs nothing, as torch has it


def cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int | None = None) -> Tensor:
    """The sum over rows of -log softmax(hidden weight^T)[target], in nats: a float32 scalar.

    hidden [R, C], what the head is given; weight [V, C]; targets [R] int64, of which those that are IGNORED count
    nothing. Products are in `hidden`'s type, everything else in float32.
    """
    rows = _rows(weight, chunk_bytes)
    return cast(Tensor, _CrossEntropy.apply(hidden, weight, targets, rows))


def log_likelihoods(hidden: Tensor, weight: Tensor, targets: Tensor, chunk_bytes: int | None = None) -> Tensor:
    """log softmax(hidden weight^T)[target] of each row, [R] float32: for losses that need more than their sum.

    IGNORED ones have 0. Where the weight is trained as well, the logits of a chunk are computed again for its gradient.
    """
    rows = _rows(weight, chunk_bytes)
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return cast(Tensor, _LogLikelihoods.apply(hidden, weight, targets, rows))
    parts = [
        torch.utils.checkpoint.checkpoint(_of_chunk, x, weight, t, use_reentrant=False)
        for x, t in zip(hidden.split(rows), targets.split(rows), strict=True)
    ]
    return torch.cat(parts)


def logits_at(hidden: Tensor, weight: Tensor, at: Sequence[int], chunk_bytes: int | None = None) -> Tensor:
    """[N, V] float32, of the rows `at`, which ascend: to the bit those whose log-likelihoods come of the same `hidden`.

    So many rows are multiplied together there, and they are here: a product of fewer may differ in its last bits.
    """
    rows, found = _rows(weight, chunk_bytes), []
    for number, x in enumerate(hidden.split(rows)):
        wanted = [row - number * rows for row in at if number * rows <= row < number * rows + len(x)]
        if wanted:
            found.append(_logits(x, weight)[wanted])
    return torch.cat(found)


def _rows(weight: Tensor, chunk_bytes: int | None) -> int:
    """Of a chunk: a multiple of 16, on a GPU of 256, but where that is none."""
    device = weight.device.type
    rows = max(1, (chunk_bytes or CHUNK_BYTES[device]) // (4 * len(weight)))
    return rows - rows % (256 if device == "cuda" else 16) or rows


def _of_chunk(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return picked(_logits(hidden, weight), targets)


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    return linear(hidden, weight.to(hidden.dtype)).float()


def picked(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[target] of each row, [R]; 0 of IGNORED ones."""
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def _log_softmax(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """[rows, V] float32; where in it the targets are, the first column for IGNORED ones; and which those are, [rows].

    In place: memory that is handed back and asked for again at each step is filled with zeros anew, which takes longer
    than to exponentiate it.
    """
    logits = product(hidden, head.T).float()
    index = torch.arange(len(targets), device=targets.device), targets.clamp(min=0)
    return torch.log_softmax(logits, -1, out=logits), index, targets == IGNORED


def _judged(hidden: Tensor, head: Tensor, targets: Tensor, slopes: bool) -> tuple[Tensor, Tensor | None]:
    """log softmax(hidden head^T)[target] of each row, [rows] float32; with `slopes` the gradient of minus their sum by
    the logits, [rows, V] in the type of `hidden`."""
    if fuses(hidden):
        from pronk.torch_engine.gpu.cross_entropy import cross_entropy as fused

        logits = product(hidden, head.T)
        return fused(logits, targets, IGNORED, slopes), logits if slopes else None
    likelihoods, index, ignored = _log_softmax(hidden, head, targets)
    found = likelihoods[index].masked_fill_(ignored, 0)
    if not slopes:
        return found, None
    slope = likelihoods.exp_()
    slope[index] -= 1
    slope[ignored] = 0
    return found, slope.to(hidden.dtype)


class _LogLikelihoods(torch.autograd.Function):
    """Of a weight that is not trained. How a row's number changes with the row is kept, not its logits: weighing that
    is all that is left for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        found = hidden.new_empty(len(hidden), dtype=torch.float32)
        slopes = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None  # [R, C]
        head = weight.to(hidden.dtype)
        for at in range(0, len(hidden), rows):
            here = slice(at, at + rows)
            found[here], slope = _judged(hidden[here], head, targets[here], slopes is not None)
            if slopes is not None and slope is not None:
                slopes[here] = product(slope, head).neg_()
            del slope  # before the next one is made
        ctx.save_for_backward(slopes)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * grad[:, None].to(slopes.dtype), None, None, None


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        grad_weight = torch.zeros_like(weight) if wants_weight else None
        head = weight.to(hidden.dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        for at in range(0, len(hidden), rows):
            x, target = hidden[at : at + rows], targets[at : at + rows]
            found, grad = _judged(x, head, target, wants_hidden or wants_weight)
            total -= found.sum()
            if grad is None:
                continue
            if grad_hidden is not None:
                grad_hidden[at : at + rows] = product(grad, head)
            if grad_weight is not None:
                grad_weight += product(grad.T, x).to(weight.dtype)
            del grad  # before the next one is made
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = (None if of is None else of * grad.to(of.dtype) for of in ctx.saved_tensors)
        return (*found, None, None)
