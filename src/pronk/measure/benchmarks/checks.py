"""What the task files of this folder call: where their questions are, and which rule an answer has to keep.

lm-evaluation-harness imports this file by itself, for any model: it needs nothing of pronk.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def _questions(name: str) -> Any:
    datasets = import_module("datasets")
    packed = (Path(__file__).parent / f"{name}.jsonl.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    questions = [json.loads(line) for line in lines]
    keys = dict.fromkeys(key for question in questions for key in question)  # of the first alone, datasets would take
    return datasets.DatasetDict(
        {"test": datasets.Dataset.from_list([{key: question.get(key) for key in keys} for question in questions])}
    )


def last_word(**_: Any) -> Any:
    return _questions("last_word")


def endings(**_: Any) -> Any:
    return _questions("endings")


def instructions(**_: Any) -> Any:
    return _questions("instructions")


def process_instruction(question: Mapping[str, Any], answers: list[str]) -> dict[str, float]:
    return {"followed": float(follows(question, answers[0]))}


def follows(rule: Mapping[str, Any], answer: str) -> bool:
    """Whether `answer` keeps every part of the rule that is there and not null."""
    given = {name: value for name, value in rule.items() if name != "prompt" and value is not None}
    return all(_KEEPS[name](value, answer.strip()) for name, value in given.items())


def _words(answer: str) -> int:
    return len(answer.split())


def _has(words: list[str], answer: str) -> bool:
    return all(re.search(rf"\b{re.escape(word)}\b", answer, re.IGNORECASE) for word in words)


def _lines(answer: str) -> list[str]:
    return [line.strip() for line in answer.splitlines() if line.strip()]


def _has_keys(keys: list[str], answer: str) -> bool:
    try:
        found = json.loads(re.sub(r"\A```(?:json)?|```\Z", "", answer))
    except ValueError:
        return False
    return isinstance(found, dict) and sorted(found) == sorted(keys)


_KEEPS = {
    "pattern": lambda pattern, answer: re.fullmatch(pattern, answer) is not None,
    "most_words": lambda most, answer: 0 < _words(answer) <= most,
    "least_words": lambda least, answer: _words(answer) >= least,
    "lines": lambda count, answer: len(_lines(answer)) == count,
    "every_line": lambda pattern, answer: all(re.fullmatch(pattern, line) for line in _lines(answer)),
    "has": _has,
    "lacks": lambda words, answer: not any(_has([word], answer) for word in words),
    "json_keys": _has_keys,
}
