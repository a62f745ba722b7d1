"""What has changed under a name is seen, cheaply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from formats import save_huggingface
from tiny import in_memory, random_weights, tiny_config

from pronk import checkpoint
from pronk.checkpoint import digest as module
from pronk.checkpoint.digest import digest
from pronk.errors import BadFile

CONFIG = tiny_config(hidden_size=256, intermediate_size=512)


def saved(folder: Path, seed: int = 0) -> Path:
    save_huggingface(folder, CONFIG, random_weights(CONFIG, seed))
    return folder


def test_the_same_is_the_same(tmp_path: Path) -> None:
    a, b = (digest(checkpoint.open(saved(tmp_path / name))) for name in "ab")
    assert a == b
    assert len(a) == 16


@pytest.mark.parametrize(
    "harm",
    [
        lambda f: saved(f, seed=1),
        lambda f: (f / "config.json").write_text(
            (f / "config.json").read_text().replace('"rms_norm_eps": 1e-05', '"rms_norm_eps": 1e-06')
        ),
    ],
)
def test_other_weights_and_another_config(tmp_path: Path, harm: Callable[[Path], object]) -> None:
    before = digest(checkpoint.open(saved(tmp_path / "m")))
    harm(tmp_path / "m")
    assert digest(checkpoint.open(tmp_path / "m")) != before


@pytest.mark.parametrize("pieces", [(1 << 16, 512, 16), (512, 64, 8)])
def test_one_tensor_of_many(tmp_path: Path, pieces: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where only pieces are read, and each tensor in turn is all that changed."""
    for name, value in zip(("_PIECE", "_PIECES", "_FEWEST"), pieces, strict=True):
        monkeypatch.setattr(module, name, value)
    weights = random_weights(CONFIG)
    save_huggingface(tmp_path / "m", CONFIG, weights)
    before = digest(checkpoint.open(tmp_path / "m"))
    apart = sum(weight.nbytes for weight in weights.values()) / pieces[1]
    large = {name: weight for name, weight in weights.items() if weight.nbytes > 2 * apart}
    assert len(large) >= 6
    for name, weight in large.items():
        save_huggingface(tmp_path / "m", CONFIG, {**weights, name: weight * np.float32(1.01)})
        assert digest(checkpoint.open(tmp_path / "m")) != before, name


def test_every_byte_of_a_small_file(tmp_path: Path) -> None:
    opened = checkpoint.open(saved(tmp_path / "m"))
    (path,) = opened.files
    before, whole = digest(opened), bytearray(path.read_bytes())
    for at in (*range(0, len(whole), len(whole) // 7), len(whole) - 1):
        changed = whole.copy()
        changed[at] ^= 1
        path.write_bytes(changed)
        assert digest(opened) != before, at


def test_in_memory() -> None:
    one, two = (in_memory(CONFIG, random_weights(CONFIG, seed)) for seed in (0, 1))
    assert digest(one) == digest(in_memory(CONFIG, random_weights(CONFIG))) != digest(two)


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    opened = checkpoint.open(saved(tmp_path / "m"))
    with pytest.raises(BadFile, match="cannot be read"):
        digest(replace(opened, files=(tmp_path / "gone",)))
