"""Checkpoint: what every reader gives, whatever the format: a config and lazy tensors under Hugging Face names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from pronk.checkpoint.generation_config import GenerationConfig
from pronk.config import ModelConfig
from pronk.errors import BadFile, Unsupported
from pronk.tokenizer.vocabulary import TokenizerSource

# Types that hold one number an element, and numpy's name for each. Everything else is a block type (Q4_K, ...).
PLAIN_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# What containers hold besides: codes, which mean nothing without their scales, and which `read` therefore refuses.
CODE_DTYPES = ("I8", "U8")

# The bits that are all set in infinities and NaNs alone. numpy's isfinite takes ten times as long over 16-bit types.
_EXPONENTS = {
    PLAIN_DTYPES["F32"]: np.uint32(0x7F800000),
    PLAIN_DTYPES["F16"]: np.uint16(0x7C00),
    PLAIN_DTYPES["BF16"]: np.uint16(0x7F80),
}
_PIECE = 1 << 18  # elements that are looked at together: few enough to stay in a core's cache

EMBEDDING, HEAD, SCORE = "model.embed_tokens.weight", "lm_head.weight", "score.weight"

# Called while tensors are gone through: the name of one, stored bytes done, stored bytes in all.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LazyTensor:
    """A tensor in a file: described without being read.

    `read()` gives the numbers, row-major and RoPE in half-split layout: in the stored type for F32, F16 and BF16 (a
    read-only view of the memory map wherever that is possible), in float32 for block types.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str  # "F32", "F16", "BF16", "Q4_0", ..., "I8" (llama2.c's int8 groups), "INT8" and its like (int8_rows.py)
    nbytes: int  # as stored
    read: Callable[[], NDArray[Any]]
    # Block types only: the stored blocks, uint8 [rows, bytes per row], rows in the same order as `read()` gives them. A
    # row of INT8 or its like is its scale, a little-endian float32, and then an int8 for each weight. Of codes without
    # scales: the bytes, in the tensor's own shape.
    read_blocks: Callable[[], NDArray[np.uint8]] | None = None
    # Where the bytes stand, in containers that may give one place to several tensors.
    place: tuple[Path, int] | None = None

    @classmethod
    def made(cls, name: str, shape: tuple[int, ...], read: Callable[[], NDArray[np.float32]]) -> LazyTensor:
        """In float32, of something else."""
        return cls(name, shape, "F32", 4 * math.prod(shape), read)


@dataclass(frozen=True)
class LoadPlan:
    """What loading will take, known before it starts. Bytes."""

    files: int
    stored: int  # weights on disk
    loaded: int  # weights in memory once loaded
    peak: int  # the most that weights take while loading: `loaded` plus the largest tensor


@dataclass(frozen=True)
class Checkpoint:
    path: Path
    format: str  # "huggingface", "meta", "llama2c", "gguf"
    config: ModelConfig
    tensors: Mapping[str, LazyTensor]
    tokenizer: TokenizerSource | None = None
    quantization: str | None = None  # of matrices where blocks are among them, as in "Q4_1 x 210, Q8_0 x 1"
    int8_threshold: float | None = None  # what an LLM.int8() checkpoint says of itself
    files: tuple[Path, ...] = ()  # those that hold weights
    generation: GenerationConfig = field(default_factory=GenerationConfig)

    def plan(self, itemsize: int | None = None, *, head_apart: bool = False) -> LoadPlan:
        """`itemsize`: bytes an element once loaded; None keeps each plain type and makes block types float32.
        `head_apart`: a head that is the embedding is kept a second time, as the torch engine does on CPUs.
        """

        def loaded(tensor: LazyTensor) -> int:
            width = itemsize or PLAIN_DTYPES.get(tensor.dtype, PLAIN_DTYPES["F32"]).itemsize
            return math.prod(tensor.shape) * width

        sizes = [loaded(t) for t in self.tensors.values()]
        stored = sum(t.nbytes for t in self.tensors.values())
        before = sum(sizes)
        tied = self.config.tie_word_embeddings and not self.config.num_labels
        head = loaded(self.tensors[EMBEDDING]) if head_apart and tied else 0
        return LoadPlan(len(self.files), stored, before + head, before + max(sizes, default=0))


def without_head(tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Those of a reward model, whose score stands where others have their lm_head."""
    return {name: tensor for name, tensor in tensors.items() if name != HEAD}


def check_finite(path: str | Path, name: str, array: NDArray[Any]) -> None:
    """Raise BadFile for infinity and NaN in an array of a plain type: some kernels would hide them."""
    exponent = _EXPONENTS[array.dtype]
    bits = array.reshape(-1).view(exponent.dtype)
    for start in range(0, bits.size, _PIECE):
        if (bits[start : start + _PIECE] & exponent == exponent).any():
            raise BadFile(path, "holds infinity or NaN; no trained model does", field=f"tensor {name!r}")


def plain_dtype(path: str | Path, name: str, dtype: str) -> np.dtype[Any]:
    """numpy's type for a stored one. Raises Unsupported for those that containers have and models here do not."""
    if dtype not in PLAIN_DTYPES:
        raise Unsupported(f"{path}: tensor {name!r} is stored as {dtype}; {', '.join(PLAIN_DTYPES)} are supported")
    return PLAIN_DTYPES[dtype]


def check_tensors(path: str | Path, config: ModelConfig, tensors: Mapping[str, LazyTensor]) -> None:
    """Raise BadFile unless `tensors` are exactly those that `config` calls for, in name and shape."""
    expected = config.tensor_shapes()
    if missing := expected.keys() - tensors.keys():
        raise BadFile(path, f"absent ({len(missing)} tensors are)", field=f"tensor {min(missing)!r}")
    if extra := tensors.keys() - expected.keys():
        raise BadFile(path, f"not part of this model ({len(extra)} tensors are not)", field=f"tensor {min(extra)!r}")
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise BadFile(path, f"shape {tensors[name].shape}, but the config says {shape}", field=f"tensor {name!r}")
