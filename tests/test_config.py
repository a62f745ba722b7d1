"""ModelConfig's strict parsing, with transformers' LlamaConfig as the one that writes and reads the files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tiny import tiny_config
from transformers import LlamaConfig, MistralConfig

from pronk.config import ModelConfig, RopeScaling
from pronk.errors import BadFile, PronkError, Unsupported

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
RAW: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict(RAW | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        {"head_dim": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "eos_token_id": [2, 7]},
        {"rope_theta": 500000.0},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
)
def test_what_transformers_saves_is_read(changes: dict[str, Any]) -> None:
    theirs = LlamaConfig(**SIZES, **changes, architectures=["LlamaForCausalLM"])
    ours = ModelConfig.from_dict(json.loads(theirs.to_json_string(use_diff=False)))
    for name in (*SIZES, "head_dim", "max_position_embeddings", "rms_norm_eps", "attention_bias", "mlp_bias"):
        assert getattr(ours, name) == getattr(theirs, name), name
    rope = theirs.rope_parameters
    assert ours.rope_theta == rope["rope_theta"]
    assert (ours.rope_scaling.rope_type if ours.rope_scaling else "default") == rope["rope_type"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert list(ours.eos_token_ids) == (theirs.eos_token_id if "eos_token_id" in changes else [2])


def test_the_file_transformers_4_wrote_is_read() -> None:
    config = parse(rope_theta=500000.0, rope_scaling=LLAMA3, torch_dtype="bfloat16", pretraining_tp=1, eos_token_id=2)
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == RopeScaling("linear", 2.0)
    assert parse(rope_scaling=None, head_dim=None, num_key_value_heads=None).num_key_value_heads == 8


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        RopeScaling("linear", 2.0),
        RopeScaling("dynamic", 2.0),
        RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        RopeScaling("factors", factors=(1.0, 2.0, 3.0, 4.0)),
    ],
)
def test_to_dict_and_from_dict_are_inverse(scaling: RopeScaling | None) -> None:
    config = tiny_config(rope_scaling=scaling, attention_bias=True, eos_token_ids=(2, 5), bos_token_id=None)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": [], "model_type": "gpt2"}, "architecture none"),
        ({"architectures": ["LlamaForCausalLM", "MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"sliding_window": 4096}, "sliding_window=4096"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
        ({"layer_types": [["full_attention"]]}, "layer_types"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, "auto_map"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config ('bitsandbytes')"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta": 1}}, "'beta'"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "'factor'"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024}},
            "original_max_position_embeddings",
        ),
    ],
)
def test_foreign_mathematics_is_refused_by_name(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(Unsupported) as caught:
        ModelConfig.from_dict(RAW | changes, path="some/config.json")
    assert name in str(caught.value)
    assert str(caught.value).startswith("some/config.json")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"hidden_size": 63}, "hidden_size"),
        ({"hidden_size": 8 * 10**30}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 1 << 63}, "num_hidden_layers"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "too large"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, None]}, "eos_token_id"),
        ({"bos_token_id": -2}, "bos_token_id"),
        ({"architectures": "LlamaForCausalLM"}, "architectures"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": float("inf")}}, "factor"),
        ({"rope_scaling": {k: v for k, v in LLAMA3.items() if k != "original_max_position_embeddings"}}, "original"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 10**30}}, "original"),
        ({"rope_scaling": {"rope_type": "factors", "factors": [1.0]}}, "4 factors"),
    ],
)
def test_broken_values_name_their_key(changes: dict[str, Any], name: str) -> None:
    with pytest.raises(BadFile, match=name):
        parse(**changes)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(BadFile, match=f"{key}: required"):
        ModelConfig.from_dict({k: v for k, v in RAW.items() if k != key})


@pytest.mark.parametrize("odd", [[], {}, "x", [[]], {"a": []}, 1e308, -1, 10**39, True, "\ud800\n"])
def test_any_key_may_hold_anything(odd: Any) -> None:
    """Only pronk's own errors, in one line, for any value under any key."""
    for key in (*RAW, "rope_scaling", "rope_parameters", "layer_types", "eos_token_id", "rope_theta", "unheard_of"):
        try:
            parse(**{key: odd})
        except PronkError as error:
            assert "\n" not in str(error)  # noqa: PT017
            str(error).encode()


def test_mistral_without_a_sliding_window() -> None:
    theirs = MistralConfig(**SIZES, sliding_window=None, architectures=["MistralForCausalLM"])
    assert ModelConfig.from_dict(theirs.to_dict()).max_position_embeddings == theirs.max_position_embeddings
    with pytest.raises(Unsupported, match="sliding_window"):
        ModelConfig.from_dict(MistralConfig(**SIZES, architectures=["MistralForCausalLM"]).to_dict())


@pytest.mark.parametrize("key", ["sliding_window", "num_key_value_heads", "max_position_embeddings"])
def test_mistral_leaves_out_no_key_whose_default_is_not_llamas(key: str) -> None:
    raw = MistralConfig(**SIZES, sliding_window=None, architectures=["MistralForCausalLM"]).to_dict()
    with pytest.raises(Unsupported, match=key):
        ModelConfig.from_dict({k: v for k, v in raw.items() if k != key})


def test_tensor_shapes_are_those_of_transformers() -> None:
    from transformers import LlamaForCausalLM

    for changes in ({}, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 10}):
        config = tiny_config(**changes)
        theirs = LlamaForCausalLM(LlamaConfig(**config.to_dict())).state_dict()
        if config.tie_word_embeddings:
            del theirs["lm_head.weight"]
        assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == config.tensor_shapes()


def test_two_statements_of_rope_must_agree() -> None:
    """transformers prefers one and pronk the other: different logits, and not a word."""
    raw = tiny_config().to_dict()
    linear = {"rope_type": "linear", "factor": 4.0}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    with pytest.raises(BadFile, match="contradict"):
        ModelConfig.from_dict(raw | {"rope_scaling": linear, "rope_parameters": plain})
    both = ModelConfig.from_dict(raw | {"rope_scaling": linear, "rope_parameters": linear})
    assert both.rope_scaling == RopeScaling("linear", 4.0)
