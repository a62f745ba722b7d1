"""Gradients by hand, held against what the float64 oracle's answers do when a weight is moved."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from numpy.typing import NDArray
from tiny import CONFIGS, random_weights, tiny_config

from pronk.calibrate import gradients
from pronk.calibrate.gradients import products
from pronk.config import ModelConfig

HEADS = {True: "model.embed_tokens.weight", False: "lm_head.weight"}


def log_p(config: ModelConfig, weights: Any, texts: list[list[int]]) -> NDArray[np.float64]:
    found = []
    for ids in texts:
        logits = oracle.logits(config, weights, ids)
        shifted = logits - logits.max(-1, keepdims=True)
        found.append(shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))
    return np.concatenate(found)


class Planted:
    """In place of random numbers: the tokens that are drawn are known, for their predictions are."""

    def __init__(self, seed: int) -> None:
        self.rng, self.drawn = np.random.default_rng(seed), []  # type: ignore[var-annotated]

    def random(self, shape: tuple[int, int]) -> NDArray[np.float64]:
        self.drawn.append(self.rng.random(shape))
        return self.drawn[-1]


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_what_moving_a_weight_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**CONFIGS[name])
    weights = random_weights(config)
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, config.vocab_size, size).tolist() for size in (9, 14)]
    monkeypatch.setattr(gradients, "_square", lambda by_weight: by_weight)  # as it is, before it is summed up
    planted = Planted(5)
    monkeypatch.setattr(gradients.np.random, "default_rng", lambda seed: planted)
    found = list(products(config, weights.get, texts))
    before = log_p(config, weights, texts)
    drawn = (np.exp(before).cumsum(axis=1) < np.concatenate(planted.drawn)).sum(axis=1)
    rows = np.arange(len(drawn))
    named = set()
    for product in found:
        head = product.name == HEADS[config.tie_word_embeddings]
        if head and product.fed is not None:
            spread = 1 - np.square(np.exp(before)).sum(-1)
            assert product.curvature == pytest.approx(float(spread @ np.square(product.fed).sum(-1)), rel=1e-4)
        if head:
            continue  # where it is the embedding as well, what the two do cannot be told apart by moving it
        by_weight = np.zeros(weights[product.name].shape)
        by_weight[: len(product.curvature)] = product.curvature  # a table's rows that no token reads are left out
        named.add(product.name)
        way = rng.normal(size=by_weight.shape)
        step = 1e-5
        ends = []
        for sign in (-1, 1):
            moved = {**weights, product.name: weights[product.name] + sign * step * way}
            ends.append(log_p(config, moved, texts)[rows, drawn].sum())
        assert (by_weight * way).sum() == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=2e-3, abs=2e-3), (
            product.name
        )
    assert named == {n for n, w in weights.items() if w.ndim == 2} - {HEADS[config.tie_word_embeddings]}
