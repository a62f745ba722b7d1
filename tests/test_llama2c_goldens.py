"""Text to the last character as llama2.c prints it: its model, its tokenizer, its random generator.

The transcripts are llama2.c's own; goldens/llama2c/README.md says how they were made.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_c import run_c

import pronk
from pronk.engine.generation import Generation
from pronk.llm import LLM

GOLDENS = Path(__file__).parent / "goldens" / "llama2c"
SAMPLED = sorted(path.stem for path in GOLDENS.glob("t*.txt"))


def load(data: Path, name: str = "stories260K.bin", **options) -> LLM:
    folder = data / "stories260K"
    return pronk.load(folder / name, tokenizer=folder / "tok512.bin", device="cpu", threads=1, **options)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def stories(data: Path, request: pytest.FixtureRequest) -> LLM:
    return load(data, engine=request.param)


def text(llm: LLM, prompt: str = "", **options) -> str:
    found = llm.generate(prompt, **options)
    assert isinstance(found, Generation)
    return prompt + found.text


def golden(name: str) -> str:
    return (GOLDENS / f"{name}.txt").read_text().removesuffix("\n")


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("options", [{"engine": "cpu"}, {"attn": "flash"}, {"attn": "math"}], ids=str)
def test_greedy(data: Path, options: dict[str, str], cache: bool) -> None:
    found = text(load(data, **options), max_new_tokens=200, cache=cache)
    assert found.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )
    assert found == golden("greedy-n200")


@pytest.mark.parametrize(("name", "prompt", "steps"), [("n200", "", 200), ("lily-n100", "One day, Lily met", 100)])
def test_an_oracle_says_what_the_program_said(data: Path, name: str, prompt: str, steps: int) -> None:
    """run_c.py, which other tests rely on where there is no transcript."""
    folder = data / "stories260K"
    said = run_c(folder / "stories260K.bin", folder / "tok512.bin", prompt, steps).decode()
    assert said == golden(f"greedy-{name}")


@pytest.mark.parametrize("name", SAMPLED)
def test_sampled(stories: LLM, name: str) -> None:
    match = re.fullmatch(r"t(?P<t>[\d.]+)-p(?P<p>[\d.]+)-s(?P<s>\d+)-n(?P<n>\d+)", name)
    assert match
    options = {"temperature": float(match["t"]), "top_p": float(match["p"]), "seed": int(match["s"])}
    assert text(stories, rng="xorshift", max_new_tokens=int(match["n"]), **options) == golden(name)


def test_a_text_ends_where_the_next_begins(stories: LLM) -> None:
    """run.c stops at BOS: with this seed at the 99th token."""
    found = stories.generate("", rng="xorshift", max_new_tokens=512, temperature=1.0, seed=38)
    assert isinstance(found, Generation)
    assert (len(found.tokens), found.finish_reason) == (98, "stop")


def test_another_generator_draws_another_text(stories: LLM) -> None:
    options = {"temperature": 1.0, "top_p": 1.0, "seed": 42, "max_new_tokens": 200}
    assert text(stories, rng="philox", **options) != golden("t1.0-p1.0-s42-n200")


def test_from_a_prompt(stories: LLM) -> None:
    prompt = "One day, Lily met"
    used = len(stories.tokenizer.encode(prompt)) - 1  # llama2.c counts positions, those of the prompt too
    assert text(stories, prompt, max_new_tokens=100 - used) == golden("greedy-lily-n100")


def test_int8_groups_read_as_the_same_model(data: Path) -> None:
    """runq also rounds activations to int8, so that its text must part from ours; the dequantized weights alone agree
    with it for 44 tokens."""
    llm = load(data, "stories260K_q80.bin")
    ours = llm.tokenizer.encode(text(llm, max_new_tokens=200))
    theirs = llm.tokenizer.encode(golden("q80-greedy-n200"))
    assert next(n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b) == 1 + 44
