"""What each product is fed: against the float64 oracle, and without a trace where nobody looks."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk import system
from pronk.config import ModelConfig
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.errors import PronkError

INPUTS = {"q_proj": "qkv", "o_proj": "o", "gate_proj": "gate_up", "down_proj": "down"}
TOLERANCE = 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5  # as in test_cpu_model.py


def backend(config: ModelConfig, threads: int = 1) -> CpuBackend:
    return CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), kv_dtype="f32", threads=threads)


def expected(config: ModelConfig, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[int, str], np.ndarray]:
    """The oracle's, recorded on their way into `_linear`; the head's comes from its last norm."""
    seen: dict[tuple[int, str], np.ndarray] = {}
    linear, norm = oracle._linear, oracle._norm

    def recording_linear(w, name, x):  # type: ignore[no-untyped-def]
        *path, role = name.split(".")
        if role in INPUTS:
            seen[int(path[2]), INPUTS[role]] = x
        return linear(w, name, x)

    def recording_norm(*arguments):  # type: ignore[no-untyped-def]
        seen[-1, "head"] = norm(*arguments)
        return seen[-1, "head"]

    with monkeypatch.context() as patch:
        patch.setattr(oracle, "_linear", recording_linear)
        patch.setattr(oracle, "_norm", recording_norm)
        oracle.logits(config, random_weights(config), ids)
    return seen


@pytest.mark.parametrize("name", ["gqa", "tied", "biases", "odd"])
@pytest.mark.parametrize("threads", [1, 2])
def test_activations_equal_the_oracle(name: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two texts in one batch, whatever rows of it want logits."""
    config = tiny_config(**CONFIGS[name])
    texts = [np.random.default_rng(n).integers(0, config.vocab_size, n).tolist() for n in (30, 9)]
    batch = Batch.of([Run(texts[0], logits="none"), Run(texts[1])])
    found = backend(config, threads).activations(batch, None)
    each = [expected(config, text, monkeypatch) for text in texts]
    assert found.keys() == each[0].keys() == {(-1, "head"), *((n, i) for n in (0, 1) for i in INPUTS.values())}
    for key, array in found.items():
        assert np.abs(array - np.concatenate([text[key] for text in each])).max() < TOLERANCE, key


def test_one_token_after_others() -> None:
    """Decoding has a way of its own, and finds in the cache what this pass left there."""
    engine, text = backend(tiny_config(), threads=2), list(range(20, 60))
    whole = engine.activations(Batch.of([Run(text)]), None)
    kv = engine.new_kv(1, 64)
    first = engine.activations(Batch.of([Run(text[:-1], 0, (0,))]), kv)
    last = engine.activations(Batch.of([Run(text[-1:], len(text) - 1, (0,))]), kv)
    for key, array in whole.items():
        assert np.array_equal(array, np.concatenate([first[key], last[key]])), key


def test_a_pass_is_the_same_with_and_without() -> None:
    engine, batch = backend(tiny_config()), Batch.of([Run(list(range(20)), logits="all")])
    head = engine.activations(batch, None)[-1, "head"]
    weight = random_weights(tiny_config())["lm_head.weight"]
    assert np.abs(engine.forward(batch, None) - head @ weight.T).max() < TOLERANCE


def test_what_does_not_fit_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = backend(tiny_config())
    monkeypatch.setattr(system, "free_memory", lambda: 10_000)
    with pytest.raises(PronkError, match=r"activations of 20 tokens needs .*; take fewer at a time"):
        engine.activations(Batch.of([Run(list(range(20)))]), None)
