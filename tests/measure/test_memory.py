"""What is predicted is what is packed, and what a cache really grows to; what is measured is what is held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk import engines, system
from pronk.checkpoint.tensors import Checkpoint
from pronk.cpu_engine.backend import CpuBackend
from pronk.cpu_engine.kv import CpuKV
from pronk.engine.backend import KVStorage
from pronk.engine.declaration import Plan
from pronk.engine.params import SamplingParams
from pronk.engine.scheduler import Scheduler
from pronk.errors import BadRequest
from pronk.measure.comparison import Variant, kv_blocks
from pronk.torch_engine.backend import TorchBackend

CONFIG = tiny_config(max_position_embeddings=4096)
CHECKPOINT = in_memory(CONFIG, random_weights(CONFIG))


def test_a_total_is_a_sum() -> None:
    some, least = (Variant("f32", True, {}, plan) for plan in (
        Plan("f32", 1000, "f32", kv_a_token=10, besides=7), Plan("f32", 0, "f32", 1, 0),
    ))  # fmt: skip
    assert some.peak(100, tokens=64) == 100 + 1000 + 64 * 10 + 7
    assert least.peak(0, 1) == 64  # a whole block
    # From 4 blocks to 8: for a moment both are there, the larger one as full as the smaller.
    assert least.peak(0, 257) == 8 * 64


def predict(checkpoint: Checkpoint, engine: str, options: Mapping[str, Any]) -> Plan:
    return engines.named(engine).plan(checkpoint, options)


@pytest.mark.parametrize("tokens", [5, 256, 257, 512, 577, 1025])
def test_a_cache_grows_as_predicted(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks with something in them, at the worst moment of a text of so many tokens."""
    held = 0

    def watched(kv: CpuKV, num_blocks: int) -> None:
        nonlocal held
        held = max(held, 2 * kv.num_blocks)
        resize(kv, num_blocks)

    resize = CpuKV.resize
    monkeypatch.setattr(CpuKV, "resize", watched)
    backend = CpuBackend.from_checkpoint(CHECKPOINT, threads=1)
    with Scheduler(backend) as scheduler:
        scheduler.add([1] * (tokens - 1), SamplingParams(max_new_tokens=2), seed=0)
        while scheduler.has_work:
            scheduler.step()
    assert kv_blocks(tokens) == max(held, -(-tokens // 64))


@pytest.mark.parametrize("quantize", ["f32", "bf16", "int8", "llm-int8", "q8", "q4"])
def test_weights_are_predicted_to_the_byte(quantize: str) -> None:
    found = predict(CHECKPOINT, "cpu", {"quantize": quantize})
    assert (
        found.weights == CpuBackend.from_checkpoint(CHECKPOINT, quantize=quantize, threads=1).model.nbytes - vectors()
    )


def vectors() -> int:
    """Norms, which are no weight matrices, and which the native model counts."""
    plain = CpuBackend.from_checkpoint(CHECKPOINT, quantize="f32", threads=1).model.nbytes
    return plain - predict(CHECKPOINT, "cpu", {"quantize": "f32"}).weights


def test_fewer_bits_take_less() -> None:
    sizes = [predict(CHECKPOINT, "cpu", {"quantize": q}).weights for q in ("f32", "bf16", "q8", "q4")]
    assert sizes == sorted(sizes, reverse=True)
    types = ("f32", "bf16", "int8", "q4")
    keys = [predict(CHECKPOINT, "cpu", {"quantize": "bf16", "kv_dtype": t}).kv_a_token for t in types]
    assert keys[0] == 2 * keys[1] > 2 * keys[2] > 2 * keys[3]


def test_a_format_that_there_is_not() -> None:
    with pytest.raises(BadRequest, match="q5"):
        predict(CHECKPOINT, "cpu", {"quantize": "q5"})


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_torch_engine_is_predicted_by_its_tensors(dtype: str) -> None:
    backend = TorchBackend.from_checkpoint(CHECKPOINT, device="cpu", quantize=dtype)
    found = predict(CHECKPOINT, "torch", {"quantize": dtype, "device": "cpu"})
    matrices = sum(int(np.prod(shape)) for shape in CONFIG.tensor_shapes().values())
    assert found.weights == matrices * (4 if dtype == "f32" else 2)
    kv: KVStorage = backend.new_kv(1, 64)
    layers = kv.layers  # type: ignore[attr-defined]
    assert found.kv_a_token * 64 == sum(t.numel() * t.element_size() for one in layers for t in (one.keys, one.values))


@pytest.mark.parametrize("scheme", ["absmax", "zeropoint", "llm-int8"])
def test_weights_are_counted_and_not_what_a_process_grew_by(scheme: str) -> None:
    """zeropoint was "13% larger than f32": what torch had kept of its loading was taken for weights."""
    backend = TorchBackend.from_checkpoint(CHECKPOINT, device="cpu", quantize=scheme)
    shapes = CONFIG.tensor_shapes()
    linear = {name for name in shapes if name.endswith("_proj.weight")}
    codes = sum(int(np.prod(shapes[name])) for name in linear)
    scales = sum(4 * (shapes[name][0] if scheme == "llm-int8" else 1) for name in linear)
    zeros = 8 * len(linear) if scheme == "zeropoint" else 0
    floats = sum(4 * int(np.prod(shape)) for name, shape in shapes.items() if name not in linear)
    assert backend.nbytes == codes + scales + zeros + floats
    plain = TorchBackend.from_checkpoint(CHECKPOINT, device="cpu")
    assert backend.nbytes < plain.nbytes
    assert backend.perturbed().nbytes == backend.nbytes


@pytest.mark.alone
def test_what_is_held_is_seen() -> None:
    if not system.reset_peak_memory():
        pytest.skip("the system does not let a process reset its peak")
    before, begun = system.held_memory(), system.peak_memory()
    assert before is not None
    assert begun is not None
    block = np.ones(40_000_000, np.uint8)
    held = system.held_memory()
    assert held is not None
    assert held - before > 0.9 * block.nbytes
    del block
    system.collect_memory()
    after, peak = system.held_memory(), system.peak_memory()
    assert after is not None
    assert peak is not None
    assert held - after > 0.9 * 40_000_000
    assert peak >= held - 1_000_000  # which stays, until it is reset
    system.reset_peak_memory()
    assert (system.peak_memory() or 0) < held - 20_000_000
