"""llama2.c files that lie: each is one BadFile naming file, field and offset, fast and without memory."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from llama2c_files import save_llama2c
from mutations import modestly, survives
from tiny import random_weights, tiny_config

import pronk.checkpoint as checkpoints
from pronk.checkpoint.readers import llama2c
from pronk.errors import BadFile, PronkError, Unsupported

EXAMPLES = 1000
FIELDS = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "seq_len")
EXTREMES = (0, -1, 1 << 30, (1 << 31) - 1, -(1 << 31))


def good(tmp_path: Path, version: int) -> Path:
    config = tiny_config()
    return save_llama2c(tmp_path / f"v{version}.bin", config, random_weights(config), version)


def refused(path: Path) -> BadFile:
    with modestly(), pytest.raises(BadFile) as caught:
        llama2c.read(path)
    error = caught.value
    assert error.field
    assert error.offset is not None
    assert str(error).startswith(f"{path}: ")
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize("version", [0, 1, 2])
def test_truncated_at_every_byte_of_the_header(tmp_path: Path, version: int) -> None:
    path = good(tmp_path, version)
    for length in range(llama2c.HEADER_BYTES[version] + 4, 0, -1):
        os.truncate(path, length)
        error = refused(path)
        # A file shorter than its header says so there; a longer one has the wrong size.
        assert (error.field == "size") == (length >= llama2c.HEADER_BYTES[version])
        assert error.offset is not None
        assert error.offset <= length
        assert llama2c.detect(path) == (version > 0 and length >= 4)


def test_empty_absent_and_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "empty.bin").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.bin")
    for name in ("empty.bin", "pipe.bin", "absent.bin", "."):
        with modestly(), pytest.raises(BadFile):
            llama2c.read(tmp_path / name)
        assert not llama2c.detect(tmp_path / name)


@pytest.mark.parametrize("version", [0, 1, 2])
@pytest.mark.parametrize("value", EXTREMES)
@pytest.mark.parametrize("field", FIELDS)
def test_every_field_at_its_extremes(tmp_path: Path, version: int, field: str, value: int) -> None:
    path = good(tmp_path, version)
    data = bytearray(path.read_bytes())
    at = (8 if version else 0) + 4 * FIELDS.index(field)
    data[at : at + 4] = struct.pack("<i", value)
    path.write_bytes(data)
    if (field, value) == ("seq_len", 1 << 30) and version > 0:
        assert llama2c.read(path).config.max_position_embeddings == value  # nothing in these files depends on it
        return
    error = refused(path)
    if value <= 0 and not (field == "vocab_size" and version == 0):
        assert (error.field, error.offset) == (field, at)
    if version == 0:
        assert not llama2c.detect(path)


@pytest.mark.parametrize(
    ("field", "value"), [("dim", 63), ("n_heads", 7), ("n_heads", 128), ("n_kv_heads", 3), ("n_kv_heads", 16)]
)
def test_heads_that_do_not_divide(tmp_path: Path, field: str, value: int) -> None:
    path = good(tmp_path, 1)
    data = bytearray(path.read_bytes())
    at = 8 + 4 * FIELDS.index(field)
    data[at : at + 4] = struct.pack("<i", value)
    path.write_bytes(data)
    refused(path)


@pytest.mark.parametrize("group_size", [0, -1, 7, 1 << 30, -(1 << 31)])
def test_group_sizes(tmp_path: Path, group_size: int) -> None:
    path = good(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[37:41] = struct.pack("<i", group_size)
    path.write_bytes(data)
    error = refused(path)
    assert (error.field, error.offset) == ("group_size", 37)


def test_another_group_size_makes_another_file(tmp_path: Path) -> None:
    path = good(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[37:41] = struct.pack("<i", 16)
    path.write_bytes(data)
    assert refused(path).field == "size"


@pytest.mark.parametrize("byte", [2, 255])
def test_the_shared_classifier_is_zero_or_one(tmp_path: Path, byte: int) -> None:
    path = good(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[36] = byte
    path.write_bytes(data)
    error = refused(path)
    assert (error.field, error.offset) == ("shared_classifier", 36)


@pytest.mark.parametrize("version", [0, -1, 3, (1 << 31) - 1])
def test_versions(tmp_path: Path, version: int) -> None:
    path = good(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[4:8] = struct.pack("<i", version)
    path.write_bytes(data)
    with pytest.raises(Unsupported, match=f"version {version} "):
        llama2c.read(path)


def test_a_header_of_terabytes_over_a_sparse_file(tmp_path: Path) -> None:
    """The sizes add up, so that the file is a model; nothing of it may be read before it is asked for."""
    path = tmp_path / "m.bin"
    fields = (1 << 14, 1 << 14, 64, 64, 64, 1 << 17, 2048)
    path.write_bytes(struct.pack("<7i", *fields))
    config = tiny_config(
        hidden_size=1 << 14, intermediate_size=1 << 14, num_hidden_layers=64, num_attention_heads=64,
        num_key_value_heads=64, head_dim=256, vocab_size=1 << 17, max_position_embeddings=2048,
        tie_word_embeddings=True,
    )  # fmt: skip
    size = llama2c.slots(llama2c.Header(0, config))[1]
    assert size > 1 << 38
    os.truncate(path, size)
    with modestly():
        assert llama2c.detect(path)
        assert len(llama2c.read(path).tensors) == 64 * 9 + 2


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\n" * 100, b"{" * 100, b"\xff" * 1000])
def test_a_broken_tokenizer_beside_is_passed_over(tmp_path: Path, content: bytes) -> None:
    path = good(tmp_path, 1)
    for name in ("tokenizer.bin", "tokenizer.model", "tokenizer.json"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tok.bin").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "tok.model")
    assert llama2c.read(path).tokenizer is None


def test_nothing_else_is_taken_for_version_0(tmp_path: Path) -> None:
    """Version 0 has no magic number: only sizes that add up to the byte make a file one."""
    path = tmp_path / "m.bin"
    for data in (b"\0" * 28, b"\1\0\0\0" * 7, b"\xff" * 28, os.urandom(5000), b"plain text, which is no model" * 9):
        path.write_bytes(data)
        assert not llama2c.detect(path)
        with pytest.raises(PronkError):
            checkpoints.open(path)


@pytest.mark.slow
def test_random_damage(tmp_path: Path) -> None:
    """Only an error of ours, or success, comes out of reading a damaged file and all its tensors."""
    config = tiny_config(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1
    )
    weights = random_weights(config)
    valid = []
    for version in (0, 1, 2):
        path = save_llama2c(tmp_path / "m.bin", config, weights, version)
        valid.append((path.read_bytes(), 64))
        for tensor in llama2c.read(path).tensors.values():
            assert tensor.read().shape == tensor.shape
    outcomes = {"read": 0, "refused": 0}

    def check(data: bytes) -> None:
        path.write_bytes(data)
        llama2c.detect(path)
        try:
            for tensor in llama2c.read(path).tensors.values():
                assert tensor.read().shape == tensor.shape
            outcomes["read"] += 1
        except PronkError:
            outcomes["refused"] += 1

    assert survives(EXAMPLES, valid, check) >= EXAMPLES
    assert min(outcomes.values()) > EXAMPLES / 100, outcomes
