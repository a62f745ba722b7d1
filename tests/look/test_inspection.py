"""Backend.inspect on both engines, beside the float64 oracle and beside transformers; and without a trace elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from adapters import random_adapter
from peers import hugging_face
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk import system
from pronk.config import ModelConfig
from pronk.cpu_engine import ENGINE as CPU
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.backend import Backend, Inspection
from pronk.engine.batch import Batch, Run
from pronk.errors import PronkError
from pronk.formats import KV_TYPES

torch = pytest.importorskip("torch")
from pronk.torch_engine.backend import TorchBackend  # noqa: E402

# A number is about 4, a sum in float32 off by some parts in 2^24 of it, over two blocks (test_cpu_model's bound).
TOLERANCE = 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5


def backends(config: ModelConfig, weights: dict[str, np.ndarray] | None = None) -> dict[str, Backend]:
    checkpoint = in_memory(config, weights or random_weights(config))
    return {
        "cpu": CpuBackend.from_checkpoint(checkpoint, quantize="f32", kv_dtype="f32", threads=2),
        "flash": TorchBackend.from_checkpoint(checkpoint, device="cpu"),
        "math": TorchBackend.from_checkpoint(checkpoint, device="cpu", attn="math"),
    }


def looked(backend: Backend, ids: list[int], row: int, **wants: Any) -> Inspection:
    """Of one row of a text, in one pass without a cache."""
    batch = replace(Batch.of([Run(ids)]), logits_rows=np.array([row], np.int32))
    layers = range(backend.config.num_hidden_layers)
    return backend.inspect(batch, None, **{"layers": layers, "lens": True, **wants})


def expected(config: ModelConfig, ids: list[int], row: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The oracle's residual stream [L + 1, C] and attention [L, H, row + 1]: recorded on their way through it."""
    streams, turned = [], []
    norm, rotate = oracle._norm, oracle._rotate

    def recording_norm(x, *rest):  # type: ignore[no-untyped-def]
        streams.append(x[row])
        return norm(x, *rest)

    def recording_rotate(*given):  # type: ignore[no-untyped-def]
        turned.append(rotate(*given))
        return turned[-1]

    with monkeypatch.context() as patch:
        patch.setattr(oracle, "_norm", recording_norm)
        patch.setattr(oracle, "_rotate", recording_rotate)
        oracle.logits(config, random_weights(config), ids)
    rows = []
    for keys, queries in zip(turned[::2], turned[1::2], strict=True):
        scores = keys[: row + 1] @ queries[row] / math.sqrt(config.head_dim)
        rows.append(np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum())
    attention = np.reshape(rows, (config.num_hidden_layers, config.num_attention_heads, row + 1))
    return np.array([*streams[::2]]), attention  # every other norm is the one before the MLP


@pytest.mark.parametrize("name", CONFIGS)
def test_both_engines_show_what_the_oracle_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the first token, one amid the text, and the last; the text is longer than the dynamic one was trained for."""
    config = tiny_config(**CONFIGS[name])
    ids = np.random.default_rng(1).integers(0, config.vocab_size, 16 if name == "dynamic" else 90).tolist()
    weights = random_weights(config)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"].astype(np.float64)
    for row in (0, 7, len(ids) - 1):
        hidden, attention = expected(config, ids, row, monkeypatch)
        norm = weights["model.norm.weight"].astype(np.float64)
        lens = oracle._norm(hidden, norm, config.rms_norm_eps) @ head.T
        for engine, backend in backends(config).items():
            found = looked(backend, ids, row)
            assert found.lens is not None
            assert found.hidden.dtype == found.attention.dtype == found.lens.dtype == np.float32
            assert np.abs(found.hidden - hidden).max() < TOLERANCE, engine
            assert np.abs(found.attention - attention).max() < TOLERANCE, engine
            assert np.abs(found.lens - lens).max() < TOLERANCE, engine
            assert np.abs(found.attention.sum(-1) - 1).max() < 1e-6, engine


def test_an_attention_row_over_several_spans_of_keys() -> None:
    """256 keys are taken together, and 64 lie in a block: 600 are in three spans."""
    config = tiny_config(max_position_embeddings=1024, num_key_value_heads=2)
    ids = np.random.default_rng(2).integers(0, config.vocab_size, 600).tolist()
    engines = backends(config)
    for row in (63, 64, 255, 256, 599):
        ours, theirs = (looked(engines[name], ids, row, lens=False) for name in ("cpu", "math"))
        assert ours.lens is None
        assert np.abs(ours.attention - theirs.attention).max() < TOLERANCE


@pytest.mark.parametrize("name", ["gqa", "mqa", "tied", "llama3"])
def test_the_lens_is_that_of_transformers_hidden_states(name: str) -> None:
    """Hidden states of theirs, their own norm and head; their last hidden state has been through the norm."""
    config = tiny_config(**CONFIGS[name])
    weights = random_weights(config)
    theirs = hugging_face(config, weights)
    ids = list(range(3, 40))
    with torch.inference_mode():
        seen = theirs(torch.tensor([ids]), output_hidden_states=True, output_attentions=True)
        through = [theirs.lm_head(theirs.model.norm(x)) for x in seen.hidden_states[:-1]]
        lens = torch.cat([*through, seen.logits]).numpy()  # [L + 1, T, V]
        streams = torch.cat(seen.hidden_states[:-1]).numpy()
        attention = torch.cat(seen.attentions).numpy()  # [L, H, T, T]
    for engine, backend in backends(config, weights).items():
        for row in (0, 20, 36):
            found = looked(backend, ids, row)
            assert found.lens is not None
            assert np.abs(found.hidden[:-1] - streams[:, row]).max() < TOLERANCE, engine
            assert np.abs(found.lens - lens[:, row]).max() < TOLERANCE, engine
            assert np.abs(found.attention - attention[:, :, row, : row + 1]).max() < TOLERANCE, engine


@pytest.mark.parametrize("kv_dtype", KV_TYPES)
@pytest.mark.parametrize("quantize", CPU.formats)
def test_every_format_shows_the_very_pass_that_it_computes(quantize: str, kv_dtype: str) -> None:
    """To the bit: the last row of the lens is the logits, however the token was batched, cached or adapted."""
    config = tiny_config(hidden_size=128, intermediate_size=96, vocab_size=96)
    backend = CpuBackend.from_checkpoint(
        in_memory(config, random_weights(config)), quantize=quantize, kv_dtype=kv_dtype, threads=2
    )
    adapter, ids, row = backend.attach(random_adapter(config)), list(range(5, 85)), 70
    for number in (0, adapter):
        text = Run(ids[: row + 1], adapter=number)
        logits = backend.forward(Batch.of([text]), None)[0]
        alone = backend.inspect(Batch.of([text]), None, [1], lens=True)
        beside = Batch.of([Run(ids[::-1], logits="none"), Run(ids, logits="none", adapter=number)])
        beside = backend.inspect(replace(beside, logits_rows=np.array([80 + row], np.int32)), None, [1], lens=True)
        kv = backend.new_kv(2, 64)
        backend.forward(Batch.of([Run(ids[:row], 0, (0, 1), "none", number)]), kv)
        cached = backend.inspect(Batch.of([Run(ids[row : row + 1], row, (0, 1), adapter=number)]), kv, [1], lens=True)
        for found in (alone, beside, cached):
            assert found.lens is not None
            assert np.array_equal(found.lens[-1], logits)
            assert np.array_equal(found.lens, alone.lens)
            assert np.array_equal(found.hidden, alone.hidden)
            assert np.array_equal(found.attention, alone.attention)
    assert not np.array_equal(found.hidden, looked(backend, ids[: row + 1], row).hidden)  # the adapter's is another


@pytest.mark.parametrize("way", ["bf16", "f16", "int8", "llm-int8", "absmax"])
def test_every_type_of_the_torch_engine_shows_its_own_logits(way: str) -> None:
    config = tiny_config()
    backend = TorchBackend.from_checkpoint(in_memory(config, random_weights(config)), device="cpu", quantize=way)
    ids = list(range(5, 45))
    found = looked(backend, ids, 39)
    logits = backend.forward(Batch.of([Run(ids)]), None)[0]
    assert found.lens is not None
    noise = np.abs(backend.perturbed().forward(Batch.of([Run(ids)]), None)[0] - logits).max()
    assert np.abs(found.lens[-1] - logits).max() <= max(noise, 1e-5)
    assert np.abs(found.attention.sum(-1) - 1).max() < 1e-2


def test_passes_before_and_after_are_what_they_were() -> None:
    """Decoding goes on where a look came between, also where the next pass had been begun ahead."""
    config = tiny_config()

    def decoded(look: bool) -> np.ndarray:
        backend = backends(config)["cpu"]
        kv, rows, token = backend.new_kv(2, 64), [], 5
        for position in range(40):
            rows.append(backend.forward(Batch.of([Run([token], position, (0,))]), kv)[0])
            token = int(rows[-1].argmax())
            if look and position % 3 == 0:
                kv.copy([(0, 1)])
                backend.inspect(Batch.of([Run([token], position + 1, (1,))]), kv, [0], lens=True)
        return np.array(rows)

    assert np.array_equal(decoded(look=False), decoded(look=True))


def test_the_native_module_checks_what_it_is_given() -> None:
    config = tiny_config()
    backend = backends(config)["cpu"]
    assert isinstance(backend, CpuBackend)
    layers, heads, width = config.num_hidden_layers, config.num_attention_heads, config.hidden_size

    def call(**changes: Any) -> None:
        given = {
            **backend._arguments(Batch.of([Run(list(range(8)))]), None),
            "logits_rows": np.array([7], np.int32),
            "layers": np.array([1], np.int32),
            "hidden": np.empty((layers + 1, width), np.float32),
            "scores": np.empty((1, heads, 8), np.float32),
            "lens": np.empty((layers + 1, config.vocab_size), np.float32),
        }
        backend.model.inspect(**{**given, **changes})

    call()
    call(lens=None, layers=np.empty(0, np.int32), scores=np.empty((0, heads, 0), np.float32))
    for changes, problem in (
        ({"logits_rows": np.array([6, 7], np.int32)}, "one row is looked at, not 2"),
        ({"logits_rows": np.empty(0, np.int32)}, "one row is looked at, not 0"),
        ({"logits_rows": np.array([8], np.int32)}, "must ascend within 8"),
        ({"layers": np.array([2], np.int32)}, "layer must be from 0 to 1, not 2"),
        ({"layers": np.array([-1], np.int32)}, "layer must be from 0 to 1, not -1"),
        ({"layers": np.array([1, 1], np.int32), "scores": np.empty((2, heads, 8), np.float32)}, "named twice"),
        ({"scores": np.empty((1, heads, 7), np.float32)}, "8 scores do not fit in 7"),
        ({"scores": np.empty((2, heads, 8), np.float32)}, "scores must be of shape"),
        ({"hidden": np.empty((layers, width), np.float32)}, "hidden must be of shape"),
        ({"lens": np.empty((layers + 1, 5), np.float32)}, "lens must be of shape"),
    ):
        with pytest.raises(ValueError, match=problem):
            call(**changes)
    for changes in ({"hidden": np.empty((layers + 1, width))}, {"scores": None}, {"layers": [1]}):
        with pytest.raises(TypeError):
            call(**changes)


def test_what_does_not_fit_in_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backends(tiny_config())["cpu"]
    monkeypatch.setattr(system, "free_memory", lambda: 1000)
    with pytest.raises(PronkError, match=r"looking at a token needs .*; look at fewer layers at a time"):
        looked(backend, list(range(20)), 19)
