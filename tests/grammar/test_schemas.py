"""What is drawn under a schema follows it, as jsonschema judges it, or was cut short and says so."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schemas import SCHEMAS
from tiny import byte_tokenizer, in_memory, random_weights, tiny_config

import pronk
import pronk.tokenizer
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.generation import Generation
from pronk.llm import LLM

FORMATS = {  # jsonschema knows most of them only where more libraries are installed
    "date": r"\d{4}-\d\d-\d\d",
    "date-time": r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": r"\d{1,3}(\.\d{1,3}){3}",
    "email": r"[^@]+@[^@]+",
}
CHECKER = jsonschema.FormatChecker(formats=())
for name, pattern in FORMATS.items():
    CHECKER.checks(name)(lambda value, pattern=pattern: not isinstance(value, str) or re.fullmatch(pattern, value))


def problem(schema: dict[str, Any], text: str) -> str | None:
    """What jsonschema has against a text; None for nothing."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"not JSON: {error}"
    errors = jsonschema.Draft202012Validator(schema, format_checker=CHECKER).iter_errors(value)
    return next((error.message for error in errors), None)


def check(schema: dict[str, Any], found: Any) -> int:
    """How many ended by themselves; all of these must follow the schema."""
    generations: list[Generation] = found if isinstance(found, list) else [found]
    whole = [generation.text for generation in generations if generation.finish_reason == "stop"]
    assert all(generation.finish_reason in ("stop", "length") for generation in generations)
    assert {text: problem(schema, text) for text in whole if problem(schema, text)} == {}
    return len(whole)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Random weights over bytes: it has no idea of JSON, and draws what it may."""
    config = tiny_config(vocab_size=259, max_position_embeddings=512)
    checkpoint = in_memory(config, random_weights(config))
    file = byte_tokenizer(tmp_path_factory.mktemp("tiny") / "tokenizer.bin")
    tokenizer = pronk.tokenizer.load(pronk.tokenizer.find(file))
    with LLM("tiny", checkpoint, tokenizer, CpuBackend.from_checkpoint(checkpoint, threads=1)) as llm:
        yield llm


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_bytes_follow_a_schema(tiny: LLM, name: str) -> None:
    # Signs that close something are made likelier, so that texts come to an end.
    bias = {3 + ord(sign): 3.0 for sign in '"}],'}
    how: dict[str, Any] = {"temperature": 1.0, "logit_bias": bias, "max_new_tokens": 300}
    assert check(SCHEMAS[name], tiny.generate("x", schema=SCHEMAS[name], n=8, seed=1, **how))


@pytest.mark.parametrize("name", ["person", "tree", "unicode keys"])
def test_without_the_grammar_they_do_not(tiny: LLM, name: str) -> None:
    """The inverse."""
    found = tiny.generate("x", n=8, seed=1, temperature=1.0, max_new_tokens=100)
    assert isinstance(found, list)
    assert all(problem(SCHEMAS[name], generation.text) for generation in found)


def test_the_judge_is_strict() -> None:
    assert problem(SCHEMAS["person"], '{"name": "a", "age": 3}') is None
    for text in ('{"name": "a", "age": 300}', '{"name": "a"}', '{"name": "a", "age": 3'):
        assert problem(SCHEMAS["person"], text)
    for text in ('{"d": "2020-1-1", "t": "2020-01-01T00:00:00Z"}', '{"d": "2020-01-01", "t": "now"}'):
        assert problem(SCHEMAS["date"], text)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCHEMAS)
def test_a_thousand_texts_of_the_default_model(writer: LLM, name: str) -> None:
    prompt = f"JSON Schema:\n{json.dumps(SCHEMAS[name])}\n\nJSON that follows it:\n"
    # Where a text may go on for ever, one in 25 ended.
    bias = {writer.tokenizer.encode(text, bos=False)[0]: 3.0 for text in ("null", " null")}
    how: dict[str, Any] = {"temperature": 1.0, "logit_bias": bias, "max_new_tokens": 120}
    assert check(SCHEMAS[name], writer.generate(prompt, schema=SCHEMAS[name], n=34, seed=7, **how))


@pytest.fixture(scope="module")
def writer(smollm2: Path) -> Iterator[LLM]:
    with pronk.load(smollm2) as llm:
        yield llm
