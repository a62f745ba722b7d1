"""A format for each matrix, told by the beginnings of tensor names: {"": "q8", "model.layers.0.": "bf16"}.

The longest beginning decides; "" is for all others. `--quantize` and the types of a GGUF file are wished for like this.
"""

from __future__ import annotations

from collections.abc import Iterable

from pronk.checkpoint.tensors import Checkpoint
from pronk.errors import BadRequest

_OUTER = ("model.embed_tokens.weight", "lm_head.weight")


def beginning(name: str, wishes: Iterable[str]) -> str | None:
    """The one that decides about this tensor; None where none does."""
    return max((wish for wish in wishes if name.startswith(wish)), key=len, default=None)


def is_outer(name: str, beginning: str | None) -> bool:
    """Whether this is the table of embeddings or lm_head, and not wished for by name: what schemes that would cost too
    much quality there leave alone."""
    return name in _OUTER and name.removesuffix(".weight") not in (beginning or "")


def check(checkpoint: Checkpoint, wishes: Iterable[str]) -> None:
    """Raise BadRequest for a beginning of no matrix's name."""
    matrices = [name for name, tensor in checkpoint.tensors.items() if len(tensor.shape) == 2]
    for wish in wishes:
        if not isinstance(wish, str) or not any(name.startswith(wish) for name in matrices):
            raise BadRequest(
                f"{checkpoint.path}: no weight matrix's name begins with {wish!r}; the first is {matrices[0]}"
            )
