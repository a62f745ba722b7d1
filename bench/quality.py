"""How far each format moves the model's predictions: mean KL divergence and top-1 agreement against f32, on real text.

    python bench/quality.py [--windows 20] [--ours q8 int8 q4 bf16] [--theirs Q8_0 Q4_0 BF16] [--reference torch]

WikiText-2's test split, in windows of 512 tokens spread evenly over it, without a BOS token; the second half of each
counts, so that every prediction has 256 tokens to go by. Formats of 4 bits are made of the model's rotated twin: its
own weights come from a file in Q4_1, whose grid they would fall on. The reference is pronk's torch engine in f32 (or,
with `--reference llama.cpp`, llama.cpp on the F32 file: its KV is f16). All sides read the same token ids, window by
window, and pronk the files that vs_llama_cpp.py times, but for the twin's.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import harness
import models
import numpy as np
from numpy.typing import NDArray
from sides.pipe import Side
from vs_llama_cpp import FORMATS

from pronk.measure.noise import over_windows

WINDOW = 512
TEXT = models.TEXT
MODEL = models.SMOLLM2
FOUR_BITS = ("Q4_0", "Q4_K_M", "Q3_K_M", "Q2_K")  # and fewer
Floats = NDArray[np.float64]


@dataclass
class Tally:
    """What one side's predictions add up to."""

    divergences: list[Floats] = field(default_factory=list)
    agreed: int = 0
    surprise: float = 0.0  # of the text's own next tokens, in nats

    def add(self, reference: Floats, own: Floats, following: list[int]) -> None:
        """Log-probabilities [rows, V], and the token that follows each row."""
        self.divergences.append((np.exp(reference) * (reference - own)).sum(-1))
        self.agreed += int((reference.argmax(-1) == own.argmax(-1)).sum())
        self.surprise -= float(own[np.arange(len(following)), following].sum())

    def summary(self) -> dict[str, float]:
        all_of_them = np.concatenate(self.divergences)
        rows = len(all_of_them)
        ends = np.cumsum([len(window) for window in self.divergences]).tolist()
        means = [part.mean() for part in np.split(all_of_them, ends[:-1])]
        error = over_windows(means, np.diff([0, *ends]).tolist()).error
        return {
            "mean_kld": float(all_of_them.mean()),
            "standard_error": float("nan") if error is None else error,  # of a single window there is none
            "p99_kld": float(np.quantile(all_of_them, 0.99)),
            "top1": self.agreed / rows,
            "perplexity": float(np.exp(self.surprise / rows)),
            "rows": rows,
        }


def log_softmax(logits: NDArray[np.float32]) -> Floats:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def windows(ids: list[int], count: int) -> list[list[int]]:
    """Spread evenly over the text, without overlap; one token longer, for what follows the last row."""
    most = (len(ids) - 1) // WINDOW
    starts = [number * most // count * WINDOW for number in range(min(count, most))]
    return [ids[start : start + WINDOW + 1] for start in starts]


def measure(reference: Side, sides: dict[str, Side], texts: list[list[int]]) -> dict[str, Any]:
    tallies = {"reference": Tally()} | {name: Tally() for name in sides}
    rows = [WINDOW // 2, WINDOW]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "logits.npy"

        def predictions(side: Side, ids: list[int]) -> Floats:
            side.logits(ids=ids[:WINDOW], rows=rows, out=str(out))
            return log_softmax(np.load(out))

        for number, ids in enumerate(texts, 1):
            following, true = ids[rows[0] + 1 : rows[1] + 1], predictions(reference, ids)
            tallies["reference"].add(true, true, following)
            for name, side in sides.items():
                tallies[name].add(true, predictions(side, ids), following)
            harness.say(f"window {number} of {len(texts)}")
    return {name: tally.summary() for name, tally in tallies.items()}


def load(stack: contextlib.ExitStack, kind: str, dtype: str, engine: str, quantize: str, threads: int) -> Side:
    path = str(models.gguf(models.TWIN if dtype in FOUR_BITS else MODEL, dtype))
    if kind == "pronk":
        side = stack.enter_context(Side("pronk_side"))
        side.load(path=path, engine=engine, quantize=quantize, threads=threads)
    else:
        side = stack.enter_context(Side("llama_cpp_side", models.PEERS_PYTHON))
        side.load(path=path, threads=threads)
        side.prepare(ctx=WINDOW, sequences=1)
    return side


def _file(name: str) -> str | None:
    """The type of the file that vs_llama_cpp.py loads for a format; None: the origin."""
    return FORMATS[name].ours if name in FORMATS else None


def _quantize(name: str) -> str:
    return (FORMATS[name].quantize if name in FORMATS else None) or name


def _twin(dtype: str | None, *, named: bool = False) -> str:
    return f",{f' {dtype}' if named else ''} of the rotated twin" if dtype in FOUR_BITS else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--ours", nargs="*", default=["q8", "int8", "q4", "bf16", "llm-int8"])
    parser.add_argument("--theirs", nargs="*", default=["Q8_0", "Q4_0", "BF16"])
    parser.add_argument("--reference", default="torch", choices=["torch", "llama.cpp"])
    parser.add_argument("--engine", default="cpu", choices=["cpu", "torch"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--quick", action="store_true", help="two windows; nothing is kept in results/")
    options = parser.parse_args()
    count = 2 if options.quick else options.windows

    origin = models.ORIGIN[MODEL]
    with contextlib.ExitStack() as stack:
        reference = load(
            stack, "pronk" if options.reference == "torch" else "llama.cpp", origin, "torch", "f32", options.threads
        )
        sides = {
            f"pronk {name}{_twin(_file(name), named=True)}": load(
                stack, "pronk", _file(name) or origin, options.engine, _quantize(name), options.threads
            )
            for name in options.ours
        }
        sides |= {
            f"llama.cpp {dtype}{_twin(dtype)}": load(stack, "llama.cpp", dtype, "", "", options.threads)
            for dtype in options.theirs
        }
        with Side("pronk_side") as tokenizing:
            ids = tokenizing.encode(path=str(models.gguf(MODEL, origin)), text=options.text.read_text(encoding="utf-8"))
        texts = windows(ids, count)
        measured = measure(reference, sides, texts)
    settings = {
        "model": MODEL,
        "engine": options.engine,
        "reference": "pronk's torch engine, f32" if options.reference == "torch" else "llama.cpp, F32",
        "text": options.text.name,
        "windows": len(texts),
        "window_tokens": WINDOW,
        "rows": "second half of each window",
    }
    results = {"machine": harness.machine("numpy"), "settings": settings, "measured": measured}
    path = harness.save("quality", results, models.FOLDER if options.quick else harness.RESULTS)
    rows = [
        [
            name,
            f"{found['mean_kld']:.6f} ± {found['standard_error']:.6f}",
            f"{found['p99_kld']:.4f}",
            f"{found['top1']:.1%}",
            f"{found['perplexity']:.3f}",
        ]
        for name, found in measured.items()
    ]
    print(harness.table(("against f32", "mean KLD", "99% below", "top-1", "perplexity"), rows))
    harness.say(f"written to {path}")


if __name__ == "__main__":
    main()
