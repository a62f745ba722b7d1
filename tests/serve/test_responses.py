"""/v1/responses through OpenAI's own client: what LLM.chat says, in events of the order that client follows."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest
from served import Running, Script, slowed, soon

import pronk
from pronk.engine.params import SamplingParams

QUESTION = "Where is the sea?"
DRAWN: dict[str, Any] = {"temperature": 0.9, "extra_body": {"seed": 11}}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Of a town.",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"]},
    "strict": False,
}
CALL = ['<tool_call>{"name": "weather", "argu', 'ments": {"town": "Oslo"}}</tool', "_call>"]


def asked(client: openai.OpenAI, **options: Any) -> Any:
    return client.responses.create(**{"model": "tiny", "input": QUESTION, "max_output_tokens": 20, **options})


def said(llm: pronk.LLM, messages: list[dict[str, Any]], **options: Any) -> pronk.Generation:
    return llm.chat(messages, **{"max_new_tokens": 20, "temperature": 0.9, "seed": 11, **options})


@pytest.mark.usefixtures("idle")
def test_a_text_is_the_one_that_python_gives(client: openai.OpenAI, llm: pronk.LLM) -> None:
    expected = said(llm, [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}])
    found = asked(client, instructions="Be brief.", **DRAWN)
    assert found.output_text == expected.text
    assert (found.status, found.object, found.model) == ("incomplete", "response", "tiny")
    assert found.incomplete_details.reason == "max_output_tokens"
    assert found.output[0].status == "incomplete"
    assert found.usage.input_tokens == expected.prompt_tokens
    assert found.usage.output_tokens == len(expected.tokens) == 20
    assert found.usage.total_tokens == expected.prompt_tokens + 20
    assert found.usage.output_tokens_details.reasoning_tokens == 0
    assert found.pronk["seed"] == 11
    assert "warnings" not in found.pronk
    again = asked(client, instructions="Be brief.", **DRAWN)
    assert again.usage.input_tokens_details.cached_tokens == 0  # shorter than a block
    ended = asked(client, temperature=0, extra_body={"stop_token_ids": list(range(259))})
    assert (ended.status, ended.output_text, ended.incomplete_details) == ("completed", "", None)
    assert ended.output[0].content[0].text == ""


@pytest.mark.usefixtures("idle")
def test_items_are_the_messages_of_a_chat(client: openai.OpenAI, llm: pronk.LLM) -> None:
    first = asked(client, **DRAWN)
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        *(item.model_dump() for item in first.output),
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": first.output_text},
        {"role": "assistant", "content": "no"},
        {"role": "user", "content": "a\nb"},
    ]
    assert asked(client, input=items, **DRAWN).output_text == said(llm, messages).text


@pytest.mark.usefixtures("idle")
def test_the_events_of_a_text_in_their_order(client: openai.OpenAI, llm: pronk.LLM) -> None:
    expected = said(llm, [{"role": "user", "content": QUESTION}])
    with client.responses.stream(model="tiny", input=QUESTION, max_output_tokens=20, **DRAWN) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in deltas) == deltas[-1].snapshot == expected.text
    assert list(dict.fromkeys(kinds)) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert events[0].response.output == []
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert events[2].item.content == []
    assert events[2].item.status == "in_progress"
    assert events[-2].item.status == "incomplete"
    assert events[-4].text == events[-3].part.text == expected.text
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert len({event.item_id for event in events if hasattr(event, "item_id")} | {events[2].item.id}) == 1
    assert events[-1].response.usage.output_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities(client: openai.OpenAI, llm: pronk.LLM, stream: bool) -> None:
    expected = said(llm, [{"role": "user", "content": QUESTION}], logprobs=3, stop="zzz")
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 3, "stream": stream, **DRAWN}
    if stream:
        *events, last = asked(client, **options)
        entries = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        assert [one.logprob for one in entries] == [one.logprob for one in last.response.output[0].content[0].logprobs]
    else:
        entries = asked(client, **options).output[0].content[0].logprobs
    assert [entry.logprob for entry in entries] == [each.logprob for each in expected.logprobs]
    assert bytes(b for entry in entries for b in entry.bytes).decode("utf-8", "replace") == expected.text
    assert [[top.logprob for top in entry.top_logprobs] for entry in entries] == [
        [value for _, value in each.top] for each in expected.logprobs
    ]


def test_an_automatic_truncation_leaves_out_the_oldest_turns(client: openai.OpenAI, llm: pronk.LLM) -> None:
    turns = [{"role": "user", "content": f"{number} " * 100} for number in range(12)]
    with pytest.raises(openai.BadRequestError, match="maximum context length") as refused:
        asked(client, input=turns, truncation="disabled")
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    found = asked(client, input=turns, truncation="auto", **DRAWN)
    expected = said(llm, turns, overflow="drop-oldest")
    assert found.output_text == expected.text
    assert found.pronk["truncated_tokens"] == expected.truncated_tokens > 0
    assert found.truncation == "auto"


NOBODY = {"type": "function", "name": "nobody"}


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": "nobody"}],
                }
            },
            "tool_choice",
        ),
        ({"include": ["everything"]}, "include"),
        ({"truncation": "middle"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"text": {"format": "json"}}, "text"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"n": 2}}, "n"),
        ({"extra_body": {"max_tokens": 2}}, "max_tokens"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": []}, "input"),
        ({"input": [{"type": "computer_call"}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input"),
        ({"input": [{"role": "user"}]}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "1", "arguments": "{"}]}, "input"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(client: openai.OpenAI, wrong: dict[str, Any], param: str | None) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        asked(client, **wrong)
    assert param is None or refused.value.param == param
    assert "\n" not in refused.value.message


def test_what_changes_nothing_is_said(client: openai.OpenAI) -> None:
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": []}
    found = asked(
        client,
        input=[reasoning, {"role": "user", "content": "x"}],
        store=True,
        reasoning={"effort": "low"},
        text={"verbosity": "low"},
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        user="me",
        service_tier="auto",
        max_output_tokens=2,
    )
    words = " ".join(found.pronk["warnings"])
    assert all(name in words for name in ("store", "reasoning", "text.verbosity", "encrypted_content", "item 0"))
    assert len(found.pronk["warnings"]) == 5
    assert found.metadata == {"a": "b"}
    assert found.store is False


def test_answers_are_not_kept(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="keeps no answers"):
        client.responses.retrieve("resp_1")
    with pytest.raises(openai.NotFoundError, match="keeps no answers"):
        client.responses.delete("resp_1")


def test_calls_in_the_order_of_their_events(caller: Running, script: Script) -> None:
    script.says("Let me", " see. ", *CALL, '<tool_call>{"name": "weather", "arguments": {"town": "Rome"}}</tool_call>')
    tools = [TOOL]
    with caller.client().responses.stream(model="caller", input=QUESTION, tools=tools) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type.removeprefix("response.") for event in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds[-9:] == [*call, *call, "completed"]
    assert kinds[kinds.index("output_text.done") :][:3] == ["output_text.done", "content_part.done", "output_item.done"]
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2]
    message, first, second = final.output
    assert message.content[0].text == "Let me see."
    assert (first.name, json.loads(first.arguments), second.arguments) == (
        "weather",
        {"town": "Oslo"},
        '{"town": "Rome"}',
    )
    assert first.call_id != second.call_id
    assert final.status == first.status == "completed"
    script.says("Let me", " see. ", *CALL)
    whole = caller.client().responses.create(model="caller", input=QUESTION, tools=tools)
    assert [item.type for item in whole.output] == ["message", "function_call"]
    assert whole.output_text == "Let me see."


def test_what_a_call_gave_is_told_to_the_model(caller: Running, script: Script) -> None:
    client = caller.client()
    script.says(*CALL)
    talk: list[Any] = [{"role": "user", "content": QUESTION}]
    first = client.responses.create(model="caller", input=talk, tools=[TOOL])
    assert '"name": "weather"' in script.prompts[-1]
    assert "strict" in script.prompts[-1]
    talk += first.output
    talk.append({"type": "function_call_output", "call_id": first.output[0].call_id, "output": "rain"})
    script.says("It rains.")
    assert client.responses.create(model="caller", input=talk, tools=[TOOL]).output_text == "It rains."
    told = f'<s>user:{QUESTION}</s><s>assistant:None[weather {{"town": "Oslo"}}]</s><s>tool weather:rain</s>'
    assert script.prompts[-1].endswith(told + "<s>assistant:")


def test_tools_that_are_allowed(caller: Running, script: Script) -> None:
    client, other = caller.client(), {**TOOL, "name": "other"}
    script.says(*CALL)
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    found = client.responses.create(model="caller", input="x", tools=[TOOL, other], tool_choice=choice)
    assert '"other"' not in script.prompts[-1]
    assert found.output[0].name == "weather"
    assert [tool.name for tool in found.tools] == ["weather", "other"]
    script.says(*CALL)
    found = client.responses.create(model="caller", input="x", tools=[TOOL], tool_choice="none")
    assert found.output[0].type == "message"
    assert "weather" not in script.prompts[-1]


class Town(pydantic.BaseModel):
    name: Literal["Oslo", "Rome"]


@pytest.mark.usefixtures("idle")
def test_a_form_is_followed(client: openai.OpenAI) -> None:
    found = client.responses.parse(model="tiny", input="x", text_format=Town, max_output_tokens=60)
    assert found.status == "completed"
    assert found.output_parsed.name in ("Oslo", "Rome")
    with client.responses.stream(model="tiny", input="x", text_format=Town, max_output_tokens=60) as stream:
        assert stream.get_final_response().output_parsed.name in ("Oslo", "Rome")
    free = asked(client, text={"format": {"type": "json_object"}}, max_output_tokens=3)
    assert free.output_text.lstrip()[:1] in ("{", "")
    assert free.text.format.type == "json_object"
    schema = {"type": "json_schema", "name": "x", "schema": {"not": {}}}
    with pytest.raises(openai.BadRequestError) as refused:
        asked(client, text={"format": schema})
    assert refused.value.param == "text"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_call_that_is_forced(caller: Running, choice: Any) -> None:
    towns = {"town": {"enum": ["Oslo", "Rome"]}}
    schema = {"type": "object", "properties": towns, "required": ["town"], "additionalProperties": False}
    tool = {**TOOL, "parameters": schema}
    ask = {"model": "caller", "input": QUESTION, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    ask["extra_body"] = {"seed": 3}
    (call,) = caller.client().responses.create(**ask).output
    assert (call.type, call.name, call.status) == ("function_call", "weather", "completed")
    assert json.loads(call.arguments)["town"] in ("Oslo", "Rome")
    with caller.client().responses.stream(**ask) as stream:
        events = list(stream)
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    done = next(event for event in events if event.type == "response.function_call_arguments.done")
    assert len(deltas) > 3
    assert "".join(event.delta for event in deltas) == done.arguments == deltas[-1].snapshot
    short = caller.client().responses.create(**ask, max_output_tokens=events[-1].response.usage.output_tokens - 20)
    assert (short.status, short.output[0].status) == ("incomplete", "incomplete")
    assert call.arguments == done.arguments
    assert done.arguments.startswith(short.output[0].arguments)


def test_what_fails_in_the_middle_is_an_event(client: openai.OpenAI, script: Script) -> None:
    script.says("a", pronk.errors.NotEnoughMemory("no room", "wait"))
    *_, last = client.responses.create(model="tiny", input="x", stream=True)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert (last.response.error.code, "no room" in last.response.error.message) == ("server_error", True)
    with pytest.raises(openai.InternalServerError):
        client.responses.create(model="tiny", input="x")


def test_every_way_to_draw(client: openai.OpenAI, llm: pronk.LLM) -> None:
    ways: dict[str, Any] = {"top_k": 9, "min_p": 0.01, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 3}
    found = asked(client, temperature=1.2, top_p=0.9, extra_body=ways)
    params = SamplingParams(temperature=1.2, top_p=0.9, max_new_tokens=20, **ways)
    assert found.output_text == llm.chat([{"role": "user", "content": QUESTION}], params=params).text
    assert (found.temperature, found.top_p) == (1.2, 0.9)


@pytest.mark.usefixtures("idle")
def test_who_leaves_is_computed_no_further(
    client: openai.OpenAI, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch)
    before = server.models.models["tiny"].session.load.counters.decode_tokens
    with asked(client, stream=True, max_output_tokens=900, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    assert soon(lambda: server.engine.texts == 0)
    assert server.models.models["tiny"].session.load.counters.decode_tokens - before < 800
