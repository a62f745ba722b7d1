"""LLM.chat: several conversations, content parts, roles, and a context that is full; over a tiny chat model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model

import pronk
from pronk.engine.generation import Generation
from pronk.errors import BadRequest, ContextOverflow
from pronk.llm import LLM

HOW: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return pronk.load(str(save_tiny_chat_model(tmp_path_factory.mktemp("chat") / "tiny", 128)), engine="cpu")


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}


def one(result: Generation | list[Generation]) -> Generation:
    assert isinstance(result, Generation)
    return result


def several(result: Generation | list[Generation]) -> list[Generation]:
    assert isinstance(result, list)
    return result


def test_a_list_of_conversations_gives_a_list_of_answers(llm: LLM) -> None:
    conversations = [[user("hi")], [SYSTEM, user("hello there")], [user("a")]]
    alone = [one(llm.chat(each, **HOW)).tokens for each in conversations]
    assert [g.tokens for g in several(llm.chat(conversations, **HOW))] == alone
    assert [g.tokens for g in several(llm.chat(conversations[:1], **HOW))] == alone[:1]
    drawn = several(llm.chat(conversations, n=2, temperature=1.0, seed=3, **HOW))
    assert len(drawn) == 6
    assert [g.prompt_tokens for g in drawn[::2]] == [len(llm.chat_prompt(each)) for each in conversations]


def test_content_parts_are_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert llm.chat_prompt([user(parts)]) == llm.chat_prompt([user("one\ntwo")])
    assert one(llm.chat([user(parts)], **HOW)).tokens == one(llm.chat([user("one\ntwo")], **HOW)).tokens
    for call in (llm.chat, llm.stream_chat):
        with pytest.raises(BadRequest, match="part of type 'image_url'"):
            call([user([{"type": "image_url", "image_url": {"url": "x"}}])])  # type: ignore[operator]


def test_unknown_roles_are_refused(llm: LLM) -> None:
    for call in (llm.chat, llm.stream_chat, llm.chat_prompt):
        with pytest.raises(BadRequest, match="role 'developer'"):
            call([{"role": "developer", "content": "x"}, user("hi")])  # type: ignore[operator]


def test_a_stream_is_of_one_conversation(llm: LLM) -> None:
    with pytest.raises(BadRequest, match="stream_chat takes one conversation"):
        llm.stream_chat([[user("hi")], [user("hi")]])  # type: ignore[list-item]


def test_the_oldest_turns_are_dropped_on_request(llm: LLM) -> None:
    turns = [m for n in range(8) for m in (user(f"question {n}"), {"role": "assistant", "content": f"answer {n}"})]
    messages = [SYSTEM, *turns, user("and now?")]
    whole = len(llm.chat_prompt(messages))
    for options in ({}, {"overflow": "error"}):
        with pytest.raises(ContextOverflow, match=f"{whole} tokens and at most 127 fit"):
            llm.chat(messages, **HOW, **options)
    found = one(llm.chat(messages, **HOW, overflow="drop-oldest"))
    rests = [[SYSTEM, *turns[2 * n :], user("and now?")] for n in range(9)]
    lengths = [len(llm.chat_prompt(rest)) for rest in rests]
    kept = lengths.index(found.prompt_tokens)  # whole turns
    assert kept > 0
    assert found.truncated_tokens == whole - lengths[kept]
    assert found.tokens == one(llm.chat(rests[kept], **HOW)).tokens
    assert found.prompt_tokens + HOW["max_new_tokens"] <= llm.ctx_size
    chunks = list(llm.stream_chat(messages, **HOW, overflow="drop-oldest"))
    assert [c.token for c in chunks] == found.tokens
    assert {c.truncated_tokens for c in chunks} == {found.truncated_tokens}
    both = several(llm.chat([messages, [user("hi")]], **HOW, overflow="drop-oldest"))
    assert [g.truncated_tokens for g in both] == [found.truncated_tokens, 0]


def test_a_question_that_is_too_long_by_itself(llm: LLM) -> None:
    long = [SYSTEM, user("old"), {"role": "assistant", "content": "old"}, user("w" * 200)]
    with pytest.raises(ContextOverflow):
        llm.chat(long, **HOW, overflow="drop-oldest")
    found = one(llm.chat(long, **HOW, overflow="drop-oldest", truncate="left"))
    dropped = len(llm.chat_prompt(long)) - len(llm.chat_prompt([SYSTEM, long[-1]]))
    assert found.truncated_tokens == len(llm.chat_prompt(long)) - found.prompt_tokens > dropped > 0


@pytest.mark.parametrize("overflow", ["drop", "left", None, True, ["error"]])
def test_what_is_no_overflow_is_refused(llm: LLM, overflow: Any) -> None:
    with pytest.raises(BadRequest, match="overflow must be 'error' or 'drop-oldest'"):
        llm.chat([user("hi")], overflow=overflow)


def test_which_conversation_does_not_fit(llm: LLM) -> None:
    with pytest.raises(ContextOverflow, match="prompt 2 of 2"):
        llm.chat([[user("hi")], [user("w" * 200)]])


def test_the_makers_sampling_is_at_hand_and_greedy_the_default(tmp_path: Path) -> None:
    folder = save_tiny_chat_model(tmp_path / "tiny")
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.6, "top_p": 0.9}')
    llm = pronk.load(str(folder), engine="cpu")
    assert llm.checkpoint.generation.sampling == {"temperature": 0.6, "top_p": 0.9}
    drawn = one(llm.chat([user("hi")], **HOW, **llm.checkpoint.generation.sampling, seed=1))
    same = one(llm.chat([user("hi")], **HOW, temperature=0.6, top_p=0.9, seed=1))
    greedy = one(llm.chat([user("hi")], **HOW))
    assert drawn.tokens == same.tokens != greedy.tokens
    assert greedy.tokens == one(llm.generate(llm.chat_prompt([user("hi")]), **HOW)).tokens
