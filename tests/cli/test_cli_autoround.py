"""`pronk quantize --rounding autoround`: its receipt, what it refuses, and nothing left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from pronk import checkpoint

Run = Callable[..., Result]
NO_TORCH = "import sys; sys.modules['torch'] = None; from pronk.cli import main; main()"


def test_a_model_rounded_by_steps(run: Run, model: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The river was brown and slow. " * 40)
    way = ["--rounding", "autoround", "--steps", "20", "--calibration-text", str(text)]
    result = run("quantize", model, str(tmp_path / "m.gguf"), "--to", "q4_0", *way, "--json")
    assert result.exit_code == 0, result.stderr
    receipt = json.loads(result.stdout)
    assert receipt["quantization"] == checkpoint.open(tmp_path / "m.gguf").quantization == "Q4_0 x 14, Q4_1 x 2"
    said = {"text": str(text), "tokens": 1200, "read": 1200, "written": 0, "rounding": "autoround", "steps": 20}
    assert receipt["calibration"] == said
    assert receipt["plain"]["mean"] > 0
    again = run("quantize", model, str(tmp_path / "again.gguf"), "--to", "q4_0", *way)
    assert again.stdout.splitlines()[2].endswith(
        f"Calibrated by autoround, 20 steps a layer, on {text} (1200 tokens); measured on pronk's own text, another one"
    )
    assert (tmp_path / "m.gguf").read_bytes() == (tmp_path / "again.gguf").read_bytes()


def test_gptq_is_the_default_and_has_a_name(run: Run, model: str, tmp_path: Path) -> None:
    for name, way in (("one", ["--calibrate"]), ("other", ["--rounding", "gptq"])):
        result = run("quantize", model, str(tmp_path / f"{name}.gguf"), "--to", "q4_0", *way, "--json")
        assert json.loads(result.stdout)["calibration"]["rounding"] == "gptq"
    assert (tmp_path / "one.gguf").read_bytes() == (tmp_path / "other.gguf").read_bytes()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--to", "q4", "--rounding", "autoround"], "--calibrate is for --to q2_k, q3_k, "),
        (["--to", "q4_0", "--calibrate", "--steps", "9"], "--steps is for --rounding autoround"),
        (["--to", "q4_0", "--rounding", "autoround", "--steps", "0"], "0 is not in the range x>=1"),
        (["--max-size", "1GB", "--rounding", "autoround"], "--rounding autoround is for --to: --max-size chooses by "),
    ],
)
def test_what_is_refused(run: Run, model: str, tmp_path: Path, options: list[str], problem: str) -> None:
    result = run("quantize", model, str(tmp_path / "m.gguf"), *options)
    assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr
    assert not list(tmp_path.iterdir())


def test_without_torch_there_is_one_line(model: str, tmp_path: Path) -> None:
    words = ["quantize", model, str(tmp_path / "m.gguf"), "--to", "q4_0", "--rounding"]
    done = [
        subprocess.run([sys.executable, "-c", NO_TORCH, *words, way], capture_output=True, text=True)
        for way in ("autoround", "gptq")
    ]
    assert (done[0].returncode, done[0].stdout) == (1, "")
    assert done[0].stderr.splitlines() == [
        "pronk: the torch engine needs torch; install it with: pip install 'torch>=2.10'"
    ]
    assert done[1].returncode == 0, done[1].stderr
    assert [file.name for file in tmp_path.iterdir()] == ["m.gguf"]


def test_interrupted_while_it_learns(run: Run, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left behind."""
    from pronk.train.rounding import Rounding

    def interrupted(self: Rounding, rate: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Rounding, "move", interrupted)
    way = ["--to", "q4_0", "--rounding", "autoround"]
    assert run("quantize", model, str(tmp_path / "m.gguf"), *way).exit_code == 130
    assert not list(tmp_path.iterdir())
