"""A pass by fused kernels over a paged cache, against the plain module without any cache, and the float64 oracle."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import torch
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk.engine.batch import Batch, Run
from pronk.torch_engine.backend import load_model
from pronk.torch_engine.gpu import paged
from pronk.torch_engine.gpu.likeliest import likeliest
from pronk.torch_engine.gpu.paged import PagedBatch, Room, Tiling, fill, lay_out
from pronk.torch_engine.gpu.step import Step, can_step
from pronk.torch_engine.kv import TorchKV
from pronk.torch_engine.model import Llama

BLOCK = 4
TOLERANCE = 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5  # as in tests/torch_engine/test_torch_model.py


class Paged:
    """A Step over a cache, without graphs."""

    def __init__(self, model: Llama, where: torch.device, dtype: torch.dtype, invariant: bool) -> None:
        self.model, self.step, self.where = model, Step(model, invariant=invariant), where
        self.kv = TorchKV(model.config, 40, BLOCK, dtype, where)
        self.group = model.config.num_attention_heads // model.config.num_key_value_heads

    def logits(self, batch: Batch, texts: int = 0) -> np.ndarray:
        """`texts`: how many there is room for, as in a graph."""
        there = PagedBatch.of(batch, BLOCK, self.group, self.where, invariant=self.step.invariant)
        if texts:
            room, tiling = Room(texts, texts, texts, 32, texts), Tiling.of(True, self.group, 127)
            host = torch.zeros(room.size, dtype=torch.int32)
            to = room.within(host.numpy())
            lay_out(to, np.ones(texts, np.int32), tiling)
            to["logits_rows"][:] = np.arange(texts)
            fill(to, batch, BLOCK)
            there = PagedBatch(**room.within(host.to(self.where)), block_size=BLOCK, furthest=127, tiling=tiling)
        with torch.inference_mode():
            return self.step(self.model, there, self.kv).float().cpu().numpy()


def make(name: str, where: torch.device, dtype: torch.dtype = torch.float32, *, invariant: bool = False) -> Paged:
    config = tiny_config(**CONFIGS[name])
    model = load_model(in_memory(config, random_weights(config)), where, dtype).requires_grad_(False)
    return Paged(model, where, dtype, invariant)


def texts_of(vocab: int) -> list[list[int]]:
    draw = np.random.default_rng(1).integers
    return [draw(0, vocab, length).tolist() for length in (19, 3, 11)]


TABLES = [[7, 2, 9, 30, 4], [1], [3, 39, 0]]  # blocks anywhere


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_oracles(name: str, where: torch.device) -> None:
    """Prompts of different lengths in one pass, one of them in two parts beside texts that go on."""
    passes = make(name, where)
    config = passes.model.config
    texts = texts_of(config.vocab_size)
    wanted = [oracle.logits(config, random_weights(config), ids) for ids in texts]
    first = [Run(ids[:at], 0, table, "all") for ids, table, at in zip(texts, TABLES, (8, 2, 10), strict=True)]
    mixed = [Run(texts[0][8:], 8, TABLES[0], "all"), Run(texts[1][2:], 2, TABLES[1]), Run(texts[2][10:], 10, TABLES[2])]
    found = passes.logits(Batch.of(first))
    expected = np.concatenate([wanted[0][:8], wanted[1][:2], wanted[2][:10]])
    assert np.abs(found - expected).max() < TOLERANCE
    found = passes.logits(Batch.of(mixed))
    assert np.abs(found - np.concatenate([wanted[0][8:], wanted[1][2:], wanted[2][10:]])).max() < TOLERANCE


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_texts_that_go_on_together_or_alone(where: torch.device, dtype: torch.dtype, invariant: bool) -> None:
    passes = make("gqa", where, dtype, invariant=invariant)
    texts = texts_of(passes.model.config.vocab_size)
    passes.logits(Batch.of([Run(ids[:-1], 0, table, "none") for ids, table in zip(texts, TABLES, strict=True)]))
    last = [Run(ids[-1:], len(ids) - 1, table) for ids, table in zip(texts, TABLES, strict=True)]
    wanted = np.stack(
        [oracle.logits(passes.model.config, random_weights(passes.model.config), ids)[-1] for ids in texts]
    )
    tolerance = TOLERANCE if dtype == torch.float32 else 2e-2
    assert np.abs(passes.logits(Batch.of(last)) - wanted).max() < tolerance
    assert np.abs(passes.logits(Batch.of(last), texts=8)[:3] - wanted).max() < tolerance  # filled up with copies
    for run, row in zip(last, wanted, strict=True):
        assert np.abs(passes.logits(Batch.of([run]))[0] - row).max() < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_do_not_depend_on_the_batch(where: torch.device, dtype: torch.dtype) -> None:
    """Whole, in parts, and beside others; without the switch sixteen bits differ."""

    def found(invariant: bool) -> list[np.ndarray]:
        passes = make("gqa", where, dtype, invariant=invariant)
        texts = texts_of(passes.model.config.vocab_size)
        runs = [Run(ids, 0, table, "all") for ids, table in zip(texts, TABLES, strict=True)]
        together, alone = passes.logits(Batch.of(runs))[:19], passes.logits(Batch.of(runs[:1]))
        parts = [passes.logits(Batch.of([Run([ids], at, TABLES[0])])) for at, ids in enumerate(texts[0])]
        return [together, alone, np.concatenate(parts)]

    first, *others = found(True)
    assert all(np.array_equal(first, other) for other in others)
    if dtype == torch.bfloat16:
        assert not all(np.array_equal(first, other) for other in found(False))


def test_keys_are_split_among_programs(where: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "_SPLIT", 8)
    passes = make("gqa", where)
    (ids, *_), table = texts_of(passes.model.config.vocab_size), TABLES[0]
    passes.logits(Batch.of([Run(ids[:-1], 0, table, "none")]))
    assert Tiling.of(True, passes.group, len(ids) - 1).splits == 4
    wanted = oracle.logits(passes.model.config, random_weights(passes.model.config), ids)[-1]
    found = passes.logits(Batch.of([Run(ids[-1:], len(ids) - 1, table)]))
    assert np.abs(found - wanted).max() < TOLERANCE


def test_the_check_can_fail(where: torch.device) -> None:
    """Keys of nobody, or one too few, is far outside the tolerance."""
    passes = make("gqa", where)
    for layer in passes.kv.layers:  # whose memory may hold another test's
        layer.keys.normal_(), layer.values.normal_()
    (ids, *_), table = texts_of(passes.model.config.vocab_size), TABLES[0]
    wanted = oracle.logits(passes.model.config, random_weights(passes.model.config), ids)[-1]
    passes.logits(Batch.of([Run(ids[:-1], 0, table, "none")]))
    last = ids[-1:]
    assert np.abs(passes.logits(Batch.of([Run(last, 18, [8, *table[1:]])])) - wanted).max() > 100 * TOLERANCE
    assert np.abs(passes.logits(Batch.of([Run(last, 17, table)])) - wanted).max() > 100 * TOLERANCE


def test_the_likeliest_token_is_numpys(where: torch.device) -> None:
    """Of equals the first, of NaN the first, and over parts of a row; what is not finite is said so."""
    rows = np.random.default_rng(0).normal(size=(6, 9001)).astype(np.float32)
    rows[1, [4095, 4096, 9000]] = rows[2, 5000] = rows[2, 3] = 9
    rows[3, [8000, 20]] = np.nan
    rows[4] = -np.inf
    rows[5, 8999] = np.inf
    found = likeliest(torch.from_numpy(rows).to(where)).cpu().numpy()
    assert np.array_equal(found[0], rows.argmax(-1))
    assert found[1].tolist() == [1, 1, 1, 0, 0, 0]
    assert likeliest(torch.empty(0, 7, device=where)).shape == (2, 0)


def test_matrices_are_not_there_twice(where: torch.device) -> None:
    """What is joined is what the module has, so that both see the same weights."""
    passes = make("gqa", where)
    attention = passes.model.model.layers[0].self_attn
    assert attention.q_proj.weight.data_ptr() + attention.q_proj.weight.nbytes == attention.k_proj.weight.data_ptr()


def test_what_is_trained_keeps_its_weights(where: torch.device) -> None:
    """Its optimizer holds them: joined ones would be others."""
    config = tiny_config(**CONFIGS["gqa"])
    model = load_model(in_memory(config, random_weights(config)), where, torch.float32)
    assert not can_step(model)
    assert can_step(model.requires_grad_(False))


def test_matrices_of_two_kinds_are_not_joined(where: torch.device) -> None:
    """As of a file that has some codes that are turned, and some that are not."""
    config = tiny_config(**CONFIGS["gqa"])
    checkpoint = in_memory(config, random_weights(config))
    model = load_model(checkpoint, where, torch.float32, scheme="int8").requires_grad_(False)
    assert can_step(model)
    model.model.layers[0].self_attn.k_proj.turned = False
    assert not can_step(model)


def test_too_few_blocks_are_an_error(where: torch.device) -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        make("gqa", where).logits(Batch.of([Run([1] * 9, 0, [0, 1])]))
