"""Quantized folders that lie, at random and in bulk: one error of pronk's own each, fast and without memory."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import modestly, survives
from tiny import in_memory, random_weights, tiny_config

from pronk import checkpoint
from pronk.checkpoint.readers import quantization
from pronk.checkpoint.writers.int8 import quantization_config
from pronk.checkpoint.writers.write import save
from pronk.errors import BadFile, PronkError
from pronk.formats import FORMATS

CONFIG = tiny_config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4,
)  # fmt: skip
WEIGHTS = random_weights(CONFIG)
METHODS = ["int8", "llm-int8"]
EXAMPLES = 150
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    | st.sampled_from(["re:(a|a)*$", "Linear", "int-quantized", "channel", 8, 8.0, 1 << 63, 1e308]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@pytest.fixture(params=METHODS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(in_memory(CONFIG, WEIGHTS), tmp_path / "m", to="safetensors", dtype=request.param)


def outcome(path: Path) -> str:
    """What comes of opening and reading everything: "read", or the kind of pronk's error."""
    try:
        for tensor in checkpoint.open(path).tensors.values():
            values = tensor.read()
            assert values.shape == tensor.shape
            if tensor.dtype in ("INT8", "LLM_INT8"):
                assert values.dtype == np.float32
                assert np.isfinite(values).all()
                assert tensor.read_blocks is not None
                assert tensor.read_blocks().shape == (tensor.shape[0], 4 + tensor.shape[1])
    except PronkError as error:
        message = str(error).encode()
        assert b"\n" not in message
        assert len(message) < 700
        return type(error).__name__
    return "read"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every object and list in it, with each of its keys and numbers."""
    pairs = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def test_any_json_anywhere_in_the_quantization_config(folder: Path) -> None:
    good = json.loads((folder / "config.json").read_text())
    count = len(list(places(good["quantization_config"])))
    outcomes: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, count - 1), st.sampled_from(["replace", "delete", "add"]), st.text(max_size=8), JSON)
    def run(place: int, what: str, name: str, value: Any) -> None:
        raw = copy.deepcopy(good)
        inside, key = list(places(raw["quantization_config"]))[place]
        if what == "replace":
            inside[key] = value
        elif what == "delete":
            del inside[key]
        elif isinstance(inside, dict):
            inside[name] = value
        (folder / "config.json").write_text(json.dumps(raw))
        outcomes[outcome(folder)] += 1

    run()
    assert outcomes.total() >= EXAMPLES
    assert outcomes.keys() <= {"read", "BadFile", "Unsupported"}
    assert min(outcomes.values()) > EXAMPLES / 50, outcomes


def test_random_damage_to_the_tensors(folder: Path) -> None:
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    outcomes: Counter[str] = Counter()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        outcomes[outcome(folder)] += 1

    assert outcome(folder) == "read"
    assert survives(EXAMPLES, [(whole, header)], check) >= EXAMPLES
    assert outcomes["BadFile"] > EXAMPLES / 2, outcomes


ARRAYS = [
    np.zeros((), np.float32), np.zeros(8, np.float32), np.full(8, np.nan, np.float32),
    np.full((8, 1), np.inf, np.float16),
    np.zeros((8, 8), np.float32), np.zeros((0, 8), np.int8), np.zeros((8, 0), np.int8), np.zeros((8, 8), np.int8),
    np.zeros((1, 8, 8), np.int8), np.zeros(8, np.int8), np.zeros(8, np.float64), np.zeros((8, 8), np.uint8),
    np.zeros((8, 8), bool), np.full((8, 8), -128, np.int8), np.full((8, 1), -1, np.float32),
]  # fmt: skip


def test_tensors_taken_away_added_and_exchanged(folder: Path) -> None:
    """Every tensor by every array, under its own name and under those of scales, codes and what stands beside them."""
    file = folder / "model.safetensors"
    good = safetensors.numpy.load_file(file)
    ends = ("weight", "SCB", "weight_scale", "weight_format", "weight_zero_point", "input_scale", "bias")
    modules = ("model.layers.0.mlp.up_proj", "model.norm", "model.embed_tokens", "lm_head", "model.layers.7.x", "")
    names = {*good, *(f"{module}.{end}" for module in modules for end in ends)}
    outcomes: Counter[str] = Counter()
    for name in sorted(names):
        for array in [None, *ARRAYS]:
            tensors = {key: value for key, value in good.items() if key != name}
            if array is not None:
                tensors[name] = array
            safetensors.numpy.save_file(tensors, file)
            outcomes[outcome(folder)] += 1
    assert outcomes.keys() <= {"read", "BadFile", "Unsupported"}
    assert outcomes["BadFile"] > 0.7 * outcomes.total(), outcomes
    assert outcomes["read"], outcomes


def test_patterns_that_take_for_ever_are_not_run() -> None:
    """A regular expression of twenty characters can keep a processor busy for years."""
    scheme = json.loads(json.dumps(quantization_of("int8")))
    scheme["ignore"] = [f"re:(.*.*.*.*.*.*.*.*)*{n}$" for n in range(1000)]
    scheme["config_groups"]["group_0"]["targets"] = [r"re:(\w+\w+)+$"] * 1000
    with modestly(seconds=0.5, megabytes=5):
        parsed = quantization.parse(scheme, Path("config.json"))
    assert parsed is not None


def quantization_of(format: str) -> dict[str, Any]:
    return quantization_config(in_memory(tiny_config(), {}), {}, FORMATS[format], None)


def test_opening_reads_nothing_and_allocates_little(folder: Path) -> None:
    with modestly(seconds=0.5, megabytes=5):
        checkpoint.open(folder)


def test_a_config_of_many_layers_and_one_tensor(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1024}
    (folder / "config.json").write_text(json.dumps(raw))
    with modestly(seconds=1, megabytes=20), pytest.raises(BadFile, match="absent"):
        checkpoint.open(folder)
