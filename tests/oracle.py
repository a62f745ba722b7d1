"""An independent LLaMA in float64 numpy, written from the papers to be read, not to be fast.

It shares nothing with pronk but ModelConfig: its own rotary angles, its own attention, one query at a time.
Sources: arXiv 2302.13971 (LLaMA), 1910.07467 (RMSNorm), 2104.09864 (RoPE), 2002.05202 (SwiGLU), 2305.13245 (GQA).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pronk.config import ModelConfig

Array = NDArray[np.float64]


def logits(
    config: ModelConfig, weights: Mapping[str, NDArray], token_ids: Sequence[int], ctx_size: int | None = None
) -> Array:
    """[T, V] of one text from its first token on."""
    w = {name: np.asarray(array, np.float64) for name, array in weights.items()}
    x = w["model.embed_tokens.weight"][list(token_ids)]  # [T, C]
    angles = np.outer(np.arange(len(token_ids)), _frequencies(config, ctx_size))  # [T, D/2]
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        h = _norm(x, w[prefix + "input_layernorm.weight"], config.rms_norm_eps)
        x = x + _attention(config, w, prefix + "self_attn.", h, angles)
        h = _norm(x, w[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
        gate = _linear(w, prefix + "mlp.gate_proj", h)
        x = x + _linear(w, prefix + "mlp.down_proj", gate / (1 + np.exp(-gate)) * _linear(w, prefix + "mlp.up_proj", h))
    x = _norm(x, w["model.norm.weight"], config.rms_norm_eps)
    head = w["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return x @ head.T


def _linear(w: Mapping[str, Array], name: str, x: Array) -> Array:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)


def _norm(x: Array, weight: Array, eps: float) -> Array:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _attention(config: ModelConfig, w: Mapping[str, Array], prefix: str, x: Array, angles: Array) -> Array:
    t, d = len(x), config.head_dim
    q = _linear(w, prefix + "q_proj", x).reshape(t, -1, d)
    k = _linear(w, prefix + "k_proj", x).reshape(t, -1, d)
    v = _linear(w, prefix + "v_proj", x).reshape(t, -1, d)
    out = np.empty_like(q)
    group = config.num_attention_heads // config.num_key_value_heads
    for head in range(config.num_attention_heads):
        keys = _rotate(k[:, head // group], angles)
        queries = _rotate(q[:, head], angles)
        for i in range(t):
            scores = keys[: i + 1] @ queries[i] / math.sqrt(d)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[: i + 1, head // group] / weights.sum()
    return _linear(w, prefix + "o_proj", out.reshape(t, -1))


def _rotate(x: Array, angles: Array) -> Array:
    """Each pair (i, i + D/2) is a complex number, turned by its angle."""
    half = x.shape[-1] // 2
    turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _frequencies(config: ModelConfig, ctx_size: int | None) -> list[float]:
    d, scaling = config.head_dim, config.rope_scaling
    base = config.rope_theta
    if scaling and scaling.rope_type == "dynamic":
        trained = config.max_position_embeddings
        length = max(ctx_size or 0, trained)
        base *= (scaling.factor * length / trained - (scaling.factor - 1)) ** (d / (d - 2))
    frequencies = [base ** (-2 * i / d) for i in range(d // 2)]
    if scaling is None or scaling.rope_type == "dynamic":
        return frequencies
    if scaling.rope_type == "linear":
        return [f / scaling.factor for f in frequencies]
    if scaling.rope_type == "factors":
        return [f / factor for f, factor in zip(frequencies, scaling.factors, strict=True)]
    return [_llama3(f, scaling) for f in frequencies]


def _llama3(frequency: float, scaling) -> float:  # type: ignore[no-untyped-def]
    wavelength = 2 * math.pi / frequency
    trained = scaling.original_max_position_embeddings
    if wavelength < trained / scaling.high_freq_factor:
        return frequency
    if wavelength > trained / scaling.low_freq_factor:
        return frequency / scaling.factor
    blend = (trained / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - blend) * frequency / scaling.factor + blend * frequency
