"""Messages of a conversation: what callers hand over, checked; and less its oldest turns, where it is too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args

from pronk.errors import BadRequest, short

Message = Mapping[str, Any]
Overflow = Literal["error", "drop-oldest"]

ROLES = ("system", "user", "assistant", "tool", "ipython")  # ipython: Llama 3.1's word for tool
_WANTED = 'messages must be a list of {"role": "system" | "user" | "assistant", "content": text}'


def checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """`messages` with known roles, and texts for lists of content parts. What a content may be besides, ChatTemplate
    says. Raises BadRequest.
    """
    if not _is_list(messages) or not messages or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise BadRequest(_WANTED)
    return [_checked(number, message) for number, message in enumerate(messages)]


def conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> tuple[list[Sequence[Message]], bool]:
    """The conversations, and whether they came as a list of several."""
    if _is_list(given) and given and all(_is_list(one) for one in given):
        return list(given), True  # type: ignore[arg-type]
    return [given], False  # type: ignore[list-item]


def is_one(given: object) -> bool:
    """Whether it is messages, rather than a text or token ids."""
    return _is_list(given) and bool(given) and isinstance(given[0], Mapping)  # type: ignore[index]


def check_overflow(overflow: Overflow) -> None:
    if overflow not in get_args(Overflow):
        raise BadRequest(f"overflow must be {' or '.join(map(repr, get_args(Overflow)))}, not {short(overflow)}")


def longest_prompt(ctx_size: int, max_new_tokens: int) -> int:
    """How many tokens a prompt that is cut may have: an answer gets what it may want, at most half of the context."""
    return max(ctx_size - max_new_tokens, ctx_size // 2)


def without_oldest(
    messages: Sequence[Message], encode: Callable[[Sequence[Message]], list[int]], limit: int
) -> tuple[list[int], int]:
    """The token ids of `messages` less as many of the oldest turns as it takes to have at most `limit` tokens, and how
    many tokens went. What the system says first stays, and so does the last turn, however long it is.

    What goes, goes in steps of a quarter of `limit`: the next questions then find the same beginning, which is cached.
    """
    whole = encode(messages)
    opening, starts = _turns(messages)
    if len(whole) <= limit or len(starts) < 2:
        return whole, 0

    @cache
    def rest(dropped: int) -> list[int]:
        return encode([*messages[:opening], *messages[starts[dropped] :]])

    characters = [sum(len(str(m.get("content"))) for m in messages[start:]) for start in starts]

    def fewest(most: int) -> int:
        """How many turns have to go; as many as there are, where no number of them is enough. Looked for around the
        place where it is by characters: to encode a long conversation takes a while.
        """
        too_few, enough, stride = 0, len(starts), 1
        at = sum(len(whole) * each > most * characters[0] for each in characters)
        while enough - too_few > 1:
            at = min(max(at, too_few + 1), enough - 1)
            if len(rest(at)) <= most:
                enough, at = at, at - stride
            else:
                too_few, at = at, at + stride
            stride *= 2
        return enough

    step = max(1, limit // 4)
    steps = -(-(len(whole) - limit) // step)
    dropped = fewest(len(whole) - steps * step)
    if dropped == len(starts):  # one long turn leaves no room for more than is needed
        dropped = min(fewest(limit), len(starts) - 1)
    return rest(dropped), len(whole) - len(rest(dropped))


def _turns(messages: Sequence[Message]) -> tuple[int, list[int]]:
    """How many messages of the system come first, and where each turn begins: a question and all that follows it."""
    opening = 0
    while opening < len(messages) and messages[opening]["role"] == "system":
        opening += 1
    later = range(opening, len(messages))
    return opening, [n for n in later if n == opening or messages[n]["role"] == "user"]


def _checked(number: int, message: Message) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    if isinstance(role, str) and role not in ROLES:
        raise BadRequest(f"message {number} has the role {short(role)}; the roles are {', '.join(ROLES)}")
    if isinstance(content, list | tuple) and role not in ROLES[3:]:  # a tool's may be any JSON
        return {**message, "content": _joined(number, content)}
    return dict(message)


def _joined(number: int, parts: Sequence[Any]) -> str:
    """OpenAI's content parts as one text, a line for each, as other engines have it."""
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str):
            wanted = 'a text or a list of {"type": "text", "text": ...}'
            raise BadRequest(f"the content of message {number} must be {wanted}; it holds {short(part)}")
        if kind != "text":
            raise BadRequest(f"message {number} has a part of type {short(kind)}; pronk reads text alone")
        if part.keys() != {"type", "text"} or not isinstance(part["text"], str):
            raise BadRequest(
                f'a text part of message {number} must be {{"type": "text", "text": ...}}, not {short(part)}'
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)
