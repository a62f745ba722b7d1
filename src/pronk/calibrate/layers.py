"""A decoder layer in numpy, matrix by matrix: what each product is fed, and what comes of it.

Engines compute a whole model of weights that are there; here a layer's weights are made one after the other, each in
view of what those before it have made of a text. So this is LLaMA once more (arXiv 2302.13971), a layer at a time:
memory is a layer, and what its products are fed for all of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pronk.config import ModelConfig
from pronk.config.rope import cos_sin, inverse_frequencies

Floats = NDArray[np.float32]

_TOKENS = 512  # that elementwise work is done for at once
_QUERIES = 128  # whose scores are


def norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """[T, C]"""
    out = np.empty_like(x)
    for piece in pieces(len(x)):
        part = x[piece]
        mean = np.einsum("tc,tc->t", part, part)[:, None] / np.float32(x.shape[1])
        out[piece] = part / np.sqrt(mean + np.float32(eps)) * weight
    return out


def gated(gate: Floats, up: Floats) -> Floats:
    """silu(gate) * up, [T, F]; `gate` is used up."""
    for piece in pieces(len(gate)):
        part = gate[piece]
        with np.errstate(over="ignore"):  # of what is far below nothing: 0 comes of it
            part /= 1 + np.exp(-part)
        part *= up[piece]
    return gate


def pieces(tokens: int) -> list[slice]:
    return [slice(at, at + _TOKENS) for at in range(0, tokens, _TOKENS)]


class Attention:
    """Of texts that stand one after another, each read from its own beginning."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self.config, self.lengths = config, lengths
        self.cos, self.sin = cos_sin(inverse_frequencies(config), 0, max(lengths))  # [T, D/2]

    def __call__(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """q [T, H * D], k and v [T, KV * D]; [T, H * D]"""
        out = np.empty_like(q)
        start = 0
        for length in self.lengths:
            text = slice(start, start + length)
            self._of_a_text(q[text], k[text], v[text], out[text])
            start += length
        return out

    def _of_a_text(self, q: Floats, k: Floats, v: Floats, out: Floats) -> None:
        d, kv, length = self.config.head_dim, self.config.num_key_value_heads, len(q)
        queries = self._turned(q).reshape(length, kv, -1, d) * np.float32(d**-0.5)
        keys, values = self._turned(k), v.reshape(length, kv, d)
        heads = out.reshape(queries.shape)
        for at in range(0, length, _QUERIES):
            some = slice(at, min(at + _QUERIES, length))
            size, seen = some.stop - at, some.stop
            later = np.triu(np.full((size, size), -np.inf, np.float32), 1)[:, None]
            for head in range(kv):
                # Of all queries that share these keys: [Q * H / KV, seen].
                scores = queries[some, head].reshape(-1, d) @ keys[:seen, head].T
                scores.reshape(size, -1, seen)[..., at:] += later
                scores -= scores.max(axis=-1, keepdims=True)
                np.exp(scores, out=scores)
                whole = scores.sum(axis=-1, keepdims=True)
                heads[some, head] = (scores @ values[:seen, head] / whole).reshape(size, -1, d)

    def _turned(self, x: Floats) -> Floats:
        """Rotary embeddings: [T, n * D] to [T, n, D]."""
        heads = x.reshape(len(x), -1, self.config.head_dim)
        half = self.config.head_dim // 2
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None]
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
