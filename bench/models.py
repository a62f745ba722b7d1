"""The files that comparisons need, made once: the default model and a random 1.1B one, in llama.cpp's own types.

    python bench/models.py [--models smollm2-135m random-1.1b]

Everything lies in one folder, PRONK_BENCH_MODELS or build/bench. Peers run in an environment of their own, whose Python
is PRONK_BENCH_PYTHON or build/bench/env/bin/python; README.md says how to make it.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import random_model
from sides.pipe import Side

import pronk
from pronk import checkpoint, tokenizer
from pronk.checkpoint import rotation
from pronk.checkpoint.hub import resolve as hub
from pronk.checkpoint.writers import write

FOLDER = Path(os.environ.get("PRONK_BENCH_MODELS") or harness.ROOT / "build" / "bench")
PEERS_PYTHON = os.environ.get("PRONK_BENCH_PYTHON") or str(harness.ROOT / "build" / "bench" / "env" / "bin" / "python")

SMOLLM2, RANDOM, RANDOM_7B = "smollm2-135m", "random-1.1b", "random-7b"
TWIN = "smollm2-135m-rotated"  # the same function of weights that no grid of 4 bits fits
# 14 million weights that `pronk pretrain` has made of the first part of TEXT in minutes; rows fill blocks of 256.
PRETRAINED = "pretrained-16m"
# What the others are quantized from: the default model's 4-bit blocks as plain numbers; bf16 as generated.
ORIGIN = {SMOLLM2: "F32", TWIN: "F32", PRETRAINED: "F32", RANDOM: "BF16", RANDOM_7B: "BF16"}
TEXT = harness.ROOT.parent / "shared" / "data" / "wikitext-2" / "test.txt"
_SHAPES = {RANDOM: random_model.TINYLLAMA, RANDOM_7B: random_model.LLAMA2_7B}


def gguf(model: str, dtype: str, threads: int = 2) -> Path:
    """`model` as GGUF in one of llama.cpp's types, made by its quantizer where it is not the origin."""
    path = FOLDER / f"{model}-{dtype.lower()}.gguf"
    if path.exists():
        return path
    with _whole(path) as partial:
        if dtype != ORIGIN[model]:
            origin = gguf(model, ORIGIN[model])
            with Side("llama_cpp_side", PEERS_PYTHON) as side:
                side.quantize(source=str(origin), destination=str(partial), dtype=dtype, threads=threads)
        elif model in _SHAPES:
            random_model.write_random(partial, _SHAPES[model])
        else:
            opened = checkpoint.open(_pretrained() if model == PRETRAINED else hub.resolve(hub.DEFAULT_MODEL))
            assert opened.tokenizer
            vocabulary = tokenizer.load(opened.tokenizer).vocabulary()
            opened = rotation.rotated(opened, seed=0) if model == TWIN else opened
            write.save(opened, partial, to="gguf", dtype="f32", vocabulary=vocabulary)
    return path


def huggingface(model: str) -> Path:
    """The origin as a folder of Hugging Face's layout, in f32, tokenizer included where it has one to give."""
    path = FOLDER / f"{model}-hf"
    if not path.exists():
        from pronk.tokenizer.export import huggingface_files

        opened = checkpoint.open(gguf(model, ORIGIN[model]))
        assert opened.tokenizer
        files = huggingface_files(tokenizer.load(opened.tokenizer))
        with _whole(path) as partial:
            write.save(opened, partial, to="safetensors", dtype="f32", tokenizer_files=files)
    return path


def learned_and_unseen() -> tuple[str, str]:
    """What PRETRAINED has read of TEXT, and what it has not."""
    text = TEXT.read_text(encoding="utf-8")
    middle = text.index("\n = ", len(text) * 6 // 10)  # before a heading
    return text[:middle], text[middle:]


def _pretrained() -> Path:
    out = FOLDER / "pretraining"
    if not (model := out / "model").exists():
        text = FOLDER / "learned.txt"
        text.write_text(learned_and_unseen()[0], encoding="utf-8")
        shape = {"vocab_size": 2048, "hidden": 768, "layers": 2, "heads": 12, "kv_heads": 4, "ctx_size": 512}
        pronk.pretrain(text, out, max_steps=120, samples=0, **shape).run()
    return model


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes `path` once it is all there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    harness.say(f"making {path}")
    partial = path.with_name(f"partial-{path.name}")
    try:
        yield partial
        partial.rename(path)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=[SMOLLM2, RANDOM], choices=list(ORIGIN))
    for model in parser.parse_args().models:
        for dtype in (ORIGIN[model], "BF16", *([] if model == RANDOM_7B else ["Q8_0"]), "Q4_0"):
            print(gguf(model, dtype))


if __name__ == "__main__":
    main()
