"""`pronk convert`: types that tensors keep, one table of what files are in, and what stands when it is ended."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import Result
from gguf_files import save_gguf
from tiny import random_weights, tiny_config

import pronk
from pronk import checkpoint, formats
from pronk.checkpoint.writers.write import DTYPES

Run = Callable[..., Result]


def kind(name: str, array: np.ndarray) -> str:
    """As files of mixed types have them: norms in F32, and matrices in this and that."""
    if array.ndim == 1:
        return "F32"
    if "embed" in name:
        return "Q8_0"
    if "down_proj" in name:
        return "F16"
    return "Q4_1" if "self_attn" in name else "Q5_0"


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config(vocab_size=64, hidden_size=64, intermediate_size=96)
    return save_gguf(tmp_path_factory.mktemp("mixed") / "x.gguf", config, random_weights(config), dtype=kind)


def data(path: Path) -> dict[str, tuple[str, bytes]]:
    """By the gguf package: each tensor's type and bytes."""
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in gguf.GGUFReader(path).tensors}


def test_a_gguf_of_a_gguf_keeps_the_type_of_each_tensor(run: Run, mixed: Path, tmp_path: Path) -> None:
    result = run("convert", str(mixed), str(tmp_path / "y.gguf"), "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["max_abs_difference"] == 0
    before, after = data(mixed), data(tmp_path / "y.gguf")
    assert {one[0] for one in before.values()} == {"F32", "F16", "Q8_0", "Q4_1", "Q5_0"}
    assert before == after


def test_another_type_is_told(run: Run, mixed: Path, tmp_path: Path) -> None:
    assert run("convert", str(mixed), str(tmp_path / "y.gguf"), "--dtype", "f16").exit_code == 0
    assert {one[0] for one in data(tmp_path / "y.gguf").values()} == {"F32", "F16"}


def test_what_gguf_has_no_type_for_is_f32(run: Run, model: str, tmp_path: Path) -> None:
    assert run("convert", model, str(tmp_path / "int8"), "--to", "safetensors", "--dtype", "int8").exit_code == 0
    result = run("convert", str(tmp_path / "int8"), str(tmp_path / "y.gguf"), "--json")
    assert json.loads(result.stdout)["max_abs_difference"] == 0


def test_the_name_tells_the_format(run: Run, model: str, tmp_path: Path) -> None:
    for name, found in (("a.gguf", "gguf"), ("a.BIN", "llama2c")):
        assert run("convert", model, str(tmp_path / name)).exit_code == 0
        assert checkpoint.open(tmp_path / name).format == found
    result = run("convert", model, str(tmp_path / "folder"))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--to is missing" in result.stderr


def test_the_current_folder_is_no_destination(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who looks for what will stand beside it must not fail: '.' has no name."""
    monkeypatch.chdir(tmp_path)
    for to in ("safetensors", "llama2c"):
        result = run("convert", model, ".", "--to", to)
        assert (result.exit_code, "is, or holds, the current folder" in result.stderr) == (1, True), result.stderr


def test_dtype_and_its_errors_are_of_one_table(run: Run, model: str, tmp_path: Path) -> None:
    from pronk.cli.convert import command

    (dtype,) = (option for option in command.params if option.name == "dtype")
    offered = set(dtype.type.choices)  # type: ignore[attr-defined]
    assert offered == {name for names in DTYPES.values() for name in names}
    assert offered >= {"q4", "q8", "q8_0"}
    for to, names in DTYPES.items():
        assert names == formats.names(file=to)
        for name in sorted(offered):
            groups = ["--group-size", "32"] if (to, name) == ("llama2c", "int8") else []
            result = run("convert", model, str(tmp_path / f"{to}-{name}"), "--to", to, "--dtype", name, *groups)
            assert result.exit_code == (0 if name in names else 2), result.stderr
            if name not in names:
                (listed,) = re.findall(r"is not written in .*; choose from (.*)", result.stderr)
                assert tuple(listed.split(", ")) == names


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(143)])
def test_interrupted_while_it_compares_it_says_what_stands(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setitem(vars(pronk), "load", load)
    path = tmp_path / "m.gguf"
    result = run("convert", model, str(path))
    assert (result.exit_code, result.stdout) == (130 if error is KeyboardInterrupt else 143, "")
    assert f"interrupted; {path} is written and complete, but not compared with {model}" in result.stderr
    assert f"do it with: pronk divergence {model} {path}" in result.stderr
    monkeypatch.undo()
    assert pronk.load(path, engine="cpu", threads=1).generate("x", max_new_tokens=1).tokens
