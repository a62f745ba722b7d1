"""Every kind of LoRA adapter that PEFT saves and pronk reads, held against PEFT itself."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from formats import save_huggingface
from tiny import in_memory, random_weights, tiny_config

import pronk
from pronk import checkpoint
from pronk.checkpoint import adapter, adapter_config
from pronk.checkpoint.module_patterns import Patterns
from pronk.errors import BadFile, PronkError, Unsupported

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's and transformers' own

IDS = [1, 50, 60, 70, 80, 90, 30, 20]
BASES: dict[str, dict[str, Any]] = {
    "apart": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "deep": {"num_hidden_layers": 11, "attention_bias": True},
}
LINEAR = list(adapter.TARGETS)

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "rank pattern": ("apart", {"target_modules": LINEAR, "rank_pattern": {"q_proj": 5, "layers.1.mlp.up_proj": 1}}),
    "alpha pattern": ("apart", {"target_modules": LINEAR, "alpha_pattern": {"v_proj": 3, "0.self_attn.q_proj": 1}}),
    "the first match counts": (
        "apart",
        {"target_modules": LINEAR, "rank_pattern": {"model.layers.1.self_attn.q_proj": 3, "q_proj": 5},
         "alpha_pattern": {"self_attn.q_proj": 1, "layers.1.self_attn.q_proj": 32}},
    ),
    "rslora with patterns": (
        "apart",
        {"target_modules": LINEAR, "use_rslora": True, "rank_pattern": {"k_proj": 7}, "alpha_pattern": {"k_proj": 3}},
    ),
    "patterns that are expressions": (
        "deep",
        {"target_modules": LINEAR, "rank_pattern": {r"^model\.layers\.(1|10)\..*proj": 3, "[qk]_proj": 4},
         "alpha_pattern": {r".*layers\.\d+\.mlp.*": 2, "v_proj|o_proj": 5}},
    ),
    "layers_to_transform": ("deep", {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1, 10]}),
    "one layer": ("deep", {"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": "layers"}),
    "layers_pattern": (
        "deep", {"target_modules": ["q_proj"], "layers_to_transform": [2], "layers_pattern": ["h", "model.layers"]},
    ),
    "exclude_modules": ("apart", {"target_modules": LINEAR, "exclude_modules": ["up_proj", "0.self_attn.q_proj"]}),
    "excluded by an expression": ("apart", {"target_modules": LINEAR, "exclude_modules": r".*layers\.1\..*"}),
    "an expression": ("apart", {"target_modules": r"model\.layers\.[01]\.(self_attn\.[qv]_proj|mlp\.up_proj)"}),
    "all-linear": ("apart", {"target_modules": "all-linear"}),
    "whole names": ("apart", {"target_modules": ["model.layers.0.self_attn.q_proj", "layers.1.mlp.up_proj"]}),
    "bias lora_only": ("biases", {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"}),
    "bias all": ("biases", {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "bias all, of none": ("apart", {"target_modules": ["q_proj"], "bias": "all"}),
    "head saved": ("apart", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "norms saved": ("apart", {"target_modules": ["q_proj"], "modules_to_save": ["norm"]}),
    "a matrix saved": ("biases", {"target_modules": ["q_proj", "up_proj"], "modules_to_save": ["mlp"]}),
    "embedding and head saved": ("apart", {"target_modules": LINEAR, "modules_to_save": ["embed_tokens", "lm_head"]}),
    "embedding": ("apart", {"target_modules": ["embed_tokens", "q_proj"]}),
    "head": ("apart", {"target_modules": ["lm_head"]}),
    "embedding and head, of ranks": (
        "apart",
        {"target_modules": ["embed_tokens", "lm_head"], "rank_pattern": {"embed_tokens": 4},
         "alpha_pattern": {"lm_head": 2}},
    ),
    "tied: embedding": ("tied", {"target_modules": ["embed_tokens"]}),
    "tied: head": ("tied", {"target_modules": ["lm_head", "q_proj"]}),
    "tied: both": ("tied", {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied: both alike": ("tied", {"target_modules": ["embed_tokens", "lm_head"], "ensure_weight_tying": True}),
    "tied: named one, alike": ("tied", {"target_modules": ["lm_head"], "ensure_weight_tying": True}),
    "tied: embedding saved": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "tied: head saved": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "tied: both saved": ("tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied: both saved, alike": (
        "tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, changes in BASES.items():
        config = tiny_config(**changes)
        folders[name] = tmp_path_factory.mktemp("base") / name
        save_huggingface(folders[name], config, random_weights(config))
    return folders


def saved(base: Path, folder: Path, seed: int = 1, **options: Any) -> tuple[Any, np.ndarray[Any, Any]]:
    """An adapter with random numbers in all that it trains, made and saved by PEFT; as PEFT loads it, and its logits.

    PEFT sorts patterns when it saves, and from then on the first of the sorted counts.
    """
    for key in ("rank_pattern", "alpha_pattern"):
        options[key] = dict(sorted(options.get(key, {}).items()))
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = {"r": 2, "lora_alpha": 6, "task_type": "CAUSAL_LM", **options}
    model = peft.get_peft_model(model, peft.LoraConfig(**options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    base_model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base_model, folder)
    with torch.no_grad():
        return model, model(torch.tensor([IDS])).logits[0].numpy()


def held_against_peft(base: Path, folder: Path, expected: np.ndarray[Any, Any]) -> adapter.Adapter:
    opened = checkpoint.open(base)
    found = adapter.open(folder, opened)
    merged = adapter.applied(opened, found)
    assert merged.tensors.keys() == merged.config.tensor_shapes().keys()
    logits = pronk.load(merged, engine="cpu").logits(IDS)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_what_peft_saves_is_read(kind: str, bases: dict[str, Path], tmp_path: Path) -> None:
    base, options = KINDS[kind]
    _, expected = saved(bases[base], tmp_path, **options)
    found = held_against_peft(bases[base], tmp_path, expected)
    numbers = sum(p.a.size + p.b.size for p in found.products.values())
    assert found.nbytes >= 2 * numbers > 0
    for module, product in found.products.items():
        assert product.a.dtype == product.b.dtype == np.float32
        assert product.a.shape[0] == product.b.shape[1]
        assert (product.b.shape[0], product.a.shape[1]) == checkpoint.open(bases[base]).config.tensor_shapes().get(
            f"{module}.weight", (96, 64)
        )


def test_merged_weights_are_peft_s(bases: dict[str, Path], tmp_path: Path) -> None:
    """Tensor by tensor, to rounding in float32."""
    kind = {"target_modules": LINEAR, "use_rslora": True, "rank_pattern": {"q_proj": 5}, "alpha_pattern": {"v_proj": 3}}
    model, _ = saved(bases["biases"], tmp_path, bias="all", modules_to_save=["norm", "lm_head"], **kind)
    theirs = model.merge_and_unload().state_dict()
    opened = checkpoint.open(bases["biases"])
    ours = adapter.applied(opened, adapter.open(tmp_path, opened)).tensors
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        np.testing.assert_allclose(tensor.read(), theirs[name].numpy(), rtol=1e-5, atol=1e-6, err_msg=name)


def combination(draw: random.Random, base: str) -> dict[str, Any]:
    pieces = ["q_proj", "self_attn.q_proj", "layers.1.self_attn.q_proj", "mlp.up_proj", "1.mlp.up_proj", "up_proj",
              "model.layers.0.mlp.down_proj", "layers.0.mlp.down_proj", "[kv]_proj", r"layers\.1\..*", "^model.*o_proj",
              "q_proj|o_proj", "embed_tokens", "lm_head", "layer.1.up_proj", "o.proj"]  # fmt: skip
    options: dict[str, Any] = {
        "target_modules": draw.choice([LINEAR, "all-linear", draw.sample(LINEAR, 3), ["q_proj", "embed_tokens"],
                                       r".*\.(q|up|down)_proj", [*LINEAR, "lm_head"]]),
        "r": draw.randint(1, 4), "lora_alpha": draw.choice([1, 4, 2.5]), "use_rslora": draw.random() < 0.4,
        "rank_pattern": {key: draw.randint(1, 6) for key in draw.sample(pieces, draw.randint(0, 5))},
        "alpha_pattern": {key: draw.randint(1, 9) for key in draw.sample(pieces, draw.randint(0, 5))},
        "bias": draw.choice(["none", "lora_only", "all"]),
    }  # fmt: skip
    if draw.random() < 0.3 and options["target_modules"] == LINEAR:
        options |= {
            "layers_to_transform": draw.choice([[1], 0, [0, 1]]),
            "layers_pattern": draw.choice([None, "layers"]),
        }
    if draw.random() < 0.3:
        options["exclude_modules"] = draw.choice([["up_proj"], ["layers.1.self_attn.q_proj"], r".*v_proj"])
    if draw.random() < 0.4:
        options["modules_to_save"] = draw.choice(
            [["lm_head"], ["norm"], ["o_proj"], ["embed_tokens"], ["input_layernorm"]]
        )
        if set(options["modules_to_save"]) & set(options["target_modules"]):
            del options["modules_to_save"]  # one or the other
    return options


@pytest.mark.parametrize("seed", range(24))
def test_random_combinations_against_peft(seed: int, bases: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(seed)
    base = draw.choice(["apart", "tied", "biases"])
    _, expected = saved(bases[base], tmp_path, seed, **combination(draw, base))
    held_against_peft(bases[base], tmp_path, expected)


@pytest.mark.parametrize("key", ["q_proj", "o.proj", "layers.1", "1.self_attn.q_proj", "roj", "", ".",
                                 "layers...self_attn.q_proj",
                                 r"layers\.\d+\..*", "[a-k]_proj", "(?:q|k)_proj", "q_proj$", "^q_proj",
                                 "x|up_proj", "l?m_head"])  # fmt: skip
def test_the_rule_of_patterns_is_peft_s(key: str, tmp_path: Path) -> None:
    from peft.utils.other import get_pattern_key

    modules = [name.removesuffix(".weight") for name in tiny_config(num_hidden_layers=12).tensor_shapes()]
    patterns = Patterns(tmp_path, "rank_pattern", {key: 5, "q_proj": 6})
    for module in modules:
        expected = {key: 5, "q_proj": 6}.get(get_pattern_key([key, "q_proj"], module), 7)
        assert patterns.of(module, 7) == expected, module


@pytest.mark.parametrize(
    "key", ["(a+)+b", "(.*)*x", "(a|aa)+$", r"(\w+)\1", "(?=a)q_proj", "a{1,900}", ".*.*.*.*q", "(?i)Q_PROJ"]
)
def test_expressions_that_could_run_for_long_are_refused_by_name(key: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"alpha_pattern: the pattern .* is not supported; names are, and"):
        Patterns(tmp_path, "alpha_pattern", {key: 1})


@pytest.fixture(scope="module")
def sound(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    saved(bases["biases"], folder, target_modules=["q_proj", "up_proj"], bias="lora_only", modules_to_save=["lm_head"])
    return folder


@pytest.mark.parametrize(
    ("change", "kind", "problem"),
    [
        ({"use_dora": True}, BadFile, "lora_magnitude_vector.*absent: it is no adapter"),
        ({"lora_bias": True}, Unsupported, "lora_bias=True is not supported"),
        ({"trainable_token_indices": [1]}, Unsupported, "trainable_token_indices="),
        ({"target_parameters": ["x"]}, Unsupported, "target_parameters="),
        ({"layer_replication": [[0, 1]]}, Unsupported, "layer_replication="),
        ({"fan_in_fan_out": True}, Unsupported, "fan_in_fan_out=True"),
        ({"bias": "some"}, Unsupported, "bias='some' is not supported; none, lora_only and all are"),
        ({"bias": "all"}, BadFile, "absent, which adapter_config.json says was trained"),
        ({"bias": "none"}, BadFile, "is none of those that adapter_config.json says were trained"),
        ({"modules_to_save": ["lm_head", "norm"]}, BadFile, "absent, which adapter_config.json says was trained"),
        ({"target_modules": ["q_proj"]}, BadFile, "has a module that adapter_config.json does not name"),
        ({"target_modules": ["q_proj", "up_proj", "k_proj"]}, BadFile, "absent: it is no adapter of this model"),
        ({"rank_pattern": {"q_proj": 3}}, BadFile, r"shape \(2, 64\), but this model wants \(3, 64\)"),
        ({"rank_pattern": {"q_proj": 0}}, BadFile, "the rank of LoRA must be"),
        ({"alpha_pattern": {"q_proj": "x"}}, BadFile, "alpha must be a positive number"),
        ({"alpha_pattern": ["q_proj"]}, BadFile, "alpha_pattern: must map names to numbers"),
        ({"rank_pattern": {"(a+)+": 3}}, Unsupported, "rank_pattern: the pattern"),
        ({"layers_to_transform": ["x"]}, BadFile, "layers_to_transform: must be numbers of layers"),
        ({"exclude_modules": 3}, BadFile, "exclude_modules: must be a list of names"),
        ({"target_modules": []}, BadFile, "has a module that adapter_config.json does not name"),
        ({"target_modules": None}, Unsupported, "names, or an expression, are"),
    ],
)
def test_what_is_refused(
    sound: Path, bases: dict[str, Path], tmp_path: Path, change: dict[str, Any], kind: type[PronkError], problem: str
) -> None:
    told = json.loads((sound / adapter.CONFIG).read_text())
    (tmp_path / adapter.CONFIG).write_text(json.dumps(told | change))
    (tmp_path / adapter.WEIGHTS).write_bytes((sound / adapter.WEIGHTS).read_bytes())
    with pytest.raises(kind, match=problem):
        adapter.open(tmp_path, checkpoint.open(bases["biases"]))


def test_a_vocabulary_that_grew(sound: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    weights = safetensors.numpy.load_file(sound / adapter.WEIGHTS)
    name = "base_model.model.lm_head.weight"
    weights[name] = np.concatenate([weights[name], weights[name][:2]])
    safetensors.numpy.save_file(weights, tmp_path / adapter.WEIGHTS)
    (tmp_path / adapter.CONFIG).write_text((sound / adapter.CONFIG).read_text())
    with pytest.raises(BadFile, match=r"shape \(98, 64\), but this model wants \(96, 64\)"):
        adapter.open(tmp_path, checkpoint.open(bases["biases"]))


def test_infinity_in_what_was_saved_whole(sound: Path, bases: dict[str, Path], tmp_path: Path) -> None:
    weights = safetensors.numpy.load_file(sound / adapter.WEIGHTS)
    weights["base_model.model.lm_head.weight"][3, 3] = np.inf
    safetensors.numpy.save_file(weights, tmp_path / adapter.WEIGHTS)
    (tmp_path / adapter.CONFIG).write_text((sound / adapter.CONFIG).read_text())
    opened = checkpoint.open(bases["biases"])
    merged = adapter.applied(opened, adapter.open(tmp_path, opened))
    with pytest.raises(BadFile, match=r"adapter_model.safetensors: tensor 'lm_head.weight': holds infinity"):
        merged.tensors["lm_head.weight"].read()


def test_training_goes_on_from_plain_adapters_alone(sound: Path) -> None:
    with pytest.raises(Unsupported, match="bias='lora_only' is not supported in training"):
        adapter.read_config(sound)
    assert adapter_config.read(sound).base


def test_a_tied_model_s_head_is_its_own_where_only_one_of_both_changes() -> None:
    config = tiny_config(tie_word_embeddings=True)
    base = in_memory(config, random_weights(config))
    for module in ("lm_head", "model.embed_tokens"):
        product = adapter.LowRank(np.ones((1, 64), np.float32), np.ones((96, 1), np.float32), 0.5)
        merged = adapter.applied(base, adapter.Adapter(Path("a"), {module: product}, {}, 0))
        assert not merged.config.tie_word_embeddings
        own = base.tensors["model.embed_tokens.weight"].read()
        for name in ("lm_head", "model.embed_tokens"):
            assert np.array_equal(merged.tensors[f"{name}.weight"].read(), own + 0.5 * (name == module))
