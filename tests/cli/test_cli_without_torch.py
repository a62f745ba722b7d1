"""Examples of --help that hold weights in bf16 need no torch, and --dtype on verbs that run a model names our word."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

Run = Callable[..., Result]
NO_TORCH = "import sys; sys.modules['torch'] = None; from pronk.cli import main; main()"
MODELS = ("smollm2:135m", "./my-model", "model.gguf")


def examples(run: Run) -> list[str]:
    """With bf16 in them, of what does not ask for torch's measurements."""
    lines = [
        line.strip() for verb in ([], ["generate"], ["convert"]) for line in run(*verb, "--help").stdout.split("\n")
    ]
    return [line.split("  ")[0] for line in lines if "pronk " in line and " bf16" in line]


def test_the_examples_with_bf16_work_without_torch(run: Run, model: str, tmp_path: Path) -> None:
    found = examples(run)
    assert len(found) == 3
    for line in found:
        typed, _, command = line.rpartition("| ")
        words = [model if word in MODELS else word for word in shlex.split(command)]
        assert words.pop(0) == "pronk"
        words += ["--overwrite"] if "convert" in words else ["-n", "2"]
        done = subprocess.run(
            [sys.executable, "-c", NO_TORCH, *words], input=typed, capture_output=True, text=True, cwd=tmp_path
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout


@pytest.mark.parametrize("verb", ["generate", "chat", "perplexity", "verify"])
def test_who_types_dtype_is_told_the_word_in_one_line(run: Run, verb: str) -> None:
    result = run(verb, "--dtype", "bf16", "x")
    assert (result.exit_code, result.stdout) == (2, "")
    first, second = result.stderr.splitlines()
    assert first == "pronk: no option --dtype; --quantize is f32, bf16 or f16"
    assert second == f"Try 'pronk {verb} --help'."
