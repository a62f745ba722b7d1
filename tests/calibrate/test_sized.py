"""Types chosen for a size: what each costs is what is found when it is tried, and no choice of the size costs less."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk.calibrate import sized
from pronk.calibrate.calibrated import rounded
from pronk.calibrate.knapsack import Part, in_order
from pronk.errors import BadFile, BadRequest, Unsupported


def text(tokens: int, vocabulary: int = 96, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).tolist()


def divergence(config: Any, weights: Any, made: Any, ids: list[int]) -> float:
    def log_p(of: Any) -> Any:
        logits = oracle.logits(config, of, ids)
        shifted = logits - logits.max(-1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

    one, other = log_p(weights), log_p(made)
    return float((np.exp(one) * (one - other)).sum(-1).mean())


@pytest.mark.parametrize("name", ["gqa", "tied", "biases"])
def test_what_a_matrix_costs_is_what_is_found_when_it_is_moved(name: str) -> None:
    """Noise alone in each matrix, against the oracle: both means within 4 standard errors, and a tenth for what is not
    linear in them."""
    config = tiny_config(**CONFIGS[name])
    weights = random_weights(config)
    ids, times, size = text(128), 8, 0.003
    costs: dict[str, Any] = {name: np.zeros(times) for name, array in weights.items() if array.ndim == 2}
    for seed in range(times):
        for one in sized.products(config, weights.get, [ids], seed):
            costs[one.name][seed] += one.curvature / (2 * len(ids))
    rng = np.random.default_rng(3)
    for matrix, expected in costs.items():
        noises = [rng.normal(0, size, weights[matrix].shape) for _ in range(times)]
        found = [divergence(config, weights, {**weights, matrix: weights[matrix] + noise}, ids) for noise in noises]
        found = np.array(found) / size**2
        error = 4 * np.sqrt((found.var(ddof=1) + expected.var(ddof=1)) / times) + 0.1 * found.mean()
        assert abs(found.mean() - expected.mean()) < error, matrix
        assert error < found.mean(), matrix  # so that a factor of two is seen


@pytest.mark.parametrize("carried", [False, True])
def test_types_of_a_size(carried: bool) -> None:
    config = tiny_config(hidden_size=256, intermediate_size=256, head_dim=16, vocab_size=32)
    weights = random_weights(config)
    source = in_memory(config, weights)
    smallest = sized.room(source, sized.least(source))
    widest = sized.room(source, dict.fromkeys(sized.least(source), "F16"))
    costs = []
    told: list[tuple[str, int, int]] = []
    for most in (smallest, smallest + (widest - smallest) // 5, (smallest + widest) // 2, widest):
        told.clear()
        found = sized.choose(source, text(300, 32), most, carried=carried, progress=lambda *of: told.append(of))
        assert found.nbytes == sized.room(source, found.kinds) <= most
        assert found.kinds.keys() == {name for name, tensor in source.tensors.items() if len(tensor.shape) == 2}
        for layer in range(2):
            gate, up = (found.kinds[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up"))
            assert gate == up
        assert found.predicted_kld == pytest.approx(sum(p["harms"].get(p["type"], 0.0) for p in found.parts))
        assert told[-1][1] == told[-1][2] == 16
        costs.append(found.predicted_kld)
        made = rounded(source, found.kinds)
        assert all(tensor.dtype == found.kinds[name] for name, tensor in made.tensors.items() if name in found.kinds)
    assert costs == sorted(costs, reverse=True)
    assert (costs[-1], set(found.kinds.values())) == (0.0, {"F16"})
    with pytest.raises(BadRequest, match=f"take {smallest} bytes at least, more than {smallest - 1}"):
        sized.choose(source, text(300, 32), smallest - 1, carried=carried)


def test_a_matrix_that_no_scale_reaches_is_named() -> None:
    config = tiny_config(vocab_size=32)
    name = "model.layers.1.mlp.up_proj.weight"
    weights = random_weights(config)
    source = in_memory(config, {**weights, name: np.full_like(weights[name], 40_000)})
    with pytest.raises(Unsupported, match=f"'{name}': weights of 32768 and more .*; use bf16 or f32"):
        sized.choose(source, text(300, 32), 10**6, carried=False)


def test_a_size_with_room_for_more_keeps_the_blocks_there_are() -> None:
    """They became F16, four times as large and no nearer to themselves."""
    config = tiny_config(hidden_size=256, intermediate_size=256, head_dim=64, vocab_size=32)
    source = in_memory(config, random_weights(config))
    once = rounded(source, dict.fromkeys(sized.least(source), "Q4_K"))
    found = sized.choose(once, text(300, 32), 10**9, carried=False)
    assert (set(found.kinds.values()), found.predicted_kld) == ({"Q4_K"}, 0.0)
    smaller = sized.choose(once, text(300, 32), found.nbytes - 1, carried=False)
    assert smaller.nbytes < found.nbytes
    assert smaller.predicted_kld > 0
    assert "F16" not in smaller.kinds.values()  # small steps to Q4_K were given back where larger ones saved too much


@pytest.mark.parametrize("carried", [False, True])
def test_what_overflows_on_the_text_is_told(carried: bool) -> None:
    config = tiny_config(vocab_size=32)
    weights = random_weights(config)
    source = in_memory(config, {name: w * np.float32(1e20) if "norm" in name else w for name, w in weights.items()})
    with pytest.raises(BadFile, match="is fed what is infinite, or no number, by the text to calibrate on"):
        sized.choose(source, text(300, 32), 10**9, carried=carried)


def test_better_than_one_type_for_all() -> None:
    """Of a model in which one layer says nearly all: at Q5_0's size, by the oracle."""
    config = tiny_config(num_hidden_layers=3)
    weights = random_weights(config)
    for name in weights:
        if "layers.1" in name and name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= np.float32(0.02)
    source = in_memory(config, weights)
    uniform = dict.fromkeys(sized.least(source), "Q5_0")
    found = sized.choose(source, text(2000), sized.room(source, uniform), carried=False)
    unseen = text(100, seed=7)
    one, other = (
        divergence(config, weights, {n: t.read() for n, t in rounded(source, kinds).tensors.items()}, unseen)
        for kinds in (found.kinds, uniform)
    )
    assert one < 0.8 * other


@given(
    harms=st.lists(st.lists(st.floats(0.001, 10), min_size=2, max_size=2), min_size=1, max_size=5),
    share=st.floats(0, 1),
)
def test_as_little_harm_as_any_choice_of_that_size_but_for_the_last_step(
    harms: list[list[float]], share: float
) -> None:
    sizes = {"F16": 16, "Q8_0": 9, "Q4_0": 5}
    parts = [Part(str(n), {kind: (n + 1) * size for kind, size in sizes.items()}) for n in range(len(harms))]
    of = {
        part.name: dict(zip(("Q8_0", "Q4_0"), sorted(harm), strict=True))
        for part, harm in zip(parts, harms, strict=True)
    }
    whole = sum(part.nbytes["F16"] for part in parts)
    most = whole - int(share * (whole - sum(part.nbytes["Q4_0"] for part in parts)))
    taken = sized.within(in_order(parts, "F16", of), whole - most)
    chosen = {part.name: "F16" for part in parts} | {step.part: step.format for step in taken}

    def size(kinds: tuple[str, ...]) -> int:
        return sum(part.nbytes[kind] for part, kind in zip(parts, kinds, strict=True))

    def harm(kinds: tuple[str, ...]) -> float:
        return sum(of[part.name].get(kind, 0.0) for part, kind in zip(parts, kinds, strict=True))

    own = tuple(chosen[part.name] for part in parts)
    assert size(own) <= most
    least = min(harm(kinds) for kinds in product(sizes, repeat=len(parts)) if size(kinds) <= most)
    # What the knapsack's own bound allows: the harm of one step, that which it was broken at.
    assert harm(own) <= least + max((step.harm for step in taken), default=0.0) + 1e-9


def test_formats_of_one_size_are_no_steps() -> None:
    """Short rows are filled up: F16 and Q8_0 of one size were a division by zero."""
    part = Part("a", {"F16": 64, "Q8_0": 64, "Q4_0": 32})
    (step,) = in_order([part], "F16", {"a": {"Q8_0": 0.1, "Q4_0": 0.2}})
    assert (step.format, step.saved) == ("Q4_0", 32)
