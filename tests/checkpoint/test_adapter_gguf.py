"""Adapters as GGUF: what llama.cpp reads of them, here by the gguf package and numpy; and back to the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from adapters import random_adapter
from gguf_files import interleaved
from tiny import CONFIGS, in_memory, random_weights, tiny_config

import pronk
from pronk.checkpoint import adapter, adapter_gguf
from pronk.checkpoint.adapter import TARGETS, Adapter
from pronk.checkpoint.tensors import LazyTensor
from pronk.checkpoint.writers.write import save as save_model
from pronk.config import ModelConfig
from pronk.errors import BadFile, PronkError, Unsupported

ENDS = ("embed_tokens", "lm_head")
NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def theirs(name: str) -> str:
    """GGUF's name of a module's weight, spelled out here once more."""
    if name in ("model.embed_tokens", "lm_head"):
        return {"model.embed_tokens": "token_embd", "lm_head": "output"}[name] + ".weight"
    _, _, layer, _, last = name.split(".")
    return f"blk.{layer}.{NAMES[last]}.weight"


def written(path: Path, given: Adapter, config: ModelConfig, dtype: str = "F32") -> Path:
    with path.open("xb") as file:
        adapter_gguf.write(file, given, config, dtype, "one")
    return path


def uneven(config: ModelConfig, targets: tuple[str, ...] = TARGETS, size: float = 0.3) -> Adapter:
    """Of two ranks, and of as many scales as modules."""
    given = random_adapter(config, targets=targets, seed=3, size=size)
    scaled = {name: replace(p, scale=0.5 + 0.25 * n) for n, (name, p) in enumerate(given.products.items())}
    return replace(given, products=scaled)


@pytest.mark.parametrize("name", ["gqa", "mqa", "odd", "biases"])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_what_llama_cpp_computes_of_it(tmp_path: Path, name: str, dtype: str) -> None:
    """x @ a.T @ b.T * alpha / rank, beside weights whose rows lie as GGUF has them."""
    config = tiny_config(**CONFIGS[name])
    given = uneven(config, (*TARGETS, *ENDS))
    assert {"model.embed_tokens", "lm_head"} < given.products.keys()
    reader = gguf.GGUFReader(written(tmp_path / "one.gguf", given, config, dtype))
    told = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    alpha = told.pop("adapter.lora.alpha")
    assert told == {
        "general.architecture": "llama",
        "general.type": "adapter",
        "general.name": "one",
        "general.file_type": {"F32": 0, "F16": 1, "BF16": 32}[dtype],
        "adapter.type": "lora",
    }
    tensors = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    assert {tensor.tensor_type.name for tensor in reader.tensors} == {dtype}
    assert len(tensors) == 2 * len(given.products)
    bits = {"F32": 24, "F16": 11, "BF16": 8}[dtype]
    for module, product in given.products.items():
        a, b = (tensors[f"{theirs(module)}.lora_{part}"].astype(np.float64) for part in "ab")
        if module == "model.embed_tokens":  # a row is looked up in a, and turned by b
            assert a.shape == (config.vocab_size, len(product.a))
            found = (a @ b.T) * (alpha / b.shape[1])
            pairs = np.abs(a) @ np.abs(b).T
        else:
            assert a.shape == product.a.shape
            found = (b @ a) * (alpha / b.shape[1])
            pairs = np.abs(b) @ np.abs(a)
        full = f"{module}.weight"
        expected = interleaved(full, product.b.astype(np.float64) @ product.a * product.scale, config)
        assert (np.abs(found - expected) <= 4 * 2.0**-bits * alpha / b.shape[1] * pairs + 1e-12).all(), module


@pytest.mark.parametrize("targets", [TARGETS, ("q_proj", "v_proj"), ("down_proj", *ENDS)])
def test_back_to_the_same_numbers(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """To the bit, where all modules have one alpha."""
    config = tiny_config()
    base, given = in_memory(config, random_weights(config)), random_adapter(config, targets=targets, uneven=False)
    found = adapter.open(written(tmp_path / "one.gguf", given, config), base)
    assert found.products.keys() == given.products.keys()
    assert not found.replaced
    assert found.nbytes == given.nbytes
    for module, product in given.products.items():
        assert np.array_equal(found.products[module].a, product.a)
        assert np.array_equal(found.products[module].b, product.b)
        assert found.products[module].scale == product.scale


def test_alphas_of_their_own_come_back_as_one(tmp_path: Path) -> None:
    config = tiny_config()
    base, given = in_memory(config, random_weights(config)), uneven(config)
    found = adapter.open(written(tmp_path / "one.gguf", given, config), base)
    for module, product in given.products.items():
        back = found.products[module]
        np.testing.assert_allclose(back.b * back.scale, product.b * product.scale, rtol=1e-6)
    assert len({round(p.scale * len(p.a), 4) for p in found.products.values()}) == 1


def test_without_an_alpha_it_is_added_as_it_is(tmp_path: Path) -> None:
    """As llama.cpp has it."""
    config = tiny_config()
    base = in_memory(config, random_weights(config))
    given = random_adapter(config, uneven=False)
    path = written(tmp_path / "one.gguf", given, config)
    raw = path.read_bytes()
    at = raw.index(b"adapter.lora.alpha") + len(b"adapter.lora.alpha") + 4
    path.write_bytes(raw[:at] + b"\0\0\0\0" + raw[at + 4 :])
    assert {product.scale for product in adapter.open(path, base).products.values()} == {1.0}


def test_what_llama_cpp_would_leave_out_is_refused() -> None:
    config = tiny_config()
    norm = LazyTensor.made("model.norm.weight", (64,), lambda: np.ones(64, np.float32))
    with pytest.raises(Unsupported, match=r"model\.norm\.weight, trained whole.*pronk merge"):
        adapter_gguf.check(replace(random_adapter(config), replaced={norm.name: norm}), config)
    score = LazyTensor.made("score.weight", (1, 64), lambda: np.ones((1, 64), np.float32))
    with pytest.raises(Unsupported, match=r"a reward model's adapter.*pronk score BASE"):  # which merge refuses as well
        adapter_gguf.check(replace(random_adapter(config), replaced={score.name: score}), config)
    tied = tiny_config(tie_word_embeddings=True)
    with pytest.raises(Unsupported, match=r"LoRA of model\.embed_tokens, and the head .* is its embedding"):
        adapter_gguf.check(random_adapter(tied, targets=("q_proj", "embed_tokens")), tied)
    adapter_gguf.check(random_adapter(config, targets=("q_proj", "embed_tokens")), config)


def changed(path: Path, told: dict[str, Any], **tensors: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, told.pop("general.architecture", "llama"))
    for key, value in told.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_string(key, value) if isinstance(value, str) else writer.add_float32(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


GOOD = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 8.0}
A, B = np.ones((4, 64), np.float32), np.ones((64, 4), np.float32)
Q = {"blk.0.attn_q.weight.lora_a": A, "blk.0.attn_q.weight.lora_b": B}


@pytest.mark.parametrize(
    ("told", "tensors", "error", "problem"),
    [
        ({}, Q, None, ""),
        ({"general.architecture": "qwen2"}, Q, Unsupported, "architecture 'qwen2'"),
        ({"general.type": "model"}, Q, BadFile, "'model', no 'adapter'"),
        ({"adapter.type": "ia3"}, Q, Unsupported, "adapter.type='ia3'"),
        ({"adapter.alora.invocation_tokens": [1, 2]}, Q, Unsupported, "invocation_tokens"),
        ({"adapter.lora.alpha": float("nan")}, Q, BadFile, "positive number"),
        ({"adapter.lora.alpha": -1.0}, Q, BadFile, "positive number"),
        ({"adapter.lora.alpha": "8"}, Q, BadFile, "positive number"),
        ({}, {"blk.0.attn_q.weight.lora_a": A}, BadFile, "attn_q.weight.lora_b.*absent|absent.*other half"),
        ({}, {**Q, "blk.0.attn_q.weight.lora_b": B[:32]}, BadFile, "another model's adapter"),
        ({}, {**Q, "blk.0.attn_q.weight.lora_a": A[:2]}, BadFile, "another model's adapter"),
        ({}, {**Q, "blk.7.attn_q.weight.lora_a": A}, BadFile, "blk.7.*no module of this model"),
        ({}, {**Q, "blk.0.attn_norm.weight": np.ones(64, np.float32)}, Unsupported, "attn_norm.weight, trained whole"),
        ({}, {**Q, "blk.0.attn_q.weight.lora_a": A * np.inf}, BadFile, "infinity or NaN"),
        ({}, {}, BadFile, "without any tensor"),
    ],
)
def test_files_are_hostile(
    tmp_path: Path, told: dict[str, Any], tensors: dict[str, np.ndarray], error: type[Exception] | None, problem: str
) -> None:
    config = tiny_config()
    base = in_memory(config, random_weights(config))
    path = changed(tmp_path / "one.gguf", {**GOOD, **told}, **tensors)
    if error is None:  # what they change is good
        assert adapter.open(path, base).products.keys() == {"model.layers.0.self_attn.q_proj"}
        return
    with pytest.raises(error, match=problem) as caught:
        adapter.open(path, base)
    assert str(path) in str(caught.value)


def test_damaged_files(tmp_path: Path) -> None:
    config = tiny_config()
    base = in_memory(config, random_weights(config))
    path = written(tmp_path / "one.gguf", random_adapter(config, rank=2, targets=("q_proj",)), config)
    good, draw = path.read_bytes(), np.random.default_rng(1)
    refused = 0
    for _ in range(300):
        raw = bytearray(good[: draw.integers(4, len(good))] if draw.random() < 0.3 else good)
        for at in draw.integers(4, min(len(raw), 900), 3) if len(raw) > 4 else ():
            raw[at] = draw.integers(256)
        path.write_bytes(raw)
        try:
            adapter.open(path, base)
        except PronkError:
            refused += 1
    assert refused > 200


def test_a_model_is_asked_for_and_an_adapter_given(tmp_path: Path) -> None:
    config = tiny_config()
    path = written(tmp_path / "one.gguf", random_adapter(config), config)
    with pytest.raises(Unsupported, match=r"an adapter, no model by itself; --adapter .*one\.gguf"):
        pronk.load(path)


LLAMA_CPP = """
import json, sys
import numpy as np
from llama_cpp import Llama
model, lora, ids, out = sys.argv[1], sys.argv[2] or None, json.loads(sys.argv[3]), sys.argv[4]
llm = Llama(model, lora_path=lora, n_ctx=128, n_threads=1, verbose=False, logits_all=True, type_k=0, type_v=0)
llm.eval(ids)
np.save(out, llm.scores[: len(ids)])
"""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["F32", "F16"])
def test_llama_cpp_has_the_same_logits(data: Path, tmp_path: Path, dtype: str) -> None:
    """Of a model of 5 layers in float32, with an adapter of two ranks and many scales on all linear layers."""
    python = os.environ.get("PRONK_BENCH_PYTHON")
    if not python or subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        pytest.skip("llama.cpp was not asked: PRONK_BENCH_PYTHON names no Python that has llama_cpp")
    stories = data / "stories260K"
    plain = pronk.load(stories / "stories260K.bin", tokenizer=stories / "tok512.bin", engine="cpu", quantize="f32")
    lora = written(tmp_path / "lora.gguf", uneven(plain.config, size=0.02), plain.config, dtype)
    base = tmp_path / "base.gguf"
    save_model(plain.checkpoint, base, to="gguf", dtype="f32", vocabulary=plain.tokenizer.vocabulary())
    ids = plain.tokenizer.encode(
        "Once upon a time, there was a little girl who went to the park with her dog and a ball."
    )

    def of(name: Path | str) -> np.ndarray:
        command = [python, "-c", LLAMA_CPP, str(base), str(name), json.dumps(ids), str(tmp_path / "logits.npy")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return np.load(tmp_path / "logits.npy")

    ours = pronk.load(base, engine="cpu", quantize="f32", adapter=lora).logits(ids)
    with_it, without = of(lora), of("")
    floor = np.abs(plain.logits(ids) - without).max()  # what the two programs differ by anyway
    apart, moved = np.abs(ours - with_it).max(), np.abs(with_it - without).max()
    print(
        f"{dtype}: largest differences of logits: {apart:.3g} with it, {floor:.3g} without; it moves them {moved:.3g}"
    )
    assert moved > 1
    assert apart < (4 * floor if dtype == "F32" else 2**-10 * moved)  # what f16 numbers multiply, it rounds to f16 too
    assert (ours.argmax(1) == with_it.argmax(1)).all()
    assert (with_it.argmax(1) != without.argmax(1)).any()
