"""Which format each weight matrix of a checkpoint is packed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Literal, get_args

from pronk.checkpoint import wishes
from pronk.checkpoint.tensors import Checkpoint
from pronk.errors import BadRequest

Quantize = Literal["auto", "f32", "f16", "bf16", "int8", "llm-int8", "q8", "q4"]
Wish = str | Mapping[str, str]  # a format for all, or for tensors whose names begin so: the longest beginning decides

_LONGEST_INT8_ROW = 1 << 16  # beyond it, sums of products would not fit in 32 bits

# What holds a stored type, exactly or most nearly; all others are packed in 8 bits, which keep nearly all of Q5 and Q6.
# Q2 and Q3 have a scale for each 16 weights: four bits with one for 32 would lose what they hold.
_KEEPS = {
    "F32": "f32", "F16": "f16", "BF16": "bf16", "INT8": "int8", "LLM_INT8": "llm-int8", "Q4_0": "q4_0", "Q4_1": "q4",
    "Q4_K": "q4",
}  # fmt: skip
_WIDTHS = {"q4_0": 0, "q4": 1, "q8": 2, "int8": 2, "llm-int8": 2, "f16": 3, "bf16": 3, "f32": 4}
# Formats that leave embeddings and lm_head in q8 where these are not named, and the stored types that they take as they
# are even there. Four bits cost more quality there than anywhere else; LLM.int8() leaves both in 16 bits.
_SPARING = {"q4": ("Q4_0", "Q4_1", "Q4_K"), "llm-int8": ("INT8", "LLM_INT8")}


@dataclass(frozen=True)
class Slot:
    """A matrix of the model, and the tensor that fills it; gate_proj and up_proj fill one."""

    role: str
    layer: int  # -1: of none
    tensors: tuple[str, ...]
    format: str


def slots(checkpoint: Checkpoint, quantize: Wish) -> list[Slot]:
    """Every weight matrix. "auto", which also holds for what a mapping leaves out, keeps what the file has; what is not
    asked for by name is never made smaller. Raises BadRequest for formats that there are not, and beginnings of no
    matrix's name.
    """
    config = checkpoint.config
    wanted = quantize if isinstance(quantize, Mapping) else {"": quantize}
    _check(checkpoint, wanted)

    def slot(role: str, layer: int, *tensors: str) -> Slot:
        return Slot(role, layer, tensors, reduce(_wider, (_format(checkpoint, name, wanted) for name in tensors)))

    def every() -> Iterator[Slot]:
        yield slot("embed_tokens", -1, "model.embed_tokens.weight")
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for role in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield slot(role, layer, f"{prefix}self_attn.{role}.weight")
            yield slot("gate_up_proj", layer, f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
            yield slot("down_proj", layer, f"{prefix}mlp.down_proj.weight")
        if not config.tie_word_embeddings:
            yield slot("lm_head", -1, "lm_head.weight")

    return list(every())


def _check(checkpoint: Checkpoint, wanted: Mapping[str, str]) -> None:
    for beginning, format in wanted.items():
        if format not in get_args(Quantize):
            of = f" (for {beginning!r})" if beginning else ""
            raise BadRequest(f"quantize must be one of {', '.join(get_args(Quantize))}, not {format!r}{of}")
    wishes.check(checkpoint, wanted)


def _format(checkpoint: Checkpoint, name: str, wanted: Mapping[str, str]) -> str:
    tensor = checkpoint.tensors[name]
    beginning = wishes.beginning(name, wanted)
    wish = "auto" if beginning is None else wanted[beginning]
    is_such = tensor.dtype in _SPARING.get(wish, ())
    if wish == "auto" or (wish == "q4" and is_such):
        format = _KEEPS.get(tensor.dtype, "q8")
    elif wish in _SPARING and not is_such and wishes.is_outer(name, beginning):
        format = "q8"
    else:
        format = wish
    if format in ("int8", "llm-int8") and tensor.shape[1] > _LONGEST_INT8_ROW:
        raise BadRequest(
            f"{checkpoint.path}: {name} has rows of {tensor.shape[1]} weights, too long for {format}; q8 takes them"
        )
    return format


def _wider(a: str, b: str) -> str:
    """What holds both; of two types of one width neither holds the other."""
    if {a, b} == {"int8", "llm-int8"}:
        return "llm-int8"  # which holds the same weights
    if a != b and _WIDTHS[a] == _WIDTHS[b]:
        return "f32"
    return max(a, b, key=_WIDTHS.__getitem__)
