"""Chat templates: Hugging Face's rendering, to the character; built-in ones; which one is chosen."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kinds import gguf_source, small_bpe

from pronk import tokenizer as tokenizers
from pronk.errors import BadFile, BadRequest, Unsupported
from pronk.tokenizer import Tokenizer, chat
from pronk.tokenizer.chat import ChatTemplate, builtin, choose

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
SYSTEM = {"role": "system", "content": "Be brief.\nAlways."}
TALK = [
    {"role": "user", "content": "  Hi <there> & 'you' \"é😀\" "},
    {"role": "assistant", "content": "Hello!\n"},
    {"role": "user", "content": "{{ 7 * 7 }}"},
]

# Templates that use what published ones use, in their ways.
HEADERS = """{% set loop_messages = messages %}
{%- for message in loop_messages %}
    {% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
                     + message['content'] | trim + '<|eot_id|>' %}
    {% if loop.index0 == 0 %}
        {% set content = bos_token + content %}
    {% endif %}
    {{ content }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

TOOLS = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "Today: " + strftime_now("%Y") + "\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- tools | tojson }}
{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|' + message['role'] + '|>' + message['content'] | trim }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one at a time") }}{%- endif %}
        {{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
        {{- message.tool_calls[0].function.arguments | tojson }}{{- "}" }}
    {%- else %}
        {{- message.content if message.content is string else message.content | tojson }}
    {%- endif %}
{%- endfor %}"""

NAMESPACES = """{%- set ns = namespace(found=false, text='') -%}
{%- macro show(role, text='none') -%}[{{ role|upper }}]{{ text|replace('\n', ' ')|default('', true) }}{%- endmacro -%}
{%- for m in messages|rejectattr('role', 'equalto', 'system') -%}
{%- if m.role == 'user' and not ns.found -%}{%- set ns.found = true -%}{%- endif -%}
{%- set ns.text = ns.text ~ show(m.role, m.content) ~ loop.index -%}
{%- if loop.last %}{% set ns.text = ns.text ~ '!' %}{% endif -%}
{%- if loop.index > 50 %}{% break %}{% endif -%}
{%- endfor -%}
{{ ns.text }}|{{ ns.found }}|{{ messages|map(attribute='role')|join(',') }}|{{ messages|length }}
{{ (messages|last).content.split('7')[0].strip() }}
{%- for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor -%}
{% generation %}answer{% endgeneration %}
{{ ['b', 'a']|sort|first }}{{ 7 // 2 }}{{ 2 ** 3 }}{{ 'x' * 3 }}{{ '%s:%d' % ('a', 4) }}
{{ [1, 2][::-1] }}{{ {'a': [1, none, true]}|tojson }}"""


@pytest.fixture(scope="module")
def hugging_face(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from tokenizers import Tokenizer as Library
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Library(BPE()), **SPECIALS)


@pytest.mark.parametrize("source", [HEADERS, TOOLS, NAMESPACES], ids=["headers", "tools", "namespaces"])
@pytest.mark.parametrize("messages", [TALK, [SYSTEM, *TALK]], ids=["bare", "system"])
@pytest.mark.parametrize("prompt", [True, False])
def test_as_transformers_renders(source: str, messages: Any, prompt: bool, hugging_face: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "<b> é"}}]
    for extra in ({}, {"tools": tools}):
        expected = hugging_face.apply_chat_template(
            messages, chat_template=source, tokenize=False, add_generation_prompt=prompt, **extra
        )
        ours = ChatTemplate(source, SPECIALS).render(messages, add_generation_prompt=prompt, **extra)
        assert ours == expected


def test_tool_calls_as_transformers_renders(hugging_face: Any) -> None:
    call = {"function": {"name": "f", "arguments": {"x": [1, "é"], "y": None}}}
    messages = [*TALK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": {"r": 1}}]
    expected = hugging_face.apply_chat_template(messages, chat_template=TOOLS, tokenize=False)
    assert ChatTemplate(TOOLS, SPECIALS).render(messages, add_generation_prompt=False) == expected


def test_the_default_model_s_own(smollm2: Path, hugging_face: Any) -> None:
    from pronk import checkpoint

    source = checkpoint.open(smollm2).tokenizer
    assert source is not None
    tokenizer = tokenizers.load(source)
    for messages in (TALK, [SYSTEM, *TALK]):
        text = choose(tokenizer).render(messages)
        assert text == hugging_face.apply_chat_template(
            messages, chat_template=tokenizer.chat_template, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.encode(text).count(1) == 2 + len(messages) - (messages[0] is SYSTEM)
    assert choose(tokenizer).render([{"role": "user", "content": "Hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_llama2_as_meta_wrote_it(every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind["spm"]
    talk = [{**m, "content": m["content"].strip()} for m in TALK]
    text = choose(tokenizer).render([SYSTEM, *talk])
    assert text == (
        f"<s>[INST] <<SYS>>\nBe brief.\nAlways.\n<</SYS>>\n\n{talk[0]['content']} [/INST] Hello! </s>"
        "<s>[INST] {{ 7 * 7 }} [/INST]"
    )
    # Meta's code encodes each exchange by itself, with its own BOS and EOS around it.
    first = f"[INST] <<SYS>>\nBe brief.\nAlways.\n<</SYS>>\n\n{talk[0]['content']} [/INST] Hello! "
    expected = [
        1,
        *tokenizer.encode(first, bos=False),
        2,
        1,
        *tokenizer.encode("[INST] {{ 7 * 7 }} [/INST]", bos=False),
    ]
    assert tokenizer.encode(text) == expected


def test_llama3_as_meta_wrote_it(every_kind: dict[str, Tokenizer]) -> None:
    tokenizer = every_kind["tiktoken"]
    text = choose(tokenizer).render([SYSTEM, TALK[0]])
    ids = tokenizer.encode(text)
    assert ids.count(tokenizer.bos_id) == 1
    parts = []
    for role, content in (("system", "Be brief.\nAlways."), ("user", TALK[0]["content"].strip())):
        plain = [tokenizer.encode(t, bos=False, special=False) for t in (role, "\n\n" + content)]
        parts += [128006, *plain[0], 128007, *plain[1], 128009]
    assistant = tokenizer.encode("assistant", bos=False)
    assert ids == [128000, *parts, 128006, *assistant, 128007, *tokenizer.encode("\n\n", bos=False)]


def test_llama2_refuses_disorder() -> None:
    for messages in ([TALK[1]], [TALK[0], TALK[0]], [TALK[0], SYSTEM]):
        with pytest.raises(BadRequest, match="user and assistant in turn"):
            builtin("llama2", SPECIALS).render(messages)


def test_a_template_s_refusal_is_one_line() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('System role\n\nnot supported') }}{% endif %}"
    with pytest.raises(BadRequest) as refused:
        ChatTemplate(source).render([SYSTEM])
    assert str(refused.value) == "chat template: System role not supported"
    assert ChatTemplate(source).render(TALK) == ""


def test_who_wins(tmp_path: Path, every_kind: dict[str, Tokenizer]) -> None:
    own = tokenizers.load(gguf_source(replace(small_bpe(), chat_template="own")))
    file = tmp_path / "llama.jinja"
    file.write_text("file {{ bos_token }}")
    assert choose(own).render([]) == "own"
    assert choose(own, file).render([]) == choose(own, str(file)).render([]) == "file <|begin_of_text|>"
    assert choose(own, "llama3").source == chat.BUILTIN["llama3"]
    assert choose(every_kind["llama2c"]).source == chat.BUILTIN["llama2"]
    assert choose(every_kind["llama2c-llama3"]).source == chat.BUILTIN["llama3"]


def test_nothing_to_go_by(tmp_path: Path, every_kind: dict[str, Tokenizer]) -> None:
    with pytest.raises(Unsupported, match="--chat-template"):
        choose(every_kind["json-spm"])
    with pytest.raises(BadRequest, match="llama2 or llama3"):
        choose(every_kind["spm"], "lama3")
    with pytest.raises(BadRequest, match="'x'"):
        builtin("x")
    (tmp_path / "t").write_bytes(b"\xff")
    with pytest.raises(BadFile, match="UTF-8"):
        choose(every_kind["spm"], tmp_path / "t")
    with pytest.raises(BadFile, match="line 2"):
        ChatTemplate("a\n{% if %}")


def test_messages_are_not_changed_and_not_code() -> None:
    messages = [{"role": "user", "content": "{{ 1 }}{% raw %}"}]
    assert ChatTemplate("{{ messages[0].content }}").render(messages) == "{{ 1 }}{% raw %}"
    assert messages == [{"role": "user", "content": "{{ 1 }}{% raw %}"}]


def test_long_conversations_fit_the_budget() -> None:
    talk = [{"role": r, "content": "word " * 400} for _ in range(500) for r in ("user", "assistant")]
    for name in chat.BUILTIN:
        assert len(builtin(name, SPECIALS).render(talk)) > 2_000_000
    assert len(ChatTemplate(HEADERS, SPECIALS).render(talk)) > 2_000_000


def test_one_template_in_many_threads() -> None:
    template = builtin("llama3", SPECIALS)
    expected = template.render(TALK)
    results: list[str] = []
    threads = [threading.Thread(target=lambda: results.append(template.render(TALK))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 16


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "user"}, "content of message 1 .of 'user'. is missing"),
        ({"role": "user", "content": None}, "must be text, not None"),
        ({"role": "user", "content": 5}, "must be text, not 5"),
        ({"role": "user", "content": ["a"]}, "must be text"),
        ({"role": "assistant", "content": {"text": "a"}, "tool_calls": [1]}, "must be text"),
        ({"role": 5, "content": "a"}, "message 1 must have a role that is text, not 5"),
        ({"content": "a"}, "message 1 must have a role"),
    ],
)
def test_messages_of_the_wrong_form(message: dict[str, Any], problem: str) -> None:
    for name in chat.BUILTIN:
        with pytest.raises(BadRequest, match=problem):
            builtin(name, SPECIALS).render([TALK[0], message])
