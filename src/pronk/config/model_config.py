"""ModelConfig: everything about a LLaMA model that changes its mathematics, named as Hugging Face names it.

Parsing is strict: a key that would change the logits and that pronk does not honour is refused by name, and so is a key
nobody here has heard of, unless its value switches it off.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pronk.config import rope_scaling as rope_scalings
from pronk.config.rope_scaling import LONGEST_CONTEXT, RopeScaling, number
from pronk.errors import BadFile, Unsupported, short

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_CLASSIFIERS = ("LlamaForSequenceClassification", "MistralForSequenceClassification")  # of one label: reward models

# Larger than any model there is; small enough that a hostile header can neither overflow nor exhaust anything.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": LONGEST_CONTEXT,
}

# Keys of a config.json that do not reach the logits of one forward pass; the last three lines are settings of
# generation, which older versions of transformers kept here.
_IGNORED = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range pretraining_tp
    attention_dropout is_llama_config name_or_path chunk_size_feed_forward output_attentions output_hidden_states
    return_dict return_dict_in_generate tokenizer_class transformers.js_config unsloth_version unsloth_fixed
    max_sequence_length id2label label2id problem_type torchscript is_encoder_decoder task_specific_params
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p
    typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size num_return_sequences
    output_scores remove_invalid_values bad_words_ids suppress_tokens begin_suppress_tokens""".split()
)

# Keys that would change the mathematics, with the only values under which they do not.
_INERT: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False, None),
    "partial_rotary_factor": (1.0, 1, None),
    "sliding_window": (None,),
    "use_sliding_window": (False, None),
    "add_cross_attention": (False, None),
    "is_decoder": (True, False, None),
}

# Where MistralConfig's default is not LlamaConfig's, the key must be there.
_REQUIRED_OF_MISTRAL = ("num_key_value_heads", "max_position_embeddings", "sliding_window")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    num_labels: int | None = None  # 1: a reward model, whose score.weight stands where lm_head is of others

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name} must be a whole number from 1 to {limit}, not {value!r}")
        for name, most in (("rms_norm_eps", 1.0), ("rope_theta", 1e15)):
            value = getattr(self, name)
            if not 0 < value <= most:
                raise ValueError(f"{name} must be a positive number up to {most:g}, not {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is no multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.rope_scaling:
            rope_scalings.check(self.rope_scaling, self.head_dim)
        if self.num_labels not in (None, 1):
            raise ValueError(f"num_labels must be 1, or None for a model that predicts tokens, not {self.num_labels!r}")

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, path: str = "config.json") -> ModelConfig:
        """A Hugging Face config.json, already parsed. Raises BadFile (broken) or Unsupported (foreign maths)."""
        _check_architecture(raw, path)
        if quantization := raw.get("quantization_config"):
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            raise Unsupported(
                f"{path}: quantization_config ({short(method)}) is about tensors, and no part of a ModelConfig; "
                "pronk.load reads it"
            )
        config = {key: value for key, value in raw.items() if value is not None}  # null is a key's default
        for key, inert in _INERT.items():
            if config.pop(key, inert[0]) not in inert:
                raise Unsupported(f"{path}: {key}={short(raw[key])} is not supported; only {inert[0]!r} is")
        layer_types = config.pop("layer_types", [])
        if not isinstance(layer_types, list) or any(kind != "full_attention" for kind in layer_types):
            raise Unsupported(f"{path}: layer_types={short(layer_types)} are not supported; only full_attention is")
        try:
            labels = _labels(config, raw)
            known = {**_parse(config), "num_labels": labels}
            if left := [k for k, v in config.items() if not _switched_off(k, v)]:
                raise Unsupported(
                    f"{short(left[0])}={short(config[left[0]])} may change the mathematics and is not "
                    "supported; delete the key if you know that it does not"
                )
            return cls(**known)
        except Unsupported as error:
            raise Unsupported(f"{path}: {error}") from None
        except KeyError as error:
            raise BadFile(path, "required and absent", field=str(error.args[0])) from None
        except (ValueError, OverflowError) as error:
            raise BadFile(path, str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """As a Hugging Face config.json, which `from_dict` reads back (`factors`, unknown there, included)."""
        raw: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        raw.update({f.name: getattr(self, f.name) for f in fields(self)})
        eos = raw.pop("eos_token_ids")
        raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        raw["rope_scaling"] = self.rope_scaling and rope_scalings.to_dict(self.rope_scaling)
        if raw.pop("num_labels"):  # which transformers counts
            raw |= {"architectures": [_CLASSIFIERS[0]], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        return raw

    @property
    def has_head(self) -> bool:
        """Whether lm_head is a matrix of its own."""
        return not (self.tie_word_embeddings or self.num_labels)

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model has, by its Hugging Face name; lm_head is absent where it is the embedding itself, and
        of a reward model."""
        c, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q, c),
            "self_attn.k_proj": (kv, c),
            "self_attn.v_proj": (kv, c),
            "self_attn.o_proj": (c, q),
            "mlp.gate_proj": (f, c),
            "mlp.up_proj": (f, c),
            "mlp.down_proj": (c, f),
        }
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, c)}
        for layer in range(self.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            shapes[prefix + "input_layernorm.weight"] = (c,)
            shapes[prefix + "post_attention_layernorm.weight"] = (c,)
            for name, shape in linears.items():
                shapes[f"{prefix}{name}.weight"] = shape
                if self.attention_bias if name.startswith("self_attn") else self.mlp_bias:
                    shapes[f"{prefix}{name}.bias"] = shape[:1]
        shapes["model.norm.weight"] = (c,)
        if self.has_head:
            shapes["lm_head.weight"] = (self.vocab_size, c)
        if self.num_labels:
            shapes["score.weight"] = (self.num_labels, c)
        return shapes


def _check_architecture(config: Mapping[str, Any], path: str) -> None:
    names, model_type = config.get("architectures") or [], config.get("model_type")
    if not isinstance(names, list) or any(not isinstance(n, str) for n in names):
        raise BadFile(path, "must be a list of names", field="architectures")
    if not names and model_type in ("llama", "mistral"):
        names = [f"{model_type.title()}ForCausalLM"]
    if len(names) != 1 or names[0] not in (*ARCHITECTURES, *_CLASSIFIERS):
        found = short(", ".join(names)) if names else "none"
        raise Unsupported(f"{path}: architecture {found} is not supported; {' and '.join(ARCHITECTURES)} are")
    if names[0].startswith("Mistral"):
        for key in _REQUIRED_OF_MISTRAL:
            if key not in config:
                raise Unsupported(f"{path}: a Mistral model without {key}, whose default is not Llama's; add the key")


def _labels(config: dict[str, Any], raw: Mapping[str, Any]) -> int | None:
    """Of a classifier, 1; taken out of `config`. Raises Unsupported for more."""
    if (raw.get("architectures") or [""])[0] not in _CLASSIFIERS:
        return None
    named, said = config.pop("id2label", None), config.pop("num_labels", None)
    found = said if named is None else len(named) if isinstance(named, dict) else named
    found = 2 if found is None else found  # transformers' default, which it does not write down
    if found != 1 or said not in (None, 1) or type(found) is bool:
        wrong = short(found if found != 1 else said)
        raise Unsupported(f"num_labels={wrong} is not supported; only a reward model's 1 is")
    return 1


def _parse(config: dict[str, Any]) -> dict[str, Any]:
    """Take every key that ModelConfig has out of `config`, in which no value is None."""

    def integer(key: str, default: int | None = None) -> int:
        value = config.pop(key) if default is None else config.pop(key, default)
        if type(value) is not int:
            raise ValueError(f"{key} must be a whole number, not {short(value)}")
        return value

    def boolean(key: str) -> bool:
        value = config.pop(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, not {short(value)}")
        return value

    def token(key: str) -> int | None:
        value = config.pop(key, -1)
        if type(value) is not int or not -1 <= value < 1 << 31:
            raise ValueError(f"{key} must be a token id, not {short(value)}")
        return None if value == -1 else value

    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    if heads < 1:
        raise ValueError(f"num_attention_heads must be positive, not {heads}")
    if "head_dim" not in config and hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})")

    # transformers 5 writes rope_parameters; before it, rope_theta and rope_scaling stood side by side.
    before = config.pop("rope_scaling", {})
    rope = config.pop("rope_parameters", before)
    if before and before != rope:
        raise ValueError("rope_parameters and rope_scaling contradict each other; delete one of them")
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling must be an object, not {short(rope)}")
    rope = {key: value for key, value in rope.items() if value is not None}
    theta = number(config, "rope_theta", 10000.0)
    theta = number(rope, "rope_theta", theta)
    context = integer("max_position_embeddings", 2048)

    eos = config.pop("eos_token_id", None)
    return {
        "vocab_size": integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer("intermediate_size"),
        "num_hidden_layers": integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("num_key_value_heads", heads),
        "head_dim": integer("head_dim", hidden // heads),
        "max_position_embeddings": context,
        "rms_norm_eps": number(config, "rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": rope_scalings.parse(rope, context),
        "attention_bias": boolean("attention_bias"),
        "mlp_bias": boolean("mlp_bias"),
        "tie_word_embeddings": boolean("tie_word_embeddings"),
        "bos_token_id": token("bos_token_id"),
        "eos_token_ids": end_ids(None if eos == -1 else eos),
        "pad_token_id": token("pad_token_id"),
    }


def end_ids(given: object) -> tuple[int, ...]:
    """What an `eos_token_id` of JSON stands for: one, several, or none. Raises ValueError."""
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(type(i) is not int or not 0 <= i < 1 << 31 for i in ids):
        raise ValueError(f"eos_token_id must be token ids, not {short(ids)}")
    return tuple(ids)


def _switched_off(key: str, value: object) -> bool:
    return key in _IGNORED or key.startswith("_") or value is False or value in ({}, [])
