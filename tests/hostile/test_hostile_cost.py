"""Checkpoints made to be dear, mostly of many files that are cheap one by one: under 200 MB, and soon over."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from formats import meta_params
from gguf_files import raw_gguf
from llama2c_files import save_llama2c
from tiny import random_weights, tiny_config

CONFIG = tiny_config()
SECONDS = 3  # of the processor; one or less where nothing else runs
MEGABYTES = 200  # all of the process, numpy included


def huggingface(folder: Path, headers: list[bytes]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    weight_map = {}
    for i, header in enumerate(headers):
        (folder / f"{i}.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        weight_map[str(i)] = f"{i}.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def meta(folder: Path, shard: bytes, count: int) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(meta_params(CONFIG)))
    for i in range(count):
        (folder / f"consolidated.{i:02d}.pth").write_bytes(shard)
    return folder


def archive(entries: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as opened:
        for name, content in entries.items():
            opened.writestr(name, content)
    return file.getvalue()


def gguf(path: Path, kind: int, count: int, element: bytes) -> Path:
    array = struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, kind, count) + element * count
    path.write_bytes(raw_gguf([array], []))
    return path


def safetensors_tensors(path: Path) -> Path:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    return huggingface(path, [json.dumps({f"{s}.{i}": entry for i in range(20_000)}).encode() for s in range(10)])


def safetensors_metadata(path: Path) -> Path:
    return huggingface(path, [json.dumps({"__metadata__": {f"{i}": "" for i in range(250_000)}}).encode()] * 10)


def safetensors_objects(path: Path) -> Path:
    return huggingface(path, [b'{"a":[' + b"{}," * 1_300_000 + b"{}]}"] * 3)


def index(path: Path) -> Path:
    huggingface(path, [b"{}"])
    names = {f"{i:x}": "0.safetensors" for i in range(170_000)}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}, separators=(",", ":")))
    return path


def torch_tensors(path: Path) -> Path:
    file, tensor = io.BytesIO(), torch.zeros(1)
    torch.save({f"layers.{i}.attention_norm.weight": tensor for i in range(10_000)}, file)
    return meta(path, file.getvalue(), 20)


def zip_entries(path: Path) -> Path:
    return meta(path, archive({"x/data.pkl": b"\x80\x02}."} | {f"x/data/{i}": b"" for i in range(32_000)}), 10)


def pickle_keys_of_one_hash(path: Path) -> Path:
    """CPython hashes whole numbers modulo 2**61 - 1."""
    pairs = (b"\x8a\x0b" + ((i + 1) * ((1 << 61) - 1)).to_bytes(11, "little") + b"N" for i in range(100_000))
    return meta(path, archive({"x/data.pkl": b"\x80\x02}(" + b"".join(pairs) + b"u."}), 1)


def pickle_storages_of_a_long_name(path: Path) -> Path:
    name = b"a" * 65_000
    take = b"(h\x00h\x01h\x02NK\x00tQ"
    stream = b"\x80\x02X\x07\0\0\0storageq\x000ctorch\nFloatStorage\nq\x01X" + struct.pack("<I", len(name)) + name
    stream += b"q\x02" + take * 27_000 + b"."
    return meta(path, archive({"x/data.pkl": stream, f"x/data/{name.decode()}": b""}), 1)


def gguf_parts(path: Path) -> Path:
    path.mkdir()
    values = struct.pack("<IQ", 8, 1_000_000) + (struct.pack("<Q", 2) + b"ab") * 1_000_000
    for i in range(4):
        pairs = [
            struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
            for key, kind, value in (
                (b"split.no", 2, struct.pack("<H", i)), (b"split.count", 2, struct.pack("<H", 4)), (b"a", 9, values)
            )
        ]  # fmt: skip
        (path / f"m-{i + 1:05d}-of-00004.gguf").write_bytes(raw_gguf(pairs, []))
    return path


def gguf_wide_text(path: Path) -> Path:
    text = b"a" * (30 << 20) + "\U0001f600".encode()
    path.write_bytes(raw_gguf([struct.pack("<Q", 1) + b"a" + struct.pack("<IQ", 8, len(text)) + text], []))
    return path


def gguf_bytes(path: Path) -> Path:
    return gguf(path, 0, 31_000_000, b"\0")


def gguf_floats(path: Path) -> Path:
    return gguf(path, 6, 7_500_000, struct.pack("<f", 0.3))


def gguf_texts(path: Path) -> Path:
    return gguf(path, 8, 1_190_000, struct.pack("<Q", 6) + "ab\U0001f600".encode())


def files_beside_llama2c(path: Path) -> Path:
    """All of which may be its tokenizer."""
    path.mkdir()
    large = tiny_config(vocab_size=100_000, hidden_size=16, num_attention_heads=2, num_key_value_heads=1)
    for i in range(30):
        (path / f"tok{i}.json").write_bytes(b'{"model": {"vocab": [' + b"{}," * 4_000_000 + b"{}]}}")
        (path / f"tok{i}.model").write_bytes(b"\n\x0c\n\x05<unk>\x15\0\0\0\0" + b"\n\0" * 3_000_000)
    return save_llama2c(path / "model.bin", large, random_weights(large), 0)


MAKERS = (
    safetensors_tensors, safetensors_metadata, safetensors_objects, index, torch_tensors, zip_entries,
    pickle_keys_of_one_hash, pickle_storages_of_a_long_name, gguf_parts, gguf_wide_text, gguf_bytes, gguf_floats,
    gguf_texts, files_beside_llama2c,
)  # fmt: skip

PROGRAM = """
import re, sys, time
from pronk import checkpoint
from pronk.errors import PronkError
started = time.process_time()
try: checkpoint.open(sys.argv[1]); message = ""
except PronkError as error: message = str(error)
seconds = time.process_time() - started
print(len(message), seconds, int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("make", MAKERS)
def test_it_is_refused_soon_and_in_little_memory(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, make(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    length, seconds, megabytes = map(float, result.stdout.split())
    assert length < 600
    assert seconds < SECONDS
    assert megabytes < MEGABYTES
