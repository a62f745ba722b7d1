"""How much it matters what a matrix gives: gradients of what a model answers on a text, by each product in it.

A next token y is drawn from the model's own prediction p after each token of a text. Where a product gives something
else by a small e, p moves by a KL divergence of

    1/2 e^T F e        F = E[g g^T],  g = d log p(y) / d product

(Fisher's information; the mean is over y). Where each weight of a matrix is off by a little, independently of others,
that is half of the errors' mean square times `Product.curvature`: the square of d log p / d weight, summed over all
weights. (An error in one weight meets all tokens, and what attention gathers of them adds up.) So one pass forward and
one backward say of all matrices at once what errors in them cost.

Backward each layer is computed anew from the stream that came into it: memory is the stream before each layer, and a
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pronk.calibrate.cores import product, shared
from pronk.calibrate.layers import Attention, in_pieces, norm
from pronk.checkpoint.tensors import EMBEDDING, HEAD
from pronk.config import ModelConfig

Floats = NDArray[np.float32]
Weights = Callable[[str], Floats | None]  # by a tensor's name; None where there is none

_TOKENS, _FEW = 256, 64  # whose predictions are there at once; of which a core takes so many


class Product(NamedTuple):
    """What errors in one matrix [N, K] are multiplied by, and what becomes of them."""

    name: str
    fed: Floats | None  # [T, K]; None for a table, of which each token reads a row
    curvature: float  # nats, over all tokens, twice what independent errors of a mean square of 1 cost


def products(config: ModelConfig, weights: Weights, texts: Sequence[Sequence[int]], seed: int = 0) -> Iterator[Product]:
    """Of the head first, then of each layer from the last to the first, and of the embedding. Texts stand one after
    another, each read from its own beginning."""
    return _Net(config, weights, texts, seed).products()


class _Net:
    def __init__(self, config: ModelConfig, weights: Weights, texts: Sequence[Sequence[int]], seed: int) -> None:
        self.config, self.weights = config, weights
        self.ids = np.concatenate(texts)
        self.attention = Attention(config, [len(text) for text in texts])
        self.draws = np.random.default_rng(seed)

    def products(self) -> Iterator[Product]:
        stream, before = self._table(EMBEDDING)[self.ids], []
        for layer in range(self.config.num_hidden_layers):
            before.append(stream)
            stream = _Layer(self, layer, stream).out()
        gradient = yield from self._head(stream)
        for layer in reversed(range(self.config.num_hidden_layers)):
            gradient = yield from _Layer(self, layer, before.pop()).back(gradient)
        rows = np.zeros((self.ids.max() + 1, gradient.shape[1]), np.float32)
        np.add.at(rows, self.ids, gradient)
        yield Product(EMBEDDING, None, _square(rows))

    def _head(self, stream: Floats) -> Generator[Product, None, Floats]:
        """Of its errors all that p says is known: F is diag(p) - p p^T, and nothing is drawn."""
        name = EMBEDDING if self.config.tie_word_embeddings else HEAD
        head, scale = self._table(name), self._table("model.norm.weight")
        fed = norm(stream, scale, self.config.rms_norm_eps)
        gradient, curvature = np.empty_like(fed), 0.0
        for at in range(0, len(fed), _TOKENS):
            some = slice(at, at + _TOKENS)
            p = product(fed[some], head.T)
            few = [p[at : at + _FEW] for at in range(0, len(p), _FEW)]
            parts = [(rows, self.draws.random((len(rows), 1))) for rows in few]
            uncertain, drawn = map(np.concatenate, zip(*shared(_predicted, parts), strict=True))
            curvature += float(uncertain @ np.einsum("tc,tc->t", fed[some], fed[some]))
            gradient[some] = head[drawn.clip(max=len(head) - 1)] - product(p, head)
        yield Product(name, fed, curvature)
        return _through_norm(gradient, stream, scale, self.config.rms_norm_eps)

    def _table(self, name: str) -> Floats:
        weights = self.weights(name)
        assert weights is not None
        return weights


class _Layer:
    """A layer computed, with what its way back takes."""

    def __init__(self, net: _Net, number: int, stream: Floats) -> None:
        self.net, self.prefix, self.eps = net, f"model.layers.{number}.", net.config.rms_norm_eps
        self.stream, self.matrices = stream, dict[str, Floats]()
        self.first, self.second = (self._of(f"{name}_layernorm") for name in ("input", "post_attention"))
        self.fed = norm(stream, self.first, self.eps)
        self.q, self.k, self.v = (self._product(self.fed, f"self_attn.{name}_proj") for name in "qkv")
        self.attended = net.attention(self.q, self.k, self.v)
        self.middle = stream + self._product(self.attended, "self_attn.o_proj")
        self.fed_mlp = norm(self.middle, self.second, self.eps)
        self.gate, self.up = (self._product(self.fed_mlp, f"mlp.{name}_proj") for name in ("gate", "up"))
        self.sigmoid, self.hidden = np.empty_like(self.gate), np.empty_like(self.gate)
        in_pieces(self._gated, len(stream))

    def _gated(self, some: slice) -> None:
        gate = self.gate[some]
        with np.errstate(over="ignore"):  # of what is far below nothing: 0 comes of it
            self.sigmoid[some] = 1 / (1 + np.exp(-gate))
        self.hidden[some] = gate * self.sigmoid[some] * self.up[some]

    def out(self) -> Floats:
        return self.middle + self._product(self.hidden, "mlp.down_proj")

    def back(self, gradient: Floats) -> Generator[Product, None, Floats]:
        """`gradient`: by what the layer gave; returns that by what it was given."""
        yield self._at("mlp.down_proj", self.hidden, gradient)
        by_gate, by_up = self._back_of_gated(product(gradient, self._of("mlp.down_proj")))
        yield self._at("mlp.gate_proj", self.fed_mlp, by_gate)
        yield self._at("mlp.up_proj", self.fed_mlp, by_up)
        by_fed: Floats = product(by_gate, self._of("mlp.gate_proj"))
        by_fed += product(by_up, self._of("mlp.up_proj"))
        gradient = gradient + _through_norm(by_fed, self.middle, self.second, self.eps)
        yield self._at("self_attn.o_proj", self.attended, gradient)
        by_three = self.net.attention.back(self.q, self.k, self.v, product(gradient, self._of("self_attn.o_proj")))
        by_fed = np.zeros_like(self.fed)
        for name, by in zip("qkv", by_three, strict=True):
            yield self._at(f"self_attn.{name}_proj", self.fed, by)
            by_fed += product(by, self._of(f"self_attn.{name}_proj"))
        return gradient + _through_norm(by_fed, self.stream, self.first, self.eps)

    def _back_of_gated(self, by_hidden: Floats) -> tuple[Floats, Floats]:
        by_gate, by_up = np.empty_like(by_hidden), np.empty_like(by_hidden)

        def back(some: slice) -> None:
            by, gate, sigmoid = by_hidden[some], self.gate[some], self.sigmoid[some]
            by_gate[some] = by * self.up[some] * sigmoid * (1 + gate * (1 - sigmoid))
            by_up[some] = by * gate * sigmoid

        in_pieces(back, len(by_hidden))
        return by_gate, by_up

    def _of(self, module: str) -> Floats:
        if module not in self.matrices:
            self.matrices[module] = self.net._table(f"{self.prefix}{module}.weight")
        return self.matrices[module]

    def _product(self, fed: Floats, module: str) -> Floats:
        given: Floats = product(fed, self._of(module).T)
        bias = self.net.weights(f"{self.prefix}{module}.bias")
        return given if bias is None else given + bias

    def _at(self, module: str, fed: Floats, gradient: Floats) -> Product:
        return Product(f"{self.prefix}{module}.weight", fed, _square(product(gradient.T, fed)))


def _square(by_weight: Floats) -> float:
    return float(np.einsum("nk,nk->", by_weight, by_weight, dtype=np.float64))


def _predicted(part: tuple[Floats, NDArray[np.float64]]) -> tuple[Floats, NDArray[np.int64]]:
    """Of logits [T, V], which become probabilities, and an even draw for each row: how uncertain each is, 1 - sum p^2,
    and the token that is drawn; V where rounding leaves their sum under the draw."""
    p, even = part
    p -= p.max(axis=1, keepdims=True)
    np.exp(p, out=p)
    p /= p.sum(axis=1, keepdims=True)
    return 1 - np.einsum("tv,tv->t", p, p), (p.cumsum(axis=1) < even).sum(axis=1)


def _through_norm(gradient: Floats, x: Floats, weight: Floats, eps: float) -> Floats:
    """By what a norm gave [T, C] to by what it was given."""
    out = np.empty_like(gradient)

    def back(some: slice) -> None:
        part, by = x[some], gradient[some] * weight
        length = np.sqrt(np.einsum("tc,tc->t", part, part)[:, None] / np.float32(x.shape[1]) + np.float32(eps))
        along = np.einsum("tc,tc->t", by, part)[:, None] / (np.float32(x.shape[1]) * length * length)
        out[some] = (by - part * along) / length

    in_pieces(back, len(x))
    return out
