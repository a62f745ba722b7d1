"""Saving as GGUF: what the gguf library reads of it, metadata, vocabularies, and what it cannot hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as oracle
import numpy as np
import pytest
from gguf_files import gguf_name as oracle_name
from gguf_files import interleaved, save_gguf
from saved_models import assert_same, bpe, numbers, spm
from tiny import in_memory, random_weights, tiny_config

from pronk.checkpoint.readers import gguf
from pronk.checkpoint.writers.write import save
from pronk.config import RopeScaling
from pronk.config.rope import inverse_frequencies
from pronk.errors import BadRequest, Unsupported
from pronk.tokenizer.vocabulary import Vocabulary


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_gguf_loads_elsewhere(tmp_path: Path, dtype: Any) -> None:
    config = tiny_config(intermediate_size=80)  # down_proj's rows of 80 fill no blocks of 32
    weights = random_weights(config)
    path = save(in_memory(config, weights), tmp_path / "m.gguf", to="gguf", dtype=dtype)
    reader = oracle.GGUFReader(path)
    assert {tensor.name for tensor in reader.tensors} == {oracle_name(name) for name in weights}
    found = gguf.read(path)
    for name, array in weights.items():
        (tensor,) = (t for t in reader.tensors if t.name == oracle_name(name))
        kind = "F32" if array.ndim == 1 else "F16" if dtype == "q8_0" and "down" in name else dtype.upper()
        assert tensor.tensor_type.name == kind
        assert tensor.data_offset % 32 == 0
        expected = oracle.quants.quantize(interleaved(name, array, config), tensor.tensor_type)
        assert np.array_equal(tensor.data.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8)), name
        assert found.tensors[name].dtype == kind
    assert found.config == config
    assert path.stat().st_size % 32 == 0


def test_q8_0_blocks_are_copied_and_not_rounded_again(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    kinds: Callable[[str, np.ndarray], str] = lambda name, array: "Q8_0" if array.ndim == 2 else "F32"  # noqa: E731
    source = gguf.read(save_gguf(tmp_path / "a.gguf", config, weights, dtype=kinds))
    found = gguf.read(save(source, tmp_path / "b.gguf", to="gguf", dtype="q8_0"))
    assert_same(found, numbers(source))
    exact = gguf.read(save(source, tmp_path / "c.gguf", to="gguf", dtype="f32"))
    assert_same(exact, numbers(source))


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", factor=4.0),
        RopeScaling("llama3", 8.0, 1.0, 4.0, 64),
        RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        RopeScaling("factors", factors=(1.0, 1.5, 4.0, 8.0)),
    ],
)
def test_rope_scaling_goes_along(tmp_path: Path, scaling: RopeScaling) -> None:
    config = tiny_config(rope_scaling=scaling, rope_theta=500000.0)
    found = gguf.read(
        save(in_memory(config, random_weights(config)), tmp_path / "m.gguf", to="gguf", dtype="f32")
    ).config
    assert np.array_equal(inverse_frequencies(found), inverse_frequencies(config))
    if scaling.original_max_position_embeddings != 64:  # GGUF keeps only factors; those of Llama 3 itself are known
        assert found == config


def test_what_gguf_cannot_hold(tmp_path: Path) -> None:
    config = tiny_config(rope_scaling=RopeScaling("dynamic", factor=2.0))
    with pytest.raises(Unsupported, match="dynamic"):
        save(in_memory(config, {}), tmp_path / "m.gguf", to="gguf", dtype="f32")
    config = tiny_config(eos_token_ids=(2, 3, 4, 5))
    with pytest.raises(Unsupported, match="3 end tokens"):
        save(in_memory(config, {}), tmp_path / "m.gguf", to="gguf", dtype="f32")
    with pytest.raises(BadRequest, match="512 tokens"):
        save(in_memory(tiny_config(), {}), tmp_path / "m.gguf", to="gguf", dtype="f32", vocabulary=spm(512))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"eos_token_ids": (2, 96)}, "eot token is 96"),
        ({"bos_token_id": 128000}, "bos token is 128000"),
        ({"pad_token_id": 96}, "padding token is 96"),
    ],
)
def test_gguf_takes_no_token_that_the_vocabulary_lacks(tmp_path: Path, changes: dict, named: str) -> None:
    config = tiny_config(**changes)
    with pytest.raises(Unsupported, match=f"the {named}, which a vocabulary of 96 does not have"):
        save(in_memory(config, {}), tmp_path / "m.gguf", to="gguf", dtype="f32")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("vocabulary", [spm(), bpe()], ids=["spm", "bpe"])
def test_gguf_holds_the_vocabulary(tmp_path: Path, vocabulary: Vocabulary) -> None:
    config = tiny_config(vocab_size=520, bos_token_id=None, eos_token_ids=(2, 5), attention_bias=True)
    path = save(
        in_memory(config, random_weights(config)), tmp_path / "m.gguf", to="gguf", dtype="f16", vocabulary=vocabulary
    )
    fields = {name: field.contents() for name, field in oracle.GGUFReader(path).fields.items()}
    tokens = [*vocabulary.tokens, *(f"[PAD{i}]" for i in range(len(vocabulary.tokens), 520))]
    assert fields["tokenizer.ggml.tokens"] == tokens
    assert fields["tokenizer.ggml.token_type"] == [*vocabulary.types, *[5] * (520 - len(vocabulary.tokens))]
    assert fields["tokenizer.ggml.model"] == {"spm": "llama", "bpe": "gpt2"}[vocabulary.model]
    assert fields["tokenizer.ggml.pre"] == vocabulary.pre
    assert fields["tokenizer.ggml.add_bos_token"] == vocabulary.add_bos
    assert fields["tokenizer.ggml.add_space_prefix"] == vocabulary.add_space_prefix
    assert fields.get("tokenizer.chat_template") == vocabulary.chat_template
    assert (fields["tokenizer.ggml.eos_token_id"], fields["tokenizer.ggml.eot_token_id"]) == (2, 5)
    assert fields.get("tokenizer.ggml.bos_token_id") == vocabulary.bos_id
    assert fields.get("tokenizer.ggml.unknown_token_id") == vocabulary.unk_id
    if vocabulary.model == "spm":
        assert fields["tokenizer.ggml.scores"] == [*vocabulary.scores, *[0.0] * 8]
    else:
        assert fields["tokenizer.ggml.merges"] == list(vocabulary.merges)
    found = gguf.read(path)
    assert found.config == replace(config, bos_token_id=vocabulary.bos_id)
    assert found.tokenizer is not None
    assert found.tokenizer.settings["tokenizer.ggml.tokens"] == tokens
    assert found.tokenizer.chat_template == vocabulary.chat_template


def test_metadata_types_match_the_oracle(tmp_path: Path) -> None:
    """Keys as llama.cpp's own converter writes them, in the types that its loader demands."""
    config = tiny_config(rope_scaling=RopeScaling("linear", factor=2.0))
    source = in_memory(config, random_weights(config))
    path = save(source, tmp_path / "m.gguf", to="gguf", dtype="f32")
    reader = oracle.GGUFReader(path)
    written = {name: field.types[0].name for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert written["llama.attention.layer_norm_rms_epsilon"] == "FLOAT32"
    assert written["llama.rope.freq_base"] == "FLOAT32"
    assert written["llama.rope.scaling.factor"] == "FLOAT32"
    groups = [vars(group) for group in vars(oracle.Keys).values() if isinstance(group, type)]
    names = [key for group in groups for key in group.values() if isinstance(key, str)]
    known = {name.replace("{arch}", "llama") for name in names}
    assert written.keys() <= known, written.keys() - known
    assert written["llama.block_count"] == "UINT32"
