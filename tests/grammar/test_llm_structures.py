"""Structured output through the facade and sessions: the same texts alone and in company, on both engines."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import byte_tokenizer, in_memory, random_weights, tiny_config

import pronk.tokenizer
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.generation import Generation
from pronk.engine.params import SamplingParams
from pronk.engine.prefix_cache import BLOCK_SIZE
from pronk.errors import BadRequest, NoTokenizer, PronkError
from pronk.grammar.structure import Structure
from pronk.llm import LLM
from pronk.session import Session

POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": -99, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
        "name": {"type": "string", "maxLength": 8},
    },
    "required": ["x", "tags", "name"],
    "additionalProperties": False,
}
DRAWN: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 90}


def model(folder: Path, engine: str = "cpu", **more: Any) -> LLM:
    config = tiny_config(vocab_size=259, max_position_embeddings=256)
    checkpoint = in_memory(config, random_weights(config))
    tokenizer = pronk.tokenizer.load(pronk.tokenizer.find(byte_tokenizer(folder / "tokenizer.bin")))
    if engine == "cpu":
        return LLM("tiny", checkpoint, tokenizer, CpuBackend.from_checkpoint(checkpoint, threads=1), **more)
    from pronk.torch_engine.backend import TorchBackend

    return LLM("tiny", checkpoint, tokenizer, TorchBackend.from_checkpoint(checkpoint, device="cpu"), **more)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with model(tmp_path_factory.mktemp("tiny")) as made:
        yield made


def one(found: Any) -> Generation:
    assert isinstance(found, Generation)
    return found


def is_point(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == ["x", "tags", "name"]
        and -99 <= value["x"] <= 99
        and set(value["tags"]) <= {"red", "blue"}
        and len(value["name"]) <= 8
    )


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[int, Generation]:
    found = {seed: one(llm.generate("a point", schema=POINT, seed=seed, **DRAWN)) for seed in range(12)}
    assert all(is_point(generation.text) for generation in found.values() if generation.finish_reason == "stop")
    assert sum(generation.finish_reason == "stop" for generation in found.values()) > 6
    return found


def test_the_same_text_from_every_call(llm: LLM, alone: dict[int, Generation]) -> None:
    for seed, generation in alone.items():
        chunks = list(llm.stream("a point", schema=json.dumps(POINT), seed=seed, **DRAWN))
        assert "".join(chunk.text for chunk in chunks) == generation.text
        assert chunks[-1].finish_reason == generation.finish_reason
        again = one(llm.generate("a point", structure=Structure.json_schema(POINT), seed=seed, **DRAWN))
        assert again.tokens == generation.tokens
    for more in ({"speculative": "ngram"}, {"cache": False}):
        assert one(llm.generate("a point", schema=POINT, seed=1, **DRAWN, **more)).tokens == alone[1].tokens
    several = llm.generate(["a point"] * 2, schema=POINT, seed=3, **DRAWN)
    assert [generation.tokens for generation in several] == [alone[3].tokens] * 2


def test_samples_have_matchers_of_their_own(llm: LLM) -> None:
    found = llm.generate("a point", schema=POINT, n=6, seed=5, **DRAWN)
    assert len({generation.text for generation in found}) > 3
    assert all(is_point(generation.text) for generation in found if generation.finish_reason == "stop")


def test_threads_share_passes_and_change_nothing(llm: LLM, alone: dict[int, Generation]) -> None:
    """Half of them under the schema, the others free."""
    free = {seed: one(llm.generate("free", seed=seed, **DRAWN)).tokens for seed in range(6)}
    found: dict[Any, Any] = {}

    def work(seed: int) -> None:
        if seed < 12:
            found[seed] = one(llm.generate("a point", schema=POINT, seed=seed, **DRAWN)).tokens
        else:
            found[seed] = one(llm.generate("free", seed=seed - 12, **DRAWN)).tokens

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {seed: found[seed] for seed in alone} == {seed: generation.tokens for seed, generation in alone.items()}
    assert {seed: found[seed + 12] for seed in free} == free


@pytest.mark.parametrize("drafts", [None, "ngram"])
def test_texts_that_give_way_and_are_begun_anew_are_the_same(llm: LLM, drafts: Any) -> None:
    """A cache in which six texts do not find room, passes that are interrupted, and a scheduler thrown away amid it."""
    structure = Structure.regex("([a-f][0-9]?){60,70}!")  # no two blocks hold it, and its prompt
    grammar, prompt = llm.grammar(structure), llm.tokenizer.encode("x" * 60)
    alone = [one(llm.generate(prompt, structure=structure, seed=seed, **DRAWN)) for seed in range(6)]
    session = Session(llm.backend, llm.tokenizer, eos_ids=llm.eos_ids, max_kv_tokens=8 * BLOCK_SIZE, prefix_cache=0)
    handles = {
        seed: session.submit(prompt, SamplingParams(seed=seed, speculative=drafts, **DRAWN), grammar=grammar)
        for seed in range(6)
    }
    tokens = defaultdict(list)
    passes, real = 0, llm.backend.predict

    def interrupted(*given: Any) -> Any:
        found = real(*given)
        if passes % 7 == 3:
            raise KeyboardInterrupt
        return found

    try:
        llm.backend.predict = interrupted  # type: ignore[method-assign]
        while session.has_work:
            passes += 1
            try:
                for handle, chunk in session.step():
                    if chunk.token is not None:
                        tokens[handle].append(chunk.token)
            except KeyboardInterrupt:
                pass
            if passes in (20, 45) and session._scheduler:
                session._scheduler.settled = False
    finally:
        del llm.backend.predict  # type: ignore[method-assign]
    assert session.load.counters.preemptions
    assert {seed: tokens[handle] for seed, handle in handles.items()} == {seed: alone[seed].tokens for seed in handles}


def test_a_cancelled_text_leaves_the_others(llm: LLM, alone: dict[int, Generation]) -> None:
    grammar = llm.grammar(Structure.json_schema(POINT))
    session = Session(llm.backend, llm.tokenizer, eos_ids=llm.eos_ids)
    prompt = llm.tokenizer.encode("a point")
    handles = [session.submit(prompt, SamplingParams(seed=seed, **DRAWN), grammar=grammar) for seed in range(3)]
    tokens = defaultdict(list)
    for turn in range(200):
        if turn == 5:
            session.cancel(handles[1])
        for handle, chunk in session.step():
            if chunk.token is not None:
                tokens[handle].append(chunk.token)
    assert not session.has_work
    assert [tokens[handles[seed]] for seed in (0, 2)] == [alone[seed].tokens for seed in (0, 2)]
    assert len(tokens[handles[1]]) <= 5


def test_beams_follow_it(llm: LLM) -> None:
    found = llm.generate("a point", schema=POINT, num_beams=4, num_return_sequences=3, max_new_tokens=90)
    assert len({generation.text for generation in found}) == 3
    assert all(generation.finish_reason == "stop" and is_point(generation.text) for generation in found)
    greedy = one(llm.generate("a point", schema=POINT, num_beams=4, max_new_tokens=90))
    assert greedy.text == found[0].text


def test_the_torch_engine_draws_the_same(tmp_path: Path, llm: LLM) -> None:
    """Greedily, where it would find the likeliest token on its device, and beside a text that has no grammar."""
    with model(tmp_path, "torch") as torch_llm:
        for seed in (None, 3):
            how: dict[str, Any] = {"max_new_tokens": 60} | ({"seed": seed, "temperature": 1.0} if seed else {})
            wanted = one(llm.generate("a point", schema=POINT, **how)).tokens
            assert one(torch_llm.generate("a point", schema=POINT, **how)).tokens == wanted
        session, prompt = torch_llm.session, torch_llm.tokenizer.encode("a point")
        params = SamplingParams(max_new_tokens=60)
        held = session.submit(prompt, params, grammar=torch_llm.grammar(Structure.json_schema(POINT)))
        session.submit(prompt, params)
        tokens = defaultdict(list)
        while session.has_work:
            for handle, chunk in session.step():
                tokens[handle is held].append(chunk.token)
        assert [token for token in tokens[True] if token is not None] == one(
            llm.generate("a point", schema=POINT, max_new_tokens=60)
        ).tokens


def test_how_texts_end(llm: LLM) -> None:
    whole = one(llm.generate("x", structure=Structure.choice(["abc"]), max_new_tokens=20))
    assert (whole.text, whole.finish_reason, len(whole.tokens)) == ("abc", "stop", 3)
    for more in ({"ignore_eos": True}, {"temperature": 1.0, "seed": 2}, {"max_new_tokens": 3}):
        found = one(llm.generate("x", structure=Structure.choice(["abc"]), **{"max_new_tokens": 20, **more}))
        assert (found.text, found.finish_reason) == ("abc", "stop")
    cut = one(llm.generate("x", structure=Structure.choice(["abc"]), max_new_tokens=2))
    assert (cut.text, cut.finish_reason) == ("ab", "length")
    stopped = one(llm.generate("x", structure=Structure.choice(["abc"]), stop="b"))
    assert (stopped.text, stopped.finish_reason) == ("a", "stop")
    bias = {2: 100.0}  # the end of text, which is to come where the text is whole
    found = one(llm.generate("x", structure=Structure.regex("ab*"), logit_bias=bias))
    assert (found.text, found.finish_reason, found.tokens) == ("a", "stop", [3 + ord("a")])


def test_log_probabilities_are_the_models_own(llm: LLM) -> None:
    found = one(llm.generate("x", structure=Structure.choice(["q"]), logprobs=1))
    free = one(llm.generate("x", logprobs=259, max_new_tokens=1))
    assert found.logprobs
    assert free.logprobs
    assert found.logprobs[0].logprob == dict(free.logprobs[0].top)[3 + ord("q")]
    assert found.logprobs[0].top == free.logprobs[0].top[:1]


def test_a_text_that_cannot_go_on_fails_alone(llm: LLM) -> None:
    """Its only sign is declared a token that ends a text, which may not stand amid one."""
    structure = Structure.choice(["aqa"])
    with pytest.raises(PronkError, match="no token of the vocabulary can go on"):
        llm.generate("x", structure=structure, stop_token_ids=[3 + ord("q")])
    assert one(llm.generate("x", structure=structure)).text == "aqa"


def test_what_is_refused_before_a_token_is_drawn(llm: LLM, tmp_path: Path) -> None:
    before = llm.session.load.counters.steps
    for how in ({"schema": {"not": {}}}, {"schema": POINT, "structure": Structure.regex("a")}, {"schema": 5}):
        for call in (llm.generate, llm.stream, llm.chat, llm.stream_chat):
            prompt: Any = "x" if call in (llm.generate, llm.stream) else [{"role": "user", "content": "x"}]
            template = {} if isinstance(prompt, str) else {"chat_template": "llama3"}
            with pytest.raises(BadRequest):
                call(prompt, **how, **template)
    with pytest.raises(BadRequest, match="ignore_eos"):
        llm.generate("x", schema=POINT, num_beams=2, ignore_eos=True)
    assert llm.session.load.counters.steps == before
    config = tiny_config(vocab_size=259)
    checkpoint = in_memory(config, random_weights(config))
    mute = LLM("mute", checkpoint, None, CpuBackend.from_checkpoint(checkpoint, threads=1))
    with pytest.raises(NoTokenizer):
        mute.generate([1, 2], schema=POINT)
    with pytest.raises(BadRequest, match="the grammar is of 259 tokens"):
        Session(CpuBackend.from_checkpoint(in_memory(tiny_config(), random_weights(tiny_config())))).submit(
            [1, 2], grammar=llm.grammar(Structure.regex("a"))
        )


def test_chats_follow_it(llm: LLM) -> None:
    messages = [{"role": "user", "content": "a point"}]
    how: dict[str, Any] = {"chat_template": "llama3", "schema": POINT, "seed": 4, **DRAWN}
    whole = one(llm.chat(messages, **how))
    assert is_point(whole.text)
    assert "".join(chunk.text for chunk in llm.stream_chat(messages, **how)) == whole.text
