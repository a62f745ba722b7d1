"""/openapi.json: what it says is so, of every path, field, answer and event; Schemathesis asks what it allows."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from served import Running, Script, slowed

from pronk.serve import app, openapi, page
from pronk.serve.shapes.messages import MessageCount

DOCUMENT = json.loads(msgspec.json.encode(openapi.document()))


def routes() -> set[tuple[str, str]]:
    """Paths and methods of the application, less files of the page, and what is refused by name."""
    made = app.application(app.Server(None, None, 1, None), None)  # type: ignore[arg-type]
    found = set()
    for route in made.routes:
        path = route.path.replace("{name:path}", "{name}")  # type: ignore[attr-defined]
        if path not in page.PATHS and route.endpoint._handler.__name__ not in ("absent", "kept_response"):  # type: ignore[attr-defined]
            found |= {(path, method.lower()) for method in route.endpoint._methods}  # type: ignore[attr-defined]
    return found


def test_every_route_is_in_it() -> None:
    assert {(path, method) for path, item in DOCUMENT["paths"].items() for method in item} == routes()


def test_it_is_openapi_3_1_and_every_schema_a_schema() -> None:
    assert DOCUMENT["openapi"] == "3.1.0"
    for name, schema in DOCUMENT["components"]["schemas"].items():
        jsonschema.Draft202012Validator.check_schema(schema)
        if name.endswith("Request"):
            assert all(field["description"] for field in schema["properties"].values()), name
    text = json.dumps(DOCUMENT)
    names = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
    assert names <= DOCUMENT["components"]["schemas"].keys()


def test_every_description_is_of_a_field() -> None:
    requests = {each.request for each in openapi.OPERATIONS if each.request}
    assert openapi.FIELDS.keys() | openapi._LOOKED.keys() == {
        name for kind in requests for name in kind.__struct_fields__
    }


def answered(server: Running, path: str, body: Any) -> tuple[int, str, bytes]:
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.headers["content-type"], answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["content-type"], error.read()


def events(body: bytes) -> list[Any]:
    parts = [part for part in body.decode().split("\n\n") if part and not part.startswith(":")]
    found = [part.split("data: ", 1)[1] for part in parts]
    return [json.loads(data) for data in found if data != "[DONE]"]


def operation(path: str) -> openapi.Operation:
    return next(each for each in openapi.OPERATIONS if each.path == path)


TALKS = [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2, "n": 2, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {"logprobs": 2, "echo": True, "stream_options": {"include_usage": True}}),
    ("/v1/responses", {"include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    ("/v1/messages", {"cache_control": {"type": "ephemeral"}}),
]


@pytest.mark.parametrize(("path", "more"), TALKS)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_and_events_are_as_described(
    server: Running, path: str, more: dict[str, Any], stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """msgspec refuses what a record does not have, and what has another type."""
    slowed(monkeypatch, 0.02)  # tokens that wait for the loop share an event
    told = operation(path)
    more = {name: value for name, value in more.items() if stream or name != "stream_options"}
    status, kind, body = answered(server, path, {**(told.example or {}), **more, "stream": stream})
    assert status == 200, body
    if not stream:
        msgspec.json.decode(body, type=told.answer)
        return
    assert kind.startswith("text/event-stream")
    assert len([msgspec.convert(event, told.event) for event in events(body)]) > 4


@pytest.mark.parametrize("path", [each.path for each in openapi.OPERATIONS if each.request and not each.event])
def test_what_its_examples_give_is_as_described(server: Running, path: str) -> None:
    told = operation(path)
    status, _, body = answered(server, path, told.example)
    assert status == 200, body
    msgspec.json.decode(body, type=told.answer)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/{name}", "/health"])
def test_what_is_read_is_as_described(server: Running, path: str) -> None:
    with urllib.request.urlopen(server.url + path.replace("{name}", "tiny")) as answer:
        msgspec.json.decode(answer.read(), type=operation(path).answer)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_as_described(caller: Running, script: Script, path: str, stream: bool) -> None:
    told, schema = operation(path), {"type": "object"}
    tool = {
        "/v1/chat/completions": {"type": "function", "function": {"name": "f", "parameters": schema}},
        "/v1/responses": {"type": "function", "name": "f", "parameters": schema},
        "/v1/messages": {"name": "f", "input_schema": schema},
    }[path]
    script.says('So: <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>')
    status, _, body = answered(caller, path, {**(told.example or {}), "tools": [tool], "stream": stream})
    assert status == 200, body
    found = events(body) if stream else [json.loads(body)]
    for each in found:
        msgspec.convert(each, told.event if stream else told.answer)
    assert '\\"x\\": 1' in json.dumps(found) or '"x": 1' in json.dumps(found)


def test_what_is_not_described_is_found() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field"):
        msgspec.convert({"input_tokens": 1, "more": 2}, MessageCount)


@pytest.mark.timeout(1800)  # of hundreds of requests, on a machine that may be busy with something else
@pytest.mark.slow
def test_schemathesis_finds_no_answer_that_is_not_described(server: Running, tmp_path: Path) -> None:
    """In hundreds of requests, right and wrong ones: no 5xx, no status, type, header, body or event that the document
    has not, and what it does not allow is refused."""
    pytest.importorskip("schemathesis")
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"]
    # What the document allows and a model refuses, it cannot say: a context is full, a template knows no such role.
    # POST without a body of JSON is refused before any path is looked at.
    left_out = "positive_data_acceptance,unsupported_method"
    how = ["--exclude-checks", left_out, "--max-examples", "8", "--seed", "1", "--generation-database", "none"]
    how += ["--request-timeout", "240"]
    ran = subprocess.run([*command, *how], cwd=tmp_path, capture_output=True, text=True, timeout=1700)
    assert ran.returncode == 0, ran.stdout[-5000:]
    asked, well = re.findall(r"(\d+) generated, (\d+) passed", ran.stdout)[0]
    assert int(asked) == int(well) > 500
