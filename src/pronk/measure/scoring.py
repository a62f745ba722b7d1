"""Scorer: log-likelihoods of continuations, many at a time.

A benchmark asks for thousands of short continuations, several of each context, and many contexts begin with the same
examples. So a context is computed once for all its continuations, which are forks of it in the KV cache; blocks that
earlier contexts began with are used again; and forward passes are filled with whatever is to be computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

from pronk.engine.batch import PASS_TOKENS, Batch, Run, Wants
from pronk.engine.kv_blocks import BlockTable
from pronk.engine.prefix_cache import BLOCK_SIZE, PrefixCache
from pronk.errors import BadRequest, ContextOverflow
from pronk.llm import LLM
from pronk.measure.perplexity import log_likelihoods
from pronk.measure.windows import LOGITS_BYTES, check_numbers

T = TypeVar("T")
_Pair = tuple[tuple[int, ...], tuple[int, ...]]  # a context, and what goes on from it
_Group = tuple[tuple[int, ...], list[int]]  # a context, and the numbers of the requests that go on from it
Score = tuple[float, bool]  # log-likelihood in nats, and whether greedy decoding would have written the same

_KEPT = 8192  # tokens of earlier contexts, at most


@dataclass
class _Text:
    """Tokens to be computed from position `start` on, and what their logits are to predict, if anything."""

    table: BlockTable
    tokens: Sequence[int]
    start: int
    targets: Sequence[int] = ()
    score: list[float] = field(default_factory=list)
    greedy: bool = True


class Scorer:
    def __init__(self, llm: LLM) -> None:
        self._backend = llm.backend
        self._kv = PrefixCache(llm.backend, BLOCK_SIZE, min(llm.ctx_size, _KEPT))
        self._rows = min(PASS_TOKENS, max(1, LOGITS_BYTES // (4 * llm.config.vocab_size)))

    def score(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]], told: Callable[[int], None] | None = None
    ) -> list[Score]:
        """Of (context, continuation) pairs of token ids. `told`: called with how many more are done.

        Raises BadRequest for an empty context, for nothing can be predicted from it, and ContextOverflow.
        """
        for context, continuation in requests:
            if not context:
                raise BadRequest("a context has no tokens; give at least the token that begins a text")
            if (length := len(context) + len(continuation) - 1) > self._backend.ctx_size:
                raise ContextOverflow(length, self._backend.ctx_size, "the text", can_be_cut=False)
        pairs = [(tuple(context), tuple(continuation)) for context, continuation in requests]
        scores: list[Score] = [(0.0, True)] * len(pairs)
        # Sorted, contexts that begin alike are neighbours, and those that are the same stand together.
        order = sorted(range(len(pairs)), key=pairs.__getitem__)
        groups = [(context, list(members)) for context, members in groupby(order, key=lambda n: pairs[n][0])]

        def work(group: _Group) -> int:
            return max(len(group[0]), sum(len(pairs[n][1]) for n in group[1]))

        for wave in _filled(groups, work, PASS_TOKENS):
            for number, text in self._wave(wave, pairs):
                scores[number] = sum(text.score, 0.0), text.greedy
                if told:
                    told(1)
        return scores

    def _wave(self, wave: Sequence[_Group], pairs: Sequence[_Pair]) -> Iterator[tuple[int, _Text]]:
        """Contexts first, all but their last tokens; then the continuations, each from its context's last token on."""
        contexts = []
        for context, _ in wave:
            table = self._kv.match(context)
            start = table.length
            self._extend(table, len(context) - 1 - start)
            contexts.append(_Text(table, context[start:-1], start))
        self._compute(contexts, "none", PASS_TOKENS)
        for (context, _), text in zip(wave, contexts, strict=True):
            self._kv.keep(context[:-1], text.table)
        asked = [(number, text) for (_, members), text in zip(wave, contexts, strict=True) for number in members]
        # Any number may go on from one context, as all texts go on from the token that begins them: few of them hold
        # blocks at a time, of which each has its own however short it is.
        for few in _filled(asked, lambda one: len(pairs[one[0]][1]) + BLOCK_SIZE, _KEPT):
            continuations = []
            for number, text in few:
                context, targets = pairs[number]
                table = text.table.fork()
                self._extend(table, len(targets))
                tokens = (context[-1], *targets[:-1]) if targets else ()
                continuations.append((number, _Text(table, tokens, len(context) - 1, targets)))
            self._compute([text for _, text in continuations], "all", self._rows)
            for _, text in continuations:
                text.table.free()
            yield from continuations
        for text in contexts:
            text.table.free()

    def _extend(self, table: BlockTable, tokens: int) -> None:
        self._kv.make_room(table.blocks_needed(tokens))
        if copies := table.append(tokens):
            self._kv.storage.copy(copies)

    def _compute(self, texts: Sequence[_Text], wants: Wants, most: int) -> None:
        for parts in _passes(texts, most):
            runs = [Run(text.tokens[at:end], text.start + at, text.table.blocks, wants) for text, at, end in parts]
            logits = self._backend.forward(Batch.of(runs), self._kv.storage)
            check_numbers(logits)
            row = 0
            for text, at, end in parts if wants == "all" else ():
                own, targets = logits[row : row + end - at], text.targets[at:end]
                text.score.extend(log_likelihoods(own, targets).tolist())
                text.greedy &= own.argmax(-1).tolist() == list(targets)
                row += end - at


def _filled(items: Iterable[T], size: Callable[[T], int], full: int) -> Iterator[list[T]]:
    """As many at a time as are `full` together, or just over it."""
    few: list[T] = []
    so_far = 0
    for item in items:
        few.append(item)
        so_far += size(item)
        if so_far >= full:
            yield few
            few, so_far = [], 0
    if few:
        yield few


def _passes(texts: Sequence[_Text], most: int) -> Iterator[list[tuple[_Text, int, int]]]:
    """Parts (text, from, to) of at most `most` tokens together, no two of one text."""
    parts: list[tuple[_Text, int, int]] = []
    room = most
    for text in texts:
        at = 0
        while at < len(text.tokens):
            end = min(at + room, len(text.tokens))
            parts.append((text, at, end))
            room -= end - at
            at = end
            if not room:
                yield parts
                parts, room = [], most
    if parts:
        yield parts
