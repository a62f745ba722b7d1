"""Calls in texts, however these are cut into pieces."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pronk.serve.calls import Call, CallFinder, _Brackets
from pronk.serve.failures import ApiError
from pronk.serve.tools import Toolset, toolset

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
SET = Toolset(tuple(TOOLS), ("f", "g"))
F, G = '{"name": "f", "arguments": {"x": "}]"}}', '{"name":"g","parameters":{"y":[1,{"z":"\\""}]}}'
CASES = {
    f"<tool_call>\n{F}\n</tool_call>": ("", [("f", {"x": "}]"})]),
    f"Let me see. <tool_call>{F}</tool_call>\n<tool_call>\n{G}\n</tool_call>": (
        "Let me see.",
        [("f", {"x": "}]"}), ("g", {"y": [1, {"z": '"'}]})],
    ),
    f"[{F}, {G}]": ("", [("f", {"x": "}]"}), ("g", {"y": [1, {"z": '"'}]})]),
    f"[TOOL_CALLS][{F}]": ("", [("f", {"x": "}]"})]),
    f"{F}; {G}": ("", [("f", {"x": "}]"}), ("g", {"y": [1, {"z": '"'}]})]),
    '{"name": "f"}': ("", [("f", {})]),
    '{"name": "f", "arguments": "{\\"x\\": 1}"}': ("", [("f", {"x": 1})]),
    '{"name": "h", "arguments": {}}': ('{"name": "h", "arguments": {}}', []),
    '{"answer": 42} is JSON': ('{"answer": 42} is JSON', []),
    "no call <tool> at all <tool_cal": ("no call <tool> at all <tool_cal", []),
    '<tool_call>{"name": "f", "argum': ('<tool_call>{"name": "f", "argum', []),
    "<tool_call>{not JSON}</tool_call>": ("<tool_call>{not JSON}</tool_call>", []),
    '{"name": "f", "arguments": {"x": NaN}}': ('{"name": "f", "arguments": {"x": NaN}}', []),
    '{"name": "f", "arguments": {"x": 1e999}}': ('{"name": "f", "arguments": {"x": 1e999}}', []),
    '{"name": "f", "arguments": {"x": "\\ud800"}}': ('{"name": "f", "arguments": {"x": "\\ud800"}}', []),
    "<tool_call>5</tool_call>": ("<tool_call>5</tool_call>", []),
    "{": ("{", []),
    "": ("", []),
}


def found(text: str, cuts: list[int], tools: Toolset = SET) -> tuple[str, list[tuple[str, object]]]:
    finder, parts = CallFinder(tools), []
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    for begin, end in pairwise(edges):
        parts += finder.feed(text[begin:end], last=False)
    parts += finder.feed("", last=True)
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, Call):
            name, so_far = calls.get(part.index, (part.name or "", ""))
            assert (part.name is None) == (part.index in calls) == (part.id is None)
            calls[part.index] = (name, so_far + part.arguments)
    texts = "".join(part for part in parts if isinstance(part, str))
    return texts, [(name, json.loads(arguments)) for name, arguments in calls.values()]


@pytest.mark.parametrize("text", CASES)
def test_calls_are_found_and_the_rest_stays_text(text: str) -> None:
    assert found(text, []) == CASES[text]
    assert found(text, list(range(len(text)))) == CASES[text]


@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(0, 200), max_size=8))
@example(f"[TOOL_CALLS][{F}]", [3, 48])  # [TO was taken for the beginning of a list
def test_wherever_the_text_is_cut(text: str, cuts: list[int]) -> None:
    assert found(text, cuts) == CASES[text]


@given(st.text(alphabet='{}[]"\\<tool_call>/ ,:;nf', max_size=60), st.lists(st.integers(0, 60), max_size=5))
def test_a_text_without_calls_stays_whole(text: str, cuts: list[int]) -> None:
    assert found(text, cuts) == (text, [])


def test_a_long_object_that_is_no_call_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of n tokens read again at each of them keeps all clients waiting for n * n."""
    seen = 0
    feed = _Brackets.feed

    def counted(self: _Brackets, text: str) -> int:
        nonlocal seen
        seen += len(text)
        return feed(self, text)

    monkeypatch.setattr(_Brackets, "feed", counted)
    text = '{"story": "' + "and then " * 500 + '"}'
    assert found(text, list(range(len(text)))) == (text, [])
    assert seen == len(text)


def test_one_call_where_one_is_wanted() -> None:
    assert found(f"{F}; {G}", [3], Toolset(tuple(TOOLS), ("f", "g"), parallel=False)) == ("", [("f", {"x": "}]"})])


@pytest.mark.parametrize(
    ("tools", "choice", "source"),
    [
        (TOOLS, "auto", "no place"),
        (TOOLS * 2, None, "tools"),
        (TOOLS, "sometimes", "tools"),
        ([], "required", "tools"),
        ([{"type": "function"}], None, "tools"),
        ([{"type": "function", "function": {"name": "a b"}}], None, "tools"),
        ([{"type": "retrieval"}], None, "tools"),
    ],
)
def test_tools_that_cannot_be_had(tools: list[dict[str, object]], choice: str, source: str) -> None:
    with pytest.raises(ApiError):
        toolset(tools, choice, None, source)


def test_none_is_none() -> None:
    assert toolset(TOOLS, "none", None, "tools") is None
