"""torch archives and Meta's folders that lie: one error of pronk's own each, fast and without memory; nothing runs.

Lies told one at a time, each with its message, are in tests/checkpoint; here they are told at random and in bulk.
"""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import save_huggingface, save_meta
from mutations import outcome, survives
from tiny import random_weights, tiny_config

from pronk import checkpoint
from pronk.checkpoint.containers import torch_zip
from pronk.errors import BadFile

CONFIG = tiny_config(
    vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    head_dim=4,
)  # fmt: skip
WEIGHTS = random_weights(CONFIG)
EXAMPLES = 1000


def damaged(
    folder: Path, valid: bytes, write: Callable[[bytes], object], header: int = 0, examples: int = EXAMPLES
) -> Counter:
    """Break `valid` at random, write each version into a good folder; how often each outcome came."""
    write(valid)
    assert outcome(folder) == "read"
    outcomes: Counter = Counter()

    def check(data: bytes) -> None:
        write(data)
        outcomes[outcome(folder)] += 1

    assert survives(examples, [(valid, header or len(valid))], check) >= examples
    assert outcomes["BadFile"] > examples / 4, outcomes
    return outcomes


def the_pickle(path: Path) -> bytes:
    with zipfile.ZipFile(path) as archive:
        return next(archive.read(name) for name in archive.namelist() if name.endswith("/data.pkl"))


def repack(path: Path, pickled: bytes) -> None:
    """The same archive with another pickle."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, pickled if name.endswith("/data.pkl") else data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_meta(tmp_path / "model", CONFIG, WEIGHTS, 2)


def test_truncated_anywhere(folder: Path) -> None:
    """An archive's directory is at its end, so that none of it is left when any byte is missing."""
    file = folder / "consolidated.01.pth"
    whole = file.read_bytes()
    for length in range(0, len(whole), 7):
        file.write_bytes(whole[:length])
        with pytest.raises(BadFile, match=r"consolidated\.01\.pth"):
            checkpoint.open(folder)


def test_every_byte_of_the_directory_changed(folder: Path) -> None:
    file = folder / "consolidated.01.pth"
    whole = file.read_bytes()
    start = whole.index(b"PK\x01\x02")
    outcomes: Counter = Counter()
    for at in range(start, len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 0xFF
        file.write_bytes(changed)
        outcomes[outcome(folder)] += 1
    assert outcomes.keys() == {"read", "BadFile"}  # dates and checksums do not matter


def test_pickle_truncated_at_every_byte(folder: Path) -> None:
    file = folder / "consolidated.01.pth"
    whole = the_pickle(file)
    for length in range(len(whole)):
        repack(file, whole[:length])
        with pytest.raises(BadFile, match=r"consolidated\.01\.pth: zip entry '.*/data\.pkl' at byte"):
            checkpoint.open(folder)


def test_random_damage_to_an_archive(folder: Path) -> None:
    file = folder / "consolidated.00.pth"
    outcomes = damaged(folder, file.read_bytes(), file.write_bytes)
    assert outcomes["read"] > EXAMPLES / 100, outcomes  # damage to the numbers alone goes unnoticed, as it must


def test_random_damage_to_the_directory(folder: Path) -> None:
    file = folder / "consolidated.00.pth"
    whole = file.read_bytes()
    start = whole.index(b"PK\x01\x02")
    damaged(folder, whole[start:], lambda tail: file.write_bytes(whole[:start] + tail))


def test_random_damage_to_the_pickle(folder: Path) -> None:
    file = folder / "consolidated.00.pth"
    whole = the_pickle(file)
    damaged(folder, whole, lambda data: repack(file, data))


def test_random_damage_to_params(folder: Path) -> None:
    file = folder / "params.json"
    damaged(folder, file.read_bytes(), file.write_bytes)


def test_random_damage_to_a_pytorch_bin(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path, CONFIG, WEIGHTS, container="bin")
    file = folder / "pytorch_model.bin"
    damaged(folder, file.read_bytes(), file.write_bytes)


class Calls:
    """Pickles as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


def attacks(target: Path) -> dict[str, Any]:
    import builtins
    import os
    import shutil

    return {
        "os.system": Calls(os.system, f"touch {target}"),
        "exec": Calls(exec, f"open({str(target)!r}, 'w')"),
        "eval": Calls(eval, f"open({str(target)!r}, 'w')"),
        "open": Calls(builtins.open, str(target), "w"),
        "Popen": Calls(subprocess.Popen, ["touch", str(target)]),
        "run": Calls(subprocess.run, ["touch", str(target)]),
        "rmtree": Calls(shutil.copy, __file__, str(target)),
        "getattr": Calls(getattr, Calls(__import__, "os"), "system"),
        "torch.load": Calls(torch.load, str(target)),
        "pickle.loads": Calls(pickle.loads, pickle.dumps(Calls(os.system, f"touch {target}"))),
    }


@pytest.mark.parametrize("name", attacks(Path()))
@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_pickle_does_not_run(folder: Path, tmp_path: Path, name: str, protocol: int) -> None:
    state = torch.load(folder / "consolidated.01.pth")
    state["norm.weight"] = attacks(tmp_path / "ran")[name]
    torch.save(state, folder / "consolidated.01.pth", pickle_protocol=protocol)
    with pytest.raises(BadFile, match=r"consolidated\.01\.pth: .* at byte \d+: .*which a checkpoint has no need of"):
        checkpoint.open(folder)
    assert not (tmp_path / "ran").exists()


def craft(path: Path, records: list[tuple[bytes, bytes]], directory: bytes, count: int | None = None) -> Path:
    """A zip of local (header, data) records and any directory."""
    body = b"".join(header + data for header, data in records)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0, 0, len(directory), len(body), 0)
    if count is not None:
        end = end[:8] + struct.pack("<2H", count & 0xFFFF, count & 0xFFFF) + end[12:]
    path.write_bytes(body + directory + end)
    return path


def local(name: bytes, size: int) -> bytes:
    return struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 0, 0, size, size, len(name), 0) + name


def central(name: bytes, size: int, offset: int, packed: int | None = None, method: int = 0, flags: int = 0) -> bytes:
    packed = size if packed is None else packed
    fields = (b"PK\x01\x02", 20, 20, flags, method, 0, 0, 0, packed, size, len(name), 0, 0, 0, 0, 0, offset)
    return struct.pack("<4s6H3I5H2I", *fields) + name


NAME = b"x/data.pkl"
EMPTY = b"\x80\x02}."  # an empty dict


def test_the_crafted_archive_is_a_good_one_where_nothing_is_wrong_with_it(tmp_path: Path) -> None:
    path = craft(tmp_path / "x", [(local(NAME, 4), EMPTY)], central(NAME, 4, 0), 1)
    assert torch_zip.read(path) == {}


@pytest.mark.parametrize(
    ("directory", "count", "message"),
    [
        (central(NAME, 4, 0), 0, "46 bytes after|56 bytes after"),
        (central(NAME, 4, 0), 2, "truncated"),
        (central(NAME, 4, 0), 65535, "truncated"),
        (central(NAME, 4, 1), 1, "no local header"),
        (central(NAME, 4, 40), 1, "lies outside|no local header"),
        (central(NAME, 4, 0xFFFFFFFE), 1, "lies outside"),
        (central(NAME, 4, 0xFFFFFFFF), 1, "Zip64 size is missing"),
        (central(NAME, 0xFFFFFFFE, 0), 1, "run into the directory"),
        (central(NAME, 0xFFFFFFFF, 0), 1, "Zip64 size is missing"),
        (central(NAME, 5, 0), 1, "run into the directory"),
        (central(NAME, 4, 0, packed=3), 1, "compressed or encrypted"),
        (central(NAME, 4, 0, method=8), 1, "compressed or encrypted"),
        (central(NAME, 4, 0, flags=1), 1, "compressed or encrypted"),
        (central(b"y/data.pkl", 4, 0), 1, "no local header of that name"),
        (central(b"\xff/data.pkl", 4, 0), 1, "not UTF-8"),
        (central(NAME, 4, 0) * 2, 2, "twice"),
        (b"x" * 56, 1, "no entry where one should be"),
    ],
)
def test_directories_that_lie(tmp_path: Path, directory: bytes, count: int, message: str) -> None:
    path = craft(tmp_path / "x", [(local(NAME, 4), EMPTY)], directory, count)
    with pytest.raises(BadFile, match=message):
        torch_zip.read(path)


def test_entries_that_overlap(tmp_path: Path) -> None:
    """One entry inside another's data, as in zip bombs that need no compression to speak of."""
    inner = local(b"x/data/0", 2) + b"ab"
    outer = (local(b"x/data/1", len(inner)), inner)
    at = len(local(b"x/data/1", 0))
    directory = central(b"x/data/1", len(inner), 0) + central(b"x/data/0", 2, at)
    with pytest.raises(BadFile, match="'x/data/0' at byte 38: overlaps the entry before it"):
        torch_zip.read(craft(tmp_path / "x", [outer], directory, 2))


def test_a_directory_of_a_million_entries(tmp_path: Path) -> None:
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 20, 1 << 20, 46 << 20, 0)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, 46 << 20, 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "x").write_bytes(b"\0" * (46 << 20) + end64 + locator + end)
    with pytest.raises(BadFile, match=r"zip directory at byte 0: .* more than 32768 zip entries"):
        torch_zip.read(tmp_path / "x")


@pytest.mark.parametrize("value", [1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
@pytest.mark.parametrize("field", range(3))
def test_64_bit_sizes_that_lie(tmp_path: Path, value: int, field: int) -> None:
    """Of the directory: number of entries, size, start."""
    values = [1, 56, 44]
    values[field] = value
    body = local(NAME, 4) + EMPTY + central(NAME, 4, 0)
    end64 = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, values[0], *values)
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, len(body), 1)
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    (tmp_path / "x").write_bytes(body + end64 + locator + end)
    with pytest.raises(BadFile, match="zip directory"):
        torch_zip.read(tmp_path / "x")
    good = struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 1, 1, 56, 44)
    (tmp_path / "x").write_bytes(body + good + locator + end)
    assert torch_zip.read(tmp_path / "x") == {}


PICKLE_BOMBS = {
    "dicts": b"\x80\x02" + b"}" * 16_000_000,
    "marks": b"\x80\x02" + b"(" * 16_000_000,
    "memos": b"\x80\x02}" + b"".join(b"r" + struct.pack("<I", i) for i in range(240_000)),
    "names": b"\x80\x02" + b"ctorch\nFloatStorage\n" * 240_000 + b".",
    "storages": b"\x80\x02(X\x07\0\0\0storagectorch\nFloatStorage\nX\1\0\0\x000X\0\0\0\0K\0tq\0" + b"h\0Q" * 120_000,
    "doubling tuples": b"\x80\x02Nq\0" + b"".join(b"h%ch%c\x86q%c" % (i, i, i + 1) for i in range(200)) + b".",
    "wide text": b"\x80\x02X" + struct.pack("<I", 15_000_004) + b"a" * 15_000_000 + "\U0001f600".encode() + b".",
    "long names": b"\x80\x02" + b"c" + b"a" * 16_000_000,
    "long integers": b"\x80\x02" + (b"\x8a\xff" + b"\x7f" * 255) * 60_000 + b".",
    "too long": b"\x80\x02" + b"N" * (17 << 20),
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_takes_200_megabytes_or_a_second(tmp_path: Path) -> None:
    """In a process of its own, whose peak resident size covers all of them; tracemalloc would slow it down."""
    files = []
    for name, stream in PICKLE_BOMBS.items():
        files.append(tmp_path / name.replace(" ", "-"))
        torch.save({"a": torch.zeros(0)}, files[-1])
        repack(files[-1], stream)
    many = tmp_path / "many-entries"
    with zipfile.ZipFile(many, "w") as archive:
        for i in range(65_000):
            archive.writestr(f"x/data/{i}", b"")
    files.append(many)
    program = (
        "import re, sys, time; from pathlib import Path; from pronk.errors import BadFile\n"
        "from pronk.checkpoint.containers import torch_zip\n"
        "for path in sys.argv[1:]:\n"
        "    started = time.process_time()\n"
        "    try: torch_zip.read(Path(path)); print('opened', path)\n"
        "    except BadFile as error: assert len(str(error)) < 600\n"
        "    if time.process_time() - started > 2: print('slow', path, time.process_time() - started)\n"
        "    peak = int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) // 1024\n"
        "    if peak > 200: print('large', path, peak)\n"
    )
    result = subprocess.run([sys.executable, "-c", program, *files], capture_output=True, text=True, check=True)
    assert result.stdout == ""


def test_a_tensor_larger_than_its_file_allocates_nothing(tmp_path: Path) -> None:
    """An expanded tensor: one number, repeated by strides of zero. torch writes such files itself."""
    torch.save({"a": torch.zeros(1).expand(1 << 40)}, tmp_path / "x")
    assert (tmp_path / "x").stat().st_size < 2000
    with pytest.raises(BadFile, match=r"shape \(1099511627776,\), strides \(0,\)"):
        torch_zip.read(tmp_path / "x")


def test_params_of_the_largest_sizes_allocate_nothing(folder: Path) -> None:
    params = json.loads((folder / "params.json").read_text())
    for key in ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "multiple_of", "max_seq_len"):
        for value in (1 << 20, 1 << 31, 1 << 40, 1 << 63, 10**39):
            (folder / "params.json").write_text(json.dumps(params | {key: value}))
            assert outcome(folder) in ("BadFile", "read" if key == "max_seq_len" else "BadFile")
