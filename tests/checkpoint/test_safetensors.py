"""The safetensors container, with files written by the safetensors package."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from pronk.checkpoint.containers import safetensors as ours
from pronk.errors import BadFile, Unsupported


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A file with any header at all."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def test_arrays_of_every_type_come_back_bit_for_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "f32": rng.normal(size=(3, 5)).astype(np.float32),
        "f16": rng.normal(size=(7,)).astype(np.float16),
        "bf16": rng.normal(size=(2, 2, 3)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(2.5, np.float32),
        "none": np.empty((0, 4), np.float32),
    }
    path = tmp_path / "x"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    assert ours.detect(path)
    tensors = ours.read(path)
    assert tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        tensor = tensors[name]
        assert (tensor.name, tensor.shape, tensor.nbytes) == (name, array.shape, array.nbytes)
        got = tensor.read()
        assert got.dtype == array.dtype
        assert got.tobytes() == array.tobytes()
        assert array.size == 0 or not got.flags.writeable


def test_reading_makes_no_copy(tmp_path: Path) -> None:
    path = tmp_path / "x"
    safetensors.numpy.save_file({"a": np.zeros((1000, 1000), np.float32)}, path)
    tensor = ours.read(path)["a"]
    assert not tensor.read().flags.owndata
    assert np.shares_memory(tensor.read(), tensor.read())


def test_types_that_no_model_here_has_are_listed_but_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x"
    safetensors.numpy.save_file({"a": np.zeros(3), "b": np.zeros(3, np.int64)}, path)
    tensors = ours.read(path)
    assert [tensors[name].dtype for name in "ab"] == ["F64", "I64"]
    with pytest.raises(Unsupported, match="'a' is stored as F64"):
        tensors["a"].read()


def test_a_header_that_leaves_the_data_unaligned_is_read_by_copying(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    header += b" " * (3 - len(header) % 4)
    path = write(tmp_path / "x", header, np.array([1.5, -2], np.float32).tobytes())
    assert (8 + len(header)) % 4
    array = ours.read(path)["a"].read()
    assert array.flags.aligned
    np.testing.assert_array_equal(array, [1.5, -2])


def test_a_file_cut_after_opening_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "x"
    safetensors.numpy.save_file({"a": np.zeros(100_000, np.float32)}, path)
    tensors = ours.read(path)
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(BadFile, match="shrunk to 1000 bytes"):
        tensors["a"].read()


A = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": A}, b"1234567", "the tensors take 8 bytes and the file has 7"),
        ({"a": A}, b"123456789", "the tensors take 8 bytes and the file has 9"),
        ({"a": A, "b": A}, b"12345678", "overlaps"),
        ({"a": A, "b": {**A, "data_offsets": [4, 12]}}, b"123456789012", "overlaps"),
        ({"a": {**A, "data_offsets": [4, 12]}}, b"123456789012", "leaves 4 bytes unused"),
        ({"a": {**A, "data_offsets": [8, 0]}}, b"12345678", "does not take"),
        ({"a": {**A, "data_offsets": [0, 1 << 63]}}, b"", "no two byte offsets"),
        ({"a": {**A, "data_offsets": [0, True]}}, b"1", "no two byte offsets"),
        ({"a": {**A, "data_offsets": [0]}}, b"", "no two byte offsets"),
        ({"a": {**A, "data_offsets": [0.0, 8.0]}}, b"12345678", "no two byte offsets"),
        ({"a": {**A, "shape": [3]}}, b"12345678", "does not take"),
        ({"a": {**A, "shape": [-2]}}, b"12345678", "no list of up to 8 sizes"),
        ({"a": {**A, "shape": [1 << 62, 1 << 62]}}, b"12345678", "does not take"),
        ({"a": {**A, "shape": [1 << 63]}}, b"12345678", "no list of up to 8 sizes"),
        ({"a": {**A, "shape": [1] * 9}}, b"12345678", "no list of up to 8 sizes"),
        ({"a": {**A, "shape": "2"}}, b"12345678", "no list of up to 8 sizes"),
        ({"a": {**A, "dtype": "F31"}}, b"12345678", "unknown dtype 'F31'"),
        ({"a": {**A, "dtype": ["F32"]}}, b"12345678", "unknown dtype"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"12345678", "must have dtype"),
        ({"a": {**A, "x": 1}}, b"12345678", "nothing else"),
        ({"a": 5}, b"", "must have dtype"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__"),
        ({"__metadata__": []}, b"", "__metadata__"),
        (
            {
                "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
                "b": {"dtype": "F32", "shape": [1], "data_offsets": [1, 5]},
            },
            b"12345",
            "unaligned",
        ),
        (b'{"a":{},"a":{}}', b"", "key 'a': stands in one object twice"),
        (b'{"a":NaN}', b"", "NaN is not JSON"),
        (b'{"a":-Infinity}', b"", "-Infinity is not JSON"),
        (b'{"a":1e999}', b"", "out of range"),
        (b'{"a":' + b"9" * 100 + b"}", b"", "100 digits"),
        (b'{"a":' + b"[" * 50 + b"]" * 50 + b"}", b"", "nested"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"", "nested"),
        (b'{"a":' + b'{"a":' * 100_000, b"", "nested"),
        (b'{"a"', b"", "at byte 12: not JSON"),
        (b'{"\xff"}', b"", "at byte 10: is not UTF-8"),
        (b"[]", b"", "no JSON object"),
        (b"", b"", "not JSON"),
    ],
)
def test_lies_in_the_header(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = write(tmp_path / "model.bin", header, data)
    with pytest.raises(BadFile) as caught:
        ours.read(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("length", [3, 1 << 31, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_lies_in_the_header_length(tmp_path: Path, length: int) -> None:
    with pytest.raises(BadFile, match=r"header length at byte 0: .* does not fit"):
        ours.read(write(tmp_path / "x", b"{}", length=length))


def test_a_header_too_large_to_parse_safely(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="more than the 4194304 allowed"):
        ours.read(write(tmp_path / "x", b" " * (5 << 20)))


@pytest.mark.parametrize("content", [b"", b"1", b"1234567"])
def test_hardly_a_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    assert not ours.detect(tmp_path / "x")
    with pytest.raises(BadFile):
        ours.read(tmp_path / "x")
