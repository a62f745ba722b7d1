"""Models that others load once pronk has quantized and saved them: transformers, bitsandbytes, llama.cpp."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny import in_memory, random_weights, tiny_config

import pronk
import pronk.checkpoint as checkpoints
from pronk.checkpoint.writers.write import save
from pronk.llm import LLM

PROMPTS = ["The capital of France is", "def fibonacci(n):\n    ", "1, 1, 2, 3, 5, 8,"]
NEW_TOKENS = 32


def rms(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sqrt(np.square(a - b, dtype=np.float64).mean()))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("format", "package"), [("int8", "compressed_tensors"), ("llm-int8", "bitsandbytes")])
def test_transformers_loads_the_folder(tmp_path: Path, format: Any, package: str, tied: bool) -> None:
    """Its weights are pronk's, and its logits lie no farther from pronk's than what 8 bits of activations do to them.

    Each computes in 8 bits on its own: codes of activations fall on either side of a half where the inputs differ in
    their last places. So the yardstick is pronk's own distance from the same weights with activations in float32;
    independent errors of that size are sqrt(2) of it apart, and twice it is too much.
    """
    pytest.importorskip(package)
    pytest.importorskip("accelerate")
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(tie_word_embeddings=tied)
    folder = tmp_path / "m"
    save(in_memory(config, random_weights(config)), folder, to="safetensors", dtype=format)
    theirs = AutoModelForCausalLM.from_pretrained(folder, device_map="cpu").eval()
    ids = [(7 * n + 1) % config.vocab_size for n in range(40)]
    with torch.no_grad():
        got = theirs(torch.tensor([ids])).logits[0].float().numpy()
    exact, ours = (pronk.load(folder, engine="cpu", quantize=q, int8_outliers=o) for q, o in loadings(format))
    reference = exact.logits(ids)
    noise = rms(ours.logits(ids), reference)
    assert 0 < noise < 0.05 * reference.std()
    assert rms(got, ours.logits(ids)) < 2 * noise
    assert rms(got, reference) < 2 * noise
    for name, tensor in exact.checkpoint.tensors.items():
        if tensor.dtype not in ("INT8", "LLM_INT8"):
            continue
        module = theirs.get_submodule(name.removesuffix(".weight"))
        if format == "int8":  # multiplied out at the first pass
            assert np.array_equal(module.weight.detach().numpy(), tensor.read())
        else:
            assert tensor.read_blocks is not None
            assert np.array_equal(module.weight.detach().numpy(), tensor.read_blocks()[:, 4:].view(np.int8))
            scale = (module.weight.SCB if module.state.SCB is None else module.state.SCB).numpy() / np.float32(127)
            assert np.array_equal(scale, tensor.read_blocks()[:, :4].copy().view("<f4")[:, 0])


@pytest.mark.slow
def test_what_transformers_saves_again_comes_back(tmp_path: Path) -> None:
    """With its own spelling of the quantization_config, and all the keys that pronk does not write. (What it has loaded
    with bitsandbytes, transformers 5.23 cannot save.)"""
    pytest.importorskip("compressed_tensors")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    config = tiny_config()
    save(in_memory(config, random_weights(config)), tmp_path / "ours", to="safetensors", dtype="int8")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours", device_map="cpu").save_pretrained(tmp_path / "theirs")
    ours, theirs = (checkpoints.open(tmp_path / name) for name in ("ours", "theirs"))
    raw = json.loads((tmp_path / "theirs" / "config.json").read_text())["quantization_config"]
    assert raw.keys() - json.loads((tmp_path / "ours" / "config.json").read_text())["quantization_config"].keys()
    assert theirs.quantization == ours.quantization
    for name, tensor in ours.tensors.items():
        assert theirs.tensors[name].dtype == tensor.dtype
        assert np.array_equal(theirs.tensors[name].read(), tensor.read()), name


def loadings(format: str) -> list[tuple[str, int | None]]:
    """With activations in float32; and in 8 bits as the other program has them, by the threshold alone."""
    return [("f32", None), (format, 0 if format == "llm-int8" else None)]


LLAMA_CPP = """
import json, sys
from llama_cpp import Llama
llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, verbose=False, logits_all=False)
for prompt in json.loads(sys.argv[2]):
    answer = llm.create_completion(prompt, max_tokens=int(sys.argv[3]), temperature=0)
    print(json.dumps(answer["choices"][0]["text"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("format", "prompts"), [("q8", 3), ("q4", 1), ("mixed", 1)])
def test_llama_cpp_writes_the_same_text(smollm2: Path, tmp_path: Path, format: str, prompts: int) -> None:
    """Greedy, from the default model: weights, metadata and vocabulary have all arrived.

    Each rounds activations to 8 bits in its own way, so that texts part wherever two tokens are nearly as likely; in 4
    bits the second and third prompts soon come to such a place.
    """
    python = os.environ.get("PRONK_BENCH_PYTHON")
    if not python or subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        pytest.skip("llama.cpp was not asked: PRONK_BENCH_PYTHON names no Python that has llama_cpp")
    source: LLM = pronk.load(smollm2, engine="cpu")
    mixed = {"": "q8", "model.layers.1": "q4", "model.layers.2": "bf16", "model.layers.0.mlp.down_proj": "f16"}
    path = tmp_path / "m.gguf"
    dtype: Any = mixed if format == "mixed" else format
    save(source.checkpoint, path, to="gguf", dtype=dtype, vocabulary=source.tokenizer.vocabulary())
    command = [python, "-c", LLAMA_CPP, str(path), json.dumps(PROMPTS[:prompts]), str(NEW_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    theirs = [json.loads(line) for line in done.stdout.splitlines()]
    llm = pronk.load(path, engine="cpu", kv_dtype="f16")  # as llama.cpp's
    ours = [llm.generate(prompt, max_new_tokens=NEW_TOKENS).text for prompt in PROMPTS[:prompts]]
    print(f"{format}: {ours}")
    assert ours == theirs
