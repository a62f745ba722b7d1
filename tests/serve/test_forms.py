"""Texts of a form, and calls that must be made, over HTTP."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pydantic
import pytest
from served import SEQUENCES, Running
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.serve.models import Models

PLACE = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
DIALECTS = {
    "hermes": "{# <tool_call> #}",
    "mistral": "{# [TOOL_CALLS] #}",
    "llama3": '{# {"name": function name, "parameters": arguments} #}',
}
PERSON = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "sex": {"enum": ["f", "m"]}},
    "required": ["age", "sex"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "object",
    "properties": {"unit": {"$ref": "#/$defs/unit"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "birth-day", "parameters": PERSON}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {tool["function"]["name"]: tool["function"].get("parameters", {"maxProperties": 0}) for tool in TOOLS}
ASKED: list[Any] = [{"role": "user", "content": "Do it."}]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, sign in DIALECTS.items():
        folder = found[name] = save_tiny_chat_model(tmp_path_factory.mktemp("dialects") / name)
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text())
        settings["chat_template"] = sign + PLACE + settings["chat_template"]
        file.write_text(json.dumps(settings))
    return found


@pytest.fixture(scope="module")
def callers(folders: dict[str, Path]) -> Iterator[Running]:
    sources = {name: str(folder) for name, folder in folders.items()}
    running = Running(Models(sources, {}, {"threads": 1}, max_sequences=SEQUENCES))
    yield running
    running.stop()


def calls_of(callers: Running, streamed: bool, **options: Any) -> tuple[list[tuple[str, str]], str | None, str]:
    """Calls by name and arguments, the finish and the text of one answer."""
    client = callers.client()
    if not streamed:
        choice = client.chat.completions.create(messages=ASKED, **options).choices[0]
        its = choice.message.tool_calls or []
        return (
            [(each.function.name, each.function.arguments) for each in its if each.type == "function"],
            choice.finish_reason,
            choice.message.content or "",
        )
    found: dict[int, tuple[str, str]] = {}
    finish, text, pieces = None, "", 0
    for chunk in client.chat.completions.create(messages=ASKED, stream=True, **options):
        for choice in chunk.choices:
            finish, text = choice.finish_reason or finish, text + (choice.delta.content or "")
            for part in choice.delta.tool_calls or []:
                assert part.function
                first = part.index not in found
                assert (part.id is not None) == (part.type is not None) == (part.function.name is not None) == first
                name, so_far = found.get(part.index, (part.function.name or "", ""))
                found[part.index] = (name, so_far + (part.function.arguments or ""))
                pieces += 1
    assert pieces > 2 * len(found)  # arguments come as they are written
    return list(found.values()), finish, text


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("parallel", [False, True])
def test_a_call_that_must_be_made(callers: Running, dialect: str, parallel: bool, streamed: bool) -> None:
    names = set()
    for seed in range(6):
        calls, finish, text = calls_of(
            callers, streamed, model=dialect, tools=TOOLS, tool_choice="required", parallel_tool_calls=parallel,
            seed=seed, max_tokens=400,
        )  # fmt: skip
        assert text == ""
        assert finish == "tool_calls" or (parallel and finish == "length")
        assert calls
        assert parallel or len(calls) == 1
        for name, arguments in calls[: None if finish == "tool_calls" else -1]:
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
            names.add(name)
    assert len(names) > 1


def test_streamed_or_not_calls_are_the_same(callers: Running) -> None:
    options: dict[str, Any] = {"model": "hermes", "tools": TOOLS, "tool_choice": "required", "seed": 5}
    assert calls_of(callers, False, max_tokens=300, **options) == calls_of(callers, True, max_tokens=300, **options)


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "function": {"name": "birth-day"}}, {"birth-day"}),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TOOLS[0], TOOLS[2]]}},
            {"weather", "now"},
        ),
    ],
)
def test_tools_that_are_named(callers: Running, choice: Any, names: set[str]) -> None:
    options = {"model": "hermes", "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    called = {calls_of(callers, False, seed=seed, max_tokens=300, **options)[0][0][0] for seed in range(6)}
    assert called == names


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_cut_short_is_length(callers: Running, streamed: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    options: dict[str, Any] = {"model": "llama3", "tools": TOOLS, "tool_choice": named, "seed": 1}
    (whole,), finish, _ = calls_of(callers, streamed, max_tokens=300, **options)
    assert finish == "tool_calls"
    ((name, arguments),), finish, _ = calls_of(callers, streamed, max_tokens=50, **options)
    assert (name, finish) == ("weather", "length")
    assert whole[1].startswith(arguments)
    assert len(arguments) < len(whole[1])


@pytest.mark.parametrize("streamed", [False, True])
def test_a_stop_string_amid_a_call_makes_no_call_whole(callers: Running, streamed: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    _, finish, _ = calls_of(
        callers, streamed, model="llama3", tools=TOOLS, tool_choice=named, seed=1, max_tokens=300, stop='"days'
    )
    assert finish == "stop"


def test_a_call_or_a_form(callers: Running) -> None:
    """With auto a text may be either, and is nothing else."""
    kinds = set()
    for seed in range(40):
        calls, finish, text = calls_of(
            callers, False, model="hermes", tools=TOOLS, parallel_tool_calls=False, seed=seed, max_tokens=300,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
        )  # fmt: skip
        kinds.add(finish)
        if calls:
            jsonschema.validate(json.loads(calls[0][1]), SCHEMAS[calls[0][0]])
        else:
            jsonschema.validate(json.loads(text), PERSON)
    assert kinds == {"tool_calls", "stop"}


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        (TOOLS, {"type": "function", "function": {"name": "no"}}, "none of the tools"),
        (TOOLS, {"type": "allowed_tools", "allowed_tools": {"mode": "some", "tools": TOOLS}}, "mode"),
        (TOOLS, {"type": "custom"}, "tool_choice is"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}], "required", "object"),
        (
            [*TOOLS, {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
            "required",
            "the parameters of f cannot be followed: not supported: 'not'",  # it was "this grammar"
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"maxLength": 1e9}}}}}],
            "required",
            "parameters of f: maxLength",
        ),
    ],
)
def test_calls_that_cannot_be_forced(callers: Running, tools: Any, choice: Any, said: str) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(said)):
        calls_of(callers, False, model="hermes", tools=tools, tool_choice=choice)


class Person(pydantic.BaseModel):
    age: int
    likes: list[bool] = pydantic.Field(max_length=3)


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    for seed in range(5):
        parsed = client.chat.completions.parse(
            model="tiny", messages=ASKED, response_format=Person, seed=seed, max_tokens=400
        )
        assert isinstance(parsed.choices[0].message.parsed, Person)


FORMS: dict[str, tuple[dict[str, Any], pronk.Structure]] = {
    "json_schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": PERSON, "strict": True}}},
        pronk.Structure.json_schema(PERSON),
    ),
    "json_object": ({"response_format": {"type": "json_object"}}, pronk.Structure.json_object()),
    "guided_json": ({"guided_json": PERSON}, pronk.Structure.json_schema(PERSON)),
    "guided_json as text": ({"guided_json": json.dumps(PERSON)}, pronk.Structure.json_schema(json.dumps(PERSON))),
    "guided_regex": ({"guided_regex": "[0-9]{3}-[a-f]+"}, pronk.Structure.regex("[0-9]{3}-[a-f]+")),
    "guided_choice": ({"guided_choice": ["yes", "no"]}, pronk.Structure.choice(["yes", "no"])),
    "grammar": ({"grammar": 'root ::= "a" ("b" | "c")'}, pronk.Structure.grammar('root ::= "a" ("b" | "c")')),
    "structured_outputs": ({"structured_outputs": {"regex": "x{4}"}}, pronk.Structure.regex("x{4}")),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_the_one_that_python_gives(client: openai.OpenAI, llm: pronk.LLM, name: str) -> None:
    fields, structure = FORMS[name]
    options: dict[str, Any] = {"seed": 3, "temperature": 1.0, "n": 2}
    alone = llm.chat(ASKED, structure=structure, max_new_tokens=60, logprobs=2, **options)
    answer = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=60, logprobs=True, top_logprobs=2, extra_body=fields, **options
    )
    assert [choice.message.content for choice in answer.choices] == [sample.text for sample in alone]
    assert [choice.finish_reason for choice in answer.choices] == [sample.finish_reason for sample in alone]
    beams = {"num_beams": 3, "temperature": 0, **fields}
    found = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=60, extra_body=beams)
    its = llm.chat(ASKED, structure=structure, max_new_tokens=60, num_beams=3)
    assert found.choices[0].message.content == its.text
    prompted = client.completions.create(model="tiny", prompt="Say: ", max_tokens=60, seed=4, extra_body=fields)
    assert (
        prompted.choices[0].text
        == llm.generate("Say: ", structure=structure, max_new_tokens=60, seed=4, temperature=1.0).text
    )


def test_a_form_among_others(client: openai.OpenAI) -> None:
    """A text that is held to a form leaves those beside it as they are."""
    free = client.chat.completions.create(model="tiny", messages=ASKED, seed=1, max_tokens=40)
    with client.chat.completions.create(
        model="tiny", messages=ASKED, seed=2, max_tokens=200, stream=True, response_format={"type": "json_object"}
    ) as stream:
        next(iter(stream))
        beside = client.chat.completions.create(model="tiny", messages=ASKED, seed=1, max_tokens=40)
    assert beside.choices[0].message.content == free.choices[0].message.content
