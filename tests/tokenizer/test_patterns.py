"""Issue 15, point 6: a pattern that can take hours is refused by name when the tokenizer is opened, and no other is."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from kinds import GPT2_WORDS, bpe_json, small_bpe, write_json
from mutations import soon

from pronk import tokenizer as tokenizers
from pronk.errors import BadRequest, Unsupported
from pronk.tokenizer import patterns, pre_tokenizers

_END = r"'s|'t|'re|'ve|'m|'ll|'d"
_U, _L = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_NO_HAN = r"&&[^\p{Han}]"
# As their authors published them, beside those of pre_tokenizers.py; whether they need short runs of digits and spaces.
PUBLISHED = {
    "GPT-2": (_END + r"| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", False),
    "GPT-4": (
        rf"'(?i:[sdmt]|ll|ve|re)|{_WORD}+\p{{L}}++|\p{{N}}{{1,3}}+| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        True,
    ),
    "GPT-4o": (
        rf"{_WORD}[{_U}]*[{_L}]+(?i:{_END})?|{_WORD}[{_U}]+[{_L}]*(?i:{_END})?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        False,
    ),
    "Kimi K2": (
        rf"[\p{{Han}}]+|{_WORD}[{_U}{_NO_HAN}]*[{_L}{_NO_HAN}]+(?i:{_END})?|{_WORD}[{_U}{_NO_HAN}]+[{_L}{_NO_HAN}]*"
        rf"(?i:{_END})?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
        False,
    ),
    "Qwen 3.5": (
        rf"(?i:{_END})|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",
        False,
    ),
    "SuperBPE": (r"(?=(\d{3})+(?!\d))", True),
    "Tiny Aya": (r"\d{1,3}(?=(?:\d{3})*\b)", True),
    "Bloom": (r" ?[^(\s|[.,!?…。，、।۔،])]+", False),
    "Chameleon": (r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", False),
    "Falcon": (r"[0-9][0-9][0-9]", False),
    "spaces": (r" {2,}", False),
}
SLOW = [r".*.*.*.*[\n][\n]|\S+|\s+", "(a+)+b", "(?:a*)*", "((a+)b?){2,}", "(a{1,})+", "x|(?:(?:a|b+)c)*", "(a|a)*b"]
SLOW += [r"[\s\S]*\x00", r"\p{L}*x", "a{0,50}a{0,50}b", "(?=.*x)", "(?!.*x)", "(?<=a*)b", "(?>a+)b", "(?:a+)?b", "a++b"]
SLOW += ["(?i:[ßs]+)Z", "(?i)[ßs]+Z", "a*x|b|a+", r"a*x|a+(?!\S)", "(a?){40}b", ".{0,100}.{0,100}b", "(?:[a]*x|a)+"]
UNKNOWN = [
    r"(a)\1",
    r"\X",
    r"(?<n>a)\g<n>",
    "(?~a)",
    "(?(1)a|b)",
    "(*FAIL)",
    "(?x)a b",
    "[]a]",
    "a)",
    "(a",
    "*a",
    "^*",
    r"\K",
]


def test_published_patterns_are_run() -> None:
    for name, (pattern, short_runs) in PUBLISHED.items():
        assert patterns.check(pattern) is short_runs, name
    for known in {pattern for steps in pre_tokenizers._PATTERNS.values() for pattern in steps}:
        patterns.check(known)
    for pattern in ("[(a+)]+", "(?:ab)+", "a*x|a+", "(a|aa)+"):
        patterns.check(pattern)


def test_slow_and_unknown_ones_are_not() -> None:
    for pattern in SLOW + UNKNOWN:
        with pytest.raises(patterns.Refused):
            patterns.check(pattern)
    for pattern in (
        "(" * 5000,
        "[" * 5000,
        "(?:" * 4000 + ")" * 4000,
        "a{99}" * 800,
        "a?" * 2000 + "b",
        "(a|b)?" * 600 + "c",
        "((a?){99}){99}b",
    ):
        with soon(1.0), pytest.raises(patterns.Refused):
            patterns.check(pattern)


def load(folder: Path, where: str, pattern: str) -> tokenizers.Tokenizer:
    raw = bpe_json(small_bpe(), GPT2_WORDS)
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    if where == "pre_tokenizer":
        byte_level = GPT2_WORDS | {"use_regex": False}
        raw |= {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}}
    else:
        raw |= {"normalizer": {"type": "Replace", "pattern": {"Regex": pattern}, "content": "_"}}
    return tokenizers.load(tokenizers.find(write_json(folder / "tokenizer.json", {"model": raw["model"], **raw})))


@pytest.mark.parametrize("where", ["pre_tokenizer", "normalizer"])
def test_the_pattern_of_the_issue_is_refused_by_name(where: str, tmp_path: Path) -> None:
    """It took 14 s for 2,280 characters."""
    with pytest.raises(Unsupported, match=r"the pattern '\.\*\.\*\.\*\.\*.* can take for ever"):
        load(tmp_path, where, SLOW[0])
    with soon(5.0):
        load(tmp_path, where, PUBLISHED["GPT-4o"][0]).encode(("word " * 10 + "\n") * 2000, bos=False)


def test_long_runs_of_digits_are_refused_where_they_would_take_long(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "pre_tokenizer", PUBLISHED["SuperBPE"][0])
    assert len(tokenizer.encode("1" * 10_000, bos=False)) > 3000
    tokenizer.encode("12 345 " * 20_000, bos=False)
    with soon(1.0), pytest.raises(BadRequest, match="a run of 100000 digits"):
        tokenizer.encode("1" * 100_000, bos=False)
    assert load(tmp_path, "pre_tokenizer", PUBLISHED["GPT-4o"][0]).encode(" " * 100_000, bos=False)


_TIMED = """
import sys, json
from time import process_time
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
for pattern, texts in json.load(sys.stdin):
    print(json.dumps(pattern), flush=True)
    try:
        split = Split(Regex(pattern), "isolated")
    except Exception:
        continue  # the library refuses it as well
    for text in texts:
        begun = process_time()
        split.pre_tokenize_str(text)
        assert process_time() - begun < 5, text[:20]
"""


def random_pattern(draw: random.Random, depth: int = 0) -> str:
    atom = lambda: draw.choice(["a", "b", ".", r"\s", r"\d", r"\p{L}", r"[^\s\d]", "[ab]", r"\S", "x", r"\p{N}", " "])  # noqa: E731

    def item() -> str:
        kind = draw.random()
        inner = (
            atom()
            if kind < 0.75 or depth > 2
            else f"({draw.choice(['?:', '?:', '', '?>'])}{random_pattern(draw, depth + 1)})"
        )
        if kind > 0.95 and depth <= 2:
            return f"({draw.choice(['?=', '?!'])}{random_pattern(draw, depth + 1)})"
        return inner + draw.choice(["", "", "?", "*", "+", "+", "*?", "++", "{1,3}", "{2,}", "{3}"])

    return "|".join("".join(item() for _ in range(draw.randint(1, 3))) for _ in range(draw.choice([1, 2, 2, 3])))


def test_whatever_is_accepted_ends_soon() -> None:
    """Random patterns on runs of 20,000 characters, in a process that is killed for taking long."""
    draw, size = random.Random(15), 20_000
    texts = ["a" * size, "ab" * (size // 2), " " * size, "1" * size, "a1 " * (size // 3), "ax" + "a" * size + "y"]
    texts += [" " * 9_999, "1" * 9_999]
    accepted, count = [pattern for pattern, _ in PUBLISHED.values()], 0
    while len(accepted) < 80:
        count += 1
        pattern = random_pattern(draw)
        with suppress(patterns.Refused):
            patterns.check(pattern)
            accepted.append(pattern)
    assert count > 90
    work = [
        (pattern, [text for text in texts if not (patterns.check(pattern) and patterns.costly_runs(text))])
        for pattern in accepted
    ]
    command = [sys.executable, "-c", _TIMED]
    try:
        done = subprocess.run(command, input=json.dumps(work), capture_output=True, text=True, timeout=280)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"takes too long: {(error.stdout or b'').splitlines()[-1:]}")
    assert done.returncode == 0, (done.stdout.splitlines()[-1], done.stderr[-300:])
