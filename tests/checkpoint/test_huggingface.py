"""Hugging Face folders as transformers and the safetensors package write them, and what may be wrong in one."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import torch
from formats import Weights, as_torch, save_huggingface
from tiny import random_weights, tiny_config
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from pronk import tokenizer
from pronk.checkpoint.containers.mapped import MappedFile
from pronk.checkpoint.readers import huggingface
from pronk.checkpoint.tensors import Checkpoint
from pronk.config import ModelConfig, RopeScaling
from pronk.errors import BadFile, Unsupported

CONFIG = tiny_config()
WEIGHTS = random_weights(CONFIG)
SENTENCEPIECE = b"\n\x0c\n\x05<unk>\x15\0\0\0\0"


def same(checkpoint: Checkpoint, config: ModelConfig, weights: Weights) -> None:
    assert checkpoint.config == config
    assert checkpoint.tensors.keys() == weights.keys()
    for name, array in weights.items():
        tensor = checkpoint.tensors[name]
        assert (tensor.name, tensor.shape) == (name, array.shape)
        got = tensor.read()
        assert got.dtype == array.dtype
        assert got.tobytes() == array.tobytes(), name


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_huggingface(tmp_path / "model", CONFIG, WEIGHTS)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save_huggingface(tmp_path / "model", CONFIG, WEIGHTS, shards=3)


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 2, 5])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_every_tensor_to_the_bit(tmp_path: Path, container: Any, shards: int, dtype: type) -> None:
    save_huggingface(tmp_path, CONFIG, WEIGHTS, shards, dtype, container)
    assert huggingface.detect(tmp_path)
    checkpoint = huggingface.read(tmp_path)
    same(checkpoint, CONFIG, {name: array.astype(dtype) for name, array in WEIGHTS.items()})
    assert (checkpoint.format, checkpoint.tokenizer, checkpoint.quantization) == ("huggingface", None, None)
    assert len(checkpoint.files) == shards
    plan = checkpoint.plan()
    stored = sum(array.size for array in WEIGHTS.values()) * np.dtype(dtype).itemsize
    assert (plan.files, plan.stored, plan.loaded) == (shards, stored, stored)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        {"head_dim": 16, "eos_token_id": [2, 3]},
    ],
)
def test_models_that_transformers_saved(tmp_path: Path, changes: dict[str, Any]) -> None:
    sizes = {k: v for k, v in CONFIG.to_dict().items() if isinstance(v, int) and k in LlamaConfig().to_dict()}
    model = LlamaForCausalLM(LlamaConfig(**(sizes | changes)))
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    checkpoint = huggingface.read(tmp_path)
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    same(checkpoint, checkpoint.config, state)
    assert len(checkpoint.files) > 1
    assert list(checkpoint.config.eos_token_ids) == changes.get("eos_token_id", [2])


def test_a_mistral_model_without_a_sliding_window(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=4,
        sliding_window=None,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    assert huggingface.read(tmp_path).config.num_key_value_heads == 4
    edit(tmp_path / "config.json", sliding_window=4096)
    with pytest.raises(Unsupported, match="sliding_window=4096"):
        huggingface.read(tmp_path)


def test_content_decides_and_not_the_name(tmp_path: Path) -> None:
    """safetensors under torch's name, torch's archive under that of safetensors, and either under no known name."""
    for name, container in (("pytorch_model.bin", "safetensors"), ("model.safetensors", "bin"), ("x.dat", "bin")):
        folder = save_huggingface(tmp_path / name, CONFIG, WEIGHTS, container=container)  # type: ignore[arg-type]
        written = next(path for path in folder.iterdir() if path.suffix != ".json")
        written.rename(folder / name)
        same(huggingface.read(folder), CONFIG, WEIGHTS)


def test_a_file_of_the_folder_stands_for_the_model(folder: Path, tmp_path: Path) -> None:
    same(huggingface.read(folder / "model.safetensors"), CONFIG, WEIGHTS)
    sharded = save_huggingface(tmp_path / "sharded", CONFIG, WEIGHTS, shards=2)
    same(huggingface.read(sharded / "model-00002-of-00002.safetensors"), CONFIG, WEIGHTS)


def test_safetensors_win_over_bin(folder: Path) -> None:
    save_huggingface(folder, CONFIG, random_weights(CONFIG, seed=1), container="bin")
    same(huggingface.read(folder), CONFIG, WEIGHTS)


def test_a_whole_file_wins_over_an_index(sharded: Path) -> None:
    other = random_weights(CONFIG, seed=1)
    save_huggingface(sharded, CONFIG, other)
    same(huggingface.read(sharded), CONFIG, other)


def test_several_files_and_nothing_to_choose_by(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    shutil.copy(folder / "a.safetensors", folder / "b.safetensors")
    with pytest.raises(BadFile, match=r"no index: a\.safetensors, b\.safetensors; give the path of one"):
        huggingface.read(folder)
    same(huggingface.read(folder / "b.safetensors"), CONFIG, WEIGHTS)


def test_a_folder_of_links_such_as_the_hubs_cache(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    same(huggingface.read(snapshot), CONFIG, WEIGHTS)


def test_rotary_tables_of_old_files_are_ignored(tmp_path: Path) -> None:
    tables = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4),
        "model.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    save_huggingface(tmp_path, CONFIG, {**WEIGHTS, **tables})
    same(huggingface.read(tmp_path), CONFIG, WEIGHTS)


class TestTiedHead:
    tied = tiny_config(tie_word_embeddings=True)
    weights = random_weights(tied)
    embedding = weights["model.embed_tokens.weight"]

    def test_one_tensor_of_two_names_is_the_embedding(self, tmp_path: Path) -> None:
        save_huggingface(tmp_path, self.tied, self.weights, container="bin")
        state = torch.load(tmp_path / "pytorch_model.bin")
        torch.save(state | {"lm_head.weight": state["model.embed_tokens.weight"]}, tmp_path / "pytorch_model.bin")
        same(huggingface.read(tmp_path), self.tied, self.weights)
        torch.save(state | {"lm_head.weight": state["model.embed_tokens.weight"][:-1]}, tmp_path / "pytorch_model.bin")
        with pytest.raises(BadFile, match=r"tensor 'lm_head\.weight': shape"):
            huggingface.read(tmp_path)

    def test_opening_reads_no_numbers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save_huggingface(tmp_path, self.tied, self.weights | {"lm_head.weight": self.embedding})
        monkeypatch.setattr(MappedFile, "array", None)
        assert not huggingface.read(tmp_path).config.tie_word_embeddings

    def test_a_head_of_its_own_is_used_as_transformers_does(self, tmp_path: Path) -> None:
        head = self.embedding.copy()
        head[-1, -1] += 1
        weights = self.weights | {"lm_head.weight": head}
        save_huggingface(tmp_path, self.tied, weights)
        same(huggingface.read(tmp_path), tiny_config(), weights)
        theirs = LlamaForCausalLM.from_pretrained(tmp_path)
        assert torch.equal(theirs.lm_head.weight, as_torch(head))

    @pytest.mark.parametrize("head", [np.float32(1)[None], np.zeros((96, 63), np.float32), np.array(1, np.float32)])
    def test_a_head_of_the_wrong_shape(self, tmp_path: Path, head: Any) -> None:
        save_huggingface(tmp_path, self.tied, self.weights | {"lm_head.weight": head})
        with pytest.raises(BadFile, match=r"tensor 'lm_head\.weight': shape"):
            huggingface.read(tmp_path)
        scalar = {"lm_head.weight": np.array(1, np.float32), "model.embed_tokens.weight": np.array(1, np.float32)}
        save_huggingface(tmp_path, self.tied, self.weights | scalar)
        with pytest.raises(BadFile, match="shape"):
            huggingface.read(tmp_path)

    def test_untied_and_absent(self, tmp_path: Path) -> None:
        save_huggingface(tmp_path, tiny_config(), self.weights)
        with pytest.raises(BadFile, match=r"tensor 'lm_head\.weight': absent"):
            huggingface.read(tmp_path)


class TestConfigFiles:
    def test_ends_of_text_are_those_of_both_files(self, folder: Path) -> None:
        edit(folder / "config.json", eos_token_id=5)
        for ids, expected in (([5, 7, 9], (5, 7, 9)), (7, (5, 7)), (None, (5,))):
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids, "temperature": 0.6}))
            assert huggingface.read(folder).config.eos_token_ids == expected
        (folder / "generation_config.json").write_text('{"eos_token_id": "x"}')
        with pytest.raises(BadFile, match=r"generation_config\.json: eos_token_id"):
            huggingface.read(folder)

    def test_scaled_rotary_embeddings(self, folder: Path) -> None:
        scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
        (folder / "config.json").write_text(json.dumps(tiny_config(rope_scaling=scaling).to_dict()))
        assert huggingface.read(folder).config.rope_scaling == scaling

    def test_quantized_weights_are_refused_by_name(self, folder: Path) -> None:
        edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
        with pytest.raises(Unsupported, match=r"config\.json: quantization_config \('gptq'\)"):
            huggingface.read(folder)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b'{"hidden_size": NaN}', "NaN is not JSON"),
            (b'{"hidden_size": 1, "hidden_size": 2}', "key 'hidden_size': stands in one object twice"),
            (b"[" * 100_000, "nested"),
            (b'{"a":' * 40 + b"1" + b"}" * 40, "nested more than 32 deep"),
            (b"\xff", "at byte 0: is not UTF-8"),
            (b"{} {}", "at byte 3: not JSON"),
            (b"", "not JSON"),
            (b'"x"', "no JSON object"),
            (b" " * (5 << 20), "JSON of more than"),
            (b"{}", "architecture none is not supported"),
        ],
    )
    def test_a_broken_config(self, folder: Path, content: bytes, message: str) -> None:
        (folder / "config.json").write_bytes(content)
        with pytest.raises((BadFile, Unsupported)) as caught:
            huggingface.read(folder)
        assert message in str(caught.value)
        assert str(folder / "config.json") in str(caught.value)


class TestTensors:
    def change(self, folder: Path, **changes: Any) -> None:
        weights = {name: array for name, array in (WEIGHTS | changes).items() if array is not None}
        safetensors.numpy.save_file(weights, folder / "model.safetensors")

    def test_absent(self, folder: Path) -> None:
        self.change(folder, **{"model.norm.weight": None})
        with pytest.raises(BadFile, match=r"tensor 'model\.norm\.weight': absent"):
            huggingface.read(folder)

    def test_foreign(self, folder: Path) -> None:
        self.change(folder, **{"model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)})
        with pytest.raises(BadFile, match=r"q_norm.*: not part of this model"):
            huggingface.read(folder)

    def test_of_an_endless_name(self, folder: Path) -> None:
        self.change(folder, **{"x" * 257: np.ones(8, np.float32)})
        with pytest.raises(BadFile, match="a name of 257 characters") as caught:
            huggingface.read(folder)
        assert len(str(caught.value)) < 400

    def test_of_another_shape(self, folder: Path) -> None:
        self.change(folder, **{"model.norm.weight": np.ones(63, np.float32)})
        with pytest.raises(BadFile, match=r"shape \(63,\), but the config says \(64,\)"):
            huggingface.read(folder)

    @pytest.mark.parametrize(("dtype", "name"), [(np.float64, "F64"), (np.int8, "I8"), (ml_dtypes.float8_e4m3fn, "F8")])
    def test_of_a_type_that_models_here_do_not_have(self, folder: Path, dtype: type, name: str) -> None:
        self.change(folder, **{"model.norm.weight": np.ones(64, dtype)})
        with pytest.raises(Unsupported, match=rf"'model\.norm\.weight' is stored as {name}"):
            huggingface.read(folder)


class TestIndex:
    def write(self, folder: Path, weight_map: Any) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def weight_map(self, folder: Path) -> dict[str, str]:
        return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def test_a_missing_shard(self, sharded: Path) -> None:
        (sharded / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(BadFile, match=r"shard 'model-00002-of-00003\.safetensors' is absent"):
            huggingface.read(sharded)

    @pytest.mark.parametrize(
        "name",
        ["../outside", "/etc/passwd", "sub/../../outside", "..", ".", "", "a\\b", "C:x", "x\0", 5, None, ["x"]],
    )
    def test_a_shard_that_is_no_file_of_this_folder(self, sharded: Path, name: Any) -> None:
        shutil.copy(sharded / "model-00001-of-00003.safetensors", sharded.parent / "outside")
        self.write(sharded, self.weight_map(sharded) | {"model.norm.weight": name})
        with pytest.raises(BadFile, match="is not the name of a file in this folder"):
            huggingface.read(sharded)

    def test_links_that_lead_in_a_circle(self, sharded: Path) -> None:
        shard = sharded / "model-00001-of-00003.safetensors"
        shard.unlink()
        shard.symlink_to(sharded / "b")
        (sharded / "b").symlink_to(shard)
        with pytest.raises(BadFile, match=r"shard 'model-00001-of-00003\.safetensors' is absent"):
            huggingface.read(sharded)

    def test_a_shard_that_is_a_pipe_or_a_folder(self, sharded: Path) -> None:
        shard = sharded / "model-00001-of-00003.safetensors"
        shard.unlink()
        os.mkfifo(shard)
        with pytest.raises(BadFile, match="is absent"):
            huggingface.read(sharded)
        shard.unlink()
        shard.mkdir()
        with pytest.raises(BadFile, match="is absent"):
            huggingface.read(sharded)

    def test_the_index_itself_as_a_shard(self, sharded: Path) -> None:
        weight_map = self.weight_map(sharded)
        self.write(sharded, weight_map | {"model.norm.weight": "model.safetensors.index.json"})
        with pytest.raises(BadFile, match="neither a safetensors file nor a torch archive"):
            huggingface.read(sharded)

    def test_a_tensor_that_is_not_in_its_shard(self, sharded: Path) -> None:
        weight_map = self.weight_map(sharded)
        wrong = "model-00001-of-00003.safetensors"
        name = next(name for name, file in weight_map.items() if file != wrong)
        self.write(sharded, weight_map | {name: wrong})
        with pytest.raises(BadFile, match=f"tensor '{name}': is not in shard '{wrong}'"):
            huggingface.read(sharded)

    def test_a_tensor_in_two_shards(self, sharded: Path) -> None:
        """The index chooses; where it is silent, nobody does."""
        second = sharded / "model-00002-of-00003.safetensors"
        extra = {"model.embed_tokens.weight": np.zeros((96, 64), np.float32)}
        safetensors.numpy.save_file({**safetensors.numpy.load_file(second), **extra}, second)
        same(huggingface.read(sharded), CONFIG, WEIGHTS)
        weight_map = self.weight_map(sharded)
        del weight_map["model.embed_tokens.weight"]
        self.write(sharded, weight_map)
        with pytest.raises(BadFile, match=r"'model\.embed_tokens\.weight': stands in an earlier shard too"):
            huggingface.read(sharded)

    @pytest.mark.parametrize("weight_map", [None, {}, [], "x", 5])
    def test_no_map_at_all(self, sharded: Path, weight_map: Any) -> None:
        self.write(sharded, weight_map)
        with pytest.raises(BadFile, match="weight_map"):
            huggingface.read(sharded)


class TestTokenizer:
    def test_tokenizer_json_comes_first(self, folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(SENTENCEPIECE)
        source = huggingface.read(folder).tokenizer
        assert source is not None
        assert (source.kind, source.path.name) == ("sentencepiece", "tokenizer.model")
        (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}}}')
        source = huggingface.read(folder).tokenizer
        assert source is not None
        assert (source.kind, source.path.name) == ("tokenizer.json", "tokenizer.json")

    def test_settings_of_both_files(self, folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(SENTENCEPIECE)
        (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>", "pad_token": "<pad>"}')
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<b>", "add_bos_token": true}')
        source = huggingface.read(folder).tokenizer
        assert source is not None
        assert source.settings == {"bos_token": "<b>", "pad_token": "<pad>", "add_bos_token": True}
        assert tokenizer.find(folder) == source  # --tokenizer FOLDER once knew the second file alone

    def test_a_file_that_is_no_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.model").write_bytes(b"\x00\x01\x02")
        with pytest.raises(BadFile, match=r"tokenizer\.model: no tokenizer of a kind that pronk knows"):
            huggingface.read(folder)

    def template(self, folder: Path, files: dict[str, str]) -> str | None:
        (folder / "tokenizer.model").write_bytes(SENTENCEPIECE)
        for name, content in files.items():
            (folder / name).write_text(content)
        source = huggingface.read(folder).tokenizer
        assert source is not None
        assert tokenizer.find(folder) == source
        return source.chat_template

    def test_chat_templates(self, folder: Path) -> None:
        assert self.template(folder, {}) is None
        assert self.template(folder, {"chat_template.json": '{"chat_template": "J"}'}) == "J"
        assert self.template(folder, {"tokenizer_config.json": '{"chat_template": "T"}'}) == "T"
        several = [{"name": "tool_use", "template": "U"}, {"name": "default", "template": "D"}]
        assert self.template(folder, {"tokenizer_config.json": json.dumps({"chat_template": several})}) == "D"
        assert self.template(folder, {"tokenizer_config.json": json.dumps({"chat_template": several[:1]})}) is None
        assert self.template(folder, {"chat_template.jinja": "{{ ä }}"}) == "{{ ä }}"

    @pytest.mark.parametrize("template", [5, {"a": 1}, [{"name": "default", "template": 5}]])
    def test_a_template_that_is_no_text(self, folder: Path, template: Any) -> None:
        with pytest.raises(BadFile, match="chat_template: must be a text"):
            self.template(folder, {"tokenizer_config.json": json.dumps({"chat_template": template})})

    def test_templates_that_cannot_be_read(self, folder: Path) -> None:
        self.template(folder, {})
        (folder / "chat_template.jinja").write_bytes(b"ab\xff")
        with pytest.raises(BadFile, match=r"chat_template\.jinja at byte 2: is not UTF-8"):
            huggingface.read(folder)
        (folder / "chat_template.jinja").write_bytes(b" " * (2 << 20))
        with pytest.raises(BadFile, match="more than 1048576 bytes"):
            huggingface.read(folder)
