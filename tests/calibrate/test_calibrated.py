"""A whole model calibrated: the walk through its layers is the model, and what comes of it answers better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import CONFIGS, in_memory, random_weights, tiny_config

import pronk
from pronk import checkpoint
from pronk.calibrate import CTX, MOST, NAMES
from pronk.calibrate.calibrated import Walk, calibrated, rounded, to_round, types, windows
from pronk.checkpoint.writers import write
from pronk.errors import BadFile, BadRequest, Unsupported

HEADS = {True: "model.embed_tokens.weight", False: "lm_head.weight"}


def text(tokens: int, vocabulary: int = 96, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).tolist()


@pytest.mark.parametrize("name", CONFIGS)
def test_without_rounding_the_walk_is_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(**CONFIGS[name])
    weights = random_weights(config)
    seen: dict[str, NDArray[Any]] = {}

    def unrounded(self: Walk, name: str, weights: NDArray[Any], upper: Any) -> NDArray[Any]:
        seen[name] = weights
        return weights

    monkeypatch.setattr(Walk, "_rounded", unrounded)
    ids = text(140, config.vocab_size)
    texts = windows(ids, config.max_position_embeddings)
    walk = Walk(in_memory(config, weights), dict.fromkeys(weights, "F16"), texts, lambda *_: None)
    walk.made()
    fed = walk._norm("model.norm.weight")
    found = fed @ weights[HEADS[config.tie_word_embeddings]].T
    ctx = min(len(ids), config.max_position_embeddings)
    expected = [oracle.logits(config, weights, ids[at : at + ctx]) for at in range(0, len(ids), ctx)]
    np.testing.assert_allclose(found, np.concatenate(expected), rtol=0, atol=2e-5 * np.abs(found).max())
    assert seen.keys() == {name for name, array in weights.items() if array.ndim == 2}


def divergence(weights: Any, found: checkpoint.Checkpoint, ids: list[int]) -> float:
    config = found.config
    made = {name: tensor.read().astype(np.float32) for name, tensor in found.tensors.items()}
    one, other = (_log_softmax(oracle.logits(config, of, ids)) for of in (weights, made))
    return float((np.exp(one) * (one - other)).sum(-1).mean())


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("name", NAMES)
def test_answers_on_another_text_are_nearer(name: str) -> None:
    config = tiny_config(hidden_size=256, intermediate_size=256, head_dim=16, vocab_size=32)
    weights = random_weights(config)
    source = in_memory(config, weights)
    kinds = types(source, name)
    assert kinds["model.layers.0.mlp.up_proj.weight"] == NAMES[name]
    assert kinds["lm_head.weight"] == "Q6_K"
    unseen = text(60, 32, seed=1)
    plain = divergence(weights, rounded(source, kinds), unseen)
    found = divergence(weights, calibrated(source, kinds, text(2000, 32)), unseen)
    assert found < 0.8 * plain


@pytest.mark.parametrize("name", ["gqa", "tied", "odd", "biases"])
def test_what_was_made_is_what_is_written(name: str, tmp_path: Path) -> None:
    config = tiny_config(**CONFIGS[name])
    source = in_memory(config, random_weights(config))
    made = calibrated(source, types(source, "q3_k"), text(200, config.vocab_size))
    write.save(made, tmp_path / "m.gguf", to="gguf", dtype={})
    found = checkpoint.open(tmp_path / "m.gguf")
    for tensor, wrote in ((found.tensors[n], made.tensors[n]) for n in made.tensors):
        assert (tensor.dtype, tensor.shape) == (wrote.dtype, wrote.shape)
        np.testing.assert_array_equal(tensor.read(), wrote.read())
    again = calibrated(source, types(source, "q3_k"), text(200, config.vocab_size))
    assert all(np.array_equal(again.tensors[n].read(), made.tensors[n].read()) for n in made.tensors)
    assert pronk.load(tmp_path / "m.gguf", engine="cpu").logits([1, 2, 3]).shape == (3, config.vocab_size)


def test_types_by_what_fits() -> None:
    config = tiny_config(hidden_size=96, intermediate_size=256, num_attention_heads=3, num_key_value_heads=3)
    for name, narrow in (("q2_k", "Q4_0"), ("q4_k", "Q4_1"), ("q5_k", "Q5_1"), ("q6_k", "Q8_0"), ("q4_0", "Q4_0")):
        kinds = types(in_memory(config, random_weights(config)), name)
        assert kinds["model.layers.0.mlp.up_proj.weight"] == narrow
        assert kinds["model.layers.0.mlp.down_proj.weight"] == NAMES[name]
        assert kinds["model.layers.0.self_attn.o_proj.weight"] == "F16"  # rows of 24
        outer = "Q4_1" if narrow == "Q4_0" else narrow
        assert kinds["model.embed_tokens.weight"] == kinds["lm_head.weight"] == outer


def test_refusals() -> None:
    config = tiny_config()
    weights = random_weights(config)
    source = in_memory(config, weights)
    kinds = types(source, "q4_0")
    with pytest.raises(BadRequest, match="takes 128 tokens at least; this one has 3"):
        calibrated(source, kinds, [1, 2, 3])
    with pytest.raises(BadRequest, match="'q4_4' is no block type; choose from q2_k"):
        types(source, "q4_4")
    name = "model.layers.1.mlp.up_proj.weight"
    for value, problem in (
        (np.inf, (BadFile, "infinity")),
        (1e9, (Unsupported, "of 32768 and more are not")),
    ):
        broken = in_memory(config, {**weights, name: np.full_like(weights[name], value)})
        with pytest.raises(problem[0], match=problem[1]):
            calibrated(broken, kinds, text(200))


@pytest.mark.parametrize("kind", ["q4_0", "q4_k", "q2_k"])
def test_blocks_of_the_type_asked_for_are_kept(kind: str) -> None:
    """They were rounded again, which cost 0.0001 to 0.0007 nats of KLD."""
    config = tiny_config(hidden_size=256, intermediate_size=256, head_dim=64)
    source = in_memory(config, random_weights(config))
    once = rounded(source, types(source, kind))
    assert not to_round(once, types(once, kind))
    for again in (rounded(once, types(once, kind)), calibrated(once, types(once, kind), text(200))):
        for name, tensor in once.tensors.items():
            assert again.tensors[name].dtype == tensor.dtype
            assert (again.tensors[name].read() == tensor.read()).all()
    other = calibrated(once, types(once, "q3_k"), text(200))
    assert {other.tensors[name].dtype for name in to_round(once, types(once, "q3_k"))} == {"Q3_K"}


def test_progress_tells_of_every_matrix() -> None:
    source = in_memory(tiny_config(), random_weights(tiny_config()))
    told: list[tuple[str, int, int]] = []
    calibrated(source, types(source, "q4_0"), text(200), lambda *of: told.append(of))
    assert len(told) == 16
    assert told[-1][1] == told[-1][2] == sum(t.nbytes for t in source.tensors.values() if len(t.shape) == 2)


@given(tokens=st.integers(128, 40_000), longest=st.integers(16, 2048))
def test_windows_are_spread_over_the_whole_text(tokens: int, longest: int) -> None:
    texts = windows(range(tokens), longest)
    ctx, read = min(CTX, longest), sum(map(len, texts))
    assert all(len(text) == ctx for text in texts[:-1])
    assert read == tokens if tokens <= MOST // ctx * ctx else MOST - 2 * ctx < read <= MOST
    starts = [text[0] for text in texts]
    gaps = np.diff([*starts, tokens])
    assert starts[0] == 0
    assert gaps.min() > 0  # without overlap, and none more than a window's length from even
    assert gaps.max() <= tokens / len(texts) + 2 * ctx
    assert all(text[-1] - text[0] == len(text) - 1 for text in texts)


def test_a_model_that_overflows_on_the_text_is_named() -> None:
    """It was a LinAlgError's traceback."""
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.0.post_attention_layernorm.weight"] *= np.float32(1e30)
    ids = text(140, config.vocab_size)
    with np.errstate(all="ignore"), pytest.raises(BadFile, match=r"layers.0.mlp.gate_proj.*infinite, or no number"):
        Walk(in_memory(config, weights), dict.fromkeys(weights, "F16"), windows(ids, 128), lambda *_: None).made()
