"""Requests that are wrong: told so in one line, with the field, and never a 500."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import PATIENCE_S, SEQUENCES, WAITING, Running, Script, slowed, soon

from pronk.errors import NotEnoughMemory
from pronk.llm import LLM
from pronk.serve import asking, engine, http, tokens
from pronk.serve.engine import Answer, Wanted

pytestmark = pytest.mark.usefixtures("idle")
MESSAGES = [{"role": "user", "content": "x"}]


def posted(server: Running, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, raw, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 2}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"n": 10**30}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**12}, "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 3}, "stop"),
        ({"stop": [f"stop {n}" for n in range(129)]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [1] * 65_537}, "stop_token_ids"),
        ({"logit_bias": {f"{n}": 0 for n in range(65_537)}}, "logit_bias"),
        ({"seed": "x"}, "seed"),
        ({"seed": -(10**30)}, None),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),  # which Python takes for 10
        ({"logit_bias": {"1" * 5000: 1}}, "logit_bias"),  # which Python takes for none
        ({"temperature": 0, "top_k": -5}, "top_k"),  # nothing of it is used, and it is wrong
        ({"response_format": {"json_schema": {"schema": {}}}}, "response_format"),  # no type: it had no effect
        ({"stream": True, "stream_options": {"include_usage": "false"}}, "stream_options"),  # it was taken for true
        ({"guided_json": {"typ": "object"}}, "guided_json"),
        ({"logit_bias": {"1": 1000}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, None),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_json": {"type": "integer", "minLength": 10**9}}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar"),
        ({"guided_grammar": 'start: "a" start'}, None),  # found amid the text alone
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"answer_ids": [10**6]}, "answer_ids"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"params": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"overflow": "x"}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"x": 1}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": "y"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
        ({"messages": [*MESSAGES, {"role": "tool", "content": [{"type": "image_url"}]}]}, "messages"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": ["x"]}]}, "messages"),
        ({"num_beams": 2, "temperature": 0.5}, None),
        ({"num_beams": 0}, None),
        ({"speculative": "magic"}, "speculative"),
        ({"truncate": "middle"}, "truncate"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
    ],
)
def test_wrong_values(server: Running, wrong: dict[str, Any], param: str | None) -> None:
    status, body = posted(server, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, **wrong})
    assert status == 400, body
    assert body["error"]["type"] == "invalid_request_error"
    assert "\n" not in body["error"]["message"]
    if param:
        assert body["error"]["param"] == param


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": "5"}, "max_tokens must be a whole number, not a text"),
        ({"top_k": 1.5}, "top_k must be a whole number, not a fraction"),
        ({"stop": 5}, "stop must be a text or a list, not a whole number"),
        ({"messages": [1]}, "messages[0] must be an object, not a whole number"),
        ({"stream": "yes"}, "stream must be true or false, not a text"),
    ],
)
def test_a_wrong_type_is_told_in_plain_words(server: Running, wrong: dict[str, Any], said: str) -> None:
    """It was msgspec's own: Expected `int | null`, got `str` - at `max_tokens`."""
    assert posted(server, "/v1/chat/completions", {"messages": MESSAGES, **wrong})[1]["error"]["message"] == said


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (
            "/v1/chat/completions",
            {"mesages": MESSAGES},
            "the request has no messages; did you mean messages by 'mesages'?",
        ),
        ("/v1/chat/completions", {f"x{n}": 1 for n in range(9_000)}, "the request has no messages"),
        (
            "/v1/chat/completions",
            {"prompt": "x"},
            "prompt is a completion's, for /v1/completions; a chat takes messages",
        ),
        ("/v1/look", {"text": "a" * 1025}, "maximum context length is 1024 tokens, and the prompt has 1025 tokens"),
    ],
)
def test_what_is_missing_or_too_much_is_told_in_plain_words(
    server: Running, path: str, body: dict[str, Any], said: str
) -> None:
    """It was msgspec's own: Object missing required field `messages`; and of a look, a context that no model has."""
    status, told = posted(server, path, body)
    assert status == 400
    assert said in told["error"]["message"]


@pytest.mark.parametrize(
    ("path", "wrong", "param"),
    [
        ("/v1/completions", {"prompt": [10**6]}, "prompt"),
        ("/v1/completions", {"prompt": "x" * 2000}, "prompt"),
        ("/v1/completions", {"prompt": "x", "truncate": "middle"}, "truncate"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"messages": MESSAGES}, "messages"),
        ("/v1/completions", {"prompt": "x", "n": 3, "num_beams": 2}, "n"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"9999": 1}}, "logit_bias"),
        ("/v1/responses", {"input": "x", "stop_token_ids": [9999]}, "stop_token_ids"),
        ("/v1/responses", {"input": "x" * 2000}, "input"),
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/v1/look", {"text": "x", "attention": {"token": 9, "layer": 0}}, "attention"),
        ("/v1/look", {"text": "x", "lens": {"token": -1}}, "lens"),
        ("/v1/look", {"text": "x", "top": 1000}, "top"),
        ("/v1/look", {"text": [10**6]}, "text"),
    ],
)
def test_the_field_at_fault_is_named(server: Running, path: str, wrong: dict[str, Any], param: str) -> None:
    """Bug: of tokens that the model has not, none was named; and of too many samples of a beam search, a field that
    no request has: num_return_sequences."""
    status, body = posted(server, path, wrong)
    assert (status, body["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff\xfe", b'{"messages": 1}', b"{}"])
def test_bodies_that_are_no_request(server: Running, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/tokenize", "/detokenize"):
        assert posted(server, path, body)[0] == 400


def test_a_prompt_too_long_has_its_own_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 2000}])
    assert found.value.code == "context_length_exceeded"
    assert "1024" in found.value.message
    cut = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x" * 2000}],
        max_tokens=4,
        extra_body={"truncate": "left"},
    )
    assert cut.pronk["truncated_tokens"] > 900


FAR: dict[str, tuple[dict[str, Any], str]] = {
    "/v1/chat/completions": ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, "messages"),
    "/v1/completions": ({"prompt": ["x", "x" * ((1 << 20) + 1)]}, "prompt"),
    "/v1/responses": ({"input": "x" * (1 << 20)}, "input"),
    "/v1/messages": ({"messages": [{"role": "user", "content": "x" * (1 << 20)}], "max_tokens": 5}, ""),
    "/v1/messages/count_tokens": ({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}, ""),
    "/v1/look": ({"text": "x", "answer": "x" * (1 << 20)}, "text"),
    "/tokenize": ({"content": "x" * ((1 << 20) + 1)}, "content"),
}


@pytest.mark.parametrize("path", FAR)
def test_a_text_far_beyond_the_context_is_not_cut_into_tokens(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """The longest body took 9 GB for a while."""
    monkeypatch.setattr(LLM, "tokenizer", None)
    body, param = FAR[path]
    status, told = posted(server, path, body)
    assert status == 400
    if param:
        assert (told["error"]["param"], told["error"]["code"]) == (param, "context_length_exceeded")
    assert re.search("has 10[0-9]{5} letters|has [23][0-9]{6} letters", told["error"]["message"])


def test_what_fails_with_a_word_is_a_line_of_the_log(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failed(*_: Any) -> None:
        raise NotEnoughMemory("no room", "wait")

    def broken(*_: Any) -> None:
        raise RuntimeError("nobody's fault but ours")

    for wrong, code, lines in ((failed, 503, False), (broken, 500, True)):
        caplog.clear()
        monkeypatch.setattr(tokens, "tokenize", wrong)
        status, told = posted(server, "/tokenize", {"content": "x"})
        assert status == code
        assert "nobody" not in told["error"]["message"]
        (record,) = [record for record in caplog.records if "failed" in record.message]
        assert bool(record.exc_info) == lines
        assert ("no room" in record.message) != lines


def test_no_such_model_path_or_method(client: openai.OpenAI, server: Running) -> None:
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert found.value.code == "model_not_found"
    assert posted(server, "/v1/nothing", {})[0] == 404
    for path, there in (("/chat/completions", "/v1/chat/completions"), ("/v1/tokenize", "/tokenize")):
        status, told = posted(server, path, {})
        assert status == 404
        assert f"; {there} is: end the address" in told["error"]["message"]
    assert posted(server, "/v1/models", {})[0] == 405
    with pytest.raises(openai.BadRequestError, match="embeddings cannot be had"):
        client.embeddings.create(model="tiny", input="x")


def test_a_long_list_holds_up_nobody(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen million numbers kept all streams waiting for seconds: much is read beside the event loop."""
    threads, convert, ids = list[str](), msgspec.convert, [1] * (http.MUCH // 2)

    def watched(*arguments: Any) -> Any:
        threads.append(threading.current_thread().name)
        return convert(*arguments)

    monkeypatch.setattr(msgspec, "convert", watched)
    assert posted(server, "/v1/completions", {"prompt": ids})[1]["error"]["code"] == "context_length_exceeded"
    assert posted(server, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
    assert [name == server._thread.name for name in threads] == [False, True]


def test_scores_of_a_prompt_have_a_place_among_the_texts(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys and values would otherwise be without a bound."""
    body = {"prompt": "x", "max_tokens": 0, "echo": True, "logprobs": 1}
    monkeypatch.setattr(server.engine, "texts", server.engine.max_texts)
    assert posted(server, "/v1/completions", body)[0] == 429
    monkeypatch.setattr(server.engine, "texts", 0)
    assert posted(server, "/v1/completions", body)[0] == 200
    assert server.engine.texts == 0


def test_a_full_queue_is_refused_at_once(server: Running, client: openai.OpenAI) -> None:
    def one() -> None:
        client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=1)

    server.engine.reserve(SEQUENCES + WAITING)
    with pytest.raises(openai.RateLimitError) as found:
        one()
    assert int(found.value.response.headers["retry-after"]) > 0
    server.engine.release(SEQUENCES + WAITING)
    one()


def test_who_waits_too_long_is_refused_and_who_has_begun_is_not(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.models.models["tiny"].session
    assert session
    wanted: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
    slowed(monkeypatch)  # else all of the first may be there before the next one asks
    with client.completions.create(stream=True, **wanted) as begun:
        next(iter(begun))
        with monkeypatch.context() as held:
            holds = threading.Event()
            held.setattr(session, "step", lambda: holds.set() or time.sleep(0.01) or [])
            held.setattr(server.engine, "max_wait_s", 0.2)
            assert holds.wait(PATIENCE_S)  # else the pass under way might take the next one in
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError, match=r"waited 0\.2 s") as found:
                    client.completions.create(stream=stream, **wanted)
                assert int(found.value.response.headers["retry-after"]) > 0
            assert server.engine.texts == 1
        monkeypatch.undo()
        assert [chunk.choices[0].finish_reason for chunk in begun][-1] == "length"
    assert client.completions.create(**wanted).choices[0].finish_reason == "length"


def test_who_leaves_while_it_is_submitted_is_not_computed(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, begun, gone, submitted = server.engine.submit, *(threading.Event() for _ in range(3))

    def slow(wanted: Wanted) -> Answer:
        begun.set()
        assert gone.wait(PATIENCE_S)
        answer = submit(wanted)
        submitted.set()
        return answer

    monkeypatch.setattr(server.engine, "submit", slow)
    monkeypatch.setattr(engine, "FEW", 0)  # else it is not left to another thread
    slowed(monkeypatch)
    session = server.models.models["tiny"].session
    assert session
    assert server.server
    before = session.load.counters.decode_tokens
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 1000, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(f"{head}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert begun.wait(PATIENCE_S)
        own = connection.getsockname()
    connections = server.server.server_state.connections
    assert soon(lambda: own not in [each.client for each in list(connections)])
    gone.set()
    assert submitted.wait(PATIENCE_S)
    assert soon(lambda: not session.has_work)
    assert session.load.counters.decode_tokens - before < 900


EVENTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/v1/chat/completions": ({"messages": MESSAGES}, ("error", "message")),
    "/v1/completions": ({"prompt": "x"}, ("error", "message")),
    "/v1/responses": ({"input": "x"}, ("message",)),
    "/v1/messages": ({"messages": MESSAGES, "max_tokens": 5}, ("error", "message")),
}


@pytest.mark.parametrize("path", EVENTS)
def test_what_fails_late_and_before_the_first_event_is_an_event(
    server: Running, script: Script, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """A stream's status goes out when its first event is long in coming."""
    monkeypatch.setattr(http, "_FIRST_S", 0.01)
    script.says(NotEnoughMemory("no room", "wait"))
    body, way = EVENTS[path]
    request = urllib.request.Request(
        server.url + path, json.dumps({**body, "stream": True}).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        name, data = answer.read().decode().strip().split("\n")
    assert name == "event: error"
    told = json.loads(data.removeprefix("data: "))
    assert told.get("type", "error") == "error"
    for key in way:
        told = told[key]
    assert "no room" in told


@pytest.mark.parametrize("n", [1, SEQUENCES])
def test_who_leaves_is_computed_no_further(
    server: Running, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    """Read once or never, one that is answered whole, and some that wait in the queue."""
    endless: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "temperature": 1.0, "n": n}
    endless["extra_body"] = {"ignore_eos": True}
    slowed(monkeypatch)
    session = server.models.models["tiny"].session
    assert session
    before = session.load.counters.decode_tokens
    with client.completions.create(stream=True, **endless) as stream:
        next(iter(stream))
        assert server.engine.texts == n
    for timeout in (0.02, 0.05, 0.1):
        with pytest.raises(openai.APITimeoutError):
            client.with_options(timeout=timeout).completions.create(**endless)
    assert soon(lambda: server.engine.texts == 0 and not session.has_work)
    assert session.load.counters.decode_tokens - before < 900 * n


def test_tokens(server: Running) -> None:
    status, found = posted(server, "/tokenize", {"model": "tiny", "prompt": "hé"})
    assert (status, found["count"], found["max_model_len"]) == (200, len(found["tokens"]), 1024)
    assert posted(server, "/detokenize", {"model": "tiny", "tokens": found["tokens"]})[1]["prompt"].endswith("hé")
    other = posted(server, "/tokenize", {"content": "hé", "with_pieces": True})[1]["tokens"]
    assert [each["piece"] for each in other] == ["h", [0xC3], [0xA9]]
    assert posted(server, "/tokenize", {"messages": MESSAGES})[1]["count"] > 1
    assert posted(server, "/tokenize", {})[0] == 400
    assert posted(server, "/detokenize", {"tokens": [10**6]})[0] == 400
    assert posted(server, "/detokenize", {"tokens": [-1]})[0] == 400


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}, ["add_generation_prompt"]),
        ("/tokenize", {"messages": MESSAGES, "tools": [], "add_special_tokens": True}, ["tools", "add_special_tokens"]),
        ("/tokenize", {"prompt": "x", "parse_special": False}, ["parse_special"]),
        ("/tokenize", {"content": "x", "add_special_tokens": False}, ["add_special_tokens"]),
        ("/detokenize", {"tokens": [5], "skip_special_tokens": True}, ["skip_special_tokens"]),
        ("/v1/messages/count_tokens", {"messages": MESSAGES, "inference_geo": "eu"}, ["inference_geo"]),
        ("/v1/messages/count_tokens", {"messages": MESSAGES, "cache_control": {}}, ["cache_control"]),
        (
            "/v1/messages/count_tokens",
            {"messages": [{"role": "user", "content": "x" * 2000}], "inference_geo": "eu"},
            ["inference_geo"],
        ),
    ],
)
def test_what_changes_no_tokens_is_said(server: Running, path: str, body: dict[str, Any], words: list[str]) -> None:
    """Bug: these answers told of no field that was dropped: whoever counted a prompt with tools, or without the
    beginning of an answer, took a wrong count for theirs."""
    status, found = posted(server, path, body)
    assert status == 200
    assert [warning.partition(" ")[0] for warning in found["pronk"]["warnings"]] == words


def test_metrics(server: Running, client: openai.OpenAI) -> None:
    def metrics() -> dict[str, float]:
        with urllib.request.urlopen(server.url + "/metrics", timeout=PATIENCE_S) as answer:
            lines = answer.read().decode().splitlines()
        return {line.split(" ")[0]: float(line.split(" ")[1]) for line in lines if line and line[0] != "#"}

    before = metrics()
    client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
    values = metrics()
    first = "pronk_first_token_seconds_count"
    assert values[first] == before[first] + 1
    operations = Path(__file__).resolve().parents[2] / "docs" / "operations"
    shown = (operations / "dashboard.json").read_text(encoding="utf-8")
    shown += (operations.parent / "operations.md").read_text(encoding="utf-8")
    there = {re.sub(r"\{.*|_created$|_sum$|_count$", "", name) for name in values}
    named = set(re.findall(r"pronk_[a-z_]+", shown))
    assert named <= there | {"pronk_first_token_seconds"}
    assert len(named) > 10
    assert values['pronk_texts_running{model="tiny"}'] == values["pronk_texts"] == 0
    assert values['pronk_decode_tokens_total{model="tiny"}'] > 0
    assert values['pronk_requests_total{path="/v1/chat/completions",status="200"}'] > 0


def test_words_of_other_servers_for_nothing(server: Running) -> None:
    """vLLM's clients send top_k -1 for all, llama.cpp's an empty grammar for none: both were refused."""
    plain = {"messages": MESSAGES, "max_tokens": 5, "temperature": 1, "seed": 3}
    expected = posted(server, "/v1/chat/completions", plain)[1]["choices"]
    asked_for = {**plain, "top_k": -1, "grammar": ""}
    assert posted(server, "/v1/chat/completions", asked_for)[1]["choices"] == expected
    greedy = {**plain, "temperature": 0}
    expected = posted(server, "/v1/chat/completions", greedy)[1]["choices"]
    assert posted(server, "/v1/chat/completions", {**greedy, "top_p": 0})[1]["choices"] == expected


def test_the_seed_that_is_told_gives_all_texts_again(server: Running) -> None:
    """Each prompt of a request drew by a seed of its own, and the last was told."""
    asked_for = {"prompt": ["x", "x", "y"], "n": 2, "temperature": 1, "max_tokens": 8, "ignore_eos": True}
    told = posted(server, "/v1/completions", asked_for)[1]
    again = posted(server, "/v1/completions", {**asked_for, "seed": told["pronk"]["seed"]})[1]
    assert again["choices"] == told["choices"]


def test_log_probabilities_beyond_what_the_loop_can_write_are_refused(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy copies cost the engine nothing, and held up everybody's streams for seconds: 64 texts of 400 tokens with
    20 alternatives each; or prompts that are echoed for each sample."""
    most = {"n": SEQUENCES, "temperature": 0, "max_tokens": 1000}
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 20, **most}
    assert posted(server, "/v1/chat/completions", {**chat, "max_tokens": 5})[0] == 200
    without_end = {"messages": MESSAGES, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 20}
    assert posted(server, "/v1/chat/completions", {**without_end, "seed": 1})[0] == 200
    echoed = {"prompt": ["x" * 1000] * 4, "echo": True, "logprobs": 20, **most, "max_tokens": 0}
    for path, body, name in (("chat/completions", chat, "top_logprobs"), ("completions", echoed, "logprobs")):
        monkeypatch.setattr(asking, "_MOST_ENTRIES", 1 << 17)  # this model's context is short
        status, told = posted(server, f"/v1/{path}", body)
        assert (status, told["error"]["param"]) == (400, name)
        assert "at most 131072 are given" in told["error"]["message"]


def test_copies_are_counted_among_texts(server: Running) -> None:
    asked_for = {"prompt": ["x"] * (WAITING + 1), "n": SEQUENCES, "temperature": 0, "max_tokens": 1}
    status, told = posted(server, "/v1/completions", asked_for)
    assert (status, "at once are more than" in told["error"]["message"]) == (400, True)
    status, told = posted(server, "/v1/completions", {**asked_for, "echo": True, "max_tokens": 0})
    assert (status, "at once are more than" in told["error"]["message"]) == (400, True)


def test_a_stream_whose_client_leaves_is_logged_as_such(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    """It was 200, as if it had been read to its end."""
    caplog.set_level(logging.INFO, "pronk.serve")
    client = server.client()
    options: dict[str, Any] = {"ignore_eos": True}
    stream = client.completions.create(model="tiny", prompt="x", max_tokens=1000, stream=True, extra_body=options)
    next(iter(stream))
    stream.close()
    assert soon(lambda: "POST /v1/completions 499" in caplog.text)


def test_what_can_be_had_has_a_head(server: Running) -> None:
    request = urllib.request.Request(f"{server.url}/health", method="HEAD")
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert (answer.status, answer.read()) == (200, b"")


def test_a_form_that_waits_for_its_grammar_has_a_place_and_loses_it(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forms whose clients had left went on being compiled, one after the other, before everybody else's."""
    go = threading.Event()
    really = LLM.grammar
    begun: list[object] = []

    def slow(llm: LLM, structure: Any) -> Any:
        begun.append(structure)
        go.wait(PATIENCE_S)
        return really(llm, structure)

    monkeypatch.setattr(LLM, "grammar", slow)
    body = json.dumps({"prompt": "x", "max_tokens": 2, "guided_regex": "a+"}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(head.encode() + body)
            assert soon(lambda: begun and server.engine.texts == 1)
        assert soon(lambda: server.engine.texts == 0)
    finally:
        go.set()


FIELDS = st.sampled_from(
    [
        "model",
        "messages",
        "prompt",
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "max_tokens",
        "logprobs",
        "stream",
        "top_logprobs",
        "logit_bias",
        "tools",
        "tool_choice",
        "response_format",
        "stream_options",
        "echo",
        "num_beams",
        "truncate",
        "tokens",
        "content",
        "top_k",
        "stop_token_ids",
        "early_stopping",
        "chat_template_kwargs",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-2, 2) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(
    st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]),
    st.dictionaries(FIELDS, VALUES, max_size=5),
)
def test_no_body_is_the_server_s_fault(server: Running, path: str, body: dict[str, Any]) -> None:
    whole = {"messages": MESSAGES, "prompt": "x", "max_tokens": 2, **body, "stream": False}
    assert posted(server, path, whole)[0] < 500
