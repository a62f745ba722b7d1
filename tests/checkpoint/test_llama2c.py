"""llama2.c's files: the layout against a writer of the tests' own and against real models; the tokenizer beside."""

from __future__ import annotations

import shutil
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama2c_files import quantize, save_llama2c
from tiny import random_weights, tiny_config

from pronk.checkpoint.readers import llama2c
from pronk.errors import BadFile, Unsupported


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("key_value_heads", [1, 4, 8])
@pytest.mark.parametrize("version", [0, 1])
def test_floats_read_back_to_the_bit(tmp_path: Path, version: int, key_value_heads: int, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, num_key_value_heads=key_value_heads)
    weights = random_weights(config)
    path = save_llama2c(tmp_path / "m.bin", config, weights, version)
    assert llama2c.detect(path)
    found = llama2c.read(path)
    assert found.config == replace(config, eos_token_ids=(2, 1))
    assert (found.format, found.files, found.tokenizer, found.quantization) == ("llama2c", (path,), None, None)
    assert found.tensors.keys() == weights.keys()
    for name, array in weights.items():
        tensor = found.tensors[name]
        assert (tensor.dtype, tensor.nbytes) == ("F32", array.nbytes)
        assert tensor.read().tobytes() == array.tobytes(), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("group_size", [1, 8, 32, 3])
def test_int8_groups_of_any_size(tmp_path: Path, group_size: int, tied: bool) -> None:
    """Groups of 3 run over the ends of rows; the numbers after them are at odd addresses."""
    config = tiny_config(tie_word_embeddings=tied, hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    weights = random_weights(config)
    path = save_llama2c(tmp_path / "m.bin", config, weights, 2, group_size)
    assert llama2c.detect(path)
    found = llama2c.read(path)
    assert found.config == replace(config, eos_token_ids=(2, 1))
    matrices = [array for array in weights.values() if array.ndim == 2]
    assert found.quantization == f"I8 x {len(matrices)}"
    for name, array in weights.items():
        tensor, back = found.tensors[name], found.tensors[name].read()
        assert back.shape == array.shape
        assert back.dtype == np.float32
        if array.ndim == 1:
            assert (tensor.dtype, back.tobytes()) == ("F32", array.tobytes())
            continue
        assert (tensor.dtype, tensor.nbytes) == ("I8", array.size + array.size // group_size * 4)
        if "q_proj" not in name and "k_proj" not in name:  # rows stand as they were quantized
            quants, scales = quantize(array, group_size)
            assert np.array_equal(back.reshape(-1, group_size), quants * scales[:, None])
        error = np.abs(back - array).max()
        assert error <= np.abs(array).max() / 127 / 2 * 1.001, name


def test_rotated_rows_come_back_in_our_order(tmp_path: Path) -> None:
    """Each row of wq holds its own number, so that a wrong permutation shows."""
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.0.self_attn.q_proj.weight"][:] = np.arange(1, 65)[:, None]
    found = llama2c.read(save_llama2c(tmp_path / "m.bin", config, weights, 2, 64))
    assert np.array_equal(
        found.tensors["model.layers.0.self_attn.q_proj.weight"].read()[:, 0].round(), np.arange(1, 65)
    )


def test_the_real_models_agree(data: Path) -> None:
    """The 260K model in version 0, and in version 2 made by llama2.c's own export."""
    exact = llama2c.read(data / "stories260K" / "stories260K.bin")
    groups = llama2c.read(data / "stories260K" / "stories260K_q80.bin")
    config = exact.config
    assert groups.config == config
    assert (config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size) == (
        64,
        172,
        5,
        512,
    )
    assert (config.num_attention_heads, config.num_key_value_heads, config.max_position_embeddings) == (8, 4, 512)
    assert config.tie_word_embeddings
    assert (config.rms_norm_eps, config.rope_theta, config.bos_token_id, config.eos_token_ids) == (1e-5, 1e4, 1, (2, 1))
    assert groups.quantization == "I8 x 36"
    assert exact.tokenizer is not None
    assert (exact.tokenizer.kind, exact.tokenizer.path.name) == ("llama2c", "tok512.bin")
    for name, tensor in exact.tensors.items():
        array, back = tensor.read(), groups.tensors[name].read()
        # Half a step of the largest group there can be.
        assert np.abs(array - back).max() <= (0 if array.ndim == 1 else np.abs(array).max() / 254 * 1.001), name
    for index in (100, 300):  # the embedding's rows are not permuted: groups of 8, scale = absmax / 127
        row = exact.tensors["model.embed_tokens.weight"].read()[index]
        steps = np.abs(row.reshape(-1, 8)).max(axis=1, keepdims=True) / 127
        back = groups.tensors["model.embed_tokens.weight"].read()[index].reshape(-1, 8)
        assert np.abs(back / steps - np.rint(back / steps)).max() < 1e-4


def write_tokenizer(path: Path, size: int, names: tuple[str, ...] = ("<unk>", "\n<s>\n", "\n</s>\n")) -> Path:
    tokens = [*names, *(f"<0x{i:02X}>" for i in range(size - len(names)))][:size]
    records = [struct.pack("<fi", 0.0, len(token)) + token.encode() for token in tokens]
    path.write_bytes(struct.pack("<i", max(map(len, tokens))) + b"".join(records))
    return path


def test_the_tokenizer_beside_has_the_right_size(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_llama2c(tmp_path / "tok_model.bin", config, random_weights(config), 0)
    write_tokenizer(tmp_path / "tokenizer.bin", 95)
    write_tokenizer(tmp_path / "notes.bin", 96)
    (tmp_path / "tok.json").write_text("{")
    (tmp_path / "tok.model").mkdir()
    assert llama2c.read(path).tokenizer is None

    write_tokenizer(tmp_path / "tok96.bin", 96)
    found = llama2c.read(path)
    assert found.tokenizer is not None
    assert found.tokenizer.path.name == "tok96.bin"
    assert found.config == replace(config, eos_token_ids=(2, 1))

    write_tokenizer(tmp_path / "a_tokenizer.bin", 96)
    write_tokenizer(tmp_path / "tokenizer.model.bin", 96)
    found = llama2c.read(path)
    assert found.tokenizer is not None
    assert found.tokenizer.path.name == "tokenizer.model.bin"  # called tokenizer, before others in the alphabet


def test_a_vocabulary_without_s_has_no_token_1_to_begin_with(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_llama2c(tmp_path / "m.bin", config, random_weights(config), 1)
    write_tokenizer(tmp_path / "tokenizer.bin", 96, names=("!", '"', "#"))
    found = llama2c.read(path).config
    assert (found.bos_token_id, found.eos_token_ids) == (None, ())


def test_sentencepiece_beside(tmp_path: Path, data: Path) -> None:
    config = tiny_config(
        vocab_size=32000, hidden_size=16, intermediate_size=16, num_attention_heads=2, num_key_value_heads=2, head_dim=8
    )
    path = save_llama2c(tmp_path / "m.bin", config, random_weights(config), 0)
    shutil.copy(data / "llama-tokenizers" / "llama2.tokenizer.model", tmp_path / "tokenizer.model")
    found = llama2c.read(path)
    assert found.tokenizer is not None
    assert found.tokenizer.kind == "sentencepiece"
    assert (found.config.bos_token_id, found.config.eos_token_ids) == (1, (2, 1))


def test_detect_demands_the_exact_size(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_llama2c(tmp_path / "m.bin", config, random_weights(config), 0)
    whole = path.read_bytes()
    for wrong in (whole[:-1], whole + b"\0", b"", whole[:27]):
        path.write_bytes(wrong)
        assert not llama2c.detect(path)
        with pytest.raises(BadFile):
            llama2c.read(path)
    assert not llama2c.detect(tmp_path)
    assert not llama2c.detect(tmp_path / "absent")


def test_other_files_are_not_llama2c(data: Path) -> None:
    for path in data.rglob("*"):
        if path.is_file():
            assert llama2c.detect(path) == path.name.startswith("stories260K"), path


def test_unknown_versions_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(struct.pack("<Ii", 0x616B3432, 3).ljust(256, b"\0"))
    assert llama2c.detect(path)
    with pytest.raises(Unsupported, match="version 3"):
        llama2c.read(path)
