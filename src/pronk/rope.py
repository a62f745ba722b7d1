"""Rotary position embeddings (arXiv 2104.09864): one table of angles that every engine and the oracle's tests share."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pronk.config import ModelConfig, RopeScaling


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
    frequencies = theta ** -(np.arange(0, d, 2, dtype=np.float64) / d)  # [D/2]
    return frequencies / frequency_factors(scaling, frequencies)


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


def cos_sin(inv_freq: NDArray[np.float64], start: int, stop: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of every angle at positions start..stop-1, each [stop - start, D/2]; angles are taken in float64."""
    angles = np.arange(start, stop, dtype=np.float64)[:, None] * inv_freq
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
