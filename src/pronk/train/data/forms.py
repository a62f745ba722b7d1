"""Forms: the ways in which people write the records that training knows, told apart by their keys, and made one.

The keys are those of TRL, of ShareGPT, of Stanford's Alpaca, and of the data sets that are called question and answer,
prompt and response, instruction and response; preferences also as in HH-RLHF (texts in which Human and Assistant
speak) and in Orca's pairs. What has other names is given these by `renamed`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple

from pronk.errors import BadRequest, short
from pronk.train.data import messages
from pronk.train.data.containers import BadRecord, listed

Kind = Literal["preference", "messages", "completion", "judged", "instruction", "text", "prompt"]


class Form(NamedTuple):
    kind: Kind
    needed: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join(["+".join(self.needed), *(f"(+{key})" for key in self.optional)])


COMPLETION = Form("completion", ("prompt", "completion"), ("tools",))
FORMS = (
    Form("preference", ("chosen", "rejected"), ("prompt", "tools", "margin")),
    Form("preference", ("question", "chosen", "rejected"), ("system", "margin")),
    Form("preference", ("conversations", "chosen", "rejected"), ("system", "tools", "margin")),
    Form("messages", ("messages",), ("tools",)),
    Form("messages", ("conversations",), ("system", "tools")),
    COMPLETION,
    Form("judged", ("prompt", "completion", "label"), ("tools",)),
    Form("instruction", ("instruction", "output"), ("input", "system")),
    Form("instruction", ("instruction", "response"), ("input", "system")),
    Form("instruction", ("question", "answer"), ("system",)),
    Form("instruction", ("prompt", "response"), ("system",)),
    Form("text", ("text",)),
)
PROMPT = Form("prompt", ("prompt",))  # with whatever else a reward asks for: any record that has one
KINDS: tuple[Kind, ...] = tuple(dict.fromkeys(form.kind for form in FORMS))
_KEYS = frozenset(key for form in FORMS for key in (*form.needed, *form.optional))
_ANSWERS = ("chosen", "rejected")
_MOST_MARGIN = 1e6


def ways(kinds: Iterable[Kind]) -> str:
    wanted = set(kinds)
    return "; ".join(str(form) for form in (*FORMS, PROMPT) if form.kind in wanted)


def fields(pairs: Iterable[str]) -> dict[str, str]:
    """Of "theirs=ours": what a key is to be called; "" for one to be left out. Raises BadRequest."""
    found = {}
    for pair in pairs:
        theirs, equals, ours = pair.partition("=")
        if not (theirs and equals) or (ours and ours not in _KEYS):
            known = ", ".join(sorted(_KEYS))
            raise BadRequest(f"fields must be KEY=NAME, the name one of {known}, or none; not {short(pair)}")
        if theirs in found:
            raise BadRequest(f"fields name {short(theirs)} more than once")
        found[theirs] = ours
    return found


def renamed(raw: object, names: Mapping[str, str]) -> object:
    """Raises BadRecord where two keys would become one."""
    if not (names and isinstance(raw, Mapping)):
        return raw
    found: dict[Any, Any] = {}
    for key, value in raw.items():
        if not (name := names.get(key, key)):
            continue
        if name in found:
            raise BadRecord(f"has {short(name)} twice when its fields are renamed; leave one out (--fields {name}=)")
        found[name] = value
    return found


def form_of(raw: Mapping[str, Any], kinds: Sequence[Kind] = KINDS) -> Form:
    """The one that fits; of another kind than `kinds` where none of these does. Raises BadRecord."""
    if PROMPT.kind in kinds and "prompt" in raw:
        return PROMPT
    fitting = [form for form in FORMS if set(form.needed) <= raw.keys()]
    fitting = [form for form in fitting if not any(set(form.needed) < set(other.needed) for other in fitting)]
    fitting = [form for form in fitting if all(raw[key] is not None for key in form.needed)] or fitting
    fitting = [form for form in fitting if form.kind in kinds] or fitting
    if any(form.kind == "instruction" for form in fitting):  # Alpaca as it is on the hub has all of it in "text", too
        fitting = [form for form in fitting if form.kind != "text"]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        both = " and ".join("+".join(form.needed) for form in fitting)
        raise BadRecord(f"could be {both}; say which by leaving a key out: --fields {fitting[0].needed[-1]}=")
    has = f"has the keys {short(sorted(map(str, raw)))}, which make no record"
    if meant := _meant(raw, kinds):
        instead = ", ".join(f"{ours} instead of {short(theirs)}" for theirs, ours in meant.items())
        names = ",".join(f"{theirs}={ours}" for theirs, ours in meant.items())
        raise BadRecord(f"{has}; did you mean {instead}? --fields {names} reads it so")
    if "prompt" in raw and "answer" in raw and "completion" in kinds:
        to_learn = "--fields answer=completion learns the answers"
        raise BadRecord(f"{has}; {to_learn}, and pronk grpo lets the model write its own and compares")
    if "prompt" in raw and "completion" in kinds:
        has += " (prompts alone are what pronk grpo learns from)"
    raise BadRecord(f"{has}; these do: {ways(kinds)} (--fields answer=output gives a key its name){listed(raw)}")


def _meant(raw: Mapping[str, Any], kinds: Sequence[Kind]) -> dict[str, str]:
    """Keys that are spelled nearly as those that make a record of them, and these; none where others are missing."""
    for form in FORMS:
        missing = [key for key in form.needed if key not in raw]
        found: dict[str, str] = {}
        for theirs in raw if form.kind in kinds and missing else ():
            close = get_close_matches(str(theirs).strip().lower(), missing, n=1, cutoff=0.75)
            if close and theirs not in _KEYS and close[0] not in found.values():
                found[str(theirs)] = close[0]
        if found and len(found) == len(missing):
            return found
    return {}


def values_of(raw: Mapping[str, Any], form: Form) -> dict[str, Any]:
    """Those of its kind, checked: {"messages", "first", "tools"}, {"prompt", "completion"}, either with {"label"};
    {"instruction", "input", "output", "system"}; {"prompt", "chosen", "rejected", "tools", "margin"} (texts or
    messages); {"text"}; of a prompt all that there is. `first` is the number of the message from which on answers are
    learned.

    Raises BadRecord."""
    if form is PROMPT:
        return _prompt(dict(raw))
    if form.kind == "judged":
        return values_of(raw, COMPLETION) | {"label": _label(raw["label"])}
    values = {key: raw[key] for key in (*form.needed, *form.optional) if raw.get(key) is not None}
    for key in form.needed:
        if key not in values:
            raise BadRecord(f"{key} is null")
    if "tools" in values:
        values["tools"] = _tools(values["tools"])
    if form.kind == "messages":
        (key,) = form.needed
        values["messages"] = _with_system(values, messages.checked(key, values.pop(key)))
        return _talk(values)
    if form.kind == "completion" and isinstance(values["prompt"], list):
        parts = [messages.checked(key, values.pop(key)) for key in form.needed]
        return _talk({**values, "messages": parts[0] + parts[1], "first": len(parts[0])})
    if form.kind == "preference":
        margin = {"margin": _margin(values.pop("margin"))} if "margin" in values else {}
        made = {"question": _orca, "conversations": _sharegpt}.get(form.needed[0])
        return _preference(made(values) if made else values) | margin
    for key in (key for key in values if key != "tools"):
        _check_text(key, values[key])
    if not values[form.needed[-1]].strip():
        raise BadRecord(f"has no answer: {form.needed[-1]} is empty")
    if form.kind == "instruction":
        names = dict(zip(form.needed, ("instruction", "output"), strict=True))
        return {names.get(key, key): value for key, value in values.items()}
    return values


def _prompt(values: dict[str, Any]) -> dict[str, Any]:
    if isinstance(values["prompt"], list):
        values["prompt"] = messages.checked("prompt", values["prompt"])
    else:
        _check_text("prompt", values["prompt"])
    if values.get("tools") is not None:
        values["tools"] = _tools(values["tools"])
    return values


def _check_text(key: str, value: object) -> None:
    if not isinstance(value, str):
        raise BadRecord(f"{key} must be text, not {short(value)}")


def _tools(value: object) -> list[Any]:
    """Columns of a table hold such lists as JSON."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise BadRecord(f"tools must be a list of functions, not {short(value)}")
    return found


def _label(value: object) -> bool:
    """Whether an answer is good: as JSON has it, or as tables of text do."""
    known = {"true": True, "false": False, "1": True, "0": False}
    found = known.get(str(value).lower()) if isinstance(value, bool | int | str) else None
    if found is None:
        raise BadRecord(f"label must be true or false, not {short(value)}")
    return found


def _margin(value: object) -> float:
    """By how much the chosen answer is the better one."""
    if type(value) not in (int, float) or not 0 <= value <= _MOST_MARGIN:  # type: ignore[operator]
        raise BadRecord(f"margin must be a number from 0 to {_MOST_MARGIN:g}, not {short(value)}")
    return float(value)  # type: ignore[arg-type]


def _talk(values: dict[str, Any]) -> dict[str, Any]:
    answers = [message for message in values["messages"][values.get("first", 0) :] if message["role"] == "assistant"]
    if not answers:
        raise BadRecord("has no answer: none of the messages is the assistant's")
    if not any(map(messages.learned, answers)):
        raise BadRecord("has no answer: all messages of the assistant have the weight 0")
    return values


def _orca(values: dict[str, Any]) -> dict[str, Any]:
    """{"system", "question", "chosen", "rejected"}: texts, of a conversation."""
    for key, value in values.items():
        _check_text(key, value)
    asked = {"system": values.get("system", ""), "user": values["question"]}
    found: dict[str, Any] = {"prompt": [{"role": role, "content": said} for role, said in asked.items() if said]}
    return found | {key: [{"role": "assistant", "content": values[key]}] for key in _ANSWERS}


def _sharegpt(values: dict[str, Any]) -> dict[str, Any]:
    """{"system", "conversations", "chosen", "rejected"}: the prompt's messages, and a message each."""
    said = _with_system(values, messages.checked("conversations", values.pop("conversations")))
    answers = {key: values[key] if isinstance(values[key], list) else [values[key]] for key in _ANSWERS}
    return {**values, "prompt": said, **answers}


def _with_system(values: dict[str, Any], said: list[messages.Message]) -> list[messages.Message]:
    """A system prompt that stands beside the conversation is its first message."""
    system = values.pop("system", None)
    if system is None:
        return said
    _check_text("system", system)
    if said[0]["role"] == "system":
        raise BadRecord("has a system prompt beside the conversation and one in it; leave one out (--fields system=)")
    return [{"role": "system", "content": system}, *said] if system else said


def _preference(values: dict[str, Any]) -> dict[str, Any]:
    if "prompt" not in values:
        told = {key: messages.of_text(values[key]) for key in _ANSWERS if isinstance(values[key], str)}
        values |= {key: talk for key, talk in told.items() if talk}
    for key in ("prompt", *_ANSWERS):
        if key in values and not isinstance(values[key], str):
            values[key] = messages.checked(key, values[key])
    values = _with_prompt(values)
    for key in _ANSWERS:
        if isinstance(values[key], str) is not isinstance(values["prompt"], str):
            raise BadRecord(f"prompt, chosen and rejected must be all texts or all messages; {key} is not as prompt is")
        if isinstance(values[key], str) and not values[key].strip():
            raise BadRecord(f"has no answer: {key} is empty")
        if not isinstance(values[key], str) and not any(map(messages.learned, values[key])):
            raise BadRecord(f"has no answer: none of the messages of {key} is the assistant's")
    if values["chosen"] == values["rejected"]:
        raise BadRecord("chosen and rejected are the same: nothing is preferred")
    return values


def _with_prompt(values: dict[str, Any]) -> dict[str, Any]:
    """Of two conversations the prompt is what both begin with, as in TRL; it may stand beside them as text, too."""
    conversations = [values[key] for key in _ANSWERS]
    if any(isinstance(value, str) for value in conversations):
        if "prompt" not in values:
            raise BadRecord("has no prompt, and chosen and rejected are not conversations that begin with one")
        return values
    chosen, rejected = conversations
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    begun = chosen[:shared]
    if "prompt" in values and values["prompt"] not in [message.get("content") for message in begun]:
        return values
    if chosen == rejected:
        raise BadRecord("chosen and rejected are the same: nothing is preferred")
    if shared is None:
        raise BadRecord(f"has no answer: {'chosen' if len(chosen) < len(rejected) else 'rejected'} is only a beginning")
    if not begun:
        raise BadRecord("has no prompt: chosen and rejected begin with different messages")
    return {**values, "prompt": begun, "chosen": chosen[shared:], "rejected": rejected[shared:]}
