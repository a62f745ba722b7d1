"""/openapi.json: what is asked where and what is answered, made of the records that requests and answers are held to.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from pronk import __version__
from pronk.serve import requests
from pronk.serve.failures import ANTHROPIC
from pronk.serve.shapes import chat, common, lists, looks, messages, responses

_REF = "#/components/schemas/{name}"
_HELLO = [{"role": "user", "content": "Hello"}]


@dataclass(frozen=True)
class Operation:
    """`answer` None: a text. `event`: what each event of a stream holds. `example`: a request that is answered."""

    path: str
    method: str
    summary: str
    answer: type[msgspec.Struct] | None
    request: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    example: Mapping[str, Any] | None = None
    done: bool = False  # whether "[DONE]" ends a stream
    open: bool = False  # to those without a key


OPERATIONS = (
    Operation(
        "/v1/chat/completions", "post", "An answer to a conversation, as OpenAI has it", chat.ChatCompletion,
        requests.ChatRequest, chat.ChatCompletionChunk, {"messages": _HELLO, "max_tokens": 4}, done=True,
    ),
    Operation(
        "/v1/completions", "post", "What a text goes on with, as OpenAI has it", chat.Completion,
        requests.CompletionRequest, chat.Completion, {"prompt": "Once upon a time", "max_tokens": 4}, done=True,
    ),
    Operation(
        "/v1/responses", "post", "An answer that is not kept, as OpenAI has it", responses.ResponseAnswer,
        requests.ResponsesRequest, responses.ResponseEvent, {"input": "Hello", "max_output_tokens": 4},
    ),
    Operation(
        "/v1/messages", "post", "An answer to a conversation, as Anthropic has it", messages.MessageAnswer,
        requests.MessagesRequest, messages.MessageEvent, {"messages": _HELLO, "max_tokens": 4},
    ),
    Operation(
        "/v1/messages/count_tokens", "post", "How many tokens a conversation has", messages.MessageCount,
        requests.CountRequest, None, {"messages": _HELLO},
    ),
    Operation(
        "/v1/look", "post", "What a model makes of each token of a text", looks.LookAnswer, requests.LookRequest, None,
        {"text": "Hello", "lens": {"token": 1}, "attention": {"token": 1, "layer": 0}},
    ),
    Operation("/v1/models", "get", "The models and adapters that requests can name", common.ModelList),
    Operation("/v1/models/{name}", "get", "One of them", common.ModelCard),
    Operation(
        "/tokenize", "post", "The tokens of a text or a conversation", common.Tokens, requests.TokenizeRequest, None,
        {"prompt": "Hello"},
    ),
    Operation(
        "/detokenize", "post", "The text of tokens", common.Text, requests.DetokenizeRequest, None, {"tokens": [1]},
    ),
    Operation("/health", "get", "Whether requests are taken", common.Health, open=True),
    Operation("/metrics", "get", "Gauges and counters for Prometheus", None),
    Operation("/openapi.json", "get", "This document", None),
)  # fmt: skip

# Of requests' lists: what they hold.
_ITEMS = {
    (requests.ChatRequest, "messages"): (lists.ChatMessage,),
    (requests.LookRequest, "messages"): (lists.ChatMessage,),
    (requests.TokenizeRequest, "messages"): (lists.ChatMessage,),
    (requests.MessagesRequest, "messages"): (lists.MessagesMessage,),
    (requests.CountRequest, "messages"): (lists.MessagesMessage,),
    (requests.ResponsesRequest, "input"): (
        lists.InputMessage,
        lists.FunctionCallItem,
        lists.FunctionOutputItem,
    ),
}
# Of a request: what each field means, whichever API it is of.
FIELDS = {
    "model": "A name that /v1/models has; by default the first.",
    "temperature": "How much chance there is; 0 takes the likeliest token. By default as the model's makers advise.",
    "top_p": "Draw from the likeliest tokens that together have this probability.",
    "top_k": "Draw from this many of the likeliest tokens; 0 for all.",
    "min_p": "Leave out tokens less likely than this share of the likeliest one's probability.",
    "repetition_penalty": "Divides the logits of tokens that were there before, prompt included.",
    "presence_penalty": "Taken from the logits of tokens that the answer has already, -2 to 2.",
    "frequency_penalty": "The same for each time that they were there.",
    "logit_bias": "Added to the logits of tokens, by their ids, -100 to 100.",
    "seed": "Gives the same text again; by default one is drawn, and told in the answer.",
    "rng": "Where the chance comes from: counter, xorshift (as llama2.c) or numpy.",
    "num_beams": "Search with this many beams instead of drawing.",
    "length_penalty": "Of beam search: above 0, long texts are preferred.",
    "early_stopping": 'Of beam search: true, false or "never".',
    "stop_token_ids": "Tokens that end the text.",
    "ignore_eos": "Go on where the model would end.",
    "speculative": "ngram guesses ahead from the text itself; the tokens stay the same.",
    "truncate": "left or right: a prompt that is too long is cut there rather than refused.",
    "stream": "Give the text in events, as it comes.",
    "stream_options": "Of a stream: include_usage puts the usage into a last event.",
    "n": "How many texts; with beams, how many of the best.",
    "stop": "Texts that end the answer, and are no part of it.",
    "response_format": "The form that the text has: text, json_object, or json_schema with a schema.",
    "return_tokens_as_token_ids": "Log-probabilities name tokens as token_id:N.",
    "answer_ids": "Tokens that the answer begins with; what comes behind them is given.",
    "guided_json": "A JSON schema that the text follows.",
    "guided_regex": "A regular expression that the text follows.",
    "guided_grammar": "A grammar that the text follows.",
    "guided_choice": "Texts of which the answer is one.",
    "structured_outputs": "vLLM's name of those four: json, regex, grammar or choice.",
    "json_schema": "llama.cpp's name of guided_json.",
    "regex": "The same as guided_regex.",
    "grammar": "llama.cpp's name of guided_grammar.",
    "messages": "The conversation so far, each message with a role and a content.",
    "max_tokens": "The most tokens of the answer.",
    "max_completion_tokens": "The most tokens of the answer.",
    "logprobs": "Give log-probabilities of the tokens: true in chats, how many alternatives in completions.",
    "top_logprobs": "How many alternatives of each token, 0 to 20.",
    "tools": "Functions that the model may call.",
    "tool_choice": "Whether it may, or must: auto, none, required, or a tool.",
    "parallel_tool_calls": "Whether it may call several at once.",
    "modalities": 'What the answer is: ["text"].',
    "chat_template_kwargs": "Variables for the chat template.",
    "prompt": "A text, token ids, or a list of either.",
    "echo": "Give the prompt as well; with logprobs, its tokens are scored.",
    "best_of": "As n.",
    "input": "A text, or items: messages, function_call, function_call_output.",
    "instructions": "What the system says, before all else.",
    "max_output_tokens": "The most tokens of the answer.",
    "include": "message.output_text.logprobs gives log-probabilities.",
    "text": "format: the form that the text has.",
    "truncation": "auto leaves out the oldest turns of a conversation that is too long; disabled refuses it.",
    "metadata": "Given back in the answer.",
    "store": "Changes nothing: no answer is kept.",
    "system": "What the system says.",
    "stop_sequences": "Texts that end the answer, and are no part of it.",
    "thinking": "Only disabled can be had.",
    "output_config": "format: the form that the text has.",
    "content": "A text, in llama.cpp's form.",
    "add_special_tokens": "Whether a token begins the text; by default where the model was trained so.",
    "add_special": "The same in llama.cpp's form, by default false.",
    "parse_special": "Whether the names of special tokens in the text are those tokens; by default so.",
    "with_pieces": "Give each token's text as well.",
    "tokens": "Token ids.",
}
# Of a look, whose words mean other things.
_LOOKED = {
    "text": "A text, or token ids; or give messages.",
    "answer": "What stands behind it: a text, or token ids.",
    "max_tokens": "Instead of an answer: go on for so many tokens, greedily.",
    "top": "How many alternatives of each token.",
    "look": "Instead of a text: the id of a look that was taken before.",
    "start": "The first token that is shown.",
    "stop": "The token before which it ends.",
    "attention": "token, layer and head: what that token looks at.",
    "lens": "token and k: what each layer would have said in its place.",
}
_PROBLEMS = {
    400: "What is asked for is wrong, or cannot be had; `param` names the field",
    401: "A key is wanted, or another one",
    403: "The host or the origin is not one that is allowed",
    404: "There is no such model",
    405: "Another method is wanted",
    408: "The body was not whole in time",
    413: "The body is too large",
    415: "The body's type must be application/json",
    429: "Too many requests are under way",
    500: "The server failed",
    503: "The server is about to end, is loading, or lacks memory",
}


@cache
def document() -> dict[str, Any]:
    kinds = {kind for each in OPERATIONS for kind in (each.request, each.answer, each.event) if kind}
    kinds |= {common.Error, common.MessagesError, *(kind for held in _ITEMS.values() for kind in held)}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template=_REF)
    for kind in ordered:
        if kind in {each.request for each in OPERATIONS}:
            _tell(kind, schemas[kind.__name__])
    paths: dict[str, Any] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method] = _operation(each)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "pronk",
            "version": __version__,
            "description": "Texts of LLaMA models. The same seed gives the same text, alone or in a crowd.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{"bearer": []}, {"key": []}, {}],  # the last: where the server has no keys
    }


def _tell(kind: type[msgspec.Struct], schema: dict[str, Any]) -> None:
    """Of a request: what its fields mean and hold, and that null is the default of all that have one."""
    for name, field in schema["properties"].items():
        if held := _ITEMS.get((kind, name)):
            lists = [field, *field.get("anyOf", ())]
            next(each for each in lists if each.get("type") == "array")["items"] = {"anyOf": [*map(_ref, held)]}
        if name not in schema.get("required", ()) and "null" not in str(field):
            schema["properties"][name] = {"anyOf": [{**field}, {"type": "null"}], "default": field.pop("default")}
        own = _LOOKED if kind is requests.LookRequest else {}
        schema["properties"][name]["description"] = own.get(name) or FIELDS[name]


def _operation(each: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {"summary": each.summary, "operationId": f"{each.method}{each.path}"}
    if each.open:
        found["security"] = []
    if "{name}" in each.path:
        name = {"type": "string", "minLength": 1}
        found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": name}]
    if each.request:
        body: dict[str, Any] = {"schema": _ref(each.request), "example": each.example}
        found["requestBody"] = {"required": True, "content": {"application/json": body}}
    found["responses"] = {"200": {"description": "Well", "content": _content(each)}}
    problem = _ref(common.MessagesError if each.path.startswith(ANTHROPIC) else common.Error)
    for status, said in _PROBLEMS.items():
        answer = {"description": said, "content": {"application/json": {"schema": problem}}}
        if status in (429, 503):
            seconds = {"description": "Seconds to wait", "schema": {"type": "integer"}}
            answer["headers"] = {"Retry-After": seconds}
        found["responses"][str(status)] = answer
    if each.path == "/health":
        ending = {"description": "It is loading, or about to end"}
        found["responses"]["503"] = {**ending, "content": {"application/json": {"schema": _ref(common.Health)}}}
    return found


def _content(each: Operation) -> dict[str, Any]:
    if each.answer is None:
        if each.path == "/metrics":
            return {"text/plain": {"schema": {"type": "string"}}}
        return {"application/json": {"schema": {"type": "object"}}}
    found: dict[str, Any] = {"application/json": {"schema": _ref(each.answer)}}
    if each.event:
        # Before OpenAPI 3.2 a stream's schema is that of each of its events.
        data: dict[str, Any] = {"contentMediaType": "application/json", "contentSchema": _ref(each.event)}
        said = "Events, each of whose data is JSON"
        if each.done:
            data = {"anyOf": [{"const": "[DONE]"}, data]}
            said += ", but for [DONE], the last"
        data["type"] = "string"
        event = {"type": "object", "required": ["data"], "properties": {"data": data, "event": {"type": "string"}}}
        found["text/event-stream"] = {"schema": {"description": said, **event}}
    return found


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}
