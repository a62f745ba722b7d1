"""Grids: found wherever there is one, by type and by looking, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tiny import in_memory, random_weights, tiny_config

from pronk import checkpoint
from pronk.checkpoint import grid, rotation
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.tensors import Checkpoint
from pronk.formats.quantize import quantize

WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
PLAIN = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
BITS = {"Q2_K": 2, "Q3_K": 3, "Q4_0": 4, "Q4_1": 4, "Q4_K": 4, "Q5_0": 5, "Q5_1": 5, "Q5_K": 5, "Q6_K": 6, "Q8_0": 8}


def normal(rows: int, columns: int, seed: int = 0, scale: float = 0.02) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, scale, (rows, columns)).astype(np.float32)


def on_grid(dtype: str, shape: tuple[int, ...], seed: int) -> NDArray[np.float32]:
    """Weights as a file in a block type gives them: quantized by `gguf`, or codes at random where it has no encoder."""
    try:
        blocks = quants.quantize(normal(*shape, seed), GGMLQuantizationType[dtype])
    except NotImplementedError:
        kind = gguf_blocks.BLOCK_TYPES[dtype]
        draw = np.random.default_rng(seed)
        blocks = draw.integers(0, 256, (shape[0], shape[1] // kind.elements, kind.nbytes), dtype=np.uint8)
        for offset, width in kind.words:
            blocks[..., offset : offset + width] = np.float16(draw.uniform(1e-4, 3e-4)).reshape(1).view(np.uint8)
        blocks = blocks.reshape(shape[0], -1)
    return gguf_blocks.decode(dtype, blocks)


def model(make: Any = None, dtype: Any = np.float32, **changes: Any) -> Checkpoint:
    """A model whose matrices `make(shape, seed)` gives."""
    config = tiny_config(**WIDE, **changes)
    weights: dict[str, NDArray[Any]] = dict(random_weights(config))
    for seed, (name, shape) in enumerate(config.tensor_shapes().items()):
        if len(shape) == 2 and make:
            weights[name] = make(shape, seed).astype(dtype)
    return in_memory(config, weights)


@pytest.mark.parametrize("plain", PLAIN)
@pytest.mark.parametrize("dtype", BITS)
def test_weights_that_were_codes_are_found_in_any_plain_type(dtype: str, plain: str) -> None:
    found = grid.find(model(lambda shape, seed: on_grid(dtype, shape, seed), PLAIN[plain]))
    assert found
    assert (found.bits, found.share, found.stored) == (BITS[dtype], 1.0, ())
    # bf16 rounds as coarsely as Q8_0: the levels are not to be seen, but what q8 makes of it is.
    assert found.exact == ((dtype, plain) != ("Q8_0", "bf16"))


@pytest.mark.parametrize("format", ["q4", "q8", "int8", "llm-int8"])
def test_the_formats_that_have_the_same_grid(format: Any) -> None:
    found = grid.find(model(lambda shape, seed: quantize(normal(*shape, seed), format).dequantize()))
    assert found
    assert found.exact == (format != "int8")  # whose levels are those of turned rows
    assert found.formats == (format,)


@pytest.mark.parametrize("dtype", ["Q4_0", "Q4_1", "Q4_K"])
def test_q4_has_the_grid_of_each_type_of_4_bits(dtype: str) -> None:
    found = grid.find(model(lambda shape, seed: on_grid(dtype, shape, seed)))
    assert found
    assert found.formats == ("q4",)


def test_a_coarser_grid_of_a_part_does_not_hide_what_has_the_rest() -> None:
    """A q3_k file of rows that fill no K blocks is in 4 bits by four fifths; q4 looked free of cost, unsaid."""

    def make(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
        return on_grid("Q4_1" if seed % 4 else "Q3_K", shape, seed)

    found = grid.find(model(make))
    assert found
    assert (found.bits, found.formats) == (3, ("q4",))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(sorted(PLAIN)),
    st.sampled_from([1e-4, 0.003, 0.02, 1.0, 30.0]),
    st.sampled_from(["normal", "uniform", "standard_t", "laplace"]),
    st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99, 1.0]),
)
def test_weights_without_one_are_never_called_a_grid(
    seed: int, plain: str, scale: float, shape: str, pruned: float
) -> None:
    """Of whichever distribution, size and type, and pruned to whichever share of zeros."""

    def make(size: tuple[int, ...], number: int) -> NDArray[np.float64]:
        draw = np.random.default_rng([seed, number])
        values = draw.standard_t(3, size) if shape == "standard_t" else getattr(draw, shape)(size=size)
        return np.where(draw.random(size) < pruned, 0.0, values * scale)

    assert grid.find(model(make, PLAIN[plain])) is None


def test_bf16_that_is_stored_in_f32_is_no_grid() -> None:
    assert grid.find(model(lambda shape, seed: normal(*shape, seed).astype(ml_dtypes.bfloat16))) is None


@pytest.mark.parametrize("size", [0.3, 3.0])
def test_an_adapter_leaves_no_levels(size: float) -> None:
    """A change much smaller than a step's rounding leaves weights near their grid, where 4 bits are flattered still."""

    def merged(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
        base, draw = quantize(normal(*shape, seed), "q4"), np.random.default_rng(seed)
        step = float(base.scale.astype(np.float32).mean())
        change = draw.normal(size=(shape[0], 4)) @ draw.normal(size=(4, shape[1]))
        return (base.dequantize() + change * (size * step / np.sqrt(12) / change.std())).astype(np.float32)

    found = grid.find(model(merged))
    if size > 1:
        assert found is None
    else:
        assert found
        assert not found.exact
        assert (found.bits, found.formats) == (4, ("q4",))
        assert str(found) == "weights lie near a grid of 4 bits (multiplied out)"


def test_a_rotated_twin_has_no_grid() -> None:
    gridded = model(lambda shape, seed: on_grid("Q4_0", shape, seed), tie_word_embeddings=True)
    assert grid.find(gridded)
    assert grid.find(rotation.rotated(gridded, 0)) is None


@pytest.mark.parametrize(("vocabulary", "share"), [(96, None), (1024, 0.4)])
def test_a_part_of_the_weights_is_said_with_its_share(vocabulary: int, share: float | None) -> None:
    """Embedding and head on a grid: a sixteenth of the weights decides nothing, two fifths do."""

    def make(shape: tuple[int, int], seed: int) -> NDArray[np.float32]:
        return on_grid("Q8_0", shape, seed) if shape[0] == vocabulary else normal(*shape, seed)

    found = grid.find(model(make, vocab_size=vocabulary))
    if share is None:
        assert found is None
    else:
        assert found
        assert found.share == pytest.approx(share)
        assert str(found) == "40% of the weights lie on a grid of 8 bits (multiplied out)"


def test_infinity_is_no_grid_and_no_error() -> None:
    assert grid.find(model(lambda shape, seed: np.full(shape, np.inf))) is None
    assert grid.find(model(lambda shape, seed: normal(*shape, seed) * 1e30)) is None


def test_the_default_model(smollm2: Path) -> None:
    found = grid.find(checkpoint.open(smollm2))
    assert found
    assert str(found) == "79% of the weights lie on a grid of 4 bits (stored as Q4_1)"
    assert (found.bits, found.formats, found.exact) == (4, ("q4",), True)


def test_no_more_is_read_than_a_few_rows_of_a_few_layers() -> None:
    many = model(None, num_hidden_layers=40)
    read: list[str] = []

    def counted(name: str) -> Any:
        return lambda: read.append(name) or many.tensors[name].read()

    tensors = {name: replace(tensor, read=counted(name)) for name, tensor in many.tensors.items()}
    assert grid.find(replace(many, tensors=tensors)) is None
    assert len(read) == 8 * 7 + 2
    assert len({name.split(".")[2] for name in read if "layers" in name}) == 8


def test_stories260k_was_never_quantized_and_its_int8_file_was(data: Path) -> None:
    assert grid.find(checkpoint.open(data / "stories260K" / "stories260K.bin")) is None
    found = grid.find(checkpoint.open(data / "stories260K" / "stories260K_q80.bin"))
    assert found
    assert (found.bits, found.share, found.stored) == (8, 1.0, ("I8",))
