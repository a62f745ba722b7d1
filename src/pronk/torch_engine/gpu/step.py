"""Step: a pass of a Llama module over a paged cache, by products and kernels that are fused: some six a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from pronk.torch_engine.gpu.attention import paged_attention, rotate_and_store
from pronk.torch_engine.gpu.paged import PagedBatch
from pronk.torch_engine.gpu.product import Norm, Product
from pronk.torch_engine.gpu.products import can_join, join
from pronk.torch_engine.kv import TorchKV

if TYPE_CHECKING:
    from pronk.torch_engine.model import Block, Llama, RMSNorm


@dataclass(frozen=True)
class _Layer:
    norm: Norm
    qkv: Product
    o: Product
    norm_after: Norm
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, block: Block, invariant: bool) -> _Layer:
        qkv, o, gate_up, down = (join(group, invariant) for group in _groups(block))
        before, after = _norm(block.input_layernorm), _norm(block.post_attention_layernorm)
        return cls(before, qkv, o, after, gate_up, down)


class Step:
    """Of one module, whose matrices it joins: those that share their input become one, and the module's views of it."""

    def __init__(self, model: Llama, *, invariant: bool = False) -> None:
        """`invariant`: whether a token's logits are to be the same to the bit whatever else is in the pass."""
        self.invariant = invariant
        self._layers = [_Layer.of(block, invariant) for block in model.model.layers]  # type: ignore[arg-type]
        self._norm, self._head = _norm(model.model.norm), join([model.lm_head], invariant)

    def __call__(self, model: Llama, batch: PagedBatch, kv: TorchKV) -> Tensor:
        """Logits [R, V] of the rows that want them. `model`: the one of which the embedding is taken."""
        x = F.embedding(batch.token_ids, model.model.embed_tokens.weight)  # [T, C]
        rope = model.model.rope.reaching(batch.furthest, x.device)
        last = len(self._layers) - 1
        for number, (layer, cache) in enumerate(zip(self._layers, kv.layers, strict=True)):
            qkv = layer.qkv(x, norm=layer.norm)  # [T, (H + 2 K) D]
            rotate_and_store(qkv, rope, batch, cache)
            seen = paged_attention(qkv, batch, cache)  # [T, H D]
            if number == last and not len(batch.logits_rows):
                return x.new_empty(0, model.config.vocab_size)
            if number == last and len(batch.logits_rows) < len(x):
                seen, x = seen.index_select(0, batch.logits_rows), x.index_select(0, batch.logits_rows)
            x = layer.o(seen, residual=x)
            x = layer.down(layer.gate_up(x, norm=layer.norm_after, gated=True), residual=x)
        return self._head(x, norm=self._norm)


def can_step(model: Llama, *, invariant: bool = False) -> bool:
    """Whether there is a Product for all of its matrices. One that is trained keeps its own."""
    if model.config.num_labels or model.every_row or any(p.requires_grad for p in model.parameters()):
        return False
    groups: list[list[nn.Module]] = [[model.lm_head]]
    for block in model.model.layers:
        groups += _groups(block)  # type: ignore[arg-type]
    return all(can_join(group, invariant) for group in groups)


def _groups(block: Block) -> list[list[nn.Module]]:
    """Its matrices, those together that share their input: q, k and v; o; gate and up; down."""
    attention, mlp = block.self_attn, block.mlp
    qkv: list[nn.Module] = [attention.q_proj, attention.k_proj, attention.v_proj]
    return [qkv, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]


def _norm(module: RMSNorm | nn.Module) -> Norm:
    return module.weight, module.eps  # type: ignore[return-value]
