"""Saving for llama2.c: its own export's files to the byte, its tokenizer, and what it cannot hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from llama2c_files import save_llama2c
from saved_models import bpe, spm
from tiny import in_memory, random_weights, tiny_config

from pronk.checkpoint.readers import llama2c
from pronk.checkpoint.writers import write
from pronk.checkpoint.writers.write import save
from pronk.config import RopeScaling
from pronk.config.rope import inverse_frequencies
from pronk.errors import BadRequest, Unsupported
from pronk.tokenizer import files as tokenizer_files
from pronk.tokenizer.vocabulary import TokenizerSource, TokenType, Vocabulary


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("version", [0, 1, 2])
def test_llama2c_files_are_those_of_its_own_export(tmp_path: Path, version: int, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    weights = random_weights(config)
    weights["model.layers.0.mlp.up_proj.weight"][3, :8] = np.arange(8) - 3.5  # halves: which way do they round?
    saved = save(
        in_memory(config, weights),
        tmp_path / "out.bin",
        to="llama2c",
        dtype="int8" if version == 2 else "f32",
        version=version,
        group_size=8,
    )
    expected = bytearray(save_llama2c(tmp_path / "expected.bin", config, weights, version, 8).read_bytes())
    found = saved.read_bytes()
    if version == 0:  # the tables of angles, which that writer fills with NaN
        size = config.max_position_embeddings * config.head_dim * 4
        end = len(found) - (0 if tied else config.vocab_size * config.hidden_size * 4)
        tables = np.frombuffer(found[end - size : end], np.float32).reshape(2, config.max_position_embeddings, -1)
        angles = np.arange(config.max_position_embeddings)[:, None] * inverse_frequencies(config)
        assert np.abs(tables - [np.cos(angles), np.sin(angles)]).max() < 1e-7
        expected[end - size : end] = found[end - size : end]
    assert found == bytes(expected)


def test_int8_of_zeros(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.1.mlp.up_proj.weight"][:] = 0
    saved = save(in_memory(config, weights), tmp_path / "m.bin", to="llama2c", dtype="int8", group_size=32)
    assert not llama2c.read(saved).tensors["model.layers.1.mlp.up_proj.weight"].read().any()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": RopeScaling("linear", factor=2.0)}, "rope_scaling"),
        ({"rope_theta": 500000.0}, "rope_theta 500000"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06"),
        ({"eos_token_ids": (2, 5, 7)}, r"eos_token_ids \[5, 7\]"),
        ({"bos_token_id": 0}, "bos_token_id 0"),
        ({"attention_bias": True}, "biases"),
        ({"mlp_bias": True}, "biases"),
        ({"head_dim": 16}, "head_dim 16"),
        ({"intermediate_size": 100}, "groups of 64 do not divide .* groups of 4 do, and of its divisors"),
    ],
)
def test_what_llama2c_cannot_hold(tmp_path: Path, changes: dict, named: str) -> None:
    config = tiny_config(**changes)
    with pytest.raises(Unsupported, match=named):
        save(in_memory(config, random_weights(config)), tmp_path / "m.bin", to="llama2c", dtype="int8")
    assert not list(tmp_path.iterdir())


def test_llama2c_takes_its_tokenizer_beside_it(tmp_path: Path) -> None:
    config = tiny_config(vocab_size=512)
    source, vocabulary = in_memory(config, random_weights(config)), spm(512)
    path = save(source, tmp_path / "m.bin", to="llama2c", dtype="f32", vocabulary=vocabulary)
    beside = tmp_path / "tokenizer.bin"
    records = list(tokenizer_files.llama2c_records(beside, beside.read_bytes()))
    assert [score for score, _ in records] == list(vocabulary.scores)
    assert [token for _, token in records[:5]] == [b"<unk>", b"\n<s>\n", b"\n</s>\n", b"<0x00>", b"<0x01>"]
    assert records[259][1] == b" p0"
    assert int.from_bytes(beside.read_bytes()[:4], "little") == max(len(token) for _, token in records)
    found = llama2c.read(path)
    assert found.tokenizer == TokenizerSource("llama2c", beside)

    # A second model may share the tokenizer, but another tokenizer is not written over.
    save(source, tmp_path / "n.bin", to="llama2c", dtype="f32", version=1, vocabulary=vocabulary)
    other = replace(vocabulary, scores=(1.0,) * 512)
    with pytest.raises(BadRequest, match=r"tokenizer\.bin exists"):
        save(source, tmp_path / "o.bin", to="llama2c", dtype="f32", vocabulary=other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.bin", "n.bin", "tokenizer.bin"]
    save(found, tmp_path / "p.bin", to="llama2c", dtype="f32", vocabulary=other)  # the source's own stays as it is
    assert [score for score, _ in tokenizer_files.llama2c_records(beside, beside.read_bytes())] == [*vocabulary.scores]


@pytest.mark.parametrize(
    ("vocabulary", "reason"),
    [
        (bpe(), "byte-level BPE"),
        (spm(500), "500 tokens and the model 512"),
        (replace(spm(), bos_id=2, eos_id=1), "<s> as token 1"),
        (replace(spm(), eos_id=300), "</s> as token 2"),
        (replace(spm(), types=(TokenType.NORMAL,) * 512), "the 256 bytes from token 3"),
    ],
)
def test_vocabularies_that_llama2c_cannot_hold(tmp_path: Path, vocabulary: Vocabulary, reason: str) -> None:
    config = tiny_config(vocab_size=512)
    source = in_memory(config, random_weights(config))
    assert reason in (write.tokenizer_problem(source, "llama2c", vocabulary) or "")
    save(source, tmp_path / "m.bin", to="llama2c", dtype="f32", vocabulary=vocabulary)
    assert [path.name for path in tmp_path.iterdir()] == ["m.bin"]


def test_llama2c_stops_at_s_as_well_as_at_its_end_of_text() -> None:
    """<s> parts its training texts, and its program stops there alone."""
    config = tiny_config(vocab_size=512)
    source, vocabulary = in_memory(config, random_weights(config)), replace(spm(), eos_id=1)
    assert write.tokenizer_problem(source, "llama2c", vocabulary) is None
