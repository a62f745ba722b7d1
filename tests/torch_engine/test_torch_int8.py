"""The torch engine in 8 bits: codes, sums and results are those of formats.int8, and a model holds nothing wider."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from devices import DEVICES
from tiny import in_memory, random_weights, tiny_config
from torch import Tensor, nn

from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.tensors import Checkpoint, LazyTensor
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest
from pronk.formats import int8
from pronk.formats.int8 import SCHEMES, Outliers, Scheme
from pronk.formats.turn import turn
from pronk.llm import LLM
from pronk.torch_engine import quantized
from pronk.torch_engine.backend import TorchBackend
from pronk.torch_engine.quantized import Int8Linear, activation_codes, find_outliers, weight_codes

SHAPES = [(1, 1, 1), (5, 33, 7), (17, 576, 65), (40, 2100, 31)]
ULP = 2.0**-23


def tensors(tokens: int, inputs: int, outputs: int) -> tuple[np.ndarray, np.ndarray]:
    """With a token and a row of zeros, and a token too small for codes, wherever there is room for them."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((tokens, inputs)), rng.standard_normal((outputs, inputs)) * inputs**-0.5
    x[:, inputs // 2] *= 20
    x[3:4], x[4:5], w[5:6] = 0, 1e-40, 0
    return x.astype(np.float32), w.astype(np.float32)


def linear(w: np.ndarray, scheme: Scheme, outliers: Outliers, device: str = "cpu") -> Int8Linear:
    return Int8Linear(weight_codes(torch.from_numpy(w).to(device), scheme), None, scheme, outliers)


# -- codes and sums --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [*SHAPES, (600, 2000, 600)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_codes_are_those_of_numpy(scheme: Scheme, shape: tuple[int, int, int], device: str) -> None:
    """Of a million numbers, for one whose scale is a last place off shows in one code of half a million."""
    x, w = tensors(*shape)
    for array, own, reference in (
        (w, weight_codes, int8.weight_codes),
        (x, activation_codes, int8.activation_codes),
    ):
        given = turn(array) if own is activation_codes and scheme == "int8" else array  # as its layer does before
        found, expected = own(torch.from_numpy(given).to(device), scheme), reference(array, scheme)
        assert np.array_equal(found.q.cpu().numpy(), expected.q)
        assert np.array_equal(found.scale.cpu().numpy(), expected.scale)
        assert (0 if found.zero is None else int(found.zero)) == expected.zero


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [(6.0, 0), (6.0, 8), (math.inf, 3), (0.0, 0), (1.0, 10_000)])
@pytest.mark.parametrize("shape", SHAPES)
def test_outliers_are_those_of_numpy(shape: tuple[int, int, int], rule: tuple[float, int], device: str) -> None:
    x, _ = tensors(*shape)
    found, expected = find_outliers(torch.from_numpy(x).to(device), Outliers(*rule)), Outliers(*rule).find(x)
    assert np.array_equal(found.mask.cpu().numpy(), expected)
    assert np.array_equal(found.columns.cpu().numpy(), np.flatnonzero(expected.any(0)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", ["int_product", "_padded_product", "_product_in_floats"])
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [*SHAPES, (3, 5000, 9)])
def test_sums_are_exact_in_every_way(tokens: int, inputs: int, outputs: int, way: str, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-127, 128, (tokens, inputs), generator=generator, dtype=torch.int8)
    b = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    a[0], b[0] = 127, -128  # the largest sum there is
    found = getattr(quantized, way)(a.to(device), b.to(device))
    assert found.dtype == torch.int32
    assert torch.equal(found.cpu().long(), a.long() @ b.long().T)


# -- layers ----------------------------------------------------------------------------------------------------------


def allowed(x: np.ndarray, w: np.ndarray, scheme: Scheme, outliers: Outliers) -> np.ndarray:
    """float32 against float64: in 8 bits a sum, two scales and the result round, and in floats every term does."""
    apart = outliers.find(x) if scheme == "llm-int8" else np.zeros(x.shape, bool)
    codes = [int8.activation_codes(np.where(apart, np.float32(0), x), scheme), int8.weight_codes(w, scheme)]
    rest, weights = (np.abs(c.dequantize().astype(np.float64)) for c in codes)
    in_floats = np.abs(np.where(apart, x, 0)).astype(np.float64) @ weights.T
    return (rest @ weights.T) * 4 * ULP + in_floats * (apart.any(0).sum() + 4) * ULP + 1e-37


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rule", [(6.0, 0), (6.0, 8), (0.0, 0)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_layer_is_the_reference_product(
    scheme: Scheme, shape: tuple[int, int, int], rule: tuple[float, int], device: str
) -> None:
    x, w = tensors(*shape)
    found = linear(w, scheme, Outliers(*rule), device)(torch.from_numpy(x).to(device)).cpu().double().numpy()
    off = np.abs(found - int8.int8_linear(x, w, scheme, *rule))
    bound = allowed(x, w, scheme, Outliers(*rule))
    assert (off <= bound).all(), f"worst: {(off / bound).max()} times what is allowed"


def test_the_comparison_can_fail() -> None:
    x, w = tensors(17, 576, 65)
    rule = Outliers(6.0, 0)
    expected, bound = int8.int8_linear(x, w, "llm-int8", 6.0, 0), allowed(x, w, "llm-int8", rule)
    token = slice(0, 1)
    for wrong in (linear(w, "int8", rule), linear(w, "llm-int8", Outliers(6.0, 8)), linear(-w, "llm-int8", rule)):
        off = np.abs(wrong(torch.from_numpy(x)).double().numpy() - expected)[token]
        assert (off > 100 * bound[token]).mean() > 0.8  # one row is all zeros


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_bias_is_added_and_types_are_kept(scheme: Scheme, device: str) -> None:
    x, w = (torch.from_numpy(array).to(device) for array in tensors(5, 33, 7))
    plain = linear(w.cpu().numpy(), scheme, Outliers(), device)
    bias = nn.Parameter(torch.arange(7.0, device=device), requires_grad=False)
    layer = Int8Linear(weight_codes(w, scheme), bias, scheme, Outliers())
    assert torch.equal(layer(x), plain(x) + bias)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(layer(x.to(dtype)), layer(x.to(dtype).float()).to(dtype))
    assert layer(x[:0]).shape == (0, 7)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_wrong_number_does_not_look_like_a_right_one(scheme: Scheme, bad: float, device: str) -> None:
    x, w = tensors(5, 33, 4)
    x[1, 2] = bad
    assert not linear(w, scheme, Outliers(), device)(torch.from_numpy(x).to(device))[1].isfinite().any()


def test_tokens_do_not_depend_on_their_neighbours() -> None:
    """To the bit in int8; llm-int8's part in floats is summed over other columns, and rounds otherwise."""
    x, w = tensors(17, 576, 65)
    for scheme, exact in (("int8", True), ("absmax-row", True), ("llm-int8", False)):
        layer = linear(w, scheme, Outliers())
        together = layer(torch.from_numpy(x)).numpy()
        alone = torch.cat([layer(token) for token in torch.from_numpy(x).split(1)]).numpy()
        bound = 0 if exact else 2 * allowed(x, w, scheme, Outliers())
        assert (np.abs(together - alone) <= bound).all()


# -- models ----------------------------------------------------------------------------------------------------------


def some_ids(config: Any, length: int = 24) -> list[int]:
    return np.random.default_rng(1).integers(0, config.vocab_size, length).tolist()


def logits(engine: TorchBackend, ids: list[int]) -> np.ndarray:
    return engine.forward(Batch.of([Run(ids, logits="all")]), None)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_model_holds_bytes_and_stays_near_the_floats(scheme: str, dtype: str) -> None:
    config = tiny_config(attention_bias=True, mlp_bias=True)
    checkpoint = in_memory(config, random_weights(config))
    engine = TorchBackend.from_checkpoint(checkpoint, device="cpu", quantize=scheme, compute_dtype=dtype)
    assert engine.dtype == f"{scheme}+{dtype}"
    layers = [module for module in engine.model.modules() if isinstance(module, Int8Linear)]
    assert len(layers) == 7 * config.num_hidden_layers
    assert {layer.q.dtype for layer in layers} == {torch.int8}
    assert not [name for name, m in engine.model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    ids = some_ids(config)
    exact, found = logits(TorchBackend.from_checkpoint(checkpoint, device="cpu"), ids), logits(engine, ids)
    # An 8-bit code is off by 0.3 of a step of max / 127, and these weights and activations reach 2 to 4 times their
    # root mean square: 1% a product at most, in 14 products one after the other, and one scale for all 2 or 3 times it.
    assert np.sqrt(((found - exact) ** 2).mean()) < 0.03 * np.sqrt((exact**2).mean()) * 14**0.5


def test_int8_of_a_model_is_the_float_model_with_the_same_weights_but_for_activations() -> None:
    """With every activation computed apart, only weights are rounded: to_torch()'s weights, to the bit."""
    config = tiny_config(tie_word_embeddings=True, attention_bias=True)
    checkpoint = in_memory(config, random_weights(config))
    engine = TorchBackend.from_checkpoint(checkpoint, device="cpu", quantize="llm-int8", int8_threshold=0.0)
    plain = LLM("tiny", checkpoint, None, engine).to_torch()
    name = "model.layers.1.mlp.down_proj"
    expected = int8.weight_codes(checkpoint.tensors[f"{name}.weight"].read(), "llm-int8").dequantize()
    assert np.array_equal(plain.get_parameter(f"{name}.weight").detach().numpy(), expected)
    ids = some_ids(config)
    off = np.abs(plain(torch.tensor([ids]))[0].detach().numpy() - logits(engine, ids)).max()
    assert off < 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5  # as in test_torch_model: the sums' own rounding


def test_every_path_runs_on_codes() -> None:
    """Through the KV cache, token by token; keys and values are of the other type."""
    config = tiny_config()
    engine = TorchBackend.from_checkpoint(
        in_memory(config, random_weights(config)), device="cpu", quantize="llm-int8", compute_dtype="bf16"
    )
    kv = engine.new_kv(4, 16)
    assert kv.layers[0].keys.dtype == torch.bfloat16
    ids = some_ids(config)
    cached = [engine.forward(Batch.of([Run([t], n, range(n // 16 + 1), "all")]), kv) for n, t in enumerate(ids)]
    free, floats = (
        logits(engine, ids),
        logits(TorchBackend.from_checkpoint(in_memory(config, random_weights(config)), device="cpu"), ids),
    )
    off, noise = (np.sqrt(((other - free) ** 2).mean()) for other in (np.concatenate(cached), floats))
    assert off < 2 * noise
    moved = engine.perturbed()
    assert moved.dtype == engine.dtype
    assert 0 < np.abs(logits(moved, ids) - free).max() < 1


def stored(checkpoint: Checkpoint, dtype: str, codes: dict[str, np.ndarray]) -> Checkpoint:
    """The same, its Linears stored as INT8 or LLM_INT8 with `codes` that no quantizer would make of their values."""
    tensors = dict(checkpoint.tensors)
    for name, tensor in tensors.items():
        if "proj" not in name:
            continue
        rng = np.random.default_rng(len(codes))
        q = rng.integers(-100, 101, tensor.shape, dtype=np.int8)
        scale = (tensor.shape[1] ** -0.5 / 60 * rng.uniform(0.5, 1.5, len(q))).astype(np.float32)
        codes[name] = q
        tensors[name] = LazyTensor(
            name,
            tensor.shape,
            dtype,
            q.nbytes + scale.nbytes,
            lambda q=q, scale=scale: int8_rows.multiply(scale, q),
            lambda q=q, scale=scale: int8_rows.join(scale, q),
        )
    return replace(checkpoint, tensors=tensors)


@pytest.mark.parametrize("dtype", ["INT8", "LLM_INT8"])
def test_stored_codes_are_used_as_they_are(dtype: str) -> None:
    config, codes = tiny_config(), {}
    checkpoint = stored(in_memory(config, random_weights(config)), dtype, codes)
    ids = some_ids(config)
    floats = TorchBackend.from_checkpoint(checkpoint, device="cpu")
    assert floats.dtype == "f32"
    for scheme in ("int8", "llm-int8"):
        engine = TorchBackend.from_checkpoint(checkpoint, device="cpu", quantize=scheme)
        for name, q in codes.items():
            layer = engine.model.get_submodule(name.removesuffix(".weight"))
            assert np.array_equal(layer.q.numpy(), q)
            assert np.array_equal(layer.dequantized().numpy(), checkpoint.tensors[name].read())
    exact = TorchBackend.from_checkpoint(checkpoint, device="cpu", quantize="llm-int8", int8_threshold=0.0)
    assert np.abs(logits(exact, ids) - logits(floats, ids)).max() < 10 * 4 * 2.0**-24 * (12 * 2) ** 0.5
    again = TorchBackend.from_checkpoint(checkpoint, device="cpu", quantize="absmax")
    name = "model.layers.0.mlp.up_proj.weight"
    of_floats = int8.weight_codes(checkpoint.tensors[name].read(), "absmax").q
    assert np.array_equal(again.model.model.layers[0].mlp.up_proj.q.numpy(), of_floats)


def rule_of(engine: TorchBackend) -> Outliers:
    return engine.model.model.layers[0].mlp.up_proj.outliers


def test_a_checkpoint_says_its_threshold_and_options_have_the_last_word() -> None:
    config = tiny_config()
    checkpoint = in_memory(config, random_weights(config))

    def rule(checkpoint: Checkpoint, **options: Any) -> Outliers:
        return rule_of(TorchBackend.from_checkpoint(checkpoint, device="cpu", quantize="llm-int8", **options))

    saying = replace(checkpoint, int8_threshold=3.0)
    assert rule(checkpoint) == Outliers()
    assert rule(saying) == Outliers(threshold=3.0)
    assert rule(saying, int8_threshold=4.0, int8_outliers=0) == Outliers(4.0, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantize": "auto"}, "quantize must be one of f32, .*absmax, .* on the torch engine, not 'auto'"),
        ({"quantize": {"": "int8"}}, "quantize must be one of"),
        ({"int8_threshold": 5.0}, "int8_threshold=5.0 is for quantize='llm-int8'"),
        (
            {"quantize": "bf16", "compute_dtype": "f32"},
            "compute_dtype='f32' goes with weights in 8 or 4 bits, and not",
        ),
        ({"compute_dtype": "bf16"}, "not with floats; leave it out, or take quantize='bf16'"),
        ({"quantize": "int8", "int8_outliers": 0}, "int8_outliers=0 is for quantize='llm-int8'"),
        ({"quantize": "llm-int8", "int8_threshold": math.nan}, "int8_threshold must be a number"),
        ({"quantize": "llm-int8", "int8_outliers": -1}, "int8_outliers must be a whole number"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    config = tiny_config()
    with pytest.raises(BadRequest, match=message):
        TorchBackend.from_checkpoint(in_memory(config, random_weights(config)), device="cpu", **options)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_that_are_not_finite_are_refused(scheme: str) -> None:
    config, name = tiny_config(), "model.layers.1.self_attn.k_proj.weight"
    weights = random_weights(config)
    weights[name][-1, -1] = np.nan
    with pytest.raises(BadFile, match=f"tensor '{name}': holds infinity or NaN"):
        TorchBackend.from_checkpoint(in_memory(config, weights), device="cpu", quantize=scheme)


def test_the_checkpoints_own_arrays_stay_as_they_are() -> None:
    config = tiny_config()
    weights = random_weights(config)
    TorchBackend.from_checkpoint(in_memory(config, weights), device="cpu", quantize="int8")
    assert all(np.array_equal(array, weights[name]) for name, array in random_weights(config).items())


def test_layers_are_quantized_as_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never are two of them there as floats."""
    import weakref

    seen: list[weakref.ref[Tensor]] = []

    def watched(w: Tensor, scheme: Scheme) -> quantized.Int8Codes:
        assert not [w for w in seen if w() is not None]
        seen.append(weakref.ref(w))
        return weight_codes(w, scheme)

    monkeypatch.setattr("pronk.torch_engine.backend.weight_codes", watched)
    config = tiny_config()
    TorchBackend.from_checkpoint(in_memory(config, random_weights(config)), device="cpu", quantize="int8")
    assert len(seen) == 7 * config.num_hidden_layers


@pytest.mark.parametrize("x", [[[1e-42, 2e-43]], [[-1e-44, 1e-44]], [[0.0, -0.0]]])
def test_a_zeropoint_of_next_to_nothing_is_that_of_numpy(x: list[list[float]]) -> None:
    """Where the step is too small for a float, dividing by it made the zero point -2^63."""
    ours, theirs = (f(np.float32(x), "zeropoint") for f in (int8.activation_codes, int8.weight_codes))
    for codes, made in ((ours, activation_codes), (theirs, weight_codes)):
        found = made(torch.tensor(x), "zeropoint")
        assert (found.q.tolist(), found.scale.tolist()) == (codes.q.tolist(), codes.scale.tolist())
        assert [found.zero] == [codes.zero]
