"""Peers on a GPU: transformers, and bitsandbytes in it, over the very weights that pronk's model has."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from gpu import DEVICE
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from pronk.torch_engine.model import Llama


@torch.no_grad()
def transformers(model: Llama) -> LlamaForCausalLM:
    """bf16, its fused attention. No tensor is there twice."""
    return _like(model, dict(model.named_parameters()), torch.bfloat16)


@torch.no_grad()
def bitsandbytes(model: Llama) -> LlamaForCausalLM:
    """LLM.int8() as `load_in_8bit` has it: every Linear but the head; all else in f16, its fastest type."""
    import bitsandbytes as bnb

    shared: dict[str, torch.Tensor] = {}
    codes: dict[str, nn.Module] = {}
    for name, weight in model.named_parameters():
        owner = name.rpartition(".")[0]
        if not (owner.startswith("model.layers.") and isinstance(model.get_submodule(owner), nn.Linear)):
            shared[name] = weight.half()
            continue
        layer = bnb.nn.Linear8bitLt(
            weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False, threshold=6.0, device="meta"
        )
        q, scale, _ = bnb.functional.int8_vectorwise_quant(weight.half())
        layer.weight = bnb.nn.Int8Params(q, requires_grad=False, has_fp16_weights=False, CB=q, SCB=scale)
        codes[owner] = layer
    return _like(model, shared, torch.float16, codes)


def _like(
    model: Llama, weights: dict[str, torch.Tensor], dtype: torch.dtype, modules: dict[str, nn.Module] | None = None
) -> LlamaForCausalLM:
    config = LlamaConfig(**model.config.to_dict(), attn_implementation="sdpa")
    config.dtype = dtype
    with torch.device("meta"):
        peer = LlamaForCausalLM(config)
    for name, module in (modules or {}).items():
        peer.set_submodule(name, module)
    peer.load_state_dict(weights, strict=False, assign=True)
    peer.tie_weights()
    # Not among the weights, so the meta device left it empty.
    peer.model.rotary_emb = type(peer.model.rotary_emb)(peer.config).to(DEVICE)
    assert not any(p.is_meta for p in peer.parameters())
    peer.generation_config.eos_token_id = None
    peer.generation_config.pad_token_id = 0
    return peer.eval().requires_grad_(False)


def nbytes(peer: LlamaForCausalLM) -> int:
    tensors = {id(p): p for p in [*peer.parameters(), *peer.buffers()]}.values()
    scales = (getattr(p, "SCB", None) for p in peer.parameters())
    return sum(t.numel() * t.element_size() for t in [*tensors, *(s for s in scales if s is not None)])


@torch.no_grad()
def decode(peer: LlamaForCausalLM, prompts: Sequence[Sequence[int]], new: int, **how: Any) -> tuple[float, float]:
    """`generate`, greedily: seconds until every text has its first token, and from there to the last."""
    ids, watch = torch.tensor(prompts, device=DEVICE), _Watch()
    begun = time.perf_counter()
    peer.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        streamer=watch,
        **how,
    )
    assert len(watch.times) == new + 1
    return watch.times[1] - begun, watch.times[-1] - watch.times[1]


@torch.no_grad()
def read(peer: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Logits of the last token of a text [1, T], keys and values kept, as `generate` begins."""
    return peer(ids, use_cache=True, logits_to_keep=1).logits


class _Watch(BaseStreamer):  # type: ignore[misc]
    """`generate` hands it the prompt first, then token after token, on the host."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass
