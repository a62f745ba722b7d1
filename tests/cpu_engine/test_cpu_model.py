"""The CPU engine against the float64 oracle and the torch engine, in every instruction set that runs here."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk import _native
from pronk.config import ModelConfig
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.backend import Backend
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest
from pronk.llm import LLM

SHAPES = {
    **CONFIGS,
    "wide heads": {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1},
    "narrow heads": {"head_dim": 2},
    "more than a panel": {"hidden_size": 72, "intermediate_size": 200, "vocab_size": 131},
    "one layer": {"num_hidden_layers": 1},
}
LENGTH = 40
# As in tests/torch_engine/test_torch_model.py: roundings of float32, ten times.
TOLERANCE = 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5


def backend(config: ModelConfig, **options: object) -> CpuBackend:
    return CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1, **options)


def some_ids(config: ModelConfig, length: int = LENGTH) -> list[int]:
    return np.random.default_rng(1).integers(0, config.vocab_size, length).tolist()


def whole(engine: Backend, ids: list[int]) -> np.ndarray:
    return engine.forward(Batch.of([Run(ids, logits="all")]), None)


@pytest.mark.parametrize("isa", _native.isas())
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_the_oracle(name: str, isa: str) -> None:
    config = tiny_config(**SHAPES[name])
    ids = some_ids(config)
    expected = oracle.logits(config, random_weights(config), ids, ctx_size=LENGTH)
    worst = np.abs(whole(backend(config, isa=isa, ctx_size=LENGTH), ids) - expected).max()
    assert worst < TOLERANCE, f"worst logit is off by {worst}"


@pytest.mark.parametrize("isa", _native.isas())
def test_a_text_of_several_spans_equals_the_oracle(isa: str) -> None:
    """Attention takes 256 keys at a time, and the angles' table grows beyond its first 256 positions."""
    config = tiny_config(max_position_embeddings=1024)
    ids = some_ids(config, 530)
    expected = oracle.logits(config, random_weights(config), ids)
    assert np.abs(whole(backend(config, isa=isa), ids) - expected).max() < TOLERANCE


def test_the_oracle_check_can_fail() -> None:
    config = tiny_config(**CONFIGS["llama3"])
    expected = oracle.logits(config, random_weights(config), some_ids(config))
    wrong = whole(backend(tiny_config(rope_theta=500.0)), some_ids(config))
    assert np.abs(wrong - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", ["gqa", "tied", "biases", "odd"])
def test_both_engines_agree(name: str) -> None:
    pytest.importorskip("torch")
    from pronk.torch_engine.backend import TorchBackend

    config = tiny_config(**CONFIGS[name])
    checkpoint, ids = in_memory(config, random_weights(config)), some_ids(config)
    other = TorchBackend.from_checkpoint(checkpoint, device="cpu")
    assert np.abs(whole(backend(config), ids) - whole(other, ids)).max() < 2 * TOLERANCE


@pytest.mark.parametrize("kv", ["f16", "bf16", "int8", "q4"])
def test_smaller_keys_and_values_cost_little(kv: str) -> None:
    """Half a unit in the last place of each key and value; int8 has 127 steps to the largest of a head,
    q4 15 through 16 numbers."""
    config = tiny_config()
    ids = some_ids(config)
    exact, found = (whole(backend(config, kv_dtype=t), ids) for t in ("f32", kv))
    worst = np.abs(found - exact).max()
    assert 0 < worst < {"f16": 2e-3, "bf16": 2e-2, "int8": 5e-2, "q4": 0.4}[kv] * np.abs(exact).max()


@pytest.mark.parametrize("quantize", ["f32", "f16", "bf16", "int8", "q8", "q4"])
def test_the_torch_module_has_the_weights_as_packed(quantize: str) -> None:
    torch = pytest.importorskip("torch")
    config = tiny_config(**CONFIGS["odd"], attention_bias=True, tie_word_embeddings=True)
    weights = random_weights(config)
    checkpoint = in_memory(config, weights)
    engine = CpuBackend.from_checkpoint(checkpoint, quantize=quantize, threads=2)
    module = LLM("tiny", checkpoint, None, engine).to_torch()
    steps = {"f32": 0.0, "f16": 2.0**-11, "bf16": 2.0**-8, "int8": 0.5 / 127, "q8": 0.51 / 127, "q4": 0.6 / 15}
    for name, parameter in module.named_parameters():
        assert parameter.dtype == torch.float32
        error = np.abs(parameter.detach().numpy() - weights[name])
        if parameter.ndim == 1:
            assert error.max() == 0
        else:  # a step of int8's scale, and of q4's, is a part of twice the largest weight
            assert error.max() <= steps[quantize] * 2 * np.abs(weights[name]).max(), name
    if quantize == "f32":
        ids = some_ids(config)
        torch_logits = module(torch.tensor([ids]))[0].detach().numpy()
        assert np.abs(torch_logits - whole(engine, ids)).max() < 2 * TOLERANCE


def test_perturbed_moves_the_logits_by_the_types_noise() -> None:
    config = tiny_config()
    ids = some_ids(config)
    last_place = 2.0**-23  # activations fed to bf16 and q4 are rounded to 8 bits: some of them to another value
    for quantize, most in (("f32", last_place), ("f16", last_place), ("bf16", 2.0**-7), ("q4", 2.0**-7)):
        engine = backend(config, quantize=quantize)
        before = whole(engine, ids)
        moved = np.abs(whole(engine.perturbed(), ids) - before).max() / np.abs(before).max()
        assert last_place / 10 < moved < 30 * most, quantize
        assert np.array_equal(whole(engine, ids), before)


def test_only_wanted_rows_get_logits() -> None:
    config = tiny_config()
    engine, (a, b, c) = backend(config), ([5, 6, 7], [1, 2], [9] * 70)
    runs = [Run(a), Run(b, logits="none"), Run(c, logits="all")]
    logits = engine.forward(Batch.of(runs), None)
    assert np.array_equal(logits, np.concatenate([whole(engine, a)[-1:], whole(engine, c)]))
    assert engine.forward(Batch.of([Run(b, logits="none")]), None).shape == (0, config.vocab_size)


@pytest.mark.parametrize("quantize", ["auto", "f16", "bf16", "int8", "q8", "q4"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused(quantize: str, value: float) -> None:
    config = tiny_config(attention_bias=True)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"):
        weights = random_weights(config)
        weights[name].flat[-1] = value
        with pytest.raises(BadFile, match=name):
            CpuBackend.from_checkpoint(in_memory(config, weights), quantize=quantize, threads=2)


def test_weights_too_large_for_their_format_are_refused() -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights["lm_head.weight"][0, 0] = 1e9
    with pytest.raises(BadFile, match=r"lm_head.*too large for f16"):
        CpuBackend.from_checkpoint(in_memory(config, weights), quantize="f16")


@pytest.mark.parametrize(
    "options",
    [{"quantize": "q5"}, {"kv_dtype": "q8"}, {"threads": 0}, {"threads": 1.0}, {"ctx_size": -4}, {"isa": "z80"}],
)
def test_options_out_of_range_are_refused(options: dict[str, object]) -> None:
    config = tiny_config()
    with pytest.raises(BadRequest, match=str(next(iter(options.values())))):
        CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), **options)


def test_misuse_is_refused() -> None:
    engine = backend(tiny_config())
    with pytest.raises(ValueError, match="position 0"):
        engine.forward(Batch.of([Run([1], 3)]), None)
    with pytest.raises(ValueError, match="64 tokens, not 16"):
        engine.new_kv(1, 16)
    with pytest.raises(ValueError, match="do not fit"):
        engine.forward(Batch.of([Run([1] * 65, 0, (0,))]), engine.new_kv(1, 64))
