"""Saving: the same numbers in every format, files that other programs load, and nothing half-written left behind."""

from __future__ import annotations

import errno
import json
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as oracle
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from gguf_files import gguf_name as oracle_name
from gguf_files import interleaved, save_gguf
from llama2c_files import save_llama2c
from tiny import in_memory, random_weights, tiny_config

import pronk.checkpoint as checkpoints
from pronk import tokenizer_files
from pronk.checkpoint import gguf, llama2c, write, writing
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.checkpoint.write import save
from pronk.config import ModelConfig, RopeScaling
from pronk.errors import BadRequest, PronkError, Unsupported
from pronk.rope import inverse_frequencies
from pronk.vocabulary import TokenizerSource, TokenType, Vocabulary

NUMPY = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
LLAMA2C_ENDS = (2, 1)  # what a llama2.c file always says


def spm(size: int = 512) -> Vocabulary:
    """As SentencePiece lays one out: <unk>, <s>, </s>, 256 bytes, then pieces with a space mark."""
    pieces = [f"\u2581p{i}" for i in range(size - 259)]
    return Vocabulary(
        model="spm",
        tokens=("<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces),
        types=(
            *(TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL),
            *(TokenType.BYTE,) * 256,
            *(TokenType.NORMAL,) * len(pieces),
        ),
        scores=(*(0.0,) * 259, *(-float(i) for i in range(len(pieces)))),
        bos_id=1,
        eos_id=2,
        unk_id=0,
        add_bos=True,
        add_space_prefix=True,
    )


def bpe() -> Vocabulary:
    return Vocabulary(
        model="bpe",
        tokens=("<|end|>", "a", "b", "Ġa", "ab"),
        types=(TokenType.CONTROL, *(TokenType.NORMAL,) * 4),
        merges=("Ġ a", "a b"),
        pre="smollm",
        eos_id=0,
        chat_template="{{ messages }}",
    )


def numbers(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {name: tensor.read() for name, tensor in checkpoint.tensors.items()}


def assert_same(found: Checkpoint, weights: dict[str, np.ndarray]) -> None:
    assert found.tensors.keys() == weights.keys()
    for name, array in weights.items():
        assert found.tensors[name].read().tobytes() == array.tobytes(), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("to", "version"), [("safetensors", None), ("llama2c", None), ("llama2c", 1), ("gguf", None)])
def test_f32_through_every_format_is_the_same_to_the_bit(tmp_path: Path, to: Any, version: int, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, eos_token_ids=LLAMA2C_ENDS)
    weights = random_weights(config)
    saved = save(in_memory(config, weights), tmp_path / "out", to=to, dtype="f32", version=version)
    found = checkpoints.open(saved)
    assert found.format == {"safetensors": "huggingface"}.get(to, to)
    assert found.config == config
    assert_same(found, weights)


def test_a_chain_through_all_formats(tmp_path: Path) -> None:
    config = tiny_config(eos_token_ids=LLAMA2C_ENDS)
    weights = random_weights(config)
    found = in_memory(config, weights)
    for step, (to, version) in enumerate(
        [("gguf", None), ("llama2c", 0), ("safetensors", None), ("llama2c", 1), ("gguf", None), ("safetensors", None)]
    ):
        found = checkpoints.open(save(found, tmp_path / str(step), to=to, dtype="f32", version=version))
    assert_same(found, weights)
    assert found.config == config


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("to", ["safetensors", "gguf"])
def test_narrow_types_round_to_nearest(tmp_path: Path, to: Any, dtype: Any) -> None:
    config = tiny_config()
    weights = random_weights(config)
    found = checkpoints.open(save(in_memory(config, weights), tmp_path / "out", to=to, dtype=dtype))
    for name, array in weights.items():
        narrow = NUMPY["f32"] if to == "gguf" and array.ndim == 1 else NUMPY[dtype]
        assert found.tensors[name].dtype == {4: "F32"}.get(np.dtype(narrow).itemsize, dtype.upper())
        assert found.tensors[name].read().tobytes() == array.astype(narrow).tobytes(), name


def test_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    cases: list[dict[str, Any]] = [
        {"to": "safetensors", "dtype": "bf16"},
        {"to": "gguf", "dtype": "q8_0"},
        {"to": "llama2c", "dtype": "int8", "group_size": 16},
    ]
    whole = [save(source, tmp_path / f"a{i}", **case) for i, case in enumerate(cases)]
    monkeypatch.setattr(writing, "_PIECE", 100)
    parts = [save(source, tmp_path / f"b{i}", **case) for i, case in enumerate(cases)]
    whole[0], parts[0] = whole[0] / "model.safetensors", parts[0] / "model.safetensors"
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in parts]


# --- safetensors


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


# --- llama2.c


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
        ({"intermediate_size": 100}, "group_size 64 .* 4 and its divisors"),
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


# --- GGUF


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


@pytest.mark.parametrize("name", [".", "..", "sub/..", "../sub/.."])
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_current_folder_is_no_destination(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, overwrite: bool
) -> None:
    config = tiny_config()
    here = tmp_path / "sub"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    for destination in (Path(name), Path(name).resolve()):
        with pytest.raises(BadRequest, match="is, or holds, the current folder"):
            save(in_memory(config, {}), destination, to="safetensors", dtype="f32", overwrite=overwrite)
    assert (here / "sub").is_dir()


def test_a_destination_without_a_name_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    with pytest.raises(BadRequest, match="has no name of its own"):
        save(in_memory(tiny_config(), {}), tmp_path / "a/b/..", to="safetensors", dtype="f32", overwrite=True)


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


# --- what may not happen


FORMATS: list[Any] = [
    *[("safetensors", dtype) for dtype in ("bf16", "int8", "llm-int8")],
    *[("gguf", dtype) for dtype in ("q8_0", "q8", "q4")],
    ("llama2c", "int8"),
]


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_nothing_half_written_is_left(tmp_path: Path, to: Any, dtype: Any, failure: BaseException) -> None:
    """Interrupted, or out of disk, at the last tensor; once with nothing there before, once over a whole model."""
    config = tiny_config()
    weights = random_weights(config)

    def fail() -> Any:
        raise failure

    last = "lm_head.weight"
    broken = in_memory(config, weights)
    tensors = dict(broken.tensors)
    tensors[last] = LazyTensor(last, tensors[last].shape, "F32", tensors[last].nbytes, fail)
    broken = replace(broken, tensors=tensors)
    expected = KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else PronkError
    destination = tmp_path / "out"
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    with pytest.raises(expected) as caught:
        save(broken, destination, **arguments)
    if expected is PronkError:
        assert str(caught.value) == f"{destination}: cannot be written: No space left on device"
    assert not list(tmp_path.iterdir())

    save(in_memory(config, weights), destination, **arguments)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(expected):
        save(broken, destination, **arguments, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
def test_a_destination_that_exists(tmp_path: Path, to: Any, dtype: Any) -> None:
    config = tiny_config()
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    destination = save(in_memory(config, random_weights(config, 1)), tmp_path / "out", **arguments)
    with pytest.raises(BadRequest, match="exists"):
        save(in_memory(config, random_weights(config, 2)), destination, **arguments)
    expected = save(in_memory(config, random_weights(config, 2)), tmp_path / "fresh", **arguments)
    save(in_memory(config, random_weights(config, 2)), destination, **arguments, overwrite=True)
    found, fresh = checkpoints.open(destination), checkpoints.open(expected)
    assert_same(found, numbers(fresh))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fresh", "out"]


def test_the_source_is_never_written_over(tmp_path: Path) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    folder = save(source, tmp_path / "hf", to="safetensors", dtype="f32")
    path = save(source, folder / "inside.gguf", to="gguf", dtype="f32")
    (tmp_path / "link.gguf").symlink_to(path)
    for checkpoint, destination, to in (
        (checkpoints.open(path), path, "gguf"),
        (checkpoints.open(path), tmp_path / "link.gguf", "gguf"),
        (checkpoints.open(tmp_path / "link.gguf"), path, "gguf"),
        (checkpoints.open(path), folder, "safetensors"),
        (checkpoints.open(folder / "model.safetensors"), folder / ".." / "hf", "safetensors"),
    ):
        with pytest.raises(BadRequest, match="source"):
            save(checkpoint, destination, to=to, dtype="f32", overwrite=True)
    assert_same(gguf.read(path), numbers(source))


def test_folders_and_files_do_not_replace_each_other(tmp_path: Path) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    (folder := tmp_path / "thesis").mkdir()
    (folder / "thesis.tex").write_text("years of work")
    (file := tmp_path / "file").write_text("")
    for destination, to, named in (
        (folder, "gguf", "is a folder"),
        (folder, "safetensors", r"thesis\.tex, which is no part of a model"),
        (file, "safetensors", "is a file"),
        (tmp_path / "absent" / "m.gguf", "gguf", "is no folder"),
    ):
        with pytest.raises(BadRequest, match=named):
            save(source, destination, to=to, dtype="f32", overwrite=True)
    assert (folder / "thesis.tex").read_text() == "years of work"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"to": "onnx", "dtype": "f32"}, "safetensors, llama2c, gguf"),
        ({"to": "gguf", "dtype": "int8"}, "f32, f16, bf16, q8_0"),
        ({"to": "safetensors", "dtype": "q8_0"}, "f32, f16, bf16"),
        ({"to": "llama2c", "dtype": "f16"}, "f32, int8"),
        ({"to": "llama2c", "dtype": "f32", "version": 2}, "version 0 or 1"),
        ({"to": "llama2c", "dtype": "int8", "version": 0}, "version 2"),
        ({"to": "gguf", "dtype": "f32", "version": 3}, "version is llama2.c's"),
    ],
)
def test_arguments_that_do_not_fit_together(tmp_path: Path, arguments: dict, named: str) -> None:
    config = tiny_config()
    with pytest.raises(BadRequest, match=named):
        save(in_memory(config, random_weights(config)), tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("to", "dtype"), [("safetensors", "f16"), ("gguf", "f16"), ("gguf", "q8_0"), ("llama2c", "int8")]
)
@pytest.mark.parametrize("value", [1e5, np.inf, np.nan])
def test_numbers_that_do_not_fit(tmp_path: Path, to: Any, dtype: Any, value: float) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights["model.layers.0.mlp.up_proj.weight"][1, 2] = value
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    fits = np.isfinite(value) != (dtype == "f16")  # float16 has infinity and NaN, but not 100,000
    if fits:
        save(in_memory(config, weights), tmp_path / "out", **arguments)
        return
    with pytest.raises(Unsupported, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        save(in_memory(config, weights), tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
def test_progress_counts_every_stored_byte(tmp_path: Path, to: Any, dtype: Any) -> None:
    config = tiny_config()
    weights = random_weights(config)
    seen: list[tuple[str, int, int]] = []
    arguments: dict[str, Any] = {"to": to, "dtype": dtype, "group_size": 32}
    save(in_memory(config, weights), tmp_path / "out", **arguments, progress=lambda *step: seen.append(step))
    total = sum(array.nbytes for array in weights.values())
    assert sorted(name for name, _, _ in seen[:-1]) == sorted(weights)
    assert seen[-1] == ("", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


@pytest.mark.parametrize(("to", "dtype"), FORMATS)
def test_peak_memory_is_one_tensor(tmp_path: Path, to: Any, dtype: Any) -> None:
    """Tensors are made when read: 34 MB in all, the largest 4 MB; conversions work in pieces of 2**20 numbers."""
    config = tiny_config(vocab_size=2048, hidden_size=512, intermediate_size=1024, num_hidden_layers=3, head_dim=64)
    tensors = {
        name: LazyTensor(name, shape, "F32", int(np.prod(shape)) * 4, lambda shape=shape: np.ones(shape, np.float32))
        for name, shape in config.tensor_shapes().items()
    }
    source = Checkpoint(Path("memory"), "memory", config, tensors)
    largest, total = (f(t.nbytes for t in tensors.values()) for f in (max, sum))
    arguments: dict[str, Any] = {"to": to, "dtype": dtype}
    tracemalloc.start()
    save(source, tmp_path / "out", **arguments)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The tensor, its copy with rows permuted, and a handful of temporaries of one piece (4 MB each).
    assert peak < 2 * largest + 5 * (4 << 20) < total, (peak, largest, total)


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


def test_a_lone_sentencepiece_file_needs_its_settings(tmp_path: Path) -> None:
    """As Meta ships it. Copied alone, transformers read it without BOS and without the space before a text."""
    checkpoint = in_memory(tiny_config(), {})
    source = TokenizerSource("sentencepiece", tmp_path / "tokenizer.model")
    assert write.needs_tokenizer_files(replace(checkpoint, tokenizer=source))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert not write.needs_tokenizer_files(replace(checkpoint, tokenizer=source))
    assert not write.needs_tokenizer_files(checkpoint)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_device_or_pipe_is_never_replaced(tmp_path: Path) -> None:
    """`--overwrite` once put a file in the place of /dev/full."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(BadRequest, match="not replaced"):
        save(in_memory(tiny_config(), {}), pipe, to="gguf", dtype="f32", overwrite=True)
    assert pipe.is_fifo()
