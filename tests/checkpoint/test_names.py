"""Renames against the other projects' own tables, and the rotary permutation against its meaning."""

from __future__ import annotations

import gguf
import ml_dtypes
import numpy as np
import pytest
from formats import interleave, meta_name
from tiny import tiny_config

from pronk.checkpoint.readers import names
from pronk.errors import Unsupported

CONFIG = tiny_config(num_hidden_layers=12, attention_bias=True, mlp_bias=True)
ALL_NAMES = list(CONFIG.tensor_shapes())


def test_gguf_names_are_those_of_the_gguf_package() -> None:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, CONFIG.num_hidden_layers)
    for name in ALL_NAMES:
        assert names.hf_to_gguf(name) == table.get_name(name, try_suffixes=(".weight", ".bias"))


def test_meta_names_are_those_of_the_independent_writer() -> None:
    for name in ALL_NAMES:
        assert names.meta_to_hf(meta_name(name)) == name


def test_renames_are_inverse() -> None:
    assert [names.gguf_to_hf(names.hf_to_gguf(name)) for name in ALL_NAMES] == ALL_NAMES


@pytest.mark.parametrize(
    "name",
    [
        "",
        "{}",
        "blk.{}.attn_q.weight",
        "layers.{}.attention.wq.weight",
        "blk.01.attn_q.weight",
        "blk.-1.attn_q.weight",
        "blk.1.2.attn_q.weight",
        "blk.1.attn_q.weight\n",
        "blk.\u0661.attn_q.weight",
        "blk.1.attn_q.scale",
        "token_embd.bias",
        "rope_freqs.weight",
        "x.blk.1.attn_q.weight",
    ],
)
def test_other_names_are_none(name: str) -> None:
    assert names.gguf_to_hf(name) is None
    assert names.meta_to_hf(name) is None
    with pytest.raises(Unsupported):
        names.hf_to_gguf(name)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 4), (8, 6), (5, 16)])
@pytest.mark.parametrize("trailing", [(), (7,), (3, 2)])
def test_permutations_are_inverse_and_agree_with_the_writer(
    dtype: type, heads: int, head_dim: int, trailing: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 100, (heads * head_dim, *trailing)).astype(dtype)
    interleaved = names.to_interleaved(array, heads)
    assert interleaved.dtype == array.dtype
    np.testing.assert_array_equal(interleaved, interleave(array, heads))
    np.testing.assert_array_equal(names.to_half_split(interleaved, heads), array)
    np.testing.assert_array_equal(names.to_interleaved(names.to_half_split(array, heads), heads), array)


def test_half_split_turns_as_interleaved_does() -> None:
    """The same vector, rotated in either layout, ends as the same vector."""
    rng = np.random.default_rng(1)
    x, angles = rng.normal(size=(2 * 8)), rng.normal(size=4)
    pairs = x.reshape(2, 4, 2) @ np.array([1, 1j])  # Meta: neighbours are one complex number
    turned = pairs * np.exp(1j * angles)
    expected = np.stack([turned.real, turned.imag], -1).reshape(-1)

    halves = names.to_half_split(x, 2).reshape(2, 2, 4)  # Hugging Face: [head, half, pair]
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = halves[:, 0], halves[:, 1]
    ours = np.stack([a * cos - b * sin, b * cos + a * sin], 1).reshape(-1)
    np.testing.assert_allclose(names.to_interleaved(ours, 2), expected, rtol=1e-14)


def test_only_queries_and_keys_have_rotary_heads() -> None:
    for name in ALL_NAMES:
        expected = 8 if "q_proj" in name else 4 if "k_proj" in name else None
        assert names.rotary_heads(name, CONFIG) == expected, name
