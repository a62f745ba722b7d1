"""/v1/look gives the numbers of llm.look, keeps few looks, each for its owner, and refuses what is wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import Running
from test_requests import VALUES, posted

import pronk
from pronk.look import Look
from pronk.serve import looks
from pronk.serve.models import Models

pytestmark = pytest.mark.usefixtures("idle")
TEXT = "Whoever looks inside a model sees a text, token by token."
MESSAGES = [{"role": "user", "content": "Where is the sea?"}]


def looked(server: Running, **body: Any) -> dict[str, Any]:
    status, found = posted(server, "/v1/look", {"model": "tiny", **body})
    assert status == 200, found
    return found


def told(look: Any, *page: int) -> Any:
    """As JSON has it."""
    return json.loads(json.dumps(look.to_dict(*page)))


def test_tokens_are_those_of_python(server: Running, llm: pronk.LLM) -> None:
    found = looked(server, text=TEXT, top=3)
    expected = told(llm.look(TEXT, top=3))
    assert {name: found[name] for name in expected} == expected
    page = looked(server, look=found["id"], start=5, stop=9)
    assert page["tokens"] == expected["tokens"][5:9]
    assert looked(server, look=found["id"], start=10**6, stop=10**6)["tokens"] == []


def test_messages_ids_answers_and_adapters(server: Running, llm: pronk.LLM) -> None:
    answer = llm.chat(MESSAGES, max_new_tokens=7).tokens
    for body, expected in (
        ({"messages": MESSAGES}, llm.look(MESSAGES)),
        ({"messages": MESSAGES, "answer": "By the hills."}, llm.look(MESSAGES, answer="By the hills.")),
        ({"messages": MESSAGES, "answer": list(answer)}, llm.look(MESSAGES, answer=list(answer))),
        ({"text": [5, 6, 7]}, llm.look([5, 6, 7])),
        ({"model": "poet", "text": TEXT}, llm.look(TEXT, adapter="poet")),
    ):
        found = looked(server, **body)
        assert found["tokens"] == told(expected)["tokens"]
        assert found["template_text"] == expected.template_text
        assert found["prompt_tokens"] == expected.prompt_tokens


def test_it_goes_on_greedily(server: Running, llm: pronk.LLM) -> None:
    expected = llm.look(TEXT, answer=llm.generate(TEXT, max_new_tokens=9))
    found = looked(server, text=TEXT, max_tokens=9)
    assert found["tokens"] == told(expected)["tokens"]
    assert found["length"] == found["prompt_tokens"] + 9


def test_attention_and_lens(server: Running, llm: pronk.LLM) -> None:
    expected, name = llm.look(TEXT), looked(server, text=TEXT)["id"]
    for layer in range(llm.config.num_hidden_layers):
        found = looked(server, look=name, stop=0, attention={"token": 20, "layer": layer})
        assert found["tokens"] == []
        assert found["attention"]["weights"] == expected.attention(20, layer).tolist()
        one = looked(server, look=name, attention={"token": 20, "layer": layer, "head": 1})["attention"]
        assert one == {"token": 20, "layer": layer, "head": 1, "weights": expected.attention(20, layer, 1).tolist()}
    for token in (1, 20, len(expected)):
        found = looked(server, look=name, lens={"token": token, "k": 4})["lens"]
        assert found == json.loads(json.dumps(expected.lens(token, 4).to_dict()))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "give a text"),
        ({"text": "x", "messages": MESSAGES}, "give a text"),
        ({"text": 5}, "text"),
        ({"text": [-1]}, "vocabulary"),
        ({"text": [10**30]}, "vocabulary"),
        ({"text": ["x"]}, "text"),
        ({"text": "x" * 2000}, "context length"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"text": "x", "answer": 7}, "answer"),
        ({"text": "x", "answer": [300]}, "vocabulary"),
        ({"text": "x", "answer": "y", "max_tokens": 3}, "max_tokens"),
        ({"text": "x", "max_tokens": 0}, "max_tokens"),
        ({"text": "x", "max_tokens": 10**30}, "max_tokens"),
        ({"text": "x", "top": 0}, "top"),
        ({"text": "x", "top": 101}, "top"),
        ({"text": "x", "start": -1}, "range"),
        ({"text": "x", "start": 9, "stop": 3}, "range"),
        ({"text": "x", "stop": 10**30}, "at a time"),
        ({"text": "x", "start": 1.5}, "start"),
        ({"text": "x", "attention": {"token": 0}}, "layer"),
        ({"text": "x", "attention": {"token": 1, "layer": 0}}, "token"),
        ({"text": "x", "attention": {"token": -1, "layer": 0}}, "token"),
        ({"text": "x", "attention": {"token": 0, "layer": 99}}, "layer"),
        ({"text": "x", "attention": {"token": 0, "layer": 0, "head": 10**20}}, "head"),
        ({"text": "x", "attention": {"token": True, "layer": 0}}, "token"),
        ({"text": "x", "attention": {"token": 0, "layer": 0, "file": "/etc/passwd"}}, "file"),
        ({"text": "x", "lens": {"token": 0}}, "token 0"),
        ({"text": "x", "lens": {"token": 2}}, "token"),
        ({"text": "x", "lens": {"token": 1, "k": -1}}, "k must"),
        ({"text": "x", "chat_template": "{{ 1 }}"}, "chat_template"),
        ({"look": "look-x", "text": "x"}, "leave text out"),
    ],
)
def test_wrong_requests_are_told_so(server: Running, wrong: dict[str, Any], says: str) -> None:
    status, found = posted(server, "/v1/look", {"model": "tiny", **wrong})
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    assert says in found["error"]["message"]
    assert posted(server, "/v1/look", {"model": "tiny", "look": "look-x"})[0] == 404


FIELDS = ["model", "text", "messages", "answer", "max_tokens", "top", "look", "start", "stop", "attention", "lens"]
OF_ONE = st.dictionaries(st.sampled_from(["token", "layer", "head", "k"]), VALUES | st.integers(0, 3), max_size=4)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.dictionaries(st.sampled_from(FIELDS), VALUES | OF_ONE | st.lists(st.integers(0, 300)), max_size=5), st.booleans()
)
def test_no_body_is_the_server_s_fault(server: Running, body: dict[str, Any], whole: bool) -> None:
    given = {"text": "ab", "stop": 2} if whole else {}
    assert posted(server, "/v1/look", {**given, **body})[0] < 500


def test_a_look_at_another_model_s_text(server: Running) -> None:
    name = looked(server, text="x")["id"]
    status, found = posted(server, "/v1/look", {"model": "poet", "look": name})
    assert (status, "name it" in found["error"]["message"]) == (400, True)


def test_few_are_kept_and_the_least_recently_used_goes(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def there(name: str) -> bool:
        return posted(server, "/v1/look", {"model": "tiny", "look": name})[0] == 200

    monkeypatch.setattr(looks, "MOST_KEPT", 3)
    names = [looked(server, text=f"text {n}")["id"] for n in range(3)]
    assert there(names[0])
    names.append(looked(server, text="one more")["id"])
    assert [there(name) for name in names] == [True, False, True, True]
    monkeypatch.setattr(looks, "MOST_KEPT_TOKENS", 110)
    names = [looked(server, text="x" * 50)["id"] for n in range(3)]
    assert [there(name) for name in names] == [False, True, True]
    monkeypatch.setattr(looks, "MOST_TOKENS", 49)
    status, found = posted(server, "/v1/look", {"model": "tiny", "text": "x" * 50})
    assert (status, found["error"]["code"]) == (400, "context_length_exceeded")
    assert posted(server, "/v1/look", {"model": "tiny", "text": "x" * 40, "max_tokens": 10})[0] == 400


def test_others_are_answered_while_a_long_text_is_read(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reading has no end before three answers have come: they can come between its pieces alone."""
    read, answers, last = Look.read, 0, time.monotonic() + 60

    def read_on(look: Look, tokens: int) -> bool:
        return (answers < 3 and time.monotonic() < last) or read(look, tokens)

    monkeypatch.setattr(Look, "read", read_on)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(looked, server, text="x" * 900, stop=0)
        while not found.done():
            client.completions.create(model="tiny", prompt="a", max_tokens=1)
            answers += not found.done()
    assert (found.result()["length"], answers >= 3) == (900, True)


@pytest.fixture
def locked(folder: Path) -> Iterator[Running]:
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}), keys=("first", "second"))
    yield running
    running.stop()


def test_nobody_sees_another_owner_s_look(locked: Running) -> None:
    mine, others = locked.client("first"), locked.client("second")
    name = mine.post("/look", body={"text": TEXT}, cast_to=dict)["id"]
    assert mine.post("/look", body={"look": name}, cast_to=dict)["id"] == name
    with pytest.raises(openai.NotFoundError):
        others.post("/look", body={"look": name}, cast_to=dict)


def test_a_look_goes_with_its_model(folder: Path) -> None:
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}))
    try:
        name = looked(running, text=TEXT)["id"]
        running.models._unload(running.models.models["tiny"])
        status, found = posted(running, "/v1/look", {"model": "tiny", "look": name})
        assert (status, found["error"]["code"]) == (404, "look_not_found")
        assert looked(running, text=TEXT)["id"] != name
    finally:
        running.stop()


def test_an_answer_that_begins_with_tokens(client: openai.OpenAI, llm: pronk.LLM) -> None:
    """What the page's "go on from this one" asks for."""
    whole = llm.chat(MESSAGES, max_new_tokens=12)

    def asked(**body: Any) -> Any:
        options = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 7}
        return client.chat.completions.create(**options, extra_body=body)  # type: ignore[call-overload]

    found = asked(answer_ids=list(whole.tokens[:5]), logprobs=True, top_logprobs=2, return_tokens_as_token_ids=True)
    entries = found.choices[0].logprobs.content
    assert [entry.token for entry in entries] == [f"token_id:{token}" for token in whole.tokens[5:]]
    assert entries[0].top_logprobs[0].token == entries[0].token
    assert bytes(b for entry in entries for b in entry.bytes) == b"".join(
        llm.tokenizer.token_bytes(token) for token in whole.tokens[5:]
    )
    for wrong in ({"answer_ids": [259]}, {"answer_ids": [-1]}, {"answer_ids": "x"}, {"answer_ids": [1] * 2000}):
        with pytest.raises(openai.BadRequestError):
            asked(**wrong)
    scored = client.completions.create(
        model="tiny", prompt="ab", max_tokens=0, echo=True, logprobs=1, extra_body={"return_tokens_as_token_ids": True}
    )
    ids = llm.tokenizer.encode("ab")
    assert scored.choices[0].logprobs.tokens == [f"token_id:{token}" for token in ids]
    assert scored.choices[0].logprobs.text_offset == [0, 1]
