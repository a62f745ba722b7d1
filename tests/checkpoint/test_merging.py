"""Several adapters and models in one: PEFT's functions and float64 are the oracles, tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from adapters import random_adapter
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import in_memory, random_weights, tiny_config

from pronk.checkpoint import merging
from pronk.checkpoint.adapter import Adapter, LowRank
from pronk.checkpoint.merging import Part, merged
from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint, LazyTensor
from pronk.errors import BadFile, BadRequest

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
BASE = in_memory(CONFIG, WEIGHTS)
QUERY = "model.layers.0.self_attn.q_proj"


def trained(seed: int, size: float = 0.05, config=CONFIG, weights=WEIGHTS) -> Checkpoint:
    """The base, somewhat further."""
    noise = random_weights(config, seed)
    return in_memory(config, {name: (w + size * noise[name]).astype(np.float32) for name, w in weights.items()})


def deltas(*found: Adapter) -> dict[str, list[NDArray[np.float32]]]:
    """By module, of each adapter that has one."""
    by_module: dict[str, list[NDArray[np.float32]]] = {}
    for one in found:
        for module, product in one.products.items():
            by_module.setdefault(module, []).append(product.b @ product.a * np.float32(product.scale))
    return by_module


def values(model: Checkpoint) -> Mapping[str, NDArray[np.float32]]:
    return {name: tensor.read() for name, tensor in model.tensors.items()}


def peft(method: str, found: list[NDArray[np.float32]], weights: list[float], density: float) -> NDArray[np.float32]:
    import torch
    from peft.utils import merge_utils

    tensors, counted = [torch.from_numpy(delta) for delta in found], torch.tensor(weights)
    if method == "linear":
        return merge_utils.task_arithmetic(tensors, counted).numpy()
    return getattr(merge_utils, method.replace("-", "_"))(tensors, counted, density).numpy()


@pytest.mark.parametrize("method", ["linear", "ties", "dare-linear", "dare-ties"])
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.7, 0.3), (1.5, -0.5)])
def test_peft_s_numbers(monkeypatch: pytest.MonkeyPatch, method: str, weights: tuple[float, float]) -> None:
    """One adapter has modules that the other has not. What chance leaves, both are told."""
    import torch

    one = random_adapter(CONFIG, seed=1, targets=("q_proj", "v_proj", "down_proj"))
    other = random_adapter(CONFIG, seed=2, targets=("q_proj", "down_proj", "o_proj"), rank=6)
    parts = [Part("one", one, weights[0]), Part("other", other, weights[1])]
    density = None if method == "linear" else 0.4
    found = values(merged(BASE, parts, method, density, seed=5))
    assert found.keys() == WEIGHTS.keys()
    for name, weight in WEIGHTS.items():
        having = [(n, p) for n, p in enumerate((one, other)) if name.removesuffix(".weight") in p.products]
        if not having:
            assert np.array_equal(found[name], weight)
            continue
        told = iter([merging.chance(5, number, name) for number, _ in having])
        monkeypatch.setattr(torch, "bernoulli", lambda p, told=told: torch.from_numpy(
            (next(told).random(p.shape, np.float32) < p.numpy()).astype(np.float32)
        ))  # fmt: skip
        changes = deltas(*(p for _, p in having))[name.removesuffix(".weight")]
        expected = peft(method, changes, [weights[n] for n, _ in having], 0.4)
        np.testing.assert_allclose(found[name], weight + expected, rtol=0, atol=2e-6 * np.abs(expected).max())
        assert np.abs(expected).max() > 0.1


def test_one_adapter_alone_is_what_it_was_before() -> None:
    one = random_adapter(CONFIG, seed=1)
    product = one.products[QUERY]
    expected = product.b @ product.a * np.float32(product.scale) + WEIGHTS[f"{QUERY}.weight"]
    assert np.array_equal(values(merged(BASE, [Part("one", one)]))[f"{QUERY}.weight"], expected)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.25, 0.75)])
def test_models_by_float64(weights: tuple[float, float]) -> None:
    models = [trained(11), trained(12)]
    parts = [Part(f"model {n}", model, weight) for n, (model, weight) in enumerate(zip(models, weights, strict=True))]
    found = values(merged(BASE, parts))
    for name, weight in WEIGHTS.items():
        w = weight.astype(np.float64)
        expected = w + sum(
            s * (m.tensors[name].read().astype(np.float64) - w) for s, m in zip(weights, models, strict=True)
        )
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-6)


def test_ties_of_models_is_peft_s() -> None:
    models = [trained(11), trained(12), trained(13)]
    found = values(merged(BASE, [Part(str(n), model) for n, model in enumerate(models)], "ties", 0.3))
    for name, weight in WEIGHTS.items():
        changes = [model.tensors[name].read() - weight for model in models]
        np.testing.assert_allclose(found[name], weight + peft("ties", changes, [1, 1, 1], 0.3), rtol=0, atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("size", [1e-4, 0.05, 3.0])
def test_slerp_by_float64(share: float, size: float) -> None:
    """Kept apart from the textbook's arccos for small angles, where that loses its digits: there it is a line."""
    other = trained(11, size)
    found = values(merged(BASE, [Part("other", other, share)], "slerp"))
    for name, weight in WEIGHTS.items():
        a, b = weight.astype(np.float64).ravel(), other.tensors[name].read().astype(np.float64).ravel()
        angle = np.arccos(np.clip(a @ b / np.linalg.norm(a) / np.linalg.norm(b), -1, 1))
        if angle > 1e-3:
            expected = (np.sin((1 - share) * angle) * a + np.sin(share * angle) * b) / np.sin(angle)
        else:
            expected = (1 - share) * a + share * b
        got = found[name].astype(np.float64).ravel()
        np.testing.assert_allclose(got, expected, rtol=0, atol=2e-6 * np.abs(a).max())
        if share in (0.0, 1.0):
            assert np.array_equal(found[name], weight if share == 0 else other.tensors[name].read())


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32), st.floats(0.01, 0.99), st.integers(1, 300))
def test_arcs_of_one_length_keep_it(seed: int, share: float, length: int) -> None:
    """What a straight line does not: it cuts the corner. And the angle is divided as it was asked."""
    draw = np.random.default_rng(seed)
    a, b = (v / np.linalg.norm(v) for v in draw.normal(0, 1, (2, length + 1)))
    found = merging.arc(a.astype(np.float32), b.astype(np.float32), share).astype(np.float64)
    assert abs(np.linalg.norm(found) - 1) < 1e-4 / np.sin(np.arccos(a @ b))
    angle = np.arccos(np.clip(a @ b, -1, 1))
    assert abs(np.arccos(np.clip(a @ found / np.linalg.norm(found), -1, 1)) - share * angle) < 2e-3


def test_arcs_that_are_none() -> None:
    a = np.array([1.0, 2.0, -3.0], np.float32)
    np.testing.assert_allclose(merging.arc(a, np.zeros_like(a), 0.25), 0.75 * a)
    np.testing.assert_allclose(merging.arc(a, 3 * a, 0.5), 2 * a, rtol=1e-6)
    assert np.array_equal(merging.arc(a, a, 0.3), a)
    with pytest.raises(BadRequest, match="turned around"):
        merging.arc(a, -a, 0.5)


def test_dare_keeps_the_mean_and_its_seed() -> None:
    one = random_adapter(CONFIG, seed=1, targets=("q_proj",))
    product = one.products[QUERY]
    whole = product.b @ product.a * np.float32(product.scale)
    name, found = f"{QUERY}.weight", []
    for seed in range(200):
        model = merged(BASE, [Part("one", one)], "dare-linear", 0.25, seed)
        found.append(model.tensors[name].read() - WEIGHTS[name])
    assert np.array_equal(model.tensors[name].read(), model.tensors[name].read())  # the same each time it is read
    kept = np.mean([np.abs(delta) > 1e-6 for delta in found])
    assert abs(kept - 0.25) < 0.01
    # Of 200 draws the mean's standard error is whole * sqrt(3 / 200); no number in 4096 is 6 of these off.
    assert (np.abs(np.mean(found, 0) - whole) < 6 * np.abs(whole) * (3 / 200) ** 0.5 + 1e-6).all()
    again = merged(BASE, [Part("one", one)], "dare-linear", 0.25, 199)
    assert np.array_equal(again.tensors[name].read(), model.tensors[name].read())
    assert not np.array_equal(found[0], found[1])


def test_what_chance_leaves_is_each_part_s_and_tensor_s_own() -> None:
    draws = [merging.chance(0, part, name).random(8) for part in (0, 1) for name in ("a", "b")]
    assert len({tuple(draw) for draw in draws}) == 4


def test_ties_elects_by_the_larger_sum() -> None:
    """By hand: 3 against -1 and -1; what disagrees is left out; a place that nobody changes stays."""
    changes = [np.array(row, np.float32) for row in ([3.0, 1.0, 0.0], [-1.0, 1.0, 0.0], [-1.0, -3.0, 0.0])]
    assert merging.agreeing(changes, [1.0, 1.0, 1.0]).tolist() == [3.0, -3.0, 0.0]
    assert merging.agreeing(changes, [2.0, 1.0, 0.5]).tolist() == [6.0, -1.5, 0.0]
    assert merging.largest(np.array([1.0, -4.0, 2.0, 3.0], np.float32), 0.5).tolist() == [0.0, -4.0, 0.0, 3.0]
    assert merging.largest(np.array([1.0, -4.0], np.float32), 0.1).tolist() == [0.0, 0.0]


def test_a_tied_head_becomes_its_own_where_one_changes_it() -> None:
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(config)
    base = in_memory(config, weights)
    head = random_adapter(tiny_config(), targets=("lm_head",), seed=2)
    plain = random_adapter(config, targets=("q_proj",), seed=3)
    found = merged(base, [Part("head", head, 0.5), Part("plain", plain)])
    assert not found.config.tie_word_embeddings
    (delta,) = deltas(head)["lm_head"]
    np.testing.assert_allclose(found.tensors[HEAD].read(), weights[EMBEDDING] + 0.5 * delta, atol=1e-6)
    assert np.array_equal(found.tensors[EMBEDDING].read(), weights[EMBEDDING])
    assert merged(base, [Part("plain", plain, 0.5)]).config.tie_word_embeddings


def test_what_was_trained_whole_counts_by_its_weight() -> None:
    norm = LazyTensor.made("model.norm.weight", (64,), lambda: np.full(64, 3, np.float32))
    one = replace(random_adapter(CONFIG, targets=("q_proj",)), replaced={norm.name: norm})
    found = merged(BASE, [Part("one", one, 0.5)])
    expected = (WEIGHTS[norm.name].astype(np.float64) + 3) / 2
    np.testing.assert_allclose(found.tensors[norm.name].read(), expected, atol=1e-6)


ONE = Part("one", random_adapter(CONFIG, targets=("q_proj",)))


@pytest.mark.parametrize(
    ("parts", "method", "density", "problem"),
    [
        ([], "linear", None, "nothing is to be merged"),
        ([ONE], "mean", None, "no method 'mean'; choose from linear, ties"),
        ([ONE], "linear", 0.5, "density is of ties, dare-linear, dare-ties; linear keeps all"),
        ([ONE], "ties", 0.0, "density must be over 0"),
        ([ONE], "dare-ties", 1.5, "density must be over 0"),
        ([ONE], "ties", float("nan"), "density must be over 0"),
        ([replace(ONE, weight=float("inf"))], "linear", None, "one: a weight must be a number"),
        ([ONE, ONE], "slerp", None, "towards one other, and 2 are named"),
        ([replace(ONE, weight=1.5)], "slerp", None, "from 0 to 1, not 1.5"),
        ([Part("deep", trained(3, config=tiny_config(num_hidden_layers=3), weights=random_weights(
            tiny_config(num_hidden_layers=3))))], "linear", None, "deep: its num_hidden_layers is 3, and the base's 2"),
        ([Part("wide", trained(3, config=tiny_config(vocab_size=97), weights=random_weights(
            tiny_config(vocab_size=97))))], "linear", None, r"wide: its model.embed_tokens.weight is \(97, 64\)"),
        ([Part("turned", trained(3, config=tiny_config(rope_theta=5e5)))], "linear", None, "turned: its rope_theta"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(parts: list[Part], method: str, density: float | None, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        merged(BASE, parts, method, density)


def test_what_overflows_is_said_to_be_the_part_s() -> None:
    product = LowRank(np.full((1, 64), 3e38, np.float32), np.full((64, 1), 2, np.float32), 1.0)
    one = Adapter(Path("big"), {QUERY: product}, {}, 0)
    with pytest.raises(BadFile, match=rf"big.*{QUERY}.weight, its change"):
        merged(BASE, [Part("big", one, 0.5)]).tensors[f"{QUERY}.weight"].read()
