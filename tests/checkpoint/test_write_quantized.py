"""Saved in 8 and 4 bits: what is loaded is to the bit what quantizing in memory gives, and others read it as it is."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf as oracle
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from compressed_tensors.transform import TransformScheme
from gguf_files import gguf_name, interleaved, save_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import CONFIGS, in_memory, random_weights, tiny_config

import pronk.checkpoint as checkpoints
from pronk.checkpoint import tensor_stream
from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.tensors import Checkpoint
from pronk.checkpoint.writers import gguf as write_gguf
from pronk.checkpoint.writers import int8 as write_int8
from pronk.checkpoint.writers.write import save
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest, PronkError
from pronk.formats.quantize import quantize

CONTAINERS: dict[str, Any] = {"int8": "safetensors", "llm-int8": "safetensors", "q8": "gguf", "q4": "gguf"}
IDS = [1, 5, 9, 30, 40, 7, 3, 88, 61, 12]
GATE, UP = (f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up"))


def saved(source: Checkpoint, path: Path, dtype: Any, **more: Any) -> Checkpoint:
    to = "gguf" if isinstance(dtype, dict) else CONTAINERS[dtype]
    return checkpoints.open(save(source, path, to=to, dtype=dtype, finite=True, **more))


def in_layer(name: str, array: np.ndarray) -> bool:
    return array.ndim == 2 and name.startswith("model.layers.")


def backend(source: Checkpoint, quantize: Any, **rule: Any) -> CpuBackend:
    return CpuBackend.from_checkpoint(source, quantize=quantize, threads=1, kv_dtype="f32", **rule)


def logits(source: Checkpoint, quantize: Any, **rule: Any) -> np.ndarray:
    ids = [token % source.config.vocab_size for token in IDS]
    return backend(source, quantize, **rule).forward(Batch.of([Run(ids, logits="all")]), None)


def types(checkpoint: Checkpoint) -> dict[str, str]:
    return {name: tensor.dtype for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2}


# --- Pieces side by side


@pytest.mark.parametrize("dtype", ["q8", "q4"])
def test_pieces_that_are_encoded_side_by_side_stand_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    save(source, whole := tmp_path / "m.gguf", to="gguf", dtype=dtype)
    monkeypatch.setattr(tensor_stream, "_PIECE", 96)
    for count in (1, 7):
        monkeypatch.setattr(write_gguf, "processors", lambda count=count: count)
        save(source, cut := tmp_path / f"m{count}.gguf", to="gguf", dtype=dtype)
        assert cut.read_bytes() == whole.read_bytes()


# --- Round trips


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["gqa", "tied", "biases", "odd"])
@pytest.mark.parametrize("format", CONTAINERS)
def test_saved_and_loaded_is_quantized_in_memory(tmp_path: Path, format: str, name: str, dtype: Any) -> None:
    """Weights of the layers to the bit; and logits too, where the rest is asked for as it would be in memory."""
    config = tiny_config(**CONFIGS[name])
    source = in_memory(config, {n: a.astype(dtype) for n, a in random_weights(config).items()})
    found = saved(source, tmp_path / "m.gguf", format)
    packed = backend(source, "llm-int8" if "int8" in format else format).dequantized(source)
    filled = config.hidden_size % 32 == 0 or "int8" in format  # rows of blocks
    for n, tensor in found.tensors.items():
        if in_layer(n, tensor.read()) and filled:
            assert np.array_equal(tensor.read(), packed.tensors[n].read()), n
        elif "int8" in format or tensor.dtype == "F32":
            assert np.array_equal(tensor.read(), source.tensors[n].read()), n
    if format == "int8":  # rows are not turned in files
        assert np.array_equal(
            logits(found, format), logits(source, "llm-int8", int8_threshold=math.inf, int8_outliers=0)
        )
    elif filled:
        assert np.array_equal(logits(found, format), logits(source, format))
    if CONTAINERS[format] == "gguf":
        assert np.array_equal(logits(found, "auto"), logits(found, format if filled else "auto"))


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_from_blocks_as_well(tmp_path: Path, format: str) -> None:
    config = tiny_config()
    for kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0"):
        path = save_gguf(
            tmp_path / f"{kind}.gguf",
            config,
            random_weights(config),
            dtype=lambda n, a, k=kind: k if a.ndim == 2 else "F32",
        )
        source = checkpoints.open(path)
        found = saved(source, tmp_path / f"{kind}-{format}.gguf", format)
        assert np.array_equal(logits(found, "auto"), logits(source, format)), kind


@pytest.mark.parametrize("format", ["int8", "llm-int8"])
def test_int8_from_blocks(tmp_path: Path, format: str) -> None:
    config = tiny_config()
    path = save_gguf(
        tmp_path / "m.gguf", config, random_weights(config), dtype=lambda n, a: "Q8_0" if a.ndim == 2 else "F32"
    )
    source = checkpoints.open(path)
    found = saved(source, tmp_path / "m", format)
    packed = backend(source, "llm-int8").dequantized(source)
    for n, tensor in found.tensors.items():
        if tensor.dtype == "F16":  # embeddings and head, which Q8_0 had rounded by up to 1/254 of a group's largest
            stored = source.tensors[n].read()
            assert n in ("model.embed_tokens.weight", "lm_head.weight")
            assert np.array_equal(tensor.read(), stored.astype(np.float16))
            assert np.abs(tensor.read() - stored).max() <= np.abs(stored).max() * 2.0**-11
        elif len(tensor.shape) == 2:
            assert np.array_equal(tensor.read(), packed.tensors[n].read()), n
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == "float16"


@pytest.mark.parametrize("first", ["int8", "llm-int8"])
@pytest.mark.parametrize("second", CONTAINERS)
def test_saved_again_from_int8(tmp_path: Path, first: str, second: str) -> None:
    config = tiny_config()
    once = saved(in_memory(config, random_weights(config)), tmp_path / "once", first)
    twice = saved(once, tmp_path / "twice.gguf", second)
    for n, tensor in once.tensors.items():
        if not in_layer(n, tensor.read()):
            continue
        expected = tensor.read() if "int8" in second else quantize(tensor.read(), second).dequantize()
        assert np.array_equal(twice.tensors[n].read(), expected), n


@pytest.mark.parametrize("name", ["gqa", "odd"])
def test_codes_of_turned_rows_stay_so(tmp_path: Path, name: str) -> None:
    """Their folder's transform_config says what is turned; loaded they are what int8 in memory is, to the bit."""
    config = tiny_config(**CONFIGS[name])
    plain = in_memory(config, random_weights(config))
    tensors = dict(plain.tensors)
    for key, tensor in plain.tensors.items():
        if in_layer(key, tensor.read()):
            codes = quantize(tensor.read(), "int8")
            blocks = int8_rows.join(codes.scale.astype(np.float32), codes.q.view(np.int8))
            tensors[key] = replace(
                tensor, dtype="TURNED_INT8", read=codes.dequantize, read_blocks=lambda blocks=blocks: blocks
            )
    found = saved(replace(plain, tensors=tensors), tmp_path / "m", "int8")
    for key, tensor in tensors.items():
        assert np.array_equal(found.tensors[key].read(), tensor.read()), key
        odd = tensor.shape[-1] % 2
        assert found.tensors[key].dtype == ("INT8" if odd and tensor.dtype != "F32" else tensor.dtype)
    assert np.array_equal(logits(found, "int8"), logits(plain, "int8"))
    path = tmp_path / "m" / "config.json"
    config_json = json.loads(path.read_text())
    group = next(iter(config_json["quantization_config"]["transform_config"]["config_groups"].values()))
    assert TransformScheme(**group).head_dim == group["head_dim"] == 64 if name == "gqa" else 8
    for change, message in (
        ({"head_dim": 4}, "in blocks of 4, which is not supported; of rows of"),
        ({"type": "random-hadamard"}, "type='random-hadamard' is not supported"),
        ({"randomize": True}, "randomize=True is not supported"),
        ({"apply": group["apply"][:1]}, "must turn the 'input' and the 'weight_input' of the same modules"),
        (
            {"apply": [{**part, "targets": ["re:.*down_proj"]} for part in group["apply"]]},
            "only modules by their names",
        ),
        ({"apply": [{**part, "targets": ["model.layers.9.x"]} for part in group["apply"]]}, "which is no int8 matrix"),
    ):
        changed = json.loads(json.dumps(config_json))
        changed["quantization_config"]["transform_config"]["config_groups"] = {"a": {**group, **change}}
        path.write_text(json.dumps(changed))
        with pytest.raises(PronkError, match=message):
            checkpoints.open(tmp_path / "m")


# --- What others find


def test_blocks_are_the_oracles(tmp_path: Path) -> None:
    """Types as named, and the `gguf` package decodes them to quantize.py's numbers, to the bit."""
    config = tiny_config()
    weights = random_weights(config)
    for format, block in (("q8", "Q8_0"), ("q4", "Q4_1")):
        path = tmp_path / f"{format}.gguf"
        save(in_memory(config, weights), path, to="gguf", dtype=format)  # type: ignore[arg-type]
        reader = oracle.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert reader.fields["general.file_type"].contents() == {"q8": 7, "q4": 3}[format]
        for name, array in weights.items():
            tensor = tensors[gguf_name(name)]
            spared = name in ("model.embed_tokens.weight", "lm_head.weight")
            kind = "F32" if array.ndim == 1 else "Q8_0" if spared else block
            assert tensor.tensor_type.name == kind
            decoded = oracle.quants.dequantize(tensor.data, tensor.tensor_type)
            expected = array
            if kind != "F32":
                expected = quantize(array, "q8" if kind == "Q8_0" else "q4").dequantize()
            assert np.array_equal(decoded.reshape(array.shape), interleaved(name, expected, config)), name


@pytest.mark.parametrize("name", ["gqa", "odd"])
@pytest.mark.parametrize("format", ["int8", "llm-int8"])
def test_the_safetensors_package_reads_what_is_written(tmp_path: Path, format: Any, name: str) -> None:
    """In shards, too, each with a tensor's parts together; rows of odd lengths keep nothing from being aligned."""
    config = tiny_config(**CONFIGS[name])
    weights = random_weights(config)
    save(in_memory(config, weights), tmp_path / "m", to="safetensors", dtype=format, max_shard_bytes=20_000)
    shards = sorted((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) > 2
    stored, index = {}, json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    for shard in shards:
        part = safetensors.numpy.load_file(shard)
        assert all(index["weight_map"][key] == shard.name for key in part)
        stored |= part
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in stored.values())
    for key, array in weights.items():
        if not in_layer(key, array):
            assert np.array_equal(stored.pop(key), array)
            continue
        module, quantized = key.removesuffix(".weight"), quantize(array, "llm-int8")
        assert stored[key].dtype == np.int8
        assert np.array_equal(stored.pop(key), quantized.q)
        if format == "int8":
            assert np.array_equal(stored.pop(f"{module}.weight_scale"), quantized.scale[:, None])
        else:
            largest = stored.pop(f"{module}.SCB")
            assert np.array_equal(largest / np.float32(127), quantized.scale)
            assert (np.abs(largest - np.abs(array).max(axis=1)) <= np.spacing(largest)).all()
            assert stored.pop(f"{module}.weight_format") == 0
    assert not stored


def test_nothing_else_of_a_model_changes(tmp_path: Path) -> None:
    config = tiny_config(**CONFIGS["llama3"], tie_word_embeddings=True)
    found = saved(in_memory(config, random_weights(config)), tmp_path / "m", "int8")
    assert found.config == config
    raw = json.loads((tmp_path / "m" / "config.json").read_text())
    assert raw["quantization_config"]["ignore"] == ["lm_head"]


@given(st.lists(st.floats(0, 2.0**120, width=32), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None, database=None, derandomize=True)
def test_the_largest_magnitude_comes_back_from_its_scale(values: list[float]) -> None:
    largest = np.array(values, np.float32)
    scale = largest / np.float32(127)
    again = write_int8.companions("x.weight", "LLM_INT8", scale)["x.SCB"]
    assert np.array_equal(again / np.float32(127), scale)


def test_a_scale_that_no_magnitude_gives_is_off_by_its_last_place() -> None:
    scale = np.random.default_rng(0).lognormal(-5, 2, 100_000).astype(np.float32)
    again = write_int8.companions("x.weight", "LLM_INT8", scale)["x.SCB"] / np.float32(127)
    assert 0.99 < (again == scale).mean() < 1  # 127 of 128
    assert (np.abs(again - scale) <= np.spacing(scale)).all()


# --- Thresholds


@pytest.mark.parametrize(("given", "stored"), [(None, 6.0), (4.5, 4.5), (math.inf, 0.0)])
def test_the_threshold_goes_along(tmp_path: Path, given: float | None, stored: float) -> None:
    config = tiny_config()
    found = saved(in_memory(config, random_weights(config)), tmp_path / "m", "llm-int8", int8_threshold=given)
    raw = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    assert raw["llm_int8_threshold"] == stored
    assert found.int8_threshold == (given or 6.0)
    again = saved(found, tmp_path / "again", "llm-int8")
    assert again.int8_threshold == found.int8_threshold
    assert saved(found, tmp_path / "int8", "int8").int8_threshold is None


@pytest.mark.parametrize(
    ("dtype", "threshold", "message"),
    [("llm-int8", 0.0, "bitsandbytes 0 means none"), ("int8", 6.0, "llm-int8's"), ("q8", 6.0, "llm-int8's")],
)
def test_a_threshold_that_cannot_be_saved(tmp_path: Path, dtype: str, threshold: float, message: str) -> None:
    config = tiny_config()
    with pytest.raises(BadRequest, match=message):
        saved(in_memory(config, random_weights(config)), tmp_path / "m", dtype, int8_threshold=threshold)
    assert not list(tmp_path.iterdir())


# --- Types of their own


def test_the_longest_beginning_decides(tmp_path: Path) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    layer = "model.layers.1."
    found = types(
        saved(source, tmp_path / "m.gguf", {"": "q4", layer: "q8", f"{layer}self_attn.q": "bf16", "lm_head": "q4"})
    )
    assert found.pop(f"{layer}self_attn.q_proj.weight") == "BF16"
    assert found.pop("lm_head.weight") == "Q4_1"
    assert found.pop("model.embed_tokens.weight") == "Q8_0"  # four bits only where it is named
    assert {kind for name, kind in found.items() if name.startswith(layer)} == {"Q8_0"}
    assert {kind for name, kind in found.items() if not name.startswith(layer)} == {"Q4_1"}


def test_what_is_left_out_stays_as_it_is(tmp_path: Path) -> None:
    config = tiny_config()
    kinds = {"q_proj": "Q4_0", "k_proj": "Q5_1", "v_proj": "F16"}
    path = save_gguf(
        tmp_path / "a.gguf", config, random_weights(config),
        dtype=lambda n, a: next((kind for part, kind in kinds.items() if part in n), "F32"),
    )  # fmt: skip
    source = checkpoints.open(path)
    found = saved(source, tmp_path / "b.gguf", {"model.layers.0.mlp.": "q8"})
    for name, tensor in source.tensors.items():
        if ".0.mlp." in name:
            assert found.tensors[name].dtype == "Q8_0"
        else:
            assert found.tensors[name].dtype == tensor.dtype
            assert np.array_equal(found.tensors[name].read(), tensor.read())


@pytest.mark.parametrize(("gate", "up", "both"), [("q4", "q8", "Q8_0"), ("bf16", "q4", "BF16"), ("f16", "bf16", "F32")])
def test_gate_and_up_are_one_matrix_and_get_the_wider(tmp_path: Path, gate: str, up: str, both: str) -> None:
    config = tiny_config()
    source = in_memory(config, random_weights(config))
    wishes = {"": "q8", GATE: gate, UP: up}
    found = saved(source, tmp_path / "m.gguf", wishes)
    assert (types(found)[GATE], types(found)[UP]) == (both, both)
    assert np.array_equal(logits(found, "auto"), logits(source, wishes))


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"": "int8"}, "a GGUF file is not written in 'int8'; choose from f32, f16"),
        ({"": "q4", "model.layers.9.": "q8"}, "no weight matrix's name begins with 'model.layers.9.'"),
    ],
)
def test_wishes_that_cannot_be(tmp_path: Path, wishes: dict[str, str], message: str) -> None:
    config = tiny_config()
    with pytest.raises(BadRequest) as caught:
        saved(in_memory(config, random_weights(config)), tmp_path / "m.gguf", wishes)
    assert message in str(caught.value)
    with pytest.raises(BadRequest, match="one type for all"):
        save(in_memory(config, {}), tmp_path / "m", to="safetensors", dtype={"": "f32"})
    assert not list(tmp_path.iterdir())


# --- What cannot be quantized


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", [UP, "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("format", CONTAINERS)
def test_a_number_that_is_not_finite_is_refused_by_name(tmp_path: Path, format: str, name: str, value: float) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights[name].reshape(-1)[33] = value
    with pytest.raises(PronkError, match=f"'{name}'.* infinity or NaN"):
        saved(in_memory(config, weights), tmp_path / "m.gguf", format)
    assert not list(tmp_path.iterdir())


def test_a_scale_of_the_source_that_is_not_finite(tmp_path: Path) -> None:
    """Blocks that are copied are looked at all the same."""
    config = tiny_config()
    path = save_gguf(
        tmp_path / "m.gguf", config, random_weights(config), dtype=lambda n, a: "Q8_0" if n == UP else "F32"
    )
    reader = oracle.GGUFReader(path, "r+")
    tensor = next(tensor for tensor in reader.tensors if tensor.name == gguf_name(UP))
    tensor.data[5, :2] = np.array([np.nan], np.float16).view(np.uint8)
    del reader, tensor
    with pytest.raises(BadFile, match=f"'{UP}': holds infinity or NaN"):
        saved(checkpoints.open(path), tmp_path / "again.gguf", "q8")


@pytest.mark.parametrize("format", ["q8", "q4"])
def test_weights_too_large_for_a_scale(tmp_path: Path, format: str) -> None:
    config = tiny_config()
    weights = random_weights(config)
    weights[UP] *= 1e9
    with pytest.raises(PronkError, match=f"'{UP}': .*too large for scales in float16; use bf16 or f32"):
        saved(in_memory(config, weights), tmp_path / "m.gguf", format)
    assert not list(tmp_path.iterdir())
