"""Rotary frequencies against transformers' own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import tiny_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pronk.config import ModelConfig, RopeScaling
from pronk.config.rope import cos_sin, inverse_frequencies

SCALINGS = {
    "default": None,
    "linear": RopeScaling("linear", 2.5),
    "dynamic": RopeScaling("dynamic", 4.0),
    "llama3": RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    "llama3.2": RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
    "llama3 short": RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
}


def theirs(config: ModelConfig, length: int) -> torch.Tensor:
    """transformers' frequencies once it has seen a text of `length` tokens, in float32."""
    embedding = LlamaRotaryEmbedding(LlamaConfig(**config.to_dict()))
    embedding(torch.zeros(1), torch.arange(length)[None])
    return embedding.inv_freq


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
@pytest.mark.parametrize(("head_dim", "theta"), [(128, 500000.0), (64, 10000.0), (6, 1e6)])
def test_frequencies_are_those_of_transformers(scaling: RopeScaling | None, head_dim: int, theta: float) -> None:
    config = tiny_config(head_dim=head_dim, hidden_size=8 * head_dim, rope_theta=theta, rope_scaling=scaling)
    ours = inverse_frequencies(config, 300)
    # transformers computes a power and up to five more operations in float32; the power's error grows with its log.
    tolerance = (np.log(theta * 1e3) + 5) * np.finfo(np.float32).eps
    np.testing.assert_allclose(ours, theirs(config, 300).numpy(), rtol=tolerance)


def test_dynamic_scaling_stretches_only_beyond_the_trained_length() -> None:
    config = tiny_config(rope_scaling=RopeScaling("dynamic", 4.0))
    plain = inverse_frequencies(tiny_config())
    np.testing.assert_array_equal(inverse_frequencies(config), plain)
    np.testing.assert_array_equal(inverse_frequencies(config, 100), plain)
    assert (inverse_frequencies(config, 129)[1:] < plain[1:]).all()


def test_llama3_keeps_short_waves_and_stretches_long_ones_by_the_factor() -> None:
    config = tiny_config(head_dim=128, hidden_size=1024, rope_theta=5e5, rope_scaling=SCALINGS["llama3"])
    plain = inverse_frequencies(tiny_config(head_dim=128, hidden_size=1024, rope_theta=5e5))
    ratio = plain / inverse_frequencies(config)
    waves = 2 * np.pi / plain
    assert (ratio[waves < 8192 / 4] == 1).all()
    np.testing.assert_allclose(ratio[waves > 8192], 8, rtol=1e-6)
    between = (waves > 8192 / 4) & (waves < 8192)
    assert between.any()
    assert ((ratio[between] > 1) & (ratio[between] < 8)).all()


def test_factors_divide_each_frequency() -> None:
    config = tiny_config(rope_scaling=RopeScaling("factors", factors=(1.0, 2.0, 4.0, 8.0)))
    np.testing.assert_array_equal(inverse_frequencies(config) * [1, 2, 4, 8], inverse_frequencies(tiny_config()))


def test_angles_do_not_depend_on_where_a_chunk_begins() -> None:
    inv_freq = inverse_frequencies(tiny_config())
    whole = cos_sin(inv_freq, 0, 50)
    for part, full in zip(cos_sin(inv_freq, 20, 30), whole, strict=True):
        assert part.dtype == np.float32
        np.testing.assert_array_equal(part, full[20:30])
    np.testing.assert_array_equal(whole[0][0], np.ones(4))  # position 0 is not turned
