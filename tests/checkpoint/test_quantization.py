"""Folders that others quantized: what is read of them, and what is refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from formats import save_huggingface
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import random_weights, tiny_config

import pronk.checkpoint as checkpoints
from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.tensors import LazyTensor
from pronk.errors import BadFile, PronkError, Unsupported

GOLDENS = Path(__file__).parents[1] / "goldens"
CONFIG = tiny_config(num_hidden_layers=1)
WEIGHTS = random_weights(CONFIG)
UP = "model.layers.0.mlp.up_proj"

BITSANDBYTES: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 5.5}
ARGS = {"num_bits": 8, "type": "int", "symmetric": True}
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**ARGS, "strategy": "channel", "dynamic": False, "observer": "minmax", "group_size": None},
            "input_activations": {**ARGS, "strategy": "token", "dynamic": True},
        }
    },
}
BOTH = {"bitsandbytes": BITSANDBYTES, "compressed-tensors": COMPRESSED}

Tensors = dict[str, np.ndarray]


def quantized(method: str) -> tuple[Tensors, Tensors]:
    """The tiny model as the method stores it, and its weights as they are meant; in plain numpy."""
    stored, meant = dict(WEIGHTS), dict(WEIGHTS)
    for name, w in WEIGHTS.items():
        if w.ndim == 2 and "layers" in name:
            module = name.removesuffix(".weight")
            largest = np.abs(w).max(axis=1)
            scale = largest / np.float32(127)
            codes = np.rint(w / scale[:, None]).astype(np.int8)
            stored[name] = codes
            if method == "bitsandbytes":
                stored[f"{module}.SCB"], stored[f"{module}.weight_format"] = largest, np.zeros((), np.uint8)
            else:
                stored[f"{module}.weight_scale"] = scale[:, None]
            meant[name] = codes * scale[:, None]
    return stored, meant


def save(folder: Path, tensors: Tensors, quantization: object) -> Path:
    folder.mkdir(exist_ok=True)
    raw = CONFIG.to_dict() | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(raw))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("method", BOTH)
def test_every_weight_is_scale_times_code(tmp_path: Path, method: str) -> None:
    stored, meant = quantized(method)
    found = checkpoints.open(save(tmp_path, stored, BOTH[method]))
    assert found.config == CONFIG
    assert found.tensors.keys() == WEIGHTS.keys()
    dtype = {"bitsandbytes": "LLM_INT8", "compressed-tensors": "INT8"}[method]
    for name, tensor in found.tensors.items():
        assert tensor.shape == meant[name].shape
        assert np.array_equal(tensor.read(), meant[name]), name
        if tensor.dtype == "F32":
            continue
        assert (tensor.dtype, tensor.read().dtype) == (dtype, np.float32)
        assert tensor.read_blocks is not None
        blocks = tensor.read_blocks()
        assert (blocks.shape, blocks.dtype) == ((tensor.shape[0], 4 + tensor.shape[1]), np.uint8)
        scale = blocks[:, :4].copy().view("<f4")
        assert np.array_equal(scale * blocks[:, 4:].view(np.int8), meant[name])
        module = name.removesuffix(".weight")
        assert tensor.nbytes == sum(array.nbytes for key, array in stored.items() if key.startswith(module + "."))
    if method == "bitsandbytes":
        assert found.quantization == "LLM_INT8 x 7 (bitsandbytes, threshold 5.5)"
        assert found.int8_threshold == 5.5
    else:
        assert found.quantization == "INT8 x 7 (compressed-tensors)"
        assert found.int8_threshold is None


@pytest.mark.parametrize("container", ["safetensors", "bin"])
@pytest.mark.parametrize("method", BOTH)
def test_in_either_container_and_scales_in_other_shards(tmp_path: Path, method: str, container: Any) -> None:
    stored, meant = quantized(method)
    save_huggingface(tmp_path, CONFIG, stored, shards=3, container=container)
    raw = CONFIG.to_dict() | {"quantization_config": BOTH[method]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = checkpoints.open(tmp_path)
    assert len(found.files) == 3
    assert all(np.array_equal(tensor.read(), meant[name]) for name, tensor in found.tensors.items())


def test_what_bitsandbytes_and_transformers_wrote() -> None:
    """Made by tests/goldens/bitsandbytes/make.py; the weights are those that bitsandbytes' own function gives back."""
    found = checkpoints.open(GOLDENS / "bitsandbytes")
    theirs = safetensors.numpy.load_file(GOLDENS / "bitsandbytes" / "dequantized" / "weights.safetensors")
    assert found.quantization == "LLM_INT8 x 7 (bitsandbytes, threshold 5)"
    assert len(theirs) == 7
    for name, array in theirs.items():
        # It multiplies by SCB and then by 1/127, where this divides SCB by 127: three roundings against two.
        assert np.allclose(found.tensors[name].read(), array, rtol=5 * 2.0**-24, atol=0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("columns", [(), (1,)])
def test_scales_in_any_type_and_either_shape(tmp_path: Path, dtype: Any, columns: tuple[int, ...]) -> None:
    stored, _ = quantized("compressed-tensors")
    for name in [key for key in stored if key.endswith("weight_scale")]:
        stored[name] = stored[name].reshape(-1, *columns).astype(dtype)
    found = checkpoints.open(save(tmp_path, stored, COMPRESSED))
    scale = stored[f"{UP}.weight_scale"].astype(np.float32).reshape(-1, 1)
    assert np.array_equal(found.tensors[f"{UP}.weight"].read(), scale * stored[f"{UP}.weight"])


def test_the_code_of_minus_128(tmp_path: Path) -> None:
    """compressed-tensors rounds to -128 as well."""
    stored, _ = quantized("compressed-tensors")
    stored[f"{UP}.weight"][3, 5] = -128
    found = checkpoints.open(save(tmp_path, stored, COMPRESSED)).tensors[f"{UP}.weight"].read()
    assert found[3, 5] == np.float32(-128) * stored[f"{UP}.weight_scale"][3, 0]


def test_a_quantized_head(tmp_path: Path) -> None:
    stored, _ = quantized("compressed-tensors")
    stored["lm_head.weight"] = np.ones((96, 64), np.int8)
    stored["lm_head.weight_scale"] = np.full((96, 1), 0.5, np.float32)
    found = checkpoints.open(save(tmp_path, stored, COMPRESSED | {"ignore": []}))
    assert (found.tensors["lm_head.weight"].read() == 0.5).all()


def test_what_is_said_and_does_not_matter(tmp_path: Path) -> None:
    stored, _ = quantized("compressed-tensors")
    history = {"version": "0.9", "global_compression_ratio": 1.3, "sparsity_config": {"format": "dense"}}
    more = {"kv_cache_scheme": None, "transform_config": {}, "run_compressed": True, "quantization_status": "frozen"}
    found = checkpoints.open(save(tmp_path, stored, COMPRESSED | history | more | {"ignore": ["re:(a+)+$", "lm_head"]}))
    assert found.quantization == "INT8 x 7 (compressed-tensors)"
    stored, _ = quantized("bitsandbytes")
    written = {"_load_in_8bit": True, "_load_in_4bit": False, "load_in_4bit": False, "bnb_4bit_quant_type": "fp4",
               "llm_int8_skip_modules": None, "llm_int8_has_fp16_weight": False}  # fmt: skip
    found = checkpoints.open(save(tmp_path, stored, BITSANDBYTES | written | {"llm_int8_threshold": 0.0}))
    assert found.int8_threshold == float("inf")  # 0 is bitsandbytes' way to say that nothing is computed apart
    assert found.quantization == "LLM_INT8 x 7 (bitsandbytes, no threshold)"


def test_a_preset_by_name(tmp_path: Path) -> None:
    stored, _ = quantized("compressed-tensors")
    found = checkpoints.open(save(tmp_path, stored, COMPRESSED | {"config_groups": {"W8A8": ["Linear"]}}))
    assert found.quantization == "INT8 x 7 (compressed-tensors)"


def group(**changes: Any) -> dict[str, Any]:
    """COMPRESSED with keys of its group changed; weights__x is key x of its weights."""
    raw = copy.deepcopy(COMPRESSED)
    for key, value in changes.items():
        *outer, last = key.split("__")
        target = raw["config_groups"]["group_0"]
        for part in outer:
            target = target[part]
        target[last] = value
    return raw


REFUSED: list[tuple[Any, str]] = [
    ({"quant_method": "gptq", "bits": 4}, "quantization_config ('gptq') is not supported; use the weights that"),
    ({"quant_method": "awq"}, "('awq')"),
    ({"bits": 4}, "(None)"),
    (BITSANDBYTES | {"load_in_8bit": False, "load_in_4bit": True}, "bitsandbytes in other than 8 bits (load_in_4bit"),
    (BITSANDBYTES | {"load_in_4bit": True}, "in other than 8 bits"),
    (BITSANDBYTES | {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight=True is not supported; delete"),
    (BITSANDBYTES | {"llm_int8_colour": "blue"}, "'llm_int8_colour'='blue' is not supported; it may change"),
    (COMPRESSED | {"format": "pack-quantized"}, "format='pack-quantized' is not supported; only 'int-quantized'"),
    (COMPRESSED | {"quantization_status": "initialized"}, "quantization_status='initialized'"),
    (
        COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "sparsity_config={'format': 'sparse-24-bitmask",
    ),
    (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8} is not supported; delete the"),
    (COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}}, "transform_config 'u' head_dim=None is not"),
    (COMPRESSED | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups 'W4A16' is not supported"),
    (group(weights__num_bits=4), "config_groups 'group_0' weights num_bits=4 is not supported; only 8 is"),
    (group(weights__num_bits=8.0), "num_bits=8.0"),
    (group(weights__type="float"), "weights type='float'"),
    (group(weights__symmetric=False), "weights symmetric=False"),
    (group(weights__strategy="group", weights__group_size=128), "weights strategy='group'"),
    (group(weights__strategy="tensor"), "weights strategy='tensor'"),
    (group(weights__strategy=None), "weights strategy='tensor'"),
    (group(weights__group_size=128), "weights group_size=128"),
    (group(weights__dynamic=True), "weights dynamic=True"),
    (group(weights__actorder="group"), "weights actorder='group'"),
    (group(weights__block_structure=[2, 2]), "weights 'block_structure'=[2, 2]"),
    (group(input_activations__dynamic=False), "input_activations dynamic=False is not supported; only True is"),
    (group(input_activations__strategy="tensor"), "input_activations strategy='tensor'"),
    (group(input_activations__symmetric=False), "input_activations symmetric=False"),
    (group(input_activations=None), "input_activations=None is not supported; pronk computes with int8"),
    (group(weights=None), "weights=None"),
    (group(output_activations={"num_bits": 8}), "'output_activations'={'num_bits': 8}"),
    (group(format="float-quantized"), "format='float-quantized'"),
]


@pytest.mark.parametrize(("quantization", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_other_quantizations_are_refused_by_name(tmp_path: Path, quantization: Any, message: str) -> None:
    method = quantization.get("quant_method")
    stored, _ = quantized(method if method in BOTH else "bitsandbytes")
    with pytest.raises(Unsupported) as caught:
        checkpoints.open(save(tmp_path, stored, quantization))
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/config.json: ")


BROKEN: list[tuple[Any, str]] = [
    ("int8", "quantization_config: must be an object, not 'int8'"),
    ([1], "quantization_config: must be an object"),
    (BITSANDBYTES | {"load_in_8bit": 1}, "quantization_config load_in_8bit: must be true or false, not 1"),
    (BITSANDBYTES | {"_load_in_8bit": False}, "load_in_8bit: contradicts _load_in_8bit"),
    (BITSANDBYTES | {"llm_int8_threshold": -1}, "llm_int8_threshold: must be a number, 0 or more, not -1"),
    (BITSANDBYTES | {"llm_int8_threshold": True}, "llm_int8_threshold"),
    (BITSANDBYTES | {"llm_int8_threshold": "6"}, "llm_int8_threshold"),
    (BITSANDBYTES | {"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules: must be a list"),
    (BITSANDBYTES | {"llm_int8_skip_modules": [1]}, "llm_int8_skip_modules: must be names"),
    (COMPRESSED | {"ignore": {"a": 1}}, "ignore: must be a list"),
    (COMPRESSED | {"config_groups": {}}, "config_groups: required and absent, or empty"),
    (COMPRESSED | {"config_groups": [1]}, "config_groups: must be an object"),
    (COMPRESSED | {"config_groups": {"group_0": 1}}, "config_groups 'group_0': must be an object"),
    (group(weights=[1]), "config_groups 'group_0' weights: must be an object"),
    (group(targets=[None]), "config_groups 'group_0' targets: must be names"),
]


@pytest.mark.parametrize(("quantization", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_a_broken_quantization_config(tmp_path: Path, quantization: Any, message: str) -> None:
    stored, _ = quantized("compressed-tensors" if "config_groups" in quantization else "bitsandbytes")
    with pytest.raises(BadFile) as caught:
        checkpoints.open(save(tmp_path, stored, quantization))
    assert message in str(caught.value)


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def with_(name: str, array: np.ndarray) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: array})


ROWS = CONFIG.intermediate_size
MISFITS: list[tuple[str, Callable[[Tensors], None], str]] = [
    ("bitsandbytes", without(f"{UP}.SCB"), f"tensor '{UP}.weight': is int8 and has no {UP}.SCB"),
    ("compressed-tensors", without(f"{UP}.weight_scale"), f"is int8 and has no {UP}.weight_scale"),
    ("bitsandbytes", with_(f"{UP}.SCB", np.ones((ROWS, 1), np.float32)), "is no scale for each row"),
    ("bitsandbytes", with_(f"{UP}.SCB", np.ones(ROWS - 1, np.float32)), "F32 (95,) is no scale for each row of int8"),
    ("bitsandbytes", with_(f"{UP}.SCB", np.ones(ROWS, np.float16)), "F16 (96,) is no scale"),
    ("bitsandbytes", with_(f"{UP}.SCB", np.ones(ROWS, np.int8)), "I8 (96,) is no scale"),
    ("compressed-tensors", with_(f"{UP}.weight_scale", np.ones((1, ROWS), np.float32)), "F32 (1, 96) is no scale"),
    ("compressed-tensors", with_(f"{UP}.weight_scale", np.ones((), np.float32)), "F32 () is no scale"),
    ("compressed-tensors", with_(f"{UP}.weight_zero_point", np.zeros(ROWS, np.int64)), "I64 (96,) is not understood"),
    ("bitsandbytes", with_(f"{UP}.weight", np.ones((ROWS, 63), np.int8)), "shape (96, 63), but the config says"),
    ("bitsandbytes", with_(f"{UP}.weight", WEIGHTS[f"{UP}.weight"]), f"has no int8 matrix {UP}.weight to go with"),
    ("bitsandbytes", with_("lm_head.SCB", np.ones(96, np.float32)), "has no int8 matrix lm_head.weight to go with"),
    ("bitsandbytes", with_("model.norm.weight", np.ones(64, np.int8)), "is int8 and has no model.norm.SCB"),
    ("bitsandbytes", with_(f"{UP}.weight", np.ones(ROWS, np.int8)), "is no scale for each row of int8 (96,)"),
    ("compressed-tensors", with_(f"{UP}.input_scale", np.ones(1, np.float32)), "not part of this model"),
]


@pytest.mark.parametrize(("method", "change", "message"), MISFITS, ids=[message for _, _, message in MISFITS])
def test_codes_and_scales_that_do_not_fit(
    tmp_path: Path, method: str, change: Callable[[Tensors], None], message: str
) -> None:
    stored, _ = quantized(method)
    change(stored)
    with pytest.raises(BadFile) as caught:
        checkpoints.open(save(tmp_path, stored, BOTH[method]))
    assert message in str(caught.value)


def test_a_vector_in_int8_with_a_scale(tmp_path: Path) -> None:
    stored, _ = quantized("bitsandbytes")
    stored["model.norm.weight"], stored["model.norm.SCB"] = np.ones(64, np.int8), np.ones(64, np.float32)
    with pytest.raises(BadFile, match="is no scale for each row"):
        checkpoints.open(save(tmp_path, stored, BITSANDBYTES))


@pytest.mark.parametrize("method", BOTH)
def test_modules_left_out_by_name_are_not_int8(tmp_path: Path, method: str) -> None:
    stored, _ = quantized(method)
    key = {"bitsandbytes": "llm_int8_skip_modules", "compressed-tensors": "ignore"}[method]
    with pytest.raises(BadFile, match="is int8, though quantization_config leaves it out"):
        checkpoints.open(save(tmp_path, stored, BOTH[method] | {key: [UP]}))


def test_embeddings_in_int8(tmp_path: Path) -> None:
    stored, _ = quantized("bitsandbytes")
    stored["model.embed_tokens.weight"] = np.ones((96, 64), np.int8)
    stored["model.embed_tokens.SCB"] = np.ones(96, np.float32)
    with pytest.raises(Unsupported, match="embeddings in int8"):
        checkpoints.open(save(tmp_path, stored, BITSANDBYTES))


def test_it_says_int8_and_is_not(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="quantization_config: says bitsandbytes, and no tensor is int8; delete the key"):
        checkpoints.open(save(tmp_path, WEIGHTS, BITSANDBYTES))


def test_it_is_int8_and_does_not_say_so(tmp_path: Path) -> None:
    stored, _ = quantized("bitsandbytes")
    with pytest.raises(PronkError):
        checkpoints.open(save(tmp_path, stored, None))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, -1e-30])
@pytest.mark.parametrize("method", BOTH)
def test_a_scale_that_is_none(tmp_path: Path, method: str, value: float) -> None:
    stored, _ = quantized(method)
    name = f"{UP}.SCB" if method == "bitsandbytes" else f"{UP}.weight_scale"
    stored[name].reshape(-1)[7] = value
    tensor = checkpoints.open(save(tmp_path, stored, BOTH[method])).tensors[f"{UP}.weight"]
    assert tensor.read_blocks is not None
    for read in (tensor.read, tensor.read_blocks):
        with pytest.raises(BadFile, match=f"'{name}': holds a scale that is negative or not finite"):
            read()


@pytest.mark.parametrize("method", BOTH)
def test_a_scale_whose_weights_are_not_finite(tmp_path: Path, method: str) -> None:
    """It is finite itself, and 127 of it are not: packed weights were infinite once."""
    stored, _ = quantized(method)
    name = f"{UP}.SCB" if method == "bitsandbytes" else f"{UP}.weight_scale"
    steps = 127 if method == "bitsandbytes" else 1
    for value, good in ((2.6e36, True), (2.67e36, False)):
        stored[name].reshape(-1)[7] = value * steps
        tensor = checkpoints.open(save(tmp_path, stored, BOTH[method])).tensors[f"{UP}.weight"]
        if good:
            assert np.isfinite(tensor.read()).all()
        else:
            with pytest.raises(BadFile, match=f"'{name}': holds a scale of weights that are not finite"):
                tensor.read()


def test_a_row_of_zeros_has_a_scale_of_zero(tmp_path: Path) -> None:
    stored, _ = quantized("bitsandbytes")
    stored[f"{UP}.SCB"][2] = 0
    assert not checkpoints.open(save(tmp_path, stored, BITSANDBYTES)).tensors[f"{UP}.weight"].read()[2].any()


@pytest.mark.parametrize(
    ("method", "name", "zeros"),
    [
        ("bitsandbytes", "weight_format", np.ones((), np.uint8)),
        ("compressed-tensors", "weight_zero_point", np.eye(1, ROWS, dtype=np.int8)),
    ],
)
def test_another_order_or_zero_point_is_refused(tmp_path: Path, method: str, name: str, zeros: np.ndarray) -> None:
    """Codes in columns for old GPUs; codes around another number than 0."""
    stored, meant = quantized(method)
    stored[f"{UP}.{name}"] = np.zeros_like(zeros)
    good = checkpoints.open(save(tmp_path, stored, BOTH[method])).tensors[f"{UP}.weight"].read()
    assert np.array_equal(good, meant[f"{UP}.weight"])
    stored[f"{UP}.{name}"] = zeros
    with pytest.raises(Unsupported, match=f"{name}' is not zero"):
        checkpoints.open(save(tmp_path, stored, BOTH[method])).tensors[f"{UP}.weight"].read()


@given(st.integers(1, 9), st.integers(0, 70), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None, database=None, derandomize=True)
def test_rows_are_joined_and_split(rows: int, cols: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scale = rng.random(rows, np.float32)
    codes = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
    again = int8_rows.split(int8_rows.join(scale, codes))
    assert np.array_equal(again[0], scale)
    assert np.array_equal(again[1], codes)
    assert np.array_equal(int8_rows.multiply(scale, codes), scale[:, None] * codes.astype(np.float32))


def test_pieces_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    scale, codes = rng.random(9, np.float32), rng.integers(-128, 128, (9, 7)).astype(np.int8)
    whole = int8_rows.multiply(scale, codes)
    monkeypatch.setattr(int8_rows, "_PIECE", 15)
    assert np.array_equal(int8_rows.multiply(scale, codes), whole)


def test_nothing_is_read_when_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, _ = quantized("bitsandbytes")
    folder = save(tmp_path, stored, BITSANDBYTES)

    def read(self: LazyTensor) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("pronk.checkpoint.containers.safetensors._read", read)
    plan = checkpoints.open(folder).plan()
    assert plan.stored == sum(array.nbytes for array in stored.values())
