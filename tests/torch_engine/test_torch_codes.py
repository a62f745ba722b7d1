"""The torch engine's weights in codes of groups: those of the CPU engine and of files; products of their numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf_files import save_gguf
from tiny import CONFIGS, in_memory, random_weights, tiny_config
from torch import nn

import pronk
from pronk import checkpoint as checkpoints
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.tensors import Checkpoint
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest
from pronk.formats import FORMATS
from pronk.formats.quantize import quantize
from pronk.llm import LLM
from pronk.measure.verify import verify
from pronk.torch_engine import CODED, grouped
from pronk.torch_engine.backend import DTYPES, TorchBackend
from pronk.torch_engine.codes import Codes
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.plan import plan

GROUPED = list(filter(grouped, CODED))
IDS = np.random.default_rng(1).integers(0, 64, 24).tolist()
EMBEDDING = "model.embed_tokens.weight"


def source(name: str = "gqa", **fields: Any) -> Checkpoint:
    config = tiny_config(**{**CONFIGS[name], **fields})
    return in_memory(config, random_weights(config))


def loaded(checkpoint: Checkpoint, format: str, **options: Any) -> TorchBackend:
    return TorchBackend.from_checkpoint(checkpoint, device="cpu", quantize=format, **options)


def logits(engine: TorchBackend | CpuBackend) -> np.ndarray:
    return engine.forward(Batch.of([Run(IDS, logits="all")]), None)


def coded(engine: TorchBackend) -> Iterator[tuple[str, CodesLinear]]:
    for name, module in engine.model.named_modules():
        if isinstance(module, CodesLinear):
            yield name, module


# -- a layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 40, 200), (9, 70, 64)])
@pytest.mark.parametrize("format", GROUPED)
def test_a_product_is_that_of_the_numbers(format: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Beside float64: each number, each term and their sum are rounded to the type of x."""
    tokens, outputs, inputs = shape
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((outputs, inputs)) * inputs**-0.5, rng.standard_normal((tokens, inputs))
    made = quantize(w, format)
    bias = nn.Parameter(torch.from_numpy(rng.standard_normal(outputs)).to(dtype), requires_grad=False)
    layer = CodesLinear(codes_of(w, format), bias, format)
    assert np.array_equal(layer.dequantized().numpy(), made.dequantize())
    given = torch.from_numpy(x).to(dtype)
    found = layer(given)
    assert found.dtype == dtype
    numbers = torch.from_numpy(made.dequantize()).double()
    terms = given.double().abs() @ numbers.abs().T + bias.double().abs()
    off = (found.double() - given.double() @ numbers.T - bias.double()).abs()
    assert (off <= 4 * torch.finfo(dtype).eps * terms).all()
    assert layer(given[:0]).shape == (0, outputs)


def codes_of(w: np.ndarray, format: str) -> Codes:
    """By another way than the engine's: of what quantize() says."""
    made, short = quantize(w, format), -w.shape[1] % 32
    q = torch.from_numpy(np.pad(made.q, ((0, 0), (0, short)), mode="edge")).view(len(w), -1, 32)
    if made.minimum is None:
        return Codes(w.shape[1], q, torch.from_numpy(made.scale))
    low, high = q.chunk(2, dim=2)
    return Codes(w.shape[1], low | high << 4, torch.from_numpy(made.scale), torch.from_numpy(made.minimum))


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["gqa", "tied", "biases", "odd"])
@pytest.mark.parametrize("format", GROUPED)
def test_weights_are_those_of_the_cpu_engine(format: str, name: str, dtype: str) -> None:
    """To the bit; but the embedding, which is floats here: rounded where the head is its codes, and else not."""
    checkpoint = source(name)
    engine = loaded(checkpoint, format, compute_dtype=dtype)
    theirs = CpuBackend.from_checkpoint(checkpoint, quantize=format).dequantized(checkpoint).tensors
    found = engine.dequantized(checkpoint).tensors
    matrices = [tensor for tensor in theirs if theirs[tensor].shape[1:] and tensor != EMBEDDING]
    for tensor in matrices:
        assert np.array_equal(found[tensor].read(), theirs[tensor].read())
    assert len(list(coded(engine))) == 7 * checkpoint.config.num_hidden_layers + 1
    assert not [module for module in engine.model.modules() if isinstance(module, nn.Linear)]
    embedding = (theirs if checkpoint.config.tie_word_embeddings else checkpoint.tensors)[EMBEDDING].read()
    rounded = torch.from_numpy(embedding).to(DTYPES[dtype]).float().numpy()
    assert np.array_equal(found[EMBEDDING].read(), rounded)
    assert engine.dtype == f"{format}+{dtype}"
    assert engine.kv_dtype == dtype
    planned = plan(checkpoint, {"quantize": format, "compute_dtype": dtype})
    assert planned.weights == engine.nbytes
    assert (planned.dtype, planned.kv_dtype) == (format, dtype)


@pytest.mark.parametrize("name", ["gqa", "tied", "biases"])
@pytest.mark.parametrize("format", GROUPED)
def test_logits_are_those_of_the_float_model_with_these_weights(format: str, name: str) -> None:
    """Activations are not rounded: on the CPU engine they are, and logits lie further off."""
    checkpoint = source(name)
    engine = loaded(checkpoint, format)
    plain = LLM("tiny", checkpoint, None, engine).to_torch()
    expected = plain(torch.tensor([IDS]))[0].detach().numpy()
    allowed = 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5  # as in test_torch_model
    assert np.abs(logits(engine) - expected).max() < allowed
    off = np.abs(logits(CpuBackend.from_checkpoint(checkpoint, quantize=format)) - expected).max()
    assert 100 * allowed < off < 1
    for dtype in ("bf16", "f16"):
        noise = 10 * 4 * torch.finfo(DTYPES[dtype]).eps * (12 * 2) ** 0.5
        assert np.abs(logits(loaded(checkpoint, format, compute_dtype=dtype)) - expected).max() < noise


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("format", GROUPED)
def test_every_path_is_verified(format: str, dtype: str) -> None:
    found = verify(LLM("tiny", source(), None, loaded(source(), format, compute_dtype=dtype)))
    assert found["verdict"] in ("identical", "rounding"), found


@pytest.mark.parametrize(
    ("stored", "format"),
    [("Q8_0", "q8"), ("Q4_1", "q4"), ("Q4_0", "q4"), ("Q4_0", "q8"), ("Q8_0", "q4"), ("F16", "q4")],
)
def test_codes_of_a_file_are_kept(stored: str, format: str, tmp_path: Path) -> None:
    """To the bit, where the format holds them; else its own are made of their numbers."""
    config = tiny_config(hidden_size=64, intermediate_size=96, head_dim=16)
    path = save_gguf(
        tmp_path / "m.gguf", config, random_weights(config), dtype=lambda name, array: typed(array, stored)
    )
    opened = checkpoints.open(path)
    engine = loaded(opened, format)
    for name, layer in coded(engine):
        tensor = opened.tensors[f"{name}.weight"]
        assert tensor.dtype == stored
        head = name == "lm_head"
        if FORMATS[format].holds(stored):
            assert np.array_equal(layer.dequantized().numpy(), tensor.read())
            assert tensor.read_blocks
            blocks = tensor.read_blocks().reshape(len(layer.q), layer.q.shape[1], -1)
            own = layer.q.view(torch.uint8).numpy()
            assert np.array_equal(blocks[..., -own.shape[2] :], own)
            assert np.array_equal(blocks[..., :2].copy().view("<f2")[..., 0], layer.scale.numpy())
        else:
            made = FORMATS[format].outer if head and FORMATS[format].outer else format
            if made == "q8" and stored == "Q8_0":
                assert np.array_equal(layer.dequantized().numpy(), tensor.read())
            else:
                assert np.array_equal(layer.dequantized().numpy(), quantize(tensor.read(), made).dequantize())
    theirs = CpuBackend.from_checkpoint(opened, quantize=format).dequantized(opened).tensors
    assert np.array_equal(engine.dequantized(opened).tensors["lm_head.weight"].read(), theirs["lm_head.weight"].read())


def typed(array: np.ndarray, stored: str) -> str:
    return stored if array.ndim == 2 else "F32"


def test_numbers_too_large_for_f16_are_refused() -> None:
    config = tiny_config()
    weights = random_weights(config)
    name = "model.layers.0.mlp.up_proj.weight"
    weights[name] = weights[name] * np.float32(2e5)
    large = in_memory(config, weights)
    with pytest.raises(BadRequest, match=f"{name}' holds numbers too large for f16; take bf16 or f32"):
        loaded(large, "q8", compute_dtype="f16")
    assert np.isfinite(logits(loaded(large, "q8", compute_dtype="bf16"))).all()
    weights[name][0, 0] = math.nan
    with pytest.raises(BadFile, match="not every weight is finite"):
        loaded(in_memory(config, weights), "q4")


def test_a_reward_models_score_stays_floats() -> None:
    config = tiny_config(num_labels=1)
    engine = loaded(in_memory(config, random_weights(config)), "q4")
    assert isinstance(engine.model.score, nn.Module)
    assert not isinstance(engine.model.score, CodesLinear)


def test_it_is_the_torch_engine_where_its_options_are_given(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_gguf(tmp_path / "m.gguf", config, random_weights(config))
    llm = pronk.load(path, quantize="q4", compute_dtype="bf16", device="cpu")
    assert (llm.backend.engine, llm.backend.dtype) == ("torch", "q4+bf16")
    assert pronk.load(path, quantize="q4", device="cpu").backend.engine == "cpu"
    assert gguf_blocks.encode(np.zeros((1, 32), np.float32), "q4").shape == (1, 20)
