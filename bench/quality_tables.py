"""Tables of what fewer bits cost in quality: formats, files as they are stored, calibration, keys and values."""

from __future__ import annotations

from itertools import product
from typing import Any

import harness

MODELS = {
    "smollm2-135m": "SmolLM2-135M",
    "smollm2-135m-rotated": "its rotated twin",
    "pretrained-16m": "made by `pronk pretrain`",
}
PEERS = {"q4_0": "Q4_0", "q4_k": "Q4_K_M", "q3_k": "Q3_K_M", "q2_k": "Q2_K"}


def quality(results: dict[str, Any]) -> str:
    return divergences(results["measured"])


def stored(results: dict[str, Any]) -> str:
    """Against each file's own weights in float32."""
    rows = [
        [
            f"{MODELS[model]}, {name}",
            *(_divergence(found[side]) for side in ("pronk", "llama.cpp")),
            f"{found['pronk']['top1']:.1%} / {found['llama.cpp']['top1']:.1%}",
            f"{found['memory_of_file']:.3f}",
        ]
        for model, types in results["measured"].items()
        for name, found in types.items()
    ]
    header = ("mean KL divergence", "pronk", "llama.cpp", "top-1: pronk / llama.cpp", "weights in memory, of the file")
    return harness.table(header, rows)


def calibrated(results: dict[str, Any]) -> str:
    """By model and size: what `--calibrate` makes of pronk's text and the model's own, and llama.cpp's quantizer."""
    measured = results["measured"]
    rows = []
    for (model, of), (kind, peer) in product(MODELS.items(), PEERS.items()):
        theirs = measured.get(f"{model} {peer} llama.cpp")
        sized, whole, plain, small = (
            measured.get(f"{model} {kind} {way}") for way in ("sized", "calibrated", "plain", "4.9bpw")
        )
        cells = (_at(theirs), _at(sized), _share(sized, theirs), _at(whole), _at(plain))
        rows.append([f"{of}, {peer}", *cells])
        if small:
            rows.append([f"{of}, `--max-size 4.9bpw`", "", _at(small), _share(small, theirs), "", ""])
    header = (
        "mean KL divergence from f32, at bits a weight", "llama.cpp", "pronk, of that size", "of llama.cpp's",
        "of one type, calibrated", "rounded to nearest",
    )  # fmt: skip
    return harness.table(header, rows)


def kv_types(results: dict[str, Any]) -> str:
    """What a cache of each type costs in predictions, and what a token takes behind a long text."""
    short, long, speed = (results[part] for part in ("short", "long", "speed"))
    rows = []
    for name, found in short["measured"].items():
        far, timed = long["measured"][name], speed["measured"][name]
        cells = (_divergence(found), _divergence(far), f"{far['top1']:.1%}", f"{timed['ms']['median']:.1f}")
        rows.append([name, *cells, ratio(timed["of pronk bf16"])])
    at = f"{long['length']:,} tokens"
    header = (
        "keys and values", f"mean KL divergence, {short['length']} tokens", at, f"top-1, {at}",
        f"ms a token behind {speed['context']:,}", "of pronk bf16",
    )  # fmt: skip
    return harness.table(header, rows)


def divergences(measured: dict[str, Any]) -> str:
    rows = [
        [name, f"{found['mean_kld']:.6f} ± {found['standard_error']:.6f}", f"{found['top1']:.1%}"]
        for name, found in measured.items()
        if name != "reference"
    ]
    return harness.table(("against f32", "mean KL divergence", "top-1 agreement"), rows)


def ratio(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['min']:.2f} to {values['max']:.2f})"


def _divergence(found: dict[str, Any]) -> str:
    return f"{found['mean_kld']:#.2g} ± {found['standard_error']:.1g}"


def _at(found: dict[str, Any] | None) -> str:
    return f"{found['mean_kld']:#.2g} at {found['bits']:.2f}" if found else ""


def _share(ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> str:
    return f"{ours['mean_kld'] / theirs['mean_kld']:.2f}" if ours and theirs else ""
