"""ModelConfig: everything about a LLaMA model that changes its mathematics, named as Hugging Face names it.

Parsing is strict: a key that would change the logits and that pronk does not honour is refused by name, and so is a key
nobody here has heard of, unless its value switches it off.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pronk.errors import BadFile, Unsupported

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

# Larger than any model there is; small enough that a hostile header can neither overflow nor exhaust anything.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1024,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 30,
}

# Keys of a config.json that do not reach the logits of one forward pass.
_IGNORED = frozenset(
    """architectures model_type torch_dtype dtype transformers_version use_cache initializer_range pretraining_tp
    attention_dropout is_llama_config name_or_path chunk_size_feed_forward output_attentions output_hidden_states
    return_dict tokenizer_class transformers.js_config unsloth_version unsloth_fixed max_length
    id2label label2id problem_type torchscript is_encoder_decoder""".split()
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


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those trained on.

    `factors` divides each of the head_dim / 2 frequencies by a number of its own (GGUF's `rope_freqs.weight`).
    """

    rope_type: Literal["linear", "dynamic", "llama3", "factors"]
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    factors: tuple[float, ...] = ()


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

    def __post_init__(self) -> None:
        for name, limit in _LIMITS.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= limit:
                raise ValueError(f"{name} must be a whole number from 1 to {limit}, not {value!r}")
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be a positive number, not {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) is no multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.rope_scaling:
            _check_rope_scaling(self.rope_scaling, self.head_dim)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, path: str = "config.json") -> ModelConfig:
        """A Hugging Face config.json, already parsed. Raises BadFile (broken) or Unsupported (foreign maths)."""
        config = dict(raw)
        _check_architecture(config, path)
        for key, inert in _INERT.items():
            if config.pop(key, inert[0]) not in inert:
                raise Unsupported(f"{path}: {key}={raw[key]!r} is not supported; only {inert[0]!r} is")
        if set(config.pop("layer_types", None) or ()) - {"full_attention"}:
            raise Unsupported(f"{path}: layer_types other than full_attention are not supported")
        try:
            known = _parse(config)
            if left := [k for k, v in config.items() if not _switched_off(k, v)]:
                raise Unsupported(
                    f"{path}: {left[0]}={str(config[left[0]])[:60]} may change the mathematics and is not supported; "
                    "delete the key if you know that it does not"
                )
            return cls(**known)
        except KeyError as error:
            raise BadFile(path, "required and absent", field=str(error.args[0])) from None
        except (ValueError, TypeError) as error:
            raise BadFile(path, str(error)) from None

    def to_dict(self) -> dict[str, Any]:
        """As a Hugging Face config.json, which `from_dict` reads back (`factors`, unknown there, included)."""
        raw: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
        raw.update({f.name: getattr(self, f.name) for f in fields(self)})
        eos = raw.pop("eos_token_ids")
        raw["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos) or None
        raw["rope_scaling"] = self.rope_scaling and _rope_scaling_to_dict(self.rope_scaling)
        return raw

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor the model has, by its Hugging Face name; lm_head is absent where it is the embedding itself."""
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
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, c)
        return shapes


def _check_architecture(config: dict[str, Any], path: str) -> None:
    names = config.get("architectures") or []
    if not isinstance(names, list) or any(not isinstance(n, str) for n in names):
        raise BadFile(path, "must be a list of names", field="architectures")
    if not names and config.get("model_type") in ("llama", "mistral"):
        return
    if len(names) != 1 or names[0] not in ARCHITECTURES:
        found = ", ".join(names) or "none"
        raise Unsupported(f"{path}: architecture {found} is not supported; {' and '.join(ARCHITECTURES)} are")


def _parse(config: dict[str, Any]) -> dict[str, Any]:
    """Take every key that ModelConfig has out of `config`."""

    def integer(key: str, default: int | None = None) -> int:
        value = config.pop(key) if default is None else config.pop(key, default)
        value = default if value is None else value
        if type(value) is not int:
            raise ValueError(f"{key} must be a whole number, not {value!r}")
        return value

    def number(key: str, default: float, source: dict[str, Any] = config) -> float:
        value = source.pop(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{key} must be a finite number, not {value!r}")
        return float(value)

    def boolean(key: str) -> bool:
        value = config.pop(key, False)
        if not isinstance(value, bool):
            raise ValueError(f"{key} must be true or false, not {value!r}")
        return value

    def token(key: str) -> int | None:
        value = config.pop(key, None)
        if value is not None and (type(value) is not int or value < -1):
            raise ValueError(f"{key} must be a token id, not {value!r}")
        return None if value == -1 else value

    heads, hidden = integer("num_attention_heads"), integer("hidden_size")
    if heads < 1:
        raise ValueError(f"num_attention_heads must be positive, not {heads}")
    if config.get("head_dim") is None and hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads})")

    # transformers 5 writes rope_parameters; before it, rope_theta and rope_scaling stood side by side.
    rope = config.pop("rope_parameters", None) or config.pop("rope_scaling", None) or {}
    if not isinstance(rope, dict):
        raise ValueError(f"rope_scaling must be an object, not {rope!r}")
    rope = dict(rope)
    theta = number("rope_theta", 10000.0, rope if "rope_theta" in rope else config)
    config.pop("rope_theta", None)
    config.pop("rope_scaling", None)

    eos = config.pop("eos_token_id", None)
    eos = eos if isinstance(eos, list) else [] if eos in (None, -1) else [eos]
    if any(type(i) is not int or i < 0 for i in eos):
        raise ValueError(f"eos_token_id must be token ids, not {eos!r}")

    return {
        "vocab_size": integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": integer("intermediate_size"),
        "num_hidden_layers": integer("num_hidden_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": integer("num_key_value_heads", heads),
        "head_dim": integer("head_dim", hidden // heads),
        "max_position_embeddings": integer("max_position_embeddings", 2048),
        "rms_norm_eps": number("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": _parse_rope_scaling(rope, number),
        "attention_bias": boolean("attention_bias"),
        "mlp_bias": boolean("mlp_bias"),
        "tie_word_embeddings": boolean("tie_word_embeddings"),
        "bos_token_id": token("bos_token_id"),
        "eos_token_ids": tuple(eos),
        "pad_token_id": token("pad_token_id"),
    }


def _parse_rope_scaling(rope: dict[str, Any], number: Any) -> RopeScaling | None:
    rope_type: Any = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    rope.pop("type", None)
    if rope_type not in ("default", "linear", "dynamic", "llama3", "factors"):
        raise Unsupported(f"rope_scaling type {rope_type!r} is not supported; linear, dynamic and llama3 are")
    original = rope.pop("original_max_position_embeddings", None)
    if original is not None and (type(original) is not int or original < 1):
        raise ValueError(f"original_max_position_embeddings must be a positive whole number, not {original!r}")
    factor = number("factor", 1.0, rope)
    low, high = number("low_freq_factor", 1.0, rope), number("high_freq_factor", 4.0, rope)
    factors = rope.pop("factors", ())
    if not isinstance(factors, list | tuple) or any(type(f) not in (int, float) for f in factors):
        raise ValueError("rope_scaling factors must be a list of numbers")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("rope_scaling partial_rotary_factor is not supported")
    if rope:
        raise Unsupported(f"rope_scaling key {next(iter(rope))!r} is not supported")
    if rope_type == "default":
        return None
    if rope_type == "llama3" and original is None:
        raise ValueError("rope_scaling llama3 needs original_max_position_embeddings")
    return RopeScaling(rope_type, factor, low, high, original, tuple(map(float, factors)))


def _check_rope_scaling(rope: RopeScaling, head_dim: int) -> None:
    numbers = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, *rope.factors)
    if not all(math.isfinite(x) and x > 0 for x in numbers):
        raise ValueError("rope_scaling factors must be positive numbers")
    if rope.rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError("rope_scaling low_freq_factor must lie under high_freq_factor")
    if rope.rope_type == "factors" and len(rope.factors) != head_dim // 2:
        raise ValueError(f"rope_scaling needs head_dim / 2 = {head_dim // 2} factors, not {len(rope.factors)}")


def _rope_scaling_to_dict(rope: RopeScaling) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": rope.rope_type}
    if rope.rope_type == "factors":
        return raw | {"factors": list(rope.factors)}
    raw["factor"] = rope.factor
    if rope.rope_type == "llama3":
        raw |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.original_max_position_embeddings is not None:
        raw["original_max_position_embeddings"] = rope.original_max_position_embeddings
    return raw


def _switched_off(key: str, value: object) -> bool:
    return key in _IGNORED or key.startswith("_") or value is None or value is False or value in ({}, [])
