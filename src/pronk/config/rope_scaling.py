"""RopeScaling: how rotary frequencies are stretched for long contexts, and its form in a config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from pronk.errors import Unsupported, short

LONGEST_CONTEXT = 1 << 30  # tokens; longer than any model's, so that a hostile file cannot exhaust anything

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "factors": ("factors",),
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


def parse(rope: dict[str, Any], context: int) -> RopeScaling | None:
    """`rope_scaling` of a model trained for `context` tokens. Raises Unsupported and ValueError."""
    old_name = rope.pop("type", "default")
    rope_type = rope.pop("rope_type", old_name)
    if not isinstance(rope_type, str) or rope_type not in _KEYS:
        raise Unsupported(f"rope_scaling type {short(rope_type)} is not supported; linear, dynamic and llama3 are")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("rope_scaling partial_rotary_factor is not supported")
    original = rope.get("original_max_position_embeddings", context)
    if type(original) is not int or original < 1:
        raise ValueError(f"original_max_position_embeddings must be a positive whole number, not {short(original)}")
    if rope_type != "llama3":
        rope.pop("original_max_position_embeddings", None)
        if rope_type == "dynamic" and original != context:  # transformers stretches from max_position_embeddings on
            raise Unsupported("rope_scaling dynamic with an original_max_position_embeddings of its own")
    if strange := rope.keys() - set(_KEYS[rope_type]):
        raise Unsupported(f"rope_scaling key {short(min(strange))} is not supported in type {rope_type}")
    if missing := [key for key in _KEYS[rope_type] if key not in rope]:
        raise ValueError(f"rope_scaling of type {rope_type} needs {missing[0]}")
    if rope_type == "default":
        return None
    if rope_type == "factors":
        factors = rope["factors"]
        if not isinstance(factors, list | tuple) or any(type(f) not in (int, float) for f in factors):
            raise ValueError("rope_scaling factors must be a list of numbers")
        return RopeScaling("factors", factors=tuple(map(float, factors)))
    factor = number(rope, "factor")
    if rope_type == "llama3":
        low, high = number(rope, "low_freq_factor"), number(rope, "high_freq_factor")
        return RopeScaling("llama3", factor, low, high, original)
    return RopeScaling("linear" if rope_type == "linear" else "dynamic", factor)


def check(rope: RopeScaling, head_dim: int) -> None:
    """Raises ValueError."""
    numbers = (rope.factor, rope.low_freq_factor, rope.high_freq_factor, *rope.factors)
    if not all(0 < x <= 1e6 for x in numbers):
        raise ValueError("rope_scaling factors must be positive numbers up to a million")
    original = rope.original_max_position_embeddings
    if rope.rope_type == "llama3" and not 1 <= (original or 0) <= LONGEST_CONTEXT:
        raise ValueError(f"rope_scaling original_max_position_embeddings is out of range: {original!r}")
    if rope.rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise ValueError("rope_scaling low_freq_factor must lie under high_freq_factor")
    if rope.rope_type == "factors" and len(rope.factors) != head_dim // 2:
        raise ValueError(f"rope_scaling needs head_dim / 2 = {head_dim // 2} factors, not {len(rope.factors)}")


def to_dict(rope: RopeScaling) -> dict[str, Any]:
    keys = _KEYS[rope.rope_type]
    return {"rope_type": rope.rope_type} | {key: getattr(rope, key) for key in keys}


def number(source: dict[str, Any], key: str, default: float | None = None) -> float:
    value = source.pop(key) if default is None else source.pop(key, default)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, not {short(value)}")
    return float(value)
