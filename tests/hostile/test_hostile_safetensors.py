"""Hugging Face folders that lie: one error of pronk's own each, fast and without memory.

Lies told one at a time, each with its message, are in tests/checkpoint; here they are told at random and in bulk.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from formats import save_huggingface
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import modestly, outcome, survives
from tiny import random_weights, tiny_config

from pronk import checkpoint
from pronk.errors import BadFile

CONFIG = tiny_config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4,
)  # fmt: skip
WEIGHTS = random_weights(CONFIG)
EXAMPLES = 1000
HUGE = (0, -1, 1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, 1 << 64, 1e308, True, None, "", "x", [], {}, [[]])


def header_length(path: Path) -> int:
    return 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]


def damaged(folder: Path, name: str, examples: int = EXAMPLES, header: Callable[[Path], int] | None = None) -> Counter:
    """Break one file of a good folder at random, again and again; how often each outcome came."""
    file = folder / name
    assert outcome(folder) == "read"
    pairs = [(file.read_bytes(), header(file) if header else file.stat().st_size)]
    outcomes: Counter = Counter()

    def check(data: bytes) -> None:
        file.write_bytes(data)
        outcomes[outcome(folder)] += 1

    assert survives(examples, pairs, check) >= examples
    assert outcomes["BadFile"] > examples / 2, outcomes
    return outcomes


def test_truncated_at_every_byte_of_the_header(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS)
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for length in range(header_length(file) + 1):
        file.write_bytes(whole[:length])
        with pytest.raises(BadFile) as caught:
            checkpoint.open(folder)
        assert str(file) in str(caught.value)
    file.write_bytes(whole[:-1])
    with pytest.raises(BadFile, match="the tensors take"):
        checkpoint.open(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "generation_config.json"])
def test_json_truncated_at_every_byte(tmp_path: Path, name: str) -> None:
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS, shards=2)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    whole = (folder / name).read_bytes()
    for length in range(len(whole)):
        (folder / name).write_bytes(whole[:length])
        with pytest.raises(BadFile) as caught:
            checkpoint.open(folder)
        assert str(folder / name) in str(caught.value)


def test_random_damage_to_safetensors(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS)
    outcomes = damaged(folder, "model.safetensors", header=header_length)
    assert outcomes["read"] > EXAMPLES / 100, outcomes  # damage to the numbers alone goes unnoticed, as it must


def test_random_damage_to_the_config(tmp_path: Path) -> None:
    damaged(save_huggingface(tmp_path, CONFIG, WEIGHTS), "config.json")


def test_random_damage_to_the_index(tmp_path: Path) -> None:
    damaged(save_huggingface(tmp_path, CONFIG, WEIGHTS, shards=3), "model.safetensors.index.json")


def test_every_value_of_the_header_replaced(tmp_path: Path) -> None:
    """Well-formed JSON that says something else: each number, string and list of the header, by each extreme."""
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS)
    file = folder / "model.safetensors"
    whole, length = file.read_bytes(), header_length(file)
    header, data = json.loads(whole[8:length]), whole[length:]
    del header["__metadata__"]
    name = "model.layers.0.mlp.up_proj.weight"
    count = 0

    def write(entry: Any) -> None:
        nonlocal count
        raw = json.dumps(header | {name: entry}).encode()
        file.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
        assert outcome(folder) == "BadFile", entry
        count += 1

    for extreme in HUGE:
        write(extreme)
        for key in header[name]:
            write(header[name] | {key: extreme})
        for key in ("shape", "data_offsets"):
            for place in range(2):
                changed = list(header[name][key])
                changed[place] = extreme
                write(header[name] | {key: changed})
    assert count == len(HUGE) * 8


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(HUGE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_any_json_under_any_key(tmp_path: Path, name: str) -> None:
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS)
    (folder / "tokenizer.model").write_bytes(b"\n\x0c\n\x05<unk>\x15\0\0\0\0")
    good = {
        "config.json": CONFIG.to_dict() | {"rope_parameters": {"rope_type": "default"}, "layer_types": None},
        "generation_config.json": {"eos_token_id": [1]},
        "tokenizer_config.json": {"chat_template": "x", "bos_token": "<s>"},
    }[name]
    outcomes: Counter = Counter()

    @settings(max_examples=300, deadline=None, database=None, derandomize=True)
    @given(st.sampled_from([*good, "unheard_of"]), JSON)
    def run(key: str, value: Any) -> None:
        (folder / name).write_text(json.dumps(good | {key: value}))
        outcomes[outcome(folder)] += 1

    run()
    assert outcomes.total() >= 300
    assert outcomes["read"], outcomes
    assert outcomes["BadFile"], outcomes


BOMBS = {
    "wide": b'{"a":[' + b"[]," * 1_398_000 + b"[]]}",
    "objects": b'{"a":[' + b"{}," * 1_398_000 + b"{}]}",
    "deep": b'{"a":' * 800_000,
    "brackets": b"[" * 4_000_000,
    "one string": b'{"a":"' + b"x" * 4_000_000 + b'"}',
    "escapes": b'{"a":"' + b"\\u1234" * 690_000 + b'"}',
    "digits": b'{"a":' + b"1" * 4_000_000 + b"}",
    "numbers": b'{"a":[' + b"1.5," * 1_000_000 + b"1]}",
    "keys": b"{" + b",".join(b'"%x":0' % i for i in range(350_000)) + b"}",
    "same key": b"{" + b'"":0,' * 800_000 + b'"":0}',
    "spaces": b" " * 4_194_304,
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_takes_200_megabytes_or_a_second(tmp_path: Path) -> None:
    """In a process of its own, whose peak resident size covers all of them; tracemalloc would slow it down."""
    for bomb, content in BOMBS.items():
        for name in ("config.json", "model.safetensors"):
            folder = save_huggingface(tmp_path / bomb / name, CONFIG, WEIGHTS)
            lead = struct.pack("<Q", len(content)) if name == "model.safetensors" else b""
            (folder / name).write_bytes(lead + content)
    for name, lead in (("config.json", b""), ("model.safetensors", struct.pack("<Q", 1 << 30))):
        folder = save_huggingface(tmp_path / "a gigabyte" / name, CONFIG, WEIGHTS)
        (folder / name).write_bytes(lead + b'{"a": "')
        os.truncate(folder / name, 8 + (1 << 30))  # a hole, which takes no room on the disk
    program = (
        "import re, sys, time; from pronk import checkpoint; from pronk.errors import BadFile, Unsupported\n"
        "for path in sys.argv[1:]:\n"
        "    started = time.process_time()\n"
        "    try: checkpoint.open(path); print('opened', path)\n"
        "    except (BadFile, Unsupported): pass\n"
        "    if time.process_time() - started > 2: print('slow', path, time.process_time() - started)\n"
        "    peak = int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) // 1024\n"
        "    if peak > 200: print('large', path, peak)\n"
    )
    folders = [str(path.parent) for path in tmp_path.glob("*/*/model.safetensors")]
    assert len(folders) == 2 * len(BOMBS) + 2
    result = subprocess.run([sys.executable, "-c", program, *folders], capture_output=True, text=True, check=True)
    assert result.stdout == ""


@pytest.mark.parametrize("length", [1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_header_length_that_lies_allocates_nothing(tmp_path: Path, length: int) -> None:
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS)
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    with modestly(megabytes=10), pytest.raises(BadFile, match="header length at byte 0"):
        checkpoint.open(folder)


def test_a_config_of_the_largest_sizes_allocates_nothing(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS)
    raw = CONFIG.to_dict() | {"hidden_size": 1 << 20, "vocab_size": 1 << 24, "num_hidden_layers": 1024}
    (folder / "config.json").write_text(json.dumps(raw | {"head_dim": 1 << 14}))
    with modestly(megabytes=20), pytest.raises(BadFile, match="absent"):
        checkpoint.open(folder)
