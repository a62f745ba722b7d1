"""Messages of a conversation: what is refused, content parts, and the oldest turns left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pronk.errors import BadRequest
from pronk.tokenizer.messages import Message, checked, conversations, longest_prompt, without_oldest

SYSTEM = {"role": "system", "content": "s" * 5}


def user(text: object) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def encode(messages: Sequence[Message]) -> list[int]:
    """A token a character, and one before each message."""
    return [ord(c) for m in messages for c in f"\0{m['content']}"]


def test_content_parts_are_lines_of_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two\n"}]
    assert checked([user(parts), answer("x")]) == [user("one\ntwo\n"), answer("x")]
    assert checked([user([])]) == [user("")]
    assert checked([user("one")]) == [user("one")]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "refusal"])
def test_other_parts_are_refused_by_name(kind: str) -> None:
    with pytest.raises(BadRequest, match=f"^message 1 has a part of type '{kind}'; pronk reads text alone$"):
        checked([SYSTEM, user([{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "x"}}])])


@pytest.mark.parametrize(
    "part", ["text", None, {}, {"text": "x"}, {"type": 3}, {"type": "text"}, {"type": "text", "text": 3},
             {"type": "text", "text": "x", "cache_control": {}}],
)  # fmt: skip
def test_what_is_no_part_is_refused(part: object) -> None:
    with pytest.raises(BadRequest, match=r"message 0 .*"):
        checked([user([part])])


@pytest.mark.parametrize("role", ["developer", "User", "", "bot"])
def test_unknown_roles_are_refused_by_name(role: str) -> None:
    with pytest.raises(BadRequest, match=f"message 1 has the role '{role}'; the roles are system, user, assistant"):
        checked([user("hi"), {"role": role, "content": "x"}])


def test_a_tool_may_answer_with_any_json() -> None:
    said = [user("hi"), {"role": "tool", "content": [{"type": "weather", "t": 3}]}]
    assert checked(said) == said


def test_several_conversations_and_one() -> None:
    one = [user("a")]
    assert conversations(one) == ([one], False)
    assert conversations([one, one]) == ([one, one], True)
    assert conversations([one]) == ([one], True)
    for neither in ([], "hi", [one, user("a")]):
        with pytest.raises(BadRequest, match="messages must be a list"):
            checked(conversations(neither)[0][0])  # type: ignore[arg-type]


def test_the_oldest_turns_go_whole_and_the_system_prompt_stays() -> None:
    turns = [[user(f"q{n}" * 4), answer(f"a{n}" * 6)] for n in range(9)]
    messages = [SYSTEM, *(m for turn in turns for m in turn), user("now?")]
    whole = len(encode(messages))
    assert without_oldest(messages, encode, whole) == (encode(messages), 0)
    ids, left_out = without_oldest(messages, encode, whole - 1)
    suffixes = [encode([SYSTEM, *(m for turn in turns[n:] for m in turn), user("now?")]) for n in range(10)]
    assert ids in suffixes[1:]
    assert left_out == whole - len(ids)
    ids, _ = without_oldest(messages, encode, 12)
    assert ids == encode([SYSTEM, user("now?")])


def test_the_last_turn_stays_however_long_it_is() -> None:
    calls = [user("w" * 50), answer("call"), {"role": "tool", "content": "t" * 50}]
    messages = [SYSTEM, user("old"), answer("old"), *calls]
    assert without_oldest(messages, encode, 20)[0] == encode([SYSTEM, *calls])
    assert without_oldest([SYSTEM, *calls], encode, 20) == (encode([SYSTEM, *calls]), 0)


def test_more_is_left_out_than_is_needed_so_that_the_beginning_stays_the_same() -> None:
    """What begins alike is cached: over many turns, only few of them may read the conversation anew."""
    messages, beginnings = [SYSTEM], []
    for n in range(60):
        messages += [user(f"question {n:2}")]
        ids, left_out = without_oldest(messages, encode, 400)
        assert len(ids) <= 400
        if left_out:
            assert len(ids) >= 200  # and no more than a step of it
            beginnings.append(left_out)
        messages += [answer(f"answer {n:2}")]
    assert len(beginnings) > 40
    assert len(set(beginnings)) < len(beginnings) / 4


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12), st.integers(1, 200), st.booleans())
def test_any_conversation(turns: list[tuple[int, int]], limit: int, has_system: bool) -> None:
    opening = [SYSTEM] * has_system
    messages = [*opening, *(m for q, a in turns for m in (user("q" * q), answer("a" * a))), user("now?")]
    ids, left_out = without_oldest(messages, encode, limit)
    kept = [encode([*opening, *messages[len(opening) + 2 * n :]]) for n in range(len(turns) + 1)]
    assert ids in kept
    assert left_out == len(kept[0]) - len(ids)
    assert len(ids) <= limit or ids == kept[-1]
    assert (left_out == 0) == (len(kept[0]) <= limit or len(turns) == 0)


def test_a_long_conversation_is_encoded_few_times() -> None:
    """It takes longest of all that is done before an answer begins."""
    turns = [m for n in range(200) for m in (user("q" * (n % 17)), answer("a" * (n % 29)))]
    messages, encoded = [SYSTEM, *turns, user("now?")], 0

    def counted(messages: Sequence[Message]) -> list[int]:
        nonlocal encoded
        encoded += 1
        return encode(messages)

    for limit in (4300, 3000, 1000, 100):
        encoded = 0
        assert len(without_oldest(messages, counted, limit)[0]) <= limit
        assert encoded <= 5, limit


def test_an_answer_has_room() -> None:
    assert longest_prompt(2048, 256) == 1792
    assert longest_prompt(2048, 1 << 30) == 1024
