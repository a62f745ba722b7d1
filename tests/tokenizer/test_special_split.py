"""Special tokens are found as a regular expression of all of them, the longest first, would find them."""

from __future__ import annotations

import random
import re

from pronk.tokenizer.special_split import SpecialSplit


def test_as_an_alternation_splits() -> None:
    draw = random.Random(0)
    for _ in range(300):
        spellings = {"".join(draw.choices("<a>", k=draw.randint(1, 5))) for _ in range(draw.randint(1, 12))}
        alternation = "|".join(map(re.escape, sorted(spellings, key=len, reverse=True)))
        text = "".join(draw.choices("<a>b", k=60))
        expected = [(i % 2 == 1, part) for i, part in enumerate(re.split(f"({alternation})", text)) if part]
        assert list(SpecialSplit(spellings).split(text)) == expected


def test_none_to_find() -> None:
    assert list(SpecialSplit(()).split("<s>")) == [(False, "<s>")]
    assert list(SpecialSplit(("<s>",)).split("")) == []
