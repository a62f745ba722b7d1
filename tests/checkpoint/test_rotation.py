"""A rotated twin: the same function by two independent oracles, other weights, and the same twin for the same seed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import saved_models
import torch
import transformers
from formats import save_huggingface
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk.checkpoint import rotation
from pronk.checkpoint.rotation import orthogonal, rotated
from pronk.checkpoint.tensors import Checkpoint
from pronk.errors import BadFile, BadRequest

IDS = [(7919 * n + 1) % 51 for n in range(24)]
EPS = float(np.finfo(np.float32).eps)

Weights = dict[str, NDArray[Any]]


def model(shape: str, seed: int = 0) -> tuple[Checkpoint, Weights]:
    config = tiny_config(**CONFIGS[shape])
    weights = random_weights(config, seed)
    return in_memory(config, weights), weights


def moved(checkpoint: Checkpoint, weights: Weights, twin: Checkpoint) -> float:
    """The largest difference of logits, in float64: of weights, not of sums."""
    before = oracle.logits(checkpoint.config, weights, IDS)
    return float(np.abs(oracle.logits(twin.config, saved_models.numbers(twin), IDS) - before).max())


def tolerance(checkpoint: Checkpoint, weights: Weights) -> float:
    """What rounding weights once may do: eight times the most that it did in four tries, of weights a half unit off.

    The twin's weights are rounded to float32, each by up to half a unit in its last place, and so are these: each by
    half a unit, up or down. What the logits then make of it is the model's own, and no twin's.
    """
    before, worst = oracle.logits(checkpoint.config, weights, IDS), 0.0
    for seed in range(4):
        draw = np.random.default_rng(seed)
        off = {n: w * (1 + EPS / 2 * draw.choice((-1.0, 1.0), w.shape)) for n, w in weights.items()}
        worst = max(worst, float(np.abs(oracle.logits(checkpoint.config, off, IDS) - before).max()))
    return 8 * worst


@pytest.mark.parametrize("shape", CONFIGS)
def test_a_twin_is_the_same_function(shape: str) -> None:
    checkpoint, weights = model(shape)
    twin = rotated(checkpoint, 1)
    assert moved(checkpoint, weights, twin) <= tolerance(checkpoint, weights)
    assert {name: tensor.shape for name, tensor in twin.tensors.items()} == twin.config.tensor_shapes()
    assert not twin.config.tie_word_embeddings


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**64), st.sampled_from(sorted(CONFIGS)))
def test_whatever_the_seed(seed: int, shape: str) -> None:
    checkpoint, weights = model(shape, seed % 1000)
    assert moved(checkpoint, weights, rotated(checkpoint, seed)) <= tolerance(checkpoint, weights)


@pytest.mark.parametrize("shape", ["mha", "gqa", "tied", "biases", "llama3"])
def test_transformers_finds_the_same_logits(shape: str, tmp_path: Path) -> None:
    checkpoint, weights = model(shape)
    twin = rotated(checkpoint, 2)
    logits = []
    for name, config, of in (
        ("before", checkpoint.config, weights),
        ("twin", twin.config, saved_models.numbers(twin)),
    ):
        folder = save_huggingface(tmp_path / name, config, of)
        theirs = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64)
        with torch.no_grad():
            logits.append(theirs(torch.tensor([IDS])).logits[0].numpy())
    assert np.abs(logits[1] - logits[0]).max() <= tolerance(checkpoint, weights)


def without(norm: str) -> Callable[[str], str | None]:
    """As the module finds the norm that a matrix takes in, but one is forgotten."""
    found = rotation._norm_before

    def forgetful(name: str) -> str | None:
        before = found(name)
        return None if before and norm in before else before

    return forgetful


@pytest.mark.parametrize("norm", ["layers.0.input_layernorm", "layers.1.post_attention_layernorm", "model.norm"])
def test_a_fold_that_is_left_out_is_found(norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, weights = model("tied")
    monkeypatch.setattr(rotation, "_norm_before", without(norm))
    assert moved(checkpoint, weights, rotated(checkpoint, 1)) > 1e4 * tolerance(checkpoint, weights)


@pytest.mark.parametrize("writer", ["o_proj", "down_proj"])
def test_a_writer_that_is_not_turned_is_found(writer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, weights = model("biases")
    turned = rotated(checkpoint, 1)
    for leaf in ("weight", "bias"):
        name = f"model.layers.0.{'mlp' if writer == 'down_proj' else 'self_attn'}.{writer}.{leaf}"
        tensors = {**turned.tensors, name: checkpoint.tensors[name]}
        twin = in_memory(turned.config, {n: t.read() for n, t in tensors.items()})
        assert moved(checkpoint, weights, twin) > 1e4 * tolerance(checkpoint, weights)


def test_the_matrix_is_orthogonal_and_drawn_evenly() -> None:
    """The trace of such a matrix has mean 0 and variance 1, whatever its size (Diaconis and Shahshahani, 1994)."""
    q = orthogonal(192, 5)
    assert np.abs(q @ q.T - np.eye(192)).max() < 192 * np.finfo(np.float64).eps * 4
    assert not np.array_equal(q, orthogonal(192, 6))
    traces = [np.trace(orthogonal(4, seed)) for seed in range(400)]
    assert abs(np.mean(traces)) < 4 / np.sqrt(400)  # four standard errors
    assert abs(np.var(traces) - 1) < 4 * np.sqrt(2 / 400)


def test_signs_that_lapack_chose_are_found() -> None:
    """Why R's diagonal is made positive: without that, the mean trace is far from 0."""
    draws = (np.random.default_rng(seed).standard_normal((4, 4)) for seed in range(400))
    assert abs(np.mean([np.trace(np.linalg.qr(draw)[0]) for draw in draws])) > 8 / np.sqrt(400)


def test_a_seed_is_a_twin() -> None:
    checkpoint, _ = model("gqa")
    numbers = [saved_models.numbers(rotated(checkpoint, seed)) for seed in (3, 3, 4)]
    for name, array in numbers[0].items():
        assert np.array_equal(array, numbers[1][name])
        assert "norm" in name or not np.array_equal(array, numbers[2][name])


def test_matrices_larger_than_a_piece_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, _ = model("biases")
    whole = saved_models.numbers(rotated(checkpoint, 3))
    monkeypatch.setattr(rotation, "_PIECE", 5 * 64)  # five rows at a time, and a rest
    for name, array in saved_models.numbers(rotated(checkpoint, 3)).items():
        assert np.allclose(array, whole[name], rtol=EPS, atol=0), name  # other sizes of products may round otherwise


def test_what_cannot_be_rotated_is_refused() -> None:
    checkpoint, weights = model("gqa")
    with pytest.raises(BadRequest, match="the seed of a rotation"):
        rotated(checkpoint, -1)
    weights["model.layers.0.mlp.up_proj.weight"][3, 4] = np.inf
    twin = rotated(checkpoint, 1)
    with pytest.raises(BadFile, match=r"up_proj.weight, rotated.*infinity or NaN"):
        twin.tensors["model.layers.0.mlp.up_proj.weight"].read()


def test_nothing_is_read_before_it_is_asked_for() -> None:
    checkpoint, _ = model("tied")

    def never() -> NDArray[Any]:
        raise AssertionError("read")

    tensors = {name: replace(tensor, read=never) for name, tensor in checkpoint.tensors.items()}
    twin = rotated(replace(checkpoint, tensors=tensors), 1)
    with pytest.raises(AssertionError, match="read"):
        twin.tensors["lm_head.weight"].read()
