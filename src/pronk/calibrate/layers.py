"""A decoder layer in numpy, matrix by matrix: what each product is fed, and what comes of it.

Engines compute a whole model of weights that are there; here a layer's weights are made one after the other, each in
view of what those before it have made of a text. So this is LLaMA once more (arXiv 2302.13971), a layer at a time:
memory is a layer, and what its products are fed for all of the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pronk.calibrate.cores import shared
from pronk.config import ModelConfig
from pronk.config.rope import cos_sin, inverse_frequencies

Floats = NDArray[np.float32]

_TOKENS = 256  # that elementwise work is done for at once
_QUERIES = 128  # whose scores are


def norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """[T, C]"""
    out = np.empty_like(x)

    def piece(some: slice) -> None:
        part = x[some]
        mean = np.einsum("tc,tc->t", part, part)[:, None] / np.float32(x.shape[1])
        out[some] = part / np.sqrt(mean + np.float32(eps)) * weight

    in_pieces(piece, len(x))
    return out


def gated(gate: Floats, up: Floats) -> Floats:
    """silu(gate) * up, [T, F]; `gate` is used up."""

    def piece(some: slice) -> None:
        part = gate[some]
        with np.errstate(over="ignore"):  # of what is far below nothing: 0 comes of it
            part /= 1 + np.exp(-part)
        part *= up[some]

    in_pieces(piece, len(gate))
    return gate


def in_pieces(work: Callable[[slice], None], tokens: int) -> None:
    """Elementwise work, on some tokens at a time."""
    shared(work, [slice(at, at + _TOKENS) for at in range(0, tokens, _TOKENS)])


class Attention:
    """Of texts that stand one after another, each read from its own beginning."""

    def __init__(self, config: ModelConfig, lengths: Sequence[int]) -> None:
        self.config, self.lengths = config, lengths
        self.cos, self.sin = cos_sin(inverse_frequencies(config), 0, max(lengths))  # [T, D/2]

    def __call__(self, q: Floats, k: Floats, v: Floats) -> Floats:
        """q [T, H * D], k and v [T, KV * D]; [T, H * D]"""
        out = np.empty_like(q)
        shared(lambda text: self._of_a_text(q[text], k[text], v[text], out[text]), self._texts())
        return out

    def back(self, q: Floats, k: Floats, v: Floats, gradient: Floats) -> tuple[Floats, Floats, Floats]:
        """Gradients by q, k and v, of one by what came of them [T, H * D]."""
        by = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)

        def back(text: slice) -> None:
            self._back_of_a_text(q[text], k[text], v[text], gradient[text], *(one[text] for one in by))

        shared(back, self._texts())
        return by

    def _texts(self) -> list[slice]:
        ends = np.cumsum(self.lengths).tolist()
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def _of_a_text(self, q: Floats, k: Floats, v: Floats, out: Floats) -> None:
        queries, keys, values = self._heads(q, k, v)
        heads = out.reshape(queries.shape)
        for some, head, scores in self._scores(queries, keys):
            whole = scores.sum(axis=-1, keepdims=True)
            heads[some, head] = (scores @ values[: some.stop, head] / whole).reshape(heads[some, head].shape)

    def _back_of_a_text(
        self, q: Floats, k: Floats, v: Floats, gradient: Floats, by_q: Floats, by_k: Floats, by_v: Floats
    ) -> None:
        queries, keys, values = self._heads(q, k, v)
        d = self.config.head_dim
        by_out = gradient.reshape(queries.shape)
        by_queries, by_keys, by_values = (np.zeros_like(x) for x in (queries, keys, values))
        for some, head, p in self._scores(queries, keys):
            p /= p.sum(axis=-1, keepdims=True)
            by = by_out[some, head].reshape(-1, d)
            by_values[: some.stop, head] += p.T @ by
            by_p = by @ values[: some.stop, head].T
            p *= by_p - np.einsum("qs,qs->q", by_p, p)[:, None]
            by_queries[some, head] = (p @ keys[: some.stop, head]).reshape(by_queries[some, head].shape)
            by_keys[: some.stop, head] += p.T @ queries[some, head].reshape(-1, d)
        by_queries *= np.float32(d**-0.5)
        by_q[:] = self._turned(by_queries, -1).reshape(q.shape)
        by_k[:] = self._turned(by_keys, -1).reshape(k.shape)
        by_v[:] = by_values.reshape(v.shape)

    def _heads(self, q: Floats, k: Floats, v: Floats) -> tuple[Floats, Floats, Floats]:
        """Queries [T, KV, H / KV, D], scaled, keys and values [T, KV, D]."""
        d, kv, length = self.config.head_dim, self.config.num_key_value_heads, len(q)
        queries = self._turned(q).reshape(length, kv, -1, d) * np.float32(d**-0.5)
        return queries, self._turned(k), v.reshape(length, kv, d)

    def _scores(self, queries: Floats, keys: Floats) -> Iterator[tuple[slice, int, Floats]]:
        """Some queries, one head of keys, and the exponentials of their scores: of all queries that share these keys,
        [Q * H / KV, seen]."""
        length, kv, _, d = queries.shape
        for at in range(0, length, _QUERIES):
            some = slice(at, min(at + _QUERIES, length))
            size, seen = some.stop - at, some.stop
            later = np.triu(np.full((size, size), -np.inf, np.float32), 1)[:, None]
            for head in range(kv):
                scores = queries[some, head].reshape(-1, d) @ keys[:seen, head].T
                scores.reshape(size, -1, seen)[..., at:] += later
                scores -= scores.max(axis=-1, keepdims=True)
                np.exp(scores, out=scores)
                yield some, head, scores

    def _turned(self, x: Floats, way: int = 1) -> Floats:
        """Rotary embeddings: [T, n * D] to [T, n, D]; with -1 they are taken back."""
        heads = x.reshape(len(x), -1, self.config.head_dim)
        half = self.config.head_dim // 2
        cos, sin = self.cos[: len(x), None], self.sin[: len(x), None] * np.float32(way)
        a, b = heads[..., :half], heads[..., half:]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
