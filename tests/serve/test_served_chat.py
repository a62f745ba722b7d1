"""/v1/chat/completions and /v1/completions through OpenAI's own client, held against LLM.generate and LLM.chat."""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from served import Running

import pronk
from pronk.engine.params import SamplingParams
from pronk.serve import engine
from pronk.serve.models import Models

pytestmark = pytest.mark.usefixtures("idle")
QUESTION = [{"role": "user", "content": "Where is the sea?"}]
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 11}


def asked(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "tiny", "messages": QUESTION, "max_tokens": 20, **options})


def streamed(client: openai.OpenAI, **options: Any) -> tuple[dict[int, str], list[Any]]:
    chunks = list(asked(client, stream=True, **options))
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    return texts, chunks


@pytest.mark.parametrize(
    ("request_options", "ours"),
    [
        ({"temperature": 0}, {}),
        ({"temperature": 0, "top_p": 0.5}, {}),
        (DRAWN, DRAWN),
        ({**DRAWN, "top_p": 0.8}, {**DRAWN, "top_p": 0.8}),
        ({**DRAWN, "stop": ["e", "a"]}, {**DRAWN, "stop": ("e", "a")}),
        ({**DRAWN, "presence_penalty": 1.5}, {**DRAWN, "presence_penalty": 1.5}),
        ({**DRAWN, "frequency_penalty": -1}, {**DRAWN, "frequency_penalty": -1}),
        ({**DRAWN, "logit_bias": {"40": 50}}, {**DRAWN, "logit_bias": {40: 50}}),
        ({"extra_body": {**DRAWN, "top_k": 5}}, {**DRAWN, "top_k": 5}),
        ({"extra_body": {**DRAWN, "min_p": 0.2}}, {**DRAWN, "min_p": 0.2}),
        ({"extra_body": {**DRAWN, "repetition_penalty": 1.7}}, {**DRAWN, "repetition_penalty": 1.7}),
        ({"extra_body": {**DRAWN, "stop_token_ids": [70, 80, 90]}}, {**DRAWN, "stop_token_ids": (70, 80, 90)}),
        ({"extra_body": {**DRAWN, "ignore_eos": True}}, {**DRAWN, "ignore_eos": True}),
        ({"extra_body": {**DRAWN, "rng": "numpy"}}, {**DRAWN, "rng": "numpy"}),
        ({"extra_body": {"temperature": 0, "speculative": "ngram"}}, {}),
    ],
)
def test_a_text_is_the_one_that_python_gives(
    client: openai.OpenAI, llm: pronk.LLM, request_options: dict[str, Any], ours: dict[str, Any]
) -> None:
    expected = llm.chat(QUESTION, max_new_tokens=20, **ours)
    found = asked(client, **request_options)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.usage.completion_tokens == len(expected.tokens)
    assert found.usage.prompt_tokens == expected.prompt_tokens
    texts, chunks = streamed(client, stream_options={"include_usage": True}, **request_options)
    assert texts == {0: expected.text}
    assert chunks[-1].usage.completion_tokens == len(expected.tokens)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == expected.finish_reason


def test_samples(client: openai.OpenAI, llm: pronk.LLM) -> None:
    expected = llm.chat(QUESTION, max_new_tokens=12, num_samples=3, **DRAWN)
    found = asked(client, n=3, max_tokens=12, **DRAWN)
    assert [choice.message.content for choice in found.choices] == [each.text for each in expected]
    assert found.usage.completion_tokens == sum(len(each.tokens) for each in expected)
    assert streamed(client, n=3, max_tokens=12, **DRAWN)[0] == {n: each.text for n, each in enumerate(expected)}


def test_greedy_samples_are_alike(client: openai.OpenAI, llm: pronk.LLM) -> None:
    expected = llm.chat(QUESTION, max_new_tokens=9).text
    assert [c.message.content for c in asked(client, n=2, max_tokens=9, temperature=0).choices] == [expected] * 2
    assert streamed(client, n=2, max_tokens=9, temperature=0)[0] == {0: expected, 1: expected}


def test_beams_bring_more_at_once_than_may_wait_unread(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "UNREAD", 8)
    found = asked(client, n=3, max_tokens=12, extra_body={"num_beams": 3, "ignore_eos": True})
    assert [choice.finish_reason for choice in found.choices] == ["length"] * 3
    assert found.usage.completion_tokens == 36


def test_beams(client: openai.OpenAI, llm: pronk.LLM) -> None:
    expected = llm.chat(QUESTION, max_new_tokens=8, num_beams=3, num_return_sequences=2)
    found = asked(client, n=2, max_tokens=8, extra_body={"num_beams": 3})
    assert [c.message.content for c in found.choices] == [each.text for each in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_the_model_s_own_and_their_bytes_are_the_text(
    client: openai.OpenAI, llm: pronk.LLM, stream: bool
) -> None:
    expected = llm.chat(QUESTION, max_new_tokens=20, logprobs=3, stop="zzz", **DRAWN)
    if stream:
        chunks = asked(client, stream=True, logprobs=True, top_logprobs=3, stop="zzz", **DRAWN)
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
        entries = [entry for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    else:
        entries = asked(client, logprobs=True, top_logprobs=3, stop="zzz", **DRAWN).choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == [each.logprob for each in expected.logprobs]
    assert bytes(b for entry in entries for b in entry.bytes).decode("utf-8", "replace") == expected.text
    tops = [[(bytes(t.bytes), t.logprob) for t in entry.top_logprobs] for entry in entries]
    spell = llm.tokenizer.token_bytes
    assert tops == [[(spell(token), value) for token, value in each.top] for each in expected.logprobs]


def test_no_alternatives_are_an_empty_list(client: openai.OpenAI) -> None:
    entries = asked(client, logprobs=True, max_tokens=2).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in entries] == [[], []]


def test_the_shape_of_a_stream(client: openai.OpenAI) -> None:
    _, chunks = streamed(client, max_tokens=5, stream_options={"include_usage": True}, **DRAWN)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].pronk["seed"] == 11


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_without_usage_tells_the_rest_with_its_last_choice(client: openai.OpenAI, n: int) -> None:
    """It told nobody the seed that was drawn, nor which fields it did not know."""
    more: dict[str, Any] = {"stream": True, "max_tokens": 3, "n": n, "extra_body": {"mirostat": 2}}
    streams: list[Any] = [
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}], **more),
        client.completions.create(model="tiny", prompt="x", **more),
        client.completions.create(model="tiny", prompt="x", echo=True, **more),
        client.completions.create(model="tiny", prompt="x", echo=True, **{**more, "max_tokens": 0}),
    ]
    for stream in streams:
        *others, last = stream
        assert last.choices[0].finish_reason
        assert last.pronk["warnings"] == ["mirostat is not a field that this server knows; it changed nothing"]
        assert "seed" in last.pronk
        assert not any(hasattr(chunk, "pronk") for chunk in others)


def test_the_drawn_seed_gives_the_text_again(client: openai.OpenAI) -> None:
    first = asked(client, temperature=1.0)
    again = asked(client, temperature=1.0, seed=first.pronk["seed"])
    assert again.choices[0].message.content == first.choices[0].message.content


def test_a_second_turn_finds_the_first_cached(client: openai.OpenAI) -> None:
    talk = [{"role": "user", "content": "tell " * 60}]
    first = asked(client, messages=talk, temperature=0)
    talk += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "more"}]
    second = asked(client, messages=talk, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens // 64 * 64 > 0


def test_content_parts_developer_and_nulls(client: openai.OpenAI, llm: pronk.LLM) -> None:
    plain = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one\ntwo"}]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    given = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts, "name": None}]
    body = {"temperature": 0, "top_p": None, "stop": None, "seed": None, "tools": None, "user": "u", "store": True}
    found = client.post(
        "/chat/completions", body={"model": "tiny", "messages": given, "max_tokens": 9, **body}, cast_to=dict
    )
    assert found["choices"][0]["message"]["content"] == llm.chat(plain, max_new_tokens=9).text
    assert "warnings" not in found["pronk"]


def test_what_is_not_known_is_said(client: openai.OpenAI) -> None:
    found = asked(client, extra_body={"mirostat": 2, "reasoning_effort": "low"}, max_tokens=2)
    assert [warning.partition(" ")[0] for warning in found.pronk["warnings"]] == ["mirostat", "reasoning_effort"]


def test_an_adapter_is_a_model_of_its_own(client: openai.OpenAI, llm: pronk.LLM) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "poet"]
    expected = llm.chat(QUESTION, max_new_tokens=20, adapter="poet").text
    assert asked(client, model="poet", temperature=0).choices[0].message.content == expected
    assert expected != llm.chat(QUESTION, max_new_tokens=20).text


def test_completions(client: openai.OpenAI, llm: pronk.LLM) -> None:
    prompts = ["The sea", "A hill of sand"]
    expected = llm.generate(prompts, max_new_tokens=16, num_samples=2, **DRAWN)
    found = client.completions.create(model="tiny", prompt=prompts, n=2, **DRAWN)
    assert [choice.text for choice in found.choices] == [each.text for each in expected]
    ids = [llm.tokenizer.encode(prompt) for prompt in prompts]
    by_ids = client.completions.create(model="tiny", prompt=ids, n=2, **DRAWN)
    assert [choice.text for choice in by_ids.choices] == [each.text for each in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_scores_the_prompt(client: openai.OpenAI, llm: pronk.LLM, stream: bool) -> None:
    prompt = "It was a long and winding road, and nobody knew where it might end. " * 3
    ids = llm.tokenizer.encode(prompt)
    logits = llm.logits(ids).astype("float64")
    norms = np.logaddexp.reduce(logits, axis=-1)
    found = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=0, echo=True, logprobs=2, temperature=0, stream=stream
    )
    choice = next(iter(found)).choices[0] if stream else found.choices[0]
    assert choice.text == prompt
    assert choice.finish_reason == "length"
    given = choice.logprobs.token_logprobs
    assert given[0] is None
    expected = [float(logits[at, token] - norms[at]) for at, token in enumerate(ids[1:])]
    assert given[1:] == pytest.approx(expected, abs=1e-5)
    assert "".join(choice.logprobs.tokens) == prompt
    assert choice.logprobs.text_offset == list(range(len(prompt)))


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_are_places_in_the_text(client: openai.OpenAI, llm: pronk.LLM, stream: bool) -> None:
    """Bug: a special token, which the text leaves out, and each part of a character moved all offsets behind it."""
    ids = [*llm.tokenizer.encode("<s>a"), *llm.tokenizer.encode("é😀b", bos=False)]
    asked: dict[str, Any] = {"max_tokens": 6, "echo": True, "logprobs": 0, "extra_body": {"guided_regex": "ü[c-x]{9}"}}
    given = client.completions.create(model="tiny", prompt=ids, stream=stream, **asked)
    choices = [chunk.choices[0] for chunk in given] if stream else [given.choices[0]]
    assert "".join(choice.text for choice in choices)[:5] == "aé😀bü"
    offsets = [offset for choice in choices for offset in (choice.logprobs.text_offset if choice.logprobs else ())]
    assert offsets == [0, 0, *[1] * 2, *[2] * 4, 3, *[4] * 2, 5, 6, 7, 8]


def test_echo_scores_with_the_adapter_that_was_asked(client: openai.OpenAI, llm: pronk.LLM) -> None:
    prompt = "It was a long and winding road, and nobody knew where it might end. "
    options = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0}
    given = client.completions.create(model="poet", **options).choices[0].logprobs.token_logprobs
    look = llm.look(prompt, adapter="poet")
    while look.read(1 << 20):
        pass
    tokens = look.to_dict(0, len(look))["tokens"]
    assert given[1:] == pytest.approx([token["logprob"] for token in tokens[1:]], abs=1e-5)
    plain = client.completions.create(model="tiny", **options).choices[0].logprobs.token_logprobs
    assert plain[1:] != pytest.approx(given[1:], abs=1e-2)


@pytest.fixture(scope="module")
def crowded(folder: Path) -> Iterator[Running]:
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 2}, max_sequences=64), max_sequences=64)
    yield running
    running.stop()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_crowd_gets_what_each_gets_alone(crowded: Running, llm: pronk.LLM, share: float) -> None:
    """64 streams at once, of which some leave in the middle: text, log-probabilities and usage of all others."""
    draw = random.Random(4)
    ways = [{"seed": n, "temperature": 1.1, "top_p": 0.9, "max_tokens": draw.randrange(1, 60)} for n in range(64)]
    leaves = [draw.random() < share for _ in ways]
    asked: list[Any] = [[{"role": "user", "content": f"number {n} " * (1 + n % 7)}] for n in range(64)]

    def one(number: int) -> tuple[str, list[float], tuple[int, int]] | None:
        text, logprobs, usage = [], [], None
        with crowded.client().chat.completions.create(
            model="tiny", messages=asked[number], stream=True, stream_options={"include_usage": True}, logprobs=True,
            **ways[number],
        ) as stream:  # fmt: skip
            for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    text.append(choice.delta.content or "")
                    logprobs += [each.logprob for each in (choice.logprobs and choice.logprobs.content) or []]
                if leaves[number] and len(text) > number % 5:
                    return None
        assert usage
        return "".join(text), logprobs, (usage.prompt_tokens, usage.completion_tokens)

    with concurrent.futures.ThreadPoolExecutor(len(ways)) as pool:
        found = list(pool.map(one, range(len(ways))))
    gone = sum(each is None for each in found)  # a short text may be whole before its client leaves
    assert gone > 20 if share else gone == 0
    for number, got in enumerate(found):
        if got:
            params = SamplingParams(
                seed=number, temperature=1.1, top_p=0.9, max_new_tokens=ways[number]["max_tokens"], logprobs=0
            )
            alone = llm.chat(asked[number], params=params)
            assert got[0] == alone.text
            assert alone.logprobs is not None
            its = alone.logprobs[: len(got[1])]  # a token that ends a text is no part of it
            assert got[1] == [each.logprob for each in its]
            assert len(got[1]) >= alone.stats.new_tokens - 1
            assert got[2] == (alone.stats.prompt_tokens, alone.stats.new_tokens)
