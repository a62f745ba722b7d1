"""Stop strings against the obvious definition: cut the whole text at the earliest one."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from pronk.engine.stopping import StopStrings

# Two letters, so that stop strings overlap themselves and each other all the time.
letters = st.text("ab", max_size=12)


@given(pieces=st.lists(letters, max_size=8), stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_equals_cutting_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    ends = [text.find(stop) for stop in stops if stop in text]
    matcher, said = StopStrings(stops), ""
    for piece in pieces:
        said += matcher.feed(piece)
        assert text.startswith(said)
        assert not any(stop in said for stop in stops)
    said += matcher.flush()
    assert (matcher.found in stops) == bool(ends)
    if not ends:
        assert said == text
    else:  # which of two stops came first can hang on where the pieces end, as it does for any stream
        assert text.startswith(said)
        assert text[len(said) :].startswith(str(matcher.found))


@given(text=letters, stop=st.text("ab", min_size=1, max_size=4))
def test_letter_by_letter_finds_the_earliest_end(text: str, stop: str) -> None:
    matcher = StopStrings([stop])
    said = "".join(matcher.feed(letter) for letter in text) + matcher.flush()
    assert said == text.partition(stop)[0]


def test_passes_text_on_at_once_when_no_stop_can_begin_there() -> None:
    matcher = StopStrings(["\n\n"])
    assert matcher.feed("one") == "one"
    assert matcher.feed("\n") == ""
    assert matcher.feed("two") == "\ntwo"
    assert matcher.feed("\n\nthree") == ""
    assert matcher.feed("four") == ""
    assert matcher.found == "\n\n"


def test_long_stop_strings_cost_a_step_a_letter() -> None:
    """Each token looked at all beginnings of each stop string: 128 of 1,024 letters took seven times a token's time."""
    stops = ["a" * 1023 + "z", *("b" * n + "z" * 900 for n in range(1, 100))]
    matcher, steps = StopStrings(stops), 0
    for prefix in matcher._prefixes:
        really = prefix._longest

        def counted(length: int, letter: str, really: Callable[[int, str], int] = really) -> int:
            nonlocal steps
            steps += 1
            return really(length, letter)

        prefix._longest = counted  # type: ignore[method-assign]
    said = "".join(map(matcher.feed, "a" * 2000))
    assert steps == 2000 * len(stops)
    assert said == "a" * 977  # the rest may be a stop string's beginning
