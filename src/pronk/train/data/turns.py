"""Turns: where in a rendered conversation each answer stands.

Templates trim, reorder, put default prompts in, and write a message otherwise when it is the last. So nothing is
concluded from how long a shorter conversation's text is: a message is found by what changes in the whole text when it
says something else, and around it the prompt before it and the end behind it are looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pronk.errors import BadRequest, short
from pronk.tokenizer.chat import ChatTemplate
from pronk.train.data.containers import BadRecord

Message = Mapping[str, Any]

_PRIVATE = range(0xE000, 0xF900)  # characters that no text has: one of them stands for a message
_OPENING = 64  # characters of an answer that a prompt may have begun, as with "<think>\n"


@dataclass
class Rendered:
    """A conversation as text. `variables` are the template's: tools."""

    template: ChatTemplate
    messages: Sequence[Message]
    variables: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.text = self._render(self.messages)
        self._mark = next(chr(code) for code in _PRIVATE if chr(code) not in self.text)

    def answer(self, number: int) -> tuple[int, int]:
        """From where generation would have begun to where the template's words behind message `number` end.

        Raises BadRecord where the template leaves nothing of it.
        """
        said, end = self.place(number)
        if said == end:
            raise BadRecord(f"the chat template leaves nothing of message {number}, the assistant's, to be learned")
        before = min(said, self.place(number - 1)[1]) if number else 0
        alone = self._render([*self.messages[:number], self._marked(number)]).rpartition(self._mark)[2]
        return self._begin(number, before, said, end), end + _shared(alone, self.text[end:])

    def check(self, number: int) -> None:
        """Raises BadRecord where the template leaves nothing of a message that says something."""
        content = self.messages[number].get("content")
        if content and not (isinstance(content, str) and (not content.strip() or content.strip() in self.text)):
            begin, end = self.place(number)
            if begin == end:
                who = self.messages[number]["role"]
                raise BadRecord(f"the chat template leaves nothing of message {number}, of {short(who)}")

    def unread(self) -> Iterator[str]:
        """What the template does not write: of variables, and of the messages' keys."""
        for name in self.variables:
            fewer = {key: value for key, value in self.variables.items() if key != name}
            if self.template.render(self.messages, add_generation_prompt=False, **fewer) == self.text:
                yield name
        for name in sorted({key for message in self.messages for key in message} - {"role", "content"}):
            without = [{key: value for key, value in one.items() if key != name} for one in self.messages]
            with suppress(BadRequest):  # it is missed
                if self._render(without) == self.text:
                    yield f"{name} of messages"

    def place(self, number: int) -> tuple[int, int]:
        """From where to where the text is another if the message says something else."""
        before, behind = self.messages[:number], self.messages[number + 1 :]
        try:
            other = self._render([*before, self._marked(number), *behind])
        except BadRequest:  # its calls of tools may be answered by the next
            other = self._render([*before, {**self.messages[number], "content": self._mark}, *behind])
        begin = _shared(self.text, other)
        return begin, max(begin, len(self.text) - _shared(self.text[::-1], other[::-1]))

    def _begin(self, number: int, before: int, said: int, end: int) -> int:
        """The place, from `before` on, up to which the text reads most as the prompt does at its end.

        A prompt may open what is said ("<think>"); one that reads like none of the text leaves `said`.
        """
        prompt, best, most = self._prompt(number), said, 0
        for at in range(min(end, said + _OPENING), before - 1, -1):
            if at and prompt and self.text[at - 1] == prompt[-1]:
                alike = _shared(self.text[max(0, at - len(prompt)) : at][::-1], prompt[::-1])
                if alike > max(most, at - said):
                    best, most = at, alike
        return best

    def _marked(self, number: int) -> Message:
        return {"role": self.messages[number]["role"], "content": self._mark}

    def _prompt(self, number: int) -> str:
        """What the model would be given to answer. Before it comes a question, if only a made-up one: what templates
        write of no messages is their own affair."""
        if number:
            try:
                return self._render(self.messages[:number], prompt=True)
            except BadRequest:
                pass
        try:
            return self._render([*self.messages[:number], {"role": "user", "content": self._mark}], prompt=True)
        except BadRequest:
            return ""

    def _render(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return self.template.render(messages, add_generation_prompt=prompt, **self.variables)


def _shared(a: str, b: str) -> int:
    """How many characters the beginnings of two texts share."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
