"""Triton compiles every kernel of a pass for a GPU, whether there is one or not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLOATS = {"_row", "_few", "_rms_norm", "_swiglu", "_rotate_and_store", "_attend", "_merge", "_of_part", "_of_row"}
ALWAYS = {"_rotate_and_store", "_attend", "_merge", "_of_part", "_of_row"}
KERNELS = {
    "bf16": FLOATS,
    "f32+": FLOATS - {"_row", "_merge", "_swiglu"},
    "llm-int8": ALWAYS | {"_codes", "_multiply", "_transpose"},
    "int8": ALWAYS | {"_codes", "_multiply"},
    "q8": ALWAYS | {"one_row", "few_rows", "merged", "floats"},
    "q4": ALWAYS | {"one_row", "few_rows", "merged", "floats"},
}


@pytest.mark.slow
@pytest.mark.parametrize("format", KERNELS)
def test_kernels_compile(format: str) -> None:
    """`+`: batch-invariant."""
    here = Path(__file__).parent
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(here.parents[1]), env.get("PYTHONPATH", "")])
    done = subprocess.run([sys.executable, here / "compiled.py", format], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(done.stdout.split()) >= KERNELS[format]
