"""What 4 bits and fewer cost in quality: calibrated and plainly rounded by pronk, and by llama.cpp's quantizer.

    python bench/calibrated.py [--models smollm2-135m smollm2-135m-rotated pretrained-16m]
                               [--types q4_0 q4_k q3_k q2_k] [--ways sized 4.9bpw calibrated plain llama.cpp]
                               [--calibration-text FILE] [--self-written N] [--add] [--quick]

Mean KL divergence from the model in float32 by quality.py's protocol: windows of WikiText-2's test split, the second
half of each counts. Every file, ours too, is run by llama.cpp: what differs is what stands in it. pronk calibrates as
`pronk quantize` does: on the text that comes with it, which has no part of WikiText, and on what the model writes
itself; or on another text, or more or less of its own, which the rows then say. The reference is pronk's CPU engine in
f32, of the model as it is: its rotated twin is the same function, with weights that lie on no grid. The pretrained
model is measured on what it has not read of WikiText; what it has read is learned.txt, beside it.

A type is called here as `pronk quantize --to` calls it; beside it stands llama.cpp's of that name, with its defaults.
llama.cpp's files of one name are larger, for it mixes types, and takes larger ones where rows do not fill K blocks. So
`sized` is what `--max-size SIZE --calibrate` makes of the size of llama.cpp's file, to the byte or less; `4.9bpw` is
what it makes of so many bits a weight. `autoround` learns the rounding in torch, in --steps, and has to be asked for:
of the default model 200 steps take hours. `auto-round` is Intel's program of that name, in the peers' environment, fed
the same tokens; its files of K types are of the mixture that it calls as llama.cpp calls the one beside it.

Results are kept row by row. A divergence depends on no processor, what making a file took does: each row says on which
it was, and --add keeps those of others.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import harness
import models
import numpy as np
from quality import WINDOW, Floats, Tally, log_softmax, windows
from quality_tables import PEERS
from sides.pipe import Side

import pronk
from pronk import checkpoint, tokenizer
from pronk.calibrate import STEPS, WRITTEN, own_text
from pronk.calibrate.calibrated import calibrated, rounded, types
from pronk.calibrate.written import together, written
from pronk.checkpoint.writers import write
from pronk.cli import blocks
from pronk.train.autoround import autorounded

WAYS = ("sized", "4.9bpw", "calibrated", "plain", "llama.cpp")  # the second beside Q4_K_M alone
SLOW_WAYS = ("autoround", "auto-round")
SAME = {models.TWIN: models.SMOLLM2}  # functions
ROWS = [WINDOW // 2, WINDOW]


def predictions(side: Side, texts: list[list[int]], folder: Path) -> Iterator[Floats]:
    out = folder / "logits.npy"
    for ids in texts:
        side.logits(ids=ids[:WINDOW], rows=ROWS, out=str(out))
        yield log_softmax(np.load(out))


def of_file(path: Path, texts: list[list[int]], reference: list[Path], folder: Path, threads: int) -> dict[str, Any]:
    tally = Tally()
    with Side("llama_cpp_side", models.PEERS_PYTHON) as side:
        side.load(path=str(path), threads=threads)
        side.prepare(ctx=WINDOW, sequences=1)
        for own, true, ids in zip(predictions(side, texts, folder), reference, texts, strict=True):
            tally.add(np.load(true).astype(np.float64), own, ids[ROWS[0] + 1 : ROWS[1] + 1])
    opened = checkpoint.open(path)
    matrices = [tensor for tensor in opened.tensors.values() if len(tensor.shape) == 2]
    bits = 8 * sum(tensor.nbytes for tensor in matrices) / sum(int(np.prod(tensor.shape)) for tensor in matrices)
    return {**tally.summary(), "bytes": path.stat().st_size, "bits": bits, "types": opened.quantization}


def made(
    model: str, name: str, kind: str, folder: Path, text: str, of_its_own: int, steps: int
) -> tuple[Path, float | None]:
    """A file, and what making it took of the processor's time in seconds; llama.cpp's is made once, and not timed."""
    if name == "llama.cpp":
        return models.gguf(model, PEERS[kind]), None
    source = checkpoint.open(models.gguf(model, models.ORIGIN[model]))
    assert source.tokenizer
    own = tokenizer.load(source.tokenizer)
    vocabulary = own.vocabulary()
    path, begun = folder / "made.gguf", time.process_time()
    path.unlink(missing_ok=True)
    ids = own.encode(text)
    if of_its_own and name != "plain":
        with pronk.load(source, engine="cpu", quantize="int8") as llm:
            what = own.encode(written(llm, of_its_own))[:of_its_own]
        ids = together(what, ids, source.config.max_position_embeddings)
    if name in ("sized", "4.9bpw"):
        size = models.gguf(model, PEERS[kind]).stat().st_size
        limit = blocks.Limit(name, 4.9, "bpw") if name == "4.9bpw" else blocks.Limit(name, size, "")
        kinds = blocks.within(limit, model, source, vocabulary, "text", ids, calibrate=True)["kinds"]
    else:
        kinds = types(source, kind)
    if name == "plain":
        of_fewer = rounded(source, kinds)
    elif name == "autoround":
        of_fewer = autorounded(source, kinds, ids, steps=steps)
    elif name == "auto-round":
        return of_intel(model, kind, ids, folder, steps)
    else:
        of_fewer = calibrated(source, kinds, ids)
    write.save(of_fewer, path, to="gguf", dtype={}, vocabulary=vocabulary)
    return path, time.process_time() - begun


def of_intel(model: str, kind: str, ids: list[int], folder: Path, steps: int) -> tuple[Path, float | None]:
    with Side("auto_round_side", models.PEERS_PYTHON) as side:
        source, window = str(models.huggingface(model)), min(WINDOW, len(ids))
        done = side.quantize(
            source=source, folder=str(folder), kind=kind, ids=ids, window=window, steps=steps, threads=2
        )
    return Path(done["file"]), done["processor_s"]


def read_by(model: str, count: int, folder: Path, threads: int) -> tuple[list[list[int]], list[Path]]:
    """Windows of a text, and files of what the model in float32 predicts in them."""
    origin = models.gguf(model, models.ORIGIN[model])
    text = models.learned_and_unseen()[1] if model == models.PRETRAINED else models.TEXT.read_text(encoding="utf-8")
    with Side("pronk_side") as side:
        texts = windows(side.encode(path=str(origin), text=text), count)
        side.load(path=str(origin), engine="cpu", quantize="f32", threads=threads)
        reference = [folder / f"{model}-{number}.npy" for number in range(len(texts))]
        for path, true in zip(reference, predictions(side, texts, folder), strict=True):
            np.save(path, true.astype(np.float32))
    return texts, reference


def kept(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The rows measured before, which have to have been in the same way."""
    before = json.loads((folder / "calibrated.json").read_text())
    assert before["settings"] == settings, before["settings"]
    return {row: {"cpu": before["machine"]["cpu"]} | found for row, found in before["measured"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[models.SMOLLM2, models.TWIN, models.PRETRAINED])
    parser.add_argument("--types", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS + SLOW_WAYS)
    parser.add_argument("--calibration-text", type=Path)
    parser.add_argument("--self-written", type=int, help="tokens of the model's own")
    parser.add_argument("--steps", type=int, default=STEPS, help="of autoround, a layer")
    parser.add_argument("--windows", type=int, default=20)
    parser.add_argument("--add", action="store_true", help="keep rows that are there, measured before in the same way")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one window, one type; nothing is kept in results/")
    options = parser.parse_args()
    count, asked = (1, ["q4_0"]) if options.quick else (options.windows, options.types)
    other = options.calibration_text
    text = other.read_text(encoding="utf-8") if other else own_text()
    usual = 0 if other else WRITTEN
    of_its_own = usual if options.self_written is None else options.self_written
    machine, measured = harness.machine("numpy"), {}
    models.FOLDER.mkdir(parents=True, exist_ok=True)
    settings = {"text": models.TEXT.name, "windows": count, "window_tokens": WINDOW, "run by": "llama.cpp"}
    if options.add:
        measured = kept(settings, harness.RESULTS)
    rows = []
    with tempfile.TemporaryDirectory(dir=models.FOLDER) as scratch:
        folder = Path(scratch)
        read: dict[str, tuple[list[list[int]], list[Path]]] = {}
        for model in options.models:
            if (function := SAME.get(model, model)) not in read:
                read[function] = read_by(function, count, folder, options.threads)
            for kind, name in product(asked, options.ways):
                if name == "4.9bpw" and kind != "q4_k":
                    continue
                path, seconds = made(model, name, kind, folder, text, of_its_own, options.steps)
                found = of_file(path, *read[function], folder, options.threads)
                called = PEERS[kind] if name == "llama.cpp" else kind
                way = f"{name} {options.steps}" if name in SLOW_WAYS else name
                if name not in ("plain", "llama.cpp"):
                    way += f" on {other.name}" if other else ""
                    way += f" with {of_its_own} of its own" if of_its_own != usual else ""
                measured[f"{model} {called} {way}"] = found | {"processor_s": seconds, "cpu": machine["cpu"]}
                kld = f"{found['mean_kld']:.5f} ± {found['standard_error']:.5f}"
                rows.append([model, way, called, f"{found['bits']:.2f}", kld, f"{found['top1']:.1%}"])
                harness.say(" ".join(rows[-1]))
                results = {"machine": machine, "settings": settings, "measured": measured}
                harness.save("calibrated", results, models.FOLDER if options.quick else harness.RESULTS)
    print(harness.table(("model", "rounded", "type", "bits a weight", "mean KLD", "top-1"), rows))


if __name__ == "__main__":
    main()
