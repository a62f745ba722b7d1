"""Scores: the log-probabilities of a prompt's own tokens, computed in pieces between the passes of others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pronk.engine.batch import Batch, Run
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.engine.sampling import reported

if TYPE_CHECKING:
    from pronk.llm import LLM
    from pronk.serve.engine import Engine
    from pronk.serve.models import Leased

_ROWS = 64  # tokens whose logits are held at a time, [64, V]: a pass of others waits no longer than for these


@dataclass(frozen=True)
class Scored:
    ids: Sequence[int]
    logprobs: list[float]  # of each given those before it; NaN for the first
    tops: list[list[tuple[int, float]]]  # the likeliest in its place


async def scores(engine: Engine, leased: Leased, ids: Sequence[int], top: int) -> Scored:
    """Raises ApiError where the server has no place for one more text, and PronkError."""
    engine.reserve(1)  # its keys and values are its own, beside the session's cache
    try:
        return await _scores(engine, leased, ids, top)
    finally:
        engine.release(1)


async def _scores(engine: Engine, leased: Leased, ids: Sequence[int], top: int) -> Scored:
    llm, adapter = leased.llm, leased.adapter.number if leased.adapter else None
    kv = await engine.call(lambda: llm.backend.new_kv(-(-len(ids) // BLOCK_SIZE), BLOCK_SIZE))
    logprobs, tops = [float("nan")], list[list[tuple[int, float]]]([[]])
    for at in range(0, len(ids), _ROWS):
        rows, likeliest = await engine.call(lambda at=at: _piece(llm, adapter, kv, ids, at, top))  # type: ignore[misc]
        logprobs += rows
        tops += likeliest
    return Scored(ids, logprobs, tops)


def _piece(
    llm: LLM, adapter: int | None, kv: Any, ids: Sequence[int], at: int, top: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Of the tokens that follow ids[at : at + _ROWS]."""
    part = list(ids[at : at + _ROWS])
    blocks = range(-(-(at + len(part)) // BLOCK_SIZE))
    logits = llm.backend.forward(Batch.of([Run(part, at, blocks, "all", adapter)]), kv)  # [rows, V]
    followers = ids[at + 1 : at + 1 + len(part)]
    drawn = [reported(row, token, top) for row, token in zip(logits, followers, strict=False)]
    return [each.logprob or 0.0 for each in drawn], [list(each.top) for each in drawn]
