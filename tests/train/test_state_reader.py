"""Checkpoints of a run are files, too: what hides in one is not run, and what does not fit is refused."""

from __future__ import annotations

import io
import json
import pickle
import shutil
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import in_memory, random_weights, tiny_config
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from pronk.errors import BadFile
from pronk.torch_engine.backend import load_module
from pronk.train import optimizers, state
from pronk.train.data.batches import Batches
from pronk.train.data.examples import Example
from pronk.train.folder import read_metrics
from pronk.train.loop import Loop, Precision
from pronk.train.schedule import Schedule


def make(kind: str = "adamw", precision: Precision = "f32") -> Loop:
    config = tiny_config()
    model = load_module(in_memory(config, random_weights(config)))
    examples = [Example(np.arange(3, 12, dtype=np.int32), np.arange(9) > 2)]
    optimizer = optimizers.make(model, kind, 1e-3, 0.0)
    return Loop(model, examples, Batches([9]), optimizer, Schedule(1e-3, 3), precision=precision)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loop = make()
    loop.step()
    return state.save(loop, tmp_path_factory.mktemp("run"), {})


class Escape:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return (Path.touch, (self.proof,))


def read(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def escape(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Escape(folder / "proof")))


def escape_in_bytes(folder: Path) -> None:
    """As an entry that torch would load without weights_only."""
    metadata = read(folder)
    name = next(iter(metadata.state_dict_metadata))
    metadata.state_dict_metadata[name] = BytesStorageMetadata()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def huge(folder: Path) -> None:
    metadata = read(folder)
    name = next(name for name in metadata.state_dict_metadata if name.endswith("exp_avg"))
    metadata.state_dict_metadata[name].size = torch.Size([1 << 40])  # type: ignore[union-attr]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def not_a_checkpoint(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"a": 1}))


def cut(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:5000])


def no_parts(folder: Path) -> None:
    for file in folder.glob("*.distcp"):
        file.unlink()


def escape_in_parts(folder: Path) -> None:
    """Where torch, reading with weights_only, would tell whoever asks to read without."""
    (file,) = folder.glob("*.distcp")
    file.write_bytes(pickle.dumps(Escape(folder / "proof")).ljust(1 << 16, b"\0"))


@pytest.mark.parametrize("harm", [escape, escape_in_bytes, escape_in_parts, huge, not_a_checkpoint, cut, no_parts])
def test_refused_in_one_line(whole: Path, tmp_path: Path, harm: Callable[[Path], None]) -> None:
    folder = tmp_path / "step-000001"
    shutil.copytree(whole, folder)
    harm(folder)
    with pytest.raises(BadFile, match=r"no checkpoint of this run: [\w/]") as caught:
        state.load(make(), folder, {})
    assert "weights_only" not in str(caught.value)
    assert not (folder / "proof").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"step": "x"},
        {"step": -1},
        {"step": 2},  # of a folder that was renamed
        {"at": 99},
        {"at": -3},
        {"epoch": 1.5},
        {"waited": None},
        {"best": "x"},
        {"losses": [None] * 20},
        {"losses": "abc"},
        {"losses": [1.0] * 2},  # more than steps
        {"epoch": 10**30},
        {"more": 1},
        {"kept": 1},
        {"kept": {"line": {"step": 1, "held_out_loss": 1.0}}},
        {"kept": {"line": {"step": 1, "held_out_loss": 1.0}, "digest": 5}},
        {"kept": {"line": {"step": 1, "held_out_loss": "1"}, "digest": "a"}},
        {"kept": {"line": {"step": 1, "held_out_loss": None}, "digest": "a"}},
        {"kept": {"line": {"step": 2, "held_out_loss": 1.0}, "digest": "a"}},
        {"kept": {"line": [], "digest": "a"}},
    ],
)
def test_a_damaged_position_is_refused_in_one_line(whole: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    folder = tmp_path / "step-000001"
    shutil.copytree(whole, folder)
    path = folder / "position.json"
    raw = json.loads(path.read_text())
    raw["position"] |= change
    path.write_text(json.dumps(raw))
    with pytest.raises(BadFile, match=r"no checkpoint of this run: \w"):
        state.load(make(), folder, {})


@pytest.mark.parametrize("name", ["step", "losses", "best"])
def test_a_position_that_is_not_whole_is_refused(whole: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "step-000001"
    shutil.copytree(whole, folder)
    raw = json.loads((folder / "position.json").read_text())
    del raw["position"][name]
    (folder / "position.json").write_text(json.dumps(raw))
    with pytest.raises(BadFile, match="its position is not whole"):
        state.load(make(), folder, {})


@pytest.mark.parametrize(
    "change",
    [
        {"scale": "x"}, {"scale": 0}, {"scale": -1.0}, {"scale": 1e300}, {"growth_factor": "x"}, {"growth_interval": 0},
        {"_growth_tracker": 10**30}, {"_growth_tracker": -1}, {"_growth_tracker": None}, {"more": 1},
    ],
)  # fmt: skip
def test_a_damaged_scaler_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    """GradScaler takes everything, and fails in the midst of a step."""
    loop = make(precision="f16")
    loop.step()
    folder = state.save(loop, tmp_path, {})
    state.load(make(precision="f16"), folder, {})
    raw = json.loads((folder / "position.json").read_text())
    raw["scaler"] |= change
    (folder / "position.json").write_text(json.dumps(raw))
    with pytest.raises(BadFile, match=r"no checkpoint of this run: its (scale|number of steps)"):
        state.load(make(precision="f16"), folder, {})


CLASS = b"\x80\x02cpathlib\nPosixPath\n"
MARKED = b"X\x06\0\0\0marked"
CHANGES = {
    "BUILD": (CLASS + b"N}" + MARKED + b"K\x01s\x86b.", "sets the state of a Name"),
    "SETITEM": (CLASS + MARKED + b"K\x01s.", "sets items of a Name"),
    "SETITEMS": (CLASS + b"(" + MARKED + b"K\x01u.", "sets items of a Name"),
    "APPEND": (CLASS + b"K\x01a.", "appends to a Name"),
    "APPENDS": (CLASS + b"(K\x01e.", "appends to a Name"),
    "NEWOBJ": (CLASS + b")\x81.", r"makes an object of pathlib\.PosixPath"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_no_class_is_changed(whole: Path, tmp_path: Path, name: str) -> None:
    """BUILD with a state of slots set attributes of PosixPath itself, for all of the process."""
    folder = tmp_path / "step-000001"
    shutil.copytree(whole, folder)
    written, message = CHANGES[name]
    (folder / ".metadata").write_bytes(written)
    with pytest.raises(BadFile, match=rf"no checkpoint of this run: its .metadata, at byte \d+: {message}"):
        state.load(make(), folder, {})
    assert not hasattr(Path, "marked")


def test_the_change_would_have_worked() -> None:
    class Victim:
        marked = 0

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            return Victim

    Unpickler(io.BytesIO(CHANGES["BUILD"][0])).load()
    assert Victim.marked == 1


PARAMETER = "model.embed_tokens.weight"
KEYS = {
    "adamw": "exp_avg", "adamw8bit": "second_scale", "adafactor": "col_var", "muon": "exp_avg",
    "sgd": "momentum_buffer",
}  # fmt: skip
WRONG: dict[str, Callable[[dict[str, Any], str], object]] = {
    f"optimizer.{PARAMETER}.KEY is absent": lambda held, key: held.pop(key),
    "optimizer.*KEY is torch.float32 of shape .* and in this run torch.float32 of": lambda held, key: held.update(
        {key: held[key].reshape(-1)[:-1]}
    ),
    "optimizer.*KEY is torch.bfloat16 of": lambda held, key: held.update({key: held[key].bfloat16()}),
    "refers to torch.float64": lambda held, key: held.update({key: held[key].double()}),
    "optimizer.*more' is no part of this run": lambda held, key: held.update(more=held[key]),
    "KEY' holds a number that it cannot hold": lambda held, key: held[key].view(-1)[0].fill_(torch.nan),
    "holds a number that it cannot hold": lambda held, key: held[key].view(-1)[0].fill_(-torch.inf),
}


@pytest.mark.parametrize("message", WRONG)
@pytest.mark.parametrize("kind", KEYS)
def test_an_optimizers_state_is_held_against_the_optimizer(tmp_path: Path, kind: str, message: str) -> None:
    """Each came as a traceback out of the next step, or as a state that was no longer the optimizer's."""
    loop = make(kind)
    loop.step()
    state.load(again := make(kind), state.save(loop, tmp_path, {}), {})
    again.step()
    WRONG[message](loop.optimizer.state[loop.model.get_parameter(PARAMETER)], KEYS[kind])
    folder = state.save(loop, tmp_path, {})
    with pytest.raises(BadFile, match=rf"no checkpoint of this run: .*{message.replace('KEY', KEYS[kind])}"):
        state.load(make(kind), folder, {})


@pytest.mark.parametrize("kind", KEYS)
def test_a_parameter_without_state_is_refused(tmp_path: Path, kind: str) -> None:
    loop = make(kind)
    loop.step()
    loop.optimizer.state.pop(loop.model.get_parameter(PARAMETER))
    folder = state.save(loop, tmp_path, {})
    with pytest.raises(BadFile, match=rf"optimizer\.{PARAMETER}\.\w+ is absent"):
        state.load(make(kind), folder, {})
    loop.optimizer.state.clear()
    folder = state.save(loop, tmp_path, {})
    with pytest.raises(BadFile, match="the optimizer's state is absent"):
        state.load(make(kind), folder, {})


@pytest.mark.parametrize("kind", ["adamw", "adamw8bit", "adafactor", "muon"])
@pytest.mark.parametrize("steps", [-1.0, 0.5, 2.0, 1e30, float("inf"), float("nan")])
def test_steps_that_cannot_be_counted_are_refused(tmp_path: Path, kind: str, steps: float) -> None:
    """-1 divided by zero, and the others by what is no number."""
    loop = make(kind)
    loop.step()
    loop.optimizer.state[loop.model.get_parameter(PARAMETER)]["step"].fill_(steps)
    folder = state.save(loop, tmp_path, {})
    with pytest.raises(BadFile, match=r"holds a number that it cannot hold|the optimizer has made \S+ steps of 1"):
        state.load(make(kind), folder, {})


@pytest.mark.parametrize(
    ("kind", "key"), [("adamw", "exp_avg_sq"), ("adamw8bit", "second_scale"), ("adafactor", "row_var")]
)
def test_a_second_moment_below_0_is_refused(tmp_path: Path, kind: str, key: str) -> None:
    loop = make(kind)
    loop.step()
    loop.optimizer.state[loop.model.get_parameter(PARAMETER)][key].view(-1)[3] = -1.0
    folder = state.save(loop, tmp_path, {})
    with pytest.raises(BadFile, match=f"{key}' holds a number that it cannot hold"):
        state.load(make(kind), folder, {})


def place(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data.values()))


def tensor(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata[f"trained.{PARAMETER}"]


LIES: dict[str, Callable[[Metadata], object]] = {
    "puts .* into '../x', and no process": lambda metadata: setattr(place(metadata), "relative_path", "../x"),
    "puts .* into '/etc/passwd'": lambda metadata: setattr(place(metadata), "relative_path", "/etc/passwd"),
    "puts .* into 'a/__0_0.distcp'": lambda metadata: setattr(place(metadata), "relative_path", "a/__0_0.distcp"),
    "__9_0.distcp: is absent": lambda metadata: setattr(place(metadata), "relative_path", "__9_0.distcp"),
    r"beyond the \d+ bytes": lambda metadata: setattr(place(metadata), "offset", 1 << 62),
    r"puts .* beyond": lambda metadata: setattr(place(metadata), "offset", -1),
    "length that is no int": lambda metadata: setattr(place(metadata), "length", 5.0),
    "has no place for": lambda metadata: setattr(place(metadata), "length", 10),
    "form of its own": lambda metadata: setattr(place(metadata), "transform_descriptors", ["zip"]),
    "does not cut": lambda metadata: tensor(metadata).chunks.clear(),
    "into rows that follow": lambda metadata: tensor(metadata).chunks.append(tensor(metadata).chunks[0]),
    "rows that follow each other": lambda metadata: setattr(tensor(metadata).chunks[0], "sizes", torch.Size([3])),
    "a size of what is no number": lambda metadata: setattr(tensor(metadata), "size", torch.Size([-1])),
    "refers to torch.float64": lambda metadata: setattr(tensor(metadata).properties, "dtype", torch.float64),
    "is torch.uint8 of shape": lambda metadata: setattr(tensor(metadata).properties, "dtype", torch.uint8),
    "has no place": lambda metadata: metadata.storage_data.clear(),
    "absent": lambda metadata: metadata.state_dict_metadata.pop(f"trained.{PARAMETER}"),
    "storage_data that is no dict": lambda metadata: setattr(metadata, "storage_data", None),
}


@pytest.mark.parametrize("message", LIES)
def test_a_description_that_lies_is_refused(whole: Path, tmp_path: Path, message: str) -> None:
    folder = tmp_path / "step-000001"
    shutil.copytree(whole, folder)
    metadata = read(folder)
    LIES[message](metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadFile, match=f"no checkpoint of this run: .*{message}"):
        state.load(make(), folder, {})


@pytest.mark.parametrize(
    "value",
    [torch.zeros(1).expand(1 << 40), torch.zeros(96, 64).to_sparse(), {"a": torch.zeros(96, 64)}, torch.zeros(64, 96)],
)
def test_a_piece_that_is_another_thing_is_refused_before_it_is_made(whole: Path, tmp_path: Path, value: Any) -> None:
    """torch.load makes of a kilobyte whatever it claims to be."""
    folder = tmp_path / "step-000001"
    shutil.copytree(whole, folder)
    metadata, file, made = read(folder), next(folder.glob("*.distcp")), io.BytesIO()
    torch.save(value, made)
    start = file.stat().st_size
    file.write_bytes(file.read_bytes() + made.getvalue().ljust(1 << 15, b"\0"))
    there = next(there for index, there in metadata.storage_data.items() if index.fqn == f"trained.{PARAMETER}")
    there.offset, there.length = start, 1 << 15 if len(made.getvalue()) < 1 << 15 else len(made.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadFile, match=f"no checkpoint of this run: __0_0.distcp: 'trained.{PARAMETER}'"):
        state.load(make(), folder, {})


@pytest.mark.parametrize(
    "line",
    [
        b"5",
        b"{}",
        b'{"step": "x"}',
        b'{"step": 1e999}',
        b'{"step": 2, "loss": "x"}',
        b'{"step": 2, "loss": NaN}',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"step": 2',
    ],
)
def test_metrics_are_read_but_for_what_is_damaged(tmp_path: Path, line: bytes) -> None:
    """They ended there, and good lines behind it were dropped in silence."""
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 3}]


def test_the_escape_would_have_worked(tmp_path: Path) -> None:
    """What the test above refuses, torch's own reader runs."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    escape(tmp_path)
    with pytest.raises(AttributeError):
        FileSystemReader(tmp_path).read_metadata()
    assert (tmp_path / "proof").exists()


def test_whole_ones_are_read(whole: Path) -> None:
    loop = make()
    state.load(loop, whole, {})
    assert loop.position.step == 1


def test_metadata_of_python_3_11_0_to_3_11_3(whole: Path, tmp_path: Path) -> None:
    """There a member of an enumeration is pickled as `getattr(class, name)`: no run on Debian 12 could be resumed."""
    folder = tmp_path / "step-000001"
    shutil.copytree(whole, folder)
    metadata = pickle.loads((folder / ".metadata").read_bytes())

    class Pickler(pickle.Pickler):
        def reducer_override(self, member: Any) -> Any:
            return (getattr, (type(member), member.name)) if isinstance(member, Enum) else NotImplemented

    with (folder / ".metadata").open("wb") as file:
        Pickler(file).dump(metadata)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    state.load(make(), folder, {})
