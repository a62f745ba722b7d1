"""A Scorer's likelihoods are those of one forward pass each, however requests share contexts and passes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch
from pronk.errors import BadRequest, ContextOverflow
from pronk.llm import LLM
from pronk.measure import scoring
from pronk.measure.scoring import Scorer

CONFIG = tiny_config(max_position_embeddings=1024)
CHECKPOINT = in_memory(CONFIG, random_weights(CONFIG))


def llm(quantize: str = "f32") -> LLM:
    return LLM("tiny", CHECKPOINT, None, CpuBackend.from_checkpoint(CHECKPOINT, quantize=quantize, threads=1))


def alone(model: LLM, context: Sequence[int], continuation: Sequence[int]) -> tuple[float, bool]:
    """By one cache-free pass over both."""
    logits = model.logits([*context, *continuation])[len(context) - 1 : -1].astype(np.float64)
    chosen = logits[range(len(continuation)), continuation]
    return float((chosen - np.log(np.exp(logits).sum(-1))).sum()), logits.argmax(-1).tolist() == list(continuation)


def some(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, length).tolist()


FEW_SHOT = some(0, 150)  # two whole blocks and a part of one
REQUESTS = [
    # Questions after the same examples, each with several answers; in no order.
    *[([*FEW_SHOT, *some(q, 5 + q)], some(10 * q + a, 1 + a)) for a in range(4) for q in range(1, 6)],
    ([7], some(1, 3)),  # a single token before
    ([7], some(2, 40)),
    (some(3, 64), some(4, 2)),  # a context that ends with its block
    (some(3, 65), some(5, 2)),
    (some(6, 600), some(7, 300)),  # longer than a pass, both
    (some(6, 600), []),
    ([*FEW_SHOT, 3], [5]),
    ([*FEW_SHOT, 3], [5]),  # twice the same
]


@pytest.mark.parametrize("quantize", ["f32", "int8"])
@pytest.mark.parametrize("rows", [512, 7])
def test_scores_are_those_of_a_pass_for_each(quantize: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "LOGITS_BYTES", rows * 4 * CONFIG.vocab_size)
    model = llm(quantize)
    scorer = Scorer(model)
    for _ in range(2):  # the second time with what the first has left in the cache
        for (context, continuation), (found, greedy) in zip(REQUESTS, scorer.score(REQUESTS), strict=True):
            likelihood, same = alone(model, context, continuation) if continuation else (0.0, True)
            assert found == pytest.approx(likelihood, rel=1e-12, abs=1e-12)
            assert greedy == same
    assert scorer._kv.pool.num_free + len(scorer._kv._kept) == scorer._kv.pool.num_blocks  # all given back or kept


def test_greedy_continuations_are_told() -> None:
    model = llm()
    context = some(1, 20)
    written = model.generate(context, max_new_tokens=6, ignore_eos=True).tokens
    wrong = [*written[:-1], (written[-1] + 1) % CONFIG.vocab_size]
    assert [greedy for _, greedy in Scorer(model).score([(context, written), (context, wrong)])] == [True, False]


def test_what_is_shared_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    forward = CpuBackend.forward

    def counted(self: CpuBackend, batch: Batch, kv: object) -> np.ndarray:
        passes.append(len(batch.token_ids))
        return forward(self, batch, kv)

    monkeypatch.setattr(CpuBackend, "forward", counted)
    questions = [([*FEW_SHOT, *some(q, 10)], some(100 + q, 3)) for q in range(1, 13)]
    choices = [(context, some(9, n)) for context, _ in questions for n in (1, 2, 3, 4)]
    Scorer(llm()).score(choices)
    whole = sum(len(context) + len(continuation) - 1 for context, continuation in choices)
    assert sum(passes) < whole / 3  # contexts once for four answers, and the examples' blocks not for each question
    assert len(passes) < 12


def test_progress_and_refusals() -> None:
    told: list[int] = []
    Scorer(llm()).score(REQUESTS, told.append)
    assert sum(told) == len(REQUESTS)
    with pytest.raises(BadRequest, match="has no tokens"):
        Scorer(llm()).score([([], [1])])
    with pytest.raises(ContextOverflow):
        Scorer(llm()).score([(some(0, 1000), some(1, 26))])


def test_any_number_of_texts_may_go_on_from_one_token() -> None:
    """As rolling likelihoods do: the first windows of all texts have the same context, the token that begins them."""
    scorer = Scorer(llm())
    texts = [([1], some(n, 900)) for n in range(30)]
    scores = scorer.score([*texts, ([1], [])])
    assert scorer._kv.pool.num_blocks * scorer._kv.pool.block_size < 2 * scoring._KEPT + 2 * 900  # not 30 * 900
    assert scores[29][0] == scorer.score(texts[29:])[0][0]
    assert [type(likelihood) for likelihood, _ in scores] == [float] * 31  # of no tokens as well
