"""Models in GGUF as the `gguf` package writes them, read back: numbers, config, splits, byte order, refusals."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import gguf as oracle
import ml_dtypes
import numpy as np
import pytest
from gguf_files import (
    add_tokenizer,
    array_of,
    described,
    gguf_name,
    interleaved,
    model_bytes,
    model_pairs,
    pair,
    raw_gguf,
    save_gguf,
    text,
    u32,
)
from tiny import random_weights, tiny_config

from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.readers import gguf
from pronk.config import RopeScaling
from pronk.errors import Unsupported


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1},
        {"num_key_value_heads": 8},
        {"head_dim": 16},
        {"attention_bias": True, "mlp_bias": True, "pad_token_id": 0, "rope_theta": 500000.0, "rms_norm_eps": 1e-6},
    ],
)
def test_a_model_reads_back_to_the_bit(tmp_path: Path, changes: dict, big_endian: bool) -> None:
    config = tiny_config(**changes)
    weights = random_weights(config)
    path = save_gguf(tmp_path / "m.gguf", config, weights, big_endian=big_endian)
    assert gguf.detect(path)
    found = gguf.read(path)
    assert found.config == config
    assert (found.format, found.files, found.tokenizer, found.quantization) == ("gguf", (path,), None, None)
    assert found.tensors.keys() == weights.keys()
    for name, array in weights.items():
        assert same(found.tensors[name].read(), array), name


@pytest.mark.parametrize("big_endian", [False, True])
def test_types_are_kept_and_blocks_reachable(tmp_path: Path, big_endian: bool) -> None:
    config = tiny_config(tie_word_embeddings=True)
    weights = random_weights(config)

    def dtype(name: str, array: np.ndarray) -> str:
        if array.ndim == 1:
            return "F32"
        return "Q8_0" if "_proj" in name and "mlp" not in name else "Q4_0" if "mlp" in name else "F16"

    found = gguf.read(save_gguf(tmp_path / "m.gguf", config, weights, dtype=dtype, big_endian=big_endian))
    assert found.quantization == "Q8_0 x 8, Q4_0 x 6, F16 x 1"  # which was not counted
    for name, array in weights.items():
        tensor, kind = found.tensors[name], dtype(name, array)
        assert tensor.dtype == kind
        if kind in ("F32", "F16"):
            assert tensor.read_blocks is None
            assert same(tensor.read(), array.astype(np.float32 if kind == "F32" else np.float16))
            continue
        # Quantization works a row at a time, so the oracle may take the rows in our order.
        blocks = oracle.quants.quantize(array, oracle.GGMLQuantizationType[kind])
        assert tensor.read_blocks is not None
        assert same(tensor.read_blocks(), blocks)
        assert same(tensor.read(), oracle.quants.dequantize(blocks, oracle.GGMLQuantizationType[kind]))
        assert tensor.nbytes == blocks.nbytes


@pytest.mark.parametrize("kind", gguf_blocks.BLOCK_TYPES)
@pytest.mark.parametrize("big_endian", [False, True])
def test_every_block_type_in_a_file(tmp_path: Path, kind: str, big_endian: bool) -> None:
    """Random blocks under rotated rows, in both byte orders."""
    config = tiny_config(hidden_size=256, num_hidden_layers=1, num_attention_heads=4, head_dim=64)
    weights = random_weights(config)
    block = gguf_blocks.BLOCK_TYPES[kind]
    shape = weights["model.layers.0.self_attn.q_proj.weight"].shape
    blocks = np.random.default_rng(0).integers(
        0, 256, (shape[0], shape[1] // block.elements * block.nbytes), dtype=np.uint8
    )
    path = tmp_path / "m.gguf"
    writer = oracle.GGUFWriter(
        path, "llama", endianess=oracle.GGUFEndian.BIG if big_endian else oracle.GGUFEndian.LITTLE
    )
    for key, value in {
        "context_length": 128,
        "embedding_length": 256,
        "block_count": 1,
        "feed_forward_length": 96,
        "vocab_size": 96,
        "attention.head_count": 4,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    raw = oracle.GGMLQuantizationType[kind]
    for name, array in weights.items():
        if name.endswith("q_proj.weight"):
            stored = interleaved(name, blocks, config)
            if big_endian:
                stored = gguf_blocks.to_little_endian(kind, stored)
            writer.add_tensor("blk.0.attn_q.weight", stored, raw_dtype=raw)
        else:
            writer.add_tensor(gguf_name(name), interleaved(name, array, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensor = gguf.read(path).tensors["model.layers.0.self_attn.q_proj.weight"]
    assert tensor.dtype == kind
    assert tensor.read_blocks is not None
    assert same(tensor.read_blocks(), blocks)
    assert same(tensor.read(), gguf_blocks.decode(kind, blocks))


def test_bf16_and_metadata_of_every_type(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)

    def edit(writer: oracle.GGUFWriter) -> None:
        writer.add_int8("x.i8", -1)
        writer.add_uint16("x.u16", 65535)
        writer.add_int64("x.i64", -(1 << 60))
        writer.add_float64("x.f64", 0.1)
        writer.add_bool("x.bool", True)
        writer.add_array("x.bools", [True, False])
        writer.add_array("x.words", ["a", "", "éß漢"])
        writer.add_array("x.ints", [1, 2, 3])

    for big_endian in (False, True):
        path = tmp_path / f"{big_endian}.gguf"
        save_gguf(path, config, weights, big_endian=big_endian, edit=edit)
        metadata = gguf.open_file(path).metadata
        assert metadata["x.words"] == ["a", "", "éß漢"]
        assert metadata["x.bools"] == [True, False]
        assert metadata["x.bool"] is True
        assert (metadata["x.i8"], metadata["x.u16"], metadata["x.i64"]) == (-1, 65535, -(1 << 60))
        assert (metadata["x.f64"], metadata["x.ints"]) == (0.1, [1, 2, 3])

    def bf16(name: str, array: np.ndarray) -> str:
        return "BF16" if array.ndim == 2 else "F32"

    found = gguf.read(save_gguf(tmp_path / "bf16.gguf", config, weights, dtype=bf16))
    name = "model.layers.1.self_attn.k_proj.weight"
    assert same(found.tensors[name].read(), weights[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("order", ["<", ">"])
def test_versions_two_and_three(tmp_path: Path, version: int, order: str) -> None:
    config = tiny_config()
    path = save_gguf(tmp_path / "m.gguf", config, random_weights(config), big_endian=order == ">")
    raw = bytearray(path.read_bytes())
    raw[4:8] = struct.pack(order + "I", version)
    path.write_bytes(raw)
    assert gguf.read(path).config == config


@pytest.mark.parametrize("opened", [1, 2, 3])
def test_a_split_model_opens_by_any_part(tmp_path: Path, opened: int) -> None:
    config = tiny_config()
    weights = random_weights(config)
    save_gguf(tmp_path / "m.gguf", config, weights, tensors_a_part=8)
    parts = sorted(tmp_path.glob("m-*.gguf"))
    assert [p.name for p in parts] == [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    found = gguf.read(parts[opened - 1])
    assert found.config == config
    assert found.files == tuple(parts)
    assert found.path == parts[opened - 1]
    for name, array in weights.items():
        assert same(found.tensors[name].read(), array), name


def test_rope_factors(tmp_path: Path) -> None:
    config = tiny_config()
    factors = np.array([1, 1.5, 4, 8], np.float32)
    found = gguf.read(save_gguf(tmp_path / "m.gguf", config, random_weights(config), rope_factors=factors))
    assert found.config.rope_scaling == RopeScaling("factors", factors=(1.0, 1.5, 4.0, 8.0))

    both = save_gguf(
        tmp_path / "n.gguf",
        config,
        random_weights(config),
        rope_factors=factors,
        edit=lambda writer: writer.add_rope_scaling_factor(2.0),
    )
    assert gguf.read(both).config.rope_scaling == RopeScaling("factors", factors=(2.0, 3.0, 8.0, 16.0))


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (lambda w: (w.add_string("llama.rope.scaling.type", "linear"), w.add_rope_scaling_factor(4.0)), 4.0),
        (lambda w: w.add_rope_scaling_factor(4.0), 4.0),
        (lambda w: w.add_float32("llama.rope.scale_linear", 4.0), 4.0),
        (lambda w: (w.add_string("llama.rope.scaling.type", "none"), w.add_rope_scaling_factor(4.0)), None),
        (lambda w: w.add_string("llama.rope.scaling.type", "linear"), None),
        (lambda w: (w.add_rope_scaling_factor(4.0), w.add_rope_scaling_orig_ctx_len(64)), 4.0),
    ],
)
def test_linear_rope_scaling(tmp_path: Path, edit, expected: float | None) -> None:
    config = tiny_config()
    found = gguf.read(save_gguf(tmp_path / "m.gguf", config, random_weights(config), edit=edit)).config
    assert found.rope_scaling == (expected and RopeScaling("linear", factor=expected))


def test_head_counts_may_be_arrays(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    config = tiny_config()
    pairs = model_pairs(**{"attention.head_count_kv": pair("llama.attention.head_count_kv", 9, array_of(4, "I", 4, 4))})
    path.write_bytes(model_bytes(pairs))
    assert gguf.read(path).config == config
    pairs = model_pairs(**{"attention.head_count_kv": pair("llama.attention.head_count_kv", 9, array_of(4, "I", 4, 8))})
    path.write_bytes(model_bytes(pairs))
    with pytest.raises(Unsupported, match="differs from layer to layer"):
        gguf.read(path)


def test_the_vocabulary_comes_along(tmp_path: Path) -> None:
    def edit(writer: oracle.GGUFWriter) -> None:
        add_tokenizer(writer, 96)
        writer.add_eot_token_id(5)

    config = tiny_config()
    found = gguf.read(save_gguf(tmp_path / "m.gguf", config, random_weights(config), edit=edit))
    assert found.config.eos_token_ids == (2, 5)
    source = found.tokenizer
    assert source is not None
    assert (source.kind, source.path, source.chat_template) == ("gguf", found.path, "{{ messages }}")
    assert source.settings["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(96)]
    assert source.settings["tokenizer.ggml.merges"] == ["t 0", "t 1"]
    assert all(key.startswith("tokenizer.") for key in source.settings)


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda w: w.add_expert_count(8), "llama.expert_count"),
        (lambda w: w.add_sliding_window(64), "llama.attention.sliding_window"),
        (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "yarn"),
        (lambda w: w.add_logit_scale(0.5), "llama.logit_scale"),
        (lambda w: w.add_float32("llama.rope.scaling.attn_factor", 2.0), "attn_factor"),
        (lambda w: w.add_value_length(4), "llama.attention.value_length"),
        (lambda w: w.add_uint32("llama.new\nkey", 1), r"llama.new\\nkey"),
        (lambda w: w.add_type("adapter"), "adapter"),
        (lambda w: w.add_tensor("blk.0.attn_rot_embd.weight", np.zeros(4, np.float32)), "attn_rot_embd"),
        (lambda w: w.add_tensor("blk.0.x.weight", np.zeros(4, np.float64)), "blk.0.x.weight"),
    ],
)
def test_foreign_mathematics_is_refused_by_name(tmp_path: Path, edit, named: str) -> None:
    config = tiny_config()
    path = save_gguf(tmp_path / "m.gguf", config, random_weights(config), edit=edit)
    with pytest.raises(Unsupported, match=named) as caught:
        gguf.read(path)
    assert "\n" not in str(caught.value)


def test_switched_off_keys_are_no_foreign_mathematics(tmp_path: Path) -> None:
    def edit(writer: oracle.GGUFWriter) -> None:
        writer.add_expert_count(0)
        writer.add_logit_scale(0.0)
        writer.add_rope_scaling_finetuned(True)
        writer.add_tensor_data_layout("Meta AI original pth")

    config = tiny_config()
    assert gguf.read(save_gguf(tmp_path / "m.gguf", config, random_weights(config), edit=edit)).config == config


def test_types_and_architectures_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf([pair("general.architecture", 8, text("gpt-oss"))], [described("x", (32,), 39)]))
    with pytest.raises(Unsupported, match="'gpt-oss'"):
        gguf.read(path)
    tensors = [described("token_embd.weight", (96, 256), 21), described("output_norm.weight", (64,), 0)]
    path.write_bytes(raw_gguf(model_pairs(), tensors, bytes(1 << 16)))
    with pytest.raises(Unsupported, match="IQ3_S"):
        gguf.read(path)


def test_unaligned_tensors_are_fine_where_the_file_says_so(tmp_path: Path) -> None:
    """An alignment of 1 puts floats on odd bytes; numpy may view those, but other libraries may not."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes([*model_pairs(), u32("general.alignment", 1)], alignment=1, gap=1))
    arrays = [tensor.read() for tensor in gguf.read(path).tensors.values()]
    assert all(array.flags.aligned for array in arrays)


def test_detect_looks_at_content(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGU")
    assert not gguf.detect(path)
    assert not gguf.detect(tmp_path)
    assert not gguf.detect(tmp_path / "absent")
    (other := tmp_path / "weights.bin").write_bytes(b"GGUF")
    assert gguf.detect(other)


def test_the_default_model(smollm2: Path) -> None:
    started = time.process_time()
    found = gguf.read(smollm2)
    assert time.process_time() - started < 0.5  # some 0.04 s on an idle core: 98,000 strings
    assert found.quantization == "Q4_1 x 210, Q8_0 x 1"
    config = found.config
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers, config.head_dim) == (49152, 576, 30, 64)
    assert (config.num_attention_heads, config.num_key_value_heads, config.intermediate_size) == (9, 3, 1536)
    assert (config.rope_theta, config.rms_norm_eps, config.max_position_embeddings) == (100000.0, 1e-5, 8192)
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))
    assert found.tokenizer is not None
    assert len(found.tokenizer.settings["tokenizer.ggml.tokens"]) == 49152

    stored = {tensor.name: tensor for tensor in oracle.GGUFReader(smollm2).tensors}
    for ours, theirs, heads in (
        ("model.embed_tokens.weight", "token_embd.weight", None),
        ("model.layers.29.mlp.down_proj.weight", "blk.29.ffn_down.weight", None),
        ("model.layers.7.self_attn.q_proj.weight", "blk.7.attn_q.weight", 9),
    ):
        numbers = oracle.quants.dequantize(stored[theirs].data, stored[theirs].tensor_type)
        if heads:  # rows of pair i of a head stand at 2i and 2i + 1
            numbers = numbers.reshape(heads, 32, 2, 576).transpose(0, 2, 1, 3).reshape(576, 576)
        assert same(found.tensors[ours].read(), np.ascontiguousarray(numbers))
