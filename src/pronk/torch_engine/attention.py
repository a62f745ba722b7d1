"""Causal attention over a ragged batch, two ways with one signature: `math`, to be read, and `flash`, to be fast."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

from pronk.torch_engine.batch import Rows, TorchBatch
from pronk.torch_engine.functions import wide
from pronk.torch_engine.kv import LayerKV


def attention(q: Tensor, k: Tensor, v: Tensor, batch: TorchBatch, kv: LayerKV | None, mode: str) -> Tensor:
    """q [T, H, D], k and v [T, K, D] of the batch's own tokens -> [T, H, D]; with `kv`, k and v are stored there."""
    if kv is not None:
        assert batch.slots is not None
        kv.write(batch.slots, k, v)
        read = kv.read
    elif mode == "flash":
        return _all(q, k, v, batch)
    else:
        read = partial(_behind, k, v)
    one = flash if mode == "flash" else math
    return _joined([one(q[run.begin : run.end], *read(run), run) for run in batch.runs])


def _all(q: Tensor, k: Tensor, v: Tensor, batch: TorchBatch) -> Tensor:
    """Without a cache."""
    if _has_flash(q) and len(batch.alike) > 1 and not any(run.prefix for run in batch.runs):
        return _flash(q, k, v, (batch.bounds, batch.bounds), (batch.longest, batch.longest))
    return _joined([_dense(q, k, v, runs) for runs in batch.alike])


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _behind(k: Tensor, v: Tensor, run: Rows) -> tuple[Tensor, Tensor]:
    """Keys and values of a run, and of its prefix."""
    rows = [slice(*part) for part in (run.prefix, (run.begin, run.end)) if part]
    return _joined([k[part] for part in rows]), _joined([v[part] for part in rows])


def math(q: Tensor, k: Tensor, v: Tensor, run: Rows) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, written out. q [S, H, D]; k, v [keys, K, D]; each K serves H / K query heads."""
    return torch.einsum("kgst,tkd->skgd", attention_weights(q, k, run).to(v.dtype), v).reshape(q.shape)


def attention_weights(q: Tensor, k: Tensor, run: Rows) -> Tensor:
    """softmax(q k^T / sqrt(D)) in float32, [K, G, S, keys]: the head that asks is G k + g."""
    s, _, d = q.shape
    q = q.view(s, k.shape[1], -1, d)  # [S, K, G, D]
    scores = torch.einsum("skgd,tkd->kgst", q, k).float() * d**-0.5
    return scores.masked_fill(~run.mask.to(q.device), float("-inf")).softmax(dim=-1)


def flash(q: Tensor, k: Tensor, v: Tensor, run: Rows) -> Tensor:
    """The same through torch's fused kernel: no [S, keys] matrix is ever stored (arXiv 2205.14135)."""
    s, h, d = q.shape
    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]  # [1, K, keys, D]
    if s == 1:
        # The query heads that share a key head become the rows of one small product; they see every key.
        out = F.scaled_dot_product_attention(q.view(1, k.shape[1], -1, d), k, v)
        return out.reshape(1, h, d)
    q = q.transpose(0, 1)[None]  # [1, H, S, D]
    if run.start == 0:
        out = _causal(q, k, v)
    else:
        out = _causal(q, k, v, run.mask.to(q.device))
    return out[0].transpose(0, 1)


def _dense(q: Tensor, k: Tensor, v: Tensor, runs: Sequence[Rows]) -> Tensor:
    """N runs of S tokens, side by side in a batch and behind one prefix if any, are one kernel call: [N S, H, D]."""
    first, last = runs[0], runs[-1]
    own = slice(first.begin, last.end)
    queries, keys, values = (
        x[own].unflatten(0, (len(runs), -1)).transpose(1, 2) for x in (q, k, v)
    )  # [N, heads, S, D]
    if not first.prefix:
        return _causal(queries, keys, values).transpose(1, 2).flatten(0, 1)
    before = (x[slice(*first.prefix)].transpose(0, 1).expand(len(runs), -1, -1, -1) for x in (k, v))
    keys, values = (torch.cat(both, dim=2) for both in zip(before, (keys, values), strict=True))
    return _causal(queries, keys, values, first.mask.to(q.device)).transpose(1, 2).flatten(0, 1)


def _causal(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """q [N, H, S, D], k and v [N, K, keys, D] -> [N, H, S, D]: of whole texts, or as the mask [S, keys] has it."""
    if q.device.type == "cpu" and _learns(q, k, v):
        return cast(Tensor, _Causal.apply(q, k, v, mask))
    if q.is_cuda:
        return _causal_on_gpu(q, k, v, mask)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


# Of torch's kernels, the fastest first; those that take none of the shapes are passed over.
_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
_ROUND = 128  # cuDNN makes a program of each length, in some tenths of a second: only for lengths that come again


def _causal_on_gpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`mask`: aligned at the ends, as FlashAttention has it of its own accord."""
    texts, _, queries, _ = q.shape
    keys = k.shape[2]
    if not _has_flash(q):  # and what there is for other types wants a key for each head
        k, v = (_to_heads(x, q.shape[1]) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    if mask is None and queries % _ROUND == 0 and not _learns(q, k, v):
        with sdpa_kernel(_KERNELS, set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    ends = torch.arange(texts + 1, device=q.device, dtype=torch.int32)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return _flash(q, k, v, (ends * queries, ends * keys), (queries, keys)).unflatten(0, (texts, -1)).transpose(1, 2)


def _has_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256


def _learns(*given: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def _flash(q: Tensor, k: Tensor, v: Tensor, bounds: tuple[Tensor, Tensor], longest: tuple[int, int]) -> Tensor:
    """FlashAttention, causal, as torch has it. q [T, H, D]; k and v [keys, K, D]; for queries and for keys, where each
    run begins and the last ends, int32, and the length of the longest."""
    if _learns(q, k, v):
        return cast(Tensor, _Flash.apply(q, k, v, *bounds, *longest))
    return cast(Tensor, torch.ops.aten._flash_attention_forward(q, k, v, *bounds, *longest, 0.0, True, False)[0])


class _Flash(torch.autograd.Function):
    """With a gradient that is the same each time: by default tiles add theirs to a query's in the order they end."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *sizes: Any) -> Tensor:
        out, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(q, k, v, *sizes, 0.0, True, False)
        ctx.save_for_backward(q, k, v, out, lse, *sizes[:2], state, unused)
        ctx.longest = sizes[2:]
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *given, state, unused = ctx.saved_tensors
        with _one_order():
            found = torch.ops.aten._flash_attention_backward(grad, *given, *ctx.longest, 0.0, True, state, unused)
        return *found, None, None, None, None


@contextmanager
def _one_order() -> Iterator[None]:
    """Kernels that ask torch add in one order."""
    asked, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch._C._set_deterministic_algorithms(True)  # the public function imports what compiles
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(asked, warn_only=warns)


class _Causal(torch.autograd.Function):
    """The same kernel, but a key or value that query heads share is kept once for its gradient, not once for each.

    Gradients of 16-bit types are computed in float32, in half the time that the kernel takes for them in bfloat16.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        every = (_to_heads(x, q.shape[1]) for x in (k, v))
        kernel, added = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, _added(mask, q.dtype)
        out, lse = kernel(q, *every, 0.0, mask is None, attn_mask=added)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        return cast(Tensor, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, mask = ctx.saved_tensors
        given = [wide(x) for x in (grad, q, _to_heads(k, q.shape[1]), _to_heads(v, q.shape[1]), out)]
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(*given, lse, 0.0, mask is None, attn_mask=_added(mask, given[1].dtype))
        shared = (x.unflatten(1, (k.shape[1], -1)).sum(2) for x in found[1:])  # [N, K, S, D]
        return *(x.to(q.dtype) for x in (found[0], *shared)), None


def _added(mask: Tensor | None, kind: torch.dtype) -> Tensor | None:
    """To scores: 0 where a query may look, and else minus infinity."""
    return None if mask is None else torch.zeros_like(mask, dtype=kind).masked_fill_(~mask, -torch.inf)


def _to_heads(x: Tensor, heads: int) -> Tensor:
    """[N, K, S, D] -> [N, H, S, D]: each K serves H / K query heads."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)
