"""LoRA beside weights that stay codes: the same numbers and gradients as over the floats that the codes stand for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_files import save_gguf
from tiny import CONFIGS, in_memory, random_weights, tiny_config
from torch import Tensor, nn

import pronk.checkpoint as checkpoints
from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.tensors import Checkpoint
from pronk.checkpoint.writers.write import save
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest
from pronk.formats.quantize import quantize
from pronk.torch_engine import codes as all_codes
from pronk.torch_engine.backend import load_model
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.codes import Codes, read
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.model import Llama
from pronk.train import codes, frozen, lora
from pronk.train.recompute import recompute

FORMATS = ["int8", "llm-int8", "q8", "q4"]
IDS = [1, 5, 9, 30, 40, 7, 3, 28, 31, 12]
CPU = torch.device("cpu")
EPS = torch.finfo(torch.float32).eps


def source(name: str = "gqa") -> Checkpoint:
    config = tiny_config(**CONFIGS[name])
    return in_memory(config, random_weights(config))


def loaded(checkpoint: Checkpoint, wish: str | None) -> Llama:
    return load_model(checkpoint, CPU, torch.float32, linear=frozen.linear(checkpoint, wish, CPU))


def opened_out(model: Llama) -> Llama:
    """The same with float Linears in the places of frozen ones."""
    for name, module in list(model.named_modules()):
        if isinstance(module, CodesLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight = nn.Parameter(module.dequantized())
            if module.bias is not None:
                plain.bias = module.bias
            model.set_submodule(name, plain)
    return model


def with_lora(model: Llama) -> Llama:
    torch.manual_seed(3)
    lora.add(model, LoraConfig(rank=3, alpha=6))
    with torch.no_grad():
        for _, layer in lora.layers(model):
            layer.lora_B.normal_(std=0.2)
    return model


def logits(model: Llama) -> Tensor:
    found: Tensor = model(TorchBatch.of(Batch.of([Run(IDS, logits="all")]), CPU, None))
    return found


def gradients(model: Llama) -> dict[str, Tensor]:
    torch.nn.functional.cross_entropy(logits(model)[:-1], torch.tensor(IDS[1:])).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=[all_codes._PIECE, 200])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix in one piece, and in several."""
    monkeypatch.setattr(all_codes, "_PIECE", request.param)


# -- Codes --


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["gqa", "odd"])
@pytest.mark.parametrize("format", FORMATS)
def test_codes_are_those_of_quantize(format: str, name: str) -> None:
    checkpoint = source(name)
    for tensor in checkpoint.tensors.values():
        if codes.format_of(tensor, format):
            expected = quantize(tensor.read(), format).dequantize()
            assert np.array_equal(read(checkpoint, tensor, format).floats(slice(None)).numpy(), expected)


def in_blocks(path: Path, kind: str) -> Checkpoint:
    config = tiny_config()
    in_layers = lambda name, array: kind if array.ndim == 2 and "layers" in name else "F32"  # noqa: E731
    return checkpoints.open(save_gguf(path, config, random_weights(config), dtype=in_layers))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "int8", "llm-int8"])
def test_codes_of_the_file_stay_what_they_are(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a float made of them: neither rounding nor memory for one is in their way."""
    if kind in FORMATS:
        checkpoint = checkpoints.open(save(source(), tmp_path / "m", to="safetensors", dtype=kind))  # type: ignore[arg-type]
    else:
        checkpoint = in_blocks(tmp_path / "m.gguf", kind)
    expected = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    monkeypatch.setattr(all_codes, "rows", None)
    model = loaded(checkpoint, "auto")
    found = {n: m for n, m in model.named_modules() if isinstance(m, CodesLinear)}
    assert len(found) == 14
    for name, module in found.items():
        assert np.array_equal(module.dequantized().numpy(), expected[f"{name}.weight"])


def test_other_codes_are_made_of_the_file_s_numbers(tmp_path: Path) -> None:
    checkpoint = in_blocks(tmp_path / "m.gguf", "Q8_0")
    tensor = checkpoint.tensors["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(
        read(checkpoint, tensor, "q4").floats(slice(None)).numpy(), quantize(tensor.read(), "q4").dequantize()
    )
    assert codes.format_of(tensor, "f32") is None
    assert not any(isinstance(m, CodesLinear) for m in loaded(checkpoint, "f32").modules())
    plain = in_blocks(tmp_path / "f.gguf", "F16")
    assert codes.format_of(plain.tensors[tensor.name], "auto") is None


def test_a_weight_that_is_no_number_is_named() -> None:
    weights = random_weights(tiny_config())
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    with pytest.raises(BadFile, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*finite"):
        loaded(in_memory(tiny_config(), weights), "q4")


def test_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    checkpoint = in_blocks(tmp_path / "m.gguf", "Q8_0")
    name = "model.layers.1.mlp.up_proj.weight"
    blocks = checkpoint.tensors[name].read_blocks().copy()  # type: ignore[misc]
    blocks[2, 34:36] = (0x00, 0x7C)  # infinity
    broken = replace(checkpoint.tensors[name], read_blocks=lambda: blocks)
    with pytest.raises(BadFile, match=r"up_proj\.weight.*infinity or NaN"):
        loaded(replace(checkpoint, tensors={**checkpoint.tensors, name: broken}), "auto")


def test_formats_that_there_are_not() -> None:
    with pytest.raises(BadRequest, match="quantize must be one of auto, f32, int8, llm-int8, q8, q4"):
        codes.check("nf4")


# -- Products and gradients --


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("format", FORMATS)
def test_a_product_is_that_of_the_floats(format: str) -> None:
    """Sums of K products in another order: each is off by at most K * eps / 2 of the sum of magnitudes, twice."""
    checkpoint = source()
    model = loaded(checkpoint, format)
    layer = model.get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, CodesLinear)
    w, x = layer.dequantized().double(), torch.randn(7, layer.in_features, requires_grad=True)
    y = layer(x)
    bound = layer.in_features * EPS * (x.detach().double().abs() @ w.abs().T)
    assert ((y.double() - x.double() @ w.T).abs() <= bound).all()
    grad = torch.randn_like(y)
    y.backward(grad)
    bound = layer.out_features * EPS * (grad.double().abs() @ w.abs())
    assert x.grad is not None
    assert ((x.grad.double() - grad.double() @ w).abs() <= bound).all()


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("name", ["gqa", "biases", "odd"])
@pytest.mark.parametrize("format", FORMATS)
def test_lora_learns_what_it_would_over_floats(format: str, name: str) -> None:
    checkpoint = source(name)
    in_codes, floats = with_lora(loaded(checkpoint, format)), with_lora(opened_out(loaded(checkpoint, format)))
    torch.testing.assert_close(logits(in_codes), logits(floats), rtol=1e-5, atol=1e-5)
    found, expected = gradients(in_codes), gradients(floats)
    assert found.keys() == expected.keys()
    assert len(found) == 28
    for key, grad in expected.items():
        torch.testing.assert_close(found[key], grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("harm", [lambda q: q.flatten()[5:6].bitwise_xor_(16), lambda q: q.copy_(q.roll(1, 0))])
def test_one_wrong_code_would_be_seen(harm: Callable[[Tensor], Tensor]) -> None:
    """The comparison above, of a model that is wrong: it must not pass."""
    floats = with_lora(opened_out(loaded(source(), "q4")))
    wrong = loaded(source(), "q4")
    layer = wrong.get_submodule("model.layers.1.self_attn.v_proj")
    assert isinstance(layer, CodesLinear)
    harm(layer.q)
    found, expected = gradients(with_lora(wrong)), gradients(floats)
    assert not all(torch.allclose(found[key], grad, rtol=1e-5, atol=1e-5) for key, grad in expected.items())


def test_recomputed_activations_change_no_bit() -> None:
    models = [with_lora(loaded(source(), "q4")) for _ in range(2)]
    recompute(models[1], 1)
    plain, again = map(gradients, models)
    assert all(torch.equal(grad, again[key]) for key, grad in plain.items())


def test_in_bf16_products_are_those_of_bf16() -> None:
    layer = loaded(source(), "q4").get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(layer, CodesLinear)
    plain = nn.Linear(layer.in_features, layer.out_features, bias=False)
    plain.weight = nn.Parameter(layer.dequantized(), requires_grad=False)
    given = torch.randn(5, layer.in_features)
    found = []
    for module in (layer, plain):
        x = given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = module(x)
        y.backward(torch.ones_like(y))
        assert y.dtype is torch.bfloat16
        found.append((y, x.grad))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=2**-7, atol=2**-7)


@pytest.mark.slow
def test_bitsandbytes_multiplies_the_same_codes() -> None:
    """Its 8-bit layer makes codes of float16, and computes in it: to each number, three roundings."""
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    name = "model.layers.0.mlp.up_proj.weight"
    weights = {n: w.astype(np.float16) for n, w in random_weights(tiny_config()).items()}
    ours = read(checkpoint := in_memory(tiny_config(), weights), checkpoint.tensors[name], "llm-int8")
    n, k = checkpoint.tensors[name].shape
    theirs = bnb.nn.Linear8bitLt(k, n, bias=False, has_fp16_weights=False)
    theirs.weight = bnb.nn.Int8Params(torch.from_numpy(weights[name]), requires_grad=False, has_fp16_weights=False)
    theirs = theirs.to("cpu")
    given, grad, found = torch.randn(6, k), torch.randn(6, n), []
    for layer in (theirs, CodesLinear(ours, None, "llm-int8")):
        if layer is not theirs:  # of their codes, as what is made of w in float16 may lie a step away where w is a tie
            assert (ours.q[:, 0].int() - theirs.state.CB).abs().max() <= 1
            assert (ours.q[:, 0] == theirs.state.CB).float().mean() > 0.99
            shifted = Codes(k, theirs.state.CB[:, None], theirs.state.SCB[:, None] / 127)
            layer = CodesLinear(shifted, None, "llm-int8")
            w = layer.dequantized()
        x = given.clone().requires_grad_()
        y = layer(x)
        y.backward(grad)
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    half = torch.finfo(torch.float16).eps
    assert ((found[0][1] - found[1][1]).abs() <= 2 * half * (grad.abs() @ w.abs())).all()
    # Its activations are rounded to 127 steps of their largest, by half a step each at most.
    steps = given.abs().amax(1, keepdim=True) / 127
    bound = 0.5 * steps * w.abs().sum(1) + 2 * half * (given.abs() @ w.abs().T)
    assert ((found[0][0] - found[1][0]).abs() <= bound).all()


# -- Memory --


@pytest.mark.parametrize("format", [None, *FORMATS])
def test_what_is_held_is_what_was_foretold(format: str | None) -> None:
    checkpoint = source()
    model = loaded(checkpoint, format)
    held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
    assert held == codes.nbytes(checkpoint, format)
    drawn = Llama(checkpoint.config)
    frozen.outline(drawn, checkpoint, format)
    assert {n: (t.shape, t.dtype) for n, t in drawn.named_buffers()} == {
        n: (t.shape, t.dtype) for n, t in model.named_buffers()
    }
    assert frozen.count(model) == sum(np.prod(tensor.shape) for tensor in checkpoint.tensors.values())


_PEAK = """
import sys, torch
from pronk import checkpoint
from pronk.checkpoint.adapter import LoraConfig
from pronk.system import peak_memory
from pronk.torch_engine import codes as all_codes
from pronk.torch_engine.backend import load_model
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.model import Llama
from pronk.train import frozen, lora
torch.set_num_threads(1)
opened, cpu = checkpoint.open(sys.argv[1]), torch.device("cpu")
with torch.device("meta"):
    Llama(opened.config)  # what torch imports for it is none of the weights' memory
before = peak_memory()
model = load_model(opened, cpu, torch.float32, linear=frozen.linear(opened, sys.argv[2], cpu))
lora.add(model, LoraConfig(rank=2))
x = torch.randn(4, opened.config.hidden_size, requires_grad=True)
for layer in model.model.layers:
    x = x + layer.mlp(x)
x.sum().backward()
print(peak_memory() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_the_peak_of_a_process_falls(tmp_path: Path) -> None:
    """To the codes, a tensor on its way and a few pieces, while weights are loaded and while they are multiplied."""
    config = tiny_config(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, head_dim=64
    )
    draw = np.random.default_rng(0)
    weights = {n: draw.standard_normal(s, np.float32) * 0.01 for n, s in config.tensor_shapes().items()}
    save(in_memory(config, weights), tmp_path / "m.gguf", to="gguf", dtype="q8")
    checkpoint = checkpoints.open(tmp_path / "m.gguf")
    command = [sys.executable, "-c", _PEAK, str(tmp_path / "m.gguf"), "auto"]
    peak = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert peak < codes.nbytes(checkpoint, "auto") + 40e6 < 0.5 * codes.nbytes(checkpoint, "f32")
