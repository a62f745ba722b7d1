"""Adapters as GGUF files, which llama.cpp applies (`--lora FILE`): read for one model, and written.

general.type "adapter", adapter.type "lora", adapter.lora.alpha         one alpha: b @ a is scaled by alpha / rank
blk.0.attn_q.weight.lora_a   [rank, K]      blk.0.attn_q.weight.lora_b   [N, rank], rows as GGUF's weight has them
token_embd.weight.lora_a     [V, rank]      token_embd.weight.lora_b     [K, rank]: of the table's transpose

Layout: llama.cpp's src/llama-adapter.cpp. A file has one alpha for all modules: where an adapter has several, they are
in the numbers of its b.
"""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from pronk import system
from pronk.checkpoint.adapter import HIGHEST_RANK, Adapter, Floats, LowRank, misfit
from pronk.checkpoint.containers import gguf_blocks
from pronk.checkpoint.containers.gguf_file import (
    DEFAULT_ALIGNMENT,
    FILE_TYPES,
    FLOAT32,
    STRING,
    UINT32,
    GgufFile,
    TensorInfo,
    open_file,
)
from pronk.checkpoint.readers.names import gguf_to_hf, hf_to_gguf, rotary_heads, to_half_split, to_interleaved
from pronk.checkpoint.tensors import EMBEDDING, HEAD, PLAIN_DTYPES, SCORE, Checkpoint, check_finite
from pronk.checkpoint.writers.gguf_header import Pair, header, printable
from pronk.checkpoint.writers.numbers import write_numbers
from pronk.config import ModelConfig
from pronk.errors import BadFile, Unsupported, short

_ALPHA, _ALORA = "adapter.lora.alpha", "adapter.alora.invocation_tokens"


def read(path: Path, checkpoint: Checkpoint) -> Adapter:
    """The adapter in a file, for this model. Raises BadFile and Unsupported."""
    file = open_file(path)
    alpha, config, shapes = _alpha(file), checkpoint.config, checkpoint.config.tensor_shapes()
    need = sum(4 * math.prod(info.shape) for info in file.tensors.values())
    system.check_memory(need, f"{path}: reading it", "take an adapter of a lower rank")
    left, products = dict(file.tensors), {}
    for module, (rows, columns) in ((n[: -len(".weight")], s) for n, s in shapes.items() if len(s) == 2):
        name = hf_to_gguf(f"{module}.weight")
        first, second = left.pop(f"{name}.lora_a", None), left.pop(f"{name}.lora_b", None)
        if first is None and second is None:
            continue
        if first is None or second is None:
            missing = f"{name}.lora_{'b' if second is None else 'a'}"
            raise BadFile(path, "absent, where its other half is there", field=f"tensor {missing!r}")
        table = f"{module}.weight" == EMBEDDING
        rank = second.shape[-1]
        if rank > HIGHEST_RANK:
            raise Unsupported(f"{path}: a rank of {rank} is not supported; at most {HIGHEST_RANK} is")
        a = _numbers(file, first, (rows, rank) if table else (rank, columns))
        b = _numbers(file, second, (columns, rank) if table else (rows, rank))
        if table:
            a, b = np.ascontiguousarray(b.T), a
        if heads := rotary_heads(f"{module}.weight", config):
            b = to_half_split(b, heads)
        products[module] = LowRank(a, b, alpha / rank if alpha else 1.0)
    if left:
        raise _foreign(file, left[min(left)], config)
    if not products:
        raise BadFile(path, "an adapter without any tensor")
    return Adapter(path, products, {}, sum(2 * (product.a.size + product.b.size) for product in products.values()))


def check(adapter: Adapter, config: ModelConfig) -> None:
    """Raises Unsupported, by name, for what llama.cpp would leave out, or end over."""
    if SCORE in adapter.replaced:
        raise Unsupported(
            f"{adapter.path}: a reward model's adapter, for whose score llama.cpp's adapters have no place: "
            "keep it beside BASE (pronk score BASE --adapter), or merge it with PEFT"
        )
    if adapter.replaced:
        raise Unsupported(
            f"{adapter.path}: holds {min(adapter.replaced)}, trained whole; llama.cpp's adapters hold LoRA alone: "
            "merge it (pronk merge BASE ADAPTER DST.gguf)"
        )
    if any(product.magnitude is not None for product in adapter.products.values()):
        raise Unsupported(
            f"{adapter.path}: is DoRA; llama.cpp's adapters hold LoRA alone: merge it (pronk merge BASE ADAPTER "
            "DST.gguf)"
        )
    ends = {name.removesuffix(".weight") for name in (EMBEDDING, HEAD)}
    if config.tie_word_embeddings and (tied := ends & adapter.products.keys()):
        raise Unsupported(
            f"{adapter.path}: has LoRA of {min(tied)}, and the head of this model is its embedding; llama.cpp applies "
            "none to a matrix of both: merge it (pronk merge BASE ADAPTER DST.gguf)"
        )


def write(file: BinaryIO, adapter: Adapter, config: ModelConfig, dtype: str, name: str) -> None:
    """`dtype`: "F32", "F16" or "BF16", of all numbers. Raises what `check` raises, and Unsupported for numbers that the
    type cannot hold."""
    check(adapter, config)
    # The scale times the rank is a module's alpha, as llama.cpp counts; rsLoRA's and patterns' are no exception.
    alphas = {module: np.float32(product.scale * len(product.a)) for module, product in adapter.products.items()}
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    arrays: dict[str, tuple[str, Floats]] = {}
    for module, product in adapter.products.items():
        full, a, b = f"{module}.weight", product.a, product.b
        if alphas[module] != alpha:
            b = (b * (product.scale * len(a) / float(alpha))).astype(np.float32)
        if heads := rotary_heads(full, config):
            b = to_interleaved(b, heads)
        if full == EMBEDDING:
            a, b = b, a.T
        arrays[f"{hf_to_gguf(full)}.lora_a"], arrays[f"{hf_to_gguf(full)}.lora_b"] = (full, a), (full, b)
    pairs: list[Pair] = [
        ("general.architecture", STRING, "llama"),
        ("general.type", STRING, "adapter"),
        ("general.name", STRING, printable(name)),
        ("general.file_type", UINT32, FILE_TYPES[dtype]),
        ("adapter.type", STRING, "lora"),
        (_ALPHA, FLOAT32, float(alpha)),
    ]
    head, _ = header(pairs, {name: (array.shape, dtype) for name, (_, array) in arrays.items()})
    file.write(head)
    for full, array in arrays.values():
        file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))
        write_numbers(file, full, array, dtype)
    file.write(b"\0" * (-file.tell() % DEFAULT_ALIGNMENT))


def _alpha(file: GgufFile) -> float:
    """Its alpha; 0 where it has none, which llama.cpp takes for a scale of 1."""
    path, metadata = file.path, file.metadata
    if (architecture := metadata.get("general.architecture")) != "llama":
        raise Unsupported(f"{path}: architecture {short(architecture)} is not supported; 'llama' is")
    if (kind := metadata.get("general.type")) != "adapter":
        raise BadFile(path, f"is {short(kind)}, no 'adapter'", field="metadata 'general.type'")
    if (kind := metadata.get("adapter.type")) != "lora":
        raise Unsupported(f"{path}: adapter.type={short(kind)} is not supported; 'lora' is")
    if metadata.get(_ALORA):
        raise Unsupported(f"{path}: {_ALORA} is not supported: an adapter here is applied to all of a text")
    alpha = metadata.get(_ALPHA, 0.0)
    if not isinstance(alpha, float) or not math.isfinite(alpha) or alpha < 0:
        offset = file.offsets[_ALPHA]
        raise BadFile(
            path, f"must be a positive number, not {short(alpha)}", field=f"metadata {_ALPHA!r}", offset=offset
        )
    return alpha


def _numbers(file: GgufFile, info: TensorInfo, shape: tuple[int, int]) -> Floats:
    if info.shape != shape:
        problem = misfit(info.shape, shape)
        raise BadFile(file.path, problem, field=f"tensor {info.name!r}", offset=info.described_at)
    array: NDArray[Any]
    if info.dtype in PLAIN_DTYPES:
        array = file.numbers(info)
    elif info.dtype in gguf_blocks.BLOCK_TYPES:
        array = gguf_blocks.decode(info.dtype, file.blocks(info))
    else:
        raise Unsupported(f"{file.path}: tensor {info.name!r} of type {info.dtype} is not supported")
    check_finite(file.path, info.name, array)
    return array.astype(np.float32)


def _foreign(file: GgufFile, info: TensorInfo, config: ModelConfig) -> Exception:
    """What is wrong with a tensor that no module of this model takes."""
    known = gguf_to_hf(info.name)
    if known is not None and known in config.tensor_shapes():
        return Unsupported(f"{file.path}: holds {info.name}, trained whole, which is not supported; LoRA is")
    problem = "belongs to no module of this model: it is another model's adapter"
    return BadFile(file.path, problem, field=f"tensor {short(info.name)}", offset=info.described_at)
