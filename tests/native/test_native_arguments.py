"""Nothing from Python reaches the kernels unchecked: malformed arguments raise ValueError or TypeError; none crash."""

from __future__ import annotations

import inspect
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk import _native
from pronk.cpu_engine.backend import CpuBackend
from pronk.engine.batch import Batch, Run

CONFIG = tiny_config(vocab_size=64)
ENGINE = CpuBackend.from_checkpoint(in_memory(CONFIG, random_weights(CONFIG)), threads=1)
MODEL = ENGINE.model
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "threads": 1,
}  # fmt: skip
BLOCKS = 6


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def batch() -> dict[str, Any]:
    """Two runs: positions 62..66 of one text, which end in its second block, and the first three of another."""
    return {
        "token_ids": ints(5, 6, 7, 8, 9, 1, 2, 3),
        "positions": ints(62, 63, 64, 65, 66, 0, 1, 2),
        "offsets": ints(0, 5, 8),
        "blocks": ints(3, 0, 2),
        "block_offsets": ints(0, 2, 3),
        "logits_rows": ints(0, 4, 7),
        "kv": _native.KV(MODEL, "f32", BLOCKS),
    }


ENGINE.forward(Batch.of([Run([1])]), None)  # which sets the first 256 positions' angles
MODEL.forward(**batch())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"token_ids": ints(5, 6, 7, 8, 64, 1, 2, 3)}, "token id 64 is not in a vocabulary of 64"),
        ({"token_ids": ints(5, 6, 7, 8, -1, 1, 2, 3)}, "token id -1"),
        ({"adapters": ints(-1)}, "there are 1 adapters for 2 runs"),
        ({"adapters": ints(-1, 0)}, "there is no adapter 0"),
        ({"adapters": ints(-2, -1)}, "there is no adapter -2"),
        ({"token_ids": ints(5)}, "8 positions for 1 tokens"),
        ({"token_ids": ints(), "positions": ints(), "offsets": ints(0)}, "number of tokens"),
        ({"positions": ints(62, 63, 64, 65, 67, 0, 1, 2)}, "consecutive"),
        ({"positions": ints(62, 62, 62, 62, 62, 0, 1, 2)}, "consecutive"),
        ({"positions": ints(-2, -1, 0, 1, 2, 0, 1, 2)}, "positions -2 to 2"),
        ({"positions": ints(252, 253, 254, 255, 256, 0, 1, 2)}, "not within 256"),
        ({"positions": ints(2**31 - 1, 63, 64, 65, 66, 0, 1, 2)}, "not within 256"),
        ({"positions": ints(126, 127, 128, 129, 130, 0, 1, 2)}, "131 positions do not fit in 2 blocks"),
        ({"offsets": ints(0, 8, 8)}, "offsets must ascend"),
        ({"offsets": ints(0, 9, 8)}, "offsets must ascend"),
        ({"offsets": ints(1, 5, 8)}, "begin with 0"),
        ({"offsets": ints(0, 5, 9)}, "end with 8"),
        ({"offsets": ints()}, "begin with 0"),
        ({"blocks": ints(3, 6, 2)}, "no block 6 among 6"),
        ({"blocks": ints(3, -1, 2)}, "no block -1"),
        ({"blocks": ints(3, 3, 2)}, "block 3 is written twice"),
        ({"blocks": ints(3, 0, 3)}, "block 3 is written twice"),
        ({"blocks": ints(3, 0, 3), "positions": ints(64, 65, 66, 67, 68, 0, 1, 2)}, "written by one run and read"),
        ({"blocks": ints(3, 0)}, "end with 2"),
        ({"block_offsets": ints(0, 3)}, "1 block tables for 2 runs"),
        ({"block_offsets": ints(0, 4, 3)}, "block_offsets must ascend"),
        ({"block_offsets": ints(0, 3, 3)}, "3 positions do not fit in 0 blocks"),
        ({"logits_rows": ints(0, 4, 8)}, "row 2 is 8"),
        ({"logits_rows": ints(0, 4, 4)}, "row 2 is 4"),
        ({"logits_rows": ints(-1, 4, 7)}, "row 0 is -1"),
        ({"kv": _native.KV(MODEL, "f32", BLOCKS, remembers=False)}, "must start at position 0, not 62"),
        ({"kv": _native.KV(_native.Model(**SIZES), "f32", BLOCKS)}, "another model"),
        ({"kv": _native.KV(MODEL, "f32", 0)}, "no block 3 among 0"),
    ],
)
def test_a_malformed_batch_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        MODEL.forward(**{**batch(), **changes})


def unaligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + 1, np.uint8)[1:]
    return raw.view(array.dtype).reshape(array.shape)


def test_arrays_of_another_kind_are_refused() -> None:
    for name, value in (
        ("token_ids", np.arange(8)),
        ("token_ids", np.arange(8, dtype=np.uint32)),
        ("token_ids", np.arange(16, dtype=np.int32)[::2]),
        ("token_ids", ints(*range(8)).reshape(2, 4)),
        ("token_ids", list(range(8))),
        ("token_ids", None),
        ("kv", None),
        ("kv", MODEL),
    ):
        with pytest.raises((TypeError, ValueError)):
            MODEL.forward(**{**batch(), name: value})


@pytest.mark.parametrize("given", ["unpack", "activations"])
def test_results_go_into_whole_writable_aligned_floats_alone(given: str) -> None:
    layers, tokens, width = CONFIG.num_hidden_layers, 8, CONFIG.hidden_size
    q, intermediate = CONFIG.num_attention_heads * CONFIG.head_dim, CONFIG.intermediate_size

    def call(out: np.ndarray) -> None:
        if given == "unpack":
            return MODEL.unpack("lm_head", -1, 0, out)
        inputs = {name: value for name, value in batch().items() if name != "logits_rows"}
        taps = {
            "qkv": floats(layers, tokens, width),
            "o": floats(layers, tokens, q),
            "gate_up": floats(layers, tokens, width),
        }
        return MODEL.activations(**inputs, **taps, down=floats(layers, tokens, intermediate), head=out)

    shape = (CONFIG.vocab_size, width) if given == "unpack" else (1, tokens, width)
    call(floats(*shape))
    read_only = floats(*shape)
    read_only.flags.writeable = False
    for out in (
        np.ones(shape), floats(*shape[::-1]).T, read_only, unaligned(floats(*shape)),
        floats(*shape)[..., :-1].copy(), floats(*shape).ravel(), None, list(range(8)),
    ):  # fmt: skip
        with pytest.raises((TypeError, ValueError)):
            call(out)


any_int = st.one_of(st.integers(-2, 70), st.sampled_from([-(2**31), 2**31 - 1, 255, 256, 1 << 20]))
any_ints = st.lists(any_int, max_size=12).map(lambda values: ints(*values))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from(["token_ids", "positions", "offsets", "blocks", "block_offsets", "logits_rows"]),
                       any_ints, min_size=1, max_size=3))  # fmt: skip
def test_any_integers_are_computed_or_refused(changes: dict[str, np.ndarray]) -> None:
    arguments = {**batch(), **changes}
    try:
        logits = MODEL.forward(**arguments)
    except ValueError:
        return
    assert logits.shape == (len(arguments["logits_rows"]), CONFIG.vocab_size)
    assert np.isfinite(logits).all()


@pytest.mark.parametrize(
    "changes",
    [
        *({name: value} for name in SIZES if name != "rms_norm_eps" for value in (0, -1, 2**31 - 1, 2**40, "1", None)),
        {"rms_norm_eps": 0.0}, {"rms_norm_eps": float("nan")}, {"head_dim": 7}, {"num_key_value_heads": 3},
        {"num_attention_heads": 1 << 14, "head_dim": 1 << 14}, {"isa": "z80"}, {"isa": 3},
    ],
)  # fmt: skip
def test_a_model_of_impossible_sizes_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        _native.Model(**{**SIZES, **changes})


def test_a_model_that_is_not_complete_does_not_run() -> None:
    model = _native.Model(**SIZES)
    arguments = {**batch(), "kv": _native.KV(model, "f32", BLOCKS)}
    with pytest.raises(ValueError, match="not all of the model's weights are set"):
        model.forward(**arguments)
    for call, problem in (
        (lambda: model.tie(), "embed_tokens must be there"),
        (lambda: model.pack("q_proj", 0, np.zeros((32, 128), np.uint8), "F32"), "q_proj is not allocated"),
        (lambda: model.unpack("lm_head", -1, 0, floats(64, 32)), "lm_head is not allocated"),
        (lambda: model.allocate("q_proj", 2, "f32"), "layer must be from 0 to 1"),
        (lambda: model.allocate("q_proj", -1, "f32"), "layer must be from 0 to 1"),
        (lambda: model.allocate("z_proj", 0, "f32"), "no matrix z_proj"),
        (lambda: model.allocate("lm_head", 0, "f32"), "lm_head is of no layer"),
        (lambda: model.allocate("q_proj", 0, "q5"), "no weight format q5"),
        (lambda: model.allocate("up_proj", 0, "f32"), "part of gate_up_proj"),
        (lambda: model.set_norm("norms", 0, floats(32)), "no norm norms"),
        (lambda: model.set_norm("norm", -1, floats(31)), "must have 32 numbers, not 31"),
        (lambda: model.set_norm("norm", -1, floats(32) * np.float32(np.nan)), "finite"),
        (lambda: model.set_norm("input_layernorm", 5, floats(32)), "layer"),
        (lambda: model.set_rope(floats(4, 3), floats(4, 4)), r"cos must be of shape \(4, 4\)"),
        (lambda: model.set_rope(floats(4, 4), floats(3, 4)), r"sin must be of shape \(4, 4\)"),
        (lambda: model.set_rope(floats(0, 4), floats(0, 4)), "positions must be from 1"),
    ):
        with pytest.raises(ValueError, match=problem):
            call()


def test_rows_that_do_not_fit_are_refused() -> None:
    model = _native.Model(**SIZES)
    for role in ("gate_up_proj", "down_proj"):
        model.allocate(role, 0, "q8")
    model.allocate("embed_tokens", -1, "f32")
    raw = np.zeros((48, 128), np.uint8)
    for call, problem in (
        (lambda: model.allocate("down_proj", 0, "q8"), "there already"),
        (lambda: model.pack("gate_proj", 0, raw[:, :127].copy(), "F32"), "32 columns of F32 does not have 127 bytes"),
        (lambda: model.pack("gate_proj", 0, raw, "F16"), "does not have 128 bytes"),
        (lambda: model.pack("gate_proj", 0, raw, "IQ3_S"), "rows of IQ3_S cannot be packed"),
        (lambda: model.pack("gate_proj", 0, raw, "F32", 1), "rows 1 to 49 are not within a matrix of 48"),
        (lambda: model.pack("gate_proj", 0, raw, "F32", -1), "rows -1"),
        (lambda: model.pack("gate_proj", 0, raw, "F32", 2**62), "not within a matrix"),
        (lambda: model.pack("gate_up_proj", 0, raw, "F32"), "one by one"),
        (lambda: model.pack("down_proj", 0, raw[:32], "Q4_K"), "48 columns are not whole blocks of Q4_K"),
        (lambda: model.unpack("up_proj", 0, 0, floats(49, 32)), "not within a matrix of 48"),
        (lambda: model.unpack("up_proj", 0, 0, floats(48, 31)), "out must be of shape"),
        (lambda: model.set_bias("up_proj", 0, floats(96)), "must have 48 numbers"),
        (lambda: model.set_bias("embed_tokens", -1, floats(64)), "has no bias"),
        (lambda: model.set_bias("embed_tokens", 0, floats(64)), "of no layer"),
    ):
        with pytest.raises(ValueError, match=problem):
            call()


def test_rows_of_attention_are_counted_in_32_bits() -> None:
    """A row for each head of each token."""
    config = tiny_config(hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1 << 14,
                         num_key_value_heads=1, head_dim=2, max_position_embeddings=1 << 17)  # fmt: skip
    engine = CpuBackend.from_checkpoint(in_memory(config, random_weights(config)), threads=1)
    engine.forward(Batch.of([Run([1])]), None)
    tokens = np.zeros(1 << 17, np.int32)
    arguments = {"token_ids": tokens, "positions": np.arange(1 << 17, dtype=np.int32), "offsets": ints(0, 1 << 17),
                 "blocks": np.arange(1 << 11, dtype=np.int32), "block_offsets": ints(0, 1 << 11), "logits_rows": ints(),
                 "kv": _native.KV(engine.model, "f32", 1 << 11)}  # fmt: skip
    with pytest.raises(ValueError, match="number of tokens must be from 1 to 131071, not 131072"):
        engine.model.forward(**arguments)


def test_adapters_are_checked() -> None:
    """Their modules' names, layers, shapes and numbers; what is refused leaves no adapter behind."""
    c = CONFIG.hidden_size
    a, b = floats(2, c), floats(c, 2)
    infinite = floats(2, c)
    infinite[1, 3] = np.inf
    for modules in (
        [("o_proj", 0, floats(2, c + 1), b, 1.0)],
        [("o_proj", 0, a, floats(c, 3), 1.0)],
        [("o_proj", 0, floats(0, c), floats(c, 0), 1.0)],
        [("o_proj", 99, a, b, 1.0)],
        [("embed_tokens", -1, a, floats(CONFIG.vocab_size, 2), 1.0)],
        [("gate_up_proj", 0, a, floats(CONFIG.intermediate_size, 2), 1.0)],
        [("x_proj", 0, a, b, 1.0)],
        [("o_proj", 0, infinite, b, 1.0)],
        [("o_proj", 0, a, b, float("nan"))],
        [("o_proj", 0, a, b, 1e300)],
        [("o_proj", 0, a, b, 1.0), ("o_proj", 0, a, b, 1.0)],
    ):
        with pytest.raises(ValueError):
            MODEL.attach(modules)
    with pytest.raises(ValueError, match="not all of the model's weights are set"):
        _native.Model(**SIZES).attach([])
    place, _ = MODEL.attach([("o_proj", 0, a, b, 1.0)])
    assert place == 0
    MODEL.forward(**batch(), adapters=ints(0, -1))
    MODEL.detach(place)
    for gone in (place, -1, 7):
        with pytest.raises(ValueError, match="there is no adapter"):
            MODEL.detach(gone)
    with pytest.raises(ValueError, match="there is no adapter 0"):
        MODEL.forward(**batch(), adapters=ints(0, -1))


def test_keys_and_values_are_checked() -> None:
    kv = _native.KV(MODEL, "f32", 2)
    for call in (
        lambda: _native.KV(MODEL, "q8", 2),
        lambda: _native.KV(MODEL, "f32", -1),
        lambda: kv.resize(1),
        lambda: kv.resize(2**40),
        lambda: kv.copy(np.array([[0, 2]], np.int32)),
        lambda: kv.copy(np.array([[-1, 0]], np.int32)),
        lambda: kv.copy(np.array([[0, 1, 1]], np.int32)),
    ):
        with pytest.raises(ValueError):
            call()
    with pytest.raises(MemoryError):
        kv.resize(2**31 - 1)  # more than there are addresses; what was there stays
    assert kv.num_blocks == 2
    kv.copy(np.zeros((0, 2), np.int32))


NUMBERS = [-1, 0, 1, 2, 3, 63, 64, 65, 1 << 16, 2**31, 2**63, 0.5, True]
ARRAYS = [floats(0), floats(3), floats(0, 3), floats(2, 3), floats(64, 2), floats(2, 64), floats(2, 3).T, ints(1, 2),
          ints(0), ints(2, 1), np.zeros((2, 12), np.uint8), np.zeros(3), np.zeros((2, 3, 4), np.float32)]  # fmt: skip
NAMES = ["", "f32", "q8", "int8", "F32", "q_proj", "whole", "gate", "portable", "x" * 1000, "\0", "é"]
anything = st.sampled_from([None, [], {}, MODEL, object(), *NUMBERS, *NAMES]) | st.sampled_from(ARRAYS)


def calls() -> dict[str, Any]:
    model, kv, matrix = _native.Model(**SIZES), _native.KV(MODEL, "f32", 3), _native.Matrix("q8", 70, 40)
    found = {f"{type(of).__name__}.{name}": getattr(of, name)
             for of in (model, kv, matrix) for name in dir(of) if not name.startswith("_")}  # fmt: skip
    found |= {name: getattr(_native, name) for name in dir(_native) if not name.startswith("_")}
    return {name: function for name, function in found.items() if callable(function)}


@pytest.mark.parametrize("name", sorted(calls()))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_arguments_are_taken_or_refused(name: str, data: st.DataObject) -> None:
    function = calls()[name]
    arguments = data.draw(st.lists(anything, max_size=9))
    with suppress(TypeError, ValueError, MemoryError):
        function(*arguments)


def test_every_function_is_in_the_stub() -> None:
    text = Path(inspect.getfile(pronk)).with_name("_native.pyi").read_text(encoding="utf-8")
    for name in calls():
        assert f"def {name.split('.')[-1]}(" in text or f"class {name}" in text, name
