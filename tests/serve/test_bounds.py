"""Bodies of much JSON: refused before they are parsed, and nothing that grows with them runs in the event loop."""

from __future__ import annotations

import json
import threading
import urllib.request
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from served import PATIENCE_S, Running, soon
from test_requests import posted

from pronk.serve import asking, blocks, bounds, items
from pronk.serve.failures import ApiError
from pronk.serve.requests import ChatRequest, read
from pronk.session import Session

pytestmark = pytest.mark.usefixtures("idle")
MANY = bounds.MAX_VALUES

TOO_MUCH = {
    "lists": (b'{"messages":[' + b"[]," * MANY + b"[]]}", "values"),
    "objects": (b'{"messages":[' + b"{}," * MANY + b"{}]}", "values"),
    "numbers": (b'{"messages":[' + b"1," * MANY + b"1]}", "values"),
    "texts": (b'{"messages":[' + b'"\\"",' * MANY + b'""]}', "values"),
    "members": (b"{" + b",".join(b'"%d":1' % n for n in range(MANY)) + b"}", "values"),
    "depth": (b'{"messages":' + b"[" * bounds.MAX_DEPTH + b"]" * bounds.MAX_DEPTH + b"}", "levels"),
    "depth behind a text": (b'{"a":"\\\\","b":' + b"[" * bounds.MAX_DEPTH, "levels"),
    "a long number": (b'{"seed":' + b"1" * (bounds.MAX_NUMBER + 1) + b"}", "characters"),
    "a long fraction": (b'{"seed":0.' + b"1" * bounds.MAX_NUMBER + b"}", "characters"),
    "a long number across pieces": (b" " * (bounds._PIECE - 9) + b'{"a":' + b"1" * 70 + b"}", "characters"),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_what_holds_too_much_is_never_parsed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """5 million empty lists held up all streams for 4.6 s: a parser lets no other thread run."""
    monkeypatch.setattr(bounds, "parsed", lambda body: pytest.fail("it was parsed"))
    body, what = TOO_MUCH[name]
    with pytest.raises(ApiError, match=what):
        read(body, ChatRequest, {})


def test_just_as_much_as_there_may_be() -> None:
    deepest = b"[" * bounds.MAX_DEPTH + b"]" * bounds.MAX_DEPTH
    for body in (
        deepest,
        b"[" + b"0," * (MANY - 2) + b"0]",
        b"1" * bounds.MAX_NUMBER,
        json.dumps({"[" * 100: '{"' * MANY, "x": "1" * 1000, "y": "\\" * 99_999}).encode(),
    ):
        assert bounds.problem(body) is None
        assert bounds.parsed(body) == json.loads(body)


nested = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(alphabet='a"\\[]{},:é', max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\[:', max_size=5), inner),
    max_leaves=30,
)


@given(nested, st.integers(1, 40))
def test_depth_and_values_are_those_of_the_parsed_body(value: Any, piece: int) -> None:
    """Whatever stands in texts, and wherever a piece ends."""
    deepest, count, level = 0, 0, [value]
    while level:
        inside = [each for each in level if isinstance(each, list | dict)]
        deepest += bool(inside)
        # Each list and object, the comma before each but the first of its values, the colon of each member.
        count += sum(1 + max(0, len(each) - 1) + len(each) * isinstance(each, dict) for each in inside)
        level = [inner for each in inside for inner in (each.values() if isinstance(each, dict) else each)]
    body = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "_PIECE", piece)
        patch.setattr(bounds, "MAX_VALUES", count)
        patch.setattr(bounds, "MAX_DEPTH", deepest)
        assert bounds.problem(body) is None
        patch.setattr(bounds, "MAX_DEPTH", deepest - 1)
        assert (bounds.problem(body) is None) == (deepest == 0)
        patch.setattr(bounds, "MAX_DEPTH", deepest)
        patch.setattr(bounds, "MAX_VALUES", count - 1)
        assert "values" in str(bounds.problem(body))


@pytest.mark.parametrize("number", ["1.7976931348623157081e-308", "0.30000000000000004", "-1.5E+3", "5e-324", "0.0"])
def test_fractions_are_pythons(number: str) -> None:
    """msgspec's own take 50 µs each near the smallest one, and a body has room for a million."""
    assert bounds.parsed(number.encode()) == float(number)


def test_a_number_out_of_range_is_none(server: Running) -> None:
    with pytest.raises(msgspec.DecodeError, match="1e999"):
        bounds.parsed(b"1e999")
    status, told = posted(server, "/v1/completions", b'{"prompt": "x", "temperature": 1e999}')
    assert status == 400
    assert "1e999" in told["error"]["message"]


@pytest.mark.parametrize(
    ("path", "module", "name", "body"),
    [
        ("/v1/chat/completions", asking, "conversation", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", asking, "form_of", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", asking, "form_of", {"prompt": "x", "response_format": {"type": "text"}}),
        ("/v1/completions", asking, "check_length", {"prompt": "x " * asking.FEW, "truncate": "left"}),
        ("/v1/completions", Session, "submit", {"prompt": ["x"] * 8, "stop_token_ids": [1] * 4096}),
        ("/v1/completions", Session, "submit", {"prompt": ["x"] * 16, "logit_bias": {str(n): 1 for n in range(200)}}),
        ("/v1/responses", items, "messages", {"input": "x"}),
        ("/v1/responses", items, "tools", {"input": "x"}),
        ("/v1/messages", blocks, "messages", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/messages", blocks, "tools", {"messages": [{"role": "user", "content": "x"}]}),
    ],
)
def test_what_grows_with_a_request_does_not_run_in_the_event_loop(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, module: Any, name: str, body: dict[str, Any]
) -> None:
    function, threads = getattr(module, name), list[str]()

    def told(*given: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        return function(*given, **named)

    monkeypatch.setattr(module, name, told)
    most = {"max_output_tokens" if path.endswith("responses") else "max_tokens": 1}
    assert posted(server, path, body | most)[0] == 200
    loops = server._thread.name
    assert threads
    assert loops not in threads


def test_a_short_text_is_not_encoded_in_the_event_loop_while_a_long_one_is(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop waited for the library's lock, half a second of a million letters, and all streams with it."""
    served = server.models.models["tiny"].llm
    assert served
    lock = served.tokenizer._lock  # type: ignore[attr-defined]
    threads, encode = list[str](), type(served.tokenizer)._encode

    def told(tokenizer: Any, text: str, special: bool) -> list[int]:
        threads.append(threading.current_thread().name)
        return encode(tokenizer, text, special)

    monkeypatch.setattr(type(served.tokenizer), "_encode", told)
    body, answers = {"prompt": "x", "max_tokens": 2, "temperature": 0}, list[Any]()
    asked = threading.Thread(target=lambda: answers.append(posted(server, "/v1/completions", body)))
    with lock:  # as long as a text is encoded
        asked.start()
        assert soon(lambda: threads)
        with urllib.request.urlopen(f"{server.url}/health", timeout=PATIENCE_S) as health:
            assert health.status == 200
        assert not answers
    asked.join(PATIENCE_S)
    assert answers[0][0] == 200
    assert server._thread.name not in threads
    assert posted(server, "/v1/completions", body)[0] == 200
    assert threads[-1] == server._thread.name  # inverse: where it is free, no other thread is waited for


def test_a_tool_of_100_000_unknown_fields_is_refused_at_once(server: Running) -> None:
    """Each was looked for among those before it, which took minutes of the event loop."""
    tool = {"name": "a", "input_schema": {}} | {f"f{n}": 1 for n in range(100_000)}
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tools": [tool]}
    assert posted(server, "/v1/messages", body)[0] == 400
    tools = [{"type": "function", "name": "a"}] * 20_000
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
    status, told = posted(server, "/v1/responses", {"input": "x", "tools": tools, "tool_choice": choice})
    assert status == 400
    assert "more than 128" in told["error"]["message"]


def test_texts_are_measured_without_being_made_again() -> None:
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert asking._letters([{"role": "user", "content": "abc"}]) == len("roleusercontentabc") + 2
    assert asking._letters(deep) == 10_001
    assert asking._letters(["x" * 10, 5, None]) == 13
