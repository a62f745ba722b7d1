"""Checkpoints of a run are files, too: what hides in one is not run, and what does not fit is refused."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
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
from pronk.train.batches import Batches
from pronk.train.examples import Example
from pronk.train.folder import read_metrics
from pronk.train.loop import Loop
from pronk.train.schedule import Schedule


def make() -> Loop:
    config = tiny_config()
    model = load_module(in_memory(config, random_weights(config)))
    examples = [Example(np.arange(3, 12, dtype=np.int32), np.arange(9) > 2)]
    return Loop(model, examples, Batches([9]), optimizers.make(model, "adamw", 1e-3, 0.0), Schedule(1e-3, 3))


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
        {"more": 1},
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


@pytest.mark.parametrize("line", [b"5", b"{}", b'{"step": "x"}', b"\xff\xfe", b"[" * 100_000, b'{"step": 2'])
def test_metrics_end_where_they_are_damaged(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
    assert read_metrics(tmp_path) == [{"step": 1}]


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
