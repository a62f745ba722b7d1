"""Saving: the same numbers in every format, files that other programs load, and nothing half-written left behind."""

from __future__ import annotations

import errno
import os
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_models import LLAMA2C_ENDS, NUMPY, assert_same, numbers
from tiny import in_memory, random_weights, tiny_config

import pronk.checkpoint as checkpoints
from pronk.checkpoint import tensor_stream
from pronk.checkpoint.readers import gguf
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.checkpoint.writers.write import save
from pronk.errors import BadRequest, PronkError, Unsupported


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("to", "version"), [("safetensors", None), ("llama2c", None), ("llama2c", 1), ("gguf", None)])
def test_f32_through_every_format_is_the_same_to_the_bit(tmp_path: Path, to: Any, version: int, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, eos_token_ids=LLAMA2C_ENDS)
    weights = random_weights(config)
    saved = save(in_memory(config, weights), tmp_path / "out", to=to, dtype="f32", version=version)
    found = checkpoints.open(saved)
    assert found.format == {"safetensors": "huggingface"}.get(to, to)
    assert found.config == config
    assert_same(found, weights)


def test_a_chain_through_all_formats(tmp_path: Path) -> None:
    config = tiny_config(eos_token_ids=LLAMA2C_ENDS)
    weights = random_weights(config)
    found = in_memory(config, weights)
    for step, (to, version) in enumerate(
        [("gguf", None), ("llama2c", 0), ("safetensors", None), ("llama2c", 1), ("gguf", None), ("safetensors", None)]
    ):
        found = checkpoints.open(save(found, tmp_path / str(step), to=to, dtype="f32", version=version))
    assert_same(found, weights)
    assert found.config == config


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("to", ["safetensors", "gguf"])
def test_narrow_types_round_to_nearest(tmp_path: Path, to: Any, dtype: Any) -> None:
    config = tiny_config()
    weights = random_weights(config)
    found = checkpoints.open(save(in_memory(config, weights), tmp_path / "out", to=to, dtype=dtype))
    for name, array in weights.items():
        narrow = NUMPY["f32"] if to == "gguf" and array.ndim == 1 else NUMPY[dtype]
        assert found.tensors[name].dtype == {4: "F32"}.get(np.dtype(narrow).itemsize, dtype.upper())
        assert found.tensors[name].read().tobytes() == array.astype(narrow).tobytes(), name


def test_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    cases: list[dict[str, Any]] = [
        {"to": "safetensors", "dtype": "bf16"},
        {"to": "gguf", "dtype": "q8_0"},
        {"to": "llama2c", "dtype": "int8", "group_size": 16},
    ]
    whole = [save(source, tmp_path / f"a{i}", **case) for i, case in enumerate(cases)]
    monkeypatch.setattr(tensor_stream, "_PIECE", 100)
    parts = [save(source, tmp_path / f"b{i}", **case) for i, case in enumerate(cases)]
    whole[0], parts[0] = whole[0] / "model.safetensors", parts[0] / "model.safetensors"
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in parts]


@pytest.mark.parametrize("name", [".", "..", "sub/..", "../sub/.."])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_current_folder_is_no_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool
) -> None:
    config = tiny_config()
    here = tmp_path / "sub"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    for destination in (Path(name), Path(name).resolve()):
        with pytest.raises(BadRequest, match="is, or holds, the current folder"):
            save(in_memory(config, {}), destination, to="safetensors", dtype="f32", overwrite=overwrite)
    assert (here / "sub").is_dir()


def test_a_destination_without_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(BadRequest, match="has no name of its own"):
        save(in_memory(tiny_config(), {}), tmp_path / "a/b/..", to="safetensors", dtype="f32", overwrite=True)


FORMATS: list[Any] = [
    *[("safetensors", dtype) for dtype in ("bf16", "int8", "llm-int8")],
    *[("gguf", dtype) for dtype in ("q8_0", "q8", "q4")],
    ("llama2c", "int8"),
]


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_half_written_is_left(tmp_path: Path, to: Any, dtype: Any, failure: BaseException) -> None:
    """Interrupted, or out of disk, at the last tensor; once with nothing there before, once over a whole model."""
    config = tiny_config()
    weights = random_weights(config)

    def fail() -> Any:
        raise failure

    last = "lm_head.weight"
    broken = in_memory(config, weights)
    tensors = dict(broken.tensors)
    tensors[last] = LazyTensor(last, tensors[last].shape, "F32", tensors[last].nbytes, fail)
    broken = replace(broken, tensors=tensors)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else PronkError
    destination = tmp_path / "out"
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    with pytest.raises(expected) as caught:
        save(broken, destination, **arguments)
    if expected is PronkError:
        assert str(caught.value) == f"{destination}: cannot be written: No space left on device"
    assert not list(tmp_path.iterdir())

    save(in_memory(config, weights), destination, **arguments)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(expected):
        save(broken, destination, **arguments, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
def test_a_destination_that_exists(tmp_path: Path, to: Any, dtype: Any) -> None:
    config = tiny_config()
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    destination = save(in_memory(config, random_weights(config, 1)), tmp_path / "out", **arguments)
    with pytest.raises(BadRequest, match="exists"):
        save(in_memory(config, random_weights(config, 2)), destination, **arguments)
    expected = save(in_memory(config, random_weights(config, 2)), tmp_path / "fresh", **arguments)
    save(in_memory(config, random_weights(config, 2)), destination, **arguments, overwrite=True)
    found, fresh = checkpoints.open(destination), checkpoints.open(expected)
    assert_same(found, numbers(fresh))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


def test_the_source_is_never_written_over(tmp_path: Path) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    folder = save(source, tmp_path / "hf", to="safetensors", dtype="f32")
    path = save(source, folder / "inside.gguf", to="gguf", dtype="f32")
    (tmp_path / "link.gguf").symlink_to(path)
    for checkpoint, destination, to in (
        (checkpoints.open(path), path, "gguf"),
        (checkpoints.open(path), tmp_path / "link.gguf", "gguf"),
        (checkpoints.open(tmp_path / "link.gguf"), path, "gguf"),
        (checkpoints.open(path), folder, "safetensors"),
        (checkpoints.open(folder / "model.safetensors"), folder / ".." / "hf", "safetensors"),
    ):
        with pytest.raises(BadRequest, match="source"):
            save(checkpoint, destination, to=to, dtype="f32", overwrite=True)
    assert_same(gguf.read(path), numbers(source))


def test_folders_and_files_do_not_replace_each_other(tmp_path: Path) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    (folder := tmp_path / "thesis").mkdir()
    (folder / "thesis.tex").write_text("years of work")
    (file := tmp_path / "file").write_text("")
    for destination, to, named in (
        (folder, "gguf", "is a folder"),
        (folder, "safetensors", r"thesis\.tex, which is no part of a model"),
        (file, "safetensors", "is a file"),
        (tmp_path / "absent" / "m.gguf", "gguf", "is no folder"),
    ):
        with pytest.raises(BadRequest, match=named):
            save(source, destination, to=to, dtype="f32", overwrite=True)
    assert (folder / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"to": "onnx", "dtype": "f32"}, "safetensors, llama2c, gguf"),
        ({"to": "gguf", "dtype": "int8"}, "f32, f16, bf16, q8_0"),
        ({"to": "safetensors", "dtype": "q8_0"}, "f32, f16, bf16"),
        ({"to": "llama2c", "dtype": "f16"}, "f32, int8"),
        ({"to": "llama2c", "dtype": "f32", "version": 2}, "version 0 or 1"),
        ({"to": "llama2c", "dtype": "int8", "version": 0}, "version 2"),
        ({"to": "gguf", "dtype": "f32", "version": 3}, "version is llama2.c's"),
    ],
)
def test_arguments_that_do_not_fit_together(tmp_path: Path, arguments: dict, named: str) -> None:
    config = tiny_config()
    with pytest.raises(BadRequest, match=named):
        save(in_memory(config, random_weights(config)), tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "dtype"), [("safetensors", "f16"), ("gguf", "f16"), ("gguf", "q8_0"), ("llama2c", "int8")]
)
@pytest.mark.parametrize("value", [1e5, np.inf, np.nan])
def test_numbers_that_do_not_fit(tmp_path: Path, to: Any, dtype: Any, value: float) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.0.mlp.up_proj.weight"][1, 2] = value
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    fits = np.isfinite(value) != (dtype == "f16")  # float16 has infinity and NaN, but not 100,000
    if fits:
        save(in_memory(config, weights), tmp_path / "out", **arguments)
        return
    with pytest.raises(Unsupported, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        save(in_memory(config, weights), tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
def test_progress_counts_every_stored_byte(tmp_path: Path, to: Any, dtype: Any) -> None:
    config = tiny_config()
    weights = random_weights(config)
    seen: list[tuple[str, int, int]] = []
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    save(in_memory(config, weights), tmp_path / "out", **arguments, progress=lambda *step: seen.append(step))
    total = sum(array.nbytes for array in weights.values())
    assert sorted(name for name, _, _ in seen) == sorted(weights)
    assert seen[-1][1:] == (total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
def test_peak_memory_is_one_tensor(tmp_path: Path, to: Any, dtype: Any) -> None:
    """Tensors are made when read: 34 MB in all, the largest 4 MB; conversions work in pieces of 2**20 numbers."""
    config = tiny_config(vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, head_dim=64)
    tensors = {
        name: LazyTensor(name, shape, "F32", int(np.prod(shape)) * 4, lambda shape=shape: np.ones(shape, np.float32))
        for name, shape in config.tensor_shapes().items()
    }
    source = Checkpoint(Path("memory"), "memory", config, tensors)
    largest, total = (f(t.nbytes for t in tensors.values()) for f in (max, sum))
    arguments: dict[str, Any] = {"to": to, "dtype": dtype}
    tracemalloc.start()
    save(source, tmp_path / "out", **arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The tensor, its copy with rows permuted, and a handful of temporaries of one piece (4 MB each).
    assert peak < 2 * largest + 5 * (4 << 20) < total, (peak, largest, total)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_device_or_pipe_is_never_replaced(tmp_path: Path) -> None:
    """`--overwrite` once put a file in the place of /dev/full."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadRequest, match="not replaced"):
        save(in_memory(tiny_config(), {}), pipe, to="gguf", dtype="f32", overwrite=True)
    assert pipe.is_fifo()
