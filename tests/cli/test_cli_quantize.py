"""`pronk quantize` on a real, tiny model: what it writes, what its receipt says, and how it refuses."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import Result
from formats import save_huggingface
from tiny import random_weights, tiny_config
from tiny_folder import save_tiny_chat_model

import pronk
from pronk import checkpoint
from pronk.cli import origin, saving
from pronk.errors import NotEnoughMemory
from pronk.measure import mixed, receipt

Run = Callable[..., Result]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("to", "name", "quantization"),
    [
        ("int8", "m", "INT8 x 14 (compressed-tensors)"),
        ("llm-int8", "m", "LLM_INT8 x 14 (bitsandbytes, threshold 6)"),
        ("q8", "m.gguf", "Q8_0 x 16"),
        ("q4", "m.GGUF", "Q4_1 x 14, Q8_0 x 2"),
        ("bf16", "m.gguf", None),
        ("f16", "m", None),
    ],
)
def test_a_model_and_its_receipt(run: Run, model: str, tmp_path: Path, to: str, name: str, quantization: str) -> None:
    destination = tmp_path / name
    result = run("quantize", model, str(destination), "--to", to, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    receipt = json.loads(result.stdout)
    found = checkpoint.open(destination)
    assert receipt["quantization"] == found.quantization == quantization
    assert receipt["format"] == found.format == ("gguf" if name.lower().endswith("gguf") else "huggingface")
    assert receipt["bytes"] == {
        "before": sum(file.stat().st_size for file in checkpoint.open(model).files),
        "after": sum(file.stat().st_size for file in found.files),
    }
    assert receipt["bytes"]["after"] < 0.75 * receipt["bytes"]["before"]
    measured = receipt["divergence"]
    assert 0 < measured["mean"] < 0.1
    assert measured["top1"] > 0.5  # the tiny model hardly prefers one token to another
    assert (measured["windows"], measured["rows"]) == (4, 4 * 127)
    assert (receipt["to"], receipt["text"], receipt["choice"]) == (to, "pronk's own text", None)
    prompt = "Hello"
    assert pronk.load(destination).tokenizer.encode(prompt) == pronk.load(model).tokenizer.encode(prompt)


def test_the_receipt_in_words(run: Run, model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("It rained. " * 100)
    result = run("quantize", model, str(tmp_path / "m"), "--to", "llm-int8", "--int8-threshold", "4", "-f", str(text))
    assert (result.exit_code, result.stderr) == (0, "")
    first, second = result.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'm'}: huggingface (LLM_INT8 x 14 (bitsandbytes, threshold 4)), ")
    assert f"; {model} has " in first
    assert second.startswith(f"mean KL divergence from {model} in f32: ")
    assert " ± " in second
    assert second.endswith("% of 508 predictions")
    assert checkpoint.open(tmp_path / "m").int8_threshold == 4


def test_inspect_says_what_it_is(run: Run, model: str, tmp_path: Path) -> None:
    run("quantize", model, str(tmp_path / "m"), "--to", "llm-int8")
    said = run("inspect", str(tmp_path / "m")).stdout
    assert "quantization  LLM_INT8 x 14 (bitsandbytes, threshold 6)\n" in said
    assert "in llm-int8, f32; a KV cache of" in said
    plan = json.loads(run("inspect", str(tmp_path / "m"), "--json").stdout)
    assert (plan["cpu_plan"]["type"], plan["int8_threshold"]) == ("llm-int8", 6)
    assert {t["type"] for t in plan["tensors"]} == {"F32", "LLM_INT8"}
    for to, name, types in (("int8", "i", ["int8", "f32"]), ("q4_0", "m.gguf", ["Q4_0", "Q4_1"])):
        run("quantize", model, str(tmp_path / name), "--to", to)
        assert json.loads(run("inspect", str(tmp_path / name), "--json").stdout)["cpu_plan"]["types"] == types


def test_a_model_calibrated(run: Run, model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river was brown and slow. " * 40)
    one, other = tmp_path / "own.gguf", tmp_path / "text.gguf"
    result = run("quantize", "--calibrate", model, str(one), "--to", "q4_0", "--json")  # it takes no value
    assert result.exit_code == 0, result.stderr
    receipt = json.loads(result.stdout)
    assert receipt["quantization"] == checkpoint.open(one).quantization == "Q4_0 x 14, Q4_1 x 2"
    assert receipt["text"] == "pronk's own text"
    assert receipt["calibration"]["text"] == "pronk's calibration text"
    assert receipt["calibration"]["tokens"] > 10_000
    assert (receipt["calibration"]["read"], receipt["calibration"]["written"]) == (4096, 4096)
    assert 0 < receipt["divergence"]["mean"] < 0.9 * receipt["plain"]["mean"]
    plain = run("quantize", model, str(tmp_path / "plain.gguf"), "--to", "q4_0", "--json")
    assert json.loads(plain.stdout)["divergence"] == receipt["plain"]  # measured as it would have been
    assert (json.loads(plain.stdout)["plain"], json.loads(plain.stdout)["calibration"]) == (None, None)
    said = run("quantize", model, str(other), "--to", "q4_0", "--calibration-text", str(text))
    assert said.exit_code == 0
    third = said.stdout.splitlines()[2]
    assert third.startswith("plain rounding: ")
    assert third.endswith(f"Calibrated on {text} (1200 tokens); measured on pronk's own text, another one")
    assert one.read_bytes() != other.read_bytes()


def test_the_model_writes_as_much_as_it_is_asked_to(run: Run, model: str, tmp_path: Path) -> None:
    text, made = tmp_path / "text.txt", {}
    text.write_text("The river was brown and slow. " * 40)
    for written in ("0", "600", "8192"):
        dst = tmp_path / f"{written}.gguf"
        how = ["--to", "q4_0", "--calibration-text", str(text), "--self-written", written]
        result = run("quantize", model, str(dst), *how)
        assert (result.exit_code, result.stderr) == (0, "")
        made[written] = (result.stdout.splitlines()[2], dst.read_bytes())
    assert "wrote" not in made["0"][0]
    assert f" on {text} (1200 tokens) and 600 tokens that the model wrote itself; " in made["600"][0]
    assert f" on {text} (0 of 1200 tokens) and 8192 tokens that the model wrote itself; " in made["8192"][0]
    assert len({blocks for _, blocks in made.values()}) == 3
    alone = run("quantize", model, str(tmp_path / "alone.gguf"), "--to", "q4_0", "--calibration-text", str(text))
    assert alone.exit_code == 0
    assert (tmp_path / "alone.gguf").read_bytes() == made["0"][1]  # beside a text of one's own it writes none unasked
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q4_0", "--self-written", "8193")
    assert (result.exit_code, "8193 is not in the range 0<=x<=8192" in result.stderr) == (2, True)


def test_worse_than_plain_rounding_is_said(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pronk.calibrate import calibrated

    monkeypatch.setattr(calibrated, "_DAMPING", 1.0)
    monkeypatch.setattr(
        calibrated.gptq,
        "spread",
        lambda h, _: np.triu(np.full(h.shape, 0.4, np.float32)) + np.eye(len(h), dtype=np.float32),
    )
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q4_0", "--calibrate")
    assert result.exit_code == 0
    assert "m.gguf answers worse than with plain rounding (mean KL divergence " in result.stderr


def test_what_calibrating_refuses(run: Run, model: str, tmp_path: Path) -> None:
    text, short = tmp_path / "text.txt", tmp_path / "short.txt"
    text.write_text("The river was brown and slow. " * 40)
    short.write_text("The river was brown.")
    to = str(tmp_path / "m.gguf")
    result = run("quantize", model, to, "--to", "q4", "--calibrate")
    assert (result.exit_code, "--calibrate is for --to q2_k, q3_k, " in result.stderr) == (2, True)
    result = run("quantize", model, to, "--to", "q4_0", "--calibration-text", str(text), "--text", str(text))
    assert (result.exit_code, "--calibration-text and --text name one text" in result.stderr) == (1, True)
    result = run("quantize", model, to, "--to", "q4_0", "--calibration-text", str(short))
    assert (result.exit_code, "takes 128 tokens at least; this one has 20" in result.stderr) == (1, True)
    result = run("quantize", model, str(tmp_path / "folder"), "--to", "q4_0", "--calibrate")
    assert (result.exit_code, "give DST a name that ends in .gguf" in result.stderr) == (2, True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["short.txt", "text.txt"]


@pytest.mark.parametrize("more", [[], ["--calibrate"]])
def test_a_file_of_at_most_a_size(run: Run, model: str, tmp_path: Path, more: list[str]) -> None:
    least = run("quantize", model, str(tmp_path / "m.gguf"), "--max-size", "1", *more)
    found = re.search(r"takes (\d+) bytes at least \((.*)bpw\); allow that, or choose a smaller model", least.stderr)
    assert least.exit_code == 1
    assert found
    assert not list(tmp_path.iterdir())
    smallest, sizes, costs = int(found[1]), [], []
    for n, limit in enumerate((str(smallest), f"{smallest * 1.3 / 1e6:.6f}MB", "9bpw", "1GB")):
        dst = tmp_path / f"{n}.gguf"
        result = run("quantize", model, str(dst), "--max-size", limit, *more, "--json")
        assert result.exit_code == 0, result.stderr
        receipt = json.loads(result.stdout)
        sizes.append(dst.stat().st_size)
        costs.append(receipt["choice"]["predicted_kld"])
        assert sizes[-1] <= receipt["choice"]["max_size"]
        rounded = set(receipt["choice"]["kinds"].values()) != {"F16"}
        assert (receipt["plain"] is not None) == (bool(more) and rounded)
        types = {name: t.dtype for name, t in checkpoint.open(dst).tensors.items() if len(t.shape) == 2}
        assert types == receipt["choice"]["kinds"]
    assert sizes[0] == smallest
    assert sizes == sorted(sizes)
    assert costs == sorted(costs, reverse=True)
    assert float(found[2]) < 9
    said = run("quantize", model, str(tmp_path / "said.gguf"), "--max-size", "9bpw", *more).stdout.splitlines()
    assert said[0].split() == ["matrices", "types"]
    assert any(line.startswith("chosen for at most ") for line in said)


def choice(formats: dict[str, str]) -> mixed.Choice:
    parts = [{"part": "lm_head", "format": "q8", "harms": {"q8": 1e-4, "q4": 0.25}, "saved": 1}]
    return mixed.Choice(
        formats=formats, measured_kld=0.0015, steps=[], standard_error=1e-4, chosen_kld=0.0014, floor_kld=1e-5,
        max_kld=0.002, nbytes={"before": 2, "after": 1}, parts=parts, tries=[],
    )  # fmt: skip


def test_formats_chosen_by_a_budget(run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen is written; how it is chosen is pronk.measure.mixed's, and its tests'."""
    asked: list[Any] = []
    formats = {"": "bf16", "model.layers.0": "q4", "lm_head": "q8"}

    def choose(model: str, **arguments: Any) -> mixed.Choice:
        asked.append((model, arguments.pop("progress") and None, len(arguments.pop("ids")) > 1000, arguments))
        return choice(formats)

    monkeypatch.setattr(mixed, "choose", choose)
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--max-kld", "0.002")
    assert (result.exit_code, result.stderr) == (0, "")
    assert asked == [(model, None, True, {"max_kld": 0.002, "loading": {"tokenizer": None, "revision": None}})]
    types = {name: tensor.dtype for name, tensor in checkpoint.open(tmp_path / "m.gguf").tensors.items()}
    assert (types["lm_head.weight"], types["model.embed_tokens.weight"], types[UP]) == ("Q8_0", "BF16", "BF16")
    assert types["model.layers.0.mlp.up_proj.weight"] == "Q4_1"
    table, verdict = result.stdout.splitlines()[1:3], result.stdout.splitlines()[3]
    assert [line.split() for line in table] == [
        ["part", "format", "8", "bits", "4", "bits"],
        ["lm_head", "q8", "0.0001", "0.25"],
    ]
    assert verdict.startswith(
        "all together: 0.0015 ± 0.0001 on windows that had no part in the choice; the budget is 0.002"
    )
    again = run("quantize", model, str(tmp_path / "m.gguf"), "--max-kld", "0.002", "--overwrite", "--json")
    receipt = json.loads(again.stdout)
    assert (receipt["to"], receipt["choice"]["formats"]) == (None, formats)


@pytest.mark.slow
def test_a_budget_that_is_kept(run: Run, model: str, tmp_path: Path) -> None:
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--max-kld", "0.01", "--json")
    assert result.exit_code == 0, result.stderr
    receipt = json.loads(result.stdout)
    assert receipt["choice"]["measured_kld"] <= 0.01
    assert math.isfinite(receipt["divergence"]["mean"])
    assert len(set(receipt["choice"]["formats"].values())) > 1


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("m.gguf", ["--to", "int8"], "int8 is saved as a folder: give DST a name that does not end in .gguf"),
        ("m", ["--to", "q8"], "q8 is saved as a GGUF file: give DST a name that ends in .gguf, not"),
        ("m", ["--max-kld", "0.1"], "mixed precision is saved as a GGUF file"),
        ("m", [], "give one of --to, --max-kld and --max-size"),
        ("m.gguf", ["--to", "q8", "--max-kld", "1"], "give one of --to, --max-kld and --max-size"),
        ("m.gguf", ["--max-size", "1MB", "--max-kld", "1"], "give one of --to, --max-kld and --max-size"),
        ("m", ["--max-size", "1MB"], "mixed precision is saved as a GGUF file"),
        ("m.gguf", ["--max-size", "big"], "'big' is no size; write 80MB, 1.5GB, a number of bytes, or 4.5bpw"),
        ("m.gguf", ["--max-size", "0MB"], "'0MB' is no size"),
        ("m", ["--to", "int8", "--int8-threshold", "6"], "--int8-threshold is for --to llm-int8 only"),
        ("m", ["--to", "llm-int8", "--int8-threshold", "0"], "0.0 is not in the range x>0"),
        ("m", ["--to", "Q4_K"], "q4_k is saved as a GGUF file"),
        ("m", ["--to", "nf4"], "'nf4' is not one of 'int8', 'llm-int8', 'q8', 'q4', 'f16', 'bf16'"),
        ("m.gguf", ["--max-kld", "0"], "0.0 is not in the range x>0"),
    ],
)
def test_wrong_usage(run: Run, model: str, tmp_path: Path, name: str, more: list[str], message: str) -> None:
    result = run("quantize", model, str(tmp_path / name), *more)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written(run: Run, model: str, tmp_path: Path) -> None:
    """One line each, and nothing half-written."""
    (tmp_path / "file.gguf").write_text("mine")
    cases = {
        str(tmp_path / "file.gguf"): "exists; overwrite it (--overwrite)",
        str(tmp_path / "no" / "m.gguf"): "is no folder; make it first",
    }
    for destination, message in cases.items():
        result = run("quantize", model, destination, "--to", "q8")
        assert (result.exit_code, result.stdout) == (1, "")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    result = run("quantize", model, model, "--to", "int8", "--overwrite")
    assert result.exit_code == 1
    assert "is, or holds, the source" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file.gguf"]
    assert (tmp_path / "file.gguf").read_text() == "mine"


@pytest.mark.parametrize(("to", "name"), [("int8", "m"), ("q4", "m.gguf"), ("bf16", "m")])
def test_weights_that_are_not_numbers(run: Run, model: str, tmp_path: Path, to: str, name: str) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in Path(model).iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    weights = safetensors.numpy.load_file(source / "model.safetensors")
    weights[UP][3, 4] = np.nan
    safetensors.numpy.save_file(weights, source / "model.safetensors")
    result = run("quantize", str(source), str(tmp_path / name), "--to", to)
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"tensor '{UP}'" in result.stderr
    assert "infinity or NaN" in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_model_without_a_tokenizer(run: Run, model: str, tmp_path: Path) -> None:
    """Its receipt is made from tokens spread over the vocabulary; formats are chosen by a text, or not at all."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        (source / name).write_bytes((Path(model) / name).read_bytes())
    result = run("quantize", str(source), str(tmp_path / "m.gguf"), "--max-kld", "1")
    assert result.exit_code == 1
    assert result.stderr == (
        f"pronk: {source} carries no tokenizer, so there is no text to measure on; name one with --tokenizer FILE\n"
    )
    result = run("quantize", str(source), str(tmp_path / "m.gguf"), "--to", "q8", "--json")
    assert json.loads(result.stdout)["divergence"]["windows"] == 1


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        ("Hi.", ["--to", "q8"], "has 3 tokens, too few to measure"),
        ("", ["--to", "q8"], "has 0 tokens, too few to measure"),
        ("It rained for a while.", ["--max-kld", "1"], "choosing formats takes a text of"),
    ],
)
def test_a_text_that_is_too_short(
    run: Run, model: str, tmp_path: Path, text: str, more: list[str], message: str
) -> None:
    (tmp_path / "text").write_text(text)
    result = run("quantize", model, str(tmp_path / "m.gguf"), *more, "-f", str(tmp_path / "text"))
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_a_disk_that_is_full(model: str, tmp_path: Path) -> None:
    """Stood in for by a limit on the size of files, which the system reports as it does a full disk: by an error."""
    resource = pytest.importorskip("resource")
    command = [sys.executable, "-m", "pronk", "quantize", model, str(tmp_path / "m.gguf"), "--to", "q8"]

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"pronk: {tmp_path / 'm.gguf'}: cannot be written: File too large\n"
    assert not list(tmp_path.iterdir())


def test_tokens_that_are_not_read_are_not_said_to_be(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A context of 300 does not divide what is read; the receipt counted the rest, too."""
    from pronk import calibrate
    from pronk.calibrate.calibrated import windows
    from pronk.cli import blocks

    monkeypatch.setattr(blocks, "_written", lambda *given: calibrate.own_text())
    opened = checkpoint.open(model)
    short = replace(opened, config=replace(opened.config, max_position_embeddings=300))
    fed = blocks.fed(model, short, None, "", 8192)
    assert fed.written + fed.read == sum(map(len, windows(fed.ids, 300))) < len(fed.ids) == 8192


@pytest.mark.parametrize("more", [["--to", "q4_0", "--calibrate"], ["--max-size", "6bpw"]])
def test_a_disk_that_is_full_is_told_before_minutes_of_work(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    from pronk.cli import blocks

    def begun(*arguments: Any) -> None:
        raise AssertionError("it calibrates")

    monkeypatch.setattr(blocks, "fed", begun)
    left = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: left)
        result = run("quantize", model, str(tmp_path / "m.gguf"), *more)
    assert result.exit_code == 1
    told = r"m\.gguf takes [\d.]+ kB, and its disk has 1\.0 kB left; make room, or write elsewhere"
    assert re.search(told, result.stderr)
    with monkeypatch.context() as locked:
        locked.setattr(os, "access", lambda path, mode: False)
        result = run("quantize", model, str(tmp_path / "m.gguf"), *more)
    assert f"{tmp_path} may not be written to; write elsewhere" in result.stderr
    assert not list(tmp_path.iterdir())
    with pytest.raises(AssertionError, match="it calibrates"):
        run("quantize", model, str(tmp_path / "m.gguf"), *more)


def test_interrupted(run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.checkpoint.writers import gguf as write_gguf

    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(write_gguf, "_write_tensor", interrupted)
    assert run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q8").exit_code == 130
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [1, 9, 16])
def test_interrupted_while_it_calibrates(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Nothing is left behind."""
    from pronk.calibrate import gptq

    rounded, seen = gptq.rounded, list[str]()

    def interrupted(weights: Any, upper: Any, kind: str) -> Any:
        seen.append(kind)
        if len(seen) == at:
            raise KeyboardInterrupt
        return rounded(weights, upper, kind)

    monkeypatch.setattr(gptq, "rounded", interrupted)
    assert run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q4_0", "--calibrate").exit_code == 130
    assert not list(tmp_path.iterdir())


def test_written_but_not_measured(run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: object, **options: object) -> None:
        raise pronk.errors.PronkError("no engine")

    monkeypatch.setitem(vars(pronk), "load", load)
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q8")
    assert result.exit_code == 1
    assert result.stderr == f"pronk: {tmp_path / 'm.gguf'} is written and complete, but cannot be measured: no engine\n"
    assert (tmp_path / "m.gguf").exists()


def test_interrupted_in_the_receipt(run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DST stays, and that is said."""

    def interrupted(*arguments: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(receipt, "receipt", interrupted)
    destination = str(tmp_path / "m.gguf")
    result = run("quantize", model, destination, "--to", "q8")
    assert (result.exit_code, result.stdout) == (130, "")
    assert f"interrupted; {destination} is written and complete, but not measured" in result.stderr
    assert f"measure it with: pronk divergence {model} {destination}\n" in result.stderr
    assert checkpoint.open(tmp_path / "m.gguf").quantization == "Q8_0 x 16"


@pytest.fixture
def short_of_memory(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Models in these formats do not fit."""
    load, formats = pronk.load, list[str]()

    def loaded(*arguments: Any, **how: Any) -> Any:
        if how.get("quantize") in formats:
            raise NotEnoughMemory("it needs 99 GB of memory, and 8 GB are free", "pack it smaller (--quantize q4)")
        return load(*arguments, **how)

    monkeypatch.setitem(vars(pronk), "load", loaded)
    return formats


def test_too_little_memory_to_write_names_what_needs_none(
    run: Run, model: str, tmp_path: Path, short_of_memory: list[str]
) -> None:
    """Calibrating holds a layer at a time, and what writes the whole model."""
    short_of_memory.append("int8")
    dst = tmp_path / "m.gguf"
    result = run("quantize", model, str(dst), "--to", "q4_0", "--calibrate")
    assert (result.exit_code, result.stderr) == (
        1,
        "pronk: it needs 99 GB of memory, and 8 GB are free; it can be calibrated on a text alone, with "
        "--self-written 0\n",
    )
    assert not dst.exists()
    assert run("quantize", model, str(dst), "--to", "q4_0", "--self-written", "0").exit_code == 0


def test_a_source_that_does_not_fit_in_f32(run: Run, model: str, tmp_path: Path, short_of_memory: list[str]) -> None:
    short_of_memory.append("f32")
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q8")
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"mean KL divergence from {model} in bf16: " in result.stdout
    again = run("quantize", model, str(tmp_path / "again.gguf"), "--to", "q8", "--json")
    assert json.loads(again.stdout)["reference"] == "bf16"


def test_a_source_that_does_not_fit_at_all(run: Run, model: str, tmp_path: Path, short_of_memory: list[str]) -> None:
    """The way out is one that there is here."""
    short_of_memory += ["f32", "bf16"]
    destination = tmp_path / "m.gguf"
    result = run("quantize", model, str(destination), "--max-kld", "0.1")
    assert result.stderr == (
        "pronk: it needs 99 GB of memory, and 8 GB are free; --max-kld compares with SRC in f32: choose a smaller "
        "model, or name a format, as --to q4\n"
    )
    assert not destination.exists()
    result = run("quantize", model, str(destination), "--to", "q8")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.endswith("8 GB are free; compare the two on a larger machine, with pronk divergence\n")
    assert "is written and complete, but cannot be measured" in result.stderr
    assert checkpoint.open(destination).quantization == "Q8_0 x 16"


def test_what_is_no_smaller_is_told(run: Run, model: str, tmp_path: Path) -> None:
    small, again = tmp_path / "small.gguf", tmp_path / "again.gguf"
    assert "no smaller" not in run("quantize", model, str(small), "--to", "q4").stderr
    result = run("quantize", str(small), str(again), "--to", "q8")
    assert result.stderr == f"{again} is no smaller than {small}, which is quantized already (Q4_1 x 14, Q8_0 x 2)\n"


def test_a_budget_for_a_model_of_a_short_context(run: Run, tmp_path: Path) -> None:
    """Once refused, with advice (--ctx) that this verb does not have."""
    short = save_tiny_chat_model(tmp_path / "short", max_position_embeddings=64)
    result = run("quantize", str(short), str(tmp_path / "m.gguf"), "--max-kld", "1")
    assert result.exit_code == 0, result.stderr
    assert "(Q4_1 x 16)" in result.stdout


@pytest.mark.parametrize(("to", "name"), [("int8", "m"), ("q8", "m.gguf")])
def test_a_tokenizer_that_is_another_models_is_refused_before_anything_is_written(
    run: Run, tmp_path: Path, to: str, name: str
) -> None:
    config = tiny_config(vocab_size=200)
    save_huggingface(save_tiny_chat_model(tmp_path / "source"), config, random_weights(config))
    result = run("quantize", str(tmp_path / "source"), str(tmp_path / name), "--to", to)
    assert result.exit_code == 1
    assert "a tokenizer of 259 tokens is another model's" in result.stderr or "the model only 200" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize(
    ("how", "told"), [(["--to", "q4"], True), (["--max-kld", "9"], True), (["--to", "f16"], False)]
)
def test_rows_that_no_blocks_fill_are_told(run: Run, tmp_path: Path, how: list[str], told: bool) -> None:
    config = tiny_config(vocab_size=259, intermediate_size=33, max_position_embeddings=512)
    save_huggingface(save_tiny_chat_model(tmp_path / "source"), config, random_weights(config))
    result = run("quantize", str(tmp_path / "source"), str(tmp_path / "m.gguf"), *how)
    assert result.exit_code == 0, result.stderr
    assert ("2 of 16 matrices have rows that do not fill blocks of 32" in result.stderr) == told


def test_rows_that_do_not_fill_the_type_that_was_asked_for_are_told(run: Run, tmp_path: Path) -> None:
    """q4_k's receipt had Q4_1 for most matrices, and did not say why."""
    config = tiny_config(vocab_size=259, intermediate_size=256, max_position_embeddings=512)
    save_huggingface(save_tiny_chat_model(tmp_path / "source"), config, random_weights(config))
    for to, told in (("q4_k", "14 of 16 matrices have rows that do not fill blocks of 256 weights, as Q4_K has them: "
                      "they are in Q4_1\n"), ("q4_0", "")):  # fmt: skip
        result = run("quantize", str(tmp_path / "source"), str(tmp_path / f"{to}.gguf"), "--to", to)
        assert (result.exit_code, told in result.stderr, "do not fill" in result.stderr) == (0, True, bool(told))


def test_one_text_for_both_is_refused_before_it_is_read(run: Run, model: str, tmp_path: Path) -> None:
    """Standard input was empty for the second, which was said to have no tokens."""
    both = ("--calibration-text", "-", "--text", "-")
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q4_0", *both, input="ab" * 200)
    assert (result.exit_code, "--calibration-text and --text name one text" in result.stderr) == (1, True)
    assert not list(tmp_path.iterdir())


def test_what_is_in_no_blocks_is_not_said_to_be_calibrated(run: Run, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=259, hidden_size=24, head_dim=6, intermediate_size=33, max_position_embeddings=512)
    save_huggingface(save_tiny_chat_model(tmp_path / "source"), config, random_weights(config))
    to = ("--to", "q4_0", "--calibrate", "--self-written", "0")
    result = run("quantize", str(tmp_path / "source"), str(tmp_path / "m.gguf"), *to)
    assert (result.exit_code, "alibrated" in result.stdout) == (0, False), result.output
    assert "no matrix is rounded, and nothing calibrated" in result.stderr
    assert "16 of 16 matrices have rows that do not fill blocks of 32" in result.stderr


@pytest.fixture(scope="module")
def taught(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model after training of all its weights, which moved them by less than 4 bits can tell."""
    folder = tmp_path_factory.mktemp("taught") / "m"
    shutil.copytree(model, folder)
    weights, draw = safetensors.numpy.load_file(folder / "model.safetensors"), np.random.default_rng(1)
    for weight in weights.values():
        weight += draw.normal(0, 0.002, weight.shape).astype(weight.dtype)
    safetensors.numpy.save_file(weights, folder / "model.safetensors")
    return folder


def test_over_a_third_of_what_was_learned_lost(run: Run, model: str, taught: Path, tmp_path: Path) -> None:
    destination = tmp_path / "m.gguf"
    result = run("quantize", str(taught), str(destination), "--to", "q4", "--base", model)
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"pronk: {destination} is not written: q4 loses ")
    assert "store q8" in result.stderr
    assert not list(tmp_path.iterdir())

    result = run("quantize", str(taught), str(destination), "--to", "q8", "--base", model)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\nlost of what was learned: " in result.stdout
    assert checkpoint.open(destination).quantization == "Q8_0 x 16"

    arguments = ("--to", "q4", "--base", model, "--accept-loss", "--json")
    assert "exists; overwrite it" in run("quantize", str(taught), str(destination), *arguments).stderr
    result = run("quantize", str(taught), str(destination), *arguments, "--overwrite")
    assert result.exit_code == 0
    receipt = json.loads(result.stdout)
    assert receipt["base"] == model
    assert receipt["learned"]["lost"] > 1 / 3
    assert checkpoint.open(destination).quantization == receipt["quantization"]


def test_without_a_base_nothing_is_claimed_of_what_was_learned(
    run: Run, model: str, taught: Path, tmp_path: Path
) -> None:
    result = run("quantize", str(taught), str(tmp_path / "m.gguf"), "--to", "q4", "--json")
    receipt = json.loads(result.stdout)
    assert (result.exit_code, receipt["base"], receipt["learned"]) == (0, None, None)
    result = run("quantize", str(taught), str(tmp_path / "n.gguf"), "--to", "q4", "--accept-loss")
    assert (result.exit_code, "--accept-loss is for --base" in result.stderr) == (2, True)


@pytest.mark.parametrize("how", ["merged", "trained"])
def test_the_base_is_found_where_the_model_s_folder_names_it(
    run: Run, model: str, taught: Path, tmp_path: Path, how: str
) -> None:
    """A merge in floats, then 4 bits: they lost what had been learned without a word, for nobody had said --base."""
    if how == "merged":
        source = tmp_path / "merged"
        assert run("merge", model, str(taught), str(source)).exit_code == 0
    else:  # as a run with --full leaves it
        source = Path(shutil.copytree(taught, tmp_path / "run" / "model"))
        (source.parent / "run.yaml").write_text(json.dumps({"model": model, "out": "run", "full": True}))
    destination = tmp_path / "m.gguf"
    result = run("quantize", str(source), str(destination), "--to", "q4")
    assert (result.exit_code, result.stdout, destination.exists()) == (3, "", False)
    assert "q4 loses " in result.stderr
    result = run("quantize", str(source), str(destination), "--to", "q4", "--accept-loss", "--json")
    assert result.exit_code == 0
    receipt = json.loads(result.stdout)
    assert Path(receipt["base"]).samefile(model)
    assert receipt["learned"]["lost"] > 1 / 3


def test_a_gguf_file_names_the_base_of_a_merge(
    run: Run, model: str, taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name, never by a path, which nobody else is to read in it."""
    from pronk.checkpoint.containers.gguf_file import open_file

    opened = saving.open_source

    def named(src: str, *options: Any) -> Any:
        return opened(model if src == "nobody/base" else src, *options)

    monkeypatch.setattr(saving, "open_source", named)
    for base, told in ((model, None), ("nobody/base", "nobody/base")):
        source = tmp_path / "merged.gguf"
        assert run("merge", base, str(taught), str(source), "--overwrite").exit_code == 0
        metadata = open_file(source).metadata
        assert metadata.get("general.base_model.0.name") == told
        assert metadata.get("general.base_model.count") == (1 if told else None)
        assert str(Path(model).parent) not in str(metadata)
        result = run("quantize", str(source), str(tmp_path / f"{bool(told)}.gguf"), "--to", "q4")
        assert ("was made of nobody/base, which is not here" in result.stderr) == bool(told)
        monkeypatch.setattr(origin, "is_here", lambda name: True)
        result = run("quantize", str(source), str(tmp_path / "m.gguf"), "--to", "q4", "--overwrite")
        assert (result.exit_code, "q4 loses " in result.stderr) == ((3, True) if told else (0, False))
        monkeypatch.undo()
        monkeypatch.setattr(saving, "open_source", named)


def test_a_base_that_is_not_to_be_had_is_said(run: Run, model: str, taught: Path, tmp_path: Path) -> None:
    """Nothing is downloaded for a folder that names it, and nothing is measured."""
    source = Path(shutil.copytree(taught, tmp_path / "merged"))
    config = tiny_config(vocab_size=96)
    save_huggingface(tmp_path / "other", config, random_weights(config))
    told = "what is lost of what it learned is not measured (--base MODEL)\n"
    for number, (base, problem) in enumerate(
        [("nobody/has-this", "which is not here"), (str(tmp_path / "other"), "which has another vocabulary")]
    ):
        (source / "merge.yaml").write_text(json.dumps({"base": base, "others": ["x"]}))
        result = run("quantize", str(source), str(tmp_path / f"{number}.gguf"), "--to", "q4")
        assert (result.exit_code, result.stderr) == (0, f"{source} was made of {base}, {problem}: {told}")
    for content, problem in (("base: [1]", "base must be a name"), ("- base", "must hold options"), ("{", "not YAML")):
        (source / "merge.yaml").write_text(content)
        result = run("quantize", str(source), str(tmp_path / "m.gguf"), "--to", "q4")
        assert (result.exit_code, result.stderr.count("\n"), problem in result.stderr) == (1, 1, True), result.stderr
    result = run(
        "quantize", str(source), str(tmp_path / "m.gguf"), "--to", "q8", "--base", model
    )  # what it says goes first
    assert result.exit_code == 0, result.stderr


def test_a_base_of_another_vocabulary(run: Run, taught: Path, tmp_path: Path) -> None:
    config = tiny_config(vocab_size=96)
    save_huggingface(tmp_path / "other", config, random_weights(config))
    result = run("quantize", str(taught), str(tmp_path / "m.gguf"), "--to", "q4", "--base", str(tmp_path / "other"))
    assert result.exit_code == 1
    assert "has another vocabulary" in result.stderr
    assert not (tmp_path / "m.gguf").exists()


def test_what_gguf_cannot_hold_is_refused_before_anything_is_computed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reward model ended in a KeyError after it was calibrated, dynamic RoPE was refused then."""
    monkeypatch.setattr("pronk.cli.blocks.fed", lambda *_, **__: pytest.fail("a text was prepared"))
    folder = save_tiny_chat_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 4.0}
    (folder / "config.json").write_text(json.dumps(config))
    result = run("quantize", str(folder), str(tmp_path / "o.gguf"), "--to", "q4_k", "--calibrate")
    assert (result.exit_code, "GGUF has no place for rope_scaling" in result.stderr) == (1, True)


def test_the_size_that_is_named_as_enough_is_enough(
    run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits a weight were rounded to nearest, and refused; and the model wrote its text before it was refused."""
    result = run("quantize", model, str(tmp_path / "o.gguf"), "--max-size", "1")
    (enough,) = re.findall(r"\((.*bpw)\)", result.stderr)
    assert run("quantize", model, str(tmp_path / "o.gguf"), "--max-size", enough).exit_code == 0
    monkeypatch.setattr("pronk.cli.blocks.fed", lambda *_, **__: pytest.fail("a text was prepared"))
    refused = run("quantize", model, str(tmp_path / "p.gguf"), "--max-size", "1", "--calibrate")
    assert (refused.exit_code, "bytes at least" in refused.stderr) == (1, True)


def test_what_is_measured_against_is_not_replaced(run: Run, model: str, tmp_path: Path) -> None:
    base = tmp_path / "base.gguf"
    assert run("quantize", model, str(base), "--to", "q8").exit_code == 0
    before = base.read_bytes()
    result = run("quantize", model, str(base), "--to", "q8", "--base", str(base), "--overwrite")
    assert (result.exit_code, "--base" in result.stderr, base.read_bytes() == before) == (1, True, True)


def test_a_link_that_leads_nowhere_is_not_replaced(run: Run, model: str, tmp_path: Path) -> None:
    link = tmp_path / "l.gguf"
    link.symlink_to(tmp_path / "nowhere")
    result = run("quantize", model, str(link), "--to", "q4_k")
    assert (result.exit_code, "exists" in result.stderr, link.is_symlink()) == (1, True, True)


@pytest.mark.parametrize("to", ["q4_k", "q8"])
def test_kernels_that_this_processor_has_not_are_told_in_a_line(model: str, tmp_path: Path, to: str) -> None:
    command = [sys.executable, "-m", "pronk", "quantize", model, str(tmp_path / "o.gguf"), "--to", to]
    done = subprocess.run(command, env=os.environ | {"PRONK_ISA": "z80"}, capture_output=True, text=True, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "PRONK_ISA=z80: this processor can run" in done.stderr
    assert not list(tmp_path.iterdir())  # in q8 it was written first
