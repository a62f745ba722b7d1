"""A pass that is begun before it is asked for: only behind passes that go on likeliest token by likeliest token, and
given out only to who asks for that very pass."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pronk.engine.batch import Batch, Run
from pronk.torch_engine.gpu.ahead import PATIENCE, Ahead
from pronk.torch_engine.predictions import Likeliest

BLOCK = 16


class Cache(SimpleNamespace):
    """What is asked of one."""


def cache() -> Any:
    return Cache(block_size=BLOCK)


def likeliest(*tokens: int, read: bool = True) -> Likeliest:
    found = Likeliest(torch.tensor([tokens, [1] * len(tokens)]))
    if read:
        found.read()
    return found


def batch(tokens: list[int], at: int, tables: list[list[int]] | None = None) -> Batch:
    tables = tables or [[n] for n in range(len(tokens))]
    return Batch.of(Run([token], at, table) for token, table in zip(tokens, tables, strict=True))


def told(ahead: Ahead[str], kv: Any, passes: int) -> Batch | None:
    """Two texts that go on by their likeliest tokens for so many passes after the first."""
    following = None
    for at in range(passes + 1):
        asked = batch([at, 10 + at], at)
        assert ahead.take(asked, kv) is None
        following = ahead.following(asked, kv, likeliest(at + 1, 11 + at))
    return following


def test_the_next_pass_is_that_of_the_likeliest_tokens_once_some_were() -> None:
    ahead, kv = Ahead[str](), cache()
    assert told(ahead, kv, PATIENCE - 1) is None
    ahead = Ahead()
    following = told(ahead, kv, PATIENCE)
    assert following is not None
    assert following.positions.tolist() == [PATIENCE + 1] * 2
    assert following.furthest == PATIENCE + 1
    ahead.begun(following, "found")
    wanted = batch([PATIENCE + 1, 11 + PATIENCE], PATIENCE + 1)
    assert ahead.take(wanted, kv) == "found"
    assert ahead.following(wanted, kv, likeliest(0, 0)) is not None  # and the one after it, at once
    assert ahead.take(wanted, kv) is None  # it was not asked for twice


@pytest.mark.parametrize(
    ("tokens", "at", "tables", "own"),
    [
        ([PATIENCE + 1, 99], PATIENCE + 1, None, True),  # another token
        ([PATIENCE + 1], PATIENCE + 1, None, True),  # one text has ended
        ([PATIENCE + 1, 11 + PATIENCE], PATIENCE + 2, None, True),  # elsewhere
        ([PATIENCE + 1, 11 + PATIENCE], PATIENCE + 1, [[0], [7]], True),  # in another block
        ([PATIENCE + 1, 11 + PATIENCE], PATIENCE + 1, None, False),  # in another cache
    ],
)
def test_no_other_pass_is_given_what_was_begun(
    tokens: list[int], at: int, tables: list[list[int]] | None, own: bool
) -> None:
    ahead, kv = Ahead[str](), cache()
    following = told(ahead, kv, PATIENCE)
    assert following is not None
    ahead.begun(following, "found")
    assert ahead.take(batch(tokens, at, tables), kv if own else cache()) is None
    # Who asks for it later is not given it either: what came between may have written over it.
    assert ahead.take(batch([PATIENCE + 1, 11 + PATIENCE], PATIENCE + 1), kv) is None


def test_who_reads_no_tokens_goes_on_by_none() -> None:
    ahead, kv = Ahead[str](), cache()
    for at in range(2 * PATIENCE):
        assert ahead.take(batch([at], at), kv) is None
        assert ahead.following(batch([at], at), kv, likeliest(at + 1, read=False)) is None


def test_a_prompt_in_between_begins_the_count_anew() -> None:
    ahead, kv = Ahead[str](), cache()
    told(ahead, kv, PATIENCE - 1)
    prompt = Batch.of([Run([1, 2, 3], 0, [5])])
    assert ahead.take(prompt, kv) is None
    assert ahead.following(prompt, kv, likeliest(4)) is None
    assert ahead.take(batch([PATIENCE, 10 + PATIENCE], PATIENCE), kv) is None
    assert ahead.following(batch([PATIENCE, 10 + PATIENCE], PATIENCE), kv, likeliest(1, 2)) is None


def test_no_pass_is_begun_in_a_block_that_a_text_does_not_have() -> None:
    ahead, kv = Ahead[str](), cache()
    for at in range(BLOCK):
        asked = batch([at], at)
        ahead.take(asked, kv)
        following = ahead.following(asked, kv, likeliest(at + 1))
    assert following is None  # the next token is the first of another block
    grown = batch([BLOCK], BLOCK, [[0, 3]])
    ahead.take(grown, kv)
    assert ahead.following(grown, kv, likeliest(1)) is not None


def test_a_cache_is_not_kept() -> None:
    ahead, kv = Ahead[str](), cache()
    ahead.begun(told(ahead, kv, PATIENCE) or batch([0], 0), "found")
    gone = weakref.ref(kv)
    del kv
    gc.collect()
    assert gone() is None
