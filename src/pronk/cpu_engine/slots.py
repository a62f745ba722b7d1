"""Slots: the weight matrices of a model, the tensors that fill each, and the format that it is packed in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

from pronk import formats
from pronk.checkpoint import prefixes
from pronk.checkpoint.tensors import Checkpoint
from pronk.errors import BadRequest
from pronk.formats import Format

Wish = str | Mapping[str, str]  # a format for all, or for tensors whose names begin so: the longest beginning decides

_LONGEST_INT8_ROW = 1 << 16  # beyond it, sums of products would not fit in 32 bits


@dataclass(frozen=True)
class Slot:
    """A matrix of the model, and the tensor that fills it; gate_proj and up_proj fill one."""

    role: str
    layer: int  # -1: of none
    tensors: tuple[str, ...]
    format: Format


def slots(checkpoint: Checkpoint, quantize: Wish) -> list[Slot]:
    """Every weight matrix. "auto", which also holds for what a mapping leaves out, keeps what the file has; what is not
    asked for by name is never made smaller. Raises BadRequest for formats that there are not, and beginnings of no
    matrix's name.
    """
    config = checkpoint.config
    wanted = quantize if isinstance(quantize, Mapping) else {"": quantize}
    _check(checkpoint, wanted)

    def slot(role: str, layer: int, *tensors: str) -> Slot:
        each = (_format(checkpoint, name, wanted) for name in tensors)
        return Slot(role, layer, tensors, reduce(formats.wider, each))

    def every() -> Iterator[Slot]:
        yield slot("embed_tokens", -1, "model.embed_tokens.weight")
        for layer in range(config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            for role in ("q_proj", "k_proj", "v_proj", "o_proj"):
                yield slot(role, layer, f"{prefix}self_attn.{role}.weight")
            yield slot("gate_up_proj", layer, f"{prefix}mlp.gate_proj.weight", f"{prefix}mlp.up_proj.weight")
            yield slot("down_proj", layer, f"{prefix}mlp.down_proj.weight")
        if config.has_head:
            yield slot("lm_head", -1, "lm_head.weight")

    return list(every())


def _check(checkpoint: Checkpoint, wanted: Mapping[str, str]) -> None:
    known = ("auto", *formats.names(engine="cpu"))
    for prefix, format in wanted.items():
        if format not in known:
            of = f" (for {prefix!r})" if prefix else ""
            raise BadRequest(f"quantize must be one of {', '.join(known)}, not {format!r}{of}")
    prefixes.check(checkpoint, wanted)


def _format(checkpoint: Checkpoint, name: str, wanted: Mapping[str, str]) -> Format:
    tensor, prefix = checkpoint.tensors[name], prefixes.longest(name, wanted)
    asked = "auto" if prefix is None else wanted[prefix]
    format = formats.packed(asked, tensor.dtype, outer=prefixes.is_outer(name, prefix))
    if format.codes and format.codes.group is None and tensor.shape[1] > _LONGEST_INT8_ROW:
        raise BadRequest(
            f"{checkpoint.path}: {name} has rows of {tensor.shape[1]} weights, too long for {format.name}; "
            f"{formats.FALLBACK.name} takes them"
        )
    return format
