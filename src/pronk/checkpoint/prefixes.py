"""A format for each matrix, told by the beginnings of tensor names: {"": "q8", "model.layers.0.": "bf16"}.

The longest beginning decides; "" is for all others. `--quantize` and the types of a GGUF file are asked for like this.
"""

from __future__ import annotations

from collections.abc import Iterable

from pronk.checkpoint.tensors import EMBEDDING, HEAD, Checkpoint
from pronk.errors import BadRequest


def longest(name: str, prefixes: Iterable[str]) -> str | None:
    """The one that decides about this tensor; None where none does."""
    return max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)


def is_outer(name: str, prefix: str | None) -> bool:
    """Whether this is the table of embeddings or lm_head, and `prefix`, which decides about it, does not name it: then
    formats that would cost too much quality there leave it in another."""
    return name in (EMBEDDING, HEAD) and name.removesuffix(".weight") not in (prefix or "")


def check(checkpoint: Checkpoint, prefixes: Iterable[str]) -> None:
    """Raise BadRequest for a beginning of no matrix's name."""
    matrices = [name for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2]
    for prefix in prefixes:
        if not isinstance(prefix, str) or not any(name.startswith(prefix) for name in matrices):
            raise BadRequest(
                f"{checkpoint.path}: no weight matrix's name begins with {prefix!r}; the first is {matrices[0]}"
            )
