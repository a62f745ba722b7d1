"""AutoRound: what is learned is what is written, errors fall below plain rounding's, and nothing moves in no steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk import checkpoint
from pronk.calibrate import gptq, packing
from pronk.calibrate.calibrated import calibrated, rounded, types
from pronk.calibrate.grids import RULES
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.writers import write
from pronk.errors import BadFile, BadRequest, Unsupported
from pronk.train import autoround
from pronk.train.autoround import _Layer, autorounded
from pronk.train.rounding import FARTHEST, Rounding

EVEN = [kind for kind, rule in RULES.items() if not rule.curved]
HEADS = ("model.embed_tokens.weight", "lm_head.weight")


def text(tokens: int, vocabulary: int = 96, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocabulary, tokens).tolist()


def matrix(seed: int = 0) -> NDArray[np.float32]:
    """With outliers, a group of nothing, a group of one number, and one far from 0."""
    rng = np.random.default_rng(seed)
    w = rng.normal(0, 1, (8, 512)).astype(np.float32)
    w[rng.random(w.shape) < 0.01] *= 20
    w[0, :256], w[1, :32], w[2, :32] = 0, 0.7, w[2, :32] / 100 + 5
    return w


def inputs(tokens: int, columns: int) -> NDArray[np.float32]:
    """In which most of what is said lies in a few directions."""
    rng = np.random.default_rng(1)
    few = rng.normal(0, 1, (tokens, columns // 16)) @ rng.normal(0, 1, (columns // 16, columns))
    return (few + rng.normal(0, 0.3, (tokens, columns))).astype(np.float32)


def packed(made: gptq.Rounded) -> NDArray[np.uint8]:
    return packing.blocks(made)


def learned(kind: str, steps: int) -> tuple[Rounding, list[float]]:
    """A matrix alone, by the product that it is in; the errors on the way."""
    w, x = torch.from_numpy(matrix()), torch.from_numpy(inputs(256, 512))
    rounding = Rounding(w, gptq.rounded(w.numpy(), None, kind))
    errors = []
    for step in range(steps):
        error = (x @ (rounding() - w).T).square().sum()
        error.backward()
        rounding.move((1 - step / steps) / steps)
        errors.append(float(error.detach()))
    return rounding, errors


@pytest.mark.parametrize("kind", EVEN)
def test_what_the_last_step_used_is_what_a_file_gives_back(kind: str) -> None:
    rounding, errors = learned(kind, 30)
    with torch.no_grad():
        used = rounding().numpy()
    made = packed(rounding.rounded())
    np.testing.assert_array_equal(gguf_blocks.decode(kind, made), used)
    assert (made != packed(gptq.rounded(matrix(), None, kind))).any()
    assert min(errors) < (0.95 if RULES[kind].bits < 8 else 1) * errors[0]
    assert all(parameter.abs().max() <= FARTHEST for parameter in rounding.parameters())


@pytest.mark.parametrize("kind", EVEN)
def test_while_nothing_has_moved_it_is_plain_rounding(kind: str) -> None:
    plain = gptq.rounded(matrix(), None, kind)
    rounding = Rounding(torch.from_numpy(matrix()), plain)
    np.testing.assert_array_equal(packed(rounding.rounded()), packed(plain))
    with torch.no_grad():
        np.testing.assert_array_equal(rounding().numpy(), gguf_blocks.decode(kind, packed(plain)))


def test_gradients_are_those_of_the_plain_formula() -> None:
    """By what is moved, where the rounding itself is taken for nothing: w' = code * step + minimum."""
    w = torch.from_numpy(matrix(3))
    rounding = Rounding(w, gptq.rounded(w.numpy(), None, "Q4_1"))
    by = torch.from_numpy(np.random.default_rng(0).normal(0, 1, w.shape).astype(np.float32))
    (rounding() * by).sum().backward()
    with torch.no_grad():
        parts = rounding._parts()
    assert parts.minimum is not None
    step, by = parts.step[..., None], by.unflatten(1, (-1, 32))
    code = (rounding.weights - parts.minimum[..., None]) / torch.where(step != 0, step, torch.inf)
    inside = (code >= 0) & (code <= 15)
    assert rounding.offset.grad is not None
    np.testing.assert_allclose(rounding.offset.grad, torch.where(inside, by * step, 0), rtol=1e-5)
    by_step = (by * torch.where(inside, parts.codes - code, parts.codes)).sum(-1)
    np.testing.assert_allclose(rounding.top.grad, by_step * rounding.step / 2, rtol=1e-3, atol=1e-3)


def outliers(config: Any) -> dict[str, NDArray[np.float32]]:
    """Of weights, and of what products are fed; that is correlated, for it is made of 32 tokens."""
    weights = random_weights(config)
    rng = np.random.default_rng(5)
    for name, array in weights.items():
        if array.ndim == 2:
            array[rng.random(array.shape) < 0.005] *= 8
        elif "norm" in name:
            array[:2] *= 6
    return weights


def errors_of(made: checkpoint.Checkpoint, weights: dict[str, NDArray[np.float32]], ids: list[int]) -> float:
    """Of what comes out of the last layer."""
    config = made.config
    net = _Layer(config, [len(ids)])
    exact = stream = torch.from_numpy(weights[HEADS[0]][ids])
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        exact = net.all({name: torch.from_numpy(weights[prefix + name]) for name in net.names}, exact)
        read = {name: made.tensors[prefix + name].read().astype(np.float32) for name in net.names}
        stream = net.all({name: torch.from_numpy(array) for name, array in read.items()}, stream)
    return float((stream - exact).square().sum())


@pytest.mark.parametrize(("kind", "changes"), [("q4_0", {}), ("q2_k", {"hidden_size": 256, "intermediate_size": 256})])
def test_a_model_is_nearer_than_plainly_rounded(kind: str, changes: dict[str, int]) -> None:
    config = tiny_config(vocab_size=32, **changes)
    weights = outliers(config)
    source = in_memory(config, weights)
    kinds = types(source, kind)
    ids = text(2000, 32)
    made, plain = autorounded(source, kinds, ids, steps=40), rounded(source, kinds)
    for unseen in (ids[:128], text(128, 32, seed=1)):
        assert errors_of(made, weights, unseen) < 0.8 * errors_of(plain, weights, unseen)


@pytest.mark.parametrize("name", ["gqa", "tied", "odd", "biases", "dynamic"])
def test_in_no_steps_layers_are_rounded_plainly(name: str) -> None:
    config = tiny_config(**CONFIGS[name])
    source = in_memory(config, random_weights(config))
    kinds = types(source, "q4_k")
    made, plain = autorounded(source, kinds, text(140, config.vocab_size), steps=0), rounded(source, kinds)
    for tensor in made.tensors.values():
        if tensor.name not in HEADS:
            np.testing.assert_array_equal(tensor.read(), plain.tensors[tensor.name].read())


@pytest.mark.parametrize("name", ["gqa", "odd", "biases", "llama3", "dynamic"])
def test_the_walk_is_that_of_gptq(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch where that is in numpy: in no steps the head is fed the same, and gets the same H."""
    config = tiny_config(**CONFIGS[name])
    source = in_memory(config, random_weights(config))
    fed: list[NDArray[Any]] = []
    monkeypatch.setattr(gptq, "spread", lambda hessian, damping: fed.append(hessian))  # None: nothing is carried
    for make in (calibrated, lambda *args: autorounded(*args, steps=0)):
        make(source, types(source, "q4_0"), text(140, config.vocab_size))
    one, other = fed[4 * config.num_hidden_layers], fed[-1]
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(one).max())


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    kinds = types(source, "q4_0")
    found = []
    for number, seed in enumerate((0, 0, 1)):
        made = autorounded(source, kinds, text(4000), steps=5, seed=seed)
        write.save(made, tmp_path / f"{number}.gguf", to="gguf", dtype={})
        found.append((tmp_path / f"{number}.gguf").read_bytes())
        opened = checkpoint.open(tmp_path / f"{number}.gguf")
        assert opened.quantization == "Q4_0 x 14, Q4_1 x 2"
        assert all(np.array_equal(opened.tensors[n].read(), made.tensors[n].read()) for n in made.tensors)
    assert found[0] == found[1] != found[2]


def test_the_best_step_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that lead away leave nothing: what is kept is plain rounding."""
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    kinds = types(source, "q4_0")
    move = Rounding.move
    monkeypatch.setattr(Rounding, "move", lambda self, rate: move(self, -rate))
    made, plain = autorounded(source, kinds, text(140), steps=10), rounded(source, kinds)
    for tensor in made.tensors.values():
        if tensor.name not in HEADS:
            np.testing.assert_array_equal(tensor.read(), plain.tensors[tensor.name].read())


def test_refusals() -> None:
    config = tiny_config()
    weights = random_weights(config)
    source = in_memory(config, weights)
    kinds = types(source, "q4_0")
    with pytest.raises(BadRequest, match="takes 128 tokens at least; this one has 3"):
        autorounded(source, kinds, [1, 2, 3])
    with pytest.raises(BadRequest, match="steps must be 0 or more, not -1"):
        autorounded(source, kinds, text(200), steps=-1)
    with pytest.raises(BadRequest, match="AutoRound does not make IQ4_NL"):
        autorounded(source, dict.fromkeys(kinds, "IQ4_NL"), text(200))
    name = "model.layers.1.mlp.up_proj.weight"
    broken = in_memory(config, {**weights, name: np.full_like(weights[name], 1e9)})
    with pytest.raises(Unsupported, match=r"layers.1.mlp.up_proj.*weights of 32768 and more"):
        autorounded(broken, kinds, text(200), steps=1)
    norm = "model.layers.0.post_attention_layernorm.weight"
    broken = in_memory(config, {**weights, norm: weights[norm] * np.float32(1e30)})
    with pytest.raises(BadFile, match="layer 0: is fed what is infinite, or no number"):
        autorounded(broken, kinds, text(200), steps=1)


def test_progress_tells_of_every_step() -> None:
    source = in_memory(tiny_config(), random_weights(tiny_config()))
    told: list[tuple[str, int, int]] = []
    autorounded(source, types(source, "q4_0"), text(200), lambda *of: told.append(of), steps=5)
    done = [of[1] for of in told]
    assert len(told) == 2 + 2 * (5 + 1)
    assert done == sorted(done)
    assert done[-1] == told[-1][2]


def test_an_interrupt_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*of: object) -> None:
        raise KeyboardInterrupt

    source = in_memory(tiny_config(), random_weights(tiny_config()))
    with pytest.raises(KeyboardInterrupt):
        autorounded(source, types(source, "q4_0"), text(200), interrupted, steps=autoround.STEPS)
