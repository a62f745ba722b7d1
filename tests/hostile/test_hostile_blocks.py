"""Blocks that lie, of every type that files store weights in: a scale that is no number never becomes one, cut files
are refused, and whatever else stands in a block is a weight like any other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_files import described, gguf_name, model_pairs, raw_gguf, u32
from mutations import modestly
from tiny import random_weights, tiny_config

from pronk import checkpoint, formats
from pronk.checkpoint.containers.gguf_blocks import BLOCK_TYPES
from pronk.checkpoint.containers.gguf_file import TENSOR_TYPES
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile

CONFIG = tiny_config(
    vocab_size=70, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, head_dim=128, max_position_embeddings=64,
)  # fmt: skip
NUMBERS = {name: number for number, name in TENSOR_TYPES.items()}
NOT_NUMBERS = (0x7C00, 0xFC00, 0x7E00, 0x7C01)  # infinite, and NaN, quiet or not
each_type = pytest.mark.parametrize("kind", BLOCK_TYPES)


def halves(kind: str) -> list[int]:
    """Where a block has float16."""
    block = BLOCK_TYPES[kind]
    return [offset for offset, width in block.words if width == 2 and offset not in block.whole]


class Model:
    """A file whose matrices are all of one type: random codes, or one byte, under small scales."""

    def __init__(self, kind: str, byte: int | None = None) -> None:
        rng, block = np.random.default_rng(0), BLOCK_TYPES[kind]
        self.kind, self.places = kind, {}
        tensors, data = [], bytearray()
        for name, values in random_weights(CONFIG).items():
            data += b"\0" * (-len(data) % 32)
            self.places[name] = len(data)
            stored = NUMBERS["F32" if values.ndim == 1 else kind]
            tensors.append(described(gguf_name(name), values.shape, stored, len(data)))
            if values.ndim == 1:
                data += values.tobytes()
                continue
            size = (values.size // block.elements, block.nbytes)
            blocks = rng.integers(0, 256, size, np.uint8) if byte is None else np.full(size, byte, np.uint8)
            for offset in halves(kind):
                blocks[:, offset : offset + 2] = np.array([2.0**-12], np.float16).view(np.uint8)
            data += blocks.tobytes()
        pairs = model_pairs(
            vocab_size=u32("llama.vocab_size", 70), context_length=u32("llama.context_length", 64),
            embedding_length=u32("llama.embedding_length", 256), block_count=u32("llama.block_count", 1),
            feed_forward_length=u32("llama.feed_forward_length", 512), key=u32("llama.attention.key_length", 128),
            value=u32("llama.attention.value_length", 128),
            **{"attention.head_count": u32("llama.attention.head_count", 2),
               "attention.head_count_kv": u32("llama.attention.head_count_kv", 1)},
        )  # fmt: skip
        self.bytes = bytearray(raw_gguf(pairs, tensors, bytes(data)))
        self.begin = len(self.bytes) - len(data)

    def spoil(self, name: str, block: int, offset: int, half: int) -> bytes:
        """The file with another half in a block of a tensor; the last for -1."""
        kind = BLOCK_TYPES[self.kind]
        count = int(np.prod(CONFIG.tensor_shapes()[name])) // kind.elements
        at = self.begin + self.places[name] + block % count * kind.nbytes + offset
        spoilt = self.bytes.copy()
        spoilt[at : at + 2] = half.to_bytes(2, "little")
        return bytes(spoilt)


def started(path: Path, quantize: str = "auto") -> CpuBackend:
    return CpuBackend.from_checkpoint(checkpoint.open(path), quantize=quantize, threads=2)


def logits(backend: CpuBackend) -> np.ndarray:
    return backend.forward(Batch.of([Run([1, 5, 69, 0, 3], logits="all")]), None)


@each_type
def test_a_scale_that_is_no_number_is_refused_by_its_tensors_name(tmp_path: Path, kind: str) -> None:
    """Wherever it stands, and whatever the weights are to become."""
    model, path = Model(kind), tmp_path / "m.gguf"
    path.write_bytes(model.bytes)
    assert np.isfinite(logits(started(path))).all()
    names = ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"]
    cases = [(offset, half) for offset in halves(kind) for half in NOT_NUMBERS]
    for index, (offset, half) in enumerate(cases):
        name = names[index % len(names)]
        path.write_bytes(model.spoil(name, -index % 2 - 1 if index % 3 else 0, offset, half))
        for quantize in ("auto", *formats.names(engine="cpu")) if index % 4 == 0 else ("auto",):
            with pytest.raises(BadFile, match="not finite") as caught:
                started(path, quantize)
            assert str(path) in str(caught.value)
            assert name in (caught.value.field or "")


@each_type
@pytest.mark.parametrize("byte", [0x00, 0x80, 0xFF])
def test_any_codes_and_whole_scales_are_weights(tmp_path: Path, kind: str, byte: int) -> None:
    """All at an end of their range: negative scales, scales of 0, minima alone."""
    path = tmp_path / "m.gguf"
    path.write_bytes(Model(kind, byte).bytes)
    backend, tensors = started(path), checkpoint.open(path).tensors
    assert np.isfinite(logits(backend)).all()
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight"):
        assert np.isfinite(tensors[name].read()).all()


@each_type
def test_a_file_that_ends_within_a_block_is_refused(tmp_path: Path, kind: str) -> None:
    whole, path = bytes(Model(kind).bytes), tmp_path / "m.gguf"
    for cut in (1, 2, BLOCK_TYPES[kind].nbytes - 1, BLOCK_TYPES[kind].nbytes):
        path.write_bytes(whole[:-cut])
        with modestly(), pytest.raises(BadFile) as caught:
            checkpoint.open(path)
        assert "tensor" in (caught.value.field or "")
