"""GGUF files that lie: each is one BadFile naming file, field and offset, fast and without memory."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf as oracle
import numpy as np
import pytest
from gguf_files import (
    add_tokenizer,
    array_of,
    described,
    f32,
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
from mutations import modestly, survives
from tiny import random_weights, tiny_config

from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.containers.gguf_file import TENSOR_TYPES
from pronk.checkpoint.readers import gguf
from pronk.errors import BadFile, PronkError, Unsupported

EXAMPLES = 1000
HUGE = (1 << 63) - 1


def refused(path: Path, data: bytes, field: str, *, offset: bool = True) -> BadFile:
    path.write_bytes(data)
    return refused_file(path, field, offset=offset)


def refused_file(path: Path, field: str, *, offset: bool = True) -> BadFile:
    with modestly(), pytest.raises(BadFile) as caught:
        gguf.read(path)
    error = caught.value
    assert field in (error.field or ""), error
    assert (error.offset is not None) == offset, error
    assert "\n" not in str(error)
    assert len(str(error)) < 400
    return error


def test_the_builder_builds_a_good_file(tmp_path: Path) -> None:
    """Else every test here would pass for the wrong reason."""
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes(model_pairs()))
    found = gguf.read(path)
    assert found.config == tiny_config()
    for name, array in random_weights(tiny_config()).items():
        assert found.tensors[name].read().tobytes() == array.tobytes()


def test_truncated_at_every_byte_of_the_header(tmp_path: Path) -> None:
    config = tiny_config()
    path = save_gguf(tmp_path / "m.gguf", config, random_weights(config), edit=lambda w: add_tokenizer(w, 9))
    whole = path.read_bytes()
    first = min(tensor.start for tensor in gguf.open_file(path).tensors.values())
    assert first > 1500
    for length in range(first, 0, -1):
        os.truncate(path, length)
        with pytest.raises(BadFile) as caught:
            gguf.read(path)
        assert caught.value.field
        assert caught.value.offset is not None
        assert caught.value.offset <= length
    path.write_bytes(whole[:-33])  # the last tensor loses a number, the padding aside
    refused_file(path, "tensor")


def test_empty_and_absent(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(BadFile):
        gguf.read(path)
    path.write_bytes(b"")
    with pytest.raises(BadFile):
        gguf.read(path)
    with pytest.raises(BadFile):
        gguf.read(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with modestly(), pytest.raises(BadFile):
        gguf.read(tmp_path / "pipe.gguf")
    assert not gguf.detect(tmp_path / "pipe.gguf")


def test_the_array_that_hangs_other_readers(tmp_path: Path) -> None:
    """An array that claims 2**63 elements of one byte and holds none (llama.cpp pull request 27188)."""
    for kind in (0, 7, 8, 9, 10):
        for count in (1 << 63, 1 << 62, HUGE, (1 << 64) - 1):
            value = struct.pack("<IQ", kind, count)
            refused(tmp_path / "m.gguf", raw_gguf([pair("x", 9, value)], [], alignment=1), "'x'")


def test_the_shortest_file_that_hangs_gguf_0_19() -> None:
    """24 bytes of header, a key, and an array without elements: 49 bytes; its reader walks them all, 2**63 times."""
    data = raw_gguf([pair("x", 9, struct.pack("<IQ", 0, 1 << 63))], [], alignment=1)
    assert len(data) == 49


@pytest.mark.parametrize("count", [1 << 63, (1 << 64) - 1, 1 << 62, 1 << 32, 10_000])
@pytest.mark.parametrize("which", ["pair_count", "tensor_count"])
def test_counts(tmp_path: Path, which: str, count: int) -> None:
    error = refused(tmp_path / "m.gguf", raw_gguf([u32("x", 1)], [], b"\0" * 500, **{which: count}), "count")
    assert str(count) in str(error)


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 200])
def test_lengths_of_strings(tmp_path: Path, length: int) -> None:
    size = struct.pack("<Q", length)
    path = tmp_path / "m.gguf"
    tail = b"\0" * 64
    refused(path, raw_gguf([size + b"key" + tail], []), "metadata key length")
    refused(path, raw_gguf([pair("x", 8, size + tail)], []), "'x'")
    refused(path, raw_gguf([pair("x", 9, struct.pack("<IQ", 8, 2) + text("ok") + size + tail)], []), "'x' [1]")
    refused(path, raw_gguf([], [size + tail]), "tensor name length")


def test_a_file_of_terabytes_makes_no_length_credible(tmp_path: Path) -> None:
    """A sparse file, in which every length fits: headers have limits of their own."""
    path = tmp_path / "m.gguf"
    for data, field in (
        (raw_gguf([], [], pair_count=1 << 17), "metadata count"),
        (raw_gguf([], [], tensor_count=1 << 17), "tensor count"),
        (raw_gguf([pair("x", 8, struct.pack("<Q", 1 << 30))], []), "'x' length"),
        (raw_gguf([pair("x", 9, struct.pack("<IQ", 0, 1 << 30))], []), "'x' length"),
        (raw_gguf([pair("x", 9, struct.pack("<IQ", 8, 1 << 27))], []), "'x' length"),
        (raw_gguf([pair("x", 9, struct.pack("<IQQ", 8, 1, 1 << 30))], []), "'x' [0]"),
    ):
        path.write_bytes(data)
        os.truncate(path, 1 << 42)
        refused_file(path, field)


def test_a_string_may_not_be_cut_off_by_the_end(tmp_path: Path) -> None:
    value = struct.pack("<IQ", 8, 2) + text("ab") + text("cd")
    path = tmp_path / "m.gguf"
    for cut in range(1, 11):
        path.write_bytes(raw_gguf([pair("x", 9, value)], [], alignment=1)[:-cut])
        refused_file(path, "'x'")


@pytest.mark.parametrize(
    ("value", "field"),
    [
        (pair("x", 13, b"\0" * 8), "'x'"),
        (pair("x", 0xFFFFFFFF, b"\0" * 8), "'x'"),
        (pair("x", 9, struct.pack("<IQ", 13, 1) + b"\0"), "'x'"),
        (pair("x", 9, struct.pack("<IQIQ", 9, 1, 0, 0)), "'x'"),
        (pair("x", 7, b"\2"), "'x'"),
        (pair("x", 9, struct.pack("<IQ", 7, 3) + b"\1\0\2"), "'x'"),
        (pair("x", 8, text(b"\xff")), "'x'"),
        (pair("x", 8, text(b"\xed\xa0\x80")), "'x'"),
        (pair("x", 9, struct.pack("<IQ", 8, 1) + text(b"a\xff")), "'x' [0]"),
        (pair(b"\xff", 4, b"\0" * 4), "metadata key"),
        (pair(b"", 4, b"\0" * 4), "metadata key"),
        (pair("k" * 65536, 4, b"\0" * 4), "metadata key"),
        (u32("x", 1) * 2, "'x'"),
    ],
)
def test_metadata(tmp_path: Path, value: bytes, field: str) -> None:
    count = 2 if value == u32("x", 1) * 2 else 1
    refused(tmp_path / "m.gguf", raw_gguf([value], [], b"\0" * 64, pair_count=count), field)


def test_arrays_nested_without_end(tmp_path: Path) -> None:
    nested = struct.pack("<IQ", 9, 1) * 3000 + struct.pack("<IQ", 0, 0)
    error = refused(tmp_path / "m.gguf", raw_gguf([pair("x", 9, nested)], []), "'x'")
    assert "array of arrays" in str(error)


def test_a_bool_array_names_the_byte(tmp_path: Path) -> None:
    data = raw_gguf([pair("x", 9, struct.pack("<IQ", 7, 4) + b"\1\0\1\2")], [], alignment=1)
    assert refused(tmp_path / "m.gguf", data, "'x'").offset == len(data) - 1


@pytest.mark.parametrize("alignment", [0, 3, 33, 48, 0xFFFFFFFF])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    pairs = [*model_pairs(), u32("general.alignment", alignment)]
    refused(tmp_path / "m.gguf", model_bytes(pairs), "general.alignment")
    text_pairs = [*model_pairs(), pair("general.alignment", 8, text("32"))]
    refused(tmp_path / "m.gguf", model_bytes(text_pairs), "general.alignment")


def test_an_alignment_beyond_the_file(tmp_path: Path) -> None:
    refused(tmp_path / "m.gguf", model_bytes([*model_pairs(), u32("general.alignment", 1 << 31)]), "tensor")


@pytest.mark.parametrize(
    "tensor",
    [
        described("t", (), axes=0),
        described("t", (1, 1, 1, 1, 1)),
        described("t", (1,), axes=0xFFFFFFFF),
        described("t", (1,), axes=1_000_000),
        described("t", (0,)),
        described("t", (4, 0)),
        described("t", (1 << 63,)),
        described("t", ((1 << 64) - 1,)),
        described("t", (4194305, 4194305, 211106198978564)),  # 4, where 64 bits wrap round
        described("t", (1 << 32, 1 << 32)),  # 0, likewise
        described("t", (1 << 62, 4)),
        described("t", (17,)),
        described("t", (16,), offset=32),
        described("t", (1,), offset=1 << 63),
        described("t", (1,), offset=(1 << 64) - 32),
        described("t", (1,), offset=(1 << 64) - 1),
        described("t", (1,), offset=4),
        described("t", (1,), kind=42),
        described("t", (1,), kind=0xFFFFFFFF),
        described("t", (31,), kind=8),  # Q8_0 has blocks of 32
        described("t", (2, 48), kind=8),
        described("t", (128,), kind=12),  # Q4_K has blocks of 256
        described(b"\xff", (1,)),
        described("", (1,)),
        described("t" * 65, (1,)),
    ],
)
def test_tensor_descriptions(tmp_path: Path, tensor: bytes) -> None:
    refused(tmp_path / "m.gguf", raw_gguf([], [tensor], b"\0" * 64), "tensor")


def test_two_tensors_may_not_share_name_or_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    same_name = [described("t", (8,)), described("t", (8,), offset=32)]
    assert "twice" in str(refused(path, raw_gguf([], same_name, b"\0" * 64), "'t'"))
    for first, second in ((0, 0), (0, 32), (32, 0), (32, 32)):
        overlap = [described("a", (16,), offset=first), described("b", (16,), offset=second)]
        assert "overlaps" in str(refused(path, raw_gguf([], overlap, b"\0" * 128), "tensor"))
    inside = [described("a", (64,)), described("b", (8,), offset=64)]
    assert "overlaps" in str(refused(path, raw_gguf([], inside, b"\0" * 256), "'b'"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab_size", u32("llama.vocab_size", 0)),
        ("vocab_size", u32("llama.vocab_size", 0xFFFFFFFF)),
        ("block_count", u32("llama.block_count", 0)),
        ("block_count", u32("llama.block_count", 0xFFFFFFFF)),
        ("block_count", pair("llama.block_count", 10, struct.pack("<Q", HUGE))),
        ("block_count", pair("llama.block_count", 11, struct.pack("<q", -1))),
        ("embedding_length", f32("llama.embedding_length", 64)),
        ("embedding_length", pair("llama.embedding_length", 8, text("64"))),
        ("embedding_length", pair("llama.embedding_length", 7, b"\1")),
        ("context_length", pair("llama.context_length", 9, array_of(4, "I"))),
        ("attention.head_count", u32("llama.attention.head_count", 0)),
        ("attention.head_count", u32("llama.attention.head_count", 7)),
        ("attention.head_count", pair("llama.attention.head_count", 11, struct.pack("<q", -8))),
        ("attention.head_count", pair("llama.attention.head_count", 11, struct.pack("<q", -(1 << 63)))),
        ("attention.head_count_kv", u32("llama.attention.head_count_kv", 3)),
        ("attention.head_count_kv", u32("llama.attention.head_count_kv", 0)),
        ("eps", f32("llama.attention.layer_norm_rms_epsilon", float("nan"))),
        ("eps", f32("llama.attention.layer_norm_rms_epsilon", float("inf"))),
        ("eps", f32("llama.attention.layer_norm_rms_epsilon", 0.0)),
        ("eps", pair("llama.attention.layer_norm_rms_epsilon", 12, struct.pack("<d", 1e300))),
        ("eps", pair("llama.attention.layer_norm_rms_epsilon", 7, b"\1")),
        ("eps", u32("llama.something", 0)),
        ("more", f32("llama.rope.freq_base", -1.0)),
        ("more", f32("llama.rope.scaling.factor", -2.0)),
        ("more", f32("llama.rope.scaling.factor", float("nan"))),
        ("architecture", u32("general.architecture", 1)),
        ("architecture", u32("general.other", 1)),
        ("bos", u32("tokenizer.ggml.bos_token_id", 96)),
        ("eos", pair("tokenizer.ggml.eos_token_id", 8, text("2"))),
        ("eos", pair("tokenizer.ggml.eos_token_id", 7, b"\1")),
    ],
)
def test_metadata_that_makes_no_model(tmp_path: Path, key: str, value: bytes) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes(model_pairs(**{key: value})))
    with modestly(), pytest.raises((BadFile, Unsupported)) as caught:
        gguf.read(path)
    assert str(caught.value).startswith(f"{path}: ")
    if isinstance(caught.value, BadFile):
        assert caught.value.field


def test_tensors_that_do_not_fit_the_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for changes, named in (
        ({"block_count": u32("llama.block_count", 3)}, "layers.2"),
        ({"block_count": u32("llama.block_count", 1)}, "layers.1"),
        ({"vocab_size": u32("llama.vocab_size", 97)}, "embed_tokens"),
        ({"feed_forward_length": u32("llama.feed_forward_length", 95)}, "mlp"),
        ({"attention.head_count_kv": u32("llama.attention.head_count_kv", 8)}, "k_proj"),
    ):
        path.write_bytes(model_bytes(model_pairs(**changes)))
        with modestly(), pytest.raises(BadFile, match=named):
            gguf.read(path)


@pytest.mark.parametrize(
    "factors",
    [np.ones(3, np.float32), np.zeros(4, np.float32), np.full(4, np.nan, np.float32), np.ones((2, 2), np.float32)],
)
def test_rope_factors_that_make_no_model(tmp_path: Path, factors: np.ndarray) -> None:
    config = tiny_config()
    path = save_gguf(tmp_path / "m.gguf", config, random_weights(config), rope_factors=factors)
    with pytest.raises(BadFile):
        gguf.read(path)


def test_every_foreign_type_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    foreign = {number: name for number, name in TENSOR_TYPES.items() if name not in gguf_blocks.BLOCK_TYPES}
    for number, name in foreign.items():
        if name not in ("F32", "F16", "BF16"):
            path.write_bytes(raw_gguf(model_pairs(), [described("token_embd.weight", (96, 64), number)], b"\0" * 64))
            with pytest.raises(Unsupported, match=f"type {name} "):
                gguf.read(path)
    assert {t.name: t.value for t in oracle.GGMLQuantizationType}.items() <= {
        n: i for i, n in TENSOR_TYPES.items()
    }.items()


def test_vectors_of_blocks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(raw_gguf(model_pairs(), [described("output_norm.weight", (64,), 8)], b"\0" * 68))
    with pytest.raises(Unsupported, match=r"output_norm\.weight"):
        gguf.read(path)


def split(tmp_path: Path) -> list[Path]:
    config = tiny_config()
    save_gguf(tmp_path / "m.gguf", config, random_weights(config), tensors_a_part=8)
    return sorted(tmp_path.glob("m-*.gguf"))


def test_splits(tmp_path: Path) -> None:
    """Missing, cyclic, out of order, renamed."""
    parts = split(tmp_path)
    second = parts[1].read_bytes()
    for opened in parts:
        parts[1].unlink()
        if opened != parts[1]:
            assert "m-00002-of-00003.gguf is absent" in str(refused_file(opened, "split", offset=False))
        parts[1].symlink_to(parts[0].name)
        refused_file(opened, "split.no")
        parts[1].unlink()
        parts[1].symlink_to(parts[1].name)  # to itself
        with pytest.raises((BadFile, OSError)):
            gguf.read(opened)
        parts[1].unlink()
        parts[1].write_bytes(parts[2].read_bytes())
        refused_file(opened, "split.no")
        parts[1].write_bytes(second)
        gguf.read(opened)
    renamed = parts[0].rename(tmp_path / "model.gguf")
    refused_file(renamed, "split.count")
    renamed = renamed.rename(tmp_path / "m-00001-of-00004.gguf")
    refused_file(renamed, "split.count")


def test_splits_that_disagree(tmp_path: Path) -> None:
    def write(name: str, no: int, pairs: list[bytes], tensors: list[bytes], count: int = 2, total: int = 2) -> Path:
        split = [pair("split.no", 2, struct.pack("<H", no)), pair("split.count", 2, struct.pack("<H", count))]
        split.append(pair("split.tensors.count", 5, struct.pack("<i", total)))
        (tmp_path / name).write_bytes(raw_gguf([*split, *pairs], tensors, b"\0" * 64))
        return tmp_path / name

    first = write("m-00001-of-00002.gguf", 0, model_pairs(), [described("a", (8,))])
    write("m-00002-of-00002.gguf", 1, [], [described("a", (8,))])
    with pytest.raises(BadFile, match="'a': stands in an earlier part too"):
        gguf.read(first)
    write("m-00002-of-00002.gguf", 1, [u32("llama.block_count", 9)], [described("b", (8,))])
    with pytest.raises(BadFile, match=r"llama\.block_count.* differs"):
        gguf.read(first)
    write("m-00002-of-00002.gguf", 1, [], [described("b", (8,)), described("c", (8,), offset=32)])
    with pytest.raises(BadFile, match=r"split\.tensors\.count.* the parts hold 3"):
        gguf.read(first)
    write("m-00002-of-00002.gguf", 1, [], [described("b", (8,))], count=3)
    with pytest.raises(BadFile, match=r"split\.count"):
        gguf.read(first)


def test_a_file_that_shrinks_under_our_feet(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(model_bytes(model_pairs()))
    tensor = gguf.read(path).tensors["lm_head.weight"]
    path.write_bytes(b"GGUF")
    with pytest.raises(BadFile, match="shrunk"):
        tensor.read()


def mixed_types() -> bytes:
    """A small model with every block type in it, on random blocks."""
    config = tiny_config(
        vocab_size=8, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=128, tie_word_embeddings=True,
    )  # fmt: skip
    kinds = list(gguf_blocks.BLOCK_TYPES)
    numbers = {name: number for number, name in TENSOR_TYPES.items()}
    rng = np.random.default_rng(0)
    tensors, data = [], b""
    for index, (name, values) in enumerate(random_weights(config).items()):
        kind = "F32" if values.ndim == 1 else kinds[index % len(kinds)]
        stored = interleaved(name, values, config).tobytes()
        if kind != "F32":
            block = gguf_blocks.BLOCK_TYPES[kind]
            stored = rng.bytes(values.size // block.elements * block.nbytes)
        data += b"\0" * (-len(data) % 32)
        tensors.append(described(gguf_name(name), values.shape, numbers[kind], len(data)))
        data += stored
    changes = {
        "vocab_size": u32("llama.vocab_size", 8),
        "embedding_length": u32("llama.embedding_length", 256),
        "feed_forward_length": u32("llama.feed_forward_length", 256),
        "attention.head_count": u32("llama.attention.head_count", 2),
        "attention.head_count_kv": u32("llama.attention.head_count_kv", 1),
        "key": u32("llama.attention.key_length", 128),
        "value": u32("llama.attention.value_length", 128),
    }
    return raw_gguf(model_pairs(**changes), tensors, data)


@pytest.mark.slow
def test_random_damage(tmp_path: Path) -> None:
    """Only an error of ours, or success, comes out of reading a damaged file and all its tensors."""
    config = tiny_config(vocab_size=40, hidden_size=32, intermediate_size=32, num_attention_heads=4)
    weights = random_weights(config)
    path = tmp_path / "m.gguf"
    valid = [mixed_types()]
    for big_endian in (False, True):
        save_gguf(
            path, config, weights, big_endian=big_endian,
            dtype=lambda name, array: "Q8_0" if array.ndim == 2 else "F32",
            edit=lambda writer: add_tokenizer(writer, 40), rope_factors=np.ones(4, np.float32),
        )  # fmt: skip
        valid.append(path.read_bytes())
    headers = []
    for data in valid:
        path.write_bytes(data)
        headers.append(min(info.start for info in gguf.open_file(path).tensors.values()))
        for tensor in gguf.read(path).tensors.values():
            assert tensor.read().shape == tensor.shape
    outcomes = {"read": 0, "refused": 0}

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            for tensor in gguf.read(path).tensors.values():
                assert tensor.read().shape == tensor.shape
                if tensor.read_blocks:
                    tensor.read_blocks()
            outcomes["read"] += 1
        except PronkError:
            outcomes["refused"] += 1

    assert survives(EXAMPLES, list(zip(valid, headers, strict=True)), check) >= EXAMPLES
    assert min(outcomes.values()) > EXAMPLES / 100, outcomes
