"""torch archives, written by torch itself in every way that leaves plain tensors, and refused in every other."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats import as_torch

from pronk.checkpoint.budget import Budget
from pronk.checkpoint.containers import torch_zip, unpickle
from pronk.checkpoint.containers.mapped import MappedFile
from pronk.errors import BadFile, Unsupported


def save(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def same(path: Path, expected: dict[str, torch.Tensor]) -> None:
    tensors = torch_zip.read(path)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        lazy = tensors[name]
        assert (lazy.shape, lazy.nbytes) == (tuple(tensor.shape), tensor.numel() * tensor.itemsize)
        got = lazy.read()
        assert got.flags.c_contiguous
        assert torch.equal(as_torch(got), tensor.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_of_any_layout(tmp_path: Path, dtype: torch.dtype, protocol: int) -> None:
    base = torch.randn(6, 8).to(dtype)
    tensors = {
        "whole": base,
        "rows": base[2:4],
        "columns": base[:, 1:5],
        "transposed": base.T,
        "every other": base[::2, ::3],
        "scalar": torch.tensor(3.0, dtype=dtype),
        "empty": torch.empty(0, 4, dtype=dtype),
        "of ones": torch.ones(1, 5, 1, dtype=dtype),
        "parameter": torch.nn.Parameter(torch.randn(3, dtype=torch.float32).to(dtype)),
        "näme/with.dots": torch.zeros(2, dtype=dtype),
    }
    path = save(tmp_path / "x.pth", tensors, pickle_protocol=protocol)
    assert torch_zip.detect(path)
    same(path, tensors)


def test_a_modules_state_dict(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.RMSNorm(3))
    same(save(tmp_path / "x", module.state_dict()), dict(module.state_dict()))
    same(save(tmp_path / "y", dict(module.named_parameters())), dict(module.named_parameters()))
    same(save(tmp_path / "z", OrderedDict(a=torch.ones(2))), {"a": torch.ones(2)})
    same(save(tmp_path / "e", {}), {})


def test_shared_storages_are_not_copied(tmp_path: Path) -> None:
    base = torch.randn(100, 100)
    path = save(tmp_path / "x", {"a": base, "b": base, "c": base[10:]})
    tensors = torch_zip.read(path)
    a, b, c = (tensors[name].read() for name in "abc")
    assert np.shares_memory(a, b)
    assert np.shares_memory(a, c)
    assert not a.flags.owndata
    assert not a.flags.writeable
    assert path.stat().st_size < 2 * base.nbytes


def rewrite(path: Path, change: dict[str, bytes | None], method: int = zipfile.ZIP_STORED) -> Path:
    """The archive with entries replaced, added, or (None) left out."""
    with zipfile.ZipFile(path) as archive:
        prefix = archive.namelist()[0].split("/")[0]
        entries = {name: archive.read(name) for name in archive.namelist()}
    entries |= {f"{prefix}/{name}": data for name, data in change.items()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in entries.items():
            if data is not None:
                archive.writestr(name, data)
    return path


def test_an_archive_repacked_by_another_program(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5, 3), "b": torch.randn(7).half()}
    same(rewrite(save(tmp_path / "x", tensors), {}), tensors)


@pytest.mark.parametrize("missing", ["byteorder", "version", ".format_version", ".data/serialization_id"])
def test_entries_that_older_versions_did_not_write(tmp_path: Path, missing: str) -> None:
    same(rewrite(save(tmp_path / "x", {"a": torch.ones(3)}), {missing: None}), {"a": torch.ones(3)})


def test_a_file_from_a_big_endian_machine(tmp_path: Path) -> None:
    for dtype, numpy_name in ((torch.float32, ">u4"), (torch.bfloat16, ">u2")):
        tensor = torch.randn(4, 3).to(dtype)
        words = tensor.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy()
        swapped = words.astype(numpy_name.replace("u", "i")).tobytes()
        path = rewrite(save(tmp_path / "x", {"a": tensor}), {"data/0": swapped, "byteorder": b"big"})
        same(path, {"a": tensor})
        same(rewrite(save(tmp_path / "y", {"a": tensor.T}), {"data/0": swapped, "byteorder": b"big"}), {"a": tensor.T})


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.int8, torch.uint8, torch.bool])
def test_other_types_are_listed_but_not_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch_zip.read(save(tmp_path / "x", {"a": torch.zeros(3).to(dtype)}))["a"]
    assert tensor.nbytes == 3 * dtype.itemsize
    with pytest.raises(Unsupported, match="'a' is stored as"):
        tensor.read()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_codes_are_bytes_to_those_who_know_what_they_mean(tmp_path: Path, dtype: torch.dtype) -> None:
    codes = torch.tensor([[0, 127, 1], [-128, -1, 5]]).to(dtype)
    for name, view in (("x", codes), ("y", codes.T), ("z", codes[:, 1])):
        tensor = torch_zip.read(save(tmp_path / name, {"a": view}))["a"]
        assert tensor.read_blocks is not None
        assert np.array_equal(tensor.read_blocks().view(view.numpy().dtype), view.numpy())


class Runs:
    """Pickles as a call of os.system."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.target}",)


def test_nothing_that_the_pickle_names_is_run(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"a": torch.ones(2), "b": Runs(tmp_path / "ran")})
    with pytest.raises(BadFile, match=r"refers to (posix|nt)\.system, which a checkpoint has no need of"):
        torch_zip.read(path)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Runs(tmp_path / "ran")))  # the attack is a real one
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"a": torch.nn.Linear(2, 2)}, "torch.nn.modules.linear.Linear"),
        ({"a": np.zeros(3)}, "numpy"),
        ({"a": torch.Size([2])}, "torch.Size"),
        ({"a": torch.float32}, "torch.float32"),
        ({"a": torch.zeros(2).to_sparse()}, "torch._utils._rebuild_sparse_tensor"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, "torch.ComplexFloatStorage"),
        ({"a": torch.zeros(2, dtype=torch.float8_e4m3fn)}, "torch._utils._rebuild_tensor_v3"),
        ({"a": {1, 2}}, "set, which"),
        ({"a": 1 << 3000}, "LONG4"),
        ({"a": b"bytes"}, "_codecs.encode"),
        ({"a": [1, 2.5, None, True, "x", (1, 2, 3, 4), -5, 70000]}, "maps 'a' to a list"),
        ({"a": {"b": torch.ones(2)}}, "maps 'a' to a dict"),
        ({1: torch.ones(2)}, "maps 1 to a Tensor"),
        ({"x" * 257: torch.ones(2)}, "xxx... to a Tensor"),
        ({(1, 2): torch.ones(2)}, "a key of type tuple"),
        ([torch.ones(2)], "holds a list"),
        (torch.ones(2), "holds a Tensor"),
        (OrderedDict, "holds a Name"),
    ],
)
def test_whatever_is_no_tensor_is_refused_by_name(tmp_path: Path, value: Any, name: str) -> None:
    with pytest.raises(BadFile) as caught:
        torch_zip.read(save(tmp_path / "x", value))
    assert name in str(caught.value)


def test_a_tensor_that_was_saved_alone(tmp_path: Path) -> None:
    path = save(tmp_path / "x", torch.arange(6.0).reshape(2, 3))
    found = torch_zip.read_one(MappedFile(path), Budget())
    assert found.read().tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(BadFile, match="holds a dict, not a tensor"):
        torch_zip.read_one(MappedFile(save(path, {"a": torch.zeros(3)})), Budget())


def test_no_object_of_a_class_is_made(tmp_path: Path) -> None:
    """Weights have none; the descriptions of training states have (tests/train/test_state_reader.py)."""
    with pytest.raises(unpickle.PickleError, match=r"makes an object of collections\.OrderedDict"):
        unpickle.load(b"\x80\x02ccollections\nOrderedDict\n)\x81.", frozenset(), {"collections.OrderedDict": dict})


def test_records_keep_what_would_be_their_state() -> None:
    stream = b"\x80\x02(ca\nB\n)\x81}X\1\0\0\0xK\1sbca\nB\n)\x81t."
    (first, second), _ = unpickle.load(stream, frozenset(), {}, classes=frozenset({"a.B"}))
    assert (first.of, first.state, second.state) == ("a.B", {"x": 1}, None)
    assert first != second
    with pytest.raises(unpickle.PickleError, match="more than 3 instructions"):
        unpickle.load(stream, frozenset(), {}, classes=frozenset({"a.B"}), most=3)
    twice = b"\x80\x02ca\nB\n)\x81}b}b."
    with pytest.raises(unpickle.PickleError, match="sets the state of a Record"):
        unpickle.load(twice, frozenset(), {}, classes=frozenset({"a.B"}))


def test_a_conjugate_view(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"a": torch.zeros(2, dtype=torch.complex64).conj().imag})
    with pytest.raises(BadFile):
        torch_zip.read(path)


def test_files_from_before_torch_1_6_name_the_way_out(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"a": torch.ones(2)}, _use_new_zipfile_serialization=False)
    assert torch_zip.detect(path)
    with pytest.raises(BadFile, match=r"before 1\.6; save it anew with torch\.save"):
        torch_zip.read(path)


def test_a_compressed_archive(tmp_path: Path) -> None:
    path = rewrite(save(tmp_path / "x", {"a": torch.zeros(1000)}), {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(BadFile, match="compressed or encrypted"):
        torch_zip.read(path)


def test_other_zip_archives(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=np.zeros(3))
    with pytest.raises(BadFile, match=r"0 files named \*/data.pkl"):
        torch_zip.read(tmp_path / "x.npz")
    torch_like = rewrite(save(tmp_path / "x", {"a": torch.ones(2)}), {"constants.pkl": b""})
    with pytest.raises(BadFile, match="TorchScript"):
        torch_zip.read(torch_like)
    with zipfile.ZipFile(torch_like, "a") as archive:
        archive.writestr("other/data.pkl", b"")
    with pytest.raises(BadFile, match=r"2 files named \*/data.pkl"):
        torch_zip.read(torch_like)


def test_a_name_that_stands_twice(tmp_path: Path) -> None:
    path = save(tmp_path / "x", {"a": torch.ones(2)})
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("x/data.pkl", b"")
    with pytest.raises(BadFile, match=r"names 'x/data\.pkl' twice"):
        torch_zip.read(path)


def tensor_pickle(rebuild_arguments: bytes, kind: bytes = b"ctorch\nFloatStorage\n", numel: bytes = b"K\x06") -> bytes:
    """{"a": _rebuild_tensor_v2(storage 0 of `numel`, *rebuild_arguments, False, OrderedDict())} by hand."""
    storage = b"(X\x07\0\0\0storage" + kind + b"X\x01\0\0\x000X\x03\0\0\0cpu" + numel + b"tQ"
    hooks = b"ccollections\nOrderedDict\n)R"
    call = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + rebuild_arguments + b"\x89" + hooks + b"tR"
    return b"\x80\x02}X\x01\0\0\0a" + call + b"s."


FITS = b"K\0K\x02K\x03\x86K\x03K\x01\x86"  # offset 0, shape (2, 3), strides (3, 1)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (tensor_pickle(b"K\x01" + FITS[2:]), "shape (2, 3), strides (3, 1), offset 1 in storage '0' of 6 elements"),
        (tensor_pickle(b"K\0K\x02K\x04\x86K\x03K\x01\x86"), "shape (2, 4)"),
        (tensor_pickle(b"K\0K\x02K\x03\x86K\x04K\x01\x86"), "strides (4, 1)"),
        (tensor_pickle(b"K\0\x8a\x05\0\0\0\0\x01K\x01\x86K\0K\0\x86"), "strides (0, 0)"),
        (tensor_pickle(b"K\0K\x02K\x03\x86J\xff\xff\xff\xffK\x01\x86"), "not a few whole numbers"),
        (tensor_pickle(b"J\xff\xff\xff\xff" + FITS[2:]), "do not fit each other"),
        (tensor_pickle(b"K\0K\x06\x85K\x03K\x01\x86"), "do not fit each other"),
        (tensor_pickle(b"K\0K\x02\x88\x86K\x03K\x01\x86"), "not a few whole numbers"),
        (tensor_pickle(b"K\0" + b"(" + b"K\x01" * 9 + b"t" + b"(" + b"K\x01" * 9 + b"t"), "not a few whole numbers"),
        (tensor_pickle(FITS, numel=b"K\x07"), "has 24 bytes, and 7 elements of F32 are claimed"),
        (tensor_pickle(FITS, numel=b"\x8a\x09\0\0\0\0\0\0\0\x80\0"), "key or size is of the wrong type"),
        (tensor_pickle(FITS, numel=b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"), "9223372036854775807 elements"),
        (tensor_pickle(FITS, kind=b"ccollections\nOrderedDict\n"), "a storage without a type"),
        (tensor_pickle(FITS, kind=b"ctorch\nHalfStorage\n"), "6 elements of F16"),
        (tensor_pickle(FITS).replace(b"cpu", b"c\n\0").replace(b"\x000X", b"\x001X"), "'1' is not in the archive"),
        (b"\x80\x02", "truncated"),
        (b"\x80\x02.", "does not end with one object"),
        (b"\x80\x02}.x", "does not end with one object"),
        (b"\x80\x02(}.", "does not end with one object"),
        (b"\x80\x09}.", "protocol"),
        (b"\x80\x02}0.", "POP"),
        (b"\x80\x02}2.", "DUP"),
        (b"\x80\x02\xff.", "xff"),
        (b"\x80\x04\x8f.", "EMPTY_SET"),
        (b"\x80\x02R.", "empty stack"),
        (b"\x80\x02t.", "a mark that is not there"),
        (b"\x80\x02h\x07.", "object 7, which there is not"),
        (b"\x80\x02q\0.", "empty stack"),
        (b"\x80\x02]s.", "empty stack"),
        (b"\x80\x02NK\x01a.", "appends to a NoneType"),
        (b"\x80\x02](K\x01K\x01u.", "sets items of a list"),
        (b"\x80\x02}(K\x01u.", "a key without a value"),
        (b"\x80\x02}(K\x01NK\x01Nu.", "stands in one mapping twice"),
        (b"\x80\x02}](K\x01e\x85Ns.", "a key of type tuple"),
        (b"\x80\x02}}b]b.", "sets the state of a dict"),
        (b"\x80\x02ccollections\nOrderedDict\n}b.", "sets the state of a Name"),
        (b"\x80\x02}]R.", "calls a dict"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls torch.FloatStorage"),
        (b"\x80\x02ccollections\nOrderedDict\n}\x85R.", "an OrderedDict made from something"),
        (b"\x80\x02ccollections\nOrderedDict\n]R.", "which is nothing to call"),
        (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "a tensor without a storage"),
        (b"\x80\x02ctorch._utils\n_rebuild_parameter\n)R.", "a parameter that is no tensor"),
        (b"\x80\x02NQ.", "names no storage"),
        (b"\x80\x02cbuiltins\neval\n.", "refers to builtins.eval"),
        (b"\x80\x02c__builtin__\neval\n.", "refers to __builtin__.eval"),
        (b"\x80\x02" + b"X\x04\0\0\0a\x1b[mX\x01\0\0\0\n\x93.", r"refers to 'a\x1b[m.\n'"),
        (b"\x80\x02NN\x93.", "a name that is no text"),
        (b"\x80\x02ctorch", "a name without an end"),
        (b"\x80\x02c" + b"x" * 1000, "a name without an end"),
        (b"\x80\x02X\xff\xff\xff\xffabc", "truncated"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\xffabc", "truncated"),
        (b"\x80\x02X\x01\0\0\0\xff.", "can't decode byte 0xff"),
        (b"\x80\x02" + b"]" * 300_000, "more than 250000 instructions"),
        (b"\x80\x02" + b"(" * 300_000, "more than 250000 instructions"),
    ],
)
def test_hand_written_pickles(tmp_path: Path, stream: bytes, message: str) -> None:
    path = rewrite(save(tmp_path / "x", {"a": torch.randn(2, 3)}), {"data.pkl": stream})
    with pytest.raises(BadFile) as caught:
        torch_zip.read(path)
    assert message in str(caught.value)
    assert "zip entry 'x/data.pkl' at byte" in str(caught.value)


def test_the_hand_written_pickle_is_a_good_one_where_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    tensor = torch.randn(2, 3)
    same(rewrite(save(tmp_path / "x", {"a": tensor}), {"data.pkl": tensor_pickle(FITS)}), {"a": tensor})


def test_a_mapping_that_holds_itself(tmp_path: Path) -> None:
    stream = b"\x80\x02}q\0X\x01\0\0\0ah\0s."
    with pytest.raises(BadFile, match="maps 'a' to a dict"):
        torch_zip.read(rewrite(save(tmp_path / "x", {}), {"data.pkl": stream}))


def test_tuples_that_double_their_size_forty_times(tmp_path: Path) -> None:
    stream = b"\x80\x02}X\x01\0\0\0aN\x85" + b"".join(b"q%ch%c\x86" % (i, i) for i in range(40)) + b"s."
    with pytest.raises(BadFile, match="maps 'a' to a tuple"):
        torch_zip.read(rewrite(save(tmp_path / "x", {}), {"data.pkl": stream}))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x")
    assert not torch_zip.detect(tmp_path / "x")
    with pytest.raises(BadFile, match="not a regular file"):
        torch_zip.read(tmp_path / "x")


def test_zip64_sizes(tmp_path: Path) -> None:
    """zipfile writes 64-bit sizes and offsets into extra fields when told that a file may be large."""
    tensor = torch.randn(6)
    path = save(tmp_path / "x", {"a": tensor})
    buffer = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(buffer, "w") as new:
        for name in old.namelist():
            with new.open(name, "w", force_zip64=True) as file:
                file.write(old.read(name))
    path.write_bytes(buffer.getvalue())
    same(path, {"a": tensor})
