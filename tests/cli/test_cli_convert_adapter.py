"""`pronk convert` of an adapter: a GGUF file that answers as the folder does, and refusals in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from adapters import random_adapter, save
from click.testing import Result

import pronk
from pronk import checkpoint
from pronk.checkpoint import adapter

Run = Callable[..., Result]
IDS = [1, 50, 60, 70, 80, 90]


@pytest.fixture
def folder(model: str, tmp_path: Path) -> Path:
    """Which names its base."""
    given = random_adapter(checkpoint.open(model).config, seed=2, size=0.1, uneven=False)
    made = save(tmp_path / "mine", given)
    told = json.loads((made / adapter.CONFIG).read_text())
    (made / adapter.CONFIG).write_text(json.dumps(told | {"base_model_name_or_path": model}))
    return made


def test_it_answers_as_the_folder_does(run: Run, model: str, folder: Path, tmp_path: Path) -> None:
    result = run("convert", str(folder), str(tmp_path / "mine.gguf"), "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    receipt = json.loads(result.stdout)
    assert (receipt["base"], receipt["format"]) == (model, "gguf adapter")
    assert receipt["bytes"] == (tmp_path / "mine.gguf").stat().st_size
    assert receipt["max_abs_difference"] == 0
    plain = pronk.load(model).logits(IDS)
    both = [pronk.load(model, adapter=path).logits(IDS) for path in (folder, tmp_path / "mine.gguf")]
    assert np.array_equal(*both)
    assert np.abs(both[0] - plain).max() > 0.1
    merged = pronk.load(model, adapter=tmp_path / "mine.gguf", merge_adapter=True, quantize="f32").logits(IDS)
    np.testing.assert_allclose(merged, both[0], atol=1e-3)
    llm = pronk.load(model)
    assert llm.add_adapter(tmp_path / "mine.gguf") == "mine.gguf"
    ours, theirs = (run("generate", "-m", model, "--adapter", str(p), "-n", "8", "a b")
                    for p in (folder, tmp_path / "mine.gguf"))  # fmt: skip
    assert ours.exit_code == 0, ours.stderr
    assert ours.stdout == theirs.stdout


def test_fewer_bits_are_measured(run: Run, model: str, folder: Path, tmp_path: Path) -> None:
    dst = tmp_path / "mine.gguf"
    result = run("convert", str(folder), str(dst), "--dtype", "f16", "--base", model)
    assert result.exit_code == 0
    assert result.stdout.startswith(f"{dst}: gguf adapter, ")
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(dst).tensors} == {"F16"}
    again = run("convert", str(folder), str(dst), "--dtype", "f16")
    assert (again.exit_code, again.stderr.count("\n")) == (1, 1)
    assert "exists; overwrite it (--overwrite)" in again.stderr
    assert run("convert", str(folder), str(dst), "--overwrite").exit_code == 0


def test_its_template_is_not_dropped_in_silence(run: Run, folder: Path, tmp_path: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    result = run("convert", str(folder), str(tmp_path / "mine.gguf"))
    assert result.exit_code == 0
    assert "its chat template is not written" in result.stderr


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (["mine.gguf", "--dtype", "q8"], 2, "an adapter is not written in q8; choose from f32, f16, bf16"),
        (["mine", "--to", "safetensors"], 2, "is an adapter, which becomes a GGUF file"),
        (["mine.gguf", "--rotate", "1"], 2, "is an adapter, which becomes a GGUF file"),
        (["mine.gguf", "--base", "nowhere/at/all"], 1, "nowhere/at/all"),
    ],
)
def test_refusals(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], code: int, problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    result = run("convert", str(folder), f"out/{options[0]}", *options[1:])
    assert result.exit_code == code
    assert problem in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_an_adapter_without_a_base_asks_for_one(run: Run, model: str, folder: Path, tmp_path: Path) -> None:
    told = json.loads((folder / adapter.CONFIG).read_text())
    del told["base_model_name_or_path"]
    (folder / adapter.CONFIG).write_text(json.dumps(told))
    result = run("convert", str(folder), str(tmp_path / "mine.gguf"))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "name it: --base MODEL" in result.stderr
    result = run("convert", model, str(tmp_path / "model.gguf"), "--base", model)
    assert result.exit_code == 2
    assert "--base is for an adapter" in result.stderr
