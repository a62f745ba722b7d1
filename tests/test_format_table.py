"""The table of formats: true to what others know of each, and the only place that asks for one by its name."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

from pronk import _native
from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES
from pronk.checkpoint.containers.gguf_file import FILE_TYPES, TENSOR_TYPES
from pronk.checkpoint.readers.int8_rows import LAYOUTS
from pronk.checkpoint.tensors import PLAIN_DTYPES
from pronk.cpu_engine import weights
from pronk.cpu_engine.backend import CpuBackend
from pronk.formats import FLOATS, FORMATS, KV_TYPES, TRAINED, Format, KVName, Quantize, kept, names, packed, wider
from pronk.formats.int8 import SCHEMES
from pronk.formats.quantize import NUMERICS

SRC = Path(__file__).resolve().parents[1] / "src" / "pronk"
CPU = [FORMATS[name] for name in FORMATS if "cpu" in FORMATS[name].engines]

# What may ask for a format by its name, a file or a folder, and why.
ALLOWED = {
    "formats/": "the table, and what the codes of each format are",
    "checkpoint/containers/gguf_blocks.py": "what the bytes of each block type are",
    "checkpoint/containers/gguf_file.py": "GGUF's numbers of its types",
    "calibrate/": "what each block type can hold, and how its bytes are filled",
    "torch_engine/quantized.py": "what the codes of each int8 scheme are, in torch",
    "torch_engine/backend.py": "torch's own types by their names",
    "train/": "what is computed in (precision) is no format of weights",
    "measure/training_grid.py": "the same",
    "measure/verify.py": "how far float32 may be off",
    "cpu_engine/__init__.py": "which formats a comparison takes where none is named is a choice, no fact",
    "torch_engine/__init__.py": "the same",
    "cli/outliers.py": "what a survey is made in where nothing is asked for is a choice",
}


def conditions(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every format that is compared with, matched, a key of a dictionary, or one of several in a list.
    Annotations are none of these."""
    named = {*FORMATS, *KV_TYPES, *BLOCK_TYPES, *LAYOUTS}

    def of(nodes: Iterable[ast.AST]) -> list[tuple[int, str]]:
        return [(n.lineno, n.value) for n in nodes if isinstance(n, ast.Constant) and n.value in named]

    tree = ast.parse(source)
    literals = [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and ast.unparse(n.value) == "Literal"]
    skipped = {inner for literal in literals for inner in ast.walk(literal)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for side in (node.left, *node.comparators):
                yield from of(side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
        elif isinstance(node, ast.MatchValue):
            yield from of([node.value])
        elif isinstance(node, ast.Dict):
            yield from of(key for key in node.keys if key)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set) and node not in skipped and len(of(node.elts)) > 1:
            yield from of(node.elts)


def test_no_format_is_asked_for_by_its_name_outside_the_table() -> None:
    found, used = [], set()
    for path in sorted(SRC.rglob("*.py")):
        name = path.relative_to(SRC).as_posix()
        leave = next((allowed for allowed in ALLOWED if name.startswith(allowed)), None)
        for line, format in conditions(path.read_text(encoding="utf-8")):
            if leave:
                used.add(leave)
            else:
                found.append(f"{name}:{line}: {format}")
    assert not found, "ask the format's record in pronk.formats"
    assert used == ALLOWED.keys(), "needs no leave any more"


@pytest.mark.parametrize(
    "source",
    [
        'x == "q4"', 'x != "llm-int8"', 'if x in (None, "q8"): pass', '{"Q4_0": 1}', 'f = ["q8", "q4"]',
        'match x:\n    case "int8": pass', 'Choice(["auto", "f32", "bf16"])',
    ],
)  # fmt: skip
def test_a_name_in_a_condition_would_be_seen(source: str) -> None:
    assert list(conditions(source))
    assert not list(conditions('def f(x: Literal["q8", "q4"] = "q8") -> None:\n    load(quantize="q4")'))


@pytest.mark.parametrize("name", FORMATS)
def test_a_record_says_what_others_say_of_its_format(name: str) -> None:
    format = FORMATS[name]
    assert format.name == name
    assert set(format.stored + format.nearly) <= {*PLAIN_DTYPES, *BLOCK_TYPES, *LAYOUTS}
    if "gguf" in format.files:
        assert format.stored[0] in FILE_TYPES
        assert format.stored[0] in TENSOR_TYPES.values()
    if "safetensors" in format.files:
        assert format.stored[0] in {*PLAIN_DTYPES, *LAYOUTS}
    for dtype in format.stored[:1]:
        if dtype in BLOCK_TYPES:
            most = 1 if format.made else 1.04  # whole numbers of six bits take eight
            stored = 3 * 256 // BLOCK_TYPES[dtype].elements * BLOCK_TYPES[dtype].nbytes
            assert stored <= format.nbytes(3, 256) <= most * stored
        elif dtype in PLAIN_DTYPES:
            assert format.nbytes(3, 64) == 3 * 64 * PLAIN_DTYPES[dtype].itemsize
    if format.made and format.codes and (format.trains or "cpu" in format.engines) and not format.kind_of:
        assert format.codes.name in NUMERICS
    assert format.outer is None or FORMATS[format.outer].bits >= format.bits


@pytest.mark.parametrize("format", CPU, ids=[format.name for format in CPU])
def test_a_record_counts_the_bytes_that_are_packed(format: Format) -> None:
    """Of whole panels of 64 rows, which is what the native code keeps."""
    assert _native.packed_bytes(format.name, 128, 96, False) == format.nbytes(128, 96)


def test_the_engines_run_what_the_table_says() -> None:
    for name in FORMATS.keys() - {format.name for format in CPU}:
        with pytest.raises(ValueError, match="no weight format"):
            _native.packed_bytes(name, 64, 64, False)
    assert {*SCHEMES} == {*names(engine="torch")} - {*FLOATS, "q8", "q4"}
    assert get_args(Quantize) == ("auto", *(name for name in names() if FORMATS[name].engines))


@pytest.mark.parametrize("stored", sorted(weights._DIRECT))
def test_the_native_code_reads_what_is_kept_as_it_is(stored: str) -> None:
    nbytes = 4 + 256 if stored in LAYOUTS else 256 // BLOCK_TYPES[stored].elements * BLOCK_TYPES[stored].nbytes
    assert _native.Matrix("f32", 1, 256).pack(np.zeros((1, nbytes), np.uint8), stored)


@pytest.mark.parametrize("name", KV_TYPES)
def test_keys_and_values_take_the_bytes_of_their_record(name: str) -> None:
    assert get_args(KVName) == ("auto", *KV_TYPES)
    config = tiny_config(head_dim=64, num_attention_heads=4, num_key_value_heads=2, hidden_size=256)
    engine = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), kv_dtype=name)
    kind = KV_TYPES[name]
    block = 2 * config.num_hidden_layers * 2 * 64 * (64 * kind.nbytes + kind.scale)
    assert engine.new_kv(1, 64).storage.block_bytes == block


def test_auto_keys_and_values_add_no_rounding_of_another_order() -> None:
    found = {name: FORMATS[name].kv for name in names(engine="cpu")}
    assert {name for name, kv in found.items() if kv == "f32"} == {"f32", "f16"}
    assert set(found.values()) == {"f32", "bf16"}


def test_what_holds_two_formats() -> None:
    order = {
        "q4_0 q4": "q4", "q4_0 q8": "q8", "q4 q8": "q8", "q8 bf16": "bf16", "f16 bf16": "f32", "q8 int8": "f32",
        "int8 llm-int8": "f32", "int8_plain llm-int8": "llm-int8", "int8 int8_plain": "f32",
        "q8 q8": "q8", "f16 f32": "f32", "q8_0 q8": "f32",
        "q6_k q6_k": "q6_k", "q6_k q5_k": "q8", "q4_0 q4_k": "q8", "q3_k bf16": "bf16", "q2_k int8": "f32",
    }  # fmt: skip
    for pair, both in order.items():
        a, b = (FORMATS[name] for name in pair.split())
        assert wider(a, b).name == wider(b, a).name == both, pair


def test_one_rule_says_what_stays_as_it_is() -> None:
    """Packing, GGUF's writer and training ask `holds`; only that says of Q4_K that its scales are rounded."""
    held = {name: FORMATS[name].stored for name in (*TRAINED, "q4_0")}
    assert held == {
        "f32": ("F32",), "int8": ("TURNED_INT8",), "llm-int8": ("LLM_INT8", "INT8"), "q8": ("Q8_0",),
        "q4": ("Q4_1", "Q4_0"), "q4_0": ("Q4_0",),
    }  # fmt: skip
    assert not FORMATS["q4"].holds("Q4_K")
    assert FORMATS["q4"].holds("Q4_K", nearly=True)
    assert [kept(dtype).name for dtype in ("Q4_0", "Q4_1", "Q4_K", "Q5_K", "LLM_INT8")] == [
        "q4_0", "q4", "q4_k", "q5_k", "llm-int8"
    ]  # fmt: skip
    assert packed("q4", "F16", outer=True).name == "q8"
    assert packed("q4", "Q4_0", outer=True).name == "q4_0"
    assert packed("q4", "Q4_K").name == "q4"
    assert packed("q8", "Q6_K").name == packed("q4", "Q6_K", outer=True).name == "q8"
    assert (
        packed("int8", "LLM_INT8", outer=True).name == packed("int8", "INT8").name == kept("INT8").name == "int8_plain"
    )
    assert packed("int8", "TURNED_INT8").name == kept("TURNED_INT8").name == "int8"
    assert packed("llm-int8", "INT8").name == "llm-int8"
