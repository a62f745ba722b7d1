"""`pronk merge`: the adapter's model without the adapter, in any format, and a receipt that can say no."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from click.testing import Result

import pronk
from pronk import checkpoint
from pronk.checkpoint import adapter, merging
from pronk.checkpoint.merging import Part, merged
from pronk.checkpoint.tensors import Checkpoint
from pronk.cli import merge
from pronk.engine.batch import Batch
from pronk.engine.batch import Run as Rows

Run = Callable[..., Result]
IDS = [1, 50, 60, 70, 80, 90]


@pytest.fixture(scope="module")
def folder(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random adapter, large enough to be seen."""
    return save(model, tmp_path_factory.mktemp("adapter"), 0.1)


@pytest.fixture(scope="module")
def faint(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """One that changes less than 4 bits can tell, and more than 8 bits cannot."""
    return save(model, tmp_path_factory.mktemp("faint"), 0.045)


def save(model: str, folder: Path, size: float) -> str:
    draw, weights = np.random.default_rng(4), {}
    for name, shape in checkpoint.open(model).config.tensor_shapes().items():
        module = name.removesuffix(".weight")
        if module.endswith("proj"):
            weights[adapter.key(module, "lora_A")] = draw.normal(0, size, (3, shape[1])).astype(np.float32)
            weights[adapter.key(module, "lora_B")] = draw.normal(0, size, (shape[0], 3)).astype(np.float32)
    safetensors.numpy.save_file(weights, folder / adapter.WEIGHTS)
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    config["target_modules"] = [*config["target_modules"], "gate_proj", "up_proj", "down_proj"]  # type: ignore[misc]
    (folder / adapter.CONFIG).write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "dtype", "least", "most"),
    [("m", "f32", 0, 0), ("m.gguf", "f32", 0, 0), ("m", "bf16", 0, 1e-3), ("m.gguf", "q8", 1e-9, 1e-2)],
)
def test_merged(
    run: Run, model: str, folder: str, tmp_path: Path, name: str, dtype: str, least: float, most: float
) -> None:
    result = run("merge", model, folder, str(tmp_path / name), "--dtype", dtype, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    receipt = json.loads(result.stdout)
    assert least <= receipt["divergence"]["mean"] <= most
    merged = pronk.load(tmp_path / name, engine="cpu")
    assert merged.has_tokenizer
    opened = checkpoint.open(model)
    summed = adapter.applied(opened, adapter.open(Path(folder), opened))
    expected = pronk.load(summed, engine="cpu", quantize="f32").logits(IDS)
    if dtype == "f32":
        assert np.array_equal(merged.logits(IDS), expected)
    assert not np.allclose(pronk.load(model, engine="cpu").logits(IDS), expected, atol=0.05)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_receipt_as_text(run: Run, model: str, folder: str, tmp_path: Path) -> None:
    lines = run("merge", model, folder, str(tmp_path / "m")).stdout.splitlines()
    assert lines[0].startswith(f"{tmp_path / 'm'}: huggingface (f32), ")
    assert lines[0].endswith(f"; merged into {model} (F32)")
    assert lines[1].startswith(f"mean KL divergence from {model} in f32 with {folder} applied: 0 ± 0; ")
    assert lines[1].endswith("is the same in 100.0% of 508 predictions")
    assert lines[2].startswith("lost of what was learned: 0.0%; the untouched base lies ")


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_into_weights_that_it_was_trained_beside(run: Run, model: str, folder: str, tmp_path: Path, dtype: str) -> None:
    """Codes and all: what answers is what learned (train/frozen.py), to rounding in float32."""
    torch = pytest.importorskip("torch")
    from pronk.torch_engine.backend import TorchBackend, load_model
    from pronk.torch_engine.codes_linear import CodesLinear
    from pronk.train import adapter as trained_adapter
    from pronk.train import frozen

    base = tmp_path / "base.gguf"
    assert run("quantize", model, str(base), "--to", dtype).exit_code == 0
    found = json.loads(run("merge", str(base), folder, str(tmp_path / "m.gguf"), "--json").stdout)
    assert found["merged_into"] == checkpoint.open(base).quantization
    opened, cpu = checkpoint.open(base), torch.device("cpu")
    trained = load_model(opened, cpu, torch.float32, linear=frozen.linear(opened, "auto", cpu))
    assert any(isinstance(module, CodesLinear) for module in trained.modules())
    trained_adapter.load(trained, Path(folder))
    learned = TorchBackend(trained.eval()).forward(Batch.of([Rows(IDS, logits="all")]), None)
    for answers in (pronk.load(tmp_path / "m.gguf"), pronk.load(base, adapter=folder, quantize="f32")):
        np.testing.assert_allclose(answers.logits(IDS), learned, rtol=1e-4, atol=1e-4)


def test_too_far_off_is_not_written(run: Run, model: str, folder: str, tmp_path: Path) -> None:
    result = run("merge", model, folder, str(tmp_path / "m.gguf"), "--dtype", "q4", "--max-kld", "1e-6")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "m.gguf is not written: in q4 its predictions lie " in result.stderr
    assert "--max-kld allows 1e-06" in result.stderr
    assert not list(tmp_path.iterdir())
    assert run("merge", model, folder, str(tmp_path / "m.gguf"), "--dtype", "q4", "--max-kld", "1").exit_code == 0


def test_a_merge_that_went_wrong_is_seen(
    run: Run, model: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inverse: half of the adapter written, which --max-kld is there to find."""
    from pronk.checkpoint.writers import write

    save = write.save

    def half(checkpoint: Checkpoint, *arguments: Any, **options: Any) -> Any:
        base = pronk.checkpoint.open(model).tensors
        tensors = {n: base[n] if "layers.1" in n else tensor for n, tensor in checkpoint.tensors.items()}
        from dataclasses import replace

        return save(replace(checkpoint, tensors=tensors), *arguments, **options)

    monkeypatch.setattr(write, "save", half)
    result = run("merge", model, folder, str(tmp_path / "m"), "--max-kld", "0.0001")
    assert result.exit_code == 1
    assert "is not written" in result.stderr


def test_overwritten_only_where_asked(run: Run, model: str, folder: str, tmp_path: Path) -> None:
    assert run("merge", model, folder, str(tmp_path / "m")).exit_code == 0
    again = run("merge", model, folder, str(tmp_path / "m"))
    assert again.exit_code == 1
    assert "exists; overwrite it (--overwrite)" in again.stderr
    assert run("merge", model, folder, str(tmp_path / "m"), "--dtype", "bf16", "--overwrite").exit_code == 0
    assert {t.dtype for t in checkpoint.open(tmp_path / "m").tensors.values()} == {"BF16"}
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize(
    ("name", "dtype", "code", "message"),
    [
        ("m", "q8", 2, "safetensors is not written in q8; choose from f32, f16"),
        ("m", "q4", 2, "; a DST whose name ends in .gguf takes it"),
        ("m.gguf", "int8", 2, "gguf is not written in int8"),
        ("no/m", "f32", 1, "is no folder; make it first"),
    ],
)
def test_what_cannot_be(
    run: Run, model: str, folder: str, tmp_path: Path, name: str, dtype: str, code: int, message: str
) -> None:
    result = run("merge", model, folder, str(tmp_path / name), "--dtype", dtype)
    assert (result.exit_code, result.stdout) == (code, "")
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_no_adapter(run: Run, model: str, tmp_path: Path) -> None:
    result = run("merge", model, str(tmp_path), str(tmp_path / "m"))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert f"{tmp_path}: no model in this folder" in result.stderr
    assert "nor is it an adapter, which has adapter_config.json" in result.stderr


def test_over_a_third_of_what_was_learned_lost(run: Run, model: str, faint: str, tmp_path: Path) -> None:
    """Refused in one line with the way out, and exit code 3; 8 bits keep it; it is written where that is accepted."""
    destination = tmp_path / "m.gguf"
    result = run("merge", model, faint, str(destination), "--dtype", "q4")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"pronk: {destination} is not written: q4 loses ")
    assert "% of what was learned: on pronk's own text its predictions lie " in result.stderr
    for way in ("store q8", "pronk quantize --max-kld", "keep the adapter apart (--adapter)", "--accept-loss"):
        assert way in result.stderr
    assert not list(tmp_path.iterdir())

    result = run("merge", model, faint, str(destination), "--dtype", "q8", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    learned = json.loads(result.stdout)["learned"]
    assert 0 < learned["lost"] < 1 / 3
    assert 0 <= learned["noise_floor"] < learned["divergence"]["mean"]

    result = run("merge", model, faint, str(destination), "--dtype", "q4", "--accept-loss", "--overwrite", "--json")
    assert result.exit_code == 0
    assert result.stderr.startswith("q4 loses ")
    receipt = json.loads(result.stdout)
    assert receipt["learned"]["lost"] > 1 / 3
    assert checkpoint.open(destination).quantization == receipt["quantization"] == "Q4_1 x 14, Q8_0 x 2"


def test_lost_is_a_share_of_two_divergences_over_the_same_predictions(
    run: Run, model: str, faint: str, tmp_path: Path
) -> None:
    """Measured once more here, apart from each other."""
    from pronk.measure.divergence import divergence
    from pronk.measure.windows import evaluation_text

    destination = tmp_path / "m.gguf"
    receipt = json.loads(
        run("merge", model, faint, str(destination), "--dtype", "q4", "--accept-loss", "--json").stdout
    )
    opened = checkpoint.open(model)
    merged = pronk.load(adapter.applied(opened, adapter.open(Path(faint), opened)), engine="cpu", quantize="f32")
    ids = merged.tokenizer.encode(evaluation_text())
    written, base = (
        divergence(merged, pronk.load(other, engine="cpu"), ids, ctx=256, count=4)["mean"]
        for other in (destination, model)
    )
    assert receipt["divergence"]["mean"] == pytest.approx(written, rel=1e-6)
    assert receipt["learned"]["divergence"]["mean"] == pytest.approx(base, rel=1e-6)
    assert receipt["learned"]["lost"] == pytest.approx(written / base, rel=1e-6)


def test_a_text_that_shows_nothing_of_what_was_learned(run: Run, model: str, tmp_path: Path) -> None:
    """Nothing is claimed of what rounding hides, and another text asked for."""
    silent = save(model, tmp_path, 1e-6)
    result = run("merge", model, silent, str(tmp_path / "m.gguf"), "--dtype", "q4", "--json")
    assert result.exit_code == 0
    assert result.stderr.startswith("pronk's own text shows nothing of what was learned (KL divergence ")
    assert "--text FILE" in result.stderr
    learned = json.loads(result.stdout)["learned"]
    assert learned["lost"] is None
    assert "lost of what" not in run("merge", model, silent, str(tmp_path / "m2.gguf")).stdout


@pytest.mark.parametrize("method", ["linear", "ties", "dare-linear", "dare-ties"])
def test_several_by_their_weights(run: Run, model: str, folder: str, faint: str, tmp_path: Path, method: str) -> None:
    """What is written is what merging.py makes of them, and the receipt says how."""
    drawn = ["--seed", "7"] if method.startswith("dare") else []
    kept = ["--density", "0.5"] if method != "linear" else []
    words = [f"{folder}=0.7", f"{faint}=-0.25", str(tmp_path / "m"), "--method", method, *kept, *drawn]
    result = run("merge", model, *words, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    receipt = json.loads(result.stdout)
    assert receipt["merged"] == [{"name": folder, "weight": 0.7}, {"name": faint, "weight": -0.25}]
    assert (receipt["method"], receipt.get("density"), receipt.get("seed")) == (
        method, 0.5 if kept else None, 7 if drawn else None
    )  # fmt: skip
    base = checkpoint.open(model)
    parts = [Part(name, adapter.open(Path(name), base), w) for name, w in ((folder, 0.7), (faint, -0.25))]
    expected = merged(base, parts, method, 0.5 if kept else None, 7)
    for name, tensor in checkpoint.open(tmp_path / "m").tensors.items():
        assert np.array_equal(tensor.read(), expected.tensors[name].read()), name
    again = run("merge", model, *words, "--overwrite")
    assert again.exit_code == 0
    assert f"with 0.7 of {folder} and -0.25 of {faint}: 0" in again.stdout
    assert (f", by {method}, density 0.5" in again.stdout) == (method != "linear")


def test_models_and_gguf_adapters(run: Run, model: str, folder: str, tmp_path: Path) -> None:
    """Half of the way to a model that an adapter was merged into is half of that adapter; SLERP's arc is as good as
    straight there. A name may hold a =."""
    assert run("merge", model, folder, str(tmp_path / "a=1")).exit_code == 0
    assert run("convert", folder, str(tmp_path / "mine.gguf"), "--base", model).exit_code == 0
    for out, *words in (
        ("half", f"{tmp_path / 'mine.gguf'}=0.5"),
        ("mean", f"{tmp_path / 'a=1'}=0.5"),
        ("arc", str(tmp_path / "a=1"), "--method", "slerp"),
    ):
        result = run("merge", model, words[0], str(tmp_path / out), *words[1:])
        assert (result.exit_code, result.stderr) == (0, "")
    half, mean, arc = (checkpoint.open(tmp_path / out).tensors for out in ("half", "mean", "arc"))
    moved = 0.0
    for name, tensor in checkpoint.open(model).tensors.items():
        np.testing.assert_allclose(mean[name].read(), half[name].read(), rtol=0, atol=1e-6)
        assert np.abs(arc[name].read() - half[name].read()).max() < 0.3
        moved = max(moved, float(np.abs(arc[name].read() - tensor.read()).max()))
    assert moved > 0.1


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["{folder}=much"], 2, "'much' is no weight; give a number behind the ="),
        (["{folder}=nan"], 2, "a weight must be a number"),
        (["{folder}", "{folder}", "--method", "slerp"], 1, "slerp goes from BASE towards one other"),
        (["{folder}", "--density", "0.5"], 2, "linear keeps all"),
        (["{folder}", "--seed", "1", "--method", "ties"], 2, "--seed is for dare-linear and dare-ties"),
        (["./nowhere=0.5"], 1, "./nowhere"),
        (["{folder}=1e30"], 1, "is not written: what comes out predicts no numbers"),  # it asked for --quantize
    ],
)
def test_what_cannot_be_merged(
    run: Run, model: str, folder: str, tmp_path: Path, words: list[str], code: int, problem: str
) -> None:
    others = [word.format(folder=folder) for word in words]
    named = [word for word in others if "/" in word]
    rest = others[len(named) :]
    result = run("merge", model, *named, str(tmp_path / "m"), *rest)
    assert result.exit_code == code
    assert problem in result.stderr
    assert not list(tmp_path.iterdir())


def test_the_verb_has_the_methods_that_there_are() -> None:
    assert merge.METHODS == merging.METHODS
