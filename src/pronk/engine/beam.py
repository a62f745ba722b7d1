"""BeamSearch: the hypotheses, scores and stopping rules of transformers' `generate(num_beams=...)`.

The scheduler runs a search as it runs a sequence, beside others. Each of its passes extends every beam by one token.
Beams share their common past: a table of KV blocks is forked for each beam that goes on, and a block is copied only
where two beams write into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from pronk.engine.events import Found, Hypothesis, Savings
from pronk.engine.filters import Float32
from pronk.engine.grammar import allowed_next
from pronk.engine.kv_blocks import BlockTable
from pronk.engine.params import FinishReason, SamplingParams
from pronk.engine.sampling import NotNumbers, penalize
from pronk.engine.sequence import Request, Sequence


@dataclass(frozen=True)
class Step:
    """What one token more makes of a search."""

    beams: list[tuple[int, int, np.float32]]  # parent, token and score of those that go on; none where it is over
    finished: list[Hypothesis]  # best first


@dataclass(eq=False)
class BeamSearch:
    """One request's beams, which go on together: one sequence while the prompt is computed, up to num_beams after."""

    request: Request
    parts: list[Sequence]
    samples: list[int]  # places that it takes among the sequences run at once
    scores: list[np.float32] = field(default_factory=lambda: [np.float32(0)])  # sums of log-probabilities, one a part
    finished: list[Hypothesis] = field(default_factory=list)
    passed: int = 0  # see Sequence

    @classmethod
    def of(cls, request: Request, tokens: list[int], table: BlockTable) -> BeamSearch:
        search = cls(request, [], list(range(request.params.num_beams)))
        search.parts = [Sequence(request, [0], tokens, table, search=search)]
        return search

    @property
    def step(self) -> int:
        """How many tokens were generated."""
        return self.parts[0].step

    @property
    def missing(self) -> int:
        """Tokens that are not in the cache, of the part that lacks most."""
        return max(part.missing for part in self.parts)

    @property
    def savings(self) -> Savings:
        return self.parts[0].savings

    def wants(self, budget: int) -> list[tuple[Sequence, int]]:
        """One token of each, or, where blocks were lost, what brings all to their last tokens, which go together."""
        if len(self.parts) == 1:
            return self.parts[0].wants(budget)
        behind = [part for part in self.parts if part.missing > 1]
        wanted = []
        for part in behind:
            wanted.append((part, min(part.missing - 1, budget)))
            budget -= wanted[-1][1]
            if not budget:
                break
        return wanted or [(part, 1) for part in self.parts]

    def choose(self, logits: Float32) -> Step:
        """The next tokens of all beams, from logits [parts, V]. Changes nothing. Raises NotNumbers, Ungrammatical."""
        request, params = self.request, self.request.params
        length, max_new = self.step + 1, request.max_tokens - request.prompt_tokens
        scores = np.stack(
            [
                score + penalize(_scores(part, row), params, part.tokens, part.tokens[request.prompt_tokens :])
                for score, part, row in zip(self.scores, self.parts, logits, strict=True)
            ]
        )  # [parts, V], float32 as transformers adds them up
        # Enough candidates that the beams can go on even if each of the best ends in every stop token there is.
        width = max(2, 1 + len(request.stop_ids)) * params.num_beams
        beams, finished = [], list(self.finished)
        for rank, index in enumerate(_best(scores.reshape(-1), width)):
            parent, token = divmod(int(index), scores.shape[1])
            score = scores[parent, token]
            if score == -np.inf:  # what no grammar lets follow
                break
            if token not in request.stop_ids and length < max_new:
                beams.append((parent, token, score))
            elif rank < params.num_beams:  # an ending that is not among the best is dropped
                reason: FinishReason = "stop" if token in request.stop_ids else "length"
                tokens = (*self.parts[parent].tokens[request.prompt_tokens :], token)
                finished.append(Hypothesis(tokens, float(score / _normalizer(length, params)), reason))
        finished = sorted(finished, key=lambda h: -h.score)[: params.num_beams]
        beams = beams[: params.num_beams]
        if not (beams or finished):
            raise NotNumbers
        if beams and _is_done(finished, beams[0][2], length, max_new, params):
            beams = []
        return Step(beams, finished)

    def advance(self, step: Step) -> Found | None:
        """Take the step; what was found, where it was the last one."""
        self.finished = step.finished
        if not step.beams:
            best = tuple(self.finished[: self.request.params.num_return_sequences])
            return Found(self.request.id, best, self.savings)
        old, self.parts = self.parts, [self.parts[parent].branch(n) for n, (parent, _, _) in enumerate(step.beams)]
        self.scores = [score for _, _, score in step.beams]
        for part, (_, token, _) in zip(self.parts, step.beams, strict=True):
            part.tokens.append(token)
        for part in old:
            part.table.free()
        return None


def _scores(part: Sequence, logits: Float32) -> Float32:
    """Log-probabilities [V], with -inf for what the grammar does not let follow. The others stay the model's, as with
    transformers' `prefix_allowed_tokens_fn`."""
    scores, request = _log_softmax(logits), part.request
    if request.grammar:
        scores[~allowed_next(part.matched(request.grammar), request.stop_ids)] = -np.inf
    return scores


def _is_done(finished: list[Hypothesis], best: np.float32, length: int, max_new: int, params: SamplingParams) -> bool:
    """Whether no running beam is expected to beat the worst of the finished ones, once there are num_beams of those."""
    if len(finished) < params.num_beams:
        return False
    if params.early_stopping is True:
        return True
    # "never" asks for the best that could still come: with a positive penalty, a beam that runs to the end.
    if params.early_stopping == "never" and params.length_penalty > 0:
        length = max_new
    return float(best / _normalizer(length, params)) <= finished[-1].score


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
