"""/v1/messages through Anthropic's own client: what LLM.chat says, in blocks and events as that client reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pydantic
import pytest
from served import Running, Script, slowed, soon

import pronk
from pronk.serve.models import Models

anthropic = pytest.importorskip("anthropic")
QUESTION = [{"role": "user", "content": "Where is the sea?"}]
DRAWN: dict[str, Any] = {"temperature": 0.9, "seed": 11}
TOOL = {
    "name": "weather",
    "description": "Of a town.",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
}
CALL = ['<tool_call>{"name": "weather", "argu', 'ments": {"town": "Oslo"}}</tool', "_call>"]


def client_of(server: Running, key: str = "none") -> Any:
    return server.kept(anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, timeout=60))


@pytest.fixture
def client(server: Running) -> Any:
    return client_of(server)


def asked(client: Any, more: dict[str, Any] | None = None, **options: Any) -> Any:
    given = {"model": "tiny", "messages": QUESTION, "max_tokens": 20, **options}
    return client.messages.create(**given, extra_body={**DRAWN, **(more or {})})


def said(llm: pronk.LLM, messages: list[dict[str, Any]], **options: Any) -> pronk.Generation:
    return llm.chat(messages, **{"max_new_tokens": 20, **DRAWN, **options})


@pytest.mark.usefixtures("idle")
def test_a_text_is_the_one_that_python_gives(client: Any, llm: pronk.LLM) -> None:
    expected = said(llm, [{"role": "system", "content": "Be brief."}, *QUESTION])
    found = asked(client, system="Be brief.")
    assert [block.text for block in found.content] == [expected.text]
    assert (found.type, found.role, found.model) == ("message", "assistant", "tiny")
    assert (found.stop_reason, found.stop_sequence) == ("max_tokens", None)
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == expected.prompt_tokens
    assert found.usage.output_tokens == 20
    assert found.pronk["seed"] == 11
    assert "warnings" not in found.pronk
    ended = asked(client, {"stop_token_ids": list(range(259))})
    assert (ended.content, ended.stop_reason) == ([], "end_turn")


@pytest.mark.usefixtures("idle")
def test_blocks_are_the_messages_of_a_chat(client: Any, llm: pronk.LLM) -> None:
    text = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "user", "content": [text, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": asked(client).content},
        {"role": "user", "content": "three"},
    ]
    plain = [
        {"role": "system", "content": "Be\nbrief."},
        {"role": "user", "content": "one\ntwo"},
        {"role": "assistant", "content": asked(client).content[0].text},
        {"role": "user", "content": "three"},
    ]
    system = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    found = asked(client, system=system, messages=messages)
    assert found.content[0].text == said(llm, plain).text
    assert ["cache_control" in warning for warning in found.pronk["warnings"]] == [True]


@pytest.mark.usefixtures("idle")
def test_what_is_cached_is_no_input(client: Any) -> None:
    talk = [{"role": "user", "content": "sing " * 60}]  # what no other test asks
    first = asked(client, messages=talk)
    assert first.usage.input_tokens > 300
    second = asked(client, messages=talk)
    assert second.usage.cache_read_input_tokens > 200
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == first.usage.input_tokens


@pytest.mark.usefixtures("idle")
def test_the_sequence_that_stopped_it_is_told(client: Any, llm: pronk.LLM) -> None:
    whole = said(llm, QUESTION).text
    stop = whole[4:6]
    found = asked(client, stop_sequences=["never", stop])
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == whole[: whole.index(stop)]


@pytest.mark.usefixtures("idle")
def test_the_end_of_the_context_is_told(client: Any) -> None:
    messages = [{"role": "user", "content": "x" * 990}]
    assert asked(client, messages=messages, max_tokens=500).stop_reason == "model_context_window_exceeded"


@pytest.mark.usefixtures("idle")
def test_the_events_of_a_text_in_their_order(client: Any, llm: pronk.LLM) -> None:
    expected = said(llm, QUESTION)
    raw = list(asked(client, stream=True))
    kinds = [event.type for event in raw]
    assert [kinds[0], kinds[1], *kinds[-3:]] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert raw[0].message.content == []
    assert raw[0].message.stop_reason is None
    assert raw[0].message.usage.input_tokens == expected.prompt_tokens
    assert raw[-2].pronk["seed"] == 11
    given = {"model": "tiny", "messages": QUESTION, "max_tokens": 20, "extra_body": DRAWN}
    with client.messages.stream(**given) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == expected.text
    assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 20)


def test_the_bytes_of_a_stream(server: Running, script: Script) -> None:
    """Its events have names, and a ping is among them, which the client does not show."""
    import urllib.request

    script.says("Hello")
    body = {"model": "tiny", "messages": QUESTION, "max_tokens": 5, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/messages", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        events = answer.read().decode().removesuffix("\n\n").split("\n\n")
    names = [event.split("\n")[0].removeprefix("event: ") for event in events]
    assert names[:2] == ["message_start", "ping"]
    assert [json.loads(event.split("\ndata: ")[1])["type"] for event in events] == names


def test_count_tokens(client: Any, llm: pronk.LLM) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=QUESTION, system="Be brief.")
    assert counted.input_tokens == len(llm.chat_prompt([{"role": "system", "content": "Be brief."}, *QUESTION]))
    long = [{"role": "user", "content": "x" * 5000}]
    assert client.messages.count_tokens(model="tiny", messages=long).input_tokens == len(llm.chat_prompt(long))


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "document"),
        ({"messages": [{"role": "assistant", "content": [{"type": "thinking", "thinking": "x"}]}]}, "thinking"),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "The sea is"}]}, "last message"),
        ({"messages": [{"role": "user", "content": []}]}, "content"),
        ({"messages": [], "system": "Be brief."}, "messages is empty"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "without text"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use"}]}]}, "without id"),
        ({"messages": []}, "empty"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "bash_20250124"),
        ({"tools": [{"name": "f"}]}, "input_schema"),
        ({"tools": [TOOL]}, "no place for tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "sometimes"}}, "tool_choice"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"container": "c"}, "container"),
        ({"more": {"mcp_servers": [{}]}}, "mcp_servers"),
        ({"more": {"top_k": -2}}, "top_k"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(client: Any, wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        asked(client, **wrong)
    assert refused.value.body["type"] == "error"
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    assert word in refused.value.body["error"]["message"]


def test_what_changes_nothing_is_said(client: Any) -> None:
    found = asked(
        client,
        {"inference_geo": "eu"},
        cache_control={"type": "ephemeral"},
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        metadata={"user_id": "me"},
        service_tier="auto",
        max_tokens=2,
    )
    words = [warning.partition(" ")[0] for warning in found.pronk["warnings"]]
    assert words == ["inference_geo", "cache_control", "output_config.effort"]


def test_errors_have_anthropics_form(client: Any, server: Running, folder: Path) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        asked(client, model="claude-9")
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="maximum context length"):
        asked(client, messages=[{"role": "user", "content": "x" * 5000}])
    with pytest.raises(anthropic.APIStatusError) as method:
        client.get("/v1/messages", cast_to=dict)
    assert method.value.body["error"]["type"] == "invalid_request_error"


@pytest.fixture(scope="module")
def locked(folder: Path) -> Iterator[Running]:
    running = Running(Models({"tiny": str(folder)}, {}, {"threads": 1}, max_sequences=2), keys=("right",))
    yield running
    running.stop()


def test_a_wrong_key_has_anthropics_form(locked: Running) -> None:
    with pytest.raises(anthropic.AuthenticationError) as refused:
        asked(client_of(locked, "wrong"))
    assert refused.value.body["error"]["type"] == "authentication_error"
    assert asked(client_of(locked, "right")).usage.output_tokens == 20


def test_calls_in_blocks(caller: Running, script: Script) -> None:
    client, ask = client_of(caller), {"model": "caller", "messages": QUESTION, "max_tokens": 99, "tools": [TOOL]}
    pieces = ("Let me", " see. ", *CALL, '<tool_call>{"name": "weather", "arguments": {}}</tool_call>')
    script.says(*pieces)
    whole = client.messages.create(**ask)
    script.says(*pieces)
    with client.messages.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_message()
    for found in (whole, final):
        assert [block.type for block in found.content] == ["text", "tool_use", "tool_use"]
        assert found.content[0].text == "Let me see."
        assert [(block.name, block.input) for block in found.content[1:]] == [
            ("weather", {"town": "Oslo"}),
            ("weather", {}),
        ]
        assert found.stop_reason == "tool_use"
    indices = [event.index for event in events if event.type == "content_block_start"]
    assert indices == [0, 1, 2]


def test_what_a_call_gave_is_told_to_the_model(caller: Running, script: Script) -> None:
    client = client_of(caller)
    script.says(*CALL)
    ask = {"model": "caller", "max_tokens": 99, "tools": [TOOL]}
    first = client.messages.create(messages=QUESTION, **ask)
    result = {"type": "tool_result", "tool_use_id": first.content[0].id, "content": [{"type": "text", "text": "rain"}]}
    failed = {"type": "tool_result", "tool_use_id": first.content[0].id, "is_error": True}
    talk = [
        *QUESTION,
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "And so?"}]},
    ]
    script.says("It rains.")
    second = client.messages.create(messages=talk, **ask)
    assert second.content[0].text == "It rains."
    assert ["is_error" in warning for warning in second.pronk["warnings"]] == [True]
    told = (
        '<s>user:Where is the sea?</s><s>assistant:None[weather {"town": "Oslo"}]</s>'
        "<s>tool weather:rain</s><s>tool weather:</s><s>user:And so?</s><s>assistant:"
    )
    assert script.prompts[-1].endswith(told)


def test_no_tool_and_one_tool(caller: Running, script: Script) -> None:
    client, ask = client_of(caller), {"model": "caller", "messages": QUESTION, "max_tokens": 99, "tools": [TOOL]}
    script.says(*CALL)
    assert client.messages.create(tool_choice={"type": "none"}, **ask).stop_reason == "end_turn"
    assert "weather" not in script.prompts[-1]
    script.says(*CALL, *CALL)
    one = client.messages.create(tool_choice={"type": "auto", "disable_parallel_tool_use": True}, **ask)
    assert [block.type for block in one.content] == ["tool_use"]


class Town(pydantic.BaseModel):
    name: Literal["Oslo", "Rome"]


@pytest.mark.usefixtures("idle")
def test_a_form_is_followed(client: Any) -> None:
    found = client.messages.parse(model="tiny", messages=QUESTION, max_tokens=60, output_format=Town)
    assert found.stop_reason == "end_turn"
    assert found.parsed_output.name in ("Oslo", "Rome")
    with pytest.raises(anthropic.BadRequestError, match="not"):
        asked(client, output_config={"format": {"type": "json_schema", "schema": {"not": {}}}})


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_that_is_forced(caller: Running, choice: dict[str, Any]) -> None:
    towns = {"town": {"enum": ["Oslo", "Rome"]}}
    schema = {"type": "object", "properties": towns, "required": ["town"], "additionalProperties": False}
    tool = {**TOOL, "input_schema": schema}
    ask = {"model": "caller", "messages": QUESTION, "tools": [tool], "max_tokens": 200}
    ask["tool_choice"] = {**choice, "disable_parallel_tool_use": True}
    client = client_of(caller)
    with client.messages.stream(**ask) as stream:
        final = stream.get_final_message()
    for found in (client.messages.create(**ask), final):
        (call,) = found.content
        assert (call.type, call.name, found.stop_reason) == ("tool_use", "weather", "tool_use")
        assert call.input["town"] in ("Oslo", "Rome")
    short = client.messages.create(**{**ask, "max_tokens": final.usage.output_tokens - 20})
    assert (short.content[0].type, short.stop_reason) == ("text", "max_tokens")
    assert short.content[0].text.startswith("{")


def test_what_fails_in_the_middle_is_an_event(client: Any, script: Script) -> None:
    script.says("a", pronk.errors.NotEnoughMemory("no room", "wait"))
    with pytest.raises(anthropic.APIStatusError) as failed:
        list(client.messages.create(model="tiny", messages=QUESTION, max_tokens=9, stream=True))
    assert failed.value.body["error"]["type"] == "overloaded_error"


@pytest.mark.usefixtures("idle")
def test_who_leaves_is_computed_no_further(client: Any, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch)
    before = server.models.models["tiny"].session.load.counters.decode_tokens
    with asked(client, {"ignore_eos": True}, stream=True, max_tokens=900) as stream:
        next(iter(stream))
    assert soon(lambda: server.engine.texts == 0)
    assert server.models.models["tiny"].session.load.counters.decode_tokens - before < 800
