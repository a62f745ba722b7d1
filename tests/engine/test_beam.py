"""Beam search, against transformers' own on the same tiny model, and against trying everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from automata import Automaton
from mock_backend import MockBackend, MockKV, alone, prefix_logits
from numpy.typing import NDArray
from searching import beam_search
from transformers import LlamaConfig, LlamaForCausalLM

from pronk.engine.batch import Batch
from pronk.engine.events import Event, Failure, Found, Hypothesis
from pronk.engine.params import SamplingParams
from pronk.engine.scheduler import Scheduler
from pronk.errors import BadRequest, ContextOverflow, PronkError

VOCAB = 60


class TransformersBackend(MockBackend):
    """A Hugging Face model run on whole prefixes, which are read through the KV blocks as the mock's are."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__(VOCAB, 128)
        self.model = model

    def forward(self, batch: Batch, kv: MockKV | None) -> NDArray[np.float32]:
        super().forward(batch, kv)  # writes the cache, checks positions
        prefixes = []
        for end, blocks in zip(batch.offsets[1:], batch.tables, strict=True):
            length = batch.positions[end - 1] + 1
            tokens = batch.token_ids[end - length : end] if kv is None else kv.tokens[blocks].reshape(-1)[:length]
            prefixes.append(tokens)
        with torch.no_grad():  # the beams of one search are of one length, and want one row each
            return self.model(torch.tensor(np.stack(prefixes).astype(np.int64))).logits[:, -1].float().numpy()


def tiny_llama(seed: int) -> LlamaForCausalLM:
    """In double precision, so that float32 logits do not depend on how transformers batches and caches."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,  # logits far enough apart to be interesting
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def models() -> Iterator[list[LlamaForCausalLM]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a model is slower with more
    yield [tiny_llama(seed) for seed in range(3)]
    torch.set_num_threads(threads)


def as_transformers(
    model: LlamaForCausalLM,
    prompt: list[int],
    params: SamplingParams,
    eos_ids: list[int],
    allowed: Callable[[int, torch.Tensor], list[int]] | None = None,
) -> list[tuple[list[int], float]]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=params.max_new_tokens,
            num_beams=params.num_beams,
            num_return_sequences=params.num_return_sequences,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            repetition_penalty=params.repetition_penalty,
            sequence_bias={(token,): float(bias) for token, bias in params.logit_bias.items()} or None,
            eos_token_id=eos_ids or None,
            pad_token_id=VOCAB - 1,
            prefix_allowed_tokens_fn=allowed,
            return_dict_in_generate=True,
            output_scores=True,
        )
    found = []
    for sequence, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = sequence[len(prompt) :]
        ends = [i for i, token in enumerate(tokens) if token in eos_ids]
        found.append((tokens[: ends[0] + 1] if ends else tokens, score))
    return found


def random_params(seed: int) -> tuple[SamplingParams, list[int], list[int]]:
    rng = np.random.default_rng([5, seed])
    beams = int(rng.integers(2, 6))
    params = SamplingParams(
        max_new_tokens=int(rng.integers(1, 16)),
        num_beams=beams,
        num_return_sequences=int(rng.integers(1, beams + 1)),
        length_penalty=float(rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0])),
        early_stopping=[False, True, "never"][seed % 3],  # type: ignore[arg-type]
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        logit_bias={3: 2.0, 5: -4.0} if rng.random() < 0.3 else {},
    )
    # Many EOS ids, so that beams do end.
    eos_ids = sorted({int(i) for i in rng.integers(0, VOCAB - 1, int(rng.choice([0, 1, 3, 8])))})
    return params, eos_ids, rng.integers(0, VOCAB - 1, int(rng.integers(1, 20))).tolist()


def check(found: list[Hypothesis], expected: list[tuple[list[int], float]], eos_ids: list[int]) -> None:
    assert [list(hypothesis.tokens) for hypothesis in found] == [tokens for tokens, _ in expected]
    # Sums of up to 16 float32 log-probabilities: each addition may round by 2^-24 of the sum, on either side.
    scores = [score for _, score in expected]
    assert [hypothesis.score for hypothesis in found] == pytest.approx(scores, rel=2 * 16 * 2**-24, abs=1e-5)
    for hypothesis in found:
        assert (hypothesis.finish_reason == "stop") == (hypothesis.tokens[-1] in eos_ids)


@pytest.mark.parametrize("seed", range(90))
def test_the_same_as_transformers(models: list[LlamaForCausalLM], seed: int) -> None:
    params, eos_ids, prompt = random_params(seed)
    model = models[seed // 6 % 3]
    found = beam_search(TransformersBackend(model), prompt, params, eos_ids, cached=seed % 2 == 0)
    check(found, as_transformers(model, prompt, params, eos_ids), eos_ids)


@pytest.mark.parametrize("seed", range(30))
def test_the_same_as_transformers_under_a_grammar(models: list[LlamaForCausalLM], seed: int) -> None:
    params, eos_ids, prompt = random_params(seed)
    eos_ids, rng = eos_ids or [7], np.random.default_rng([6, seed])
    others = [token for token in range(VOCAB - 1) if token not in eos_ids]
    follows = {
        state: {int(token): int(rng.integers(0, 4)) for token in rng.choice(others, int(rng.integers(5, 12)), False)}
        for state in range(4)
    }
    grammar = Automaton(VOCAB, follows, frozenset({1, 2}))

    def allowed(_: int, sequence: torch.Tensor) -> list[int]:
        state = 0
        for token in sequence.tolist()[len(prompt) :]:
            if token not in follows[state]:  # beams of transformers' that have ended go on, and count no more
                return eos_ids
            state = follows[state][token]
        return [*follows[state], *(eos_ids if state in grammar.ends else [])]

    model = models[seed % 3]
    found = beam_search(TransformersBackend(model), prompt, params, eos_ids, seed % 2 == 0, grammar=grammar)
    check(found, as_transformers(model, prompt, params, eos_ids, allowed), eos_ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [("length_penalty", 0.0), ("early_stopping", True), ("early_stopping", "never"), ("num_beams", 5)],
)
def test_the_settings_matter(field: str, value: Any) -> None:
    """The inverse: each setting changes some result, so agreeing on it means something."""
    base, eos_ids = {"max_new_tokens": 12, "num_beams": 3, "length_penalty": 1.0}, list(range(8))

    def search(seed: int, **fields: Any) -> list[Hypothesis]:
        return beam_search(MockBackend(VOCAB), [seed], SamplingParams(**{**base, **fields}), eos_ids)

    assert any(search(seed) != search(seed, **{field: value}) for seed in range(30))


@pytest.mark.parametrize("length", [1, 62, 63, 64, 65, 127, 130, 700])
@pytest.mark.parametrize("beams", [1, 4])
def test_with_and_without_the_cache_across_the_edges_of_blocks_and_chunks(length: int, beams: int) -> None:
    params = SamplingParams(num_beams=beams, num_return_sequences=beams, max_new_tokens=10)
    prompt = np.random.default_rng(length).integers(0, VOCAB, length).tolist()
    found = [beam_search(MockBackend(VOCAB), prompt, params, [7, 9, 11], cached) for cached in (True, False)]
    assert found[0] == found[1]
    assert len(found[0]) == beams


class ForgetsCopies(MockKV):
    def copy(self, pairs: Any) -> None:
        pass


def test_a_storage_that_does_not_copy_is_found_out() -> None:
    params = SamplingParams(num_beams=4, num_return_sequences=4, max_new_tokens=10)
    expected = beam_search(MockBackend(VOCAB), [1] * 10, params)
    try:
        found = beam_search(MockBackend(VOCAB, 1000, ForgetsCopies), [1] * 10, params)
    except AssertionError:
        return
    assert found != expected


def test_every_step_is_one_forward_pass_of_all_beams_and_blocks_are_shared() -> None:
    backend = MockBackend(VOCAB)
    beam_search(backend, [1] * 640, SamplingParams(num_beams=4, max_new_tokens=5))
    assert [len(batch.token_ids) for batch in backend.batches] == [512, 128, 4, 4, 4, 4]
    for batch in backend.batches[2:]:
        assert len({tuple(blocks[:10]) for blocks in batch.tables}) == 1


def test_enough_beams_find_the_best_of_all() -> None:
    """With as many beams as there are prefixes the search is exhaustive."""
    vocab, length = 4, 4
    params = SamplingParams(num_beams=vocab**length, num_return_sequences=20, max_new_tokens=length, length_penalty=0.0)
    found = beam_search(MockBackend(vocab), [1, 2], params)

    def score(tokens: tuple[int, ...]) -> float:
        total = 0.0
        for i, token in enumerate(tokens):
            logits = torch.from_numpy(prefix_logits((1, 2, *tokens[:i]), vocab)).double()
            total += float(logits.log_softmax(0)[token])
        return total

    best = sorted(itertools.product(range(vocab), repeat=length), key=score, reverse=True)[:20]
    assert [hypothesis.tokens for hypothesis in found] == best
    assert [hypothesis.score for hypothesis in found] == pytest.approx([score(tokens) for tokens in best], abs=1e-5)


def test_more_beams_than_there_are_texts_find_every_text_once() -> None:
    params = SamplingParams(num_beams=7, num_return_sequences=7, max_new_tokens=4)
    found = beam_search(MockBackend(2), [1], params, [0])
    assert {hypothesis.tokens for hypothesis in found} == {(0,), (1, 0), (1, 1, 0), (1, 1, 1, 0), (1, 1, 1, 1)}
    assert len(found) == 5


def test_one_beam_is_greedy() -> None:
    params = SamplingParams(max_new_tokens=12)
    greedy = alone([1, 2], params, vocab_size=VOCAB, ctx_size=1000, eos_ids=[7])
    (found,) = beam_search(MockBackend(VOCAB), [1, 2], params, [7])
    assert (list(found.tokens), found.finish_reason) == greedy


def test_the_context_ends_the_search() -> None:
    backend = MockBackend(VOCAB, ctx_size=8)
    (found,) = beam_search(backend, [1] * 5, SamplingParams(num_beams=3))
    assert (len(found.tokens), found.finish_reason) == (3, "length")
    with pytest.raises(ContextOverflow):
        beam_search(backend, [1] * 8, SamplingParams(num_beams=3))
    with pytest.raises(BadRequest, match="no tokens"):
        beam_search(backend, [], SamplingParams(num_beams=3))


def test_stop_token_ids_and_ignore_eos() -> None:
    def search(**fields: Any) -> list[Hypothesis]:
        params = SamplingParams(num_beams=3, num_return_sequences=3, max_new_tokens=8, **fields)
        return beam_search(MockBackend(VOCAB), [1, 2], params, list(range(20)))

    assert any(h.finish_reason == "stop" for h in search())
    assert all(h.finish_reason == "length" for h in search(ignore_eos=True))
    assert search(ignore_eos=True, stop_token_ids=tuple(range(20))) == search()


def test_logits_that_are_not_numbers_are_an_error() -> None:
    class Broken(MockBackend):
        def forward(self, batch: Batch, kv: MockKV | None) -> NDArray[np.float32]:
            return super().forward(batch, kv) * np.float32(np.nan)

    with pytest.raises(PronkError, match="not numbers"):
        beam_search(Broken(VOCAB), [1], SamplingParams(num_beams=2))


def mixed(seed: int) -> list[tuple[list[int], SamplingParams, int]]:
    """Searches and samples, as they come."""
    rng = np.random.default_rng([8, seed])
    made = []
    for _ in range(int(rng.integers(2, 8))):
        kind: dict[str, Any] = {"num_beams": int(rng.integers(2, 5))} if rng.random() < 0.5 else {"n": 1}
        if "num_beams" in kind:
            kind["num_return_sequences"] = int(rng.integers(1, kind["num_beams"] + 1))
        params = SamplingParams(max_new_tokens=int(rng.integers(1, 25)), **kind)
        made.append((rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist(), params, int(rng.integers(1, 99))))
    return made


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("seed", range(60))
def test_beside_others_each_search_finds_what_it_finds_alone(seed: int, cached: bool) -> None:
    """In small passes, and in caches so narrow that others, or they, must give way."""
    rng, eos = np.random.default_rng([9, seed]), [3, 5]
    backend = MockBackend(VOCAB, 70)
    limits = {"max_batch_tokens": int(rng.integers(6, 40)), "max_sequences": int(rng.integers(4, 12))}
    if cached:
        limits |= {"block_size": int(rng.integers(1, 6)), "max_kv_tokens": int(rng.integers(160, 330))}
    scheduler = Scheduler(backend, cached=cached, **limits)
    wanted = mixed(seed)
    late = [request for request in wanted if rng.random() < 0.4]
    requests = {scheduler.add(*request, eos): request for request in wanted if request not in late}
    found: dict[int, list[Any]] = {}
    for _ in range(5000):
        if late:
            request = late.pop()
            requests[scheduler.add(*request, eos)] = request
        elif not scheduler.has_work:
            break
        for outcome in scheduler.step():
            assert not isinstance(outcome, Failure), outcome.error
            found.setdefault(outcome.request, []).append(outcome)
    assert not scheduler.has_work
    for number, (prompt, params, draw) in requests.items():
        if params.num_beams > 1:
            (outcome,) = found[number]
            assert isinstance(outcome, Found)
            assert list(outcome.hypotheses) == beam_search(MockBackend(VOCAB, 70), prompt, params, eos)
        else:
            assert all(isinstance(event, Event) for event in found[number])
            tokens = alone(prompt, params, draw, vocab_size=VOCAB, ctx_size=70, eos_ids=eos)[0]
            assert [event.token for event in found[number]] == tokens
    if cached:
        assert max(len(batch.token_ids) for batch in backend.batches) <= limits["max_batch_tokens"]
    assert scheduler.kv is None or scheduler.kv.pool.num_free == scheduler.kv.pool.num_blocks


def test_searches_did_give_way_in_these_workloads() -> None:
    """The inverse: what is lost and computed again, by beams too, is what the test above shows to be right."""
    preempted = 0
    for seed in range(40):
        scheduler = Scheduler(MockBackend(VOCAB, 70), block_size=4, max_kv_tokens=160, max_batch_tokens=20)
        for request in mixed(seed):
            scheduler.add(*request, [3, 5])
        while scheduler.has_work:
            scheduler.step()
            preempted += any(len(entry.parts) > 1 for entry in scheduler._plan.waiting)
    assert preempted > 5


def test_samples_and_beams_share_passes() -> None:
    backend = MockBackend(VOCAB)
    scheduler = Scheduler(backend)
    scheduler.add([1] * 10, SamplingParams(num_beams=3, max_new_tokens=5), 0)
    scheduler.add([2] * 7, SamplingParams(max_new_tokens=5), 0)
    while scheduler.has_work:
        scheduler.step()
    assert [len(batch.token_ids) for batch in backend.batches] == [17, 4, 4, 4, 4]


def test_more_beams_than_sequences_run_alone_and_more_than_a_pass_holds_are_refused() -> None:
    params = SamplingParams(num_beams=10, num_return_sequences=10, max_new_tokens=5)
    scheduler = Scheduler(MockBackend(VOCAB), max_sequences=4, max_batch_tokens=10)
    scheduler.add([1], SamplingParams(max_new_tokens=3), 0)
    scheduler.add([1, 2], params, 0)
    outcomes = []
    while scheduler.has_work:
        outcomes += scheduler.step()
    assert list(outcomes[-1].hypotheses) == beam_search(MockBackend(VOCAB), [1, 2], params)
    with pytest.raises(BadRequest, match="num_beams=11"):
        scheduler.add([1], SamplingParams(num_beams=11), 0)


def test_beams_that_the_cache_cannot_hold_fail_and_the_next_is_run() -> None:
    scheduler = Scheduler(MockBackend(VOCAB, 60), block_size=4, max_kv_tokens=64)
    scheduler.add([1] * 30, SamplingParams(num_beams=5, max_new_tokens=25), 0)
    scheduler.add([1] * 30, SamplingParams(max_new_tokens=2), 0)
    outcomes = []
    while scheduler.has_work:
        outcomes += scheduler.step()
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    assert {failure.request for failure in failures} == {0}
    assert "5 beams" in str(failures[0].error)
    assert sum(isinstance(outcome, Event) for outcome in outcomes) == 2
