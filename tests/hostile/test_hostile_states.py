"""Checkpoints of runs that lie or are broken: refused in one line, soon and without memory, or good to go on from."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import pathlib
import pickle
import pickletools
import random
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mutations import EXTREMES, soon
from tiny import in_memory, random_weights, tiny_config
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.containers import unpickle
from pronk.errors import PronkError
from pronk.torch_engine.backend import load_model
from pronk.train import frozen, lora, optimizers, state
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Example
from pronk.train.loop import Loop
from pronk.train.schedule import Schedule

resource = pytest.importorskip("resource")

CASES = int(os.environ.get("PRONK_HOSTILE_CASES", "3000"))  # of all kinds together
SECONDS, MEGABYTES = 2.0, 300
SETTINGS = {"rate": 1e-3, "lora": {"rank": 2}}
CONFIG = tiny_config(
    vocab_size=512, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=4, max_position_embeddings=16,
)  # fmt: skip
CPU = torch.device("cpu")
KINDS = ["adamw", "adamw8bit", "adafactor", "muon", "sgd", "lora over codes", "scaled"]


def make(kind: str) -> Loop:
    torch.manual_seed(0)
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    codes = frozen.linear(checkpoint, "int8", CPU) if kind == "lora over codes" else None
    model = load_model(checkpoint, CPU, torch.float32, linear=codes)
    if codes:
        lora.add(model, LoraConfig(rank=2))
    examples = [Example(np.arange(3, 8, dtype=np.int32), np.arange(5) > 2) for _ in range(3)]
    name = kind if kind in ("adamw8bit", "adafactor", "muon", "sgd") else "adamw"
    precision: Any = "f16" if kind == "scaled" else "f32"
    optimizer = optimizers.make(model, name, 1e-3, 0.0)
    return Loop(model, examples, Batches([5] * 3), optimizer, Schedule(1e-3, 100), accumulate=2, precision=precision)


class Folder:
    """A good checkpoint, and a copy of it to harm."""

    def __init__(self, good: Path, other: Path, work: Path) -> None:
        self.good, self.other, self.work = good, other, work
        self.files = {path.name: path.read_bytes() for path in good.iterdir()}
        self.data = next(name for name in self.files if name.endswith(".distcp"))
        shutil.copytree(good, work)

    def restore(self) -> None:
        """What a case has left."""
        for path in self.work.iterdir():
            if path.is_symlink() or not path.is_file() or path.name not in self.files:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name, data in self.files.items():
            path = self.work / name
            if not path.exists() or path.stat().st_size != len(data) or path.read_bytes() != data:
                path.write_bytes(data)

    def metadata(self) -> Metadata:
        found: Metadata = pickle.loads(self.files[".metadata"])
        return found

    def write(self, name: str, data: bytes) -> None:
        (self.work / name).write_bytes(data)


def some_bytes(folder: Folder, draw: random.Random) -> None:
    """Of any file; of the data mostly where its archives say of themselves what they are."""
    name = draw.choice([*folder.files])
    data = bytearray(folder.files[name])
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(max(1, len(data)))
        if name == folder.data and draw.random() < 0.8:
            sign = draw.choice([b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07", b"ctorch"])
            found = data.find(sign, at)
            at = (found if found >= 0 else max(0, data.find(sign))) + draw.randrange(80)
        width = draw.choice([1, 2, 4, 8])
        what = draw.choice(["flip", "integer", "integer", "nudge", "cut", "delete", "insert", "copy"])
        if what == "flip" and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif what == "integer":
            value = draw.choice(EXTREMES) & ((1 << 8 * width) - 1)
            data[at : at + width] = value.to_bytes(width, draw.choice(["little", "big"]))  # type: ignore[arg-type]
        elif what == "nudge":
            value = int.from_bytes(data[at : at + width], "little") + draw.randint(-2, 2)
            data[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif what == "cut" and draw.random() < 0.2:
            del data[at:]
        elif what == "delete":
            del data[at : at + draw.randint(1, 64)]
        elif what == "insert":
            data[at:at] = draw.randbytes(draw.randint(1, 32))
        elif what == "copy":
            data[at:at] = data[at - draw.randint(0, 64) : at + draw.randint(0, 64)]
    folder.write(name, bytes(data))


CLASSES = [
    b"cpathlib\nPosixPath\n", b"ctorch\nSize\n", b"ctorch\nfloat32\n", b"cbuiltins\neval\n", b"cos\nsystem\n",
    *(f"ctorch.distributed.checkpoint.{name}\n".encode() for name in (
        "metadata\nMetadata", "metadata\nTensorStorageMetadata", "metadata\nTensorProperties",
        "metadata\n_MEM_FORMAT_ENCODING", "metadata\nBytesStorageMetadata", "filesystem\n_StorageInfo",
    )),
]  # fmt: skip
CHANGES = [
    b"N}X\x06\0\0\0parentNs\x86b", b"}X\x04\0\0\0nameNsb", b"K\x01K\x02s", b"(K\x01K\x02u", b"K\x01a", b"(K\x01e",
    b")\x81", b")R", b"(K\x01tR", b"}b", b"Nb", b"Q", b"0",
]  # fmt: skip


def some_instructions(folder: Folder, draw: random.Random) -> None:
    """Of the pickle: left out, doubled, moved, put in, with classes as what is changed."""
    data = folder.files[".metadata"]
    starts = [at for _, _, at in pickletools.genops(data) if at is not None] + [len(data)]
    pieces = [data[begin:end] for begin, end in pairwise(starts)]
    for _ in range(draw.randint(1, 3)):
        at, other = draw.randrange(2, len(pieces)), draw.randrange(2, len(pieces))
        what = draw.randrange(7)
        if what == 0:
            del pieces[at]
        elif what == 1:
            pieces.insert(at, pieces[other])
        elif what == 2:
            pieces[at], pieces[other] = pieces[other], pieces[at]
        elif what == 3:
            pieces[at] = pieces[other]
        elif what == 4:
            pieces.insert(at, draw.choice(CLASSES) + draw.choice(CHANGES))
        elif what == 5:
            pieces.insert(at, draw.choice(CHANGES))
        else:
            pieces.insert(at, draw.choice(pickletools.opcodes).code.encode("latin-1"))
    folder.write(".metadata", b"".join(pieces))


JUNK: list[Any] = [
    None, True, -1, 0, 1, 2, 3, 1 << 31, 1 << 40, (1 << 63) - 1, 10**30, 0.5, -1e300, 1e300, "", "x", "../x", [], [1],
    {}, {"a": 1}, (), (1,), ((),), "\ud800", "x" * 10_000,
]  # fmt: skip
PATHS = [
    "../x",
    "/etc/passwd",
    "/dev/zero",
    "__0_0.distcp/..",
    "__9_0.distcp",
    ".metadata",
    "position.json",
    "",
    "\0",
    ".",
]


def change(metadata: Metadata, draw: random.Random) -> None:
    """One thing of what a description says."""
    tensors: dict[str, Any] = metadata.state_dict_metadata
    places: dict[Any, Any] = metadata.storage_data
    name, index = draw.choice([*tensors]), draw.choice([*places])
    tensor, place = tensors[name], places[index]
    if not isinstance(tensor, TensorStorageMetadata) or type(tensor.chunks) is not list:
        return
    chunk = draw.choice([*tensor.chunks, tensor])
    size = torch.Size(draw.choice([0, 1, 2, 8, 512, 1 << 20, 1 << 40]) for _ in range(draw.randint(0, 3)))
    junk = draw.choice(JUNK)
    changes: list[Callable[[], object]] = [
        lambda: tensors.update({draw.choice(["x", name + ".x", "random.cpu.1", "random.cuda.0"]): tensor}),
        lambda: tensors.pop(name),
        lambda: tensors.update({draw.choice([*tensors]): tensor}),
        lambda: tensors.update({name: draw.choice([BytesStorageMetadata(), junk])}),
        lambda: setattr(tensor, draw.choice(["size", "properties", "chunks"]), draw.choice([junk, size])),
        lambda: setattr(tensor, "size", size),
        lambda: setattr(tensor.properties, "dtype", draw.choice([torch.uint8, torch.int8, torch.float64, junk])),
        lambda: setattr(chunk, draw.choice(["offsets", "sizes"]), draw.choice([size, size, junk])),
        lambda: tensor.chunks.extend(draw.choice([*tensors.values()]).chunks),
        lambda: tensor.chunks.clear(),
        lambda: places.pop(index),
        lambda: places.update({index: places[draw.choice([*places])]}),
        lambda: places.update({junk if not isinstance(junk, list | dict) else 0: place}),
        lambda: setattr(place, "relative_path", draw.choice(PATHS)),
        lambda: setattr(place, "offset", draw.choice(EXTREMES)),
        lambda: setattr(place, "length", draw.choice(EXTREMES)),
        lambda: setattr(place, draw.choice(["relative_path", "offset", "length", "transform_descriptors"]), junk),
        lambda: setattr(
            metadata, draw.choice(["state_dict_metadata", "storage_data", "planner_data", "storage_meta"]), junk
        ),
    ]
    with contextlib.suppress(AttributeError):  # an earlier change has left nothing to change
        draw.choice(changes)()


def what_it_says(folder: Folder, draw: random.Random) -> None:
    """The pickle of another description: names, shapes, types, parts and places changed."""
    metadata = folder.metadata()
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        if all(type(of) is dict and of for of in (metadata.state_dict_metadata, metadata.storage_data)):
            change(metadata, draw)
    folder.write(".metadata", pickle.dumps(metadata, protocol=draw.randint(2, 5)))


def position(folder: Folder, draw: random.Random) -> None:
    raw = json.loads(folder.files["position.json"])
    for _ in range(draw.choice([1, 1, 2])):
        parent = raw
        while True:
            if not isinstance(parent, dict | list) or not parent:
                break
            key: Any = draw.choice([*parent]) if isinstance(parent, dict) else draw.randrange(len(parent))
            if isinstance(parent[key], dict | list) and draw.random() < 0.8:
                parent = parent[key]
                continue
            what = draw.randrange(5)
            if what == 0:
                del parent[key]
            elif what == 1 and isinstance(parent, dict):
                parent[draw.choice(["x", "", "step", "losses"])] = draw.choice(JUNK)
            elif what == 2 and type(parent[key]) in (int, float):
                parent[key] += draw.choice([-1, 1, 0.5, 1e-3])
            elif what == 3:
                parent[key] = draw.choice([float("nan"), float("inf")])
            else:
                parent[key] = draw.choice(JUNK)
            break
    folder.write("position.json", json.dumps(raw).encode())


def files(folder: Folder, draw: random.Random) -> None:
    """Gone, short, empty, another's, or no file at all."""
    name = draw.choice([*folder.files])
    path, data = folder.work / name, folder.files[name]
    what = draw.randrange(7)
    if what == 0:
        path.write_bytes(data[: draw.randrange(len(data))])
    elif what == 1:
        path.write_bytes((folder.other / name).read_bytes())
    elif what == 2:
        path.write_bytes(folder.files[draw.choice([*folder.files])])
    elif what == 3:
        path.write_bytes(data + draw.randbytes(draw.randint(1, 100)))
    else:
        path.unlink()
        if what == 4:
            path.mkdir()
        elif what == 5:
            os.mkfifo(path)
        elif draw.random() < 0.5:
            path.symlink_to("/dev/zero")


class Escape:
    def __reduce__(self) -> Any:
        return (os.mkdir, ("escaped",))


def forged(draw: random.Random, like: torch.Tensor) -> bytes:
    """What might stand where one tensor is to be."""
    out = io.BytesIO()
    wrong: list[Callable[[], Any]] = [
        lambda: like.to(draw.choice([torch.float64, torch.int32, torch.float16, torch.uint8])),
        lambda: torch.zeros(draw.choice([(), (0,), (3,), (1 << 10,), tuple(like.shape)[::-1]])),
        lambda: torch.zeros(1, dtype=like.dtype).expand(1 << draw.choice([10, 30, 40])),
        lambda: torch.zeros((), dtype=like.dtype).expand(like.shape),
        lambda: {"a": like},
        lambda: [like] * 3,
        Escape,
        lambda: like.float().to_sparse(),
        lambda: torch.full_like(like.float(), draw.choice([float("nan"), float("inf"), -1.0, 1e38, 0.0])),
        lambda: torch.full_like(like, draw.choice([0, 1, 100])),
        lambda: torch.nn.Parameter(like.float()),
        lambda: like.t() if like.ndim == 2 else like,
    ]
    made = draw.choice(wrong)()
    torch.save(made, out, _use_new_zipfile_serialization=draw.random() < 0.9)
    if draw.random() < 0.1:  # a bomb: an archive whose entries are packed
        packed = io.BytesIO()
        with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("archive/data.pkl", b"\x80\x02N.")
            archive.writestr("archive/data/0", bytes(1 << 20))
        return packed.getvalue()
    return out.getvalue()


def pieces(folder: Folder, draw: random.Random) -> None:
    """Of the data: another thing, where a tensor was."""
    metadata = folder.metadata()
    data = folder.files[folder.data]
    for index in draw.sample([*metadata.storage_data], draw.choice([1, 1, 3])):
        place = metadata.storage_data[index]
        like = torch.load(io.BytesIO(folder.files[folder.data][place.offset : place.offset + place.length]))
        made = forged(draw, like)
        place.offset, place.length = len(data), len(made)
        data += made
    folder.write(folder.data, data)
    folder.write(".metadata", pickle.dumps(metadata))


HARMS = [some_bytes, some_instructions, what_it_says, position, files, pieces]
SHARES = [3, 3, 4, 2, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_refused_or_good_to_go_on_from(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps what torch logs
    monkeypatch.chdir(tmp_path)
    loop, another = make(kind), make("lora over codes" if kind != "lora over codes" else "adamw")
    for one in (loop, another):
        while one.position.step < 3:
            one.step()
    good = state.save(loop, tmp_path / "good", SETTINGS)
    other = state.save(another, tmp_path / "other", SETTINGS)
    folder = Folder(good, other, tmp_path / "harmed" / good.name)
    state.load(loop, folder.work, SETTINGS)
    before, classes = memory(), {name: dict(vars(kind)) for name, kind in vars(pathlib).items() if type(kind) is type}
    outcomes: Counter[str] = Counter()
    for number in range(CASES // len(KINDS)):
        draw = random.Random(f"{kind} {number}")
        harm = draw.choices(HARMS, SHARES)[0]
        folder.restore()
        harm(folder, draw)
        try:
            with soon(SECONDS):
                outcomes[f"{harm.__name__}: {outcome(loop, folder.work)}"] += 1
        except BaseException as error:
            raise AssertionError(f"case {number} of {kind}, {harm.__name__}") from error
        assert memory() - before < MEGABYTES, (number, harm)
    print(dict(outcomes), f"{memory() - before:.0f} MB", file=sys.stderr)
    assert not Path("escaped").exists()
    assert classes == {name: dict(vars(kind)) for name, kind in vars(pathlib).items() if type(kind) is type}
    for harm in HARMS:
        assert outcomes[f"{harm.__name__}: refused"] >= outcomes.total() // 50
    assert sum(count for name, count in outcomes.items() if name.endswith("accepted")) > outcomes.total() // 50


def outcome(loop: Loop, folder: Path) -> str:
    try:
        state.load(loop, folder, SETTINGS)
    except PronkError as error:
        message = str(error).encode()  # no lone surrogates, so that it can be printed
        assert b"\n" not in message
        assert len(message) < 2500
        return "refused"
    held = {parameter: {*found} for parameter, found in loop.optimizer.state.items()}
    assert loop.position.step == 3
    try:
        loop.step()
    except PronkError:  # numbers that nobody could have known for wrong
        return "accepted, and broken"
    assert {parameter: {*found} for parameter, found in loop.optimizer.state.items()} == held
    return "accepted"


def memory() -> float:
    """The most so far, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 10)


META = b"ctorch.distributed.checkpoint.metadata\nStorageMeta\n"
BOMBS: dict[str, tuple[bytes, bytes]] = {  # what stands once, and what follows as often as there is room
    "dicts": (b"", b"}"),
    "memos": (b"", b"}\x94"),
    "records": (META + b"\x94", b"h\0)\x81"),
    "names": (b"", META),
}
PROGRAM = """
import re, sys, time
from pathlib import Path
from pronk.train.state_reader import Reader
peak = lambda: int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) / 1024
before, started = peak(), time.process_time()
try: Reader(Path(sys.argv[1]))
except ValueError as error: print(len(str(error)), time.process_time() - started, peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", BOMBS)
def test_a_description_made_to_be_dear(name: str, tmp_path: Path) -> None:
    first, then = BOMBS[name]
    stream = b"\x80\x04" + first + then * ((unpickle.MAX_BYTES - 2 - len(first)) // len(then))
    (tmp_path / ".metadata").write_bytes(stream)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    result = subprocess.run(program, capture_output=True, text=True, check=True)
    length, seconds, megabytes = map(float, result.stdout.split())
    print(name, seconds, megabytes, file=sys.stderr)
    assert length < 300
    assert seconds < 30
    assert megabytes < 500
