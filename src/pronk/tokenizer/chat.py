"""Chat templates: messages in, the one text out that the model was trained to answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pronk.errors import BadFile, BadRequest, Unsupported, short
from pronk.tokenizer import renderer
from pronk.tokenizer.base import Tokenizer
from pronk.tokenizer.files import read_whole

# As Meta's own code writes it: the system message lies inside the first question, and every answer is closed.
_LLAMA2 = """\
{%- set system = messages[0]['content'] if messages and messages[0]['role'] == 'system' else none -%}
{%- set turns = messages[1:] if system is not none else messages -%}
{%- for message in turns -%}
    {%- if message['role'] != ('user' if loop.index0 % 2 == 0 else 'assistant') -%}
        {{- raise_exception('Llama 2 takes a system message first if any, then user and assistant in turn') -}}
    {%- endif -%}
    {%- if message['role'] == 'assistant' -%}
        {{- ' ' ~ message['content'] | trim ~ ' ' ~ eos_token -}}
    {%- elif loop.first and system is not none -%}
        {{- bos_token ~ '[INST] <<SYS>>\\n' ~ system ~ '\\n<</SYS>>\\n\\n' ~ message['content'] | trim ~ ' [/INST]' -}}
    {%- else -%}
        {{- bos_token ~ '[INST] ' ~ message['content'] | trim ~ ' [/INST]' -}}
    {%- endif -%}
{%- endfor -%}
"""

_LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
    {{- '<|start_header_id|>' ~ message['role'] ~ '<|end_header_id|>\\n\\n' -}}
    {{- message['content'] | trim ~ '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# Stanford Alpaca's, of a question without an input: what an adapter brings that was trained through it. {bos} is the
# template's own word for the token that begins a text, where the tokenizer adds one.
ALPACA = """\
{bos}{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        {{- 'Below is an instruction that describes a task. ' -}}
        {{- 'Write a response that appropriately completes the request.\\n\\n' -}}
        {{- '### Instruction:\\n' ~ message['content'] ~ '\\n\\n### Response:' -}}
    {%- elif message['role'] == 'assistant' -%}
        {{- message['content'] ~ eos_token -}}
    {%- else -%}
        {{- raise_exception("Alpaca's template has no place for " ~ message['role']) -}}
    {%- endif -%}
{%- endfor -%}
"""

BUILTIN = {"llama2": _LLAMA2, "llama3": _LLAMA3}

# Llama 2 and Code Llama. A base model of Mistral's has as many, and takes the same form.
_LLAMA2_SIZES = (32000, 32016)


_MOST_CHARACTERS = 48 << 10  # published templates have less than 40 KB

# Whose content may be any JSON: templates for tools write it with tojson.
_TOOL_ROLES = ("tool", "ipython")


class ChatTemplate:
    """A Jinja template as Hugging Face's tokenizers carry them.

    `specials`: what templates know as bos_token, eos_token and so on. `name`: what errors call the template.
    """

    def __init__(self, source: str, specials: Mapping[str, str] | None = None, *, name: str = "chat template") -> None:
        """Raises BadFile where `source` is no template or too large a one."""
        self.source, self.name, self._specials = source, name, dict(specials or {})
        if len(source) > _MOST_CHARACTERS:
            raise BadFile(name, f"is longer than {_MOST_CHARACTERS} characters")
        self._ask()

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt for `messages`, to be encoded with special tokens honoured.

        Raises BadRequest where the template refuses the messages or fails on them, and where these or `variables` hold
        what JSON cannot; BadFile where it takes more than its time, memory or size.
        """
        for number, message in enumerate(messages):
            _check_message(number, message)
        given = {**self._specials, "tools": None, "documents": None, **variables}
        given |= {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        text: str = self._ask(given)["text"]
        return text

    def _ask(self, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
        answer = renderer.shared.ask(self.source, given)
        if "broken" in answer:
            line = answer.get("line")
            raise BadFile(self.name, answer["broken"], field=line and f"line {line}")
        if "refused" in answer:
            raise BadRequest(f"{self.name}: {answer['refused']}")
        return answer


def _check_message(number: int, message: Mapping[str, Any]) -> None:
    """Templates would write a missing content as nothing, and any other than text as Python shows it."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadRequest(f"message {number} must have a role that is text, not {short(role)}")
    if isinstance(content, str) or role in _TOOL_ROLES or (content is None and message.get("tool_calls")):
        return
    problem = f"must be text, not {short(content)}" if "content" in message else "is missing"
    raise BadRequest(f"the content of message {number} (of {short(role)}) {problem}")


def builtin(name: str, specials: Mapping[str, str] | None = None) -> ChatTemplate:
    """One of BUILTIN. Raises BadRequest for any other name."""
    if name not in BUILTIN:
        raise BadRequest(f"no built-in chat template is called {name!r}; there are {' and '.join(BUILTIN)}")
    return ChatTemplate(BUILTIN[name], specials, name=f"built-in chat template {name}")


def named(name: Path | str, specials: Mapping[str, str] | None = None) -> ChatTemplate:
    """A built-in one by its name, or that of a file. Raises BadRequest for a name of neither, and BadFile."""
    if str(name) in BUILTIN:
        return builtin(str(name), specials)
    path = Path(name)
    if not path.is_file():
        names = " or ".join(BUILTIN)
        raise BadRequest(f"no chat template at {path}: give a file with a Jinja template, or the name {names}")
    try:
        return ChatTemplate(read_whole(path).decode(), specials, name=str(path))
    except UnicodeDecodeError:
        raise BadFile(path, "not UTF-8") from None


def choose(tokenizer: Tokenizer, override: Path | str | None = None) -> ChatTemplate:
    """The template to use: `override` (a built-in's name or a file), else the tokenizer's own, else a built-in one.

    Raises as `named` does, and Unsupported where nothing tells the model's form.
    """
    specials = _specials(tokenizer)
    if override is not None:
        return named(override, specials)
    if tokenizer.chat_template is not None:
        return ChatTemplate(tokenizer.chat_template, specials, name="the model's chat template")
    if _is_one_token(tokenizer, "<|start_header_id|>") and _is_one_token(tokenizer, "<|eot_id|>"):
        return builtin("llama3", specials)
    if tokenizer.strips_first_space and tokenizer.vocab_size in _LLAMA2_SIZES and tokenizer.bos_id is not None:
        return builtin("llama2", specials)
    raise Unsupported(
        "this model carries no chat template, and nothing tells which one it was trained with; "
        f"give one with --chat-template FILE, or the name {' or '.join(BUILTIN)}"
    )


def _specials(tokenizer: Tokenizer) -> dict[str, str]:
    ids = {
        "bos_token": tokenizer.bos_id,
        "eos_token": tokenizer.eos_ids[0] if tokenizer.eos_ids else None,
        "unk_token": tokenizer.unk_id,
        "pad_token": tokenizer.pad_id,
    }
    return {name: tokenizer.token_text(token) for name, token in ids.items() if token is not None}


def _is_one_token(tokenizer: Tokenizer, spelling: str) -> bool:
    ids = tokenizer.encode(spelling, bos=False)
    return len(ids) == 1 and tokenizer.is_special(ids[0])
