"""The KV cache: however a text is cut, batched and laid out in blocks, its logits are those of the cache-free pass."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from devices import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config
from torch import Tensor

from pronk import system
from pronk.engine.batch import Batch, Run
from pronk.errors import BadRequest, NotEnoughMemory
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.kv import TorchKV

CONFIG = tiny_config()
TOLERANCE = 2e-5  # the same sums in another order: a few units in the last place of logits about 4
BLOCK = 4


def ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


@cache
def backend_of(device: str, attn: str = "flash") -> TorchBackend:
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    return TorchBackend.from_checkpoint(checkpoint, device=device, attn=attn, quantize="f32")


def free(backend: TorchBackend, text: list[int]) -> np.ndarray:
    return backend.forward(Batch.of([Run(text, logits="all")]), None)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), attn=st.sampled_from(["math", "flash"]))
def test_any_chunks_in_any_company_in_any_blocks(data: st.DataObject, attn: str, device: str) -> None:
    backend = backend_of(device, attn)
    lengths = data.draw(st.lists(st.integers(1, 25), min_size=1, max_size=4))
    texts = [ids(length, seed) for seed, length in enumerate(lengths)]
    need = [-(-length // BLOCK) for length in lengths]
    order = data.draw(st.permutations(range(sum(need))))
    tables = [order[sum(need[:n]) : sum(need[: n + 1])] for n in range(len(texts))]
    kv = backend.new_kv(sum(need), BLOCK)
    for layer in kv.layers:  # what was there before must not matter
        layer.keys.fill_(float("nan"))
        layer.values.fill_(float("nan"))
    done, rows = [0] * len(texts), [[] for _ in texts]
    while any(d < length for d, length in zip(done, lengths, strict=True)):
        steps = [(n, data.draw(st.integers(1, 9))) for n in range(len(texts)) if done[n] < lengths[n]]
        runs = [Run(texts[n][done[n] : done[n] + s], done[n], tables[n], "all") for n, s in steps]
        logits = backend.forward(Batch.of(runs), kv)
        for (n, _), run in zip(steps, runs, strict=True):
            rows[n].append(logits[: len(run.token_ids)])
            logits = logits[len(run.token_ids) :]
            done[n] += len(run.token_ids)
    for n, text in enumerate(texts):
        assert np.abs(np.concatenate(rows[n]) - free(backend, text)).max() < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
def test_that_check_can_fail(device: str) -> None:
    """A table that names one block twice is seen (two blocks swapped would not be: keys carry their positions)."""
    backend, text = backend_of(device), ids(12, 0)
    kv = backend.new_kv(3, BLOCK)
    backend.forward(Batch.of([Run(text[:11], 0, (0, 1, 2), "none")]), kv)
    wrong = backend.forward(Batch.of([Run(text[11:], 11, (0, 0, 2))]), kv)
    assert np.abs(wrong - free(backend, text)[-1]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
def test_storage_grows_and_copies_blocks(device: str) -> None:
    backend, text = backend_of(device), ids(8, 0)
    kv = backend.new_kv(2, BLOCK)
    backend.forward(Batch.of([Run(text[:7], 0, (1, 0), "none")]), kv)
    kv.resize(5)
    kv.copy([(1, 4), (0, 2)])
    after = backend.forward(Batch.of([Run(text[7:], 7, (4, 2))]), kv)
    assert np.abs(after - free(backend, text)[-1]).max() < TOLERANCE


@pytest.mark.alone
def test_growing_holds_one_tensor_twice_and_never_all() -> None:
    config = tiny_config(
        num_hidden_layers=4, head_dim=64, num_attention_heads=4, num_key_value_heads=4, hidden_size=256
    )
    kv = TorchKV(config, 150, 64, torch.float32, torch.device("cpu"))  # 79 MB
    tensors = [tensor for layer in kv.layers for tensor in (layer.keys, layer.values)]
    for tensor in tensors:
        tensor.fill_(1)
    size = sum(tensor.nbytes for tensor in tensors)
    del tensors, tensor
    if not system.reset_peak_memory() or (before := system.peak_memory()) is None:
        pytest.skip("the system does not tell the peak of a while")
    kv.resize(300)
    after = system.peak_memory()
    assert after is not None
    assert 0.8 * size < after - before < 1.5 * size
    assert all((layer.keys[: 150 * 64] == 1).all() for layer in kv.layers)


def test_a_budget_is_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = TorchKV(CONFIG, 2, BLOCK, torch.float32, torch.device("cpu"))
    block = 2 * CONFIG.num_hidden_layers * BLOCK * CONFIG.num_key_value_heads * CONFIG.head_dim * 4
    monkeypatch.setattr(system, "free_memory", lambda: 10 * block)
    assert kv.reserve(5) == 5
    assert 9 <= kv.reserve(1000) <= 11
    monkeypatch.setattr(system, "free_memory", lambda: None)
    assert kv.reserve(1000) == 1000


@pytest.mark.parametrize("device", DEVICES)
def test_only_wanted_rows_get_logits(device: str) -> None:
    backend = backend_of(device)
    a, b, c = ids(3, 0), ids(5, 1), ids(2, 2)
    batch = Batch.of([Run(a), Run(b, logits="none"), Run(c, logits="all")])
    logits = backend.forward(batch, None)
    assert logits.shape == (3, CONFIG.vocab_size)
    assert np.abs(logits[0] - free(backend, a)[-1]).max() < TOLERANCE
    assert np.abs(logits[1:] - free(backend, c)).max() < TOLERANCE


def test_misuse_is_refused() -> None:
    backend = backend_of("cpu")
    with pytest.raises(ValueError, match="starts at position 3"):
        backend.forward(Batch.of([Run([1], 3)]), None)
    with pytest.raises(ValueError, match="cannot hold"):
        backend.forward(Batch.of([Run([1, 2, 3, 4, 5], 0, (0,))]), backend.new_kv(1, BLOCK))
    with pytest.raises(ValueError, match="at least one"):
        Batch.of([Run([])])
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    for device in ("tpu:0", "cuda:99", "meta"):
        with pytest.raises(BadRequest, match=device):
            TorchBackend.from_checkpoint(checkpoint, device=device)


@pytest.mark.parametrize(
    "options", [{"compute_dtype": "int8"}, {"attn": "eager"}, {"threads": 0}, {"ctx_size": -4}, {"ctx_size": 1.5}]
)
def test_arguments_out_of_range_are_named(options: dict) -> None:
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    with pytest.raises(BadRequest, match=next(iter(options))):
        TorchBackend.from_checkpoint(checkpoint, device="cpu", **options)


def test_a_growth_refused_half_way_can_be_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    kv = TorchKV(tiny_config(), 2, 4, torch.float32, torch.device("cpu"))
    for layer in kv.layers:
        layer.keys.fill_(1.0)
        layer.values.fill_(2.0)
    cat, calls = torch.cat, iter(range(100))

    def refuses_the_third(tensors: tuple[Tensor, ...]) -> Tensor:
        if next(calls) == 2:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
        return cat(tensors)

    monkeypatch.setattr(torch, "cat", refuses_the_third)
    with pytest.raises(NotEnoughMemory, match="KV cache of 40 tokens"):
        kv.resize(10)
    assert kv.num_blocks == 2
    kv.resize(5)
    assert kv.num_blocks == 5
    for layer in kv.layers:
        assert len(layer.keys) >= 20
        assert len(layer.values) >= 20
        assert (layer.keys[:8] == 1).all()
        assert (layer.values[:8] == 2).all()
