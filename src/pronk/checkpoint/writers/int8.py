"""Matrices in int8 with one scale a row, laid out as bitsandbytes (llm-int8) and compressed-tensors (int8) have them.

Both keep the layers' matrices so and leave embeddings, lm_head and vectors as they are; quantization.py reads them and
says what they look like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.readers import int8_rows
from pronk.checkpoint.readers.int8_rows import LAYOUTS, Floats, Int8s
from pronk.checkpoint.tensor_stream import TensorStream
from pronk.checkpoint.tensors import PLAIN_DTYPES, Checkpoint
from pronk.checkpoint.writers.numbers import require_finite
from pronk.errors import BadRequest
from pronk.formats import FORMATS, Format, kept, packed
from pronk.formats.quantize import INT8_THRESHOLD, quantize
from pronk.formats.turn import together

_PIECE = 1 << 18  # weights that are quantized at once


def assign(checkpoint: Checkpoint, format: Format) -> dict[str, str]:
    """For each tensor the type it is written in. Embeddings and a head in blocks become F16: of what the blocks hold it
    rounds off less than a tenth of what they had rounded off, and in F32 a step would read twice as much."""
    types = {}
    for name, tensor in checkpoint.tensors.items():
        in_layer = len(tensor.shape) == 2 and name.startswith("model.layers.")
        types[name] = (
            _kind(format, tensor.dtype) if in_layer else tensor.dtype if tensor.dtype in PLAIN_DTYPES else "F16"
        )
    return types


def _kind(format: Format, stored: str) -> str:
    """Codes that there are stay as they are. New ones are not of turned rows: who reads this layout and takes no notice
    of transforms, as transformers does, would make nonsense of them without a word."""
    own = packed(format.name, stored)
    plain = next((kind for kind in FORMATS.values() if kind.kind_of == format.name), format)
    return (own if own.holds(stored) else plain).stored[0]


def quantization_config(
    checkpoint: Checkpoint, types: Mapping[str, str], format: Format, threshold: float | None
) -> dict[str, Any]:
    """What config.json says of it, whose tensors are of `types`. Raises BadRequest for a threshold that bitsandbytes
    means something else by."""
    method, head = LAYOUTS[format.stored[0]].method, "score" if checkpoint.config.num_labels else "lm_head"
    if method == "bitsandbytes":
        threshold = INT8_THRESHOLD if threshold is None else float(threshold)
        if not threshold > 0:
            raise BadRequest(
                f"a threshold of {threshold:g} cannot be saved: to bitsandbytes 0 means none; give it when loading"
            )
        return {
            "quant_method": method,
            "load_in_8bit": True,
            "load_in_4bit": False,
            "llm_int8_threshold": 0.0 if threshold == math.inf else threshold,
            "llm_int8_skip_modules": [head],
            "llm_int8_enable_fp32_cpu_offload": False,
            "llm_int8_has_fp16_weight": False,
        }
    if threshold is not None:
        raise BadRequest(f"a threshold is llm-int8's; {format.name} has none")
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": method,
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": [head],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    } | _transforms(checkpoint, types)


def _transforms(checkpoint: Checkpoint, types: Mapping[str, str]) -> dict[str, Any]:
    """What is turned, on either side of its products: modules by the size of their blocks."""
    modules = dict[int, list[str]]()
    for name, kind in types.items():
        if kind in LAYOUTS and LAYOUTS[kind].turned and (block := together(checkpoint.tensors[name].shape[1])) > 1:
            modules.setdefault(block, []).append(name.removesuffix(".weight"))
    if not modules:
        return {}
    groups = {
        f"turned_{block}": {
            "type": "hadamard",
            "head_dim": block,
            "randomize": False,
            "requires_grad": False,
            "apply": [
                {"targets": targets, "location": "input", "inverse": False, "ignore": []},
                {"targets": targets, "location": "weight_input", "inverse": True, "ignore": []},
            ],
        }
        for block, targets in modules.items()
    }
    return {"transform_config": {"config_groups": groups}}


def layout(name: str, shape: tuple[int, ...], kind: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that make one of type `kind`, as LAYOUTS has it: name -> type and shape, the codes first."""
    module, row = name.removesuffix("weight"), LAYOUTS[kind]
    parts = {name: ("I8", shape), module + row.scale: ("F32", (shape[0], 1) if row.column else shape[:1])}
    return parts | ({module + row.companion: ("U8", ())} if row.marked else {})


def rows(stream: TensorStream, name: str, kind: str) -> Iterator[tuple[Floats, Int8s]]:
    """Scales and codes of a matrix of type `kind`, some rows at a time: those that it has, where it has them."""
    format = kept(kind)
    for piece in stream.rows(name, format.stored, most=_PIECE):
        if piece.dtype == np.uint8:
            yield int8_rows.split(piece)
            continue
        require_finite(name, piece, "int8")
        quantized = quantize(piece, format.name)
        yield quantized.scale.astype(np.float32, copy=False), quantized.q.view(np.int8)


def companions(name: str, kind: str, scale: Floats) -> dict[str, NDArray[Any]]:
    """What stands beside the codes, by name."""
    module, row = name.removesuffix("weight"), LAYOUTS[kind]
    stored = _times(scale, np.float32(row.steps))
    parts: dict[str, NDArray[Any]] = {module + row.scale: stored[:, None] if row.column else stored}
    return parts | ({module + row.companion: np.zeros((), np.uint8)} if row.marked else {})


def _times(scale: Floats, steps: np.float32) -> Floats:
    """What divided by `steps` is the scale. There is always such a number where the scale came of one; of other scales
    one in 128 has none, and gets the nearest."""
    with np.errstate(over="ignore"):
        near = scale * steps
    best = near
    for candidate in (np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))):
        better = (candidate / steps == scale) & (best / steps != scale)
        best = np.where(better, candidate, best)
    largest: Floats = np.minimum(best, np.finfo(np.float32).max)
    return largest
