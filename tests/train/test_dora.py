"""DoRA and rsLoRA: the paper's formula, PEFT's files and numbers, merging, and engines that cannot keep it beside."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from formats import save_huggingface
from tiny import in_memory, random_weights, tiny_config
from tiny_folder import save_tiny_chat_model
from torch import Tensor, nn
from training_runs import run_of, write_sums

import pronk
from pronk import checkpoint
from pronk.checkpoint import adapter as adapters
from pronk.checkpoint import adapter_gguf, merging
from pronk.checkpoint.adapter import LoraConfig
from pronk.checkpoint.containers import safetensors
from pronk.engine.batch import Batch, Run
from pronk.errors import BadFile, BadRequest, Unsupported
from pronk.torch_engine.backend import load_module
from pronk.torch_engine.batch import TorchBatch
from pronk.torch_engine.codes import read
from pronk.torch_engine.codes_linear import CodesLinear
from pronk.torch_engine.functions import linear
from pronk.torch_engine.model import Linear, Llama
from pronk.train import adapter, lora
from pronk.train.settings import Settings

IDS = [1, 50, 60, 70, 80, 90, 30, 20]
CONFIG = LoraConfig(rank=3, alpha=12, target_modules=("down_proj", "q_proj", "v_proj"), dora=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With biases, whose part of a product is not turned."""
    folder = save_tiny_chat_model(tmp_path_factory.mktemp("model") / "tiny")
    config = tiny_config(vocab_size=259, max_position_embeddings=256, attention_bias=True, mlp_bias=True)
    save_huggingface(folder, config, random_weights(config))
    return folder


def logits(model: Llama) -> Tensor:
    out: Tensor = model(TorchBatch.of(Batch.of([Run(IDS, logits="all")]), torch.device("cpu"), None))
    return out


def shake(model: nn.Module) -> None:
    """Everything that learns, away from where it begins."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, layer in lora.layers(model):
            for name, parameter in layer.learned():
                noise = 0.2 * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
                parameter.copy_(parameter * (1 + noise) if "magnitude" in name else noise)


def shaken(folder: Path, config: LoraConfig = CONFIG) -> Llama:
    model = load_module(checkpoint.open(folder))
    lora.add(model, config)
    shake(model)
    return model


def saved(folder: Path, out: Path, config: LoraConfig = CONFIG) -> tuple[Llama, Path]:
    model = shaken(folder, config)
    out.mkdir(exist_ok=True)
    adapter.save(model, config, str(folder), out)
    return model, out


def layer(bias: bool) -> lora.LoraLinear:
    torch.manual_seed(0)
    base = Linear(6, 5, bias=bias, dtype=torch.float64).requires_grad_(False)
    config = LoraConfig(rank=2, alpha=6.0, dora=True)
    made = lora.LoraLinear(base, (5, 6), config, torch.device("cpu")).to(torch.float64)
    made.begin()
    assert torch.equal(made.lora_magnitude_vector, base.weight.norm(dim=1))
    shake(nn.ModuleList([made]))
    return made


# -- the formula --


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_are_the_papers(bias: bool) -> None:
    """m (W + s B A) / |W + s B A|, the length below a constant (4.3), in float64."""
    made = layer(bias)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    inputs = (x, *(parameter for _, parameter in made.learned()))
    whole = made.base.weight + 3.0 * made.lora_B @ made.lora_A
    weight = whole * (made.lora_magnitude_vector / whole.norm(dim=1).detach())[:, None]
    expected = x @ weight.T + (made.base.bias if bias else 0)
    found = made(x)
    torch.testing.assert_close(found, expected)
    along = torch.randn_like(found)
    mine, theirs = (
        torch.autograd.grad(found, inputs, along),
        torch.autograd.grad(expected, inputs, along, retain_graph=True),
    )
    assert len(mine) == 4
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)
    through = made.base.weight + 3.0 * made.lora_B @ made.lora_A
    other = x @ (through * (made.lora_magnitude_vector / through.norm(dim=1))[:, None]).T
    assert not torch.allclose(torch.autograd.grad(other, made.lora_B, along)[0], theirs[2])  # the inverse


def test_training_begins_where_the_model_was_to_the_bit(folder: Path) -> None:
    model = load_module(checkpoint.open(folder))
    before = logits(model)
    lora.add(model, replace(CONFIG, target_modules=adapters.TARGETS))
    assert torch.equal(logits(model), before)
    shake(model)
    changed = logits(model)
    assert not torch.equal(changed, before)
    with lora.disabled(model):
        assert torch.equal(logits(model), before)
    lora.remove(model)
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("format", ["q4", "q8", "int8"])
def test_beside_codes_lengths_are_those_of_what_the_codes_stand_for(format: str) -> None:
    config = tiny_config(hidden_size=64, intermediate_size=96)
    opened = in_memory(config, random_weights(config))
    model = Llama(opened.config)
    own = opened.tensors["model.layers.0.mlp.down_proj.weight"]
    base = CodesLinear(read(opened, own, format), None, format)
    made = lora.LoraLinear(base, own.shape, LoraConfig(rank=2, dora=True), torch.device("cpu"))  # type: ignore[arg-type]
    made.begin()
    shake(nn.ModuleList([made]))
    whole = base.dequantized() + made.scale * made.lora_B @ made.lora_A
    weight = whole * (made.lora_magnitude_vector / whole.norm(dim=1))[:, None]
    x = torch.randn(5, own.shape[1])
    torch.testing.assert_close(made(x), linear(x, weight), rtol=1e-4, atol=1e-5)
    del model


def test_in_16_bits_a_small_change_of_a_length_is_seen(folder: Path) -> None:
    """A factor of 1.001 is 1 in bfloat16; products of it are not."""
    model = load_module(checkpoint.open(folder))
    lora.add(model, CONFIG)
    lora.narrow(model, torch.bfloat16)
    found = []
    for times in (1.0, 1.002):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for _, one in lora.layers(model):
                assert one.lora_magnitude_vector is not None
                assert one.lora_magnitude_vector.dtype == torch.float32
                one.lora_magnitude_vector.mul_(times)
            found.append(logits(model))
    assert not torch.equal(*found)


# -- files --


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # between PEFT and transformers
@pytest.mark.parametrize("rslora", [False, True])
def test_ours_in_peft_and_peft_s_here(folder: Path, tmp_path: Path, rslora: bool) -> None:
    """Logits and gradients; a gradient is of float32 sums of some hundred terms."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    config = replace(CONFIG, rslora=rslora)
    model, ours = saved(folder, tmp_path / "ours", config)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, ours, is_trainable=True)
    raw = json.loads((ours / adapter.CONFIG).read_text())
    assert (raw["use_dora"], raw["use_rslora"]) == (True, rslora)
    their_logits = theirs(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits(model), their_logits, rtol=1e-4, atol=1e-5)
    torch.nn.functional.cross_entropy(logits(model)[:-1], torch.tensor(IDS[1:])).backward()
    torch.nn.functional.cross_entropy(their_logits[:-1], torch.tensor(IDS[1:])).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    for name, one in lora.layers(model):
        for part, parameter in one.learned():
            expected = gradients.pop(f"base_model.model.{name}.{part}.default.weight")
            torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)
    assert not gradients
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_module(checkpoint.open(folder))
    assert adapter.load(again, tmp_path / "theirs") == config
    assert torch.equal(logits(again), logits(model))
    merged = theirs.merge_and_unload()
    opened = checkpoint.open(folder)
    own = adapters.applied(opened, adapters.open(tmp_path / "theirs", opened))
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(torch.from_numpy(own.tensors[name].read().copy()), weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ["cpu", "torch"])
def test_merged_it_answers_on_both_engines_and_beside_it_is_refused(folder: Path, tmp_path: Path, engine: Any) -> None:
    model, out = saved(folder, tmp_path / "dora")
    with pytest.raises(Unsupported, match=r"is DoRA, .* cannot be kept beside them; merge it: --merge-adapter"):
        pronk.load(folder, adapter=out, engine=engine)
    llm = pronk.load(folder, adapter=out, merge_adapter=True, engine=engine, quantize="f32")
    found = llm.logits(IDS)
    np.testing.assert_allclose(found, logits(model).detach().numpy(), rtol=1e-3, atol=1e-4)
    plain = pronk.load(folder, engine=engine, quantize="f32")
    with pytest.raises(Unsupported, match="is DoRA"):
        plain.add_adapter(out)


def test_it_is_no_adapter_of_llama_cpp_s(folder: Path, tmp_path: Path) -> None:
    _, out = saved(folder, tmp_path / "dora")
    opened = checkpoint.open(folder)
    with pytest.raises(Unsupported, match=r"is DoRA; .*: merge it \(pronk merge BASE ADAPTER DST.gguf\)"):
        adapter_gguf.check(adapters.open(out, opened), opened.config)


def test_merged_with_another_it_counts_as_what_it_changes(folder: Path, tmp_path: Path) -> None:
    """Not as the product of its matrices, which is only a part of that."""
    _, out = saved(folder, tmp_path / "dora")
    opened = checkpoint.open(folder)
    found = adapters.open(out, opened)
    name = "model.layers.0.self_attn.q_proj.weight"
    whole = adapters.applied(opened, found).tensors[name].read()
    own = opened.tensors[name].read()
    half = merging.merged(opened, [merging.Part("dora", found, 0.5)]).tensors[name].read()
    np.testing.assert_allclose(half, own + 0.5 * (whole - own), rtol=1e-5, atol=1e-6)


def edited(out: Path, change: dict[str, Any]) -> None:
    path = out / adapter.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


@pytest.mark.parametrize(
    ("harm", "kind", "problem"),
    [
        (lambda tensors: tensors.pop(first(tensors)), BadFile, "lora_magnitude_vector.*absent"),
        (lambda tensors: tensors.update({first(tensors): np.ones(3, np.float32)}), BadFile, r"shape \(3,\), but this"),
        (lambda tensors: tensors.update({first(tensors): np.float32([np.inf] * 64)}), BadFile, "lora_magnitude_vector"),
    ],
)
def test_a_damaged_one(folder: Path, tmp_path: Path, harm: Any, kind: type[Exception], problem: str) -> None:
    _, out = saved(folder, tmp_path / "dora")
    tensors = {name: one.read() for name, one in safetensors.read(out / adapter.WEIGHTS).items()}
    harm(tensors)
    (out / adapter.WEIGHTS).unlink()
    safetensors.write(out / adapter.WEIGHTS, tensors)
    opened = checkpoint.open(folder)
    with pytest.raises(kind, match=problem):
        adapters.open(out, opened)
    with pytest.raises(kind, match=problem):
        adapter.load(load_module(opened), out)


def first(tensors: dict[str, Any]) -> str:
    return next(name for name in tensors if name.endswith("q_proj.lora_magnitude_vector"))


def test_lengths_that_the_config_does_not_tell_of(folder: Path, tmp_path: Path) -> None:
    _, out = saved(folder, tmp_path / "dora")
    edited(out, {"use_dora": False})
    with pytest.raises(BadFile, match=r"lora_magnitude_vector.*belongs to no module"):
        adapters.open(out, checkpoint.open(folder))
    edited(out, {"use_dora": "yes"})
    with pytest.raises(BadFile, match="use_dora: must be true or false, not 'yes'"):
        adapters.open(out, checkpoint.open(folder))


# -- runs --


def test_a_run_resumed_is_as_if_never_stopped_and_goes_on_from_its_adapter(folder: Path, tmp_path: Path) -> None:
    data = write_sums(tmp_path / "sums.jsonl", lambda a, b: {"completion": f" {a + b}."})
    chosen = Settings(
        str(folder), str(data), lora=LoraConfig(rank=4, dropout=0.1, rslora=True, dora=True), max_steps=6,
        batch_size=2, accumulate=2, lr=1e-2, save_every=3, eval_every=3, lora_plus_ratio=4.0, neftune_alpha=5.0,
    )  # fmt: skip
    assert run_of(chosen, tmp_path / "whole").train()
    left = iter([False, False, False, False, True])
    assert not run_of(chosen, tmp_path / "parts").train(stop=lambda: next(left))
    again = run_of(chosen, tmp_path / "parts")
    torch.manual_seed(77)
    again.resume()
    assert again.train()
    whole, parts = (safetensors.read(tmp_path / name / adapter.WEIGHTS) for name in ("whole", "parts"))
    assert any("magnitude" in name for name in whole)
    assert all(np.array_equal(parts[name].read(), tensor.read()) for name, tensor in whole.items())
    with pytest.raises(BadRequest, match=r"made with dora=True, and now is without"):
        run_of(replace(chosen, lora=LoraConfig(rank=4, dropout=0.1, rslora=True)), tmp_path / "parts").resume()

    run = pronk.finetune(folder, data, tmp_path / "more", from_adapter=tmp_path / "whole", max_steps=2, samples=1,
                         batch_size=2, accumulate=2, device="cpu")  # fmt: skip
    lines = list(run)
    held = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    best = min(line["held_out_loss"] for line in held if "held_out_loss" in line)
    assert lines[0]["held_out_loss"] == pytest.approx(best, abs=1e-5)
    assert run.settings.lora == LoraConfig(4, rslora=True, dora=True, target_modules=tuple(sorted(adapters.TARGETS)))
    assert run.result.method == "DoRA"
    assert run.result.samples  # of the adapter, merged
    card = (tmp_path / "more" / "README.md").read_text()
    assert "--adapter more --merge-adapter" in card
    assert "pronk convert" not in card
    with pytest.raises(BadRequest, match="from_adapter has a rank, an alpha, a kind and modules of its own"):
        pronk.finetune(folder, data, from_adapter=tmp_path / "whole", dora=True)


def test_of_all_weights_it_is_refused(folder: Path) -> None:
    for given in ({"dora": True}, {"rslora": True}, {"lora_plus_ratio": 4.0}):
        with pytest.raises(BadRequest, match="full trains all weights; leave the options of LoRA out"):
            pronk.finetune(folder, "x.jsonl", full=True, **given)  # type: ignore[arg-type]
