"""Which engine runs a model, and what is said where it cannot."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_args
from unittest.mock import ANY

import pytest
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import checkpoint as checkpoints
from pronk import cpu_engine, engines, formats, torch_engine
from pronk.engine.backend import Backend
from pronk.engine.declaration import Engine
from pronk.errors import BadRequest, PronkError
from pronk.formats import int8

NONE = dict.fromkeys(("quantize", *engines.OPTIONS))


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
        (None, {"quantize": "q4"}, None),
        (None, {"quantize": "q8", "device": "cuda"}, "torch"),
        (None, {"quantize": "q4", "compute_dtype": "f32"}, "torch"),
        (None, {"quantize": "q4", "kv_dtype": "q4"}, "cpu"),
        (None, {"quantize": "auto"}, "cpu"),
        (None, {"quantize": {"model.layers.0.": "q4"}}, "cpu"),
        (None, {"quantize": "int8"}, None),
        (None, {"quantize": "llm-int8", "int8_threshold": 3.0}, None),
        (None, {"quantize": "int8", "kv_dtype": "int8"}, "cpu"),
        (None, {"quantize": "absmax"}, "torch"),
        ("torch", {"quantize": "llm-int8"}, "torch"),
        (None, {"kv_dtype": "int8"}, "cpu"),
        (None, {"device": "cuda"}, "torch"),
        (None, {"compute_dtype": "bf16"}, "torch"),
        (None, {"quantize": "bf16"}, None),
        (None, {"device": "cpu", "attn": "math"}, "torch"),
        ("cpu", {}, "cpu"),
        ("cpu", {"device": "cpu", "kv_dtype": "f16"}, "cpu"),
        ("torch", {}, "torch"),
        ("torch", {"device": "cpu", "quantize": "f32"}, "torch"),
    ],
)
def test_the_engine_of_choice(
    engine: str | None, given: dict[str, Any], expected: str | None, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine.TorchEngine, "has_gpu", lambda _: gpu)
    assert engines.choose(engine, {**NONE, **given}) == expected or ("torch" if gpu else "cpu")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"engine": "gpu"}, "engine must be cpu or torch, not 'gpu'"),
        (
            {"engine": "cpu", "compute_dtype": "bf16"},
            "compute_dtype='bf16' is not for the cpu engine; .* engine='torch'",
        ),
        ({"engine": "cpu", "device": "cuda"}, "device='cuda' is not for the cpu engine"),
        ({"engine": "cpu", "attn": "math"}, "attn='math' is not for the cpu engine"),
        ({"engine": "torch", "quantize": "auto"}, "quantize='auto' is not for the torch engine"),
        ({"engine": "torch", "quantize": {"": "q8"}}, "quantize for single tensors is not for the torch engine"),
        ({"engine": "cpu", "quantize": "zeropoint"}, "quantize='zeropoint' is not for the cpu engine"),
        ({"engine": "torch", "kv_dtype": "int8"}, "kv_dtype='int8' is not for the torch engine"),
        ({"engine": "torch", "kv_dtype": "q4"}, "kv_dtype='q4' is not for the torch engine"),
        (
            {"quantize": "auto", "compute_dtype": "f32"},
            "quantize='auto' is for the CPU engine and compute_dtype='f32' for the torch engine; leave one out",
        ),
    ],
)
def test_options_of_another_engine_are_refused_by_name(model: Path, options: dict[str, str], problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        pronk.load(model, **options)


def test_declarations_are_what_engines_have(model: Path) -> None:
    """They are made of names alone, for nothing of an engine may be imported to ask it."""
    assert {*torch_engine.CODED} == {*int8.SCHEMES, "q8", "q4"}
    assert {*get_args(formats.Quantize)} == {*cpu_engine.ENGINE.formats, *torch_engine.ENGINE.formats}
    keywords = inspect.signature(pronk.load).parameters
    for engine in engines.ENGINES:
        assert {*engine.compared} < {*engine.formats}
        assert {format for formats in engine.options.values() for format in formats} <= {*engine.formats}
        for quantize in engine.formats:
            backend = pronk.load(model, engine=engine.name, quantize=quantize, device="cpu", threads=1).backend
            assert (backend.engine, backend.batch_invariant) == (engine.name, engine.batch_invariant)
            assert backend.newly_kept is None
            assert {*Backend.__annotations__} - {"newly_kept"} <= {
                name for name in dir(backend) if getattr(backend, name) is not None
            }
            assert backend.conditions() == {"threads": 1, "isa": ANY}
            assert backend.device_memory is None
            planned = engine.plan(checkpoints.open(model), {"quantize": quantize, "device": "cpu"})
            assert backend.dtype.startswith(planned.dtype)
            assert backend.kv_dtype == planned.kv_dtype
    assert keywords.keys() >= {*engines.OPTIONS}


class Gpu(Engine):
    """A third one: a folder, and a line in ENGINES."""

    name, title = "gpu", "GPU engine"
    formats, compared, devices, batch_invariant = ("f16", "q4", "auto"), ("q4",), ("cuda",), True
    options: ClassVar = {"device": (), "kv_dtype": ()}
    there = False

    def load(self, checkpoint: Any, **options: Any) -> Any:
        return SimpleNamespace(ctx_size=1, given=options)

    def plan(self, checkpoint: Any, options: Any) -> Any:
        raise NotImplementedError

    def prepare(self) -> None:
        raise NotImplementedError

    def has_gpu(self) -> bool:
        return self.there


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, "cpu"),
        ({"kv_dtype": "int8", "device": "cuda:1"}, "gpu"),
        ({"device": "cuda"}, "torch"),
        ({"engine": "gpu", "quantize": "q4"}, "gpu"),
        ({"engine": "gpu", "device": "cpu"}, "gpu"),
        ({"engine": "gpu", "attn": "math"}, "attn='math' is not for the gpu engine; .* take engine='torch'"),
        (
            {"engine": "torch", "quantize": "auto"},
            "quantize='auto' is not for the torch engine; .* engine='cpu' or engine='gpu'",
        ),
        ({"quantize": "q8", "device": "cuda"}, "torch"),
        ({"kv_dtype": "q4", "attn": "math"}, "attn='math' is for the torch engine and kv_dtype='q4' for the CPU eng"),
        ({"engine": "tpu"}, "engine must be cpu or torch or gpu, not 'tpu'"),
    ],
)
def test_a_third_engine_is_a_line(
    model: Path, given: dict[str, Any], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine.TorchEngine, "has_gpu", lambda _: False)
    monkeypatch.setattr(engines, "ENGINES", (*engines.ENGINES, Gpu()))
    monkeypatch.setattr(engines, "NAMES", (*engines.NAMES, "gpu"))
    options = {**NONE, **given}
    name = options.pop("engine", None)
    if " " in found:
        with pytest.raises(BadRequest, match=found):
            engines.choose(name, options)
        return
    assert engines.choose(name, options) == found
    if found == "gpu":
        backend: Any = pronk.load(model, **{"engine": "gpu", **given}).backend
        assert backend.given.items() >= {k: v for k, v in given.items() if k not in ("engine",)}.items()
    monkeypatch.setattr(Gpu, "there", True)
    assert engines.choose(None, {**NONE, "quantize": "q4"}) == "gpu"


def decisions(source: str) -> list[str]:
    """What asks in a source which engine it is, or fishes for what only some have."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Match):
            sides, words = [node.subject], set(engines.NAMES)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            words = {one.value for one in ast.walk(node) if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr", "isinstance"):
            of, what = node.args[:2]
            fishes = ast.unparse(of).endswith("backend") and isinstance(what, ast.Constant)
            if fishes or "Backend" in ast.unparse(what):
                found.append(ast.unparse(node))
            continue
        else:
            continue
        if words & {*engines.NAMES} and any(re.search(r"\bengine\W*$", ast.unparse(side)) for side in sides):
            found.append(ast.unparse(node))
    return found


def test_nobody_else_asks_which_engine_it_is() -> None:
    root = Path(pronk.__file__).parent
    outside = [path for path in root.rglob("*.py") if not path.parent.name.endswith("_engine")]
    assert {str(path.relative_to(root)): found for path in outside if (found := decisions(path.read_text()))} == {}


@pytest.mark.parametrize(
    "asked",
    [
        'if llm.backend.engine == "cpu":\n    pass',
        'x = 1 if engine != "torch" else 2',
        'x = engine in ("cpu", "gpu")',
        'x = {"quantize" if engine == "cpu" else "dtype": 1}',
        'x = getattr(llm.backend, "model", None)',
        "x = isinstance(self.backend, CpuBackend)",
        'x = loading["engine"] == "torch"',
        'match llm.backend.engine:\n    case "cpu":\n        pass',
    ],
)
def test_what_looks_for_them_finds_them(asked: str) -> None:
    assert decisions(asked)


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
