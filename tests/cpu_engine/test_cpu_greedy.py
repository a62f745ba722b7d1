"""Greedy tokens, several in one call: those of passes one by one, with numpy's argmax between them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine import backend as module
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run

CONFIG = tiny_config(vocab_size=1100, num_attention_heads=6, num_key_value_heads=2, max_position_embeddings=1024)
BLOCK = 64


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """On a busy machine, too, all tokens come that are asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_GREEDY_SECONDS", 1e9)
        yield


@cache
def engine(threads: int, quantize: str = "q8") -> CpuBackend:
    return CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)), quantize=quantize, threads=threads)


def prompts(lengths: list[int]) -> list[list[int]]:
    return [
        np.random.default_rng(n).integers(0, CONFIG.vocab_size, length).tolist() for n, length in enumerate(lengths)
    ]


def tables(lengths: list[int], more: int) -> list[list[int]]:
    need = [-(-(length + more) // BLOCK) for length in lengths]
    return [list(range(sum(need[:n]), sum(need[: n + 1]))) for n in range(len(need))]


def one_by_one(texts: list[list[int]], count: int, stops: set[int]) -> list[list[int]]:
    """By another number of threads, and without a cache."""
    texts, rows = [list(text) for text in texts], []
    while len(rows) < count and not (rows and stops & set(rows[-1])):
        logits = engine(1).forward(Batch.of([Run(text) for text in texts]), None)
        rows.append(logits.argmax(1).tolist())
        for text, token in zip(texts, rows[-1], strict=True):
            text.append(token)
    return rows


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 150), min_size=1, max_size=5), most=st.integers(1, 16), more=st.integers(1, 5),
    stops=st.sets(st.integers(0, CONFIG.vocab_size - 1), max_size=60),
)  # fmt: skip
def test_several_are_those_of_single_passes(lengths: list[int], most: int, more: int, stops: set[int]) -> None:
    texts, blocks = prompts(lengths), tables(lengths, most + more)
    kv = engine(2).new_kv(sum(map(len, blocks)), BLOCK)
    engine(2).forward(Batch.of([Run(t[:-1], 0, b, "none") for t, b in zip(texts, blocks, strict=True)]), kv)
    last = [Run(text[-1:], len(text) - 1, table) for text, table in zip(texts, blocks, strict=True)]
    rows = engine(2).greedy(Batch.of(last), kv, most, stops).tolist()
    assert rows == one_by_one(texts, most, stops)
    last = [Run([t], run.start + len(rows), run.blocks) for t, run in zip(rows[-1], last, strict=True)]
    rows += engine(2).greedy(Batch.of(last), kv, more, ()).tolist()
    assert rows == one_by_one(texts, len(rows), set())


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a call by which two runs are given up to 3 tokens."""
    model = engine(1)
    batch = Batch.of([Run([1], 0, [0]), Run([2], 61, [2])])
    model.greedy(batch, kv := model.new_kv(3, BLOCK), 1, ())  # which makes the tables of rope
    given = {name: getattr(batch, name) for name in ("token_ids", "positions", "offsets", "blocks", "block_offsets")}
    out, stops = np.empty((3, 2), np.int32), np.empty(0, np.int32)
    return {**given, "kv": kv.storage, "stops": stops, "seconds": 1e9, "out": out, **changes}


def test_time_ends_it() -> None:
    assert engine(1).model.greedy(**arguments()) == 3
    assert engine(1).model.greedy(**arguments(seconds=0.0)) == 1
    assert engine(1).model.greedy(**arguments(seconds=float("nan"))) == 3


def test_another_thread_that_waits_ends_it() -> None:
    """A stream beside calls that went on for their time gave a token every 25 ms instead of every 8."""
    model, most = engine(2), 900
    kv, mine = model.new_kv(16, BLOCK), model.new_kv(1, BLOCK)
    batch, cut = Batch.of([Run([1], 0, range(16))]), Event()

    def calls() -> None:
        for _ in range(100):
            if len(model.greedy(batch, kv, most, ())) < most:
                return cut.set()

    thread = Thread(target=calls)
    thread.start()
    while thread.is_alive():
        model.forward(Batch.of([Run([1], 0, [0])]), mine)
    assert cut.is_set()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"out": np.empty((4, 2), np.int32)}, "positions do not fit in 1 blocks"),  # 61 to 64: the last is of another
        ({"out": np.empty((3, 3), np.int32)}, "out"),
        ({"out": np.empty((0, 2), np.int32)}, "tokens at once"),
        ({"out": np.empty((2000, 2), np.int32)}, "tokens at once"),
        ({"token_ids": np.array([1, 1100], np.int32)}, "token id 1100"),
        ({"positions": np.array([0, 1 << 20], np.int32)}, "are not within"),
        ({"positions": np.array([0, (1 << 31) - 1], np.int32)}, "are not within"),
        ({"blocks": np.array([0, 3], np.int32)}, "no block 3"),
        ({"blocks": np.array([2, 2], np.int32)}, "written twice"),
        ({"offsets": np.array([0, 2], np.int32), "block_offsets": np.array([0, 2], np.int32)}, "must be of one token"),
        ({"offsets": np.array([0, 0, 2], np.int32)}, "must ascend"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engine(1).model.greedy(**arguments(**changes))


@pytest.mark.parametrize("out", [np.empty((3, 2)), np.empty((2, 3), np.int32).T, np.empty(6, np.int32)])
def test_other_arrays_are_refused(out: np.ndarray) -> None:
    with pytest.raises(TypeError):
        engine(1).model.greedy(**arguments(out=out))


def test_logits_that_are_no_numbers_end_it() -> None:
    weights = random_weights(CONFIG)
    weights["lm_head.weight"] = np.full_like(weights["lm_head.weight"], 3e38)
    model = CpuBackend.from_checkpoint(in_memory(CONFIG, weights), quantize="f32", threads=2)
    batch = Batch.of([Run([1], 0, [0]), Run([2], 0, [1])])
    assert not np.isfinite(model.forward(batch, kv := model.new_kv(2, BLOCK))).all(1).any()
    assert model.greedy(batch, kv, 9, ()).tolist() == [[-1, -1]]
