"""What a tokenizer.json takes: memory that stands beside the weights, and at most for a moment more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pronk import checkpoint
from pronk import tokenizer as tokenizers
from pronk.tokenizer.export import huggingface_files

LOADING = """
import re, sys
from pathlib import Path
import pronk.tokenizer.hf_json
from pronk import tokenizer

def status():
    text = Path("/proc/self/status").read_text()
    return [int(re.search(key + r":\\s*(\\d+)", text)[1]) * 1024 for key in ("VmRSS", "VmHWM")]

before, _ = status()
loaded = tokenizer.load(tokenizer.find(Path(sys.argv[1])))
kept, peak = status()
print(kept - before, peak - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("model", "kept", "peak"),
    [("default", 35e6, 65e6), pytest.param("llama3", 100e6, 240e6, marks=pytest.mark.slow)],
)
def test_a_tokenizer_json(model: str, kept: float, peak: float, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Parsed by us and by the library, one after the other; neither leaves anything but the tokenizer."""
    if model == "default":
        source = checkpoint.open(request.getfixturevalue("smollm2")).tokenizer
        assert source is not None
        tokenizer = tokenizers.load(source)
    else:
        tokenizer = request.getfixturevalue("every_kind")["tiktoken"]
    for name, content in huggingface_files(tokenizer).items():
        (tmp_path / name).write_bytes(content)
    process = subprocess.run([sys.executable, "-c", LOADING, tmp_path], capture_output=True, text=True, check=True)
    grown, most = map(int, process.stdout.split())
    assert grown < kept
    assert most < peak
