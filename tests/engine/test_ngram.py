"""Drafts from a sequence's own past, and when they stop."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from pronk.engine.ngram import MAX_DRAFT, Drafter


def longest_match(tokens: list[int]) -> tuple[int, int]:
    """The plain statement of what a draft follows: (length of the match, where its continuation is)."""
    found = (0, -1)
    for end in range(2, len(tokens)):
        length = 0
        while length < min(8, end) and tokens[end - length - 1] == tokens[len(tokens) - length - 1]:
            length += 1
        found = max(found, (length, end))
    return found


@given(st.lists(st.integers(0, 3), max_size=30))
def test_the_draft_is_what_followed_the_longest_and_latest_match(tokens: list[int]) -> None:
    length, at = longest_match(tokens)
    draft = Drafter().propose(tokens, 4)
    if length < 2:
        assert draft == []
        return
    continued = [*tokens]
    for place in range(at, at + 4):
        continued.append(continued[place])
    assert draft == continued[len(tokens) :]


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_an_index_kept_up_to_date_finds_what_a_new_one_finds(tokens: list[int], steps: list[int]) -> None:
    drafter, length = Drafter(), 0
    for step in steps:
        length += step
        assert drafter.propose(tokens[:length], 4) == Drafter().propose(tokens[:length], 4)


def test_a_loop_is_continued_beyond_what_is_there() -> None:
    assert Drafter().propose([9, 1, 2, 1, 2], 4) == [1, 2, 1, 2]


def test_drafts_grow_while_they_are_right_and_shrink_to_what_was() -> None:
    drafter, tokens = Drafter(), [1, 2] * 50
    lengths = []
    for accepted in (4, 8, 3, 4, 0, 1, 2):
        draft = drafter.propose(tokens, 100)
        lengths.append(len(draft))
        drafter.observe(len(draft), accepted, len(tokens))
    assert lengths == [4, MAX_DRAFT, MAX_DRAFT, 4, MAX_DRAFT, 1, 2]
    assert Drafter().propose(tokens, 3) == [1, 2, 1]
    assert Drafter().propose(tokens, 0) == []


def test_drafts_that_are_always_wrong_all_but_stop() -> None:
    drafter, tokens = Drafter(), [1, 2]
    drafted = 0
    for _ in range(5000):
        tokens.append(random.Random(len(tokens)).randrange(3))
        if draft := drafter.propose(tokens, 100):
            drafted += len(draft)
            drafter.observe(len(draft), 0, len(tokens))
    assert 10 < drafted < 5000 / 20


def test_after_a_pause_it_tries_again_and_goes_on_if_it_pays() -> None:
    drafter, tokens, passes = Drafter(), [1, 2] * 3, []
    for step in range(400):
        draft = drafter.propose(tokens, 100)
        right = step >= 100
        drafter.observe(len(draft), len(draft) if right else 0, len(tokens)) if draft else None
        passes.append(len(draft))
        tokens += [1, 2]
    assert 0 in passes[:100]
    assert passes[-100:] == [MAX_DRAFT] * 100
