"""Saving as Hugging Face folders: what safetensors and transformers read of them, shards, the tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from saved_models import assert_same, spm
from tiny import in_memory, random_weights, tiny_config

import pronk.checkpoint as checkpoints
from pronk.checkpoint.writers import write
from pronk.checkpoint.writers.write import save
from pronk.config import ModelConfig
from pronk.tokenizer.vocabulary import TokenizerSource


def test_safetensors_loads_elsewhere(tmp_path: Path) -> None:
    config = tiny_config()
    weights = random_weights(config)
    folder = save(in_memory(config, weights), tmp_path / "out", to="safetensors", dtype="f32")
    loaded = safetensors.numpy.load_file(folder / "model.safetensors")
    assert loaded.keys() == weights.keys()
    assert all(np.array_equal(loaded[name], array) for name, array in weights.items())
    raw = (folder / "model.safetensors").read_bytes()
    assert int.from_bytes(raw[:8], "little") % 8 == 0
    written = json.loads((folder / "config.json").read_text())
    assert written["torch_dtype"] == "float32"
    assert ModelConfig.from_dict(written) == config
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_transformers_loads_the_folder(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config()
    weights = random_weights(config)
    folder = save(in_memory(config, weights), tmp_path / "out", to="safetensors", dtype="f32", max_shard_bytes=100_000)
    model = AutoModelForCausalLM.from_pretrained(folder)
    state = model.state_dict()
    assert all(torch.equal(state[name], torch.from_numpy(array)) for name, array in weights.items())


@pytest.mark.parametrize("most", [1, 30_000, 10**9])
def test_shards(tmp_path: Path, most: int) -> None:
    config = tiny_config()
    weights = random_weights(config)
    folder = save(in_memory(config, weights), tmp_path / "out", to="safetensors", dtype="f32", max_shard_bytes=most)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert_same(checkpoints.open(folder), weights)
    if most == 10**9:
        assert files == ["model.safetensors"]
        return
    assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in weights.values())
    shards = [safetensors.numpy.load_file(folder / file) for file in files]
    sizes = [sum(array.nbytes for array in shard.values()) for shard in shards]
    for file, shard, size in zip(files, shards, sizes, strict=True):
        assert {index["weight_map"][name] for name in shard} == {file}
        assert len(shard) == 1 or size <= most
    assert len(files) == (len(weights) if most == 1 else 12)


def test_the_tokenizer_of_hugging_face_goes_along(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    names = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
    for name in names:
        (source / name).write_text(name)
    (source / "README.md").write_text("not the tokenizer's")
    config = tiny_config()
    checkpoint = replace(
        in_memory(config, random_weights(config)), tokenizer=TokenizerSource("sentencepiece", source / names[0])
    )
    assert write.tokenizer_problem(checkpoint, "safetensors", None) is None
    folder = save(checkpoint, tmp_path / "out", to="safetensors", dtype="f32")
    assert sorted(path.name for path in folder.iterdir()) == sorted(["config.json", "model.safetensors", *names])
    assert (folder / "tokenizer.model").read_text() == "tokenizer.model"

    other = replace(checkpoint, tokenizer=TokenizerSource("gguf", source / names[0]))
    assert "gguf tokenizer" in (write.tokenizer_problem(other, "safetensors", spm()) or "")
    files = {"tokenizer.json": b"{}"}
    assert write.tokenizer_problem(other, "safetensors", None, files) is None
    given = save(other, tmp_path / "given", to="safetensors", dtype="f32", tokenizer_files=files)
    assert (given / "tokenizer.json").read_bytes() == b"{}"
    folder = save(other, tmp_path / "other", to="safetensors", dtype="f32")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_a_lone_sentencepiece_file_needs_its_settings(tmp_path: Path) -> None:
    """As Meta ships it. Copied alone, transformers read it without BOS and without the space before a text."""
    checkpoint = in_memory(tiny_config(), {})
    source = TokenizerSource("sentencepiece", tmp_path / "tokenizer.model")
    assert write.needs_tokenizer_files(replace(checkpoint, tokenizer=source))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not write.needs_tokenizer_files(replace(checkpoint, tokenizer=source))
    assert not write.needs_tokenizer_files(checkpoint)
