"""What each tensor is packed as, and that nothing is made of a file's blocks that need not be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf_files import save_gguf
from tiny import in_memory, random_weights, tiny_config

from pronk import checkpoint as checkpoints
from pronk.checkpoint.tensors import Checkpoint
from pronk.config import ModelConfig
from pronk.cpu_engine.backend import CpuBackend
from pronk.cpu_engine.slots import Wish, slots
from pronk.errors import BadFile, BadRequest
from pronk.formats.quantize import quantize

CONFIG = tiny_config(hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64, num_key_value_heads=2)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
GATE, UP = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"


def stored_as(dtypes: dict[str, str], others: str, config: ModelConfig = CONFIG) -> Checkpoint:
    """Described, not stored: formats are chosen before anything is read."""
    plain = in_memory(config, random_weights(config))
    tensors = {name: replace(tensor, dtype=dtypes.get(name, others)) for name, tensor in plain.tensors.items()}
    return replace(plain, tensors=tensors)


def chosen(checkpoint: Checkpoint, quantize: Wish) -> dict[str, str]:
    return {name: slot.format.name for slot in slots(checkpoint, quantize) for name in slot.tensors}


@pytest.mark.parametrize(
    ("stored", "format"),
    [
        ("F32", "f32"), ("F16", "f16"), ("BF16", "bf16"), ("Q4_0", "q4_0"), ("Q4_1", "q4"), ("Q4_K", "q4_k"),
        ("TURNED_INT8", "int8"), ("INT8", "int8_plain"), ("LLM_INT8", "llm-int8"),
        ("Q8_0", "q8"), ("I8", "q8"), ("Q5_0", "q5_0"), ("Q5_1", "q5_1"), ("Q5_K", "q5_k"), ("Q6_K", "q6_k"),
        ("Q2_K", "q2_k"), ("Q3_K", "q3_k"), ("IQ4_NL", "iq4_nl"), ("IQ4_XS", "iq4_xs"),
    ],
)  # fmt: skip
def test_auto_keeps_what_the_file_has(stored: str, format: str) -> None:
    assert set(chosen(stored_as({}, stored), "auto").values()) == {format}


@pytest.mark.parametrize(
    ("gate", "up", "format"),
    [
        ("Q4_0", "Q4_1", "q4"), ("Q4_0", "Q8_0", "q8"), ("Q8_0", "BF16", "bf16"), ("F16", "BF16", "f32"),
        ("F16", "F32", "f32"), ("Q4_K", "Q6_K", "q8"), ("Q4_0", "Q4_0", "q4_0"),
        ("Q6_K", "Q6_K", "q6_k"), ("Q6_K", "BF16", "bf16"), ("Q2_K", "Q4_1", "q8"),
    ],
)  # fmt: skip
def test_gate_and_up_take_the_wider_of_their_formats(gate: str, up: str, format: str) -> None:
    for a, b in ((gate, up), (up, gate)):
        found = chosen(stored_as({GATE: a, UP: b}, "F32"), "auto")
        assert found[GATE] == found[UP] == format


@pytest.mark.parametrize("quantize", ["f32", "f16", "bf16", "q8"])
def test_a_format_asked_for_is_that_of_all_matrices(quantize: str) -> None:
    assert set(chosen(stored_as({HEAD: "Q6_K"}, "Q4_0"), quantize).values()) == {quantize}


def test_q4_spares_embeddings_and_keeps_blocks_of_four_bits() -> None:
    found = chosen(stored_as({GATE: "Q4_0", UP: "Q4_0", HEAD: "Q4_0"}, "BF16"), "q4")
    assert (found[EMBEDDING], found[HEAD], found[GATE], found[UP]) == ("q8", "q4_0", "q4_0", "q4_0")
    assert found["model.layers.1.mlp.gate_proj.weight"] == found["model.layers.0.self_attn.q_proj.weight"] == "q4"


def test_int8_refuses_rows_whose_sums_would_overflow() -> None:
    config = tiny_config(intermediate_size=(1 << 16) + 1, hidden_size=1, num_hidden_layers=1)
    with pytest.raises(BadRequest, match=r"down_proj.* 65537 weights.*q8"):
        chosen(in_memory(config, random_weights(config)), "int8")
    assert set(chosen(in_memory(config, random_weights(config)), "q8").values()) == {"q8"}


def test_a_mapping_gives_tensors_formats_of_their_own() -> None:
    """The longest beginning decides; what none covers stays as it is."""
    wishes = {
        "model.layers.0.": "int8",
        "model.layers.0.mlp.down": "bf16",
        "model.layers.1.self_attn.o_proj.weight": "q4",
    }
    found = chosen(stored_as({}, "F16"), wishes)
    assert found["model.layers.0.self_attn.q_proj.weight"] == found[GATE] == found[UP] == "int8"
    assert found["model.layers.0.mlp.down_proj.weight"] == "bf16"
    assert found["model.layers.1.self_attn.o_proj.weight"] == "q4"
    assert found["model.layers.1.self_attn.q_proj.weight"] == found[HEAD] == found[EMBEDDING] == "f16"
    assert set(chosen(stored_as({}, "F16"), {"": "q8"}).values()) == {"q8"}
    assert chosen(stored_as({}, "F16"), {"": "q8", "model.layers.": "auto"})[GATE] == "f16"
    assert chosen(stored_as({}, "F16"), {GATE: "q8", UP: "q4"})[GATE] == "q8"


@pytest.mark.parametrize("format", ["q4", "int8", "llm-int8"])
def test_a_mapping_spares_embeddings_unless_it_names_them(format: str) -> None:
    assert chosen(stored_as({}, "F16"), {"": format}) == chosen(stored_as({}, "F16"), format)
    found = chosen(stored_as({}, "F16"), {"model.": format, "lm_head": format})
    assert (found[EMBEDDING], found[HEAD], found[GATE]) == ("q8", format, format)


@pytest.mark.parametrize(
    ("wishes", "problem"),
    [
        ("q5", "one of auto, .*, not 'q5'$"),
        (None, "one of auto, .*, not None$"),
        ({"": "q8", "model.layers.0.": "int4"}, r"not 'int4' \(for 'model.layers.0.'\)$"),
        ({"model.layer.0": "q8"}, r"begins with 'model.layer.0'; the first is model.embed_tokens.weight$"),
        ({"model.layers.2.": "q8"}, r"begins with 'model.layers.2.'"),
        ({"model.norm.weight": "q8"}, r"begins with 'model.norm.weight'"),
        ({0: "q8"}, "begins with 0"),
        ({"": ["q8"]}, "not .'q8'.$"),
    ],
)
def test_a_format_or_a_beginning_that_is_not_there_is_refused(wishes: object, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        chosen(stored_as({}, "F16"), wishes)


def test_mixed_formats_are_packed_so() -> None:
    """Layer 0 in q8 and all others in f16."""
    checkpoint = in_memory(CONFIG, random_weights(CONFIG))
    engine = CpuBackend.from_checkpoint(checkpoint, quantize={"": "f16", "model.layers.0.": "q8"})
    assert engine.dtype == "f16"
    numbers = {name: t.read() for name, t in engine.dequantized(checkpoint).tensors.items()}
    weight = random_weights(CONFIG)[GATE]
    assert np.array_equal(numbers[GATE], quantize(weight, "q8").dequantize())
    later = "model.layers.1.mlp.gate_proj.weight"
    assert np.array_equal(numbers[later], random_weights(CONFIG)[later].astype(np.float16))


@pytest.mark.parametrize(("stored", "format"), [("Q8_0", "q8"), ("Q4_0", "q4"), ("Q4_1", "q4")])
def test_blocks_are_packed_as_they_are(tmp_path: Path, stored: str, format: str) -> None:
    """Bit for bit, through files, half-split rows included, and without a float32 tensor in between."""
    path = save_gguf(
        tmp_path / "model.gguf", CONFIG, random_weights(CONFIG),
        dtype=lambda name, array: stored if array.ndim == 2 else "F32",
    )  # fmt: skip
    opened = checkpoints.open(path)

    def never() -> np.ndarray:
        raise AssertionError("decoded")

    blocks_only = {n: replace(t, read=never) if len(t.shape) == 2 else t for n, t in opened.tensors.items()}
    engine = CpuBackend.from_checkpoint(replace(opened, tensors=blocks_only), threads=2)
    assert engine.dtype == format
    unpacked = engine.dequantized(opened)
    for name, tensor in opened.tensors.items():
        assert np.array_equal(unpacked.tensors[name].read(), tensor.read()), name


def test_blocks_no_format_holds_are_decoded_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pronk.cpu_engine import weights

    path = save_gguf(
        tmp_path / "model.gguf", CONFIG, random_weights(CONFIG),
        dtype=lambda name, array: "Q5_1" if array.ndim == 2 else "F32",
    )  # fmt: skip
    opened = checkpoints.open(path)
    whole = CpuBackend.from_checkpoint(opened).dequantized(opened)
    monkeypatch.setattr(weights, "_PIECE", 1000)
    in_parts = CpuBackend.from_checkpoint(opened).dequantized(opened)
    for name, tensor in whole.tensors.items():
        assert np.array_equal(in_parts.tensors[name].read(), tensor.read()), name


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    path = save_gguf(
        tmp_path / "model.gguf", CONFIG, random_weights(CONFIG),
        dtype=lambda name, array: "Q8_0" if array.ndim == 2 else "F32",
    )  # fmt: skip
    opened = checkpoints.open(path)
    tensor = opened.tensors[UP]
    assert tensor.read_blocks is not None
    blocks = tensor.read_blocks().copy()
    blocks[-1, -34:-32] = np.array([np.inf], np.float16).view(np.uint8)
    spoiled = {**opened.tensors, UP: replace(tensor, read_blocks=lambda: blocks)}
    with pytest.raises(BadFile, match=r"layers.0.mlp.up_proj.*not finite"):
        CpuBackend.from_checkpoint(replace(opened, tensors=spoiled))


def test_progress_tells_of_every_tensor() -> None:
    told: list[tuple[str, int, int]] = []
    plain = in_memory(CONFIG, random_weights(CONFIG))
    CpuBackend.from_checkpoint(plain, progress=lambda *what: told.append(what))
    assert [name for name, _, _ in told] == list(plain.tensors)
    assert told[-1][1] == told[-1][2] == sum(t.nbytes for t in plain.tensors.values())
