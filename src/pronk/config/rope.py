"""Rotary position embeddings (arXiv 2104.09864): one table of angles that every engine and the oracle's tests share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pronk.config import ModelConfig
from pronk.config.rope_scaling import RopeScaling


def inverse_frequencies(config: ModelConfig, ctx_size: int | None = None) -> NDArray[np.float64]:
    """Radians per position of each of the head_dim / 2 rotated pairs.

    Dynamic NTK scaling stretches the base with the length of the text, which a KV cache cannot follow: keys rotated
    earlier would keep older angles. pronk fixes the length once, at `ctx_size` (default: max_position_embeddings, no
    stretch), so that a token's logits do not depend on how the text was cut into forward passes.
    """
    scaling, d = config.rope_scaling, config.head_dim
    theta = config.rope_theta
    if scaling and scaling.rope_type == "dynamic" and d > 2:
        trained = config.max_position_embeddings
        stretch = scaling.factor * max(ctx_size or trained, trained) / trained - (scaling.factor - 1)
        theta *= stretch ** (d / (d - 2))
    frequencies = _unscaled(theta, d)
    return frequencies / frequency_factors(scaling, frequencies)


def _unscaled(theta: float, head_dim: int) -> NDArray[np.float64]:
    return np.asarray(theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim))  # [D/2]


def frequency_factors(scaling: RopeScaling | None, frequencies: NDArray[np.float64]) -> NDArray[np.float32]:
    """What divides each frequency, [D/2]; float32, the precision in which GGUF stores it (`rope_freqs.weight`)."""
    factors = np.ones(frequencies.shape, np.float32)
    if scaling is None or scaling.rope_type == "dynamic":
        return factors
    if scaling.rope_type == "linear":
        factors[:] = scaling.factor
        return factors
    if scaling.rope_type == "factors":
        return np.asarray(scaling.factors, np.float32)
    # Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended.
    turns = (scaling.original_max_position_embeddings or 0) * frequencies / (2 * np.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = np.clip(smooth, 0.0, 1.0)
    factors[:] = 1 / ((1 - smooth) / scaling.factor + smooth)
    return factors


def by_name(config: ModelConfig) -> ModelConfig:
    """The same model, with Llama 3's rule in place of `factors` that are just what it gives.

    GGUF holds only the factors; Hugging Face and everything that reads its files know only the rule.
    """
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "factors":
        return config
    rule = RopeScaling("llama3", max(scaling.factors), 1.0, 4.0, 8192)  # Llama 3's context before it was stretched
    expected = frequency_factors(rule, _unscaled(config.rope_theta, config.head_dim))
    same = expected[0] < rule.factor and np.allclose(expected, scaling.factors, rtol=1e-6, atol=0)
    return replace(config, rope_scaling=rule) if same else config


def cos_sin(inv_freq: NDArray[np.float64], start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of every angle at positions start..stop-1, each [stop - start, D/2]; angles are taken in float64."""
    angles = np.arange(start, stop, dtype=np.float64)[:, None] * inv_freq
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
