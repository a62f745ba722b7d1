"""The same weights in every format: written out, read back, and held against the original, logit by logit.

In f32 nothing may be lost; 16 and 8 bits show their price.

python examples/compare_formats.py [MODEL]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pronk
from pronk.checkpoint.writers import write
from pronk.errors import Unsupported
from pronk.measure.verify import compare

TEXT = "A map of the coast hung over the desk, and somebody had drawn a small red ship on it."
WAYS = [
    ("safetensors", "f32", "hf-f32"),
    ("safetensors", "bf16", "hf-bf16"),
    ("llama2c", "f32", "f32.bin"),
    ("gguf", "f32", "f32.gguf"),
    ("gguf", "f16", "f16.gguf"),
    ("gguf", "q8_0", "q8_0.gguf"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    arguments = parser.parse_args()

    original = pronk.load(arguments.model, engine="cpu", quantize="f32")
    token_ids = original.tokenizer.encode(TEXT)
    vocabulary = original.tokenizer.vocabulary()
    print(f"{'format':12}{'type':6}{'MB':>8}  largest logit difference")
    for to, dtype, name in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            try:
                write.save(original.checkpoint, path, to=to, dtype=dtype, vocabulary=vocabulary)
            except Unsupported as reason:  # not every format has a place for every model
                print(f"{to:12}{dtype:6}{'-':>8}  {reason}")
                continue
            copy = pronk.load(path, engine="cpu", quantize="f32")
            found = compare(original, copy, token_ids)
            megabytes = sum(file.stat().st_size for file in copy.checkpoint.files) / 1e6
        print(f"{to:12}{dtype:6}{megabytes:8.1f}  {found['max_abs_difference']:.3g}")


if __name__ == "__main__":
    main()
