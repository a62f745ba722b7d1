"""On a GPU: every path through a model gives the tokens of the CPU in float32, as far as a type tells them apart.

A token passes where the CPU, reading the same text in float32, finds it as likely as the likeliest but for what the
type's rounding may move logits by. In float32 that leaves nothing to choose, and texts are held to be the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import devices
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tiny import CONFIGS, in_memory, random_weights, tiny_config

from pronk import checkpoint as checkpoints
from pronk.checkpoint.tensors import Checkpoint
from pronk.cli import group
from pronk.engine.batch import Batch, Run
from pronk.formats import FORMATS
from pronk.formats.int8 import SCHEMES
from pronk.llm import LLM
from pronk.measure.verify import verify
from pronk.torch_engine import CODED, grouped
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.quantized import has_int_product

pytestmark = pytest.mark.gpu

# Of sizes that kernels are made for.
LARGER = {
    "heads of 64": {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 320,
    },
    "heads of 128": {
        "hidden_size": 512, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 128, "vocab_size": 320,
    },
}  # fmt: skip
SHAPES = {**{name: CONFIGS[name] for name in ("gqa", "mha", "mqa", "tied", "biases", "odd", "llama3")}, **LARGER}
FEW = ("gqa", "odd", *LARGER)
GROUPED = list(filter(grouped, CODED))
NEW, CONTEXT = 16, 256
LENGTHS = (1, 17, 70, 130)  # of prompts: some end amid a block of keys and values, some lie in several

# As of float32 against float64 in test_torch_model.py: 24 roundings of logits of 4, and ten times that.
ALLOWED = {name: 10 * 4 * epsilon * 24**0.5 for name, epsilon in
           (("f32", 2.0**-24), ("bf16", 2.0**-8), ("f16", 2.0**-11))}  # fmt: skip


@cache
def model(shape: str) -> Checkpoint:
    config = tiny_config(**{**SHAPES[shape], "max_position_embeddings": CONTEXT})
    return in_memory(config, random_weights(config))


def prompts(vocabulary: int) -> list[list[int]]:
    draw = np.random.default_rng(7)
    return [draw.integers(3, vocabulary, length).tolist() for length in LENGTHS]


def loaded(checkpoint: Checkpoint, device: str, **options: Any) -> LLM:
    return LLM("tiny", checkpoint, None, TorchBackend.from_checkpoint(checkpoint, device=device, **options))


def texts(llm: LLM, given: list[list[int]], **options: Any) -> list[list[int]]:
    found = llm.generate(given, max_new_tokens=NEW, ignore_eos=True, **options)
    return [one.tokens for one in (found if isinstance(found, list) else [found])]


def alone(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    return [text for one in given for text in texts(llm, [one])]


def together(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    return texts(llm, given)


def in_chunks(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    return texts(LLM("tiny", llm.checkpoint, None, llm.backend, max_batch_tokens=7), given)


def in_a_crowd(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    """Between strangers, so that batches have many sizes."""
    strangers = [[3 + n, *one[:n]] for n, one in enumerate(given * 4)]
    return texts(llm, [*strangers, *given])[len(strangers) :]


def without_a_cache(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    return texts(llm, given, cache=False)


def guessed_ahead(llm: LLM, given: list[list[int]]) -> list[list[int]]:
    return texts(llm, given, speculative="ngram")


WAYS: dict[str, Callable[[LLM, list[list[int]]], list[list[int]]]] = {
    "alone": alone,
    "together": together,
    "in chunks": in_chunks,
    "in a crowd": in_a_crowd,
    "without a cache": without_a_cache,
    "known before": together,
    "guessed ahead": guessed_ahead,
}  # in this order: a text that was written before is known


def hold_against(reference: LLM, given: list[list[int]], found: list[list[int]], allowed: float, way: str) -> None:
    """`reference` on the CPU; `allowed`: by how much each of two logits may be off."""
    for prompt, text in zip(given, found, strict=True):
        assert len(text) == NEW
        logits = reference.logits([*prompt, *text])[len(prompt) - 1 : -1]
        behind = logits.max(-1) - logits[np.arange(NEW), text]
        assert behind.max() <= 2 * allowed, f"{way}: token {behind.argmax()} of {len(prompt)} + {NEW}: {behind.max()}"


@cache
def reference(shape: str) -> tuple[LLM, list[list[int]], list[list[int]]]:
    llm = loaded(model(shape), "cpu", quantize="f32", attn="math")
    given = prompts(llm.config.vocab_size)
    return llm, given, alone(llm, given)


@pytest.mark.parametrize(
    ("shape", "attn"), [*((shape, "flash") for shape in SHAPES), ("gqa", "math"), ("heads of 64", "math")]
)
def test_in_float32_every_path_writes_what_the_cpu_writes(shape: str, attn: str) -> None:
    _, given, expected = reference(shape)
    llm = loaded(model(shape), devices.GPU, quantize="f32", attn=attn)
    for way, run in WAYS.items():
        assert run(llm, given) == expected, way


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("shape", FEW)
def test_in_sixteen_bits_every_path_writes_what_is_as_likely(shape: str, dtype: str) -> None:
    on_cpu, given, _ = reference(shape)
    llm = loaded(model(shape), devices.GPU, quantize=dtype)
    for way, run in WAYS.items():
        hold_against(on_cpu, given, run(llm, given), ALLOWED[dtype], way)


def cost_of(coded: LLM, floats: LLM, given: list[list[int]]) -> float:
    """How far off a scheme's logits are, on the CPU."""
    return max(float(np.abs(coded.logits(one) - floats.logits(one)).max()) for one in given)


@pytest.mark.parametrize(
    ("scheme", "compute"),
    [*((scheme, "bf16") for scheme in SCHEMES), *product(("llm-int8", "int8"), ("f32", "f16"))],
)
@pytest.mark.parametrize("shape", FEW[1:])
def test_in_eight_bits_every_path_writes_what_is_as_likely(shape: str, scheme: str, compute: str) -> None:
    """A code that floats decide moves logits by a rounding of 8 bits: they may be as wrong as 8 bits are."""
    on_cpu, given, _ = reference(shape)
    coded = loaded(model(shape), "cpu", quantize=scheme, compute_dtype="f32")
    llm = loaded(model(shape), devices.GPU, quantize=scheme, compute_dtype=compute)
    allowed = cost_of(coded, on_cpu, given) + ALLOWED[compute]
    for way, run in WAYS.items():
        hold_against(coded, given, run(llm, given), allowed, way)


@pytest.mark.parametrize("scheme", [scheme for scheme in SCHEMES if not FORMATS[scheme].shares_scales])
@pytest.mark.parametrize("shape", FEW)
def test_most_logits_of_eight_bits_are_the_cpu_s_but_for_rounding_of_floats(shape: str, scheme: str) -> None:
    """Of short texts: few have a code that floats decide."""
    vocabulary = model(shape).config.vocab_size
    runs = [Run(np.random.default_rng(n).integers(0, vocabulary, 6).tolist(), logits="all") for n in range(64)]
    logits = [
        TorchBackend.from_checkpoint(model(shape), device=device, quantize=scheme, compute_dtype="f32")
        .forward(Batch.of(runs), None)
        .reshape(len(runs), -1)
        for device in ("cpu", devices.GPU)
    ]
    off = np.abs(logits[0] - logits[1]).max(1)
    assert (off < 4 * ALLOWED["f32"]).mean() >= 0.5, off


@pytest.mark.parametrize("compute", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("quantize", GROUPED)
@pytest.mark.parametrize("shape", FEW)
def test_beside_codes_in_groups_every_path_writes_what_is_as_likely(shape: str, quantize: str, compute: str) -> None:
    _, given, _ = reference(shape)
    on_cpu = loaded(model(shape), "cpu", quantize=quantize, compute_dtype="f32")
    llm = loaded(model(shape), devices.GPU, quantize=quantize, compute_dtype=compute)
    for way, run in WAYS.items():
        hold_against(on_cpu, given, run(llm, given), ALLOWED[compute], way)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", FEW)
def test_beams_are_those_of_the_cpu(shape: str, dtype: str) -> None:
    on_cpu, given, _ = reference(shape)
    wanted: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "num_beams": 3, "num_return_sequences": 3}
    expected = on_cpu.generate(given, **wanted)
    found = loaded(model(shape), devices.GPU, quantize=dtype).generate(given, **wanted)
    for own, theirs in zip(found, expected, strict=True):
        assert own.score == pytest.approx(theirs.score, abs=2 * ALLOWED[dtype])
        assert dtype != "f32" or own.tokens == theirs.tokens


def test_products_of_bytes_are_made_by_the_card() -> None:
    """If not, they are made in floats, exactly and slowly."""
    assert has_int_product(torch.device(devices.GPU))


# -- verify ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", FEW)
def test_verify_finds_no_bug_in_floats(shape: str, dtype: str) -> None:
    found = verify(loaded(model(shape), devices.GPU, quantize=dtype))
    assert found["verdict"] in ("identical", "rounding"), found


@pytest.mark.parametrize("scheme", CODED)
@pytest.mark.parametrize("shape", FEW)
def test_verify_finds_no_bug_beside_codes(shape: str, scheme: str) -> None:
    """Beside f32 a single code is more than the noise of a tiny model."""
    found = verify(loaded(model(shape), devices.GPU, quantize=scheme, compute_dtype="bf16"))
    assert found["verdict"] in ("identical", "rounding"), found


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("shape", FEW)
def test_batch_invariant_passes_are_equal_to_the_bit(shape: str, dtype: str) -> None:
    llm = loaded(model(shape), devices.GPU, quantize=dtype, batch_invariant=True)
    assert verify(llm)["verdict"] == "identical"
    on_cpu, given, expected = reference(shape)
    found = {way: run(llm, given) for way, run in WAYS.items()}
    assert all(text == found["alone"] for text in found.values())
    hold_against(on_cpu, given, found["alone"], ALLOWED[dtype], "alone")
    assert dtype != "f32" or found["alone"] == expected


TYPES = ["f32", "bf16", "f16", *CODED]


@pytest.mark.parametrize("quantize", TYPES)
def test_verify_of_a_trained_model(data: Path, quantize: str) -> None:
    pronk_verify(data / "stories260K" / "stories260K.bin", quantize)


@pytest.mark.parametrize("quantize", TYPES)
def test_verify_of_the_default_model(smollm2: Path, quantize: str) -> None:
    pronk_verify(smollm2, quantize)


@pytest.mark.parametrize("quantize", ["f32", "bf16", "f16"])
def test_batch_invariant_verify_of_a_trained_model(data: Path, quantize: str) -> None:
    pronk_verify(data / "stories260K" / "stories260K.bin", quantize, "--batch-invariant", expected="identical")


def pronk_verify(path: Path, quantize: str, *more: str, expected: str = "rounding|identical") -> None:
    """In this process: each import of torch takes seconds. Beside f32 a single code is more than the noise."""
    options = ["--engine", "torch", "--device", devices.GPU, "--quantize", quantize, *more]
    options += ["--compute-dtype", "bf16"] if quantize in CODED else []
    done = CliRunner().invoke(group, ["verify", str(path), *options])
    assert done.exit_code == 0, done.output
    assert re.search(f"verdict: ({expected})", done.output), done.output


def test_stories_are_those_of_the_cpu(data: Path) -> None:
    stories = checkpoints.open(data / "stories260K" / "stories260K.bin")
    given = prompts(stories.config.vocab_size)
    expected = alone(loaded(stories, "cpu", quantize="f32"), given)
    llm = loaded(stories, devices.GPU, quantize="f32")
    for way, run in WAYS.items():
        assert run(llm, given) == expected, way
