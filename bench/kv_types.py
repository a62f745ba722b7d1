"""What types of keys and values cost in quality at 512 and 8,192 tokens, and in time, beside llama.cpp's caches.

    python bench/kv_types.py [--parts short long speed] [--types bf16 int8 q4] [--theirs Q8_0 Q4_0] [--quick]

Mean KL divergence of an engine with keys and values of a type from the same engine with them in float32: weights are
the default model's, in float32, on both sides. WikiText-2's test split: `short` windows of 512 tokens, spread evenly,
of which the second half counts; `long` texts of as many tokens as the model was trained for, of which the last 1,024
count, in stretches of 256 whose means give the error. `speed`: milliseconds a token behind 8,128 others, weights in 8
bits (int8; Q8_0), all types in turns. What is measured anew takes the place of what was there; other results stay.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import harness
import models
import numpy as np
from quality import TEXT, Tally, log_softmax
from quality_tables import ratio
from sides.pipe import Side

CONTEXT, COUNTED = 8192, 1024
SHORT = 512
NEW = 32  # tokens of a turn
ENGINES = {"pronk": "f32", "llama.cpp": "F32"}  # and the type that the others are held against


@contextlib.contextmanager
def side(engine: str, kv: str, ctx: int, threads: int, weights: str | None = None) -> Iterator[Side]:
    origin = str(models.gguf(models.SMOLLM2, models.ORIGIN[models.SMOLLM2]))
    if engine == "pronk":
        with Side("pronk_side") as one:
            one.load(path=origin, engine="cpu", quantize=weights or "f32", threads=threads, kv_dtype=kv)
            yield one
    else:
        path = str(models.gguf(models.SMOLLM2, weights)) if weights else origin
        with Side("llama_cpp_side", models.PEERS_PYTHON) as one:
            one.load(path=path, threads=threads)
            one.prepare(ctx=ctx, sequences=1, kv=kv)
            yield one


def divergences(
    engine: str, types: Sequence[str], texts: Sequence[list[int]], rows: tuple[int, int], threads: int
) -> dict[str, dict[str, float]]:
    """Of each type from the engine's own float32, over `rows` of each text."""
    found = {}
    with tempfile.TemporaryDirectory(dir=models.FOLDER) as folder:
        for kv in (ENGINES[engine], *types):
            tally = Tally()
            with side(engine, kv, len(texts[0]) - 1, threads) as one:
                for number, ids in enumerate(texts):
                    true, out = (Path(folder) / f"{name}-{number}.npy" for name in ("true", "own"))
                    out = true if kv == ENGINES[engine] else out
                    one.logits_through_cache(ids=ids[: rows[1]], rows=list(rows), out=str(out))
                    if kv == ENGINES[engine]:
                        continue
                    for at in range(0, rows[1] - rows[0], 256):
                        reference, own = (
                            log_softmax(np.load(path, mmap_mode="r")[at : at + 256]) for path in (true, out)
                        )
                        following = ids[rows[0] + at + 1 : rows[0] + at + 1 + len(own)]
                        tally.add(reference, own, following)
            if kv == ENGINES[engine]:
                continue
            found[f"{engine} {kv}"] = tally.summary()
            harness.say(f"{engine} {kv}: {found[f'{engine} {kv}']}")
    return found


def speed(ours: Sequence[str], theirs: Sequence[str], ids: list[int], rounds: int, threads: int) -> dict[str, Any]:
    """Milliseconds a token, and ratios to bf16 keys of the same round."""
    ids = ids[: CONTEXT - 64]
    with contextlib.ExitStack() as stack:
        sides = {f"pronk {kv}": stack.enter_context(side("pronk", kv, CONTEXT, threads, "int8")) for kv in ours}
        sides |= {
            f"llama.cpp {kv}": stack.enter_context(side("llama.cpp", kv, CONTEXT, threads, "Q8_0")) for kv in theirs
        }
        for name, one in sides.items():
            one.remember(ids=ids)
            harness.say(f"{name} has read {len(ids)} tokens")
        turns = {
            name: lambda one=one: 1e3 * one.decode_after(token=ids[-1], new=NEW) / NEW for name, one in sides.items()
        }
        taken = harness.interleave(turns, rounds, note=harness.say)
    against = next(iter(taken))
    return {
        name: {"ms": harness.spread(ms), f"of {against}": harness.ratios(ms, taken[against])}
        for name, ms in taken.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=["short", "long", "speed"], choices=["short", "long", "speed"])
    parser.add_argument(
        "--types", nargs="*", default=["bf16", "int8", "q4"], help="pronk's; the first is what times are held against"
    )
    parser.add_argument("--theirs", nargs="*", default=["F16", "Q8_0", "Q4_0"])
    parser.add_argument("--windows", type=int, default=20, help="of 512 tokens")
    parser.add_argument("--texts", type=int, default=1, help="of 8,192 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="one window of 512 tokens; nothing is kept in results/")
    options = parser.parse_args()
    folder = models.FOLDER if options.quick else harness.RESULTS
    models.FOLDER.mkdir(parents=True, exist_ok=True)
    with Side("pronk_side") as tokenizing:
        origin = models.gguf(models.SMOLLM2, models.ORIGIN[models.SMOLLM2])
        ids = tokenizing.encode(path=str(origin), text=TEXT.read_text(encoding="utf-8"))
    kept = folder / "kv_types.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    results = {key: results[key] for key in ("short", "long", "speed") if key in results}

    def texts(length: int, count: int) -> list[list[int]]:
        return [ids[at : at + length + 1] for at in (n * (len(ids) - length - 1) // count for n in range(count))]

    def keep(part: str, found: dict[str, Any], **settings: Any) -> None:
        machine = harness.machine("numpy")
        about = {"machine": machine, "threads": options.threads, "commit": harness.commit(), **settings}
        before = results.get(part, {}).get("measured", {})
        results[part] = {**about, "measured": {**before, **found} if part != "speed" else found}
        path = harness.save("kv_types", {"model": models.SMOLLM2, "text": TEXT.name, **results}, folder)
        harness.say(f"written to {path}")

    for part in ["short"] if options.quick else options.parts:
        if part == "speed":
            harness.warn_if_busy()
            found = speed(options.types, options.theirs, ids, options.rounds, options.threads)
            keep(part, found, context=CONTEXT - 64, tokens=NEW, rounds=options.rounds, weights="int8; Q8_0")
            header = ("behind 8,128 tokens", "ms a token", "of the first")
            rows = [[name, *(ratio(x) for x in one.values())] for name, one in found.items()]
            print(harness.table(header, rows))
            continue
        length, count = (
            (SHORT, 1 if options.quick else options.windows) if part == "short" else (CONTEXT, options.texts)
        )
        counted = (length // 2, length) if part == "short" else (length - COUNTED, length)
        for engine, types in (("pronk", options.types), ("llama.cpp", options.theirs)):
            if types:
                found = divergences(engine, types, texts(length, count), counted, options.threads)
                keep(part, found, length=length, texts=count, rows=counted, weights="f32")
        rows = [
            [name, f"{one['mean_kld']:.5f} ± {one['standard_error']:.5f}", f"{one['top1']:.1%}"]
            for name, one in results[part]["measured"].items()
        ]
        print(harness.table((f"{length} tokens, against float32", "mean KLD", "top-1"), rows))


if __name__ == "__main__":
    main()
