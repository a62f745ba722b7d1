"""rows: however a tensor is cut, its pieces are the tensor, as stored and as numbers; and files are given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_files import save_gguf
from tiny import in_memory, random_weights, tiny_config

from pronk import checkpoint as checkpoints
from pronk.checkpoint import rows as module
from pronk.checkpoint.rows import picked, rows
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.tensors import Checkpoint
from pronk.checkpoint.writers.write import save

CONFIG = tiny_config()
UP, QUERY = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def stored(folder: Path, kind: str) -> Checkpoint:
    weights = random_weights(CONFIG)
    if kind == "int8":
        return checkpoints.open(save(in_memory(CONFIG, weights), folder / "m", to="safetensors", dtype="int8"))
    in_layers = lambda name, array: kind if array.ndim == 2 and "layers" in name else "F32"  # noqa: E731
    return checkpoints.open(save_gguf(folder / "m.gguf", CONFIG, weights, dtype=in_layers))


@pytest.mark.parametrize("kind", ["F16", "Q4_1", "Q5_0", "int8"])
@pytest.mark.parametrize(("most", "unit"), [(1, 1), (200, 1), (200, 16), (1 << 20, 1)])
def test_pieces_are_the_tensor(tmp_path: Path, kind: str, most: int, unit: int) -> None:
    tensor = stored(tmp_path, kind).tensors[UP]
    parts = list(rows(tensor, most, unit=unit))
    assert [part.first for part in parts] == list(range(0, len(tensor.read()), len(parts[0].array)))
    assert len(parts[0].array) % unit == 0
    assert len(parts[0].array) <= max(unit, most // tensor.shape[1])
    assert np.array_equal(np.concatenate([part.array for part in parts]), tensor.read())
    assert {part.dtype for part in parts} == {"F16" if kind == "F16" else "F32"}
    assert np.array_equal(picked(tensor, [0, 5]), tensor.read()[[0, 5]].astype(np.float32))
    if tensor.read_blocks:
        raw = list(rows(tensor, most, (tensor.dtype,), unit=unit))
        assert np.array_equal(np.concatenate([part.array for part in raw]), tensor.read_blocks())
        assert {part.dtype for part in raw} == {tensor.dtype}


def test_heads_are_turned_whole_however_small_the_pieces(tmp_path: Path) -> None:
    opened = stored(tmp_path, "F16")
    whole = np.concatenate(list(TensorStream(opened).rows(QUERY, interleaved=True)))
    small = np.concatenate(list(TensorStream(opened).rows(QUERY, most=1, interleaved=True)))
    assert np.array_equal(whole, small)
    assert not np.array_equal(whole, opened.tensors[QUERY].read())


def test_what_writers_read_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all of a source stayed mapped while it was written: 300 MB of memory for a model of 255."""
    opened, given_back = stored(tmp_path, "F16"), []
    monkeypatch.setattr(module, "MAPPED", 1)
    monkeypatch.setattr(module.mapped, "let_go", lambda: given_back.append(1))
    save(opened, tmp_path / "out", to="safetensors", dtype="f32")
    assert len(given_back) > len(opened.tensors)
