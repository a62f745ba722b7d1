"""Which engine runs a model, and what is said where it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import engines
from pronk.errors import BadRequest, PronkError

NONE = dict.fromkeys(("quantize", "int8_threshold", "int8_outliers", "kv_dtype", "device", "dtype", "attn"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("engine", "given", "expected"),
    [
        (None, {}, None),
        (None, {"device": "cpu"}, "cpu"),
        (None, {"device": "cpu", "quantize": "q4"}, "cpu"),
        (None, {"quantize": "q4"}, "cpu"),
        (None, {"quantize": {"model.layers.0.": "q4"}}, "cpu"),
        (None, {"quantize": "int8"}, None),
        (None, {"quantize": "llm-int8", "int8_threshold": 3.0}, None),
        (None, {"quantize": "int8", "kv_dtype": "int8"}, "cpu"),
        (None, {"quantize": "absmax"}, "torch"),
        ("torch", {"quantize": "llm-int8"}, "torch"),
        (None, {"kv_dtype": "int8"}, "cpu"),
        (None, {"device": "cuda"}, "torch"),
        (None, {"dtype": "bf16"}, "torch"),
        (None, {"device": "cpu", "attn": "math"}, "torch"),
        ("cpu", {}, "cpu"),
        ("cpu", {"device": "cpu", "kv_dtype": "f16"}, "cpu"),
        ("torch", {}, "torch"),
        ("torch", {"device": "cpu", "dtype": "f32"}, "torch"),
    ],
)
def test_the_engine_of_choice(
    engine: str | None, given: dict[str, Any], expected: str | None, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "has_gpu", lambda: gpu)
    assert engines.choose(engine, {**NONE, **given}) == expected or ("torch" if gpu else "cpu")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": "gpu"}, "engine must be cpu or torch, not 'gpu'"),
        ({"engine": "cpu", "dtype": "bf16"}, "the cpu engine has no dtype"),
        ({"engine": "cpu", "device": "cuda"}, "the cpu engine has no device"),
        ({"engine": "cpu", "attn": "math"}, "the cpu engine has no attn"),
        ({"engine": "torch", "quantize": "auto"}, "the torch engine has no quantize='auto'"),
        ({"engine": "torch", "quantize": {"": "q8"}}, "the torch engine has no quantize for single tensors"),
        ({"engine": "cpu", "quantize": "zeropoint"}, "the cpu engine has no quantize='zeropoint'"),
        ({"engine": "torch", "kv_dtype": "int8"}, "the torch engine has no kv_dtype"),
        (
            {"quantize": "q4", "dtype": "f32"},
            "quantize='q4' is an option of the CPU engine and dtype one of the torch engine",
        ),
    ],
)
def test_options_of_another_engine_are_refused_by_name(model: Path, options: dict[str, str], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        pronk.load(model, **options)


def test_both_engines_say_the_same(model: Path) -> None:
    texts = [
        pronk.load(model, engine=engine, **options).generate("Hello", max_new_tokens=20).text
        for engine, options in (("cpu", {"threads": 1}), ("cpu", {"threads": 2}), ("torch", {"device": "cpu"}))
    ]
    assert len(set(texts)) == 1


def test_generating_imports_no_torch(model: Path) -> None:
    script = "import sys; sys.modules['torch'] = None\nfrom pronk.cli import main; main()"
    arguments = ["generate", "-m", str(model), "-n", "3", "--device", "cpu", "Hello"]
    run = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout


def test_an_engine_that_is_not_installed_names_the_other(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pronk._native", None)
    monkeypatch.delattr(pronk, "_native", raising=False)
    with pytest.raises(PronkError, match=r"CPU engine cannot be imported .*; reinstall pronk.*engine='torch'"):
        pronk.load(model, engine="cpu")
    monkeypatch.delitem(sys.modules, "pronk.torch_engine.backend", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PronkError, match="the torch engine needs torch; install it with"):
        pronk.load(model, engine="torch")


def test_an_unknown_instruction_set_is_named(model: Path) -> None:
    command = [sys.executable, "-m", "pronk", "generate", "-m", str(model), "--engine", "cpu", "Hello"]
    run = subprocess.run(command, env={**os.environ, "PRONK_ISA": "z80"}, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "PRONK_ISA=z80: this processor can run" in run.stderr
