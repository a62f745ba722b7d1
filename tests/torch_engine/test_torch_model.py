"""The torch module against two independent implementations: the float64 oracle and Hugging Face transformers."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from devices import DEVICES
from peers import hugging_face
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk.config import ModelConfig
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest
from pronk.torch_engine.backend import TorchBackend, load_model
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.model import Llama

LENGTH = 40

# float32 against float64: each of about 12 roundings a block may be off by one part in 2^24, independently;
# logits here are about 4. Ten times that is still a hundred times under the smallest mistake (a position off by one).
TOLERANCE = 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5


def backend(config: ModelConfig, attn: str = "flash", dtype: str = "f32", device: str = "cpu") -> TorchBackend:
    checkpoint = in_memory(config, random_weights(config))
    return TorchBackend.from_checkpoint(checkpoint, device=device, attn=attn, quantize=dtype, ctx_size=LENGTH)


def plain_model(config: ModelConfig, attn: str = "flash", device: str = "cpu") -> Llama:
    """As training has it: its Linears unpacked."""
    return load_model(in_memory(config, random_weights(config)), torch.device(device), torch.float32, attn)


def some_ids(config: ModelConfig, length: int = LENGTH, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, length).tolist()


def whole(engine: TorchBackend, ids: list[int]) -> np.ndarray:
    return engine.forward(Batch.of([Run(ids, logits="all")]), None)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attn", ["math", "flash"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_oracle(name: str, attn: str, device: str) -> None:
    config = tiny_config(**CONFIGS[name])
    ids = some_ids(config)
    expected = oracle.logits(config, random_weights(config), ids, ctx_size=LENGTH)
    worst = np.abs(whole(backend(config, attn, device=device), ids) - expected).max()
    assert worst < TOLERANCE, f"worst logit is off by {worst}"


def test_the_oracle_check_can_fail() -> None:
    """One position too far, one key too many, an unscaled frequency: each is far outside the tolerance."""
    config = tiny_config(**CONFIGS["llama3"])
    weights, ids = random_weights(config), some_ids(config)
    expected = oracle.logits(config, weights, ids)
    engine = backend(config)
    shifted = Batch.of([Run(ids, logits="all")])
    shifted.positions[20:] += 1
    wrong = [engine.forward(shifted, None), whole(backend(tiny_config(rope_theta=500.0)), ids)]
    for logits in wrong:
        assert np.abs(logits - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", [n for n in CONFIGS if n != "factors"])  # transformers has no name for those
def test_logits_equal_transformers(name: str) -> None:
    config = tiny_config(**CONFIGS[name])
    ids = some_ids(config)
    with torch.inference_mode():
        expected = hugging_face(config, random_weights(config))(torch.tensor([ids])).logits[0].numpy()
    assert np.abs(whole(backend(config), ids) - expected).max() < 1e-4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("attn", ["math", "flash"])
def test_sixteen_bits_stay_near_the_oracle(dtype: str, attn: str, device: str) -> None:
    config = tiny_config()
    ids = some_ids(config)
    expected = oracle.logits(config, random_weights(config), ids)
    epsilon = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype]
    worst = np.abs(whole(backend(config, attn, dtype, device), ids) - expected).max()
    assert TOLERANCE < worst < 10 * 4 * epsilon * (12 * 2) ** 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attn", ["math", "flash"])
def test_gradients_equal_transformers(attn: str, device: str) -> None:
    """`kv=None` is the training forward: two packed texts of unequal length, against transformers one by one."""
    config = tiny_config(tie_word_embeddings=True)
    texts = [some_ids(config, 17, seed=2), some_ids(config, 9, seed=3)]
    ours = plain_model(config, attn, device).train()
    batch = Batch.of([Run(text, logits="all") for text in texts])
    logits = ours(TorchBatch.of(batch, torch.device(device), None))
    theirs = hugging_face(config, random_weights(config)).train()
    expected = torch.cat([theirs(torch.tensor([text])).logits[0] for text in texts])
    target = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    (logits * target.to(device)).sum().backward()
    (expected * target).sum().backward()
    gradients = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        largest = parameter.grad.abs().max()
        assert (gradients[name].grad.cpu() - parameter.grad).abs().max() < 1e-5 * largest, name


@pytest.mark.parametrize("device", DEVICES)
def test_training_after_inference_on_one_model(device: str) -> None:
    """Angles first tabulated under inference mode must not poison the backward pass."""
    config = tiny_config()
    model = plain_model(config, device=device)
    ids = some_ids(config)
    whole(TorchBackend(model, LENGTH), ids)
    model(TorchBatch.of(Batch.of([Run(ids)]), torch.device(device), None)).sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_perturbed_shares_all_but_the_embedding(device: str) -> None:
    config = tiny_config(tie_word_embeddings=True)
    engine = backend(config, device=device)
    ids = some_ids(config)
    before = whole(engine, ids)
    other = engine.perturbed()
    assert np.array_equal(whole(engine, ids), before)
    moved = np.abs(whole(other, ids) - before).max()
    assert 0 < moved < 100 * TOLERANCE
    assert other.model.lm_head.weight is engine.model.lm_head.weight
    assert other.model.model.layers is engine.model.model.layers


def test_numbers_that_are_none_are_refused() -> None:
    """torch's flash kernel on CPUs would hide a NaN in the keys."""
    config, name = tiny_config(), "model.layers.1.self_attn.k_proj.weight"
    for bad in (np.nan, np.inf):
        weights = random_weights(config)
        weights[name] = weights[name].copy()
        weights[name][-1, -1] = bad
        with pytest.raises(BadFile, match=f"tensor '{name}': holds infinity or NaN"):
            TorchBackend.from_checkpoint(in_memory(config, weights), device="cpu")


def test_numbers_that_f16_cannot_hold_are_refused() -> None:
    config, name = tiny_config(), "model.norm.weight"
    weights = random_weights(config)
    weights[name] = weights[name] * 0 + 70000
    with pytest.raises(BadRequest, match=f"tensor '{name}' holds numbers too large for f16"):
        TorchBackend.from_checkpoint(in_memory(config, weights), device="cpu", quantize="f16")
    TorchBackend.from_checkpoint(in_memory(config, weights), device="cpu", quantize="bf16")
