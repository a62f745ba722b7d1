"""Beam search: the hypotheses, scores and stopping rules of transformers' `generate(num_beams=...)`.

Each step extends every beam by one token in one forward pass. Beams share their common past: a table of KV blocks is
forked for each beam that goes on, and a block is copied only where two beams write into it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from pronk.engine.backend import Backend
from pronk.engine.batch import PASS_TOKENS, Batch, Run, Wants
from pronk.engine.filters import Float32
from pronk.engine.params import FinishReason, SamplingParams
from pronk.engine.prefix_cache import PrefixCache
from pronk.engine.sampling import NotNumbers, penalize


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence: its new tokens, the stop token included, and its score.

    The score is the sum of the tokens' log-probabilities (after penalties) over their number to the power of
    `length_penalty`.
    """

    tokens: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True)
class _Beam:
    tokens: list[int]  # prompt included
    score: np.float32  # the sum of log-probabilities


def beam_search(
    backend: Backend,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    eos_ids: Collection[int] = (),
    cached: bool = True,
    kv: PrefixCache | None = None,
) -> list[Hypothesis]:
    """The `num_return_sequences` best hypotheses, best first; fewer where there are no more texts.

    `kv`: a cache whose texts are reused.

    Raises ContextOverflow, BadRequest, and PronkError where the logits are not numbers.
    """
    prompt = [int(token) for token in prompt_ids]
    params.check_prompt(prompt, backend.config.vocab_size, backend.ctx_size)
    stop_ids = params.stop_ids(eos_ids)
    max_new = min(params.max_new_tokens, backend.ctx_size - len(prompt))
    # Enough candidates that the beams can go on even if each of the best ends in every stop token there is.
    width = max(2, 1 + len(stop_ids)) * params.num_beams
    model = _CachedModel(backend, kv or PrefixCache(backend), prompt) if cached else _CacheFreeModel(backend)
    beams, parents = [_Beam(prompt, np.float32(0))], [0]
    finished: list[Hypothesis] = []
    for length in range(1, max_new + 1):
        scores = np.stack(
            [
                beam.score + penalize(_log_softmax(row), params, beam.tokens, beam.tokens[len(prompt) :])
                for beam, row in zip(beams, model.logits(beams, parents), strict=True)
            ]
        )  # [beams, V], float32 as transformers adds them up
        going_on: list[tuple[int, _Beam]] = []
        for rank, index in enumerate(_best(scores.reshape(-1), width)):
            parent, token = divmod(int(index), scores.shape[1])
            beam = _Beam([*beams[parent].tokens, token], scores[parent, token])
            if token not in stop_ids and length < max_new:
                going_on.append((parent, beam))
            elif rank < params.num_beams:  # an ending that is not among the best is dropped
                reason: FinishReason = "stop" if token in stop_ids else "length"
                score = float(beam.score / _normalizer(length, params))
                finished.append(Hypothesis(tuple(beam.tokens[len(prompt) :]), score, reason))
        finished = sorted(finished, key=lambda h: -h.score)[: params.num_beams]
        going_on = going_on[: params.num_beams]
        if not going_on or _is_done(finished, going_on[0][1], length, max_new, params):
            break
        parents, beams = [parent for parent, _ in going_on], [beam for _, beam in going_on]
    model.close()
    return finished[: params.num_return_sequences]


def _is_done(finished: list[Hypothesis], best: _Beam, length: int, max_new: int, params: SamplingParams) -> bool:
    """Whether no running beam is expected to beat the worst of the finished ones, once there are num_beams of those."""
    if len(finished) < params.num_beams:
        return False
    if params.early_stopping is True:
        return True
    # "never" asks for the best that could still come: with a positive penalty, a beam that runs to the end.
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = max_new
    return float(best.score / _normalizer(length, params)) <= finished[-1].score


def _normalizer(length: int, params: SamplingParams) -> float:
    return float(np.float32(math.pow(length, params.length_penalty)))


def _log_softmax(logits: Float32) -> Float32:
    top = logits.max()
    if not np.isfinite(top):
        raise NotNumbers
    shifted: Float32 = logits - top
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def _best(scores: Float32, count: int) -> list[int]:
    """Indices of the `count` largest, best first; of equals the lower index first."""
    count = min(count, len(scores))
    edge = np.partition(scores, len(scores) - count)[len(scores) - count]
    kept = np.flatnonzero(scores >= edge)
    return [int(i) for i in kept[np.argsort(-scores[kept], kind="stable")][:count]]


class _CacheFreeModel:
    """Every step computes every beam from its first token."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def logits(self, beams: list[_Beam], parents: list[int]) -> Float32:
        """[beams, V], of what follows each beam."""
        return self._backend.forward(Batch.of(Run(beam.tokens) for beam in beams), None)

    def close(self) -> None:
        pass


class _CachedModel:
    """Every step computes each beam's missing tokens: what is new of the prompt at first, then one."""

    def __init__(self, backend: Backend, kv: PrefixCache, prompt: list[int]) -> None:
        self._backend, self._kv, self._prompt = backend, kv, prompt
        kv.settled = False  # until everything is given back
        self._tables = [kv.match(prompt)]

    def logits(self, beams: list[_Beam], parents: list[int]) -> Float32:
        """[beams, V], of what follows each beam, which extends beam `parents[i]` of the call before."""
        forks = [self._tables[parent].fork() for parent in parents]
        for table in self._tables:
            table.free()
        self._tables = forks
        while (missing := len(beams[0].tokens) - forks[0].length) > PASS_TOKENS:
            self._forward(beams, PASS_TOKENS, "none")
        return self._forward(beams, missing, "last")

    def close(self) -> None:
        """Give every block back; the cache may remember the prompt's."""
        self._tables[0].truncate(len(self._prompt))
        self._kv.keep(self._prompt, self._tables[0])
        for table in self._tables:
            table.free()
        self._kv.settled = True

    def _forward(self, beams: list[_Beam], count: int, logits: Wants) -> Float32:
        runs, copies = [], []
        for beam, table in zip(beams, self._tables, strict=True):
            self._kv.make_room(table.blocks_needed(count))
            start = table.length
            copies += table.append(count)
            runs.append(Run(beam.tokens[start : start + count], start, list(table.blocks), logits))
        if copies:
            self._kv.storage.copy(copies)
        return self._backend.forward(Batch.of(runs), self._kv.storage)
