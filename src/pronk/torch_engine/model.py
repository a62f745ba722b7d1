"""LLaMA as a torch module (arXiv 2302.13971, 2307.09288): *the* module, for inference, training and reference.

Tokens come as one ragged batch of T rows, run after run, never padded. With `kv=None` nothing is cached: that is the
training forward, and the same code. Parameters carry Hugging Face's names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from pronk.config import ModelConfig
from pronk.config.rope import cos_sin, inverse_frequencies
from pronk.torch_engine.attention import attention
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.functions import added_and_normed, linear, rms_norm, rotate, swiglu
from pronk.torch_engine.gpu.launch import fuses
from pronk.torch_engine.kv import LayerKV, TorchKV

AttentionMode = Literal["flash", "math"]


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """arXiv 1910.07467."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def after(self, x: Tensor, delta: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """x + delta, and that normed."""
        return added_and_normed(x, delta, self.weight, self.eps)


class Rope(nn.Module):
    """cos and sin of every position's angles, tabulated as far as positions have reached."""

    def __init__(self, config: ModelConfig, ctx_size: int) -> None:
        super().__init__()
        self.inv_freq = inverse_frequencies(config, ctx_size)
        self.table = torch.empty(2, 0, config.head_dim // 2)  # cos, sin: [2, positions, D/2], float32

    def forward(self, positions: Tensor, furthest: int) -> Tensor:
        """Angles of T positions, none beyond `furthest`: [2, T, 1, D/2]."""
        return self.reaching(furthest, positions.device)[:, positions].unsqueeze(2)

    def reaching(self, furthest: int, device: torch.device) -> Tensor:
        """The table, with `furthest` and more in it."""
        reached = self.table.shape[1]
        if furthest >= reached or self.table.device != device:
            cos, sin = cos_sin(self.inv_freq, 0, max(256, 2 * reached, furthest + 1))
            with torch.inference_mode(False):  # training may come after inference, on the same table
                self.table = torch.stack((torch.from_numpy(cos), torch.from_numpy(sin))).to(device)
        return self.table


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, mode: AttentionMode) -> None:
        super().__init__()
        c, bias = config.hidden_size, config.attention_bias
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = Linear(c, self.heads * self.head_dim, bias=bias)
        self.k_proj = Linear(c, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = Linear(c, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = Linear(self.heads * self.head_dim, c, bias=bias)
        self.mode = mode

    def forward(self, x: Tensor, rope: Tensor, batch: TorchBatch, kv: LayerKV | None) -> Tensor:
        q, k = self.queries_and_keys(x, rope)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [T, K, D]
        out = attention(q, k, v, batch, kv, self.mode)  # [T, H, D]
        return self.o_proj(out.flatten(1))

    def queries_and_keys(self, x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        """Where they stand: [T, H, D] and [T, K, D]."""
        if fuses(x):  # to put them side by side would be one more pass over memory
            qs, ks = (of(x).unflatten(-1, (-1, self.head_dim)) for of in (self.q_proj, self.k_proj))
            return rotate(qs, rope), rotate(ks, rope)
        qk = torch.cat((self.q_proj(x), self.k_proj(x)), dim=-1).unflatten(-1, (-1, self.head_dim))  # [T, H+K, D]
        q, k = rotate(qk, rope).split((self.heads, self.kv_heads), dim=1)
        return q, k


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c, f, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(c, f, bias=bias)
        self.up_proj = Linear(c, f, bias=bias)
        self.down_proj = Linear(f, c, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, config: ModelConfig, mode: AttentionMode) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, mode)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: Tensor, batch: TorchBatch, kv: LayerKV | None, rows: Tensor | None = None
    ) -> Tensor:
        """x [T, C] -> [T, C], or only the `rows` that anyone reads."""
        x, normed = self.input_layernorm.after(x)
        heard = self.self_attn(normed, rope, batch, kv)
        if rows is not None:  # unlike that of x[rows], the gradient of this is added up in order
            x, heard = (x + heard).index_select(0, rows), None
        x, normed = self.post_attention_layernorm.after(x, heard)
        return x + self.mlp(normed)


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig, mode: AttentionMode, ctx_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, mode) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rope = Rope(config, ctx_size)


class Llama(nn.Module):
    """A reward model has `score` in the place of `lm_head`. `ctx_size` matters to dynamic RoPE scaling only: see
    pronk.config.rope."""

    with_noise: Callable[[Tensor, TorchBatch], Tensor] | None = None  # what training adds to embeddings

    def __init__(self, config: ModelConfig, attn: AttentionMode = "flash", ctx_size: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.every_row = False  # whether rows that nobody reads go through the last layer, too: they share its scales
        self.model = Decoder(config, attn, ctx_size or config.max_position_embeddings)
        if config.num_labels:
            self.score = Linear(config.hidden_size, config.num_labels, bias=False)
        else:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings and not self.config.num_labels and isinstance(self.lm_head, Linear):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, batch: TorchBatch, kv: TorchKV | None = None) -> Tensor:
        """Logits [R, V] of the rows that want them, in the parameters' type."""
        logits: Tensor = self.lm_head(self.hidden(batch, kv))
        return logits

    def hidden(self, batch: TorchBatch, kv: TorchKV | None = None) -> Tensor:
        """What the head is given of the rows that want logits, [R, C]."""
        x = self.model.embed_tokens(batch.token_ids)  # [T, C]
        if self.with_noise:
            x = self.with_noise(x, batch)
        rope = self.model.rope(batch.positions, batch.furthest)
        last = len(self.model.layers) - 1
        for index, layer in enumerate(self.model.layers):
            rows = batch.logits_rows if index == last and not self.every_row else None
            x = layer(x, rope, batch, kv.layers[index] if kv else None, rows)
        if self.every_row:
            x = x.index_select(0, batch.logits_rows)
        normed: Tensor = self.model.norm(x)
        return normed
