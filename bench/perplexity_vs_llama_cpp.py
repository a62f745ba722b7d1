"""Is `pronk perplexity` llama.cpp's number? Both on the same tokens and windows, llama.cpp's counted by its own loop.

    python bench/perplexity_vs_llama_cpp.py [--chunks 8] [--types F32 Q8_0]

llama-perplexity cuts a text into chunks of n_ctx tokens and counts rows n_ctx / 2 to n_ctx - 2 of each, for the token
after each. That loop is written out here over `llama_decode`, and shares nothing with pronk but the token ids.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import harness
import models
import numpy as np
from quality import MODEL, TEXT
from sides.pipe import Side

import pronk
from pronk.measure.perplexity import perplexity

N_CTX = 512
FORMATS = {"F32": "f32", "Q8_0": "q8"}  # llama.cpp's type: what pronk packs it as
ALLOWED = 1e-3  # relative


def llama_cpp(path: Path, tokens: list[int], threads: int) -> dict[str, float]:
    """Perplexity and its error as llama-perplexity prints them (its error takes all tokens for independent)."""
    first, nll, nll2, count = N_CTX // 2, 0.0, 0.0, 0
    with Side("llama_cpp_side", models.PEERS_PYTHON) as side, tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"
        side.load(path=str(path), threads=threads)
        side.prepare(ctx=N_CTX, sequences=1)
        for chunk in range(len(tokens) // N_CTX):
            ids = tokens[chunk * N_CTX : (chunk + 1) * N_CTX]
            side.logits(ids=ids, rows=[first, N_CTX - 1], out=str(out))
            for row, token in zip(np.load(out).astype(np.float64), ids[first + 1 :], strict=True):
                value = np.log(np.exp(row - row.max()).sum()) - (row[token] - row.max())
                nll, nll2, count = nll + value, nll2 + value * value, count + 1
    nll, nll2 = nll / count, nll2 / count
    return {"value": float(np.exp(nll)), "error": float(np.exp(nll) * np.sqrt((nll2 - nll * nll) / (count - 1)))}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", type=int, default=8)
    parser.add_argument("--types", nargs="*", default=list(FORMATS), choices=list(FORMATS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path, default=TEXT)
    options = parser.parse_args()

    measured: dict[str, Any] = {}
    for dtype in options.types:
        path = models.gguf(MODEL, dtype)
        llm = pronk.load(path, engine="cpu", quantize=FORMATS[dtype], threads=options.threads)
        ids = llm.tokenizer.encode(options.text.read_text(encoding="utf-8"))[: options.chunks * N_CTX]
        ours = perplexity(llm, ids, ctx=N_CTX)
        theirs = llama_cpp(path, ids, options.threads)
        measured[dtype] = {"ours": ours, "theirs": theirs, "ratio": ours["value"] / theirs["value"]}
        harness.say(f"{dtype}: {ours['value']:.4f}, llama.cpp {theirs['value']:.4f}")
    settings = {"model": MODEL, "text": options.text.name, "n_ctx": N_CTX, "chunks": options.chunks}
    path = harness.save("perplexity_vs_llama_cpp", {
        "machine": harness.machine("numpy"), "settings": settings, "measured": measured,
    })  # fmt: skip
    rows = [
        [
            dtype,
            f"{found['ours']['value']:.4f} ± {found['ours']['standard_error']:.4f}",
            f"{found['theirs']['value']:.4f} ± {found['theirs']['error']:.4f}",
            f"{found['ratio'] - 1:+.4%}",
        ]
        for dtype, found in measured.items()
    ]
    print(harness.table(("type", "pronk", "llama.cpp", "difference"), rows))
    harness.say(f"written to {path}")
    if any(abs(found["ratio"] - 1) > ALLOWED for found in measured.values()):
        raise SystemExit(f"further apart than {ALLOWED:.1%}")


if __name__ == "__main__":
    main()
